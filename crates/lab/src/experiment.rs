//! The subject `disk`: servers of disks under the load generator.
//!
//! ```text
//! place:  each system: make its disks → fill them through the server → look at the files
//!         → restart the server → read all back
//! round:  start all servers → for each workload: the computed limit, each system in turn, one cell
//!         → each system in turn without work → stop all
//! ```
//! A system with a load generator of its own has no server in a round, and measures its cells itself.
//!
//! Where there are several clients, a system has a server for each of them: each has its own storage, and all have one core.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;
use vmseal_initiator::{Initiator, InitiatorError, Operation, Wait};

use crate::clock::{self, ProcessClock};
use crate::computed_limit::{self, ComputedLimit};
use crate::idle::{self, IDLE};
use crate::load::{self, Direction, Extent, LoadError, Order, Workload};
use crate::neighbour::Neighbours;
pub use crate::outcome::{Cell, ExperimentError, Outcome, Progress};
use crate::outcome::{Sample, Times};
use crate::pattern::Pattern;
use crate::stop;
use crate::subject::{self, Joined, Point, Subject};
use crate::systems::{OwnLoad, Place, Server, System, check_at_rest};

/// A share of time above which a CPU counts as the bottleneck.
pub(crate) const SATURATED: f64 = 0.9;

/// The load for filling and checking: large and sequential, to be fast on every system.
const FILL: Workload = Workload {
    id: "fill",
    order: Order::Sequential,
    direction: Direction::Write,
    block: 512 * 1024,
    depth: 8,
};
/// The load that wakes an idle disk before it is left alone.
const WAKING: Workload =
    Workload { id: IDLE, order: Order::Random, direction: Direction::Read, block: 4096, depth: 32 };
/// How the kernel is asked about the thread that asks.
const THIS_THREAD: Pid = Pid::from_raw(0);
/// The content of every disk.
const PATTERN_SEED: u64 = 0x766d_7365_616c;

/// The measurements to make.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The loads.
    pub workloads: Vec<Workload>,
    /// Whether disks without work are measured, too.
    pub idle: bool,
    /// Whether large loads are compared with the computed limit.
    pub limit: bool,
    /// How often each cell is measured.
    pub rounds: u32,
    /// How often the disks are made, the first time included; at most once a round.
    pub places: u32,
    /// How long a cell is measured.
    pub cell: Duration,
    /// How long a cell runs before it is measured.
    pub warm_up: Duration,
    /// How the client waits.
    pub wait: Wait,
    /// Whether content is written and compared while measuring.
    pub verify: bool,
    /// Where the disks are, or only what belongs to them, where they are in `served`.
    pub directory: PathBuf,
    /// Where the disks are that a process serves: for each client its own. Without one there is one client.
    pub served: Vec<ServedDirectory>,
    /// The size of each system's disks together, in bytes; a multiple of the largest block.
    pub size: u64,
    /// How many CPU-bound threads share the server's core.
    pub neighbours: u32,
    /// The cores of server and client; none on a machine of one core.
    pub cores: Option<Cores>,
}

/// A directory that a process serves: the CPU time of that process is the disks', too.
#[derive(Clone, Debug)]
pub struct ServedDirectory {
    /// The directory.
    pub directory: PathBuf,
    /// The socket by which filters get to its files without the file system.
    pub channel: PathBuf,
    /// The process.
    pub process: u32,
    /// The processes that store what is in it: their CPU time is counted apart.
    pub daemons: Vec<u32>,
}

impl Plan {
    /// Where the files of the disks are.
    #[must_use]
    pub fn storage(&self) -> &Path {
        match self.served.first() {
            Some(served) => &served.directory,
            None => &self.directory,
        }
    }

    /// How many servers a system has, each with its own storage.
    fn clients(&self) -> usize {
        self.served.len().max(1)
    }

