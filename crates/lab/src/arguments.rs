//! `vmseal lab disk`: what a user may choose, and the way from there to a report.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::experiment::{self, Cores, ExperimentError, Plan, Progress};
use crate::goals::{self, Goal, GoalsError};
use crate::initiator::Wait;
use crate::load::{WORKLOADS, Workload};
use crate::machine::{self, Machine};
use crate::report::{self, Report, Settings};
use crate::statistics::VALUES_MAX;
use crate::systems::{Program, StorageDaemon, System, Vmseal};

/// The systems under test, by name.
pub const SYSTEMS: [&str; 4] =
    ["vmseal-encrypted", "vmseal-plain", "storage-daemon-plain", "storage-daemon-luks"];

const MIB: u64 = 1 << 20;

/// The choices of `vmseal lab disk`.
#[derive(Args, Clone, Debug)]
pub struct BenchArguments {
    /// How often everything is measured; below 5 no goal can be resolved
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=VALUES_MAX as i64))]
    pub rounds: u32,
    /// Seconds that each system is measured under each load in a round
    #[arg(long, default_value_t = 3.0, value_parser = seconds)]
    pub seconds: f64,
    /// Size of each disk in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(16..=1 << 20))]
    pub size_mib: u64,
    /// Where the disks are made; in memory, the storage's own noise stays out
    #[arg(long, default_value = "/dev/shm")]
    pub directory: PathBuf,
    /// Only these systems
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(SYSTEMS))]
    pub systems: Vec<String>,
    /// Only these loads
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(WORKLOADS.map(|w| w.id)))]
    pub workloads: Vec<String>,
    /// The client polls instead of sleeping until the server interrupts it
    #[arg(long)]
    pub poll: bool,
    /// Write and compare content while measuring (it always is before): slows the client
    #[arg(long)]
    pub verify: bool,
    /// The goals
    #[arg(long, default_value = "bench/goals.toml")]
    pub goals: PathBuf,
    /// Where the results go as JSON
    #[arg(long, default_value = "target/bench/latest.json")]
    pub json: PathBuf,
    /// The program vmseal-filter; by default beside this one, else in PATH
    #[arg(long)]
    pub filter: Option<PathBuf>,
    /// The program qemu-storage-daemon
    #[arg(long, default_value = "qemu-storage-daemon")]
    pub storage_daemon: PathBuf,
    /// The program qemu-img
    #[arg(long, default_value = "qemu-img")]
    pub image_tool: PathBuf,
}

