//! What is done with VMs on directories, done with VMs on a pool of a real Ceph cluster: their disks grow, give room back, are exposed, scanned
//! and replicated, and the memory of their guests is dumped.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use vmseal_luks::DATA_OFFSET;
use vmseal_tests::ceph::{is_installed, said};
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::counting_guest::{MARKER, MARKER_AT, count, read_marker_of_disk, stop_counting};
use vmseal_tests::eventually;
use vmseal_tests::exposed::Exposed;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{create, text};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, holds, run};
use vmseal_tests::two_hosts::FILTER;

use crate::ceph_datastore::started;
use crate::dumps::{cores, has_secret, keep_secret};
use crate::replicas::{count_on, is_caught_up_on, is_equal};

const VM: &str = "web";

/// The length of the guest's disk when it has grown, in MiB.
const LENGTH: u64 = 128;

/// Places in what is new of the disk, in MiB from its beginning: what the guest fills and discards again, and how much; what it writes; and
/// what a tool writes.
const FILLED_AT: u64 = 80;
const FILLED: u64 = 24;
const TEXT_AT: u64 = 112;
const OF_TOOL_AT: u32 = 120;

const TEXT: &str = "TEXT-IN-WHAT-IS-NEW";

/// The length of an object, in MiB.
const OBJECT: u64 = 4;

#[test]
fn disks_on_a_pool_grow_give_room_back_and_are_exposed_dumped_scanned_and_replicated() {
    if !is_installed() {
        return;
    }
    let options = Options { messenger: "secure", erasure_coded: false, key_at_server: true };
    let bench = CephInstallation::shared("operations", options);
    let here = &bench.here;
    let mut console = started(here, "ceph");
    keep_secret(&mut console);
    count(&mut console);
    grows(&bench, &mut console);
    gives_room_back(&bench, &mut console);
    is_exposed(&bench);
    is_dumped(&bench);
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    is_written_by_a_tool(&bench);
    is_scanned(&bench);
    let mut console = booted(here, VM).unwrap();
    read_marker_of_disk(&mut console);
    let read = format!("dd if=/dev/vda bs=1M skip={TEXT_AT} count=1 2>/dev/null | head -n 1");
    run(&mut console, &read, TEXT).unwrap();
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.is_empty();
    takes_room_as_it_grows(&bench);
    has_replicas(&bench);
}

/// The only image of the pool.
fn image(bench: &CephInstallation) -> String {
    let only_one = || <[String; 1]>::try_from(bench.images()).ok();
    let [image] = eventually("the pool has one image", only_one)
        .unwrap_or_else(|error| panic!("{error}: {:?}", bench.images()));
    image
}

/// The objects of an image that have so much of its disk, in MiB from a place on, which both are whole objects.
fn objects(place: u64, length: u64) -> BTreeSet<u64> {
    let first = (DATA_OFFSET >> 20) / OBJECT + place / OBJECT;
    (first..first + length / OBJECT).collect()
}

