//! A VM whose disks are RBD images of a real Ceph cluster: it does what VMs on a directory do, its images are ciphertext, and it loses
//! nothing when `vmseal-rbd` dies, its filter, or OSDs, whether its data goes through shared memory or FUSE.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use vmseal_secret::cephx::CephxKey;
use vmseal_secret::derive::pool_key_fingerprint;
use vmseal_tests::ceph::{is_installed, said};
use vmseal_tests::ceph_datastore::{CephInstallation, Options, server_at};
use vmseal_tests::counting_guest::{
    MARKER, MARKER_AT, count, read_marker_of_disk, stop_counting, write_marker,
};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::program;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, image};

use crate::ceph_failures::guests_go_on;
use crate::ceph_new_pools::{half_made_pools, pools_for_policy};

const VM: &str = "web";

/// A running guest on the pool of a datastore, with the marker on its disk.
pub fn started(here: &Installation, datastore: &str) -> Console {
    let image = image().unwrap();
    let disk = format!("datastore={datastore},format=raw,image={},size=64MiB", image.display());
    let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &disk];
    let card = ["--nic", "user,mac=52:54:0a:00:02:0f", "--memory", "192MiB"];
    here.vmseal(&[&create[..], &card].concat()).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    write_marker(&mut console);
    console
}

/// Finds that the pool's images are ciphertext: a LUKS2 header and what follows, or the layer of a snapshot above that.
pub(crate) fn is_ciphertext(bench: &CephInstallation) {
    let mut looked_at = 0;
    for image in bench.images() {
        // What a task has replaced is removed once the last process has closed it.
        let Some(content) = bench.cluster.export_if_there(&image) else { continue };
        looked_at += 1;
        let begins = [&b"LUKS\xba\xbe"[..], b"QFI\xfb"];
        assert!(begins.iter().any(|it| content.starts_with(it)), "{image}");
        assert!(!contains(&content, MARKER), "{image}");
    }
    assert!(looked_at > 0, "the pool has no image");
}

#[test]
fn a_vm_on_ceph_is_ciphertext_and_outlives_what_serves_it() {
    if !is_installed() {
        return;
    }
    let bench = CephInstallation::new(Options {
        messenger: "crc",
        erasure_coded: false,
        key_at_server: false,
    });
    let here = &bench.here;
    let shown = here.vmseal(&["datastore", "list"]).unwrap();
    assert!(shown.contains("rbd:vmseal"), "{shown}");
    let mut console = started(here, "ceph");
    is_ciphertext(&bench);
    bench.shares_data();

    // What serves the images dies under load: a filter ends with it, and others go on.
    for _ in 0..3 {
        count(&mut console);
        let server = bench.server();
        bench.kill_server_of_pool();
        bench.is_served_again(VM, server);
        stop_counting(&mut console);
        read_marker_of_disk(&mut console);
        bench.shares_data();
    }
    // So does its filter, with requests in flight.
    count(&mut console);
    bench.kill_filter(VM);
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    bench.shares_data();
    // An OSD dies and comes back.
    count(&mut console);
    bench.cluster.kill_daemons("osd.1");
    bench.cluster.up();
    stop_counting(&mut console);

    // What is done with VMs elsewhere.
    here.vmseal(&["snapshot", "create", VM, "one"]).unwrap();
    // A disk with layers is in files.
    count(&mut console);
    bench.shares_no_data();
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    here.vmseal(&["vm", "recrypt", VM, "--deep"]).unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    is_ciphertext(&bench);
    here.vmseal(&["snapshot", "delete", VM, "one"]).unwrap();
    count(&mut console);
    bench.shares_data();
    here.vmseal(&["vm", "move", VM, "--datastore", "local"]).unwrap();
    bench.is_empty();
    bench.shares_no_data();
    here.vmseal(&["vm", "move", VM, "--datastore", "ceph"]).unwrap();
    bench.shares_data();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    is_ciphertext(&bench);
    let proof = here.vmseal(&["vm", "prove", VM]).unwrap();
    assert!(proof.contains("header authentic") && proof.contains(" 0 in the clear"), "{proof}");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
    clones_elsewhere(&bench);
    // Connections to this cluster are in the clear, and a policy may not have that.
    let asks = |messenger| here.vmseal(&["policy", "set", "encrypted", "--messenger", messenger]);
    asks("secure").unwrap();
    let refused = here.refused(&["vm", "start", VM]).unwrap();
    assert!(refused.contains("in pool 'vmseal' with messenger 'crc'"), "{refused}");
    asks("any").unwrap();
    // Without the socket all goes through FUSE.
    bench.shares_no_data();
    bench.remove_channels();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    count(&mut console);
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    bench.shares_no_data();
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.is_empty();
    objects(&bench);
    room(&bench);
    redundancy(&bench);
    failure_domain(&bench);
    pools_for_policy(&bench);
    half_made_pools(&bench);
    guests_go_on(&bench, &[&["osd.0"], &["osd.1"], &["osd.2"]]);
    keys(&bench);
    key_from_keyring(&bench);
}

