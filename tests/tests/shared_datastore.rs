//! A datastore that two hosts share: VMs of both run from it, and neither host touches what the other one makes.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};

use serde_json::Value;
use uuid::Uuid;
use vmseal_tests::eventually;
use vmseal_tests::guest::counter_disk;
use vmseal_tests::installation::{DISK_SIZE, Installation, create, text};

/// The size of a disk whose import takes a while.
const LARGE: u64 = 192 << 20;

/// Hosts `here` and `there`, which share the datastore `local`.
fn shared() -> Installation {
    let mut here = Installation::new().unwrap();
    here.add_host("there").unwrap();
    here.vmseal(&["datastore", "share", "local", "--host", "there"]).unwrap();
    here
}

/// Makes a VM of the counting guest on a host.
fn create_on(here: &Installation, host: &str, vm: &str) {
    let image = here.counter_image().unwrap();
    let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
    let made = [&create(vm, "encrypted", &disk)[..], &["--host", host]].concat();
    here.vmseal(&made).unwrap();
    assert_eq!(here.vm(vm).unwrap()["host"], host);
}

fn id(vm: &Value) -> String {
    vm["id"].as_str().unwrap().to_owned()
}

/// What an agent left that died while it made a disk, without a lock or a note.
fn debris(datastore: &Path, vm: &str) -> PathBuf {
    let home = datastore.join(vm);
    std::fs::create_dir_all(&home).unwrap();
    let path = home.join(format!("{}.raw.creating", Uuid::new_v4()));
    std::fs::write(&path, "half of it").unwrap();
    path
}

#[test]
fn vms_of_two_hosts_run_from_one_datastore() {
    let mut here = shared();
    let shown = here.json(&["datastore", "show", "local"]).unwrap();
    let hosts: Vec<_> = shown["hosts"].as_array().unwrap().iter().collect();
    assert_eq!((&hosts[0]["host"], &hosts[1]["host"]), (&"here".into(), &"there".into()));
    assert_eq!(hosts[0]["location"], hosts[1]["location"]);
    // It is one datastore, by whichever name.
    for name in ["here:local", "there:local", shown["id"].as_str().unwrap()] {
        assert_eq!(here.json(&["datastore", "show", name]).unwrap()["id"], shown["id"]);
    }
    create_on(&here, "here", "one");
    create_on(&here, "there", "two");
    for vm in ["one", "two"] {
        assert_eq!(here.boot_counter(vm).unwrap(), 1);
    }
    assert_eq!(here.guest_processes("qemu-system-x86_64").len(), 1);
    assert_eq!(here.guest_processes_on("there", "qemu-system-x86_64").len(), 1);
    // Both see what is there, and know whose it is.
    for name in ["here:local", "there:local"] {
        let scan = here.json(&["datastore", "scan", name]).unwrap();
        let images = scan["images"].as_array().unwrap();
        assert!(images.len() == 2 && images.iter().all(|it| it["status"] == "in_use"), "{scan}");
    }
    // Guests run on without the agents, and disks of VMs that are off are added and moved on either host.
    here.kill_agent_of("there").unwrap();
    here.start_agent_of("there").unwrap();
    here.console("two").unwrap().next_count().unwrap();
    here.vmseal(&["vm", "stop", "two", "--force"]).unwrap();
    here.vmseal(&["disk", "add", "two", "--disk", "name=more,datastore=local,size=8MiB"]).unwrap();
    let own = here.path("own");
    std::fs::create_dir(&own).unwrap();
    let place = text(&own).unwrap();
    here.vmseal(&["datastore", "add", "own", "--host", "there", "--path", place]).unwrap();
    here.vmseal(&["vm", "move", "two", "--datastore", "own"]).unwrap();
    here.vmseal(&["vm", "move", "two", "--datastore", "local"]).unwrap();
    here.vmseal(&["vm", "start", "two"]).unwrap();
    let refused = here.refused(&["vm", "move", "one", "--datastore", "own"]).unwrap();
    assert!(refused.contains("belongs to host 'there'"), "{refused}");
    for vm in ["one", "two"] {
        here.console(vm).unwrap().next_count().unwrap();
        here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
        here.vmseal(&["vm", "delete", vm]).unwrap();
    }
    assert_eq!(
        here.datastore_entries(&here.path("datastore")).unwrap(),
        [""; 0].map(PathBuf::from)
    );
}

