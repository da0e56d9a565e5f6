//! What the file of an experiment says of migrations.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;

use super::{AxisValue, Checked, DefinitionError, Rounds, not_repeated, zero};

/// What the guest of a migration can fill, in MiB: a machine has its memory in one piece up to 2 GiB.
const TOUCHED_MAX_MIB: u64 = 1920;
/// The most that it changes in a second, in MiB: more than an emulated one can.
const CHANGES_MAX_MIB: u64 = 4096;
/// How often a number is repeated at most: of memory with more of it nothing is left.
const REPEATS_MAX: u64 = 64;
/// The fastest line, in megabits a second: above what one stream carries anywhere.
const LINE_MAX_MBIT: u64 = 400_000;
/// The longest line, there and back in microseconds: two satellites.
const RTT_MAX_US: u64 = 2_000_000;
/// The largest disk that is copied, in MiB: 1 TiB.
const DISK_MAX_MIB: u64 = 1 << 20;
/// How often a disk that redis writes to has the size of what redis holds, at least: its log, the next one while that is written, and
/// as much again for what their file system keeps.
const DISK_BY_SIZE: u64 = 4;
/// What such a disk has besides, in MiB: at most 1000 values of a KiB are written in a second, so it is enough for four minutes.
const LOG_MIB: u64 = 256;

/// What migrates: VMs of vmseal, encrypted (compressed, or not), plain by what they have for `--migration-encryption`, and encrypted to
/// an agent that has QEMU load the memory; and guests of QEMUs by hand, in the clear and by TLS, with one stream for all and with so many
/// for memory (multifd): which number is the fastest depends on the machine.
pub const MIGRATION_SYSTEMS: [&str; 13] = [
    "encrypted",
    "compressed",
    "required",
    "disabled",
    "unplaced",
    "qemu-tcp",
    "qemu-multifd-1",
    "qemu-multifd-2",
    "qemu-multifd-4",
    "qemu-tls",
    "qemu-tls-multifd-1",
    "qemu-tls-multifd-2",
    "qemu-tls-multifd-4",
];

/// Those that go over long lines, copy disks, have redis, and run on: of vmseal, with both hosts alike.
const OF_VMSEAL: usize = 4;

/// The axis of what clients ask.
pub const MIXES: &str = "mixes";

/// The points at which migrations are measured: every combination.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationMatrix {
    /// Measured in turn within a round, of [`MIGRATION_SYSTEMS`].
    pub systems: Vec<String>,
    /// How much memory the guest has filled.
    pub size_mib: Vec<u64>,
    /// How much of it the guest changes in a second; 0 is a guest that stands still.
    #[serde(default = "zero")]
    pub changes_mib: Vec<u64>,
    /// How often each of the numbers is repeated that fill its memory: 1 is memory that cannot be compressed.
    #[serde(default = "not_repeated")]
    pub repeats: Vec<u64>,
    /// What a client outside asks of redis in the guest; without it the guest has no redis, and no network.
    #[serde(default)]
    pub mixes: Vec<Mix>,
    /// How large the disk is that is copied to a datastore of the other host; 0 is a small one on a datastore of both. A guest with redis
    /// has it besides, and redis writes its log there.
    #[serde(default = "zero")]
    pub disk_mib: Vec<u64>,
    /// What the line between the hosts carries, in megabits a second; 0 is all that the machine can do.
    #[serde(default = "zero")]
    pub line_mbit: Vec<u64>,
    /// How long it takes over the line there and back; 0 everywhere is both hosts in one network.
    #[serde(default = "zero")]
    pub rtt_us: Vec<u64>,
}

/// How migrations are measured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationSteps {
    /// Whether a guest runs on after its move and makes the next one, so that many moves take little time; else it is started for each,
    /// and stopped. Those with redis always run on.
    #[serde(default)]
    pub runs_on: bool,
    /// In minutes.
    pub small: Rounds,
    /// As much as the guest can fill.
    pub full: Rounds,
}

/// What a client asks of redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Mix {
    /// Nothing but whether it is there.
    Idle,
    /// So many of a hundred requests are GET, and the others SET.
    Gets(u8),
}

impl TryFrom<String> for Mix {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text == "idle" {
            return Ok(Self::Idle);
        }
        let numbers = text
            .split_once('-')
            .and_then(|(gets, sets)| Some((gets.parse::<u8>().ok()?, sets.parse::<u8>().ok()?)));
        match numbers {
            Some((gets, sets)) if u16::from(gets) + u16::from(sets) == 100 => Ok(Self::Gets(gets)),
            _ => Err(format!(
                "{text} is not allowed: `idle`, or how many of 100 requests are GET and SET, as `75-25`"
            )),
        }
    }
}

