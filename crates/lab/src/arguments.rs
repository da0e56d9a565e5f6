//! `vmseal lab disk`: its arguments, and running it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use vmseal_initiator::Wait;

use vmseal_api::datastore::RbdPool;
use vmseal_api::filter::Direct;

use crate::ceph::tools;
use crate::experiment::{self, Cores, ExperimentError, Outcome, Plan, Progress};
use crate::goals::{self, GoalsError};
use crate::idle::IDLE;
use crate::load::Workload;
use crate::machine::{self, Machine};
use crate::report::{self, Measured, Report, Unavailable};
use crate::sections::{SECTIONS, SYSTEMS, Section, Storage, workload_ids};
use crate::statistics::VALUES_MAX;
use crate::stop::{self, Stopped};
use crate::systems::{
    Beside, FILES_SYSTEMS, FIO, FioRbd, LIBRBD_SYSTEMS, Librbd, Nbdkit, ONE_PROCESS, OneProcess,
    Program, SEVERAL, StorageDaemon, System, Transport, Vmseal, fio_obstacle, librbd_obstacle,
};

const MIB: u64 = 1 << 20;

/// The choices of `vmseal lab disk`.
#[derive(Args, Clone, Debug)]
pub struct BenchArguments {
    /// How often everything is measured; below 5 no goal can be resolved. Where a few percent are the
    /// question, ten shorter rounds take the place of each
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=VALUES_MAX as i64))]
    pub rounds: u32,
    /// Seconds that each system is measured under each load in a round
    #[arg(long, default_value_t = 1.5, value_parser = seconds)]
    pub seconds: f64,
    /// Size of each system's disks together in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(16..=1 << 20))]
    pub size_mib: u64,
    /// Where disks in memory are made; there, the storage's own noise stays out
    #[arg(long, default_value = "/dev/shm")]
    pub directory: PathBuf,
    /// Where disks on ext4 are made; without one, they are left out
    #[arg(long, default_value = "target")]
    pub ext4_directory: PathBuf,
    /// Only these sections
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(SECTIONS.iter().map(|s| s.id)))]
    pub sections: Vec<String>,
    /// Only these systems
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(SYSTEMS))]
    pub systems: Vec<String>,
    /// Only these loads
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(workload_ids()))]
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
    /// The program nbdkit; without it, NBD is left out
    #[arg(long, default_value = "nbdkit")]
    pub nbdkit: PathBuf,
    /// The pool of systems that get to Ceph by its own library; only `vmseal lab run` has one.
    #[arg(skip)]
    pub pool: Option<RbdPool>,
}

impl Default for BenchArguments {
    /// What is chosen where nothing is said.
    fn default() -> Self {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            arguments: BenchArguments,
        }
        <Line as clap::Parser>::parse_from(["disk"]).arguments
    }
}

