//! The subject `operation`: what a whole installation takes for an operation, on VMs that are encrypted beside VMs that are
//! not. Times are those of the server's tasks, so that starting a command is not part of them.
//!
//! ```text
//! place:  start server and agent → make the VMs of every size, encrypted and plain
//! round:  for each operation: each system in turn: bring its VMs to where it begins → do it, timed → undo it
//! ```
//!
//! The guest finds nothing to boot and idles: under emulation a busy one would measure the emulation.

mod backup;
mod by_hand;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::Value;
use vmseal_api::datastore::RbdPool;

use crate::claim::Place;
use crate::definition::{AxisValue, OPERATION_SYSTEMS, Operation, OperationMatrix, OperationSteps};
use crate::installation::{Installation, LOCAL};
pub use crate::outcome::OperationError;
use crate::outcome::{Cell, ExperimentError, Outcome, Progress, Sample};
use crate::report::Measured;
use crate::stop;
use crate::subject::{self, Order, Point, Subject};

const ENCRYPTED: &str = OPERATION_SYSTEMS[0];
const PLAIN: &str = OPERATION_SYSTEMS[1];
const COPY: &str = OPERATION_SYSTEMS[2];
const FULL: &str = OPERATION_SYSTEMS[3];
const BY_HAND: &str = OPERATION_SYSTEMS[4];

/// The datastore that is a pool.
const POOL: &str = "ceph";

/// An operation on VMs of one size, so many at once.
#[derive(Clone, Copy, Debug)]
struct Task {
    workload: &'static str,
    operation: Operation,
    size_mib: u64,
    at_once: u32,
}

/// Points with their results, all results together, and why there are none.
pub(crate) type Found = (Vec<Measured>, Vec<Place>, Outcome, Option<String>);

/// What is chosen for a run.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    /// The program vmseal; none is this one.
    pub program: Option<PathBuf>,
    /// Where the disks are.
    pub directory: PathBuf,
    /// Whether the sizes are those of the documents.
    pub full: bool,
    /// The number of rounds in place of the experiment's.
    pub rounds: Option<u32>,
    /// The disk of a guest with redis.
    pub guest: Option<PathBuf>,
    /// The pool that has the disks of VMs, in place of the directory.
    pub pool: Option<RbdPool>,
}

