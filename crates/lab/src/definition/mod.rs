//! An experiment as data: a TOML file that says what is measured, at which points, and what is claimed.
//! `docs/benchmarks.md` describes the keys. Nothing in a file is trusted: sizes, counts and names have limits.

mod axis;
mod claims;
mod loads;
mod migration;
mod pools;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use self::axis::AxisValue;
pub use self::claims::{Check, Claim, Comparable};
use self::loads::DEPTH_MAX;
pub use self::loads::LoadSpec;
pub use self::migration::{MIGRATION_SYSTEMS, MIXES, MigrationMatrix, MigrationSteps, Mix};
pub use self::pools::{CLUSTERS, REDUNDANCY};
use crate::ceph::redundancy::Raid;
use crate::ceph::setup::Setup;
use crate::goals::Metric;
use crate::statistics::VALUES_MAX;
use crate::storage::Storage;
use crate::systems::{FILES_SYSTEMS, LIBRBD_SYSTEMS, MORE_SYSTEMS, SYSTEMS, Transport};

/// The longest file, in bytes.
const FILE_MAX: u64 = 64 * 1024;
/// The most values of one key of a matrix: 64 systems, loads or sizes take hours.
const AXIS_MAX: usize = 64;
/// The most points of a matrix; each takes rounds of its own.
const POINTS_MAX: usize = 256;
/// The longest id: it is part of a file's name, and of the names of loads.
const ID_MAX: usize = 40;
/// The most disks of one server, the most neighbours of its core, and the most clients of Ceph.
const MANY: u32 = 16;
/// The most that is in flight of a disk, in MiB: as many of the largest requests as there may be.
const IN_FLIGHT_MAX_MIB: u64 = 1024;
/// The longest delay of storage, in microseconds: ten seconds.
const DELAY_MAX_US: u64 = 10_000_000;
/// The longest measurement of one cell, in seconds.
const SECONDS_MAX: f64 = 3600.0;

/// Why a definition cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DefinitionError {
    /// There is no such file, or it is too long.
    #[error("the experiment in {} cannot be read (at most {FILE_MAX} bytes)", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// It is not TOML, or a key is unknown, missing or of another type.
    #[error("{}: {}", path.display(), source.to_string().trim_end())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why; shown in full above.
        source: Box<toml::de::Error>,
    },
    /// A value that is not allowed.
    #[error("{}: {key}: {found} is not allowed: {allowed}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What is.
        allowed: String,
    },
    /// Neither the id of an experiment nor a file.
    #[error(
        "there is no experiment {id}; `vmseal lab list` lists them, and the path of a file can be given, too"
    )]
    Unknown {
        /// What was asked for.
        id: String,
    },
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SubjectKind {
    /// Servers of disks under the load generator.
    Disk,
    /// Operations of an installation.
    Operation,
    /// Running guests that move to another host.
    Migration,
}

/// An experiment.
#[derive(Clone, Debug)]
pub struct Definition {
    /// Its name.
    pub id: String,
    /// What it is about, in a line.
    pub title: String,
    /// What of the values is shown; the JSON has all.
    pub measures: Vec<Metric>,
    /// Where and how often.
    pub matter: Matter,
    /// What the documents, or we, say of the result.
    pub claim: Option<Claim>,
}

/// The part that is the subject's.
#[derive(Clone, Debug)]
pub enum Matter {
    /// Of disks.
    Disk(DiskMatrix, DiskSteps),
    /// Of operations.
    Operation(OperationMatrix, OperationSteps),
    /// Of migrations.
    Migration(MigrationMatrix, MigrationSteps),
}

