//! A disk's second copy on another datastore, by policy: kept over kills, reported, equal in the end.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use vmseal_tests::counting_guest::{count, read_marker_of_disk, stop_counting, write_marker};
use vmseal_tests::eventually;
use vmseal_tests::exposed::Exposed;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::process::kill_hard;
use vmseal_tests::rest;
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::two_hosts::{self, HERE, THERE};

const FILTER: &str = "vmseal-filter";

/// The value of a metric of the host's only disk.
fn metric(here: &Installation, name: &str) -> Option<f64> {
    let told = rest::scrape(here, "/metrics/hosts/here").ok()?;
    let line = told.lines().find(|line| line.starts_with(&format!("{name}{{")))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// Waits until the replica has all that the disk has.
fn caught_up(here: &Installation) {
    eventually("the replica has caught up", || {
        let dirty = metric(here, "vmseal_disk_replica_dirty_bytes")?;
        let lag = metric(here, "vmseal_disk_replica_lag_seconds")?;
        (dirty == 0.0 && lag < 60.0).then_some(())
    })
    .unwrap();
}

/// The same, as its filter says now.
fn is_shown_caught_up(here: &Installation) {
    is_caught_up_on(here, "second");
}

/// The same of a replica on this datastore.
pub(crate) fn is_caught_up_on(here: &Installation, datastore: &str) {
    eventually("the replica has caught up, as it is shown", || {
        let shown = here.json(&["disk", "replica", "web", "disk0"]).ok()?;
        assert_eq!(shown["datastore"], datastore, "{shown}");
        let lag = shown["lag_milliseconds"].as_u64()?;
        (shown["dirty_bytes"] == 0 && lag < 60_000).then_some(())
    })
    .unwrap();
}

pub(crate) fn is_equal(image: &PathBuf, replica: &PathBuf) -> bool {
    std::fs::read(image).unwrap() == std::fs::read(replica).unwrap()
}

/// Makes the guest count, which it does after it has written and flushed.
pub(crate) fn count_on(here: &Installation, before: u32) -> u32 {
    let mut console = here.console("web").unwrap();
    console.type_text("r").unwrap();
    loop {
        let count = console.next_count().unwrap();
        if count > before {
            return count;
        }
    }
}

#[test]
fn a_replica_survives_kills_of_filter_and_agent_and_equals_the_disk_in_the_end() {
    let mut here = Installation::new().unwrap();
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let place = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&place).unwrap();
    let copied = ["policy", "create", "copied", "--encrypt", "--replicate-to"];
    let refused = here.refused(&[&copied[..], &["nowhere"]].concat()).unwrap();
    assert!(refused.contains("nowhere"), "{refused}");
    let rate = ["second", "--replicate-rate", "64MiB"];
    here.vmseal(&[&copied[..], &rate].concat()).unwrap();
    let open = ["policy", "create", "copied-open", "--plain", "--replicate-to"];
    here.vmseal(&[&open[..], &rate].concat()).unwrap();
    here.create_counter("web", "copied-open").unwrap();
    let said = here.vmseal(&["vm", "show", "web"]).unwrap();
    assert!(said.contains("replicated to second at 64.0 MiB/s at most"), "{said}");

    let image = here.images("web").unwrap().remove(0);
    let vm = image.parent().unwrap().file_name().unwrap();
    let replica = second.join(vm).join(image.with_extension("replica").file_name().unwrap());
    let header = |path| std::fs::read(path).unwrap()[..4096].to_vec();

    assert_eq!(here.boot_counter("web").unwrap(), 1);
    caught_up(&here);
    assert_eq!(header(&replica), header(&image), "it does not begin as the image does");

    // Encrypted while its guest runs, the disk gets another replica, of ciphertext; the former one is gone.
    let planned = here.try_vmseal(&["vm", "encrypt", "web", "--dry-run"]).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(warned.contains("second copy"), "{warned}");
    here.vmseal(&["vm", "encrypt", "web"]).unwrap();
    assert_eq!(header(&replica), header(&image), "its replica is not that of the copy");
    assert_eq!(header(&replica)[..4], *b"LUKS");
    let left = std::fs::read_dir(replica.parent().unwrap()).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| text(name.as_ref()).unwrap().contains("former")), "{left:?}");
    caught_up(&here);
    assert!(metric(&here, "vmseal_disk_replica_copied_bytes_total").unwrap() > 0.0);
    let filter = here.processes_of("web", FILTER).unwrap()[0];
    let count = count_on(&here, 1);
    kill_hard(filter);
    here.wait_alarm("web", "filter-restarted").unwrap();
    let count = count_on(&here, count);
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_power("web", "running").unwrap();
    let count = count_on(&here, count);

    // Backups and snapshots put layers above the image, and merge them; another key opens both; the disk grows. The replica stays right.
    let backups = here.path("backups");
    std::fs::create_dir(&backups).unwrap();
    here.vmseal(&["backup", "create", "web", "one", "--to", text(&backups).unwrap()]).unwrap();
    here.vmseal(&["snapshot", "create", "web", "first"]).unwrap();
    let backed_up = count_on(&here, count);
    here.vmseal(&["backup", "create", "web", "two"]).unwrap();
    count_on(&here, backed_up);
    here.vmseal(&["snapshot", "delete", "web", "first"]).unwrap();
    here.vmseal(&["vm", "recrypt", "web"]).unwrap();
    here.vmseal(&["disk", "resize", "web", "disk0", "--size", "96MiB"]).unwrap();
    assert!(image.metadata().unwrap().len() > 96 << 20, "its image is as short as it was");
    is_shown_caught_up(&here);
    // Its agent looks now and then.
    here.wait_no_alarm("web", "replica-behind").unwrap();
    let watched = here.path("watched");
    let mut watch = here.command().unwrap();
    watch.args(["disk", "replica", "web", "disk0", "--watch"]);
    let mut watch = watch.stdout(File::create(&watched).unwrap()).spawn().unwrap();
    eventually("somebody sees it", || {
        let told = std::fs::read_to_string(&watched).ok()?;
        told.lines().any(|line| line.starts_with("listed") && line.contains("second")).then_some(())
    })
    .unwrap();
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    let ended = eventually("the watch ends", || watch.try_wait().unwrap()).unwrap();
    assert_eq!(ended.code(), Some(4), "a VM that is off is in no state to be followed");
    assert!(is_equal(&image, &replica), "the map says that they are equal");
    let off = here.refused(&["disk", "replica", "web", "disk0"]).unwrap();
    assert!(off.contains("while its VM is off"), "{off}");

    // The new key opens both, and nothing is copied again for that.
    let map = image.with_extension("map");
    let before = std::fs::read(&map).unwrap();
    here.vmseal(&["vm", "recrypt", "web", "--provider", "keys"]).unwrap();
    assert!(is_equal(&image, &replica));
    assert_eq!(std::fs::read(&map).unwrap(), before);

    let scan = here.json(&["datastore", "scan", "second"]).unwrap();
    let statuses: Vec<_> =
        scan["images"].as_array().unwrap().iter().map(|it| it["status"].clone()).collect();
    assert_eq!(statuses, [Value::from("in_use")], "{scan}");

    // Without its second datastore the guest runs, and what it writes is not taken for copied.
    let away = here.path("away");
    std::fs::rename(&second, &away).unwrap();
    here.vmseal(&["vm", "start", "web"]).unwrap();
    let told = here.wait_alarm("web", "replica-behind").unwrap();
    assert!(told.contains("without its replica"), "{told}");
    let unwritten = here.refused(&["disk", "replica", "web", "disk0"]).unwrap();
    assert!(unwritten.contains("without its replica"), "{unwritten}");
    assert!(std::fs::read(&map).unwrap().is_empty(), "its map is believed");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    std::fs::rename(&away, &second).unwrap();
    let count = here.boot_counter("web").unwrap();
    here.wait_no_alarm("web", "replica-behind").unwrap();
    count_on(&here, count);
    caught_up(&here);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    assert!(is_equal(&image, &replica));

    // A tool's writes are not missed either, though nobody waits until they are copied.
    let exposed = Exposed::start(&here, "web", &["--writable"]).unwrap();
    let write = ["-f", "raw", "-c", "write -P 90 7M 64k", "-c", "flush", &exposed.uri];
    assert!(Command::new("qemu-io").args(write).status().unwrap().success());
    exposed.interrupt().unwrap();
    here.boot_counter("web").unwrap();
    caught_up(&here);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    assert!(is_equal(&image, &replica));

    // What a backup puts in the image's place is copied, too.
    here.vmseal(&["backup", "restore", "web", "two"]).unwrap();
    let count = here.boot_counter("web").unwrap();
    assert_eq!(count, backed_up + 1, "the guest is not where it was backed up");
    is_shown_caught_up(&here);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    assert!(is_equal(&image, &replica));

    // The purpose of a replica: the image is lost, and the guest goes on where it was.
    let home = image.parent().unwrap();
    std::fs::remove_dir_all(home).unwrap();
    std::fs::create_dir(home).unwrap();
    std::fs::copy(&replica, &image).unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), count + 1);
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    assert!(here.datastore_entries(&second).unwrap().is_empty());
    assert!(here.datastore_entries(&here.path("datastore")).unwrap().is_empty());
}