    /// What each system is measured at: loads, and doing nothing.
    fn measures(&self) -> Vec<&'static str> {
        let loads = self.workloads.iter().map(|workload| workload.id);
        loads.chain(self.idle.then_some(IDLE)).collect()
    }

    /// The CPU time of servers, and of what serves their files; apart from that, of what stores them.
    fn clock(&self, system: &dyn System, servers: &[Server]) -> Result<ProcessClock, LoadError> {
        let served = self.served.iter().filter(|_| system.has_files());
        let served = served.map(|served| served.process);
        let processes = servers.iter().map(Server::pid).chain(served);
        let clock = ProcessClock::of_all(processes).map_err(LoadError::Clock)?;
        clock.above(self.daemons().iter().copied()).map_err(LoadError::Clock)
    }

    /// The processes that store the disks, where they are known: those of all clients.
    fn daemons(&self) -> &[u32] {
        match self.served.first() {
            Some(served) => &served.daemons,
            None => &[],
        }
    }
}

/// The cores of server and client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cores {
    /// All threads of the server.
    pub server: usize,
    /// The threads that make the load.
    pub client: usize,
}

/// Runs a plan with some systems.
///
/// # Errors
/// [`ExperimentError`]; no files are left in any case.
pub fn run(
    plan: &Plan,
    systems: &[Box<dyn System>],
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome, ExperimentError> {
    run_joined(&[(plan, systems)], observe)
}

/// A plan with its systems.
pub type Part<'a> = (&'a Plan, &'a [Box<dyn System>]);

/// Runs plans that differ in their storage and in the names of their loads: the same load of each follows the other within
/// each round, and each begins in turn. Systems, rounds and cores are those of the first; another one may lack some of its systems.
///
/// # Errors
/// [`ExperimentError`]; no files are left in any case.
pub fn run_joined(
    parts: &[Part<'_>],
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome, ExperimentError> {
    let Some((first, systems)) = parts.first() else { return Ok(Outcome::default()) };
    let roots = parts.iter().map(root).collect::<Result<Vec<_>, _>>()?;
    let _pinned = Pinned::to(first.cores.map(|cores| cores.client))?;
    let mut disks = Joined(Vec::new());
    for ((plan, systems), root) in parts.iter().zip(&roots) {
        disks.0.push((Disks::new(plan, systems, root.path()), plan.measures()));
    }
    let order = subject::Order {
        systems: systems.iter().map(|system| system.id()).collect(),
        workloads: disks.workloads(),
        rounds: first.rounds,
        places: first.places,
    };
    subject::measure(&order, &mut disks, observe)
}

/// The directory of a part, once there is room for its disks.
fn root((plan, systems): &Part<'_>) -> Result<tempfile::TempDir, ExperimentError> {
    // The computed limit has a file, too, and so has what a disk is copied to; neither is on served storage.
    let more = if plan.served.is_empty() { 2 } else { 0 };
    check_room(plan, systems.len() + more)?;
    let root = tempfile::Builder::new().prefix("vmseal-lab-").tempdir_in(&plan.directory);
    root.map_err(|source| setting(&plan.directory, source))
}

fn setting(directory: &Path, source: std::io::Error) -> ExperimentError {
    let what = format!("the directory {} cannot be used", directory.display());
    ExperimentError::Setting { what, source }
}

/// A disk takes its size; headers and file system take a little more.
fn check_room(plan: &Plan, systems: usize) -> Result<(), ExperimentError> {
    let directory = plan.storage().to_owned();
    let space = nix::sys::statvfs::statvfs(&directory)
        .map_err(|errno| setting(&directory, errno.into()))?;
    let available = space.blocks_available() as u64 * space.fragment_size() as u64;
    let needed = (plan.size + (64 << 20)) * systems as u64;
    if available < needed {
        return Err(ExperimentError::Room { directory, available, needed });
    }
    Ok(())
}

/// Pins this thread to one core.
fn pin(core: Option<usize>) -> Result<(), ExperimentError> {
    let Some(core) = core else { return Ok(()) };
    let mut set = CpuSet::new();
    set.set(core).and_then(|()| sched_setaffinity(THIS_THREAD, &set)).map_err(|errno| {
        ExperimentError::Setting {
            what: format!("this thread cannot run on core {core}"),
            source: errno.into(),
        }
    })
}

/// This thread on one core; once this is dropped, it runs where it did before. What is started and planned later has all cores
/// again.
struct Pinned(Option<CpuSet>);

impl Pinned {
    fn to(core: Option<usize>) -> Result<Self, ExperimentError> {
        if core.is_none() {
            return Ok(Self(None));
        }
        let before = sched_getaffinity(THIS_THREAD).map_err(|errno| ExperimentError::Setting {
            what: "the cores of this thread are not known".to_owned(),
            source: errno.into(),
        })?;
        pin(core)?;
        Ok(Self(Some(before)))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // It was allowed before.
            let _ = sched_setaffinity(THIS_THREAD, before);
        }
    }
}

/// A system and the places of its files, one for each client. What does something with a disk, or makes its load by itself,
/// has one client.
struct TestedSystem<'a> {
    system: &'a dyn System,
    places: Vec<Place>,
}

impl TestedSystem<'_> {
    fn failed(&self, workload: &Workload, source: LoadError) -> ExperimentError {
        ExperimentError::Load { system: self.system.id(), workload: workload.id, source }
    }
}

