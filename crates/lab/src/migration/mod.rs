//! The subject `migration`: a guest that runs moves from one host to another on this machine, as a VM of vmseal that is sent
//! encrypted or in the clear, and beside it between two QEMUs by hand.
//!
//! ```text
//! place:  a network of its own → start server and two agents → make a VM for each system and guest
//! round:  for each point: each system in turn: start the guest → wait until its memory is full → limit the line → move it, watched
//!         → stop it
//! ```
//!
//! What it takes is that of the task, or by hand from the start of the destination's QEMU on: that is part of both. The rate is that
//! of the line alone (`meter`).

mod by_hand;
mod guest;
mod line;
mod meter;
mod moved;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use self::by_hand::How;
use self::guest::Guest;
use self::line::Line;
use self::moved::Moved;
use crate::claim::Place;
use crate::definition::{MIGRATION_SYSTEMS, MigrationMatrix, MigrationSteps};
use crate::installation::{ELSEWHERE, HERE, Installation, THERE};
use crate::operation::{self, Choice, Found};
use crate::outcome::{ExperimentError, OperationError, Outcome, Progress, Sample};
use crate::report::Measured;
use crate::subject::{self, Order, Point, Subject};

/// The VM that has a key; the others have their modes for names.
const ENCRYPTED: &str = MIGRATION_SYSTEMS[0];

/// The same, and its memory is compressed.
const COMPRESSED: &str = MIGRATION_SYSTEMS[1];

/// The same, and the destination's agent has QEMU load the memory.
const UNPLACED: &str = MIGRATION_SYSTEMS[2];

/// A guest on a line.
#[derive(Clone, Copy, Debug)]
struct Task {
    workload: &'static str,
    guest: Guest,
    line_mbit: u64,
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
    let line = match Line::new() {
        Ok(line) => line,
        Err(why) => return refused(why),
    };
    let rounds = if choice.full { &steps.full } else { &steps.small };
    let (tasks, places) = tasks(id, matrix, rounds.size_mib.as_ref().unwrap_or(&matrix.size_mib));
    let known = MIGRATION_SYSTEMS.into_iter();
    let order = Order {
        systems: known.filter(|id| matrix.systems.iter().any(|it| it == id)).collect(),
        workloads: tasks.iter().map(|task| task.workload).collect(),
        rounds: choice.rounds.unwrap_or(rounds.rounds),
        places: 1,
    };
    let directory = choice.directory.clone();
    let systems = order.systems.clone();
    let mut subject = Migrations { program, directory, systems, tasks, here: None, line };
    let outcome = subject::measure(&order, &mut subject, observe)?;
    // Kept until the program ends, as the names of loads are.
    let section = id.to_owned().leak();
    let title = "of guests between two agents on this machine, or between two QEMUs by hand";
    let measured = Measured::of_operations(section, title, &outcome);
    Ok((vec![measured], places, outcome, None))
}

/// The systems that an experiment of the catalogue measures at this point in its small size.
#[cfg(test)]
pub(crate) fn systems_at(workload: &str) -> Vec<String> {
    use crate::definition::Matter;
    for definition in crate::catalogue::CATALOGUE.iter() {
        let Matter::Migration(matrix, steps) = &definition.matter else { continue };
        let sizes = steps.small.size_mib.as_ref().unwrap_or(&matrix.size_mib);
        let (tasks, _) = tasks(&definition.id, matrix, sizes);
        if tasks.iter().any(|task| task.workload == workload) {
            return matrix.systems.clone();
        }
    }
    Vec::new()
}

/// What is to be done, with the points of the matrix that it is at. Axes with several values are part of the names.
fn tasks(id: &str, matrix: &MigrationMatrix, sizes: &[u64]) -> (Vec<Task>, Vec<Place>) {
    let (mut tasks, mut places) = (Vec::new(), Vec::new());
    for &size_mib in sizes {
        for &changes_mib in &matrix.changes_mib {
            for &repeats in &matrix.repeats {
                for &line_mbit in &matrix.line_mbit {
                    let axes = [
                        ("size_mib", size_mib, "mib", sizes.len()),
                        ("changes_mib", changes_mib, "mib-changed", matrix.changes_mib.len()),
                        ("repeats", repeats, "times", matrix.repeats.len()),
                        ("line_mbit", line_mbit, "mbit", matrix.line_mbit.len()),
                    ];
                    let mut name = id.to_owned();
                    for (_, value, what, values) in axes {
                        if values > 1 {
                            name.push_str(&format!("-{value}-{what}"));
                        }
                    }
                    // Kept until the program ends, as the names of loads are.
                    let workload: &'static str = name.leak();
                    let guest = Guest { size_mib, changes_mib, repeats };
                    tasks.push(Task { workload, guest, line_mbit });
                    let axes = axes.into_iter().map(|(axis, value, ..)| (axis, value));
                    places.push(Place {
                        axes: axes.collect::<BTreeMap<_, _>>(),
                        workloads: vec![(workload, None)],
                    });
                }
            }
        }
    }
    (tasks, places)
}

