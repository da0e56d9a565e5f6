//! A VM on a pool of a real Ceph cluster that two hosts have from the server: it moves between them while it runs, is off or suspended, with
//! its snapshots and without a copy of a disk, and at each instant at most one of them can write its image.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmseal_tests::ceph::{is_installed, said};
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::counting_guest::{
    MARKER, count, read_marker_of_disk, stop_counting, write_marker,
};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::held_steps::without_holding;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, image, run};
use vmseal_tests::two_hosts::{self, FILTER, HERE, QEMU, THERE, other};

pub(crate) const VM: &str = "web";
pub(crate) const DISK: &str = "system";

/// A place of the disk that the guest's system does not use, in MiB from the beginning.
pub(crate) const TEXT_AT: u32 = 62;

/// What the guest writes there before its snapshot, and after it.
pub(crate) const BEFORE: &str = "TEXT-BEFORE";
pub(crate) const AFTER: &str = "TEXT-AFTER";

/// Two hosts that have the pool, and where each mounts it.
struct Bench {
    ceph: CephInstallation,
    there: PathBuf,
}

impl Bench {
    fn new(pool: &str) -> Self {
        let options = Options { messenger: "secure", erasure_coded: false, key_at_server: true };
        let mut ceph = CephInstallation::shared(pool, options);
        let there = ceph.add_host(THERE);
        Self { ceph, there }
    }

    /// Where a host mounts the pool.
    fn mounted(&self, host: &str) -> &Path {
        if host == HERE { &self.ceph.mounted } else { &self.there }
    }

    /// What the cluster knows the process by that serves the pool to a host: the end of its address.
    fn client(&self, host: &str) -> String {
        let run = if host == HERE { "run".to_owned() } else { format!("run-{host}") };
        let files = std::fs::read_dir(self.ceph.here.path(&run).join("rbd")).unwrap().flatten();
        // The other one is its log.
        let mut records = files.map(|it| it.path()).filter(|it| it.extension().is_none());
        let record = std::fs::read_to_string(records.next().unwrap()).unwrap();
        end_of_address(record.lines().next_back().unwrap())
    }

    /// What `rbd` says.
    fn rbd(&self, words: &[&str]) -> String {
        let output = self.ceph.cluster.rbd(words);
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The image of the VM's disk: the only one of a disk, or of the copy of one.
    fn image(&self) -> String {
        let is_of_disk = |image: &String| {
            // A layer may have no path.
            let told = self.ceph.cluster.rbd(&["image-meta", "get", image, "vmseal.path"]);
            let path = String::from_utf8(told.stdout).unwrap();
            [".raw", ".copy"].iter().any(|it| path.contains(it))
        };
        let mut images: Vec<_> = self.ceph.images().into_iter().filter(is_of_disk).collect();
        assert_eq!(images.len(), 1, "{images:?}");
        images.remove(0)
    }

    /// Who has the exclusive lock of an image.
    fn owners(&self, image: &str) -> Vec<String> {
        let listed = self.rbd(&["lock", "ls", image]);
        let lines = listed.lines().map(str::trim).filter(|line| line.starts_with("client."));
        lines.map(end_of_address).collect()
    }

    /// Who has an image open to be written.
    fn watchers(&self, image: &str) -> Vec<String> {
        let status = self.rbd(&["status", image]);
        let watchers = status.split_whitespace().filter_map(|word| word.strip_prefix("watcher="));
        watchers.map(end_of_address).collect()
    }

    /// The VM is at this host, where its guest does not run, and nobody has its image.
    fn rests_on(&self, host: &str, power: &str, image: &str) {
        let vm = self.ceph.here.vm(VM).unwrap();
        assert_eq!((&vm["host"], &vm["power"]), (&host.into(), &power.into()), "{vm}");
        for (host, name) in [(HERE, QEMU), (HERE, FILTER), (THERE, QEMU), (THERE, FILTER)] {
            let left =
                || two_hosts::processes(&self.ceph.here, host, name).is_empty().then_some(());
            eventually(&format!("no {name} is left on {host}"), left).unwrap();
        }
        assert_eq!(self.image(), image, "its disk is another image");
        self.is_free(image);
    }

    /// No host has an image.
    fn is_free(&self, image: &str) {
        eventually("no host has the image", || {
            (self.owners(image).is_empty() && self.watchers(image).is_empty()).then_some(())
        })
        .unwrap();
    }

    /// The VM runs on this host alone, which has the lock of its image. The other host has not, and cannot open the image to write it.
    fn runs_on(&self, host: &str) {
        let here = &self.ceph.here;
        assert_eq!(two_hosts::only_host(here, VM).unwrap(), host);
        let vm = here.vm(VM).unwrap();
        assert_eq!(vm["disks"][0]["datastore"], "ceph", "{vm}");
        let (image, client) = (self.image(), self.client(host));
        assert_ne!(client, self.client(other(host)));
        eventually("the other host has closed the image", || {
            (self.watchers(&image) == [client.as_str()]).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}: {}", self.rbd(&["status", &image])));
        assert_eq!(self.owners(&image), [client]);
        let home = self.mounted(other(host)).join(vm["id"].as_str().unwrap());
        let file = home.join(format!("{}.raw", vm["disks"][0]["id"].as_str().unwrap()));
        File::open(&file).unwrap();
        let refused = File::options().write(true).open(&file).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBUSY), "{refused}");
    }
}