/// The subject. Fields are dropped in this order: servers before the files that they serve.
struct Disks<'a> {
    plan: &'a Plan,
    systems: &'a [Box<dyn System>],
    root: &'a Path,
    /// Those of each of `tested`, while a round lasts; none of one that starts for each cell.
    servers: Vec<Vec<Server>>,
    tested: Vec<TestedSystem<'a>>,
    computed_limit: Option<ComputedLimit>,
    home: Option<Home>,
}

/// The directories of the disks while a place lasts; both go with it.
struct Home {
    directory: tempfile::TempDir,
    /// Where the disks' files of each client are, if not there.
    storages: Vec<tempfile::TempDir>,
}

impl Drop for Home {
    fn drop(&mut self) {
        if stop::asked() {
            for storage in self.storages.drain(..) {
                // It goes with its pool. A cluster that does not answer would be asked for each of its files, without end.
                let _ = storage.keep();
            }
        }
    }
}

impl Home {
    fn new(plan: &Plan, root: &Path) -> Result<Self, ExperimentError> {
        let made =
            |within: &Path| tempfile::tempdir_in(within).map_err(|source| setting(within, source));
        let storages = plan.served.iter().map(|served| made(&served.directory));
        Ok(Self { storages: storages.collect::<Result<_, _>>()?, directory: made(root)? })
    }

    /// Makes the places of a system.
    fn places(&self, plan: &Plan, system: &str) -> Result<Vec<Place>, ExperimentError> {
        (0..plan.clients()).map(|client| self.place(plan, system, client)).collect()
    }

    /// Makes the place of a system for a client, on that client's storage.
    fn place(&self, plan: &Plan, system: &str, client: usize) -> Result<Place, ExperimentError> {
        let made = |within: &tempfile::TempDir| -> Result<PathBuf, ExperimentError> {
            let directory = within.path().join(format!("{system}-{client}"));
            let made = std::fs::create_dir(&directory);
            made.map_err(|source| setting(&directory, source))?;
            Ok(directory)
        };
        Ok(Place {
            directory: made(&self.directory)?,
            storage: self.storages.get(client).map(made).transpose()?,
            channel: plan.served.get(client).map(|served| served.channel.clone()),
            size: plan.size / plan.clients() as u64,
        })
    }
}

