//! Every chain whose filter is killed: each filter alone and several together, on each encryption and on none.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use super::backends::SIZE;
use crate::seed::tries_all;

/// The chains, the filters of each from the guest downwards; placeholders for files are filled in by [`in_place`].
pub fn all() -> Vec<Vec<Value>> {
    let encryptions = [None, Some("zero"), Some("ciphertext")];
    // Above the encryption, and below it.
    let around = [
        (vec![], vec![]),
        (vec![limit()], vec![]),
        (vec![fault(&["write"])], vec![]),
        (vec![fault(&["write"])], vec![delay()]),
        (vec![], vec![delay()]),
        (vec![], vec![cache()]),
        (vec![], vec![replicate()]),
        (vec![], vec![fault(&["read", "write"])]),
        (vec![limit()], vec![cache(), replicate()]),
        (vec![], vec![cache(), delay(), fault(&["read", "write"])]),
        (
            vec![limit()],
            vec![cache(), fault(&["read", "write", "discard", "flush"]), replicate(), delay()],
        ),
    ];
    let one = |holes: Option<&str>, (above, below): &(Vec<Value>, Vec<Value>)| {
        let crypt = holes.map(crypt);
        above.iter().cloned().chain(crypt).chain(below.iter().cloned()).collect()
    };
    encryptions.iter().flat_map(|holes| around.iter().map(|around| one(*holes, around))).collect()
}

/// Those that a run tries: all, or a third of them and the last one, in which requests wait.
pub fn of_run(random: &mut fastrand::Rng) -> Vec<Vec<Value>> {
    let mut chains = all();
    let last = chains.pop();
    chains.retain(|_| tries_all() || random.u8(..3) == 0);
    chains.into_iter().chain(last).collect()
}

/// Its filters by name.
pub fn name(chain: &[Value]) -> String {
    let name = |link: &Value| {
        let kind = link["kind"].as_str().unwrap();
        match link["holes"].as_str() {
            Some(holes) => format!("{kind} ({holes})"),
            None => kind.to_owned(),
        }
    };
    if chain.is_empty() {
        return "plain".to_owned();
    }
    chain.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// What a zero sector below the encryption reads as above it, if there is any: "zero", or "ciphertext" and so noise.
pub fn holes(chain: &[Value]) -> Option<&str> {
    chain.iter().find_map(|link| link["holes"].as_str())
}

/// Whether a rule of the chain makes one of these operations fail.
pub fn fails(chain: &[Value], operations: &[&str]) -> bool {
    let rules = chain.iter().filter_map(|link| link["rules"].as_array());
    let mut named = rules.flatten().flat_map(|rule| rule["operations"].as_array().unwrap());
    named.any(|named| operations.contains(&named.as_str().unwrap()))
}

/// The chain, with its files made in this directory.
pub fn in_place(chain: &[Value], path: &Path) -> Value {
    let key = path.join("key");
    std::fs::write(&key, (0..64u8).collect::<Vec<_>>()).unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    File::create(path.join("replica")).unwrap().set_len(SIZE).unwrap();
    File::create(path.join("map")).unwrap();
    let mut named = json!(chain).to_string();
    for (word, name) in [("KEY", "key"), ("REPLICA", "replica"), ("MAP", "map")] {
        named = named.replace(word, path.join(name).to_str().unwrap());
    }
    serde_json::from_str(&named).unwrap()
}

/// The chain with other random seeds.
pub fn seeded(in_place: &Value, random: &mut fastrand::Rng) -> Value {
    let mut chain = in_place.clone();
    let links = chain.as_array_mut().into_iter().flatten();
    for link in links.filter(|link| link["kind"] == "fault") {
        link["seed"] = json!(random.u64(..));
    }
    chain
}

fn crypt(holes: &str) -> Value {
    json!({ "kind": "crypt", "key": { "path": "KEY" }, "holes": holes })
}

fn limit() -> Value {
    json!({ "kind": "limit", "requests": { "per_second": 20_000, "burst": 2 } })
}

fn delay() -> Value {
    json!({ "kind": "delay", "microseconds": 50, "jitter_microseconds": 200, "reorders": true })
}

fn cache() -> Value {
    json!({ "kind": "cache", "bytes": 1 << 20 })
}

fn replicate() -> Value {
    json!({
        "kind": "replicate", "replica": { "path": "REPLICA" }, "map": { "path": "MAP" },
        "bytes_per_second": 1_u64 << 30
    })
}

/// Errors of these operations, and torn writes.
fn fault(operations: &[&str]) -> Value {
    let errors =
        json!({ "operations": operations, "kind": { "is": "error", "errno": 5 }, "one_in": 20 });
    let torn = json!({ "operations": ["write"], "kind": { "is": "torn" }, "one_in": 20 });
    json!({ "kind": "fault", "rules": [errors, torn] })
}
