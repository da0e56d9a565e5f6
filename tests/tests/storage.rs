//! More than one datastore: where disks lie, how much room they take, what is told of each.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, text};

/// The standings of what is on a datastore, with the disks' names.
fn scanned(here: &Installation, datastore: &str) -> Vec<(String, Value)> {
    let scan = here.json(&["datastore", "scan", datastore]).unwrap();
    assert_eq!(scan["incomplete"], Value::Null, "{scan}");
    let images = scan["images"].as_array().unwrap();
    images
        .iter()
        .map(|image| (image["standing"].as_str().unwrap().to_owned(), image["disk"].clone()))
        .collect()
}

fn allocated(image: &Path) -> u64 {
    image.metadata().unwrap().blocks() * 512
}

#[test]
fn a_vm_has_disks_on_two_datastores_and_a_scan_tells_what_belongs_to_whom() {
    let here = Installation::new().unwrap();
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let add = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&add).unwrap();
    here.vmseal(&["policy", "add", "thick", "--encrypt", "--preallocate"]).unwrap();
    let mark = |place: &Path| std::fs::read(place.join("vmseal-datastore.json")).unwrap();
    assert_ne!(mark(&here.path("datastore")), mark(&second), "two datastores have one mark");
    for datastore in here.json(&["datastore", "list"]).unwrap().as_array().unwrap() {
        assert!(datastore["usage"]["capacity"].as_u64() >= datastore["usage"]["free"].as_u64());
        assert!(datastore["usage"]["free"].as_u64() > Some(0), "{datastore}");
    }

    let image = here.counter_image().unwrap();
    let system = format!("name=system,datastore=local,image={}", text(&image).unwrap());
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
    assert!(said.unwrap().contains("bytes are needed"));
    assert!(here.refused(&["vm", "show", "huge"]).unwrap().contains("no VM"));

    // Somebody's copy of the disk, and the directory of a VM that is not there any more.
    let copied = second.join(format!("{vm}/{}.raw", disks[1]["id"].as_str().unwrap()));
    std::fs::copy(&copied, second.join("copy.img")).unwrap();
    let gone = second.join("01890a5d-ac96-774b-bcce-b302099a8057");
    std::fs::create_dir(&gone).unwrap();
    std::fs::copy(&copied, gone.join("01890a5d-ac96-774b-bcce-b302099a8058.raw")).unwrap();
    let told = scanned(&here, "second");
    let count = |standing: &str| told.iter().filter(|(it, _)| it == standing).count();
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
