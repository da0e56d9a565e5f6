//! The experiments that come with vmseal, and finding one by its id or its file.

use std::path::Path;
use std::sync::LazyLock;

use serde::Serialize;

use crate::definition::{self, Definition, DefinitionError, Matter};

/// Their files.
macro_rules! files {
    ($($name:literal),*) => {
        [$(($name, include_str!(concat!("../../../bench/experiments/", $name, ".toml")))),*]
    };
}

const FILES: &[(&str, &str)] = &files![
    "memory",
    "ext4",
    "scaling",
    "nbd",
    "v1",
    "v2",
    "v3",
    "v4",
    "v5",
    "v6",
    "v7",
    "v8",
    "v9",
    "v10",
    "v11",
    "c1",
    "c2",
    "c3",
    "c4",
    "c5",
    "c6",
    "c7",
    "h",
    "snapshot-io",
    "snapshot-io-device",
    "encrypting-io",
    "snapshot-pause",
    "ceph-client",
    "ceph-clients",
    "ceph-process",
    "ceph-snapshot",
    "operations",
    "encrypt",
    "backup",
    "x3",
    "migration-throughput",
    "migration-gap",
    "migration-idle-gap",
    "migration-bandwidth",
    "migration-compression",
    "migration-distance",
    "migration-mixes",
    "migration-course",
    "migration-database"
];

/// An experiment, as it is listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// Its name.
    pub id: String,
    /// What is measured: `disk`, `operation`, `migration`.
    pub subject: &'static str,
    /// What it asks.
    pub title: String,
}

/// The experiments that come with vmseal.
#[must_use]
pub fn list() -> Vec<Listed> {
    let listed = |it: &Definition| {
        let subject = match it.matter {
            Matter::Disk(..) => "disk",
            Matter::Operation(..) => "operation",
            Matter::Migration(..) => "migration",
        };
        Listed { id: it.id.clone(), subject, title: it.title.clone() }
    };
    CATALOGUE.iter().map(listed).collect()
}

/// All of them, in the order in which they are listed.
pub static CATALOGUE: LazyLock<Vec<Definition>> = LazyLock::new(|| {
    let read = |(name, text): &(&str, &str)| {
        let path = format!("bench/experiments/{name}.toml");
        definition::parse(Path::new(&path), text).expect("a test reads every file")
    };
    FILES.iter().map(read).collect()
});

/// The experiment of this id, or of the file at this path.
///
/// # Errors
/// [`DefinitionError`].
pub fn find(id: &str) -> Result<Definition, DefinitionError> {
    if let Some(found) = CATALOGUE.iter().find(|it| it.id == id) {
        return Ok(found.clone());
    }
    let path = Path::new(id);
    if path.extension().is_some_and(|extension| extension == "toml") || path.is_file() {
        return definition::read(path);
    }
    Err(DefinitionError::Unknown { id: id.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Interval;

    #[test]
    fn scripts_bench_runs_every_experiment() {
        let script = include_str!("../../../scripts/bench");
        let commands = script.lines().filter(|line| !line.trim_start().starts_with('#'));
        let words: Vec<&str> = commands.flat_map(str::split_whitespace).collect();
        // The sections of `vmseal lab disk`.
        let by_disk = ["memory", "ext4", "nbd"];
        for Definition { id, .. } in CATALOGUE.iter() {
            let runs = words.contains(&id.as_str()) || by_disk.contains(&id.as_str());
            assert!(runs, "scripts/bench does not run {id}");
        }
    }

    #[test]
    fn every_experiment_has_rounds_enough_for_bounds_of_a_median() {
        for Definition { id, matter, .. } in CATALOGUE.iter() {
            let rounds = match matter {
                Matter::Disk(_, steps) => [steps.small.rounds, steps.full.rounds],
                Matter::Operation(_, steps) => [steps.small.rounds, steps.full.rounds],
                Matter::Migration(_, steps) => [steps.small.rounds, steps.full.rounds],
            };
            for rounds in rounds {
                let bounds = Interval::of((0..rounds).map(f64::from)).unwrap();
                assert!(bounds.lower.is_some(), "{id}: {rounds} rounds are too few");
            }
        }
    }

    #[test]
    fn every_file_is_an_experiment_named_as_its_file() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/experiments");
        let mut found: Vec<String> = Vec::new();
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let id = definition::read(&path).unwrap().id;
            assert_eq!(path.file_stem().unwrap().to_str(), Some(id.as_str()));
            found.push(id);
        }
        let mut known: Vec<_> = CATALOGUE.iter().map(|it| it.id.clone()).collect();
        found.sort();
        known.sort();
        assert_eq!(found, known);
    }

    #[test]
    fn an_experiment_is_found_by_id_or_file() {
        assert_eq!(find("v1").unwrap().id, "v1");
        let unknown = find("v99").unwrap_err().to_string();
        assert!(unknown.contains("no experiment v99"), "{unknown}");
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mine.toml");
        let text = FILES.iter().find(|(name, _)| *name == "v3").unwrap().1;
        std::fs::write(&path, text.replace("id = \"v3\"", "id = \"mine\"")).unwrap();
        assert_eq!(find(path.to_str().unwrap()).unwrap().id, "mine");
    }
}