/// Has the guest be sent to this host, slowly, until nothing is copied to its replica any more. Returns the task.
fn sent_slowly(here: &Installation, host: &str) -> String {
    let task = here.json(&["vm", "migrate", "web", host, "--rate", "1M", "--no-wait"]).unwrap();
    eventually("the replica is left", || {
        let told = here.refused(&["disk", "replica", "web", "disk0"]).ok()?;
        told.contains("sent to another host").then_some(())
    })
    .unwrap();
    task["id"].as_str().unwrap().to_owned()
}

/// The guest writes this, once, to where it writes nothing else.
fn write_once(console: &mut Console, what: &str) {
    let write =
        format!("echo {what} | dd of=/dev/vda bs=1M seek=62 conv=notrunc 2>/dev/null; sync");
    run(console, &format!("{write}; echo ONCE-$((6 * 7))"), "ONCE-42").unwrap();
}

/// The guest goes to another host; the next time it is sent, that is given up. What it wrote meanwhile is in the replica when it has caught up.
#[test]
fn a_replica_goes_on_at_the_host_that_the_running_guest_goes_to() {
    let mut here = Installation::new().unwrap();
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let (store, second) = (here.path("datastore"), text(&second).unwrap().to_owned());
    here.vmseal(&["datastore", "add", "second", "--host", HERE, "--path", second.as_str()])
        .unwrap();
    let copied = ["policy", "create", "copied", "--encrypt", "--replicate-to", "second"];
    here.vmseal(&[&copied[..], &["--replicate-rate", "64MiB"]].concat()).unwrap();
    shell_guest::start(&here, "web", "copied", &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write_marker(&mut console);
    is_shown_caught_up(&here);
    let image = here.images("web").unwrap().remove(0);
    let vm = image.parent().unwrap().file_name().unwrap();
    let replica = PathBuf::from(&second).join(vm);
    let replica = replica.join(image.with_extension("replica").file_name().unwrap());

    here.add_host(THERE).unwrap();
    let share = |name: &str, path: &str| {
        here.vmseal(&["datastore", "share", name, "--host", THERE, "--path", path]).unwrap();
    };
    share("local", text(&store).unwrap());
    let refused = here.refused(&["vm", "migrate", "web", THERE, "--dry-run"]).unwrap();
    assert!(refused.contains("datastore share second --host there"), "{refused}");
    share("second", second.as_str());
    here.vmseal(&["vm", "pause", "web"]).unwrap();
    let refused = here.refused(&["vm", "migrate", "web", THERE]).unwrap();
    assert!(refused.contains("vmseal vm unpause web"), "{refused}");
    here.vmseal(&["vm", "unpause", "web"]).unwrap();
    let planned = here.try_vmseal(&["vm", "migrate", "web", THERE, "--dry-run"]).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(warned.contains("replica-behind"), "{warned}");

    drop(console);
    for (host, stays) in [(THERE, false), (HERE, true)] {
        let task = sent_slowly(&here, host);
        let mut console = here.console("web").unwrap();
        count(&mut console);
        write_once(&mut console, &format!("SENT-TO-{host}"));
        drop(console);
        if stays {
            here.vmseal(&["task", "cancel", &task]).unwrap();
            assert!(!here.try_vmseal(&["task", "wait", &task]).unwrap().status.success());
        } else {
            here.vmseal(&["task", "set", &task, "--rate", "1G"]).unwrap();
            here.vmseal(&["task", "wait", &task]).unwrap();
        }
        assert_eq!(two_hosts::only_host(&here, "web").unwrap(), THERE);
        let mut console = here.console("web").unwrap();
        stop_counting(&mut console);
        read_marker_of_disk(&mut console);
        drop(console);
        is_shown_caught_up(&here);
        here.wait_no_alarm("web", "replica-behind").unwrap();
        here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
        assert!(is_equal(&image, &replica), "its replica lacks what it wrote on its way to {host}");
        if !stays {
            here.vmseal(&["vm", "start", "web"]).unwrap();
            drop(booted(&here, "web").unwrap());
            is_shown_caught_up(&here);
        }
    }
}
