//! The order in which things are measured, so that the machine's moods hit all systems alike.
//!
//! ```text
//! once:   each system: make its disks → fill them through the server → look at the files
//!         → restart the server → read all back
//! round:  start all servers → for each workload: the computed limit, each system in turn, one cell
//!         → each system in turn without work → stop all
//! ```
//!
//! The systems' order turns by one from round to round. What is compared is compared within a round.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use vmseal_initiator::{Initiator, InitiatorError, Operation, Wait};

use crate::clock::{self, ProcessClock};
use crate::computed_limit::{self, ComputedLimit, ComputedLimitError};
use crate::idle::{self, IDLE, Idle};
use crate::load::{self, Direction, Extent, LoadError, Order, Workload};
use crate::pattern::Pattern;
use crate::systems::{Place, Server, System, SystemError, check_at_rest};

/// A share of time above which a CPU counts as the bottleneck.
pub(crate) const SATURATED: f64 = 0.9;

/// What filling and checking use: large and sequential, for every system's sake.
const FILL: Workload = Workload {
    id: "fill",
    order: Order::Sequential,
    direction: Direction::Write,
    block: 512 * 1024,
    depth: 8,
};
/// What an idle disk is woken with before it is left alone.
const WAKING: Workload =
    Workload { id: IDLE, order: Order::Random, direction: Direction::Read, block: 4096, depth: 32 };
/// Every disk holds this.
const PATTERN_SEED: u64 = 0x766d_7365_616c;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The loads.
    pub workloads: Vec<Workload>,
    /// Whether disks are left alone for a cell, too.
    pub idle: bool,
    /// Whether the computed limit stands beside large loads.
    pub limit: bool,
    /// How often everything is measured.
    pub rounds: u32,
    /// How often the disks are made anew meanwhile, one time included; at most as often as there are rounds.
    pub places: u32,
    /// How long a cell is measured.
    pub cell: Duration,
    /// How long a cell runs before that.
    pub warm_up: Duration,
    /// How the client waits.
    pub wait: Wait,
    /// Whether content is written and compared while measuring.
    pub verify: bool,
    /// Where the disks are.
    pub directory: PathBuf,
    /// The size of each system's disks together, in bytes; a multiple of the largest block.
    pub size: u64,
    /// The cores of server and client; none on a machine of one core.
    pub cores: Option<Cores>,
}

/// Which core does what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cores {
    /// All threads of the server.
    pub server: usize,
    /// The threads that make the load.
    pub client: usize,
}

/// One system under one load in one round.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// From 0.
    pub round: u32,
    /// [`System::id`].
    pub system: String,
    /// [`Workload::id`].
    pub workload: String,
    /// Requests that came back.
    pub requests: u64,
    /// The measured time, in seconds.
    pub seconds: f64,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub throughput: f64,
    /// The server's CPU time for a request, in nanoseconds.
    pub cpu_per_io: f64,
    /// The median time that a request took, in nanoseconds.
    pub p50: f64,
    /// What 99 of 100 requests did not exceed, in nanoseconds.
    pub p99: f64,
    /// The server's own memory (RssAnon) afterwards, in bytes.
    pub memory: f64,
    /// The share of the time that the server was on a CPU; above 1 with several threads.
    pub server_busy: f64,
    /// The share of the time that the client was on its CPU.
    pub client_busy: f64,
    /// The share of the time of one CPU that everything else used.
    pub others_busy: f64,
}

/// What came out.
#[derive(Debug, Default)]
pub struct Outcome {
    /// In the order in which they were measured.
    pub cells: Vec<Cell>,
    /// The same without work.
    pub idle: Vec<Idle>,
    /// Of all rounds together, by system and workload, in nanoseconds.
    pub latencies: BTreeMap<(String, String), Histogram<u64>>,
}