/// A clone of the VM, which is off, goes from the pool to a directory, and a clone of that back to the pool.
fn clones_elsewhere(bench: &CephInstallation) {
    let here = &bench.here;
    for (from, to, datastore) in [(VM, "there", "local"), ("there", "back", "ceph")] {
        here.vmseal(&["vm", "clone", from, to, "--datastore", datastore]).unwrap();
        let shown = here.vm(to).unwrap();
        assert_eq!(shown["disks"][0]["datastore"], datastore, "{shown}");
        assert!(here.disk_has(to, "disk0", MARKER_AT, MARKER).unwrap(), "'{to}' lost its marker");
    }
    for image in here.images("there").unwrap() {
        assert!(!contains(&std::fs::read(&image).unwrap(), MARKER), "{}", image.display());
    }
    is_ciphertext(bench);
    for vm in ["there", "back"] {
        here.vmseal(&["vm", "delete", vm]).unwrap();
    }
}

/// Images are cut into objects as a policy asks, and stay so.
fn objects(bench: &CephInstallation) {
    let here = &bench.here;
    let small = ["--object-size", "1MiB", "--stripe-unit", "64KiB", "--stripe-count", "2"];
    here.vmseal(&[&["policy", "create", "small", "--encrypt"], &small[..]].concat()).unwrap();
    let disk = "datastore=ceph,name=data,size=16MiB";
    here.vmseal(&["vm", "create", "small", "--policy", "small", "--disk", disk]).unwrap();
    let images = bench.images();
    assert_eq!(images.len(), 1, "{images:?}");
    let info = String::from_utf8(bench.cluster.rbd(&["info", &images[0]]).stdout).unwrap();
    for part in ["order 20 (1 MiB objects)", "stripe unit: 64 KiB", "stripe count: 2"] {
        assert!(info.contains(part), "{part}: {info}");
    }
    here.vmseal(&["policy", "set", "small", "--object-size", "2MiB"]).unwrap();
    let shown = here.vmseal(&["disk", "show", "small", "data"]).unwrap();
    assert!(shown.contains("objects of 1 MiB, 64 KiB at a time around 2"), "{shown}");
    assert!(shown.contains("its policy asks for objects of 2 MiB"), "{shown}");
    here.vmseal(&["vm", "delete", "small"]).unwrap();
    bench.is_empty();
}

/// A preallocated disk has the room of its whole length when it is made, a thin one that of little more than its header.
fn room(bench: &CephInstallation) {
    const SIZE: u64 = 64 << 20;
    let here = &bench.here;
    here.vmseal(&["policy", "create", "thick", "--encrypt", "--preallocate"]).unwrap();
    for (policy, allocation) in [("thick", "preallocated"), ("encrypted", "thin")] {
        let disk = "datastore=ceph,name=data,size=64MiB";
        here.vmseal(&["vm", "create", "room", "--policy", policy, "--disk", disk]).unwrap();
        assert_eq!(here.vm("room").unwrap()["disks"][0]["allocation"], allocation);
        let images = bench.images();
        assert_eq!(images.len(), 1, "{images:?}");
        let told = bench.cluster.rbd(&["du", "--format", "json", &images[0]]);
        let told: Value = serde_json::from_slice(&told.stdout).unwrap();
        let used = told["images"][0]["used_size"].as_u64().unwrap();
        let is_right = if policy == "thick" { used >= SIZE } else { used < SIZE / 2 };
        assert!(is_right, "{policy}: {told}");
        here.vmseal(&["vm", "delete", "room"]).unwrap();
        bench.is_empty();
    }
}