/// Measures an experiment with operations; else says why it cannot be.
///
/// # Errors
/// [`ExperimentError`].
pub(crate) fn run(
    choice: &Choice,
    id: &str,
    matrix: &OperationMatrix,
    steps: &OperationSteps,
    observe: &mut dyn FnMut(Progress<'_>),
) -> Result<Found, ExperimentError> {
    let program = choice.program.clone().unwrap_or_else(this_program);
    let needed = [&program, Path::new("qemu-system-x86_64"), Path::new("qemu-img")];
    if let Some(why) = missing(&needed) {
        return Ok((Vec::new(), Vec::new(), Outcome::default(), Some(why)));
    }
    if let Some(why) = steps.storage.and_then(|storage| storage.obstacle(&choice.directory)) {
        return Ok((Vec::new(), Vec::new(), Outcome::default(), Some(why)));
    }
    let rounds = if choice.full { &steps.full } else { &steps.small };
    let sizes = rounds.size_mib.as_ref().unwrap_or(&matrix.size_mib);
    // Goals are about operations wherever the disks are.
    let prefix = if steps.storage.is_some() { id } else { "ops" };
    let (tasks, places) = tasks(prefix, matrix, sizes);
    let order = Order {
        systems: OPERATION_SYSTEMS.to_vec(),
        workloads: tasks.iter().map(|task| vec![task.workload]).collect(),
        rounds: choice.rounds.unwrap_or(rounds.rounds),
        places: 1,
    };
    let mut subject = Operations {
        program,
        directory: choice.directory.clone(),
        pool: choice.pool.clone(),
        memory_mib: steps.memory_mib,
        tasks,
        here: None,
    };
    let outcome = subject::measure(&order, &mut subject, observe)?;
    let title =
        "of a server, an agent and guests on this machine, with keys of the native provider";
    let measured = Measured::of_operations("operations", title, &outcome);
    Ok((vec![measured], places, outcome, None))
}

/// The names in goals of what an experiment of the catalogue measures in its small size.
#[cfg(test)]
pub(crate) fn names_of(id: &str) -> Vec<String> {
    let definition = crate::catalogue::find(id).unwrap();
    let crate::definition::Matter::Operation(matrix, _) = definition.matter else { return vec![] };
    let (tasks, _) = tasks("ops", &matrix, &matrix.size_mib);
    tasks.iter().map(|task| task.workload.to_owned()).collect()
}

/// The first of these programs that cannot be run, as a reason to measure nothing.
pub(crate) fn missing(programs: &[&Path]) -> Option<String> {
    let fails = |program: &&&Path| {
        let ran = Command::new(program).arg("--version").output();
        !ran.is_ok_and(|it| it.status.success())
    };
    programs.iter().find(fails).map(|program| format!("{} cannot be run", program.display()))
}

/// The program that this is; that of the laboratory alone (cargo's examples) has it in the directory above.
pub(crate) fn this_program() -> PathBuf {
    let name = "vmseal";
    let program = std::env::current_exe().unwrap_or_default();
    let near = program.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    near.into_iter().find(|path| path.is_file()).unwrap_or_else(|| name.into())
}

/// What is to be done, with the points of the matrix that it is at. Axes with several values are part of the names.
fn tasks(prefix: &str, matrix: &OperationMatrix, sizes: &[u64]) -> (Vec<Task>, Vec<Place>) {
    let (mut tasks, mut places) = (Vec::new(), Vec::new());
    for &size_mib in sizes {
        for &at_once in &matrix.at_once {
            let mut suffix = String::new();
            if sizes.len() > 1 {
                suffix.push_str(&format!("-{size_mib}-mib"));
            }
            if matrix.at_once.len() > 1 {
                suffix.push_str(&format!("-{at_once}-at-once"));
            }
            let task = |operation: &Operation| Task {
                // Kept until the program ends, as the names of loads are.
                workload: format!("{prefix}-{}{suffix}", operation.id()).leak(),
                operation: *operation,
                size_mib,
                at_once,
            };
            let here: Vec<Task> = matrix.operations.iter().map(task).collect();
            let axes = BTreeMap::from([
                ("size_mib", AxisValue::from(size_mib)),
                ("at_once", AxisValue::from(u64::from(at_once))),
            ]);
            places.push(Place {
                axes,
                workloads: here.iter().map(|it| (it.workload, Some(it.operation))).collect(),
                loads: Vec::new(),
            });
            tasks.extend(here);
        }
    }
    (tasks, places)
}

struct Operations {
    program: PathBuf,
    directory: PathBuf,
    pool: Option<RbdPool>,
    memory_mib: u64,
    tasks: Vec<Task>,
    here: Option<Installation>,
}

impl Subject for Operations {
    fn prepare(
        &mut self,
        _place: u32,
        observe: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), ExperimentError> {
        let mut here = Installation::start(&self.program, &self.directory)?;
        if let Some(pool) = &self.pool {
            here.add_pool(POOL, pool)?;
        }
        for task in &self.tasks {
            let image = image(&here, task.size_mib);
            if !image.exists() {
                fill(&image, task.size_mib)
                    .map_err(|source| OperationError::File { path: image, source })?;
            }
        }
        for policy in [ENCRYPTED, PLAIN] {
            observe(Progress::Making(policy));
            let own = [Operation::Encrypt, Operation::Backup];
            for task in self.tasks.iter().filter(|task| !own.contains(&task.operation)) {
                for vm in names(policy, task) {
                    if here.vmseal(&["vm", "show", &vm]).is_err() {
                        self.create(&here, &vm, policy, task.size_mib)?;
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
        let mut read_bytes = f64::NAN;
        let seconds = match (task.operation, point.system) {
            (Operation::Encrypt, ENCRYPTED) => self.encrypt(here, &task)?,
            (Operation::Encrypt, COPY) => copy(here, &task)?,
            (Operation::Backup, ENCRYPTED | FULL) => {
                let image = backup::image(here, task.size_mib)?;
                let create = |vm: &str| self.create_from(here, vm, ENCRYPTED, &image);
                let vms = backup::names(task.at_once);
                let incremental = point.system == ENCRYPTED;
                let done = backup::measure(here, &vms, task.size_mib, incremental, create)?;
                read_bytes = done.read_bytes;
                done.seconds
            }
            // It saves memory in a directory: beside a pool that compares nothing.
            (Operation::Suspend | Operation::Resume, BY_HAND) if self.pool.is_none() => {
                by_hand::measure(here, &task, self.memory_mib)?
            }
            (Operation::Encrypt | Operation::Backup, _) | (_, COPY | FULL | BY_HAND) => {
                return Ok(None);
            }
            (Operation::ShallowRecrypt, PLAIN) => return Ok(None),
            (operation, policy) => operate(here, operation, &names(policy, &task))?,
        };
        let cell = Cell { read_bytes, ..cell(point, &task, seconds) };
        Ok(Some(Sample::Cell(Box::new(cell), None)))
    }
}

impl Operations {
    fn create(
        &self,
        here: &Installation,
        vm: &str,
        policy: &str,
        size_mib: u64,
    ) -> Result<(), OperationError> {
        self.create_from(here, vm, policy, &image(here, size_mib))
    }

    fn create_from(
        &self,
        here: &Installation,
        vm: &str,
        policy: &str,
        image: &Path,
    ) -> Result<(), OperationError> {
        let datastore = if self.pool.is_some() { POOL } else { LOCAL };
        // Random bytes, which may begin as any format does.
        let disk = format!("datastore={datastore},format=raw,image={}", image.display());
        let memory = format!("{}MiB", self.memory_mib);
        let create = ["vm", "create", vm, "--policy", policy, "--memory", &memory];
        here.vmseal(&[&create[..], &["--disk", &disk, "--force"]].concat())?;
        Ok(())
    }

    /// Encrypts VMs that run, made for this. They go afterwards.
    fn encrypt(&self, here: &Installation, task: &Task) -> Result<f64, OperationError> {
        let vms: Vec<String> =
            (0..task.at_once).map(|number| format!("existing-{number}")).collect();
        for vm in &vms {
            self.create(here, vm, PLAIN, task.size_mib)?;
            here.vmseal(&["vm", "start", vm])?;
        }
        let seconds =
            timed(here, &vms, |vm| words(&["vm", "encrypt", vm, "--policy", "encrypted"]))?;
        for vm in &vms {
            here.vmseal(&["vm", "stop", vm, "--force"])?;
            here.vmseal(&["vm", "delete", vm])?;
        }
        Ok(seconds)
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The VMs of a policy that take part.
fn names(policy: &str, task: &Task) -> Vec<String> {
    (0..task.at_once).map(|number| format!("{policy}-{}-{number}", task.size_mib)).collect()
}

/// The image that disks of a size are filled from.
fn image(here: &Installation, size_mib: u64) -> PathBuf {
    here.store().join(format!("{size_mib}.raw"))
}

/// Random bytes: what cannot be skipped as zeroes.
pub(crate) fn fill(path: &Path, size_mib: u64) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    let mut block = vec![0; 1 << 20];
    let mut random = fastrand::Rng::with_seed(size_mib);
    for _ in 0..size_mib {
        stop::check().map_err(io::Error::other)?;
        random.fill(&mut block);
        // Nothing that firmware would start.
        block[510..512].fill(0);
        file.write_all(&block)?;
    }
    file.sync_all()
}

/// Does an operation with VMs that are off, and undoes it. Only the operation is timed.
fn operate(
    here: &Installation,
    operation: Operation,
    vms: &[String],
) -> Result<f64, OperationError> {
    let each = |words: &[&str], last: &[&str]| -> Result<(), OperationError> {
        vms.iter().try_for_each(|vm| here.vmseal(&[words, &[vm], last].concat()).map(drop))
    };
    let time = |words_of: fn(&str) -> Vec<String>| timed(here, vms, words_of);
    let begin = || each(&["vm", "start"], &[]);
    let end = || each(&["vm", "stop"], &["--force"]);
    let seconds = match operation {
        Operation::PowerOn => {
            let seconds = time(|vm| words(&["vm", "start", vm]))?;
            end()?;
            seconds
        }
        Operation::Clone => {
            let seconds = time(|vm| words(&["vm", "clone", vm, &format!("{vm}-clone")]))?;
            for vm in vms {
                here.vmseal(&["vm", "delete", &format!("{vm}-clone")])?;
            }
            seconds
        }
        Operation::Snapshot => {
            begin()?;
            let seconds = time(|vm| words(&["snapshot", "create", vm, "measured"]))?;
            each(&["snapshot", "delete"], &["measured"])?;
            end()?;
            seconds
        }
        Operation::Suspend => {
            begin()?;
            let seconds = time(|vm| words(&["vm", "suspend", vm]))?;
            each(&["vm", "resume"], &[])?;
            end()?;
            seconds
        }
        Operation::Resume => {
            begin()?;
            each(&["vm", "suspend"], &[])?;
            let seconds = time(|vm| words(&["vm", "resume", vm]))?;
            end()?;
            seconds
        }
        Operation::ShallowRecrypt => time(|vm| words(&["vm", "recrypt", vm]))?,
        Operation::Encrypt | Operation::Backup => unreachable!("they have VMs of their own"),
    };
    Ok(seconds)
}

/// Runs a command for each VM, all at once; the seconds from the beginning of the first task to the end of the last.
fn timed(
    here: &Installation,
    vms: &[String],
    command: impl Fn(&str) -> Vec<String> + Sync,
) -> Result<f64, OperationError> {
    let one = |vm: &String| {
        let command = command(vm);
        let arguments: Vec<&str> = command.iter().map(String::as_str).collect();
        let answered = here.json(&arguments)?;
        let what = arguments.join(" ");
        times(&answered).ok_or(OperationError::Answer { what })
    };
    let times: Vec<(jiff::Timestamp, jiff::Timestamp)> = std::thread::scope(|scope| {
        let threads: Vec<_> = vms.iter().map(|vm| scope.spawn(|| one(vm))).collect();
        let ended = threads.into_iter().map(|it| it.join().expect("a command does not panic"));
        ended.collect::<Result<_, _>>()
    })?;
    let begun = times.iter().map(|(begun, _)| *begun).min().unwrap_or_default();
    let ended = times.iter().map(|(_, ended)| *ended).max().unwrap_or_default();
    Ok(ended.duration_since(begun).as_secs_f64())
}

/// When a task that was answered, or the only one of a list, was created and ended.
pub(crate) fn times(answered: &Value) -> Option<(jiff::Timestamp, jiff::Timestamp)> {
    let task = match answered {
        Value::Array(all) if all.len() == 1 => &all[0],
        other => other,
    };
    let time = |name: &str| task[name].as_str()?.parse().ok();
    Some((time("created")?, time("ended")?))
}

/// What `qemu-img convert` takes to copy the same bytes in the clear, with all of it on the storage at the end.
fn copy(here: &Installation, task: &Task) -> Result<f64, OperationError> {
    let (from, begun) = (image(here, task.size_mib), Instant::now());
    let numbers: Vec<u32> = (0..task.at_once).collect();
    let one = |number: &u32| {
        let to = here.store().join(format!("copy-{number}.raw"));
        let program = PathBuf::from("qemu-img");
        let mut command = Command::new(&program);
        command.args(["convert", "-f", "raw", "-O", "raw", "-t", "writeback"]).arg(&from).arg(&to);
        let output = stop::output(&mut command)
            .map_err(|source| OperationError::Program { program, source })?;
        if output.status.success() {
            let synced = File::open(&to).and_then(|file| file.sync_all());
            return synced
                .map(|()| to.clone())
                .map_err(|source| OperationError::File { path: to, source });
        }
        let mut said = String::new();
        let _ = output.stderr.as_slice().read_to_string(&mut said);
        Err(OperationError::Command { what: "qemu-img convert".to_owned(), said })
    };
    let copies: Vec<PathBuf> = std::thread::scope(|scope| {
        let threads: Vec<_> = numbers.iter().map(|it| scope.spawn(|| one(it))).collect();
        let ended = threads.into_iter().map(|it| it.join().expect("a copy does not panic"));
        ended.collect::<Result<_, _>>()
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    for path in copies {
        std::fs::remove_file(&path).map_err(|source| OperationError::File { path, source })?;
    }
    Ok(seconds)
}

/// A measurement as the goals take it.
fn cell(point: &Point, task: &Task, seconds: f64) -> Cell {
    let bytes = match task.operation {
        Operation::Encrypt | Operation::Clone => {
            (task.size_mib << 20) as f64 * f64::from(task.at_once)
        }
        _ => f64::NAN,
    };
    Cell {
        requests: 1,
        seconds,
        throughput: bytes / seconds,
        ..Cell::unmeasured(point.round, point.system, point.workload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_a_task_are_found() {
        let task = serde_json::json!({"created": "2001-02-03T04:05:06Z", "ended": "2001-02-03T04:05:08.5Z"});
        let (begun, ended) = times(&task).unwrap();
        assert_eq!(ended.duration_since(begun).as_millis(), 2500);
        assert!(times(&serde_json::json!([task])).is_some());
        assert!(times(&serde_json::json!([task, task])).is_none());
        assert!(times(&serde_json::json!({"created": "2001-02-03T04:05:06Z"})).is_none());
    }

    #[test]
    fn axes_with_several_values_are_part_of_the_names() {
        let matrix = |sizes: &[u64], at_once: &[u32]| OperationMatrix {
            size_mib: sizes.to_vec(),
            at_once: at_once.to_vec(),
            operations: vec![Operation::PowerOn],
        };
        let names = |matrix: &OperationMatrix| -> Vec<&str> {
            let (tasks, places) = tasks("ops", matrix, &matrix.size_mib);
            assert_eq!(tasks.len(), places.len());
            tasks.iter().map(|task| task.workload).collect()
        };
        assert_eq!(names(&matrix(&[64], &[1])), ["ops-power-on"]);
        assert_eq!(
            names(&matrix(&[64, 128], &[3, 1])),
            [
                "ops-power-on-64-mib-3-at-once",
                "ops-power-on-64-mib-1-at-once",
                "ops-power-on-128-mib-3-at-once",
                "ops-power-on-128-mib-1-at-once"
            ]
        );
    }
}