/// The disk gets longer while its guest counts, and the guest uses what is new.
fn grows(bench: &CephInstallation, console: &mut Console) {
    let here = &bench.here;
    let filters = || here.processes_of(VM, FILTER).unwrap();
    let before = filters();
    let size = format!("{LENGTH}MiB");
    here.vmseal(&["disk", "resize", VM, "disk0", "--size", &size]).unwrap();
    holds(console, &format!("[ $(cat /sys/block/vda/size) = {} ]", LENGTH * 2048)).unwrap();
    assert_eq!(filters(), before, "the filter was replaced");
    assert_eq!(here.vm(VM).unwrap()["disks"][0]["size"], LENGTH << 20);
    let info = bench.pool.info(&image(bench));
    assert!(info["size"].as_u64().unwrap() >= DATA_OFFSET + (LENGTH << 20), "{info}");
    let write = format!("dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null");
    run(console, &format!("echo {TEXT} | {write}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

/// What the guest discards takes no room in the cluster any more, and reads as zeroes.
fn gives_room_back(bench: &CephInstallation, console: &mut Console) {
    let (image, filled) = (image(bench), objects(FILLED_AT, FILLED));
    let before = bench.pool.objects(&image);
    assert!(before.is_disjoint(&filled), "what nobody has written takes room: {before:?}");
    let fill = format!(
        "dd if=/dev/urandom of=/dev/vda bs=1M seek={FILLED_AT} count={FILLED} conv=notrunc,fsync"
    );
    run(console, &format!("{fill} 2>/dev/null; echo FILLED-$((6 * 7))"), "FILLED-42").unwrap();
    let with_it = bench.pool.objects(&image);
    assert!(with_it.is_superset(&filled), "{with_it:?}");
    let (place, length) = (FILLED_AT << 20, FILLED << 20);
    let discard = format!("blkdiscard -o {place} -l {length} /dev/vda; echo DISCARDED-$?-");
    run(console, &discard, "DISCARDED-0-").unwrap();
    let left = bench.pool.objects(&image);
    assert!(left.is_disjoint(&filled), "what was discarded takes room: {left:?}");
    assert!(left.is_superset(&before), "more than that is gone: {before:?}, {left:?}");
    let read = format!("dd if=/dev/vda bs=1M skip={FILLED_AT} count={FILLED} 2>/dev/null");
    let other = format!("$({read} | tr -d '\\0' | wc -c)");
    run(console, &format!("echo 3 >/proc/sys/vm/drop_caches; echo OTHER-{other}-"), "OTHER-0-")
        .unwrap();
}

/// A tool reads the disk beside its guest. The pool is not mounted anew meanwhile.
fn is_exposed(bench: &CephInstallation) {
    let here = &bench.here;
    let exposed = Exposed::start(here, VM, &[]).unwrap();
    let refused = here.refused(&["datastore", "remount", "ceph", "--host", "here"]).unwrap();
    assert!(refused.contains("is exposed by"), "{refused}");
    let copy = here.path("copy");
    tool("nbdcopy", &[&exposed.uri, text(&copy).unwrap()]);
    let content = std::fs::read(&copy).unwrap();
    assert_eq!(content.len() as u64, LENGTH << 20);
    for (place, what) in [(u64::from(MARKER_AT), MARKER), (TEXT_AT, TEXT)] {
        assert!(content[(place as usize) << 20..].starts_with(what.as_bytes()), "{what}");
    }
    exposed.interrupt().unwrap();
    std::fs::remove_file(copy).unwrap();
}

fn tool(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", said(&output));
}

/// A core dump of the guest is ciphertext in the pool, is decrypted to a file of the host, and goes.
fn is_dumped(bench: &CephInstallation) {
    let here = &bench.here;
    let before = bench.images().len();
    here.vmseal(&["vm", "dump", VM, "first"]).unwrap();
    let [core] = &cores(here)[..] else { panic!("{:?}", cores(here)) };
    assert!(core.starts_with(&bench.mounted), "{}", core.display());
    assert!(!has_secret(core), "the core dump is in the clear");
    assert_eq!(bench.images().len(), before + 1, "{:?}", bench.images());
    let clear = here.path("core");
    here.vmseal(&["dump", "decrypt", VM, "first", "--to", text(&clear).unwrap()]).unwrap();
    assert!(has_secret(&clear), "what was decrypted lacks the guest's memory");
    std::fs::remove_file(clear).unwrap();
    here.vmseal(&["dump", "delete", VM, "first"]).unwrap();
    image(bench);
}

/// A tool writes to the disk of the VM, which is off.
fn is_written_by_a_tool(bench: &CephInstallation) {
    let here = &bench.here;
    let exposed = Exposed::start(here, VM, &["--writable"]).unwrap();
    let write = format!("write -P {} {OF_TOOL_AT}M 64k", b'T');
    tool("qemu-io", &["-f", "raw", "-c", &write, "-c", "flush", &exposed.uri]);
    exposed.interrupt().unwrap();
    assert!(here.disk_has(VM, "disk0", OF_TOOL_AT, &"T".repeat(64 << 10)).unwrap());
    assert!(here.disk_has(VM, "disk0", MARKER_AT, MARKER).unwrap());
}

/// The statuses of what is on a datastore, with the names of the disks, and what an operator should know.
fn scanned(bench: &CephInstallation, datastore: &str) -> Vec<(String, Value, String)> {
    let scan = bench.here.json(&["datastore", "scan", datastore]).unwrap();
    assert_eq!(scan["incomplete"], Value::Null, "{scan}");
    let told = |image: &Value, field: &str| image[field].as_str().unwrap().to_owned();
    let images = scan["images"].as_array().unwrap().iter();
    images.map(|it| (told(it, "status"), it["disk"].clone(), told(it, "detail"))).collect()
}

/// A scan knows the disk of the VM, which is off, and says what of its image's metadata is wrong, until the VM is started; what is a copy; and
/// what is missing.
fn is_scanned(bench: &CephInstallation) {
    let here = &bench.here;
    let is_whole = [("in_use".to_owned(), Value::from("disk0"), String::new())];
    assert_eq!(scanned(bench, "ceph"), is_whole);

    let vm = here.vm(VM).unwrap();
    let disk = format!("{}.raw", vm["disks"][0]["id"].as_str().unwrap());
    let file = bench.mounted.join(vm["id"].as_str().unwrap()).join(disk);
    // Files of a pool are renamed within their directory alone.
    let (copy, away) = (bench.mounted.join("copy.img"), file.with_extension("away"));
    // Its beginning is enough to know it by.
    let mut beginning = vec![0; DATA_OFFSET as usize + (1 << 20)];
    File::open(&file).unwrap().read_exact(&mut beginning).unwrap();
    std::fs::write(&copy, beginning).unwrap();
    let told = scanned(bench, "ceph");
    let count = |status: &str| told.iter().filter(|(it, ..)| it == status).count();
    assert_eq!((count("in_use"), count("orphan"), told.len()), (1, 1, 2), "{told:?}");
    std::fs::remove_file(&copy).unwrap();

    std::fs::rename(&file, &away).unwrap();
    let told = scanned(bench, "ceph");
    let is_missing = |(status, disk, _): &(String, Value, String)| {
        status == "missing" && disk.as_str() == Some("disk0")
    };
    assert!(told.iter().any(is_missing), "{told:?}");
    std::fs::rename(&away, &file).unwrap();
    assert_eq!(scanned(bench, "ceph"), is_whole);

    // Everybody who may write to the pool may say that another key opens it.
    let image = image(bench);
    let set = ["image-meta", "set", &image, "vmseal.kek", "provider/former"];
    let is_set = || bench.cluster.rbd(&set).status.success().then_some(());
    eventually("nobody has the image", is_set).unwrap();
    let [(status, _, detail)] = &scanned(bench, "ceph")[..] else { panic!("it is not alone") };
    assert_eq!(status, "in_use");
    assert!(detail.contains("names other keys (provider/former)"), "{detail}");
    here.vmseal(&["vm", "start", VM]).unwrap();
    assert_eq!(scanned(bench, "ceph"), is_whole);
}

/// A preallocated disk that gets longer has the room of what is new.
fn takes_room_as_it_grows(bench: &CephInstallation) {
    let here = &bench.here;
    here.vmseal(&["policy", "create", "thick", "--encrypt", "--preallocate"]).unwrap();
    let disk = "datastore=ceph,name=data,size=16MiB";
    here.vmseal(&["vm", "create", VM, "--policy", "thick", "--disk", disk]).unwrap();
    let image = image(bench);
    for length in [16, 64] {
        let size = format!("{length}MiB");
        if length > 16 {
            here.vmseal(&["disk", "resize", VM, "data", "--size", &size]).unwrap();
        }
        let there = bench.pool.objects(&image);
        assert!(there.is_superset(&objects(0, length)), "{size}: {there:?}");
    }
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.is_empty();
}

/// A disk in the pool has a replica in a directory, and one in a directory has a replica in the pool. It is equal in the end, also when the
/// disk has grown.
fn has_replicas(bench: &CephInstallation) {
    let here = &bench.here;
    let counter = here.counter_image().unwrap();
    for (on, to) in [("ceph", "local"), ("local", "ceph")] {
        let policy = format!("copied-to-{to}");
        let copied = ["policy", "create", &policy, "--encrypt", "--replicate-to", to];
        here.vmseal(&[&copied[..], &["--replicate-rate", "64MiB"]].concat()).unwrap();
        let disk = format!("datastore={on},format=raw,image={}", text(&counter).unwrap());
        here.vmseal(&create(VM, &policy, &disk)).unwrap();
        let (disk, replica) = files(bench, on, to);

        assert_eq!(here.boot_counter(VM).unwrap(), 1);
        is_caught_up_on(here, to);
        count_on(here, 1);
        here.vmseal(&["disk", "resize", VM, "disk0", "--size", "24MiB"]).unwrap();
        is_caught_up_on(here, to);
        here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
        assert!(is_equal(&disk, &replica), "on {on}: the replica is another one");
        assert!(std::fs::read(&replica).unwrap().starts_with(b"LUKS\xba\xbe"), "on {on}");
        let told = scanned(bench, to);
        assert_eq!((told.len(), &*told[0].0), (1, "in_use"), "{told:?}");
        assert!(told[0].2.contains("the replica of a disk"), "{told:?}");
        // Images say which key opens them, also those of replicas.
        let noted = bench.cluster.rbd(&["image-meta", "list", &image(bench)]);
        assert!(contains(&noted.stdout, "luks2"), "on {on}: {noted:?}");
        here.vmseal(&["vm", "delete", VM]).unwrap();
        assert!(!disk.exists() && !replica.exists(), "on {on}: something is left");
        bench.is_empty();
    }
}

/// The files of the VM's disk on one datastore, and of its replica on the other one.
fn files(bench: &CephInstallation, on: &str, to: &str) -> (PathBuf, PathBuf) {
    let vm = bench.here.vm(VM).unwrap();
    let (id, disk) = (vm["id"].as_str().unwrap(), vm["disks"][0]["id"].as_str().unwrap());
    let file = |datastore: &str, ending: &str| {
        let place =
            if datastore == "ceph" { bench.mounted.clone() } else { bench.here.path("datastore") };
        place.join(id).join(format!("{disk}.{ending}"))
    };
    (file(on, "raw"), file(to, "replica"))
}