impl Outcome {
    fn add(&mut self, cell: Cell, latency: Histogram<u64>) {
        let key = (cell.system.clone(), cell.workload.clone());
        self.cells.push(cell);
        match self.latencies.get_mut(&key) {
            Some(merged) => merged.add(&latency).expect("all have the same bounds"),
            None => drop(self.latencies.insert(key, latency)),
        }
    }
}

/// Why an experiment ended early.
#[derive(Debug, thiserror::Error)]
pub enum ExperimentError {
    /// A system did not come up.
    #[error(transparent)]
    System(#[from] SystemError),
    /// A load failed.
    #[error("{system} under {workload}")]
    Load {
        /// Which system.
        system: &'static str,
        /// Which load.
        workload: &'static str,
        /// How.
        source: LoadError,
    },
    /// The limit of this machine cannot be computed.
    #[error(transparent)]
    ComputedLimit(#[from] ComputedLimitError),
    /// Not enough room for the disks.
    #[error(
        "{} has room for {available} bytes, and the disks need {needed}; choose smaller disks or another directory",
        directory.display()
    )]
    Room {
        /// Where.
        directory: PathBuf,
        /// How much is free.
        available: u64,
        /// How much is needed.
        needed: u64,
    },
    /// The directory or the core of the client cannot be used.
    #[error("{what}")]
    Setting {
        /// What was tried.
        what: String,
        /// Why not.
        source: std::io::Error,
    },
}

/// What an experiment is about to do, for whoever waits.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// A section begins: its name, and what it is about.
    Section(&'a str, &'a str),
    /// A disk is made, filled and checked.
    Filling(&'a str),
    /// A round begins: its number from 1, and how many there are.
    Round(u32, u32),
}

/// Runs a plan over systems.
///
/// # Errors
/// [`ExperimentError`]; nothing is left behind in any case.
pub fn run(
    plan: &Plan,
    systems: &[Box<dyn System>],
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome, ExperimentError> {
    // The computed limit has a file, too.
    check_room(plan, systems.len() + 1)?;
    let root = tempfile::Builder::new().prefix("vmseal-lab-").tempdir_in(&plan.directory);
    let root = root.map_err(|source| setting(&plan.directory, source))?;
    pin(plan.cores.map(|cores| cores.client))?;
    let mut outcome = Outcome::default();
    let places = plan.places.clamp(1, plan.rounds.max(1));
    for place in 0..places {
        let home = tempfile::tempdir_in(root.path());
        let home = home.map_err(|source| setting(&plan.directory, source))?;
        let computed_limit = match plan.limit && plan.workloads.iter().any(ComputedLimit::is_of) {
            true => Some(ComputedLimit::new(home.path(), plan.size)?),
            false => None,
        };
        let mut experiment =
            Experiment { plan, stands: Vec::new(), computed_limit, observe: &mut *observe };
        // None always has its files where the first ones go.
        let (later, first) = systems.split_at(place as usize % systems.len().max(1));
        for system in first.iter().chain(later) {
            experiment.set_up(system.as_ref(), home.path())?;
        }
        for round in place * plan.rounds / places..(place + 1) * plan.rounds / places {
            experiment.round(round, &mut outcome)?;
        }
    }
    Ok(outcome)
}

fn setting(directory: &Path, source: std::io::Error) -> ExperimentError {
    let what = format!("the directory {} cannot be used", directory.display());
    ExperimentError::Setting { what, source }
}

/// A disk takes its size, and headers and file system a little.
fn check_room(plan: &Plan, systems: usize) -> Result<(), ExperimentError> {
    let directory = plan.directory.clone();
    let space = nix::sys::statvfs::statvfs(&directory)
        .map_err(|errno| setting(&directory, errno.into()))?;
    let available = space.blocks_available() as u64 * space.fragment_size() as u64;
    let needed = (plan.size + (64 << 20)) * systems as u64;
    if available < needed {
        return Err(ExperimentError::Room { directory, available, needed });
    }
    Ok(())
}

/// Has this thread run on one core.
fn pin(core: Option<usize>) -> Result<(), ExperimentError> {
    let Some(core) = core else { return Ok(()) };
    let mut set = nix::sched::CpuSet::new();
    set.set(core)
        .and_then(|()| nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set))
        .map_err(|errno| ExperimentError::Setting {
            what: format!("this thread cannot run on core {core}"),
            source: errno.into(),
        })
}

