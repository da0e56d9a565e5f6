//! The subject `migration`: a guest that runs moves from one host to another on this machine, as a VM of vmseal that is sent
//! encrypted or in the clear, and beside it between two QEMUs by hand.
//!
//! ```text
//! place:  a network of its own → start server and two agents → make a VM for each system and guest
//! round:  for each point: each system in turn: start the guest → wait until its memory is full → limit the line → move it, watched
//!         → stop it
//! ```
//!
//! Guests with redis are started and filled once, and a client asks them while they move (`redis`). Where disks are copied, redis writes
//! to them (`redis_disk`). Others run on from one move to the next where the experiment says so. The hosts are in one network, or in two
//! with a long line between them (`line`, `delay`).
//!
//! What it takes is that of the task, or by hand from the start of the destination's QEMU on: that is part of both. The rate is that
//! of the line alone (`meter`).

mod by_hand;
mod delay;
mod dip;
mod guest;
mod line;
mod meter;
mod moved;
mod redis;
mod redis_disk;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use self::by_hand::How;
use self::guest::Guest;
use self::line::Line;
use self::meter::Ends;
use self::moved::Moved;
use self::redis::RedisGuest;
use crate::claim::Place;
use crate::definition::{
    AxisValue, MIGRATION_SYSTEMS, MIXES, MigrationMatrix, MigrationSteps, Mix,
};
use crate::installation::{ELSEWHERE, HERE, Installation, THERE, own_datastore};
use crate::operation::{self, Choice, Found};
use crate::outcome::{ExperimentError, OperationError, Outcome, Progress, Sample, Served};
use crate::report::Measured;
use crate::subject::{self, Order, Point, Subject};

/// The VM that has a key; the others have their modes for names.
const ENCRYPTED: &str = MIGRATION_SYSTEMS[0];

/// The same, and its memory is compressed.
const COMPRESSED: &str = MIGRATION_SYSTEMS[1];

/// The same, and the destination's agent has QEMU load the memory.
const UNPLACED: &str = MIGRATION_SYSTEMS[4];

/// The last byte of the address of the first guest with redis.
const FIRST_GUEST: u8 = 10;

/// A guest on a line.
#[derive(Clone, Copy, Debug)]
struct Task {
    workload: &'static str,
    guest: Guest,
    /// What redis in the guest is asked, where it has one; what it holds is the guest's size.
    mix: Option<Mix>,
    /// The size of its disk, where it is copied; of a guest with redis that of a second one, which redis writes to.
    disk_mib: u64,
    line_mbit: u64,
    round_trip: Duration,
}