impl Subject for Disks<'_> {
    fn prepare(
        &mut self,
        place: u32,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), ExperimentError> {
        self.tested.clear();
        self.computed_limit = None;
        self.home = None;
        let home = Home::new(self.plan, self.root)?;
        if self.plan.limit && self.plan.workloads.iter().any(ComputedLimit::is_of) {
            self.computed_limit = Some(ComputedLimit::new(home.directory.path(), self.plan.size)?);
        }
        // No system always has its files in the place that is used first.
        let systems = self.systems;
        let (later, first) = systems.split_at(place as usize % systems.len().max(1));
        for system in first.iter().chain(later) {
            stop::check()?;
            observe(Progress::Filling(system.id()));
            self.set_up(system.as_ref(), &home)?;
        }
        self.home = Some(home);
        Ok(())
    }

    fn begin(&mut self, _round: u32) -> Result<(), ExperimentError> {
        for tested in &self.tested {
            let system = tested.system;
            let starts = !system.starts_for_each_cell() && system.own_load().is_none();
            self.servers.push(if starts { self.start(tested)? } else { Vec::new() });
        }
        Ok(())
    }

    fn before(
        &mut self,
        round: u32,
        workload: &'static str,
    ) -> Result<Option<Sample>, ExperimentError> {
        let workload = self.plan.workloads.iter().find(|it| it.id == workload);
        workload.map_or(Ok(None), |workload| self.compute_limit(round, workload))
    }

    fn run(&mut self, point: &Point) -> Result<Option<Sample>, ExperimentError> {
        let at = self.tested.iter().position(|tested| tested.system.id() == point.system);
        let Some(at) = at else { return Ok(None) };
        let tested = &self.tested[at];
        if let Some(load) = tested.system.own_load() {
            return self.cell_by_itself(point, tested, load);
        }
        let own = if self.servers[at].is_empty() { self.start(tested)? } else { Vec::new() };
        let servers = if own.is_empty() { &self.servers[at] } else { &own };
        if point.workload == IDLE {
            let idle =
                idle::measure(&servers[0], &WAKING, self.plan.cell, point.round, point.system)
                    .map_err(|source| tested.failed(&WAKING, source))?;
            return Ok(Some(Sample::Idle(idle)));
        }
        let workload = self.plan.workloads.iter().find(|it| it.id == point.workload);
        let Some(workload) = workload else { return Ok(None) };
        let cell = self.cell(point.round, workload, tested, servers);
        cell.map(Some).map_err(|source| tested.failed(workload, source))
    }

    fn end(&mut self) -> Result<(), ExperimentError> {
        self.servers.clear();
        Ok(())
    }
}

impl<'a> Disks<'a> {
    fn new(plan: &'a Plan, systems: &'a [Box<dyn System>], root: &'a Path) -> Self {
        let (tested, servers) = (Vec::new(), Vec::new());
        Self { plan, systems, root, servers, tested, computed_limit: None, home: None }
    }

    /// A server for each client, all on one core.
    fn start(&self, tested: &TestedSystem<'_>) -> Result<Vec<Server>, ExperimentError> {
        let core = self.plan.cores.map(|cores| cores.server);
        let servers = tested.places.iter().map(|place| tested.system.start(place, core));
        Ok(servers.collect::<Result<_, _>>()?)
    }

    /// Makes a disk full of the pattern. The server is restarted before it is read back.
    fn set_up(&mut self, system: &'a dyn System, home: &Home) -> Result<(), ExperimentError> {
        let tested = TestedSystem { system, places: home.places(self.plan, system.id())? };
        tested.places.iter().try_for_each(|place| system.prepare(place))?;
        for direction in [Direction::Write, Direction::Read] {
            let servers = self.start(&tested)?;
            let workload = Workload { direction, ..FILL };
            let clock = self.plan.clock(system, &servers);
            let clock = clock.map_err(|it| tested.failed(&workload, it))?;
            for (server, place) in servers.iter().zip(&tested.places) {
                for (disk, place) in system.places(place).iter().enumerate() {
                    whole_disk(server, &clock, (disk, place.size), &workload)
                        .map_err(|source| tested.failed(&workload, source))?;
                }
            }
        }
        for place in tested.places.iter().flat_map(|place| system.places(place)) {
            check_at_rest(system, &place, Pattern::new(PATTERN_SEED))?;
        }
        self.tested.push(tested);
        Ok(())
    }

    /// The computed limit of one core, measured on the servers' core.
    fn compute_limit(
        &mut self,
        round: u32,
        workload: &Workload,
    ) -> Result<Option<Sample>, ExperimentError> {
        let Some(computed_limit) =
            self.computed_limit.as_mut().filter(|_| ComputedLimit::is_of(workload))
        else {
            return Ok(None);
        };
        pin(self.plan.cores.map(|cores| cores.server))?;
        let measured = computed_limit.measure(workload, self.plan.cell, load::latencies());
        pin(self.plan.cores.map(|cores| cores.client))?;
        let measured = measured?;
        // It does nothing else, so all of its time is CPU time.
        let times = (measured.time, measured.time);
        let cell = Cell {
            memory: 0.0,
            client_busy: 0.0,
            others_busy: 0.0,
            ..Cell::unmeasured(round, computed_limit::ID, workload.id)
        };
        let cell = cell.with_requests(workload.block, measured.blocks, times, &measured.latency);
        Ok(Some(Sample::Cell(Box::new(cell), Some(measured.latency))))
    }