/// A length of time that a cell may have.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number from 0.01 to 3600 is needed".to_owned()),
    }
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The goals cannot be used.
    #[error(transparent)]
    Goals(#[from] GoalsError),
    /// Measuring failed.
    #[error(transparent)]
    Experiment(#[from] ExperimentError),
    /// The results cannot be kept.
    #[error("the results cannot be written to {}", path.display())]
    Write {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Measures, judges, and writes the JSON; `observe` hears how far it is.
///
/// # Errors
/// [`BenchError`]. A goal that is not met is no error.
pub fn run(
    arguments: &BenchArguments,
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Report, BenchError> {
    let goals = goals::read(&arguments.goals)?;
    let plan = arguments.plan();
    let systems = arguments.systems();
    let (started, commit) = (jiff::Timestamp::now(), machine::commit());
    let machine = Machine::here(&arguments.storage_daemon);
    let outcome = experiment::run(&plan, &systems, observe)?;
    let assess = |goal: &Goal| goals::assess(goal, &outcome.cells);
    let report = Report {
        version: report::VERSION,
        started,
        commit,
        machine,
        settings: Settings::of(&plan),
        goals: goals.iter().map(assess).collect(),
        summaries: report::summarize(&outcome),
        cells: outcome.cells,
    };
    let path = arguments.json.clone();
    report.write(&path).map_err(|source| BenchError::Write { path, source })?;
    Ok(report)
}

/// Tells on standard error what an experiment is about to do.
pub fn narrate(progress: Progress<'_>) {
    match progress {
        Progress::Filling(system) => eprintln!("{system}: fill a disk and read it back"),
        Progress::Round(round, rounds) => eprintln!("round {round} of {rounds}"),
        Progress::Done(cell) => eprintln!(
            "  {:<22} {:<22} {:>8.1} kIOPS {:>7.0} MB/s {:>9.2} µs CPU",
            cell.workload,
            cell.system,
            cell.iops / 1e3,
            cell.throughput / 1e6,
            cell.cpu_per_io / 1e3
        ),
    }
}

impl BenchArguments {
    fn plan(&self) -> Plan {
        let chosen = |workload: &Workload| {
            self.workloads.is_empty() || self.workloads.iter().any(|id| id == workload.id)
        };
        let cell = Duration::from_secs_f64(self.seconds);
        Plan {
            workloads: WORKLOADS.into_iter().filter(chosen).collect(),
            rounds: self.rounds,
            cell,
            // A tenth, so that even the shortest cell starts warm.
            warm_up: cell / 10,
            wait: if self.poll { Wait::Poll } else { Wait::Sleep },
            verify: self.verify,
            directory: self.directory.clone(),
            size: self.size_mib * MIB,
            cores: two_cores(),
        }
    }

    fn systems(&self) -> Vec<Box<dyn System>> {
        let chosen = |id: &&str| self.systems.is_empty() || self.systems.iter().any(|s| s == id);
        SYSTEMS.iter().filter(|id| chosen(id)).map(|id| self.system(id)).collect()
    }

    fn system(&self, id: &str) -> Box<dyn System> {
        let advice = "build it with: cargo build --release -p vmseal-iofilter";
        let path = self.filter.clone().unwrap_or_else(beside_this_program);
        let filter = Program { path, advice };
        let advice = "install Debian's package qemu-utils";
        let daemon = Program {
            path: self.storage_daemon.clone(),
            advice: "install Debian's package qemu-system-common",
        };
        let image_tool = Program { path: self.image_tool.clone(), advice };
        match id {
            "vmseal-encrypted" => Box::new(Vmseal { filter, encrypted: true }),
            "vmseal-plain" => Box::new(Vmseal { filter, encrypted: false }),
            _ => {
                let luks = id == "storage-daemon-luks";
                Box::new(StorageDaemon { luks, daemon, image_tool })
            }
        }
    }
}

/// The first two cores that this process may use.
fn two_cores() -> Option<Cores> {
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).ok()?;
    let mut usable =
        (0..nix::sched::CpuSet::count()).filter(|core| allowed.is_set(*core).unwrap_or(false));
    let server = usable.next()?;
    let client = usable.next()?;
    Some(Cores { server, client })
}

/// `vmseal-filter` in the directory of this program or the one above (cargo's examples), else by name.
fn beside_this_program() -> PathBuf {
    let name = "vmseal-filter";
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    beside.into_iter().find(|path| path.is_file()).unwrap_or_else(|| name.into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: BenchArguments,
    }

    fn parse(line: &str) -> Result<BenchArguments, String> {
        let words = std::iter::once("disk").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.arguments).map_err(|error| error.to_string())
    }

    #[test]
    fn every_system_has_the_name_it_is_chosen_by() {
        let systems = parse("").unwrap().systems();
        assert_eq!(systems.iter().map(|system| system.id()).collect::<Vec<_>>(), SYSTEMS);
        let encrypting: Vec<bool> = systems.iter().map(|system| system.encrypts()).collect();
        assert_eq!(encrypting, [true, false, false, true]);
    }

    #[test]
    fn systems_and_loads_can_be_chosen() {
        let chosen =
            parse("--systems storage-daemon-plain --workloads 4k-random-read --poll").unwrap();
        assert_eq!(chosen.systems().len(), 1);
        let plan = chosen.plan();
        assert_eq!((plan.workloads.len(), plan.wait), (1, Wait::Poll));
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for line in [
            "--rounds 0",
            "--rounds 1001",
            "--seconds 0",
            "--seconds nan",
            "--size-mib 1",
            "--systems foo",
            "--workloads foo",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