/// What pools outlive is shown, policies ask for it, and pools that do are made.
fn redundancy(bench: &CephInstallation) {
    let here = &bench.here;
    let shown = here.vmseal(&["datastore", "show", "ceph"]).unwrap();
    let mirrored = "vmseal: mirroring, 3 copies: outlives 2 failed osds, guests go on with 1";
    assert!(shown.contains(mirrored), "{shown}");
    let gold = ["--encrypt", "--failures-to-tolerate", "1,erasure-coding"];
    here.vmseal(&[&["policy", "create", "gold"], &gold[..]].concat()).unwrap();
    let create = |datastore: &str| {
        let disk = format!("datastore={datastore},size=16MiB");
        here.try_vmseal(&["vm", "create", "web", "--policy", "gold", "--disk", &disk]).unwrap()
    };
    for (datastore, why) in [("local", "a directory"), ("ceph", "not erasure-coding")] {
        let refused = said(&create(datastore));
        assert!(refused.contains("outlive 1 failure") && refused.contains(why), "{refused}");
    }

    let place = here.path("gold");
    let keyring = bench.pool.keyring();
    let add = |user: &str, keyring: &Path, create: &[&str]| {
        let mut add = vec!["datastore", "add", "gold", "--host", "here"];
        add.extend(["--pool", "gold", "--data-pool", "gold-data", "--create"]);
        add.extend_from_slice(create);
        let monitors = bench.cluster.monitors();
        add.extend(["--monitors", &monitors, "--messenger", "crc", "--user", user]);
        // The server holds the key of this one.
        add.extend(["--key-file", text(keyring).unwrap(), "--path", text(&place).unwrap()]);
        here.try_vmseal(&add).unwrap()
    };
    let refused = said(&add("client.vmseal", &keyring, &["1,erasure-coding"]));
    assert!(refused.contains("the user may not make pools"), "{refused}");
    let administrator = bench.cluster.directory().join("keys/client.admin.keyring");
    let refused = said(&add("client.admin", &administrator, &["1,erasure-coding,host"]));
    assert!(refused.contains("3 hosts, and the cluster has 1"), "{refused}");
    let chunks = |number| ["1,erasure-coding,osd", "--data-chunks", number];
    let refused = said(&add("client.admin", &administrator, &chunks("3")));
    let why =
        "4 chunks (k=3 m=1) must each be in another osd: that takes 4 osds, and the cluster has 3";
    assert!(refused.contains(why), "{refused}");
    let compressed = [&chunks("2")[..], &["--compression", "force"]].concat();
    let added = add("client.admin", &administrator, &compressed);
    assert!(added.status.success(), "{}", said(&added));
    assert_eq!(said(&added).matches("lose writes that were acknowledged").count(), 1);
    let shown = here.vmseal(&["datastore", "show", "gold"]).unwrap();
    assert!(shown.contains("client.admin: held by the server"), "{shown}");
    let copies = "gold: mirroring, 2 copies: outlives 1 failed osd, guests go on with 1, and";
    assert!(shown.contains(copies), "{shown}");
    let chunks =
        "gold-data: erasure coding, k=2 m=1: outlives 1 failed osd, guests go on with 1, and";
    assert!(shown.contains(chunks), "{shown}");
    let is_compressed = |line: &&str| line.contains("compression force, which does nothing");
    let data: Vec<_> = shown.lines().filter(is_compressed).collect();
    assert!(data.len() == 1 && data[0].contains(chunks), "{shown}");
    let asks = |chunks: &str| here.vmseal(&["policy", "set", "gold", "--data-chunks", chunks]);
    asks("4").unwrap();
    let refused = said(&create("gold"));
    assert!(refused.contains("pool 'gold-data' has k=2 m=1, not k=4"), "{refused}");
    asks("2").unwrap();
    assert_eq!(here.json(&["policy", "show", "gold"]).unwrap()["redundancy"]["data_chunks"], 2);
    assert!(create("gold").status.success());
    // Its image says which key opens it, to Ceph's own tools.
    let told = |words: &[&str]| String::from_utf8(bench.cluster.rbd(words).stdout).unwrap();
    let images = told(&["ls", "gold"]);
    let noted = |image: &str| told(&["image-meta", "list", &format!("gold/{image}")]);
    let is_noted = |said: &String| {
        let is = |key: &str, value: &str| {
            said.lines().any(|line| line.contains(key) && line.contains(value))
        };
        is("vmseal.format", "luks2") && is("vmseal.kek", "/") && is("vmseal.vm", "-")
    };
    assert!(images.lines().map(noted).any(|said| is_noted(&said)), "{images}");
    // What the policy asks for later has the VM run on, with an alarm.
    asks("4").unwrap();
    let alarm = here.wait_alarm("web", "less-redundant").unwrap();
    assert!(alarm.contains("pool 'gold-data' has k=2 m=1, not k=4"), "{alarm}");
    asks("2").unwrap();
    here.wait_no_alarm("web", "less-redundant").unwrap();
    bench.cluster.ceph(&["osd", "pool", "set", "gold-data", "compression_mode", "aggressive"]);
    eventually("what compression does is shown", || {
        let shown = here.vmseal(&["datastore", "show", "gold"]).unwrap();
        shown.contains("compression aggressive, which does nothing for ciphertext").then_some(())
    })
    .unwrap();
    // An administrator takes it away, and gives it back.
    bench.cluster.ceph(&["osd", "pool", "set", "gold-data", "min_size", "3"]);
    let alarm = here.wait_alarm("web", "less-redundant").unwrap();
    assert!(alarm.contains("'gold-data'") && alarm.contains("guests go on with 0"), "{alarm}");
    let shown = here.vmseal(&["vm", "show", "web"]).unwrap();
    assert!(shown.contains("not compliant: redundancy"), "{shown}");
    bench.cluster.ceph(&["osd", "pool", "set", "gold-data", "min_size", "2"]);
    here.wait_no_alarm("web", "less-redundant").unwrap();
    here.vmseal(&["vm", "delete", "web"]).unwrap();
}

