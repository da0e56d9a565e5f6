//! What VMs use and what is left of a host, as the command line shows it, with a real guest.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::installation::Installation;

#[test]
fn a_guest_that_runs_uses_processor_memory_and_disk_and_one_that_does_not_is_left_out() {
    let here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    here.create_counter("cold", "encrypted").unwrap();
    let none = here.json(&["vm", "top", "-n", "1", "--delay", "0.2s"]).unwrap();
    assert_eq!(none["vms"].as_array().unwrap().len(), 0);
    assert_eq!(here.boot_counter("web").unwrap(), 1);

    let look = || here.json(&["vm", "top", "--iterations", "1", "--delay", "0.5s"]).unwrap();
    let shown = look();
    let vms = shown["vms"].as_array().unwrap();
    assert_eq!(vms.len(), 1, "{shown}");
    assert_eq!((&vms[0]["name"], &vms[0]["host"]), (&"web".into(), &"here".into()));
    assert!(vms[0]["memory_resident"].as_u64().unwrap() > 1 << 20, "{shown}");
    assert_eq!(vms[0]["errors"], 0);
    // It has no network card: nothing is known, which is not zero.
    assert!(vms[0].get("received_bytes_per_second").is_none(), "{shown}");
    // The guest has read its boot sector and written its number.
    let used: Value = serde_json::from_str(
        &here.vmseal(&["vm", "top", "web", "-n1", "-d0.2s", "-ojson"]).unwrap(),
    )
    .unwrap();
    assert_eq!(used["vms"][0]["name"], "web");
    let text = here.vmseal(&["vm", "show", "web"]).unwrap();
    assert!(text.contains("CPU SINCE START") && text.contains("MEMORY IN USE"), "{text}");
    assert!(!text.contains("RECEIVED SINCE START"), "{text}");
    let written = text.lines().find(|line| line.starts_with("WRITTEN SINCE START")).unwrap();
    assert!(!written.contains("in 0 requests"), "{written}");
    assert!(!here.vmseal(&["vm", "show", "cold"]).unwrap().contains("SINCE START"));
    // A boot sector that waits in a loop is busy, or halts: both are a number.
    let table = here.vmseal(&["vm", "top", "--batch", "-n", "2", "-d", "0.2s"]).unwrap();
    let headers = table.lines().filter(|line| line.starts_with("NAME")).count();
    assert_eq!(headers, 2, "{table}");
    assert!(here.refused(&["vm", "top", "nobody", "-n", "1"]).unwrap().contains("no VM 'nobody'"));

    let host = eventually("the host's room is shown", || {
        let host = here.json(&["host", "show", "here"]).ok()?;
        (host["room"]["running"] == 1).then_some(host)
    })
    .unwrap();
    let (room, described) = (&host["room"], &host["description"]);
    assert_eq!((&room["vms"], &room["vcpus"]), (&2.into(), &2.into()));
    assert_eq!(room["memory_running"], 32 << 20);
    let left = described["memory"].as_u64().unwrap() - (32 << 20);
    assert_eq!(room["memory_left"].as_u64().unwrap(), left);
    assert_eq!(room["datastores"][0]["name"], "local");
    let text = here.vmseal(&["host", "show", "here"]).unwrap();
    assert!(text.contains("MEMORY LEFT") && text.contains("local: "), "{text}");
}
