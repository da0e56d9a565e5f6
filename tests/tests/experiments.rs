//! `vmseal lab run` of the experiments about operations, about a disk that is encrypted, and about the pause of a snapshot, in the smallest
//! sizes. All is measured that is compared; no figure is judged.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use serde_json::Value;
use vmseal_tests::experiment::measured;

const OPERATIONS: &str = include_str!("../../bench/experiments/operations.toml");
const ENCRYPTING: &str = include_str!("../../bench/experiments/encrypting-io.toml");
const SNAPSHOTS: &str = include_str!("../../bench/experiments/snapshot-pause.toml");

/// Each operation, and what it is measured on.
const COMPARED: [(&str, &[&str]); 8] = [
    ("ops-power-on", &["encrypted", "plain"]),
    ("ops-clone", &["encrypted", "plain"]),
    ("ops-snapshot", &["encrypted", "plain"]),
    ("ops-suspend", &["encrypted", "plain", "qemu-by-hand"]),
    ("ops-resume", &["encrypted", "plain", "qemu-by-hand"]),
    // A VM in the clear has no key.
    ("ops-shallow-recrypt", &["encrypted"]),
    ("ops-encrypt", &["encrypted", "qemu-img"]),
    ("ops-backup", &["encrypted", "full-backup"]),
];

/// An experiment with these parts of its file replaced.
fn changed(experiment: &str, parts: &[(&str, &str)]) -> String {
    parts.iter().fold(experiment.to_owned(), |text, (from, to)| {
        assert_eq!(text.matches(*from).count(), 1, "{from}");
        text.replace(*from, to)
    })
}

/// The cells of an experiment that could be measured: each load or operation with each system, once.
fn cells(experiment: &Value, compared: &[(&str, &[&str])]) -> Vec<Value> {
    assert!(experiment["refused"].is_null(), "{}", experiment["refused"]);
    let cells = experiment["measured"][0]["cells"].as_array().unwrap();
    let named = |cell: &Value| {
        let [workload, system] = ["workload", "system"].map(|it| cell[it].as_str().unwrap());
        (workload.to_owned(), system.to_owned())
    };
    let mut found: Vec<_> = cells.iter().map(named).collect();
    let all = compared.iter().flat_map(|(workload, systems)| {
        systems.iter().map(move |system| ((*workload).to_owned(), (*system).to_owned()))
    });
    let mut expected: Vec<_> = all.collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected, "{experiment:#}");
    cells.clone()
}

/// A value of a cell, which is more than nothing.
fn value(cell: &Value, name: &str) -> f64 {
    let value = cell[name].as_f64();
    value.filter(|it| *it > 0.0).unwrap_or_else(|| panic!("{name}: {cell:#}"))
}

#[test]
fn each_operation_is_measured_on_all_that_it_is_compared_on() {
    let smallest = changed(
        OPERATIONS,
        &[
            ("size_mib = [256]", "size_mib = [8]"),
            ("\"shallow-recrypt\"]", "\"shallow-recrypt\", \"encrypt\", \"backup\"]"),
            ("memory_mib = 128", "memory_mib = 32"),
        ],
    );
    let home = tempfile::tempdir().unwrap();
    // Guests and filters run as users of their own.
    std::fs::set_permissions(home.path(), Permissions::from_mode(0o711)).unwrap();
    let place = ["--rounds", "1", "--ext4-directory"].map(OsStr::new);
    let experiment = measured(&smallest, place.into_iter().chain([home.path().as_os_str()]));
    let cells = cells(&experiment, &COMPARED);
    for cell in &cells {
        value(cell, "seconds");
    }
    let read = |system: &str| {
        let is_it = |cell: &&Value| cell["workload"] == "ops-backup" && cell["system"] == system;
        value(cells.iter().find(is_it).unwrap(), "read_bytes")
    };
    assert!(read("encrypted") < read("full-backup"), "{experiment:#}");
    // What is shown of them, and what is claimed.
    let shown = experiment["measured"][0]["operations"].as_array().unwrap();
    assert_eq!(shown.len(), cells.len(), "{experiment:#}");
    for operation in shown {
        value(&operation["seconds"], "median");
    }
    assert!(experiment["claim"].is_object(), "{experiment:#}");
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "something is left");
}

#[test]
fn a_disk_is_measured_while_it_is_encrypted_and_while_a_snapshot_is_taken() {
    let memory = ("storage = \"ext4\"", "storage = \"memory\"");
    let small = "small = { rounds = 1, seconds = 0.5, size_mib = 16 }";
    let systems: &[&str] = &["vmseal-plain", "vmseal-plain-encrypting"];
    let encrypting = (
        changed(
            ENCRYPTING,
            &[memory, ("small = { rounds = 20, seconds = 1.0, size_mib = 1024 }", small)],
        ),
        vec![("encrypting-4k-alone-read", systems), ("encrypting-4k-alone-write", systems)],
    );
    let systems: &[&str] = &["vmseal-encrypted", "vmseal-encrypted-snapshots"];
    let snapshots = (
        changed(
            SNAPSHOTS,
            &[
                memory,
                ("cuts = 30\n", ""),
                ("small = { rounds = 10, seconds = 6.0, size_mib = 256 }", small),
            ],
        ),
        vec![("snapshot-pause-4k-write", systems)],
    );
    for (experiment, compared) in [encrypting, snapshots] {
        let experiment = measured(&experiment, [] as [&str; 0]);
        for cell in cells(&experiment, &compared) {
            for name in ["requests", "iops", "p50", "p99"] {
                value(&cell, name);
            }
            assert!(cell["gap"].is_number(), "{cell:#}");
        }
    }
}