/// Policies ask for what copies are kept apart on. In this cluster all OSDs are on one host.
fn failure_domain(bench: &CephInstallation) {
    let here = &bench.here;
    let apart = ["--encrypt", "--failure-domain", "host"];
    here.vmseal(&[&["policy", "create", "apart"], &apart[..]].concat()).unwrap();
    let create = |datastore: &str| {
        let disk = format!("datastore={datastore},size=16MiB");
        here.try_vmseal(&["vm", "create", "apart", "--policy", "apart", "--disk", &disk]).unwrap()
    };
    let near = "pool 'vmseal' keeps each copy in another osd, not in another host";
    for (datastore, why) in [("local", "a directory"), ("ceph", near)] {
        let refused = said(&create(datastore));
        assert!(
            refused.contains("each copy in another host") && refused.contains(why),
            "{refused}"
        );
    }
    here.vmseal(&["policy", "set", "apart", "--failure-domain", "osd"]).unwrap();
    let created = create("ceph");
    assert!(created.status.success(), "{}", said(&created));
    // What it asks for later has it run on, with an alarm.
    here.vmseal(&["policy", "set", "apart", "--failure-domain", "rack"]).unwrap();
    let alarm = here.wait_alarm("apart", "less-redundant").unwrap();
    assert!(alarm.contains("in another osd, not in another rack"), "{alarm}");
    here.vmseal(&["policy", "set", "apart", "--failure-domain", "any"]).unwrap();
    here.wait_no_alarm("apart", "less-redundant").unwrap();
    here.vmseal(&["vm", "delete", "apart"]).unwrap();
    bench.is_empty();
}