#[derive(Deserialize)]
struct Head {
    subject: SubjectKind,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Whole<M, S> {
    id: String,
    title: String,
    #[serde(rename = "subject")]
    _subject: SubjectKind,
    measures: Vec<Metric>,
    matrix: M,
    steps: S,
    claim: Option<Claim>,
}

/// The points at which disks are measured: every combination.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskMatrix {
    /// Measured in turn within a round.
    pub systems: Vec<String>,
    /// How many disks a server has, each with a client.
    #[serde(default = "one")]
    pub disks: Vec<u32>,
    /// How many clients of Ceph there are, each with a mount of the pool and a server of its own.
    #[serde(default = "one")]
    pub clients: Vec<u32>,
    /// The latency that is added to the storage, below the encryption.
    #[serde(default = "zero")]
    pub delay_us: Vec<u64>,
    /// How many CPU-bound threads share the server's core.
    #[serde(default = "none")]
    pub neighbours: Vec<u32>,
    /// How pools of Ceph keep the disks; without it, in two copies.
    #[serde(default)]
    pub redundancy: Vec<Raid>,
    /// How the clusters are set up whose pools have the disks; without it, it is the cluster that is given first.
    #[serde(default)]
    pub clusters: Vec<Setup>,
    /// The loads.
    pub loads: Vec<LoadSpec>,
}

fn one() -> Vec<u32> {
    vec![1]
}

fn none() -> Vec<u32> {
    vec![0]
}

fn zero() -> Vec<u64> {
    vec![0]
}

fn not_repeated() -> Vec<u64> {
    vec![1]
}

fn once() -> u32 {
    1
}

/// How disks are measured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSteps {
    /// Where the disks are.
    pub storage: Storage,
    /// How they are served.
    pub transport: Transport,
    /// Whether they are also measured without work.
    #[serde(default)]
    pub idle: bool,
    /// Whether large loads are compared with the computed limit.
    #[serde(default)]
    pub limit: bool,
    /// How many shorter rounds replace each round.
    #[serde(default = "once")]
    pub cuts: u32,
    /// How often the disks are made.
    #[serde(default = "once")]
    pub places: u32,
    /// In minutes.
    pub small: Extent,
    /// As the documents do it.
    pub full: Extent,
}

impl DiskSteps {
    /// How much is measured.
    #[must_use]
    pub fn extent(&self, full: bool) -> Extent {
        if full { self.full } else { self.small }
    }
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// How often everything is measured.
    pub rounds: u32,
    /// How long a cell is measured.
    pub seconds: f64,
    /// The size of each disk; of systems that are several disks by themselves, of all.
    pub size_mib: u64,
    /// How many disks a server has, in place of the matrix's.
    pub disks: Option<u32>,
    /// How many clients of Ceph there are, in place of the matrix's.
    pub clients: Option<u32>,
    /// The most requests in flight, where loads have more.
    pub depth: Option<u16>,
    /// The most that is in flight of a disk, in MiB, where loads have more: large requests are fewer then, and never none.
    pub in_flight_mib: Option<u64>,
}

impl Extent {
    /// The requests in flight of a load.
    fn depth_of(&self, load: &LoadSpec) -> u16 {
        let bytes = self.in_flight_mib.map_or(u64::MAX, |mib| mib << 20);
        let fit = u16::try_from(bytes / u64::from(load.block)).unwrap_or(u16::MAX);
        load.depth.min(self.depth.unwrap_or(DEPTH_MAX)).min(fit.max(1))
    }
}

/// The points at which operations are measured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperationMatrix {
    /// The sizes of the VM's disk.
    pub size_mib: Vec<u64>,
    /// How many VMs do it at once.
    #[serde(default = "one")]
    pub at_once: Vec<u32>,
    /// What is done.
    pub operations: Vec<Operation>,
}

/// What operations are measured on; the third one only copies, the fourth one is of an encrypted VM, and the last one is a guest that
/// vmseal has no part in, which is suspended to a file in the clear and resumed.
pub const OPERATION_SYSTEMS: [&str; 5] =
    ["encrypted", "plain", "qemu-img", "full-backup", "qemu-by-hand"];

