//! More than one datastore: where disks are, how much room they take, what is reported about each.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, create, text};

/// The statuses of what is on a datastore, with the disks' names.
fn scanned(here: &Installation, datastore: &str) -> Vec<(String, Value)> {
    let scan = here.json(&["datastore", "scan", datastore]).unwrap();
    assert_eq!(scan["incomplete"], Value::Null, "{scan}");
    let images = scan["images"].as_array().unwrap();
    images
        .iter()
        .map(|image| (image["status"].as_str().unwrap().to_owned(), image["disk"].clone()))
        .collect()
}

fn allocated(image: &Path) -> u64 {
    image.metadata().unwrap().blocks() * 512
}

/// Adds a datastore in a new directory of its own; gives that.
fn add(here: &Installation, host: &str, name: &str) -> PathBuf {
    let directory = here.path(&format!("{host}-{name}"));
    std::fs::create_dir(&directory).unwrap();
    let place = text(&directory).unwrap();
    here.vmseal(&["datastore", "add", name, "--host", host, "--path", place]).unwrap();
    directory
}

#[test]
fn hosts_have_datastores_of_one_name_and_a_disk_is_on_the_one_that_was_asked_for() {
    let mut here = Installation::new().unwrap();
    here.add_host("there").unwrap();
    let (fast, bulk) = (add(&here, "here", "fast"), add(&here, "here", "bulk"));
    let (fast_there, bulk_there) = (add(&here, "there", "fast"), add(&here, "there", "bulk"));
    let place = text(&fast_there).unwrap();
    let twice = ["datastore", "add", "fast", "--host", "there", "--path", place];
    assert!(here.refused(&twice).unwrap().contains("fast"), "one host has two of one name");
    here.vmseal(&["policy", "create", "thick", "--encrypt", "--preallocate"]).unwrap();

    let listed = here.json(&["datastore", "list"]).unwrap();
    let mut names: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|it| {
            let (capacity, free) = (&it["usage"]["capacity"], &it["usage"]["free"]);
            let real = nix::sys::statvfs::statvfs(&fast).unwrap();
            assert_eq!(capacity.as_u64().unwrap(), real.blocks() * real.fragment_size(), "{it}");
            assert!((1..=capacity.as_u64().unwrap()).contains(&free.as_u64().unwrap()), "{it}");
            format!("{}:{}", it["hosts"][0]["host"].as_str().unwrap(), it["name"].as_str().unwrap())
        })
        .collect();
    names.sort();
    assert_eq!(names, ["here:bulk", "here:fast", "here:local", "there:bulk", "there:fast"]);

    // Which of two is never guessed.
    let options = ["vm", "create", "web", "--memory", "32MiB", "--policy", "thick", "--disk"];
    let said = here.refused(&[&options[..], &["datastore=fast,size=8MiB"]].concat()).unwrap();
    assert!(said.contains("here:fast") && said.contains("there:fast"), "{said}");
    let mixed = ["datastore=there:fast,size=8MiB", "--disk", "datastore=here:bulk,size=8MiB"];
    let said = here.refused(&[&options[..], &mixed].concat()).unwrap();
    assert!(said.contains("belongs to host 'here'"), "{said}");

    let image = here.counter_image().unwrap();
    let system =
        format!("name=system,datastore=there:fast,format=raw,image={}", text(&image).unwrap());
    let disks = [&system, "--disk", "name=data,datastore=there:bulk,size=64MiB"];
    here.vmseal(&[&options[..], &disks].concat()).unwrap();
    here.vmseal(&create("thin", "encrypted", "datastore=there:bulk,size=64MiB")).unwrap();
    let (web, thin) = (here.vm("web").unwrap(), here.vm("thin").unwrap());
    assert_eq!((&web["host"], &thin["host"]), (&"there".into(), &"there".into()));
    let file = |vm: &Value, index: usize, place: &Path| {
        let disk = vm["disks"][index]["id"].as_str().unwrap();
        place.join(format!("{}/{disk}.raw", vm["id"].as_str().unwrap()))
    };
    // A preallocated disk has all its room from the start; a thin one has little more than a header.
    for (index, place) in [(0, &fast_there), (1, &bulk_there)] {
        let image = file(&web, index, place);
        let (length, allocated) = (image.metadata().unwrap().len(), allocated(&image));
        assert!(length > 8 << 20 && allocated >= length, "{allocated} of {length} bytes");
    }
    let image = file(&thin, 0, &bulk_there);
    let (length, taken) = (image.metadata().unwrap().len(), allocated(&image));
    assert!(length >= 64 << 20 && taken < length / 2, "{taken} of {length} bytes");
    for empty in [&fast, &bulk] {
        assert!(here.datastore_entries(empty).unwrap().is_empty(), "a disk lies on another host");
    }
    assert_eq!(here.boot_counter("web").unwrap(), 1);

    // A disk of no VM is reported on its own datastore, and on no other of the same name.
    std::fs::copy(&image, bulk_there.join("forgotten.img")).unwrap();
    let table = here.vmseal(&["datastore", "scan", "there:bulk"]).unwrap();
    let line = table.lines().find(|line| line.contains("forgotten.img")).unwrap();
    assert!(line.starts_with("orphan"), "{table}");
    assert_eq!(scanned(&here, "there:bulk").len(), 3);
    assert_eq!(scanned(&here, "here:bulk"), []);
    let said = here.refused(&["datastore", "scan", "bulk"]).unwrap();
    assert!(said.contains("here:bulk"), "{said}");

    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    for vm in ["web", "thin"] {
        here.vmseal(&["vm", "delete", vm]).unwrap();
    }
    here.vmseal(&["datastore", "remove", "there:fast"]).unwrap();
    here.vmseal(&["datastore", "show", "fast"]).unwrap();
}