impl From<Mix> for AxisValue {
    fn from(mix: Mix) -> Self {
        Self::Name(mix.to_string())
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle => f.write_str("idle"),
            Self::Gets(gets) => write!(f, "{gets}-{}", 100 - gets),
        }
    }
}

impl MigrationMatrix {
    /// The keys that a point can be told by, with their values.
    pub(super) fn axes(&self) -> BTreeMap<&'static str, Vec<u64>> {
        BTreeMap::from([
            ("size_mib", self.size_mib.clone()),
            ("changes_mib", self.changes_mib.clone()),
            ("repeats", self.repeats.clone()),
            ("disk_mib", self.disk_mib.clone()),
            ("line_mbit", self.line_mbit.clone()),
            ("rtt_us", self.rtt_us.clone()),
        ])
    }

    /// The key that a point can be told by and whose values are names, where it has values.
    pub(super) fn named_axis(&self) -> Option<(&'static str, Vec<AxisValue>)> {
        let mixes: Vec<AxisValue> = self.mixes.iter().map(|mix| (*mix).into()).collect();
        Some((MIXES, mixes)).filter(|(_, mixes)| !mixes.is_empty())
    }

    /// Whether the hosts have networks of their own, with a line between them.
    pub(crate) fn is_long(&self) -> bool {
        self.rtt_us.iter().any(|it| *it > 0)
    }

    /// Whether disks are copied.
    pub(crate) fn copies_disks(&self) -> bool {
        self.disk_mib.iter().any(|it| *it > 0)
    }

    /// Whether redis writes to disks that are copied.
    pub(crate) fn writes_to_disks(&self) -> bool {
        self.copies_disks() && !self.mixes.is_empty()
    }
}