/// What is behind the last `/` of an address: what is before it is written in more than one way.
fn end_of_address(text: &str) -> String {
    text.trim().rsplit_once('/').map(|(_, end)| end.to_owned()).unwrap_or_default()
}

/// The guest writes a text.
fn write(console: &mut Console, what: &str) {
    let write =
        format!("echo {what} | dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null");
    run(console, &format!("{write}; echo PUT-$((6 * 7))"), "PUT-42").unwrap();
}

/// A running guest on the pool that has written before its snapshot and after it, and counts.
pub(crate) fn start(here: &Installation) {
    let from = image().unwrap();
    let disk = format!("name={DISK},datastore=ceph,format=raw,image={},size=64MiB", from.display());
    let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &disk, "--host", HERE];
    let card = ["--nic", "user,mac=52:54:0a:00:02:0f", "--memory", "192MiB"];
    here.vmseal(&[&create[..], &card].concat()).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    write_marker(&mut console);
    write(&mut console, BEFORE);
    here.vmseal(&["snapshot", "create", VM, "one"]).unwrap();
    write(&mut console, AFTER);
    count(&mut console);
}

/// The guest has what it had, and goes on counting.
pub(crate) fn has_lost_nothing(here: &Installation) {
    let mut console = here.console(VM).unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    count(&mut console);
}

/// What the snapshot keeps is what the guest had written until then.
pub(crate) fn snapshot_keeps(here: &Installation, what: &str) {
    let to = here.path("kept");
    let export = ["disk", "export", VM, DISK, "--snapshot", "one", "--format", "raw"];
    let place = ["--plaintext", "--to", text(&to).unwrap()];
    here.vmseal(&[&export[..], &place].concat()).unwrap();
    let content = std::fs::read(&to).unwrap();
    std::fs::remove_file(&to).unwrap();
    assert!(content[(TEXT_AT as usize) << 20..].starts_with(what.as_bytes()));
}

/// A dry run says that nothing but memory is sent, and a task that nothing else was.
fn sends_memory_alone(here: &Installation, to: &str) {
    let planned = here.vmseal(&["vm", "migrate", VM, to, "--dry-run"]).unwrap();
    let chosen = format!("choose host '{to}'; memory and all else that is sent is encrypted");
    let copies = |said: &str| ["with a copy", "with copies"].iter().any(|it| said.contains(it));
    assert!(planned.contains(&chosen) && !copies(&planned), "{planned}");
    let watched = here.vmseal(&["vm", "migrate", VM, to, "--watch", "-o", "json"]).unwrap();
    let documents: Vec<Value> =
        watched.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let phases: Vec<_> =
        documents.iter().filter_map(|task| task["migration"]["phase"].as_str()).collect();
    assert!(phases.contains(&"connecting") && !phases.contains(&"disks"), "{watched}");
    let migrated = &documents.last().unwrap()["migrated"];
    assert!(migrated["sent"].as_u64().is_some_and(|sent| sent > 0), "{watched}");
    assert_eq!(migrated["encrypted"], true, "{watched}");
    let events = here.vmseal(&["events", "-c", "kind,detail"]).unwrap();
    let moves: Vec<_> = events.lines().filter(|line| line.starts_with("vm.migrated")).collect();
    assert!(!moves.is_empty() && !moves.iter().any(|line| copies(line)), "{events}");
}