    /// The load of one cell: on one disk from this thread, on several from one thread each.
    fn load(
        &self,
        round: u32,
        workload: &Workload,
        initiators: &mut [Box<dyn Initiator>],
        clock: &ProcessClock,
    ) -> Result<load::LoadResult, LoadError> {
        let Plan { warm_up, cell: measured, .. } = *self.plan;
        let pattern = self.plan.verify.then(|| Pattern::new(PATTERN_SEED));
        // The same offsets in the same order for every system of a round.
        let seed = u64::from(round);
        if let [initiator] = initiators {
            let extent = Extent::Time { warm_up, measured };
            return load::run(initiator.as_mut(), workload, extent, pattern, clock, seed);
        }
        let times = (warm_up, measured);
        load::run_side_by_side(initiators, workload, times, pattern, clock, seed)
    }

    /// One cell of a system that has a load generator of its own.
    fn cell_by_itself(
        &self,
        point: &Point,
        tested: &TestedSystem<'_>,
        load: &dyn OwnLoad,
    ) -> Result<Option<Sample>, ExperimentError> {
        let workload = self.plan.workloads.iter().find(|it| it.id == point.workload);
        let Some(workload) = workload else { return Ok(None) };
        let times = (self.plan.warm_up, self.plan.cell);
        let daemons = self.plan.daemons();
        let told = |error| tested.failed(workload, LoadError::Clock(error));
        let storage = ProcessClock::of_all(daemons.iter().copied()).map_err(told)?;
        let before = storage.read().map_err(told)?;
        let found = load.measure(&tested.places[0], workload, times, u64::from(point.round))?;
        // It works while the load warms up, too: that part is taken off by its share of the time.
        let measured = found.elapsed.as_secs_f64();
        let storage = storage.read().map_err(told)?.saturating_sub(before);
        let storage = storage.mul_f64(measured / (self.plan.warm_up.as_secs_f64() + measured));
        let requests = found.requests as f64;
        let cell = Cell {
            client_busy: 0.0,
            others_busy: found.others.saturating_sub(storage).as_secs_f64() / measured,
            storage_cpu_per_io: (!daemons.is_empty()).then(|| storage.as_nanos() as f64 / requests),
            ..Cell::unmeasured(point.round, point.system, workload.id)
        };
        let times = (found.elapsed, found.cpu);
        let cell = cell.with_requests(workload.block, found.requests, times, &found.latency);
        Ok(Some(Sample::Cell(Box::new(cell), Some(found.latency))))
    }

    fn cell(
        &self,
        round: u32,
        workload: &Workload,
        tested: &TestedSystem<'_>,
        servers: &[Server],
    ) -> Result<Sample, LoadError> {
        let clock = self.plan.clock(tested.system, servers)?;
        // Connected until all is read: what a server allocates for a guest counts as its memory, too.
        let mut initiators = connect_all(servers, workload, self.plan.wait)?;
        let core = self.plan.cores.map(|cores| cores.server);
        let neighbours = match self.plan.neighbours {
            0 => None,
            count => Some(Neighbours::start(count, core).map_err(LoadError::Neighbour)?),
        };
        let half = self.plan.warm_up + self.plan.cell / 2;
        let (measured, acted) = std::thread::scope(|scope| {
            let acting = scope.spawn(|| tested.system.act(&tested.places[0], half));
            let measured = self.load(round, workload, &mut initiators, &clock);
            (measured, acting.join().expect("it does not panic"))
        });
        let measured = measured?;
        let acted = acted.map_err(Box::new).map_err(LoadError::Beside)?;
        let neighbour = neighbours.map(Neighbours::end);
        let memory = servers.iter().map(|server| clock::own_memory(server.pid()));
        let memory = memory.sum::<std::io::Result<u64>>().map_err(LoadError::Clock)?;

        let seconds = measured.elapsed.as_secs_f64();
        let requests = measured.requests as f64;
        let share = |time: Duration| time.as_secs_f64() / seconds;
        let cell = Cell {
            gap: measured.gaps.longest(acted).as_nanos() as f64,
            memory: memory as f64,
            // Neighbours are threads of the client's process. They ran during the warm-up, too.
            client_busy: share(measured.client.saturating_sub(neighbour.map_or_else(
                Duration::default,
                |work| {
                    work.cpu.mul_f64(seconds / (measured.elapsed + self.plan.warm_up).as_secs_f64())
                },
            ))),
            others_busy: share(measured.others),
            storage_cpu_per_io: (!self.plan.daemons().is_empty())
                .then(|| measured.storage.as_nanos() as f64 / requests),
            times: Times::of(&measured.apart),
            neighbour: neighbour.map(|work| work.rate),
            ..Cell::unmeasured(round, tested.system.id(), workload.id)
        };
        let times = (measured.elapsed, measured.server);
        let cell = cell.with_requests(workload.block, measured.requests, times, &measured.latency);
        Ok(Sample::Cell(Box::new(cell), Some(measured.latency)))
    }
}