impl Checked<'_> {
    pub(super) fn migration(
        &self,
        matrix: &MigrationMatrix,
        steps: &MigrationSteps,
    ) -> Result<(), DefinitionError> {
        let more =
            matrix.is_long() || matrix.copies_disks() || !matrix.mixes.is_empty() || steps.runs_on;
        let systems = if more { &MIGRATION_SYSTEMS[..OF_VMSEAL] } else { &MIGRATION_SYSTEMS[..] };
        self.systems(&matrix.systems, systems)?;
        let sizes = (1, TOUCHED_MAX_MIB);
        self.axis("matrix.size_mib", &matrix.size_mib, sizes)?;
        self.axis("matrix.changes_mib", &matrix.changes_mib, (0, CHANGES_MAX_MIB))?;
        self.axis("matrix.repeats", &matrix.repeats, (1, REPEATS_MAX))?;
        self.axis("matrix.disk_mib", &matrix.disk_mib, (0, DISK_MAX_MIB))?;
        self.axis("matrix.line_mbit", &matrix.line_mbit, (0, LINE_MAX_MBIT))?;
        self.axis("matrix.rtt_us", &matrix.rtt_us, (0, RTT_MAX_US))?;
        for (at, mix) in matrix.mixes.iter().enumerate() {
            if matrix.mixes[..at].contains(mix) {
                return self.refuse("matrix.mixes", mix, "each value once");
            }
        }
        // What the guest with redis has in its memory is what its client has put there.
        for (key, values, only) in
            [("matrix.changes_mib", &matrix.changes_mib, 0), ("matrix.repeats", &matrix.repeats, 1)]
        {
            let other = values.iter().find(|value| **value != only);
            if let Some(other) = other.filter(|_| !matrix.mixes.is_empty()) {
                return self.refuse(key, other, format!("with matrix.mixes only {only}"));
            }
        }
        self.rounds([&steps.small, &steps.full], sizes)?;
        if matrix.writes_to_disks() { self.logs_fit(matrix, steps) } else { Ok(()) }
    }

    /// Disks that redis writes to have room for its log, whatever it holds.
    fn logs_fit(
        &self,
        matrix: &MigrationMatrix,
        steps: &MigrationSteps,
    ) -> Result<(), DefinitionError> {
        let chosen = [&steps.small, &steps.full].map(|rounds| rounds.size_mib.as_ref());
        let sizes = chosen.map(|sizes| sizes.unwrap_or(&matrix.size_mib));
        let largest = sizes.into_iter().flatten().max().copied().unwrap_or_default();
        let least = largest * DISK_BY_SIZE + LOG_MIB;
        let is_small = |disk: &&u64| **disk > 0 && **disk < least;
        match matrix.disk_mib.iter().find(is_small) {
            Some(disk) => {
                let allowed = format!(
                    "with matrix.mixes 0, or {DISK_BY_SIZE} times a size_mib of {largest} and {LOG_MIB} for redis' log: at least {least}"
                );
                self.refuse("matrix.disk_mib", disk, allowed)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::tests::refused_of;
    use super::super::{Matter, parse};

    #[test]
    fn a_migration_has_systems_memory_and_lines_that_there_can_be() {
        let good = include_str!("../../../../bench/experiments/migration-bandwidth.toml");
        for (from, to, expected) in [
            (
                "\"disabled\"]",
                "\"other\"]",
                "other is not allowed: each once of encrypted, compressed, required",
            ),
            ("size_mib = [512]", "size_mib = [4096]", "4096 is not allowed: from 1 to 1920"),
            ("line_mbit = [500,", "line_mbit = [500, 500,", "each value once"),
            ("line_mbit = [500,", "line = [500,", "unknown field `line`"),
            ("\"throughput\", ", "", "claim.checks.measure: Throughput is not allowed"),
        ] {
            let found = refused_of(good, from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
        }
    }

    #[test]
    fn a_long_line_and_requests_are_of_vmseal_s_own_guests() {
        let distance = include_str!("../../../../bench/experiments/migration-distance.toml");
        let mixes = include_str!("../../../../bench/experiments/migration-mixes.toml");
        let idle = include_str!("../../../../bench/experiments/migration-idle-gap.toml");
        for (good, from, to, expected) in [
            (distance, "\"disabled\"]", "\"qemu-tcp\"]", "qemu-tcp is not allowed: each once of"),
            (idle, "\"disabled\"]", "\"unplaced\"]", "unplaced is not allowed: each once of"),
            (
                idle,
                "runs_on = true",
                "runs_on = 1",
                "invalid type: integer `1`, expected a boolean",
            ),
            (distance, "rtt_us = [500,", "rtt_us = [5000000,", "from 0 to 2000000"),
            (
                distance,
                "beside = { rtt_us = 500 }",
                "beside = { rtt_us = 7 }",
                "a value of matrix.rtt_us",
            ),
            (
                distance,
                "beside = { rtt_us = 500 }",
                "beside = { rtt = 500 }",
                "keys are changes_mib",
            ),
            (distance, "\nbeside = { rtt_us = 500 }", "", "denominator: encrypted is not allowed"),
            (mixes, "\"75-25\"", "\"75-20\"", "75-20 is not allowed: `idle`, or how many"),
            (mixes, "\"75-25\"", "\"50-50\"", "50-50 is not allowed: each value once"),
            (mixes, "mixes = ", "changes_mib = [9]\nmixes = ", "with matrix.mixes only 0"),
            (mixes, "mixes = ", "repeats = [9]\nmixes = ", "with matrix.mixes only 1"),
            (mixes, "mixes = ", "disk_mib = [9]\nmixes = ", "disk_mib: 9 is not allowed"),
            (
                mixes,
                "where = { mixes = \"100-0\" }",
                "where = { mixes = \"99-1\" }",
                "claim.checks.where.mixes: 99-1 is not allowed: a value of matrix.mixes",
            ),
        ] {
            let found = refused_of(good, from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
        }
    }

    #[test]
    fn a_disk_that_redis_writes_to_has_room_for_its_log() {
        let good = include_str!("../../../../bench/experiments/migration-database.toml");
        let parsed = parse(Path::new("mine.toml"), good).unwrap();
        let Matter::Migration(matrix, _) = parsed.matter else { panic!("it is about migrations") };
        assert!(matrix.writes_to_disks() && matrix.is_long());
        for (from, to, expected) in [
            ("disk_mib = [512]", "disk_mib = [511]", "511 is not allowed: with matrix.mixes 0, or"),
            ("disk_mib = [512]", "disk_mib = [0, 512, 64]", "matrix.disk_mib: 64 is not allowed"),
            ("size_mib = [64]", "size_mib = [65]", "a size_mib of 65 and 256 for redis' log"),
            ("full = { rounds = 20 }", "full = { rounds = 20, size_mib = [512] }", "at least 2304"),
        ] {
            let found = refused_of(good, from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
        }
        // In memory it needs none.
        let in_memory = good.replace("disk_mib = [512]", "disk_mib = [0]");
        assert!(parse(Path::new("mine.toml"), &in_memory).is_ok());
    }

    #[test]
    fn a_difference_takes_two_systems() {
        let good = include_str!("../../../../bench/experiments/migration-throughput.toml");
        for (from, to, expected) in [
            (
                "compare = \"difference\"",
                "compare = \"alone\"",
                "claim.checks.compare: alone is not allowed: without a denominator",
            ),
            (
                "denominator = \"disabled\"\ncompare = \"difference\"",
                "compare = \"difference\"",
                "claim.checks.compare: difference is not allowed: with a denominator",
            ),
        ] {
            let found = refused_of(good, from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
        }
    }
}