/// The length of a cell.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number from 0.01 to 3600 is needed".to_owned()),
    }
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A signal has asked for the end.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// The goals cannot be used.
    #[error(transparent)]
    Goals(#[from] GoalsError),
    /// Measuring failed.
    #[error(transparent)]
    Experiment(#[from] ExperimentError),
    /// The results cannot be written.
    #[error("the results cannot be written to {}", path.display())]
    Write {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Measures, judges, and writes the JSON; `observe` is called with the progress.
///
/// # Errors
/// [`BenchError`]. A goal that is not met is not an error.
pub fn run(
    arguments: &BenchArguments,
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Report, BenchError> {
    let goals = goals::read(&arguments.goals, goals::DISK)?;
    let (started, commit) = (jiff::Timestamp::now(), machine::commit());
    let machine = Machine::here(&arguments.storage_daemon, &arguments.nbdkit);
    let (mut sections, mut obstacles, mut all) = (Vec::new(), Vec::new(), Outcome::default());
    for section in SECTIONS.iter() {
        let (plan, systems) = (arguments.plan(section), arguments.systems(section));
        if systems.is_empty() || plan.workloads.is_empty() && !plan.idle {
            continue;
        }
        if let Some(why) = arguments.obstacle(section) {
            obstacles.push(Unavailable { section: section.id, why });
            continue;
        }
        observe(Progress::Section(section.id, section.title));
        let outcome = experiment::run(&plan, &systems, &mut |progress| {
            if section.tells(progress) {
                observe(progress);
            }
        });
        // Being stopped says more than what failed by it.
        stop::check()?;
        let outcome = outcome?;
        sections.push(Measured::of(section, &plan, &outcome));
        all.cells.extend(outcome.cells);
        all.idle.extend(outcome.idle);
    }
    let goals = goals.iter().map(|goal| goals::assess(goal, &all)).collect();
    let report =
        Report { version: report::VERSION, started, commit, machine, goals, sections, obstacles };
    let path = arguments.json.clone();
    report.write(&path).map_err(|source| BenchError::Write { path, source })?;
    Ok(report)
}

/// Prints the progress of an experiment on standard error.
pub fn narrate(progress: Progress<'_>) {
    match progress {
        Progress::Section(id, title) => eprintln!("{id}: {title}"),
        Progress::Filling(system) => eprintln!("{system}: fill a disk and read it back"),
        Progress::Making(policy) => eprintln!("{policy}: make VMs"),
        Progress::Cluster(progress) => eprintln!("{progress}"),
        Progress::Round(round, rounds) => eprintln!("round {round} of {rounds}"),
    }
}

impl BenchArguments {
    pub(crate) fn plan(&self, section: &Section) -> Plan {
        let chosen = |id: &str| chosen(&self.workloads, id);
        let cell = Duration::from_secs_f64(self.seconds) / section.cuts;
        let directory = match section.storage {
            // Of disks on Ceph, sockets and keys are here.
            Storage::Memory | Storage::Ceph => &self.directory,
            Storage::Ext4 => &self.ext4_directory,
        };
        let workload = |workload: &&Workload| chosen(workload.id);
        Plan {
            workloads: section.workloads.iter().filter(workload).copied().collect(),
            idle: section.idle && chosen(IDLE),
            limit: section.limit,
            rounds: (self.rounds * section.cuts).min(VALUES_MAX as u32),
            places: section.places,
            cell,
            // A tenth, so that even the shortest cell starts warm.
            warm_up: cell / 10,
            wait: if self.poll { Wait::Poll } else { Wait::Sleep },
            verify: self.verify,
            directory: directory.clone(),
            served: Vec::new(),
            neighbours: section.neighbours,
            size: self.size_mib * u64::from(section.disks * section.clients) * MIB,
            cores: two_cores(),
        }
    }

    /// The section's systems to measure; none if the section is not chosen.
    pub(crate) fn systems(&self, section: &Section) -> Vec<Box<dyn System>> {
        if !chosen(&self.sections, section.id) {
            return Vec::new();
        }
        let ids = section.systems.iter().filter(|id| chosen(&self.systems, id));
        let made = |id: &&'static str| match LIBRBD_SYSTEMS.contains(id) {
            true => self.in_pool(id),
            false => Some(self.system(id, section)),
        };
        ids.filter_map(made).collect()
    }

    /// Why the section cannot be measured here.
    pub(crate) fn obstacle(&self, section: &Section) -> Option<String> {
        let nbd = section.transport == Transport::Nbd;
        let program = || self.nbdkit().obstacle().filter(|_| nbd);
        section.storage.obstacle(&self.ext4_directory).or_else(program).or_else(|| {
            let in_pool = section.systems.iter().filter(|id| LIBRBD_SYSTEMS.contains(id));
            in_pool.filter(|id| chosen(&self.systems, id)).find_map(|id| self.pool_obstacle(id))
        })
    }

    /// Why a system that gets to Ceph by its own library cannot be measured here.
    fn pool_obstacle(&self, id: &str) -> Option<String> {
        if self.pool.is_none() {
            return Some(format!("{id} needs a pool of a Ceph cluster"));
        }
        let own = if id == ONE_PROCESS {
            self.one_process().obstacle()
        } else {
            let of_fio = || fio_obstacle(&fio()).filter(|_| id == FIO);
            librbd_obstacle(&self.storage_daemon()).or_else(of_fio)
        };
        // A cluster whose programs are in a chroot does not need it on this machine.
        own.or_else(|| tools::check_image_tool().err().map(|missing| missing.to_string()))
    }

    /// A system that gets to the pool by Ceph's own library; none without a pool.
    fn in_pool(&self, id: &'static str) -> Option<Box<dyn System>> {
        let image = Librbd {
            id,
            luks: id.ends_with("-luks2"),
            pool: self.pool.clone()?,
            daemon: self.storage_daemon(),
            // Before the laboratory takes a core for its clients.
            cores: nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).ok(),
        };
        match id {
            FIO => Some(Box::new(FioRbd { image, fio: fio() })),
            ONE_PROCESS => Some(Box::new(OneProcess { image, program: self.one_process() })),
            _ => Some(Box::new(image)),
        }
    }

    fn storage_daemon(&self) -> Program {
        let advice = "install Debian's package qemu-system-common";
        Program { path: self.storage_daemon.clone(), advice }
    }

    /// The example of this crate that has vmseal's layers and librbd in one process: in the directory `examples` beside the filter, where
    /// cargo puts it.
    fn one_process(&self) -> Program {
        let name = "examples/librbd-in-filter";
        let below = self.filter.as_ref().map(|filter| filter.with_file_name(name));
        Program {
            path: below.unwrap_or_else(|| beside_this_program(name)),
            advice: "build it with: cargo build --release -p vmseal-lab --example librbd-in-filter",
        }
    }

    fn nbdkit(&self) -> Program {
        Program { path: self.nbdkit.clone(), advice: "install Debian's package nbdkit" }
    }

    fn system(&self, id: &str, section: &Section) -> Box<dyn System> {
        let advice = "install Debian's package qemu-utils";
        let image_tool = Program { path: self.image_tool.clone(), advice };
        let luks = id.ends_with("-luks");
        if id.starts_with("nbdkit") {
            return Box::new(Nbdkit { luks, nbdkit: self.nbdkit(), image_tool });
        }
        if id.starts_with("storage-daemon") {
            let daemon = self.storage_daemon();
            return Box::new(StorageDaemon { luks, daemon, image_tool });
        }
        let path = self.filter.clone().unwrap_or_else(|| beside_this_program("vmseal-filter"));
        let named_by_disks = id.ends_with("-8-disks");
        let advice = "build it with: cargo build --release -p vmseal-iofilter";
        Box::new(Vmseal {
            filter: Program { path, advice },
            encrypted: id.starts_with("vmseal-encrypted"),
            transport: section.transport,
            direct: match section.storage {
                // On Ceph as the agent has it.
                Storage::Memory | Storage::Ceph => Direct::Auto,
                Storage::Ext4 => Direct::On,
            },
            disks: if named_by_disks { SEVERAL } else { section.disks as usize },
            named_by_disks,
            by_files: FILES_SYSTEMS.contains(&id),
            delay_us: section.delay_us,
            beside: match id {
                "vmseal-plain-encrypting" => Some(Beside::Encrypting),
                "vmseal-encrypted-snapshots" => Some(Beside::Snapshot(image_tool.clone())),
                _ => None,
            },
            snapshot: id.ends_with("-snapshot").then_some(image_tool),
        })
    }
}

/// fio, of which images are measured beside servers of them.
fn fio() -> Program {
    Program { path: "fio".into(), advice: "install Debian's package fio" }
}

/// Whether a choice, where there is one, includes `id`.
fn chosen(choice: &[String], id: &str) -> bool {
    choice.is_empty() || choice.iter().any(|chosen| chosen == id)
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

/// A program in the directory of this one or the one above (cargo's examples), else by name.
pub(crate) fn beside_this_program(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    beside.into_iter().find(|path| path.is_file()).unwrap_or_else(|| name.into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::systems::Place;

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
        let arguments = parse("").unwrap();
        for section in SECTIONS.iter() {
            let systems = arguments.systems(section);
            let named: Vec<&str> = systems.iter().map(|system| system.id()).collect();
            assert_eq!(named, section.systems, "{}", section.id);
            for system in systems {
                let encrypts = !system.id().ends_with("plain");
                assert_eq!(system.encrypts(), encrypts, "{}", system.id());
                let place =
                    Place { directory: "/x".into(), storage: None, channel: None, size: 64 << 20 };
                let disks = if system.id().contains("8") { 8 } else { 1 };
                assert_eq!(system.places(&place).len(), disks, "{}", system.id());
            }
        }
    }

    #[test]
    fn what_gets_to_ceph_by_its_own_library_needs_a_pool_a_driver_and_an_engine() {
        let client = crate::catalogue::find("ceph-client").unwrap();
        let section = crate::sections::of_definition(&client)[0];
        let named = |arguments: &BenchArguments| -> Vec<(&'static str, bool)> {
            let systems = arguments.systems(&section);
            systems.iter().map(|system| (system.id(), system.encrypts())).collect()
        };
        let without = parse("").unwrap();
        let vmseal = [
            ("vmseal-encrypted", true),
            ("vmseal-plain", false),
            ("vmseal-encrypted-files", true),
            ("vmseal-plain-files", false),
        ];
        assert_eq!(named(&without), vmseal);
        let pool = Some(crate::ceph::client::tests::pool());
        let with = BenchArguments { pool, ..parse("--storage-daemon /nonexistent/qsd").unwrap() };
        let librbd = [("librbd-luks2", true), ("librbd-plain", false), ("fio-rbd", false)];
        assert_eq!(named(&with), [&vmseal[..], &librbd].concat());
        for system in with.systems(&section) {
            let is_librbd = LIBRBD_SYSTEMS.contains(&system.id());
            assert_eq!(system.has_files(), !is_librbd, "{}", system.id());
            assert_eq!(system.own_load().is_some(), system.id() == FIO, "{}", system.id());
        }
        let obstacle = without.obstacle(&section).unwrap();
        assert!(obstacle.contains("librbd-luks2 needs a pool"), "{obstacle}");
        let obstacle = with.obstacle(&section).unwrap();
        assert!(obstacle.contains("/nonexistent/qsd cannot be run; install"), "{obstacle}");
    }

    #[test]
    fn librbd_in_the_filter_s_process_needs_a_pool_and_the_example() {
        let process = crate::catalogue::find("ceph-process").unwrap();
        let section = crate::sections::of_definition(&process)[0];
        let without = parse("").unwrap().obstacle(&section).unwrap();
        assert!(without.contains(&format!("{ONE_PROCESS} needs a pool")), "{without}");
        let pool = Some(crate::ceph::client::tests::pool());
        let with = BenchArguments { pool, ..parse("--filter /nonexistent/filter").unwrap() };
        let systems = with.systems(&section);
        let named: Vec<_> =
            systems.iter().map(|it| (it.id(), it.encrypts(), it.has_files())).collect();
        assert_eq!(named, [("vmseal-encrypted", true, true), (ONE_PROCESS, true, false)]);
        let missing = with.obstacle(&section).unwrap();
        let said = "/nonexistent/examples/librbd-in-filter cannot be run; build it with";
        assert!(missing.contains(said), "{missing}");
    }

    #[test]
    fn sections_systems_and_loads_can_be_chosen() {
        let of = |line: &str| {
            let chosen = parse(line).unwrap();
            let mut measured = Vec::new();
            for section in SECTIONS.iter() {
                let (plan, systems) = (chosen.plan(section), chosen.systems(section));
                let counts = (systems.len(), plan.workloads.len(), plan.idle);
                if counts.0 > 0 && (counts.1 > 0 || counts.2) {
                    measured.push((section.id, counts));
                }
            }
            measured
        };
        let line = "--systems storage-daemon-plain --workloads 4k-random-read";
        assert_eq!(of(line), [("memory", (1, 1, false))]);
        assert_eq!(of("--workloads idle"), [("memory", (4, 0, true))]);
        assert_eq!(
            of("--sections nbd,scaling"),
            [("scaling", (2, 1, false)), ("nbd", (4, 2, false))]
        );
        assert_eq!(of("--sections nbd --systems storage-daemon-luks"), []);
        assert_eq!(of("").len(), SECTIONS.len());
    }

    #[test]
    fn a_round_that_is_cut_takes_no_longer() {
        let arguments = parse("--rounds 7 --seconds 3 --poll").unwrap();
        let time = |plan: &Plan| plan.cell * plan.rounds;
        let (memory, ext4) = (arguments.plan(&SECTIONS[0]), arguments.plan(&SECTIONS[1]));
        let nbd = arguments.plan(&SECTIONS[3]);
        assert_eq!((memory.rounds, ext4.rounds, nbd.rounds), (70, 70, 35));
        assert_eq!([&memory, &ext4, &nbd].map(time), [Duration::from_secs(21); 3]);
        assert_eq!((memory.directory, ext4.directory), ("/dev/shm".into(), "target".into()));
        assert_eq!(memory.wait, Wait::Poll);
    }

    #[test]
    fn missing_programs_are_reported_before_a_section_begins() {
        let without = parse("--nbdkit /nonexistent/nbdkit --ext4-directory /proc").unwrap();
        let obstacle = |id: &str| {
            let section = SECTIONS.iter().find(|section| section.id == id).unwrap();
            without.obstacle(section)
        };
        assert_eq!(obstacle("memory"), None);
        assert_eq!(obstacle("scaling"), None);
        assert!(obstacle("ext4").unwrap().contains("not on ext4"));
        let nbd = obstacle("nbd").unwrap();
        assert!(nbd.contains("/nonexistent/nbdkit cannot be run; install"), "{nbd}");
    }

    #[test]
    fn impossible_arguments_are_refused() {
        for line in [
            "--rounds 0",
            "--rounds 1001",
            "--seconds 0",
            "--seconds nan",
            "--size-mib 1",
            "--systems foo",
            "--workloads foo",
            "--sections foo",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