/// What an installation is asked for, and its time taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// A VM that is off is started.
    PowerOn,
    /// A VM that is off is cloned.
    Clone,
    /// A snapshot of the disks of a running VM.
    Snapshot,
    /// The memory of a running VM is saved.
    Suspend,
    /// It goes on.
    Resume,
    /// A plain VM that runs is encrypted; beside it `qemu-img convert` copies the same disk.
    Encrypt,
    /// A VM that is off gets another key.
    ShallowRecrypt,
    /// A running VM is backed up after its guest has changed a hundredth of its disk; beside it all of it is.
    Backup,
}

impl Operation {
    /// Its name in goals and results.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::PowerOn => "power-on",
            Self::Clone => "clone",
            Self::Snapshot => "snapshot",
            Self::Suspend => "suspend",
            Self::Resume => "resume",
            Self::Encrypt => "encrypt",
            Self::ShallowRecrypt => "shallow-recrypt",
            Self::Backup => "backup",
        }
    }
}

/// How operations are measured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperationSteps {
    /// Where the disks are; none is wherever the user's directory is.
    pub storage: Option<Storage>,
    /// The guest's memory.
    pub memory_mib: u64,
    /// In minutes.
    pub small: Rounds,
    /// As the documents do it.
    pub full: Rounds,
}

/// How often operations or migrations are measured.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rounds {
    /// How often everything is measured.
    pub rounds: u32,
    /// Sizes in place of the matrix's.
    pub size_mib: Option<Vec<u64>>,
}

/// Reads a definition from a file.
///
/// # Errors
/// [`DefinitionError`].
pub fn read(path: &Path) -> Result<Definition, DefinitionError> {
    let failed = |source| DefinitionError::Read { path: path.into(), source };
    if std::fs::metadata(path).map_err(failed)?.len() > FILE_MAX {
        return Err(failed(std::io::ErrorKind::FileTooLarge.into()));
    }
    parse(path, &std::fs::read_to_string(path).map_err(failed)?)
}

/// Reads a definition from the text of a file.
///
/// # Errors
/// [`DefinitionError`].
pub fn parse(path: &Path, text: &str) -> Result<Definition, DefinitionError> {
    let Head { subject } = typed(path, text)?;
    let found = match subject {
        SubjectKind::Disk => typed::<Whole<_, _>>(path, text)?.with(Matter::Disk),
        SubjectKind::Operation => typed::<Whole<_, _>>(path, text)?.with(Matter::Operation),
        SubjectKind::Migration => typed::<Whole<_, _>>(path, text)?.with(Matter::Migration),
    };
    let checked = Checked { path };
    checked.definition(&found)?;
    Ok(found)
}

fn typed<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, DefinitionError> {
    let failed = |source| DefinitionError::Parse { path: path.into(), source: Box::new(source) };
    toml::from_str(text).map_err(failed)
}

impl<M, S> Whole<M, S> {
    fn with(self, matter: impl FnOnce(M, S) -> Matter) -> Definition {
        let Self { id, title, measures, matrix, steps, claim, .. } = self;
        Definition { id, title, measures, matter: matter(matrix, steps), claim }
    }
}

impl Definition {
    /// The systems that can be compared.
    fn systems(&self) -> Vec<&str> {
        match &self.matter {
            Matter::Disk(matrix, _) => matrix.systems.iter().map(String::as_str).collect(),
            Matter::Operation(..) => OPERATION_SYSTEMS.to_vec(),
            Matter::Migration(matrix, _) => matrix.systems.iter().map(String::as_str).collect(),
        }
    }

    /// Where the disks are, if that is said.
    #[must_use]
    pub fn storage(&self) -> Option<Storage> {
        match &self.matter {
            Matter::Disk(_, steps) => Some(steps.storage),
            Matter::Operation(_, steps) => steps.storage,
            Matter::Migration(..) => None,
        }
    }