#[test]
fn a_guest_on_a_pool_moves_with_its_memory_alone_and_one_host_at_a_time_can_write() {
    if !is_installed() {
        return;
    }
    let mut bench = Bench::new("migration");
    let here = &bench.ceph.here;
    let shown = here.json(&["datastore", "show", "ceph"]).unwrap();
    assert_eq!(shown["hosts"].as_array().unwrap().len(), 2, "{shown}");
    start(here);
    bench.runs_on(HERE);
    let image = bench.image();

    // Without a host, the only other one is chosen.
    here.vmseal(&["vm", "migrate", VM]).unwrap();
    bench.runs_on(THERE);
    has_lost_nothing(here);
    snapshot_keeps(here, BEFORE);
    sends_memory_alone(here, HERE);
    bench.runs_on(HERE);
    has_lost_nothing(here);
    assert_eq!(bench.image(), image, "its disk is another image");

    // A host is emptied. What the guest has written at both of them is merged at the other one.
    here.vmseal(&["host", "drain", HERE]).unwrap();
    bench.runs_on(THERE);
    here.vmseal(&["host", "undrain", HERE]).unwrap();
    here.vmseal(&["snapshot", "delete", VM, "one"]).unwrap();
    has_lost_nothing(here);
    bench.runs_on(THERE);

    let held = bench.ceph.here.hold_steps().unwrap();
    stays_when_its_destination_dies(&mut bench, &held);
    without_holding(&held, || {
        // It moves all the same afterwards.
        bench.ceph.here.vmseal(&["vm", "migrate", VM, HERE]).unwrap();
        bench.runs_on(HERE);
        has_lost_nothing(&bench.ceph.here);
        ends_whole(&bench, &image);
    });
}

/// The agent of the destination dies when the guest is between the hosts, and was not asked yet to let it go: it stays where it was.
fn stays_when_its_destination_dies(bench: &mut Bench, held: &Path) {
    for host in [HERE, THERE] {
        eventually("the server that has restarted knows the host", || {
            let shown = bench.ceph.here.json(&["host", "show", host]).ok()?;
            (shown["connection"] == "connected").then_some(())
        })
        .unwrap();
    }
    let task = bench.ceph.here.json(&["vm", "migrate", VM, HERE, "--no-wait"]).unwrap();
    let task = task["id"].as_str().unwrap();
    let file = held.join(task);
    loop {
        let step = eventually("the task is at a step", || std::fs::read_to_string(&file).ok());
        let step = step.unwrap();
        assert!(step.contains(" do "), "it is undone: {step}");
        if step.contains(" switch do Before") {
            break;
        }
        std::fs::remove_file(&file).unwrap();
    }
    let image = bench.image();
    bench.is_free(&image);
    bench.ceph.here.kill_agent();
    bench.ceph.here.start_agent().unwrap();
    without_holding(held, || {
        let ended = bench.ceph.here.try_vmseal(&["task", "wait", task]).unwrap();
        assert!(!ended.status.success(), "it ran at a host that knew nothing of it");
        bench.runs_on(THERE);
        has_lost_nothing(&bench.ceph.here);
    });
}

/// Its disk has what the guest wrote last, is ciphertext, and goes with the VM.
fn ends_whole(bench: &Bench, image: &str) {
    let here = &bench.ceph.here;
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    assert!(here.disk_has(VM, DISK, TEXT_AT, AFTER).unwrap());
    assert_eq!(bench.image(), image);
    let content = bench.ceph.cluster.export(image);
    assert!(content.starts_with(b"LUKS\xba\xbe"));
    assert!(!contains(&content, MARKER) && !contains(&content, AFTER));
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.ceph.is_empty();
}

/// Off and suspended it goes there without anything that is sent, and starts or goes on from where its image is.
#[test]
fn a_vm_on_a_pool_that_is_off_or_suspended_goes_to_another_host_and_its_image_stays() {
    if !is_installed() {
        return;
    }
    let bench = Bench::new("migration-at-rest");
    let here = &bench.ceph.here;
    start(here);
    let image = bench.image();
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let planned = here.vmseal(&["vm", "migrate", VM, "--dry-run"]).unwrap();
    let chosen = "choose host 'there'; the VM is off, so nothing is sent";
    assert!(planned.contains(chosen), "{planned}");
    here.vmseal(&["vm", "migrate", VM]).unwrap();
    bench.rests_on(THERE, "off", &image);
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    bench.runs_on(THERE);
    read_marker_of_disk(&mut console);
    count(&mut console);
    drop(console);

    here.vmseal(&["vm", "suspend", VM]).unwrap();
    here.vmseal(&["vm", "migrate", VM, HERE]).unwrap();
    bench.rests_on(HERE, "suspended", &image);
    here.vmseal(&["vm", "resume", VM]).unwrap();
    bench.runs_on(HERE);
    // The guest counts on, from its memory.
    has_lost_nothing(here);
    snapshot_keeps(here, BEFORE);
    here.vmseal(&["snapshot", "delete", VM, "one"]).unwrap();
    ends_whole(&bench, &image);
}