struct Migrations {
    program: PathBuf,
    directory: PathBuf,
    systems: Vec<&'static str>,
    tasks: Vec<Task>,
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
        let mut here = Installation::start(&self.program, &self.directory)?;
        here.add_host(THERE, &[])?;
        if self.systems.contains(&UNPLACED) {
            here.add_host(ELSEWHERE, &["--place-memory", "off"])?;
        }
        for task in &self.tasks {
            let image = image(&here, task.guest);
            if !image.exists() {
                task.guest.make(&image)?;
            }
        }
        for &system in self.systems.iter().filter(|it| How::of(it).is_none()) {
            observe(Progress::Making(system));
            for task in &self.tasks {
                let vm = name(system, task.guest);
                if here.vmseal(&["vm", "show", &vm]).is_err() {
                    create(&here, &vm, system, task.guest)?;
                }
            }
        }
        self.here = Some(here);
        Ok(())
    }

    fn run(&mut self, point: &Point) -> Result<Option<Sample>, ExperimentError> {
        let task = self.tasks.iter().find(|task| task.workload == point.workload).copied();
        let (Some(task), Some(here)) = (task, &self.here) else { return Ok(None) };
        self.line.limit(task.line_mbit)?;
        let moved = match How::of(point.system) {
            Some(how) => {
                let disk = image(here, task.guest);
                by_hand::migrate(how, task.guest, &disk, &accelerator(here)?)?
            }
            None => migrate(here, point.system, task.guest)?,
        };
        Ok(Some(Sample::Cell(Box::new(moved.cell(point)), None)))
    }
}

/// The image that a guest starts from.
fn image(here: &Installation, guest: Guest) -> PathBuf {
    let Guest { size_mib, changes_mib, repeats } = guest;
    here.store().join(format!("{size_mib}-{changes_mib}-{repeats}.raw"))
}

fn name(system: &str, guest: Guest) -> String {
    let Guest { size_mib, changes_mib, repeats } = guest;
    format!("{system}-{size_mib}-{changes_mib}-{repeats}")
}

fn create(here: &Installation, vm: &str, system: &str, guest: Guest) -> Result<(), OperationError> {
    let image = image(here, guest);
    let disk = format!("datastore=local,format=raw,image={}", image.display());
    let memory = format!("{}MiB", guest.memory_mib());
    let has_key = [ENCRYPTED, COMPRESSED, UNPLACED].contains(&system);
    let policy = if has_key { "encrypted" } else { "plain" };
    let create = ["vm", "create", vm, "--host", HERE, "--policy", policy, "--vcpus", "1"];
    here.vmseal(&[&create[..], &["--memory", &memory, "--disk", &disk, "--force"]].concat())?;
    if !has_key {
        here.vmseal(&["vm", "set", vm, "--migration-encryption", system])?;
    }
    Ok(())
}

/// What runs vmseal's guests here: the guests by hand run under the same.
fn accelerator(here: &Installation) -> Result<String, OperationError> {
    let host = here.json(&["host", "show", HERE])?;
    let found = host["description"]["accelerator"]["kind"].as_str().map(str::to_owned);
    found.ok_or_else(|| OperationError::Answer { what: format!("host show {HERE}") })
}

/// Starts a VM, moves it to the other host when its memory is full, and stops it.
fn migrate(here: &Installation, system: &str, guest: Guest) -> Result<Moved, OperationError> {
    let vm = name(system, guest);
    let to = destination(here, system, &vm)?;
    here.vmseal(&["vm", "start", &vm])?;
    guest.until_filled(process_of(here, &vm)?)?;
    let mut command = vec!["vm", "migrate", &vm, to];
    if system == COMPRESSED {
        command.push("--compress");
    }
    let (answered, spent) = meter::watched(|| here.processes(), || here.json(&command));
    let answered = answered?;
    here.vmseal(&["vm", "stop", &vm, "--force"])?;
    let unclear = || OperationError::Answer { what: command.join(" ") };
    let (seconds, sent, gap) = went(&answered).ok_or_else(unclear)?;
    Ok(Moved { seconds, sent, gap, spent })
}

/// Where a VM that is off is to move. One whose memory is not to be placed always moves to the same host.
fn destination(
    here: &Installation,
    system: &str,
    vm: &str,
) -> Result<&'static str, OperationError> {
    let is_here = here.json(&["vm", "show", vm])?["host"] == HERE;
    if system != UNPLACED {
        return Ok(if is_here { THERE } else { HERE });
    }
    if !is_here {
        here.vmseal(&["vm", "migrate", vm, HERE])?;
    }
    Ok(ELSEWHERE)
}

/// QEMU has its VM in the name of its process, of which the kernel keeps the beginning.
fn process_of(here: &Installation, vm: &str) -> Result<i32, OperationError> {
    let name = format!("vm-{vm}");
    let is_it = |pid: &i32| {
        let path = format!("/proc/{pid}/comm");
        let known = std::fs::read_to_string(path).unwrap_or_default();
        known.starts_with("vm-") && name.starts_with(known.trim())
    };
    let log = String::new();
    let never = OperationError::Never { what: "the guest has a process", log };
    here.processes().into_iter().find(is_it).ok_or(never)
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
    fn axes_with_several_values_are_part_of_the_names() {
        let matrix = MigrationMatrix {
            systems: vec!["encrypted".to_owned()],
            size_mib: vec![64],
            changes_mib: vec![0, 5],
            repeats: vec![1],
            line_mbit: vec![500, 1000],
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
        assert_eq!(
            last.axes,
            [("size_mib", 64), ("changes_mib", 5), ("repeats", 1), ("line_mbit", 1000)].into()
        );
        assert_eq!(last.workloads, [(expected[3], None)]);
    }
}