    /// The keys of the matrix that a point can be told by, with their values.
    fn axes(&self) -> BTreeMap<&'static str, Vec<AxisValue>> {
        let wide = |values: &[u32]| values.iter().map(|value| u64::from(*value)).collect();
        let numbers: BTreeMap<&'static str, Vec<u64>> = match &self.matter {
            Matter::Disk(matrix, _) => BTreeMap::from([
                ("disks", wide(&matrix.disks)),
                ("clients", wide(&matrix.clients)),
                ("delay_us", matrix.delay_us.clone()),
                ("neighbours", wide(&matrix.neighbours)),
            ]),
            Matter::Operation(matrix, _) => BTreeMap::from([
                ("size_mib", matrix.size_mib.clone()),
                ("at_once", wide(&matrix.at_once)),
            ]),
            Matter::Migration(matrix, _) => matrix.axes(),
        };
        let values = |of: Vec<u64>| of.into_iter().map(AxisValue::from).collect::<Vec<_>>();
        let axes = numbers.into_iter().map(|(axis, of)| (axis, values(of)));
        let mixes = match &self.matter {
            Matter::Migration(matrix, _) => matrix.named_axis(),
            Matter::Disk(..) | Matter::Operation(..) => None,
        };
        axes.chain(self.named_axes()).chain(mixes).collect()
    }

    /// The experiment with what its extent has in place of the matrix's.
    #[must_use]
    pub fn within(mut self, full: bool) -> Self {
        if let Matter::Disk(matrix, steps) = &mut self.matter {
            let extent = steps.extent(full);
            if let Some(disks) = extent.disks {
                matrix.disks = vec![disks];
            }
            if let Some(clients) = extent.clients {
                matrix.clients = vec![clients];
            }
            matrix.loads.iter_mut().for_each(|load| load.depth = extent.depth_of(load));
        }
        self
    }
}

/// Checks the values of a file.
struct Checked<'a> {
    path: &'a Path,
}