/// Measures an experiment with migrations; else says why it cannot be.
///
/// # Errors
/// [`ExperimentError`].
pub(crate) fn run(
    choice: &Choice,
    id: &str,
    matrix: &MigrationMatrix,
    steps: &MigrationSteps,
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Found, ExperimentError> {
    let refused = |why| Ok((Vec::new(), Vec::new(), Outcome::default(), Some(why)));
    let program = choice.program.clone().unwrap_or_else(operation::this_program);
    if let Some(why) = operation::missing(&[&program, Path::new("qemu-system-x86_64")]) {
        return refused(why);
    }
    if matrix.writes_to_disks()
        && let Some(why) = redis_disk::obstacle()
    {
        return refused(why);
    }
    let line = match Line::new(matrix.is_long()) {
        Ok(line) => line,
        Err(why) => return refused(why),
    };
    let redis = match matrix.mixes.is_empty() {
        true => None,
        false => match redis::image(choice.guest.as_deref()) {
            Ok(image) => Some(image),
            Err(why) => return refused(why),
        },
    };
    let rounds = if choice.full { &steps.full } else { &steps.small };
    let (tasks, places) = tasks(id, matrix, rounds.size_mib.as_ref().unwrap_or(&matrix.size_mib));
    let known = MIGRATION_SYSTEMS.into_iter();
    let order = Order {
        systems: known.filter(|id| matrix.systems.iter().any(|it| it == id)).collect(),
        workloads: tasks.iter().map(|task| vec![task.workload]).collect(),
        rounds: choice.rounds.unwrap_or(rounds.rounds),
        places: 1,
    };
    let directory = choice.directory.clone();
    let systems = order.systems.clone();
    let (runs_on, here) = (steps.runs_on, None);
    let mut subject = Migrations { program, directory, systems, tasks, runs_on, redis, here, line };
    let outcome = subject::measure(&order, &mut subject, observe)?;
    // Kept until the program ends, as the names of loads are.
    let section = id.to_owned().leak();
    let title = "of guests between two agents on this machine, or between two QEMUs by hand";
    let measured = Measured::of_operations(section, title, &outcome);
    Ok((vec![measured], places, outcome, None))
}

/// The systems that an experiment of the catalogue measures at this point in its small size, and in how many rounds.
#[cfg(test)]
pub(crate) fn measured_at(workload: &str) -> (Vec<String>, u32) {
    use crate::definition::Matter;
    for definition in crate::catalogue::CATALOGUE.iter() {
        let Matter::Migration(matrix, steps) = &definition.matter else { continue };
        let sizes = steps.small.size_mib.as_ref().unwrap_or(&matrix.size_mib);
        let (tasks, _) = tasks(&definition.id, matrix, sizes);
        if tasks.iter().any(|task| task.workload == workload) {
            return (matrix.systems.clone(), steps.small.rounds);
        }
    }
    (Vec::new(), 0)
}

/// What is to be done, with the points of the matrix that it is at. Axes with several values are part of the names.
fn tasks(id: &str, matrix: &MigrationMatrix, sizes: &[u64]) -> (Vec<Task>, Vec<Place>) {
    let (mut tasks, mut places) = (Vec::new(), Vec::new());
    let several = matrix.mixes.len() > 1;
    let mixes: Vec<Option<Mix>> = match matrix.mixes.is_empty() {
        true => vec![None],
        false => matrix.mixes.iter().copied().map(Some).collect(),
    };
    let axes: [(&'static str, &[u64], &str); 6] = [
        ("size_mib", sizes, "mib"),
        ("changes_mib", &matrix.changes_mib, "mib-changed"),
        ("repeats", &matrix.repeats, "times"),
        ("disk_mib", &matrix.disk_mib, "mib-copied"),
        ("line_mbit", &matrix.line_mbit, "mbit"),
        ("rtt_us", &matrix.rtt_us, "us"),
    ];
    for mix in mixes {
        for point in combinations(&axes.map(|(_, values, _)| values)) {
            let mut name = id.to_owned();
            if let Some(mix) = mix.filter(|_| several) {
                name.push_str(&format!("-{mix}"));
            }
            for ((_, values, what), value) in axes.iter().zip(&point) {
                if values.len() > 1 {
                    name.push_str(&format!("-{value}-{what}"));
                }
            }
            // Kept until the program ends, as the names of loads are.
            let workload: &'static str = name.leak();
            let [size_mib, changes_mib, repeats, disk_mib, line_mbit, rtt_us] = point;
            let guest = Guest { size_mib, changes_mib, repeats };
            let round_trip = Duration::from_micros(rtt_us);
            tasks.push(Task { workload, guest, mix, disk_mib, line_mbit, round_trip });
            let axes = axes.iter().map(|(axis, ..)| *axis).zip(point.map(AxisValue::from));
            let asked = mix.map(|mix| (MIXES, AxisValue::from(mix)));
            places.push(Place {
                axes: axes.chain(asked).collect::<BTreeMap<_, _>>(),
                workloads: vec![(workload, None)],
                loads: Vec::new(),
            });
        }
    }
    (tasks, places)
}

/// Each value of each axis with each of the others; those of the last axis follow each other.
fn combinations<const N: usize>(axes: &[&[u64]; N]) -> Vec<[u64; N]> {
    let mut all = vec![[0; N]];
    for (at, values) in axes.iter().enumerate() {
        let with = |point: &[u64; N], value: &u64| {
            let mut point = *point;
            point[at] = *value;
            point
        };
        all = all.iter().flat_map(|point| values.iter().map(move |it| with(point, it))).collect();
    }
    all
}

struct Migrations {
    program: PathBuf,
    directory: PathBuf,
    systems: Vec<&'static str>,
    tasks: Vec<Task>,
    /// Whether guests without redis run on from one round to the next.
    runs_on: bool,
    /// The disk of guests with redis.
    redis: Option<PathBuf>,
    /// What runs in the network of the line ends before it.
    here: Option<Installation>,
    line: Line,
}

impl Subject for Migrations {
    fn prepare(
        &mut self,
        _place: u32,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), ExperimentError> {
        let here = self.install()?;
        let ours = self.systems.iter().filter(|it| How::of(it).is_none());
        match &self.redis {
            Some(disk) => {
                for &system in ours {
                    observe(Progress::Making(system));
                    for task in &self.tasks {
                        self.start_guest(&here, system, task, disk)?;
                    }
                }
            }
            None => {
                for task in &self.tasks {
                    let image = image(&here, task);
                    if !image.exists() {
                        task.guest.make(&image, task.disk_mib)?;
                    }
                }
                for &system in ours {
                    observe(Progress::Making(system));
                    for task in &self.tasks {
                        let vm = name(system, task);
                        if here.vmseal(&["vm", "show", &vm]).is_err() {
                            create(&here, &vm, system, task)?;
                        }
                    }
                }
            }
        }
        self.here = Some(here);
        Ok(())
    }

    fn run(&mut self, point: &Point) -> Result<Option<Sample>, ExperimentError> {
        let task = self.tasks.iter().find(|task| task.workload == point.workload).copied();
        let (Some(task), Some(here)) = (task, &self.here) else { return Ok(None) };
        self.line.set(task.line_mbit, task.round_trip)?;
        let moved = match (How::of(point.system), task.mix) {
            (Some(how), _) => {
                by_hand::migrate(how, task.guest, &image(here, &task), &here.accelerator()?)?
            }
            (None, None) if self.runs_on => {
                let vm = name(point.system, &task);
                if point.round == 0 {
                    start(here, &vm, &task)?;
                }
                move_watched(here, &vm, point.system, &task)?
            }
            (None, None) => migrate(here, point.system, &task)?,
            (None, Some(mix)) => {
                let vm = name(point.system, &task);
                let moves = || move_watched(here, &vm, point.system, &task);
                let guest = self.guest(point.system, &task);
                guest.begin_log()?;
                let (moved, served, gap) = guest.asked(mix, u64::from(point.round), moves)?;
                // What the task says; the client's time takes its place.
                let stood_still = moved.gap.as_secs_f64();
                Moved { gap, served: Some(Served { stood_still, ..served }), ..moved }
            }
        };
        if !self.line.goes_on() {
            let log = String::new();
            return Err(
                OperationError::Never { what: "the line carries what it is given", log }.into()
            );
        }
        Ok(Some(Sample::Cell(Box::new(moved.cell(point)), None)))
    }
}

impl Migrations {
    /// A server and two hosts, at either end of the line.
    fn install(&self) -> Result<Installation, OperationError> {
        let here = match self.line.places()? {
            None => {
                let mut here = Installation::start(&self.program, &self.directory)?;
                here.add_host(THERE, None, &[])?;
                if self.systems.contains(&UNPLACED) {
                    here.add_host(ELSEWHERE, None, &["--place-memory", "off"])?;
                }
                here
            }
            Some(([address, receives_at], there)) => {
                let (program, directory) = (&self.program, &self.directory);
                let mut here = Installation::start_at(address, receives_at, program, directory)?;
                here.add_host(THERE, Some(&there), &[])?;
                here
            }
        };
        if self.tasks.iter().any(|task| task.disk_mib > 0) {
            here.add_own_datastores()?;
        }
        Ok(here)
    }

    /// The guest with redis of a system: each has an address of its own, as all of them run.
    fn guest(&self, system: &str, task: &Task) -> RedisGuest {
        let sizes_of = |task: &Task| (task.guest.size_mib, task.disk_mib);
        let mut sizes: Vec<(u64, u64)> = self.tasks.iter().map(sizes_of).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let (size_mib, disk_mib) = sizes_of(task);
        let all = self.systems.iter().flat_map(|system| sizes.iter().map(move |it| (*system, *it)));
        let own = (system, (size_mib, disk_mib));
        let at = all.into_iter().position(|it| it == own).unwrap_or_default();
        let number = FIRST_GUEST + u8::try_from(at).unwrap_or(u8::MAX - FIRST_GUEST);
        RedisGuest { number, size_mib, disk_mib }
    }

    /// Makes a VM with redis, once for all that it is asked, starts it, and fills it.
    fn start_guest(
        &self,
        here: &Installation,
        system: &str,
        task: &Task,
        disk: &Path,
    ) -> Result<(), OperationError> {
        let (vm, guest) = (name(system, task), self.guest(system, task));
        if here.vmseal(&["vm", "show", &vm]).is_ok() {
            return Ok(());
        }
        // Agents take images from there.
        let image = here.store().join("redis.raw");
        if !image.exists() {
            let copied = std::fs::copy(disk, &image);
            copied.map_err(|source| OperationError::File { path: disk.into(), source })?;
        }
        let disk = format!("datastore=local,format=raw,image={}", image.display());
        let (memory, card) = (format!("{}MiB", guest.memory_mib()), guest.card(line::BRIDGE));
        let second;
        let mut more = vec!["--memory", &memory, "--disk", &disk, "--nic", &card];
        if guest.disk_mib > 0 {
            let data = here.store().join(format!("data-{}.raw", guest.disk_mib));
            if !data.exists() {
                redis_disk::make(&data, guest.disk_mib)?;
            }
            let datastore = own_datastore(HERE);
            second = format!("datastore={datastore},format=raw,image={}", data.display());
            more.extend(["--disk", &second]);
        }
        create_with(here, &vm, system, &more)?;
        here.vmseal(&["vm", "start", &vm])?;
        guest.use_disks(here.command(&["vm", "console", &vm, "--force"]))?;
        guest.fill()
    }
}

/// The image that a guest starts from.
fn image(here: &Installation, task: &Task) -> PathBuf {
    here.store().join(format!("{}.raw", machine(task)))
}

/// A guest and its disk.
fn machine(task: &Task) -> String {
    let Guest { size_mib, changes_mib, repeats } = task.guest;
    let disk = task.disk_mib;
    match task.mix {
        Some(_) if disk > 0 => format!("redis-{size_mib}-{disk}"),
        Some(_) => format!("redis-{size_mib}"),
        None if disk > 0 => format!("{size_mib}-{changes_mib}-{repeats}-{disk}"),
        None => format!("{size_mib}-{changes_mib}-{repeats}"),
    }
}

fn name(system: &str, task: &Task) -> String {
    format!("{system}-{}", machine(task))
}

fn create(here: &Installation, vm: &str, system: &str, task: &Task) -> Result<(), OperationError> {
    let datastore = if task.disk_mib > 0 { own_datastore(HERE) } else { "local" };
    let image = image(here, task);
    let disk = format!("datastore={datastore},format=raw,image={}", image.display());
    let memory = format!("{}MiB", task.guest.memory_mib());
    create_with(here, vm, system, &["--memory", &memory, "--disk", &disk])
}

/// Makes a VM of a system.
fn create_with(
    here: &Installation,
    vm: &str,
    system: &str,
    more: &[&str],
) -> Result<(), OperationError> {
    let has_key = [ENCRYPTED, COMPRESSED, UNPLACED].contains(&system);
    let policy = if has_key { "encrypted" } else { "plain" };
    let create = ["vm", "create", vm, "--host", HERE, "--policy", policy, "--vcpus", "1"];
    here.vmseal(&[&create[..], more, &["--force"]].concat())?;
    if !has_key {
        here.vmseal(&["vm", "set", vm, "--migration-encryption", system])?;
    }
    Ok(())
}

/// Starts a VM, moves it to the other host when its memory is full, and stops it.
fn migrate(here: &Installation, system: &str, task: &Task) -> Result<Moved, OperationError> {
    let vm = name(system, task);
    if system == UNPLACED {
        at_home(here, &vm)?;
    }
    start(here, &vm, task)?;
    let moved = move_watched(here, &vm, system, task)?;
    here.vmseal(&["vm", "stop", &vm, "--force"])?;
    Ok(moved)
}

/// Starts a VM, and waits until its memory is full.
fn start(here: &Installation, vm: &str, task: &Task) -> Result<(), OperationError> {
    here.vmseal(&["vm", "start", vm])?;
    task.guest.until_filled(process_of(here, vm)?)
}

/// Moves a VM that runs to the other host.
fn move_watched(
    here: &Installation,
    vm: &str,
    system: &str,
    task: &Task,
) -> Result<Moved, OperationError> {
    let shown = here.json(&["vm", "show", vm])?;
    let (from, to) = match shown["host"] == HERE {
        true if system == UNPLACED => (HERE, ELSEWHERE),
        true => (HERE, THERE),
        false => (THERE, HERE),
    };
    let mut command = vec!["vm", "migrate", vm, to];
    if system == COMPRESSED {
        command.push("--compress");
    }
    if task.disk_mib > 0 {
        command.extend(["--datastore", own_datastore(to)]);
    }
    let processes = || Ends { source: here.processes_of(from), destination: here.processes_of(to) };
    let (answered, spent) = meter::watched(processes, || here.json(&command));
    let answered = answered?;
    let unclear = || OperationError::Answer { what: command.join(" ") };
    let (seconds, of_memory, gap) = went(&answered).ok_or_else(unclear)?;
    let sent = of_memory + (task.disk_mib << 20);
    Ok(Moved { seconds, sent, gap, spent, served: None })
}

/// Has a VM that is off at the host from which it moves to the one that places no memory.
fn at_home(here: &Installation, vm: &str) -> Result<(), OperationError> {
    if here.json(&["vm", "show", vm])?["host"] != HERE {
        here.vmseal(&["vm", "migrate", vm, HERE])?;
    }
    Ok(())
}

/// The QEMU of a VM.
fn process_of(here: &Installation, vm: &str) -> Result<i32, OperationError> {
    let is_it = |pid: &i32| {
        // One that has ended is not it.
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        is_qemu_of(&String::from_utf8_lossy(&arguments), vm)
    };
    let log = String::new();
    let never = OperationError::Never { what: "the guest has a process", log };
    here.processes().into_iter().find(is_it).ok_or(never)
}

/// QEMU is told its VM's name for that of its process. Of the latter the kernel keeps 15 characters, which several VMs may have.
fn is_qemu_of(arguments: &str, vm: &str) -> bool {
    arguments.contains(&format!(",process=vm-{vm},"))
}

/// Of a task that is done: its time in seconds, what was sent, and how long the guest stood still, from its last pass on.
fn went(answered: &Value) -> Option<(f64, u64, Duration)> {
    let (begun, ended) = operation::times(answered)?;
    let task = answered.get(0).unwrap_or(answered);
    let of = |name: &str| task["migrated"][name].as_u64();
    let still = of("downtime_milliseconds")? + of("switch_milliseconds")?;
    let seconds = ended.duration_since(begun).as_secs_f64();
    Some((seconds, of("sent")?, Duration::from_millis(still)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::claim::{self, ClaimVerdict};
    use crate::definition::Matter;
    use crate::outcome::Cell;

    /// What is claimed in an experiment of the catalogue, judged by moves that have all that is claimed but for a change.
    fn judged(id: &str, change: impl Fn(&mut Cell)) -> ClaimVerdict {
        let definition = crate::catalogue::find(id).unwrap();
        let Matter::Migration(matrix, _) = &definition.matter else { panic!("{id}") };
        let (tasks, places) = tasks(id, matrix, &matrix.size_mib);
        let served = Served {
            during: 100.0,
            silence: 0.2,
            stood_still: 0.25,
            recovery: 1.0,
            ..Served::default()
        };
        let mut cells = Vec::new();
        for task in &tasks {
            for (system, round) in matrix.systems.iter().flat_map(|it| (0..5).map(move |n| (it, n)))
            {
                let mut cell = Cell {
                    seconds: 1.0,
                    throughput: 1e9,
                    gap: 1e6,
                    source_cpu_per_gib: Some(1e8),
                    destination_cpu_per_gib: Some(1e8),
                    served: Some(served.clone()),
                    ..Cell::unmeasured(round, system, task.workload)
                };
                change(&mut cell);
                cells.push(cell);
            }
        }
        let outcome = Outcome { cells, ..Outcome::default() };
        claim::assess(definition.claim.as_ref().unwrap(), &places, &outcome, 2).verdict
    }

    #[test]
    fn each_part_of_a_claim_is_judged() {
        fn served(cell: &mut Cell) -> &mut Served {
            cell.served.as_mut().unwrap()
        }
        type Change = fn(&mut Cell);
        let changes: [(&str, &str, Change); 12] = [
            ("migration-throughput", "the guest stands still longer", |it| it.gap += 6e7),
            ("migration-bandwidth", "below the line", |it| it.throughput = 4.8e8),
            ("migration-bandwidth", "a core more", |it| it.source_cpu_per_gib = Some(1e9)),
            ("migration-bandwidth", "half a core more", |it| {
                it.destination_cpu_per_gib = Some(6e8)
            }),
            ("migration-mixes", "GET takes 0.4 s", |it| served(it).stood_still = 0.4),
            ("migration-course", "a long dip", |it| it.gap = 1.1e9),
            ("migration-course", "longer than the guest", |it| served(it).silence = 0.3),
            ("migration-course", "not as before", |it| served(it).recovery = 3.5),
            ("migration-database", "slower", |it| it.seconds = 1.1),
            ("migration-database", "longer than the guest", |it| served(it).silence = 0.3),
            ("migration-database", "not as before", |it| served(it).recovery = 3.5),
            ("migration-database", "fewer answers", |it| served(it).during = 90.0),
        ];
        for (id, what, change) in changes {
            assert_eq!(judged(id, |_| {}), ClaimVerdict::Met, "{id}");
            let encrypted = |cell: &mut Cell| {
                if cell.system == ENCRYPTED {
                    change(cell);
                }
            };
            assert_eq!(judged(id, encrypted), ClaimVerdict::NotMet, "{id}: {what}");
        }
        // As slow in the clear as encrypted is not at line rate either.
        let both = |cell: &mut Cell| cell.throughput = 4.8e8;
        assert_eq!(judged("migration-bandwidth", both), ClaimVerdict::NotMet);
        let cores = |cell: &mut Cell| {
            (cell.source_cpu_per_gib, cell.destination_cpu_per_gib) = (Some(1.8e9), Some(1.4e9));
        };
        assert_eq!(judged("migration-bandwidth", cores), ClaimVerdict::NotMet, "in all");
    }

    #[test]
    fn what_a_task_says_of_its_migration_is_found() {
        let mut task = json!({
            "created": "2001-02-03T04:05:06Z",
            "ended": "2001-02-03T04:05:08.5Z",
            "migrated": {"sent": 7, "downtime_milliseconds": 30, "switch_milliseconds": 12}
        });
        let expected = Some((2.5, 7, Duration::from_millis(42)));
        assert_eq!(went(&task), expected);
        assert_eq!(went(&json!([task])), expected);
        // A gap of which a part is not known is none.
        task["migrated"].as_object_mut().unwrap().remove("switch_milliseconds");
        assert_eq!(went(&task), None);
    }

    #[test]
    fn a_qemu_is_that_of_a_vm_whose_name_another_one_begins_with() {
        let arguments = "qemu\0-name\0guest=a-64-1-1,process=vm-a-64-1-1,debug-threads=on\0-m\0";
        assert!(is_qemu_of(arguments, "a-64-1-1"));
        for other in ["a-64-1-10", "a-64-1", "64-1-1"] {
            assert!(!is_qemu_of(arguments, other), "{other}");
        }
    }

    #[test]
    fn axes_with_several_values_are_part_of_the_names() {
        let matrix = MigrationMatrix {
            systems: vec!["encrypted".to_owned()],
            size_mib: vec![64],
            changes_mib: vec![0, 5],
            repeats: vec![1],
            mixes: Vec::new(),
            disk_mib: vec![0],
            line_mbit: vec![500, 1000],
            rtt_us: vec![0],
        };
        let (tasks, places) = tasks("m", &matrix, &[64]);
        let names: Vec<&str> = tasks.iter().map(|task| task.workload).collect();
        let expected = [
            "m-0-mib-changed-500-mbit",
            "m-0-mib-changed-1000-mbit",
            "m-5-mib-changed-500-mbit",
            "m-5-mib-changed-1000-mbit",
        ];
        assert_eq!(names, expected);
        let last = places.last().unwrap();
        for (axis, value) in [("size_mib", 64), ("changes_mib", 5), ("line_mbit", 1000)] {
            assert_eq!(last.axes.get(axis), Some(&AxisValue::Number(value)), "{axis}");
        }
        assert_eq!(last.workloads, [(expected[3], None)]);

        let mixes = vec![Mix::Idle, Mix::Gets(75)];
        let matrix = MigrationMatrix { mixes, changes_mib: vec![0], rtt_us: vec![0, 50], ..matrix };
        let (tasks, _) = super::tasks("m", &matrix, &[64]);
        let names: Vec<&str> = tasks.iter().map(|task| task.workload).collect();
        assert!(names.contains(&"m-idle-500-mbit-0-us"), "{names:?}");
        assert!(names.contains(&"m-75-25-1000-mbit-50-us"), "{names:?}");
        assert_eq!(names.len(), 8);
    }

    #[test]
    fn each_mix_is_a_point_of_its_own_and_each_disk_a_machine() {
        let matrix = MigrationMatrix {
            systems: vec!["encrypted".to_owned(), "disabled".to_owned()],
            size_mib: vec![64],
            changes_mib: vec![0],
            repeats: vec![1],
            mixes: vec![Mix::Idle, Mix::Gets(75)],
            disk_mib: vec![0, 512],
            line_mbit: vec![0],
            rtt_us: vec![0],
        };
        let (tasks, places) = tasks("m", &matrix, &[64]);
        let mix_of = |place: &Place| place.axes.get(MIXES).cloned();
        let mixes: Vec<_> = places.iter().filter_map(mix_of).collect();
        assert_eq!(mixes, ["idle", "idle", "75-25", "75-25"].map(AxisValue::from));
        let machines: Vec<String> = tasks.iter().map(|task| name("encrypted", task)).collect();
        let (in_memory, on_disk) = ("encrypted-redis-64", "encrypted-redis-64-512");
        assert_eq!(machines, [in_memory, on_disk, in_memory, on_disk]);
        // Without a client no mix tells it.
        let (_, places) =
            super::tasks("m", &MigrationMatrix { mixes: Vec::new(), ..matrix }, &[64]);
        assert!(places.iter().all(|place| mix_of(place).is_none()));
    }

    #[test]
    fn the_database_moves_over_the_lines_of_its_experiment() {
        for rtt in ["500", "50000", "150000"] {
            let (systems, rounds) = measured_at(&format!("migration-database-{rtt}-us"));
            assert_eq!(systems, ["encrypted", "disabled"], "{rtt}");
            // With fewer there are no bounds.
            assert!(rounds >= 5, "{rounds}");
        }
    }
}