/// A keyring of a user of the cluster, who is made if he is not there.
fn keyring_of(bench: &CephInstallation, user: &str) -> PathBuf {
    let keyring = bench.here.path(user);
    let caps = ["mon", "profile rbd", "osd", "profile rbd pool=vmseal"];
    let to = ["-o", text(&keyring).unwrap()];
    bench.cluster.ceph(&[&["auth", "get-or-create", user], &caps[..], &to].concat());
    keyring
}

/// Another key of a user of the cluster, which does not know it yet: a keyring for `ceph auth import`.
fn another_key(bench: &CephInstallation, user: &str) -> PathBuf {
    let spare = std::fs::read_to_string(keyring_of(bench, "client.spare")).unwrap();
    let keyring = bench.here.path("another");
    let caps = "\tcaps mon = \"profile rbd\"\n\tcaps osd = \"profile rbd pool=vmseal\"\n";
    let key = spare.lines().find(|line| line.trim().starts_with("key = ")).unwrap();
    std::fs::write(&keyring, format!("[{user}]\n{key}\n{caps}")).unwrap();
    keyring
}

/// Does what has the host try a key, again where the cluster was too slow to answer that.
fn tried(here: &Installation, command: &[&str]) -> Output {
    let answered = || {
        let output = here.try_vmseal(command).unwrap();
        (!said(&output).contains("has not answered within")).then_some(output)
    };
    eventually(&format!("the cluster answers {command:?}"), answered).unwrap()
}

/// The same where it must be refused; what is said.
fn tried_and_refused(here: &Installation, command: &[&str]) -> String {
    let output = tried(here, command);
    assert!(!output.status.success(), "{command:?} was done");
    said(&output)
}