/// A host's agent starts, and sweeps the datastore, while the other host makes a disk, and while one that it left half-made is
/// there without anybody's lock.
#[test]
fn a_host_removes_nothing_of_anothers_vms() {
    let mut here = shared();
    let datastore = here.path("datastore");
    create_on(&here, "here", "one");
    create_on(&here, "there", "two");
    let [one, two] = ["one", "two"].map(|vm| id(&here.vm(vm).unwrap()));
    let image = here.path("large.raw");
    counter_disk(&image, LARGE).unwrap();
    let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
    let made =
        [&create("three", "encrypted", &disk)[..], &["--host", "here", "--no-wait"]].concat();
    here.kill_agent_of("there").unwrap();
    let left = [debris(&datastore, &one), debris(&datastore, &Uuid::new_v4().to_string())];
    let own = debris(&datastore, &two);
    let task = here.json(&made).unwrap();
    here.start_agent_of("there").unwrap();
    eventually("its own debris is gone", || (!own.exists()).then_some(())).unwrap();
    for left in left {
        assert!(left.exists(), "{} was removed", left.display());
    }
    here.vmseal(&["task", "wait", task["id"].as_str().unwrap()]).unwrap();
    for vm in ["one", "two", "three"] {
        assert_eq!(here.boot_counter(vm).unwrap(), 1);
    }
}

/// Another server works with the directory, by mistake: what one host has open, no agent opens.
#[test]
fn a_disk_that_is_open_on_one_host_is_opened_on_no_other() {
    let here = Installation::new().unwrap();
    let other = Installation::new().unwrap();
    here.create_counter("one", "plain").unwrap();
    assert_eq!(here.boot_counter("one").unwrap(), 1);
    let directory = here.path("datastore");
    let place = ["--host", "here", "--path", text(&directory).unwrap(), "--existing"];
    other.vmseal(&[&["datastore", "add", "same"][..], &place].concat()).unwrap();
    other.vmseal(&["datastore", "adopt", "same"]).unwrap();
    let refused = other.refused(&["vm", "start", "one"]).unwrap();
    assert!(refused.contains("in use"), "{refused}");
    here.console("one").unwrap().next_count().unwrap();
}

#[test]
fn what_is_not_the_same_datastore_is_not_shared_and_what_is_used_is_not_unshared() {
    let mut here = shared();
    let share = |name: &str, path: &Path| {
        let path = path.to_str().unwrap().to_owned();
        ["datastore", "share", name, "--host", "there", "--path", &path].map(str::to_owned)
    };
    let refused = |here: &Installation, arguments: &[String]| {
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let dry = here.refused(&[&arguments[..], &["--dry-run"]].concat()).unwrap();
        (here.refused(&arguments).unwrap(), dry)
    };
    let (said, _) = refused(&here, &share("local", &here.path("datastore")));
    assert!(said.contains("has datastore 'local' already"), "{said}");
    let (mine, empty, copy) = (here.path("mine"), here.path("empty"), here.path("copy"));
    for directory in [&mine, &empty, &copy] {
        std::fs::create_dir(directory).unwrap();
    }
    let place = text(&mine).unwrap();
    here.vmseal(&["datastore", "add", "mine", "--host", "here", "--path", place]).unwrap();
    let (said, dry) = refused(&here, &share("mine", &empty));
    assert!(said.contains("host 'there'") && said.contains("not marked"), "{said}");
    assert!(dry.contains("does not carry the mark"), "{dry}");
    let mark = "vmseal-datastore.json";
    std::fs::copy(mine.join(mark), copy.join(mark)).unwrap();
    let said = here.refused(&share("mine", &copy).each_ref().map(String::as_str)).unwrap();
    assert!(said.contains("it is a copy"), "{said}");
    let added = ["datastore", "add", "again", "--host", "there", "--path", place];
    let said = here.refused(&added).unwrap();
    assert!(said.contains("vmseal datastore share mine --host there"), "{said}");
    // Where it is on the other host may have another name.
    let link = here.path("link");
    std::os::unix::fs::symlink(&mine, &link).unwrap();
    here.vmseal(&share("mine", &link).each_ref().map(String::as_str)).unwrap();
    let listed = here.vmseal(&["datastore", "list"]).unwrap();
    assert!(listed.contains("here,there") && listed.contains("/link"), "{listed}");

    here.vmseal(&create("one", "plain", "datastore=there:mine,size=8MiB")).unwrap();
    assert_eq!(here.vm("one").unwrap()["host"], "there");
    let unshare = |host: &'static str| ["datastore", "unshare", "mine", "--host", host];
    let said = here.refused(&unshare("there")).unwrap();
    assert!(said.contains("'one'"), "{said}");
    here.vmseal(&["vm", "delete", "one"]).unwrap();
    here.vmseal(&unshare("there")).unwrap();
    let said = here.refused(&unshare("there")).unwrap();
    assert!(said.contains("does not have"), "{said}");
    let said = here.refused(&unshare("here")).unwrap();
    assert!(said.contains("vmseal datastore remove mine"), "{said}");
    here.vmseal(&["datastore", "remove", "mine"]).unwrap();
    here.kill_agent_of("there").unwrap();
    let said = here.refused(&create("two", "plain", "datastore=there:local,size=8MiB")).unwrap();
    assert!(said.contains("unreachable"), "{said}");
    // Where nothing is said, a host that answers gets the VM.
    here.vmseal(&create("two", "plain", &format!("datastore=local,size={DISK_SIZE}"))).unwrap();
    assert_eq!(here.vm("two").unwrap()["host"], "here");
}