/// Writes a pattern over a whole disk, or reads it.
fn whole_disk(
    server: &Server,
    clock: &ProcessClock,
    (disk, size): (usize, u64),
    workload: &Workload,
) -> Result<(), LoadError> {
    let mut initiator = connect(server, disk, workload, Wait::Sleep)?;
    let extent = Extent::Requests(size / u64::from(workload.block));
    let pattern = Some(Pattern::new(PATTERN_SEED));
    load::run(initiator.as_mut(), workload, extent, pattern, clock, 0)?;
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

/// Of all disks of all servers.
fn connect_all(
    servers: &[Server],
    workload: &Workload,
    wait: Wait,
) -> Result<Vec<Box<dyn Initiator>>, InitiatorError> {
    let mut initiators = Vec::new();
    for server in servers {
        for disk in 0..server.sockets().len() {
            initiators.push(connect(server, disk, workload, wait)?);
        }
    }
    Ok(initiators)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::BenchArguments;
    use crate::sections::SECTIONS;

    #[test]
    fn each_client_has_its_disks_on_its_own_storage_and_the_socket_of_that() {
        let mounts = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let root = tempfile::tempdir().unwrap();
        let served = |mount: &tempfile::TempDir| ServedDirectory {
            directory: mount.path().to_owned(),
            channel: mount.path().join("socket"),
            process: std::process::id(),
            daemons: Vec::new(),
        };
        let of_one = BenchArguments::default().plan(&SECTIONS[0]);
        let plan = Plan { served: mounts.iter().map(served).collect(), ..of_one.clone() };
        let home = Home::new(&plan, root.path()).unwrap();
        let places = home.places(&plan, "mine").unwrap();
        assert_eq!(places.len(), 2);
        assert_ne!(places[0].directory, places[1].directory);
        for (place, served) in places.iter().zip(&plan.served) {
            assert!(place.directory.starts_with(root.path()), "{place:?}");
            assert!(place.disk().starts_with(&served.directory), "{place:?}");
            assert_eq!(place.channel.as_ref(), Some(&served.channel));
            assert_eq!(place.size, plan.size / 2);
        }
        let home = Home::new(&of_one, root.path()).unwrap();
        let places = home.places(&of_one, "mine").unwrap();
        assert_eq!((places.len(), places[0].size), (1, of_one.size));
        assert_eq!((&places[0].storage, &places[0].channel), (&None, &None));
    }

    #[test]
    fn after_a_section_the_thread_has_its_cores_again() {
        let before = sched_getaffinity(THIS_THREAD).unwrap();
        let core = (0..CpuSet::count()).find(|core| before.is_set(*core).unwrap()).unwrap();
        let pinned = Pinned::to(Some(core)).unwrap();
        let mut only = CpuSet::new();
        only.set(core).unwrap();
        assert_eq!(sched_getaffinity(THIS_THREAD).unwrap(), only);
        drop(pinned);
        assert_eq!(sched_getaffinity(THIS_THREAD).unwrap(), before);
    }
}