/// The same where it must be done; what is printed.
fn tried_and_done(here: &Installation, command: &[&str]) -> String {
    let output = tried(here, command);
    assert!(output.status.success(), "{command:?}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The server changes the key of a pool, says which one the host uses, and the pool is mounted with it while a guest writes.
fn keys(bench: &CephInstallation) {
    let here = &bench.here;
    let (user, place) = ("client.held", here.path("held"));
    let made = bench.cluster.rbd(&["namespace", "create", "vmseal/held"]);
    assert!(made.status.success(), "{}", said(&made));
    let (keyring, monitors) = (keyring_of(bench, user), bench.cluster.monitors());
    let mut add = vec!["datastore", "add", "held", "--host", "here", "--pool", "vmseal/held"];
    add.extend(["--monitors", &monitors, "--messenger", "crc", "--user", user]);
    add.extend(["--key-file", text(&keyring).unwrap(), "--path", text(&place).unwrap()]);
    here.vmseal(&add).unwrap();
    let used = || {
        let shown = here.json(&["datastore", "show", "held"]).unwrap();
        let key = &shown["hosts"][0]["mounted_key"];
        (key["fingerprint"].as_str().unwrap().to_owned(), key["current"].as_bool().unwrap())
    };
    let (first, is_current) = used();
    assert!(is_current, "{first}");
    let shown = here.vmseal(&["datastore", "show", "held"]).unwrap();
    assert!(shown.contains(&format!("host 'here': {first} (current)")), "{shown}");
    let mut console = started(here, "held");
    count(&mut console);

    // The server has the next key before the cluster does, as it is told: the mount goes on, and is not given up for a key that is no good.
    let another = another_key(bench, user);
    let set = ["datastore", "set", "held", "--key-file", text(&another).unwrap()];
    let refused = tried_and_refused(here, &set);
    assert!(refused.contains("the key is not kept, as host 'here' cannot use it"), "{refused}");
    assert_eq!(used(), (first.clone(), true));
    here.vmseal(&[&set[..], &["--force"]].concat()).unwrap();
    assert_eq!(used(), (first.clone(), false));
    let server = server_at(&place);
    assert!(server.is_some(), "nobody serves it");
    for more in [&["--dry-run"][..], &[]] {
        let remount = [&["datastore", "remount", "held"], more].concat();
        let refused = tried_and_refused(here, &remount);
        assert!(refused.contains("stays mounted as it is"), "{refused}");
    }
    assert_eq!((server_at(&place), used()), (server, (first.clone(), false)));

    bench.cluster.ceph(&["auth", "import", "-i", text(&another).unwrap()]);
    // With one that may read and not write, all guests would stand still.
    let allow = |osd: &str| {
        bench.cluster.ceph(&["auth", "caps", user, "mon", "profile rbd", "osd", osd]);
    };
    allow("profile rbd-read-only pool=vmseal");
    let refused = tried_and_refused(here, &["datastore", "remount", "held"]);
    let cannot = "the pool 'vmseal' cannot be written to";
    assert!(refused.contains(cannot), "{refused}");
    let refused = tried_and_refused(here, &set);
    assert!(refused.contains(cannot), "{refused}");
    assert_eq!((server_at(&place), used()), (server, (first.clone(), false)));
    allow("profile rbd pool=vmseal");
    tried_and_done(here, &set);
    let planned = tried_and_done(here, &["datastore", "remount", "held", "--dry-run"]);
    assert!(planned.contains("VM 'web': its guest waits for a second or two"), "{planned}");
    assert_eq!(server_at(&place), server, "a dry run has ended it");
    tried_and_done(here, &["datastore", "remount", "held"]);
    let (second, is_current) = used();
    assert!(is_current && second != first, "{second}");
    assert_ne!(server_at(&place), server);
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    let planned = tried_and_done(here, &["datastore", "remount", "held", "--dry-run"]);
    assert!(planned.contains("each host uses the key"), "{planned}");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    for word in [keyring, another] {
        let keyring = std::fs::read_to_string(word).unwrap();
        let key = keyring.lines().find_map(|line| line.trim().strip_prefix("key = ")).unwrap();
        assert!(!bench.log().contains(key), "a key is in a log");
    }

    // A pool with a keyring on its host is mounted with what is in that now.
    let server = bench.server();
    tried_and_done(here, &["datastore", "remount", "ceph"]);
    assert!(bench.server().is_some() && bench.server() != server);
    let keyring = std::fs::read(bench.pool.keyring()).unwrap();
    let key = CephxKey::in_file(&keyring, "client.vmseal").unwrap().to_secret().unwrap();
    let fingerprint = pool_key_fingerprint(&key).unwrap();
    let shown = here.vmseal(&["datastore", "show", "ceph"]).unwrap();
    assert!(shown.contains(&format!("host 'here': {fingerprint}, of its keyring")), "{shown}");
    let refused = here.refused(&["datastore", "remount", "local"]).unwrap();
    assert!(refused.contains("is a directory"), "{refused}");
}

/// While a guest writes the server takes the key of the pool over from a file on the host, changes it, and gives it up for another file. By
/// then the cluster does not know the key that the guest's disks were opened with.
fn key_from_keyring(bench: &CephInstallation) {
    let here = &bench.here;
    let (user, keyring) = ("client.vmseal", bench.pool.keyring());
    let mut console = started(here, "ceph");
    count(&mut console);
    let set = |option: &str, file: &Path| {
        tried_and_done(here, &["datastore", "set", "ceph", option, text(file).unwrap()]);
    };
    let shown = || here.vmseal(&["datastore", "show", "ceph"]).unwrap();
    // `vmseal-rbd` ends, by another cause than a remount.
    let is_connected_anew = || {
        let server = bench.server();
        bench.kill_server_of_pool();
        bench.is_served_again(VM, server);
    };

    // With the same key nothing has to be mounted anew.
    let server = bench.server();
    set("--key-file", &keyring);
    let told = shown();
    assert!(told.contains("client.vmseal: held by the server"), "{told}");
    assert!(told.contains("(current)"), "{told}");
    assert_eq!(bench.server(), server);
    is_connected_anew();

    let another = another_key(bench, user);
    bench.cluster.ceph(&["auth", "import", "-i", text(&another).unwrap()]);
    set("--key-file", &another);
    let server = bench.server();
    tried_and_done(here, &["datastore", "remount", "ceph"]);
    bench.is_served_again(VM, server);
    is_connected_anew();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);

    // What the file that the pool was added with has, is no key of the cluster any more.
    let set_back = ["datastore", "set", "ceph", "--keyring"];
    let refused = tried_and_refused(here, &[&set_back[..], &[text(&keyring).unwrap()]].concat());
    assert!(refused.contains("nothing is changed, as host 'here' cannot"), "{refused}");
    let ring = here.path("ring");
    std::fs::copy(&another, &ring).unwrap();
    count(&mut console);
    set("--keyring", &ring);
    let told = shown();
    assert!(!told.contains("held by the server") && told.contains(", of its keyring"), "{told}");
    is_connected_anew();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
}

/// What the process that serves the pool was told.
fn command_line(bench: &CephInstallation) -> String {
    let server = bench.server().expect("no vmseal-rbd runs");
    let line = std::fs::read(format!("/proc/{server}/cmdline")).unwrap();
    String::from_utf8_lossy(&line).replace('\0', " ")
}

/// Whether a cluster passes for the one with this fsid, as `vmseal-rbd` sees it; what it says.
fn passes_for(bench: &CephInstallation, fsid: &str) -> (bool, String) {
    let mut command = Command::new(program("vmseal-rbd").unwrap());
    command.args(["--check", "--cluster", fsid, "--messenger", "crc", "--pool", "vmseal"]);
    command.arg("--monitors").arg(bench.cluster.monitors());
    command.arg("--keyring").arg(bench.pool.keyring());
    let output = command.arg(bench.here.path("nowhere")).output().unwrap();
    let said = [&output.stdout[..], &output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// Has the cluster's daemons take connections of either mode.
fn allow_both_modes(bench: &CephInstallation) {
    for (daemon, option) in [("mon.a", "ms_mon_service_mode"), ("osd.*", "ms_service_mode")] {
        bench.cluster.ceph(&["tell", daemon, "config", "set", option, "crc secure"]);
    }
}

/// User, monitors, messenger and key of a pool change under a guest that writes. It goes on by the new way when the pool is mounted anew,
/// and also when `vmseal-rbd` dies, though its VM was started with the former way; and when an agent that was not there takes it over.
#[test]
fn a_guest_on_ceph_goes_on_when_hosts_get_to_the_pool_by_another_way() {
    if !is_installed() {
        return;
    }
    let mut bench = CephInstallation::new(Options {
        messenger: "crc",
        erasure_coded: false,
        key_at_server: true,
    });
    let fsid = bench.cluster.json(&["status"])["fsid"].as_str().unwrap().to_owned();
    let (is_it, said) = passes_for(&bench, &fsid);
    assert!(is_it, "{said}");
    let (is_it, said) = passes_for(&bench, "3b9e0f5c-1a52-4d0b-8a53-2f7b7f3f2f11");
    assert!(!is_it && said.contains("this is another cluster") && said.contains(&fsid), "{said}");

    let shown = |bench: &CephInstallation| bench.here.json(&["datastore", "show", "ceph"]).unwrap();
    let before = shown(&bench);
    let mounted = &before["hosts"][0]["mounted"];
    assert_eq!((&mounted["messenger"], &mounted["current"]), (&json!("crc"), &json!(true)));
    assert_eq!(mounted["cluster"], json!(fsid));
    // How OSDs connect to each other is the cluster's, which this one keeps in files.
    assert_eq!(mounted["between_osds"], json!("may_be_clear"));
    bench.cluster.set("global", "ms_cluster_mode", "secure");
    let mut console = started(&bench.here, "ceph");
    count(&mut console);

    // Nobody is there, and the cluster takes no such connections yet.
    let set = ["datastore", "set", "ceph"];
    let server = bench.server();
    for wrong in [["--monitors", "v2:127.0.0.1:1/0"], ["--messenger", "secure"]] {
        let refused = bench.here.refused(&[&set[..], &wrong].concat()).unwrap();
        assert!(refused.contains("nothing is changed, as host 'here' cannot"), "{refused}");
    }
    assert_eq!(shown(&bench)["hosts"][0]["location"], before["hosts"][0]["location"]);

    allow_both_modes(&bench);
    let keyring = keyring_of(&bench, "client.moved");
    // The same monitor, as ceph.conf writes lists of its addresses.
    let monitors = format!("[{}]", bench.cluster.monitors());
    let way = ["--monitors", &monitors, "--user", "client.moved", "--messenger", "secure"];
    let key = ["--key-file", text(&keyring).unwrap()];
    let set = [&set[..], &way, &key].concat();
    let planned = tried_and_done(&bench.here, &[&set[..], &["--dry-run"]].concat());
    assert!(planned.contains("which works on hosts 'here'"), "{planned}");
    assert_eq!(shown(&bench)["hosts"][0]["location"], before["hosts"][0]["location"]);
    tried_and_done(&bench.here, &set);
    let now = shown(&bench);
    assert_eq!(now["id"], before["id"]);
    assert_eq!(now["hosts"][0]["location"]["pool"]["user"], json!("client.moved"));
    let mounted = &now["hosts"][0]["mounted"];
    assert_eq!((&mounted["messenger"], &mounted["current"]), (&json!("crc"), &json!(false)));
    assert_eq!(bench.server(), server, "it was mounted anew");
    // A policy begins to require what the mount, and so the guest, does not have yet.
    let asks =
        |messenger| bench.here.vmseal(&["policy", "set", "encrypted", "--messenger", messenger]);
    asks("secure").unwrap();
    let alarm = bench.here.wait_alarm(VM, "messenger-not-secure").unwrap();
    assert!(alarm.contains("still has it mounted with messenger 'crc'"), "{alarm}");
    let told = bench.here.vmseal(&["vm", "show", VM]).unwrap();
    assert!(told.contains("not compliant: messenger"), "{told}");

    tried_and_done(&bench.here, &["datastore", "remount", "ceph"]);
    bench.is_served_again(VM, server);
    let now = shown(&bench);
    let mounted = &now["hosts"][0]["mounted"];
    assert_eq!((&mounted["messenger"], &mounted["current"]), (&json!("secure"), &json!(true)));
    assert_eq!(mounted["between_osds"], json!("secure"));
    let told = bench.here.vmseal(&["datastore", "show", "ceph"]).unwrap();
    assert!(told.contains("copies between them are to be encrypted"), "{told}");
    bench.here.wait_no_alarm(VM, "messenger-not-secure").unwrap();
    assert_eq!(bench.here.vm(VM).unwrap()["compliance"], json!({ "compliant": true }));
    asks("any").unwrap();
    assert_eq!(now["hosts"][0]["mounted_key"]["current"], json!(true));
    let is_new = |bench: &CephInstallation| {
        let line = command_line(bench);
        let told = ["client.moved", "--messenger secure", &monitors];
        assert!(told.iter().all(|word| line.contains(word)), "{line}");
    };
    is_new(&bench);
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);

    // The agent has the VM as it was started: by the former way.
    count(&mut console);
    let server = bench.server();
    bench.kill_server_of_pool();
    bench.is_served_again(VM, server);
    is_new(&bench);
    let server = bench.server();
    bench.here.kill_agent();
    bench.kill_server_of_pool();
    bench.here.start_agent().unwrap();
    bench.is_served_again(VM, server);
    is_new(&bench);
    // The former agent carried it.
    bench.here.wait_host().unwrap();
    let mut console = bench.here.console(VM).unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    bench.shares_data();
    let key = std::fs::read_to_string(keyring).unwrap();
    let key = key.lines().find_map(|line| line.trim().strip_prefix("key = ")).unwrap();
    assert!(!bench.log().contains(key), "a key is in a log");
    bench.here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}

/// What cannot be mounted says why, and nothing is added.
#[test]
fn a_pool_that_cannot_be_mounted_is_refused() {
    let here = Installation::new().unwrap();
    let add = |more: &[&str]| {
        here.refused(
            &[&["datastore", "add", "ceph", "--host", "here", "--pool", "p"], more].concat(),
        )
        .unwrap()
    };
    let monitors = ["--monitors", "v2:127.0.0.1:1/0"];
    let user = add(&[&monitors[..], &["--user", "admin"]].concat());
    assert!(user.contains("client."), "{user}");
    let keyring = add(&[&monitors[..], &["--keyring", "keyring"]].concat());
    assert!(keyring.contains("absolute"), "{keyring}");
    let listed = here.vmseal(&["datastore", "list"]).unwrap();
    assert!(!listed.contains("ceph"), "{listed}");
}
