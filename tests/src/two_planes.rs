//! Two control planes on this machine, with a host each, and a VM that goes from one to the other.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use crate::dying_guest::End;
use crate::eventually;
use crate::held_steps::half_made;
use crate::installation::{Installation, text};
use crate::two_hosts::HERE;

/// The control planes, as they know each other.
pub const NAMES: [&str; 2] = ["west", "east"];

/// More options of their agents: guests of the second one's host have other users, as both hosts are this machine.
const AGENTS: [&[&str]; 2] = [&[], &["--uid-base", "2300000"]];

/// Both, which do not know each other yet.
#[must_use]
pub fn planes() -> [Installation; 2] {
    let mut planes = [(); 2].map(|()| Installation::new().unwrap());
    restart_agent(&mut planes[1], 1);
    planes
}

/// The agent of the control plane with this index dies, and another one starts.
pub fn restart_agent(here: &mut Installation, index: usize) {
    here.kill_agent();
    here.start_agent_with(AGENTS[index]).unwrap();
}

/// Has one control plane know another one by this name, and call it there; a user compares the fingerprint.
pub fn introduce(one: &Installation, other: &Installation, (name, url): (&str, &str)) {
    let token = other.path("server/admin.token");
    let add = ["remote", "add", name, url, "--remote-token-file", text(&token).unwrap()];
    let added = one.answered(&add, "yes\n").unwrap();
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
}

/// One control plane alone has the VM, whole and under a key, and nothing of it is `left` at the other one. Both are at rest.
pub fn is_alone(there: &Installation, left: &Installation, vm: &str) {
    let shown = there.vm(vm).unwrap();
    assert_eq!(shown["lifecycle"], "ready", "{shown}");
    assert_eq!(left.json(&["vm", "list"]).unwrap(), serde_json::json!([]));
    End { here: left, host: HERE }.wait_free();
    let files = |here: &Installation| here.datastore_entries(&here.path("datastore")).ok();
    let is_empty = || files(left).filter(Vec::is_empty).map(drop);
    eventually("no file is left at the other one", is_empty)
        .unwrap_or_else(|error| panic!("{error}: {:?}", files(left)));
    let is_whole = || files(there).filter(|files| !files.iter().any(|it| half_made(it))).map(drop);
    eventually("nothing is left of what made its disks, or copied them", is_whole)
        .unwrap_or_else(|error| panic!("{error}: {:?}", files(there)));
    let is_told = || left.alarms(vm).ok().filter(Vec::is_empty).map(drop);
    eventually("no alarm is left at the other one", is_told)
        .unwrap_or_else(|error| panic!("{error}: {:?}", left.alarms(vm)));
    assert_eq!((living_keys(there), living_keys(left)), (1, 0), "keys here, and there");
}

/// How many keys a provider has made and not destroyed.
fn living_keys(here: &Installation) -> usize {
    let count = |kind| {
        let events = here.json(&["events", "--kind", kind]).unwrap();
        events.as_array().unwrap().len()
    };
    count("key.created") - count("key.destroyed")
}