impl Checked<'_> {
    fn refuse(
        &self,
        key: &str,
        found: impl ToString,
        allowed: impl Into<String>,
    ) -> Result<(), DefinitionError> {
        let (key, found) = (key.to_owned(), found.to_string());
        Err(DefinitionError::Value { path: self.path.into(), key, found, allowed: allowed.into() })
    }

    fn id(&self, key: &str, id: &str) -> Result<(), DefinitionError> {
        let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if !id.is_empty() && id.len() <= ID_MAX && id.chars().all(good) {
            return Ok(());
        }
        self.refuse(key, id, format!("1 to {ID_MAX} of a to z, 0 to 9 and -"))
    }

    fn range<T: PartialOrd + std::fmt::Display>(
        &self,
        key: &str,
        value: T,
        (least, most): (T, T),
    ) -> Result<(), DefinitionError> {
        if value >= least && value <= most {
            return Ok(());
        }
        self.refuse(key, value, format!("from {least} to {most}"))
    }

    /// A key with values: some, each in a range and there once.
    fn axis<T: PartialOrd + std::fmt::Display + Copy>(
        &self,
        key: &str,
        values: &[T],
        range: (T, T),
    ) -> Result<(), DefinitionError> {
        self.range(&format!("number of {key}"), values.len(), (1, AXIS_MAX))?;
        for (at, value) in values.iter().enumerate() {
            self.range(key, *value, range)?;
            if values[..at].contains(value) {
                return self.refuse(key, value, "each value once");
            }
        }
        Ok(())
    }

    fn definition(&self, definition: &Definition) -> Result<(), DefinitionError> {
        self.id("id", &definition.id)?;
        self.range("length of title", definition.title.len(), (1, 200))?;
        self.range("number of measures", definition.measures.len(), (1, AXIS_MAX))?;
        match &definition.matter {
            Matter::Disk(matrix, steps) => self.disk(matrix, steps)?,
            Matter::Operation(matrix, steps) => self.operation(matrix, steps)?,
            Matter::Migration(matrix, steps) => self.migration(matrix, steps)?,
        }
        let points: usize = definition.axes().values().map(Vec::len).product();
        self.range("number of points of matrix", points, (1, POINTS_MAX))?;
        definition.claim.iter().try_for_each(|claim| self.claim(definition, claim))
    }

    /// Systems to be measured, of those that are known.
    fn systems(&self, chosen: &[String], known: &[&str]) -> Result<(), DefinitionError> {
        self.range("number of matrix.systems", chosen.len(), (1, AXIS_MAX))?;
        for (at, system) in chosen.iter().enumerate() {
            if !known.contains(&system.as_str()) || chosen[..at].contains(system) {
                let allowed = format!("each once of {}", known.join(", "));
                return self.refuse("matrix.systems", system, allowed);
            }
        }
        Ok(())
    }

    fn disk(&self, matrix: &DiskMatrix, steps: &DiskSteps) -> Result<(), DefinitionError> {
        self.systems(&matrix.systems, &[&SYSTEMS[..], &MORE_SYSTEMS].concat())?;
        self.axis("matrix.disks", &matrix.disks, (1, MANY))?;
        self.axis("matrix.delay_us", &matrix.delay_us, (0, DELAY_MAX_US))?;
        self.axis("matrix.neighbours", &matrix.neighbours, (0, MANY))?;
        self.pools(matrix, steps)?;
        let on_ceph = steps.storage == Storage::Ceph;
        let others = matrix
            .systems
            .iter()
            .find(|id| !["vmseal-encrypted", "vmseal-plain"].contains(&id.as_str()));
        self.of_librbd(matrix, steps)?;
        if steps.idle && on_ceph {
            let allowed = "false, as vmseal-rbd talks to `ceph` also without work";
            return self.refuse("steps.idle", steps.idle, allowed);
        }
        let chosen = [steps.small, steps.full].map(|extent| extent.disks.or(extent.clients));
        let several = matrix.disks != [1] || matrix.clients != [1] || chosen != [None; 2];
        if let Some(other) = others
            && (several || matrix.delay_us != [0])
        {
            let allowed = "only vmseal-encrypted and vmseal-plain have `disks` and `delay_us`, or \
                           several `clients`";
            return self.refuse("matrix.systems", other, allowed);
        }
        self.loads(&matrix.loads)?;
        self.range("steps.cuts", steps.cuts, (1, 100))?;
        self.range("steps.places", steps.places, (1, 100))?;
        for (key, extent) in [("steps.small", steps.small), ("steps.full", steps.full)] {
            self.range(&format!("{key}.rounds"), extent.rounds, (1, VALUES_MAX as u32))?;
            self.range(&format!("{key}.seconds"), extent.seconds, (0.01, SECONDS_MAX))?;
            self.range(&format!("{key}.size_mib"), extent.size_mib, (16, 1 << 20))?;
            self.range(&format!("{key}.disks"), extent.disks.unwrap_or(1), (1, MANY))?;
            self.range(&format!("{key}.depth"), extent.depth.unwrap_or(1), (1, DEPTH_MAX))?;
            let in_flight = extent.in_flight_mib.unwrap_or(1);
            self.range(&format!("{key}.in_flight_mib"), in_flight, (1, IN_FLIGHT_MAX_MIB))?;
        }
        Ok(())
    }

    /// What has disks on Ceph, and what has them there alone.
    fn of_librbd(&self, matrix: &DiskMatrix, steps: &DiskSteps) -> Result<(), DefinitionError> {
        let of_both = ["vmseal-encrypted", "vmseal-plain", "vmseal-encrypted-snapshot"];
        let is_librbd = |id: &str| LIBRBD_SYSTEMS.contains(&id);
        let is_of_ceph = |id: &str| is_librbd(id) || FILES_SYSTEMS.contains(&id);
        let on_ceph = steps.storage == Storage::Ceph;
        let has_none = |id: &&String| {
            if on_ceph {
                !of_both.contains(&id.as_str()) && !is_of_ceph(id)
            } else {
                is_of_ceph(id)
            }
        };
        if let Some(other) = matrix.systems.iter().find(has_none) {
            let of_ceph = [&FILES_SYSTEMS[..], &LIBRBD_SYSTEMS].concat().join(", ");
            let allowed = match on_ceph {
                true => format!("only {}, {of_ceph} have disks on `ceph`", of_both.join(", ")),
                false => format!("{of_ceph} have disks on `ceph` alone"),
            };
            return self.refuse("matrix.systems", other, allowed);
        }
        let others = matrix.systems.iter().find(|id| is_librbd(id));
        if let Some(other) = others
            && (steps.transport != Transport::VhostUser || matrix.neighbours != [0])
        {
            let allowed = "with `vhost-user-blk` and without `neighbours`, as it has all cores";
            return self.refuse("matrix.systems", other, allowed);
        }
        Ok(())
    }

    fn operation(
        &self,
        matrix: &OperationMatrix,
        steps: &OperationSteps,
    ) -> Result<(), DefinitionError> {
        let sizes = (8, 1 << 20);
        self.axis("matrix.size_mib", &matrix.size_mib, sizes)?;
        self.axis("matrix.at_once", &matrix.at_once, (1, MANY))?;
        self.range("number of matrix.operations", matrix.operations.len(), (1, AXIS_MAX))?;
        if steps.storage == Some(Storage::Ceph) && matrix.operations.contains(&Operation::Encrypt) {
            let allowed =
                "all others on `ceph`: what it is compared with copies files of a directory";
            return self.refuse("matrix.operations", Operation::Encrypt.id(), allowed);
        }
        self.range("steps.memory_mib", steps.memory_mib, (32, 1 << 20))?;
        self.rounds([&steps.small, &steps.full], sizes)
    }

    fn rounds(
        &self,
        [small, full]: [&Rounds; 2],
        sizes: (u64, u64),
    ) -> Result<(), DefinitionError> {
        for (key, rounds) in [("steps.small", small), ("steps.full", full)] {
            self.range(&format!("{key}.rounds"), rounds.rounds, (1, VALUES_MAX as u32))?;
            if let Some(values) = &rounds.size_mib {
                self.axis(&format!("{key}.size_mib"), values, sizes)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const GOOD: &str = include_str!("../../../../bench/experiments/v1.toml");

    fn refused(from: &str, to: &str) -> String {
        refused_of(GOOD, from, to)
    }

    pub(super) fn refused_of(good: &str, from: &str, to: &str) -> String {
        assert!(good.contains(from), "{from}");
        let text = good.replacen(from, to, 1);
        parse(Path::new("mine.toml"), &text).unwrap_err().to_string()
    }

    #[test]
    fn what_is_wrong_is_named_with_file_key_and_what_is_allowed() {
        for (from, to, expected) in [
            (
                "disks = [1, 2, 4, 8]",
                "disks = [1, 99]",
                "mine.toml: matrix.disks: 99 is not allowed: from 1 to 16",
            ),
            (
                "disks = [1, 2, 4, 8]",
                "disks = [2, 2]",
                "mine.toml: matrix.disks: 2 is not allowed: each value once",
            ),
            (
                "disks = [1, 2, 4, 8]",
                "disk = [1]",
                "unknown field `disk`, expected one of `systems`, `disks`",
            ),
            (
                "block = 524288",
                "block = 5000",
                "matrix.loads.block: 5000 is not allowed: a power of two",
            ),
            (
                "\"vmseal-plain\"]",
                "\"other\"]",
                "matrix.systems: other is not allowed: each once of vmseal-encrypted",
            ),
            (
                "\"disk\"",
                "\"disc\"",
                "unknown variant `disc`, expected one of `disk`, `operation`, `migration`",
            ),
            ("id = \"v1\"", "id = \"../v1\"", "id: ../v1 is not allowed: 1 to 40 of a to z"),
            ("rounds = 5", "rounds = 0", "steps.small.rounds: 0 is not allowed: from 1 to 1000"),
            ("value = 0.95", "value = nan", "claim.checks.value: NaN is not allowed"),
            (
                "measures = [\"throughput\", ",
                "measures = [",
                "claim.checks.measure: Throughput is not allowed: one of measures",
            ),
            (
                "value = 0.95",
                "value = 0.95\nwhere = { disks = 3 }",
                "claim.checks.where.disks: 3 is not allowed: a value of matrix.disks",
            ),
            (
                "value = 0.95",
                "value = 0.95\nwhere = { size = 3 }",
                "keys are clients, delay_us, disks, neighbours",
            ),
        ] {
            let found = refused(from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
            assert!(found.contains("mine.toml"), "{found}");
        }
    }

    #[test]
    fn redundancies_are_compared_on_ceph_and_a_value_alone_has_nothing_beside() {
        let good = include_str!("../../../../bench/experiments/h.toml");
        let parsed = parse(Path::new("h.toml"), good).unwrap();
        assert_eq!(parsed.redundancy(), Raid::ALL);
        assert_eq!(parsed.axes()[REDUNDANCY], ["raid1", "raid6"].map(AxisValue::from));
        let axis = "redundancy = [\"raid1\", \"raid6\"]";
        for (from, to, expected) in [
            (axis, "redundancy = [\"raid6\", \"raid6\"]", "raid6 is not allowed: each value once"),
            (
                axis,
                "redundancy = [\"raid5\"]",
                "unknown variant `raid5`, expected `raid1` or `raid6`",
            ),
            ("storage = \"ceph\"", "storage = \"memory\"", "raid1 is not allowed: only on `ceph`"),
            (
                "beside = { redundancy = \"raid1\" }",
                "beside = { redundancy = \"raid5\" }",
                "beside.redundancy: raid5 is not allowed: a value of matrix.redundancy",
            ),
            (
                "denominator = \"vmseal-encrypted\"\n",
                "",
                "claim.checks.beside.redundancy: raid1 is not allowed: with a denominator",
            ),
        ] {
            let found = refused_of(good, from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
        }
        let of = |text| parse(Path::new("mine.toml"), text).unwrap().redundancy().to_vec();
        assert_eq!(of(include_str!("../../../../bench/experiments/v6.toml")), []);
    }

    #[test]
    fn what_is_not_compared_on_ceph_is_refused() {
        let disks = include_str!("../../../../bench/experiments/v5.toml");
        let operations = include_str!("../../../../bench/experiments/v9.toml");
        let client = include_str!("../../../../bench/experiments/ceph-client.toml");
        let of = |text| parse(Path::new("mine.toml"), text).unwrap().storage();
        assert_eq!([of(disks), of(operations)], [Some(Storage::Ceph); 2]);
        assert_eq!(of(GOOD), Some(Storage::Ext4));
        for (good, from, to, expected) in [
            (disks, "\"vmseal-plain\"]", "\"storage-daemon-plain\"]", "have disks on `ceph`"),
            (GOOD, "\"vmseal-plain\"]", "\"librbd-luks2\"]", "have disks on `ceph` alone"),
            (GOOD, "\"vmseal-plain\"]", "\"vmseal-plain-files\"]", "have disks on `ceph` alone"),
            (client, "\"vhost-user-blk\"", "\"NBD\"", "with `vhost-user-blk`"),
            (client, "systems =", "neighbours = [1]\nsystems =", "without `neighbours`"),
            (client, "systems =", "disks = [4]\nsystems =", "have `disks` and `delay_us`"),
            (client, "systems =", "clients = [4]\nsystems =", "or several `clients`"),
            (client, "in_flight_mib", "clients = 4, in_flight_mib", "or several `clients`"),
            (
                GOOD,
                "systems =",
                "clients = [4]\nsystems =",
                "matrix.clients: 4 is not allowed: only",
            ),
            (
                GOOD,
                "small = { ",
                "small = { clients = 4, ",
                "steps.small.clients: 4 is not allowed",
            ),
            (client, "block = 4194304", "block = 8388608", "from 4096 to 4194304"),
            (disks, "storage = \"ceph\"", "storage = \"ceph\"\nidle = true", "steps.idle: true"),
            (operations, "\"clone\", \"snapshot\"]", "\"encrypt\"]", "encrypt is not allowed"),
        ] {
            let found = refused_of(good, from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
        }
    }
}