/// A system and where its files are.
struct Stand<'a> {
    system: &'a dyn System,
    place: Place,
}

impl Stand<'_> {
    fn failed(&self, workload: &Workload, source: LoadError) -> ExperimentError {
        ExperimentError::Load { system: self.system.id(), workload: workload.id, source }
    }
}

struct Experiment<'a, 'o> {
    plan: &'a Plan,
    stands: Vec<Stand<'a>>,
    computed_limit: Option<ComputedLimit>,
    observe: &'o mut dyn FnMut(Progress<'_>),
}

impl<'a> Experiment<'a, '_> {
    fn start(&self, stand: &Stand<'_>) -> Result<Server, ExperimentError> {
        Ok(stand.system.start(&stand.place, self.plan.cores.map(|cores| cores.server))?)
    }

    /// Makes a disk full of the pattern; the read-back goes through another life of the server.
    fn set_up(&mut self, system: &'a dyn System, root: &Path) -> Result<(), ExperimentError> {
        (self.observe)(Progress::Filling(system.id()));
        let directory = root.join(system.id());
        std::fs::create_dir(&directory).map_err(|source| setting(&directory, source))?;
        let stand = Stand { system, place: Place { directory, size: self.plan.size } };
        system.prepare(&stand.place)?;
        let places = system.places(&stand.place);
        for direction in [Direction::Write, Direction::Read] {
            let server = self.start(&stand)?;
            let workload = Workload { direction, ..FILL };
            for (disk, place) in places.iter().enumerate() {
                whole_disk(&server, disk, place.size, &workload)
                    .map_err(|source| stand.failed(&workload, source))?;
            }
        }
        for place in &places {
            check_at_rest(system, place, Pattern::new(PATTERN_SEED))?;
        }
        self.stands.push(stand);
        Ok(())
    }

    fn round(&mut self, round: u32, outcome: &mut Outcome) -> Result<(), ExperimentError> {
        (self.observe)(Progress::Round(round + 1, self.plan.rounds));
        let count = self.stands.len();
        let order: Vec<usize> = (0..count).map(|i| (i + round as usize) % count).collect();
        let mut servers = Vec::new();
        for stand in &self.stands {
            servers.push(self.start(stand)?);
        }
        for workload in &self.plan.workloads {
            self.compute_limit(round, workload, outcome)?;
            for &i in &order {
                let stand = &self.stands[i];
                self.cell(round, workload, stand, &servers[i], outcome)
                    .map_err(|source| stand.failed(workload, source))?;
            }
        }
        for &i in order.iter().filter(|_| self.plan.idle) {
            let stand = &self.stands[i];
            let time = self.plan.cell;
            let idle = idle::measure(&servers[i], &WAKING, time, round, stand.system.id())
                .map_err(|source| stand.failed(&WAKING, source))?;
            outcome.idle.push(idle);
        }
        Ok(())
    }

    /// What one core could do, measured where the servers run.
    fn compute_limit(
        &mut self,
        round: u32,
        workload: &Workload,
        outcome: &mut Outcome,
    ) -> Result<(), ExperimentError> {
        let Some(computed_limit) =
            self.computed_limit.as_mut().filter(|_| ComputedLimit::is_of(workload))
        else {
            return Ok(());
        };
        pin(self.plan.cores.map(|cores| cores.server))?;
        let measured = computed_limit.measure(workload, self.plan.cell, load::latencies());
        pin(self.plan.cores.map(|cores| cores.client))?;
        let measured = measured?;
        let (seconds, requests) = (measured.time.as_secs_f64(), measured.blocks as f64);
        outcome.add(
            Cell {
                round,
                system: computed_limit::ID.to_owned(),
                workload: workload.id.to_owned(),
                requests: measured.blocks,
                seconds,
                iops: requests / seconds,
                throughput: requests * f64::from(workload.block) / seconds,
                cpu_per_io: seconds * 1e9 / requests,
                p50: measured.latency.value_at_quantile(0.5) as f64,
                p99: measured.latency.value_at_quantile(0.99) as f64,
                memory: 0.0,
                server_busy: 1.0,
                client_busy: 0.0,
                others_busy: 0.0,
            },
            measured.latency,
        );
        Ok(())
    }

    /// One cell's load: on one disk from this thread, on several from one each.
    fn load(
        &self,
        round: u32,
        workload: &Workload,
        initiators: &mut [Box<dyn Initiator>],
        clock: &ProcessClock,
    ) -> Result<load::Measured, LoadError> {
        let Plan { warm_up, cell: measured, .. } = *self.plan;
        let pattern = self.plan.verify.then(|| Pattern::new(PATTERN_SEED));
        // The same places in the same order for every system of a round.
        let seed = u64::from(round);
        if let [initiator] = initiators {
            let extent = Extent::Time { warm_up, measured };
            return load::run(initiator.as_mut(), workload, extent, pattern, clock, seed);
        }
        let times = (warm_up, measured);
        load::run_side_by_side(initiators, workload, times, pattern, clock, seed)
    }

    fn cell(
        &self,
        round: u32,
        workload: &Workload,
        stand: &Stand<'_>,
        server: &Server,
        outcome: &mut Outcome,
    ) -> Result<(), LoadError> {
        let clock = ProcessClock::of(server.pid()).map_err(LoadError::Clock)?;
        // Connected until all is read: what a server has for a guest is its memory, too.
        let mut initiators = (0..server.sockets().len())
            .map(|disk| connect(server, disk, workload, self.plan.wait))
            .collect::<Result<Vec<_>, _>>()?;
        let measured = self.load(round, workload, &mut initiators, &clock)?;

        let seconds = measured.elapsed.as_secs_f64();
        let requests = measured.requests as f64;
        let share = |time: Duration| time.as_secs_f64() / seconds;
        let cell = Cell {
            round,
            system: stand.system.id().to_owned(),
            workload: workload.id.to_owned(),
            requests: measured.requests,
            seconds,
            iops: requests / seconds,
            throughput: requests * f64::from(workload.block) / seconds,
            cpu_per_io: measured.server.as_nanos() as f64 / requests,
            p50: measured.latency.value_at_quantile(0.5) as f64,
            p99: measured.latency.value_at_quantile(0.99) as f64,
            memory: clock::own_memory(server.pid()).map_err(LoadError::Clock)? as f64,
            server_busy: share(measured.server),
            client_busy: share(measured.client),
            others_busy: share(measured.others),
        };
        outcome.add(cell, measured.latency);
        Ok(())
    }
}

/// Writes a pattern all over a disk, or reads it.
fn whole_disk(
    server: &Server,
    disk: usize,
    size: u64,
    workload: &Workload,
) -> Result<(), LoadError> {
    let mut initiator = connect(server, disk, workload, Wait::Sleep)?;
    let clock = ProcessClock::of(server.pid()).map_err(LoadError::Clock)?;
    let extent = Extent::Requests(size / u64::from(workload.block));
    let pattern = Some(Pattern::new(PATTERN_SEED));
    load::run(initiator.as_mut(), workload, extent, pattern, &clock, 0)?;
    let status = initiator.run_one(Operation::Flush, 0, 0)?;
    if status != 0 {
        let operation = Operation::Flush;
        return Err(LoadError::Request { operation, offset: 0, status });
    }
    Ok(())
}

fn connect(
    server: &Server,
    disk: usize,
    workload: &Workload,
    wait: Wait,
) -> Result<Box<dyn Initiator>, InitiatorError> {
    server.connect(disk, workload.depth, workload.block, wait)
}