#[test]
fn a_vm_has_disks_on_two_datastores_and_a_scan_tells_what_belongs_to_whom() {
    let here = Installation::new().unwrap();
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let add = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&add).unwrap();
    here.vmseal(&["policy", "create", "thick", "--encrypt", "--preallocate"]).unwrap();
    let mark = |place: &Path| std::fs::read(place.join("vmseal-datastore.json")).unwrap();
    assert_ne!(mark(&here.path("datastore")), mark(&second), "two datastores have one mark");
    for datastore in here.json(&["datastore", "list"]).unwrap().as_array().unwrap() {
        assert!(datastore["usage"]["capacity"].as_u64() >= datastore["usage"]["free"].as_u64());
        assert!(datastore["usage"]["free"].as_u64() > Some(0), "{datastore}");
    }

    let image = here.counter_image().unwrap();
    let system = format!("name=system,datastore=local,format=raw,image={}", text(&image).unwrap());
    let data = "name=data,datastore=second,size=64MiB";
    let make = ["vm", "create", "web", "--memory", "32MiB", "--disk", &system, "--disk", data];
    here.vmseal(&[&make[..], &["--policy", "thick"]].concat()).unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    let shown = here.vm("web").unwrap();
    let (vm, disks) = (shown["id"].as_str().unwrap(), shown["disks"].as_array().unwrap());
    for (disk, place) in disks.iter().zip([here.path("datastore"), second.clone()]) {
        assert_eq!(disk["allocation"], "preallocated");
        let image = place.join(format!("{vm}/{}.raw", disk["id"].as_str().unwrap()));
        let (length, allocated) = (image.metadata().unwrap().len(), allocated(&image));
        assert!(allocated >= length, "{allocated} of {length} bytes are allocated");
    }
    let said = here.refused(&[
        "vm",
        "create",
        "huge",
        "--policy",
        "thick",
        "--disk",
        "datastore=second,size=60TiB",
    ]);
    assert!(said.unwrap().contains("are needed in"));
    assert!(here.refused(&["vm", "show", "huge"]).unwrap().contains("no VM"));

    // A copy of the disk, and the directory of a VM that no longer exists.
    let copied = second.join(format!("{vm}/{}.raw", disks[1]["id"].as_str().unwrap()));
    std::fs::copy(&copied, second.join("copy.img")).unwrap();
    let gone = second.join("01890a5d-ac96-774b-bcce-b302099a8057");
    std::fs::create_dir(&gone).unwrap();
    std::fs::copy(&copied, gone.join("01890a5d-ac96-774b-bcce-b302099a8058.raw")).unwrap();
    let told = scanned(&here, "second");
    let count = |status: &str| told.iter().filter(|(it, _)| it == status).count();
    assert_eq!((count("orphan"), count("in_use"), told.len()), (2, 1, 3), "{told:?}");
    assert!(told.contains(&("in_use".to_owned(), "data".into())), "{told:?}");
    assert_eq!(scanned(&here, "local"), [("in_use".to_owned(), "system".into())]);
    let table = here.vmseal(&["datastore", "scan", "second"]).unwrap();
    assert!(table.contains("copy.img") && table.contains("orphan"), "{table}");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    std::fs::rename(&copied, here.path("put-away")).unwrap();
    assert!(scanned(&here, "second").contains(&("missing".to_owned(), "data".into())));
    std::fs::rename(here.path("put-away"), &copied).unwrap();

    // Another file system is mounted where the datastore was, or none.
    let right = mark(&second);
    std::fs::remove_file(second.join("vmseal-datastore.json")).unwrap();
    let why = here.wait_alarm("second", "datastore-wrong").unwrap();
    assert!(why.contains("mounted"), "{why}");
    assert!(!second.join("vmseal-datastore.json").exists(), "looking at it has marked it");
    assert!(here.refused(&["datastore", "scan", "second"]).unwrap().contains("mounted"));
    std::fs::write(second.join("vmseal-datastore.json"), right).unwrap();
    here.wait_no_alarm("second", "datastore-wrong").unwrap();
    eventually("the VM starts again", || here.vmseal(&["vm", "start", "web"]).ok()).unwrap();
}
