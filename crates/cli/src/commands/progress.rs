//! The progress of tasks: a bar for each on a terminal, else lines or documents if they are wanted.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use vmseal_api::id::TaskId;
use vmseal_api::model::{Task, TaskState};
use vmseal_api::transfer;

use crate::arguments::Output;
use crate::print::{self, migration};
use crate::rows::column::Cell;
use crate::rows::word;

/// How often a bar without a percentage turns.
const TICK: Duration = Duration::from_millis(120);

/// The bar of a task with a percentage.
const MEASURED: &str = "{prefix} {bar:30} {pos} % {msg} ({elapsed})";

/// The bar of a task without one.
const UNMEASURED: &str = "{prefix} {spinner} {msg} ({elapsed})";

/// The least time between two lines or documents of a task, unless it comes to another step.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// What is printed of tasks.
enum Told {
    /// That they are done.
    Ends,
    /// Each change, in lines on standard error where there are no bars.
    Changes,
    /// Each change, in documents on standard output.
    Documents(Output),
}

/// A task that is shown.
struct Shown {
    bar: ProgressBar,
    /// When it was due to be printed last, and what it was then.
    at: Instant,
    task: Task,
}

pub struct Progress {
    bars: Option<MultiProgress>,
    shown: HashMap<TaskId, Shown>,
    told: Told,
}

impl Progress {
    /// Without a terminal, only ends are printed.
    pub fn quiet() -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { bars: terminal.then(MultiProgress::new), shown: HashMap::new(), told: Told::Ends }
    }

    /// Without a terminal, every change is a line; for programs, a document.
    pub fn watching(output: Output) -> Self {
        match output {
            Output::Table | Output::Csv => Self { told: Told::Changes, ..Self::quiet() },
            Output::Json | Output::Yaml => {
                Self { bars: None, shown: HashMap::new(), told: Told::Documents(output) }
            }
        }
    }

    /// Whether the tasks' documents are printed as they change, with their ends.
    pub fn prints_documents(&self) -> bool {
        matches!(self.told, Told::Documents(_))
    }

    /// Shows the present state of the tasks.
    ///
    /// # Errors
    /// Standard output takes no documents.
    pub fn show(&mut self, tasks: &[Task]) -> anyhow::Result<()> {
        for task in tasks {
            let before = self.shown.get(&task.id);
            let is_due = before.is_none_or(|before| self.is_due(before, task));
            let bar = before.map_or_else(|| self.bar(task), |before| before.bar.clone());
            if task.state.is_open() {
                advance(&bar, task);
            } else {
                bar.finish_and_clear();
            }
            if is_due {
                let shown = Shown { bar, at: Instant::now(), task: task.clone() };
                self.shown.insert(task.id, shown);
                self.print(task)?;
            }
        }
        Ok(())
    }

    /// Whether a task is printed again.
    fn is_due(&self, before: &Shown, task: &Task) -> bool {
        let phase = |task: &Task| task.migration.map(|migration| migration.phase);
        let place = |task: &Task| (task.state, task.at(), phase(task));
        let differs = || match self.told {
            Told::Documents(_) => before.task != *task,
            Told::Ends | Told::Changes => state(&before.task) != state(task),
        };
        place(&before.task) != place(task) || (before.at.elapsed() >= LINE_INTERVAL && differs())
    }

    fn print(&self, task: &Task) -> anyhow::Result<()> {
        match self.told {
            Told::Documents(output) => return print::document(output, task),
            Told::Changes if self.bars.is_none() => {}
            // Failures are reported when the program ends.
            _ if task.state == TaskState::Done => {}
            _ => return Ok(()),
        }
        self.say(&format!("{} {}: {}", task.kind, task.target, state(task)));
        Ok(())
    }

    /// Prints a message without disturbing the bars.
    pub fn say(&self, text: &str) {
        let say = || print::say(text);
        match &self.bars {
            Some(bars) => bars.suspend(say),
            None => say(),
        }
    }

    fn bar(&self, task: &Task) -> ProgressBar {
        let Some(bars) = &self.bars else { return ProgressBar::hidden() };
        let bar = bars.add(ProgressBar::new_spinner());
        bar.set_prefix(print::printable(&format!("{} {}", task.kind, task.target)));
        bar.enable_steady_tick(TICK);
        bar
    }
}

/// How a task stands, on a line.
fn state(task: &Task) -> String {
    match (task.state, &task.migration, &task.migrated) {
        (open, Some(migration), _) if open.is_open() => {
            format!("{}: {}", task.at(), migration::line(migration))
        }
        (open, ..) if open.is_open() => task.at(),
        (TaskState::Done, _, Some(migrated)) => format!("done: {migrated}"),
        (ended, ..) => word(&ended),
    }
}

fn advance(bar: &ProgressBar, task: &Task) {
    let template = match task.percent {
        Some(percent) => {
            bar.set_length(100);
            bar.set_position(u64::from(percent));
            MEASURED
        }
        None => UNMEASURED,
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    let step = task.at();
    let message = match (task.migration, task.progress) {
        (Some(_), _) => state(task),
        (None, Some(transfer::Progress { done, total })) => {
            let (done, total) = (ByteSize(done).display().iec(), ByteSize(total).display().iec());
            let speed = |speed| format!(", {}/s", ByteSize(speed).display().iec());
            let left = |left| format!(", {} left", Cell::Seconds(left).for_people());
            let speed = task.bytes_per_second.map(speed).unwrap_or_default();
            let left = task.seconds_left.map(left).unwrap_or_default();
            format!("{step}: {done} of {total}{speed}{left}")
        }
        (None, None) => step,
    };
    bar.set_message(print::printable(&message));
}

#[cfg(test)]
mod tests {
    use indicatif::ProgressDrawTarget;
    use vmseal_api::migration::{Migrated, Migration, MigrationPhase};

    use super::*;

    fn task(state: TaskState, percent: Option<u8>) -> Task {
        Task {
            id: TaskId::new(),
            kind: "vm.import".into(),
            target: "web".into(),
            state,
            step: "copy".into(),
            percent,
            progress: None,
            bytes_per_second: None,
            seconds_left: None,
            migration: None,
            migrated: None,
            former_images: Vec::new(),
            rate: None,
            paused: false,
            created: jiff::Timestamp::UNIX_EPOCH,
            ended: None,
            request_id: None,
            waiting: None,
            parent: None,
            not_before: None,
            problem: None,
        }
    }

    fn at_terminal() -> Progress {
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::hidden());
        Progress { bars: Some(bars), shown: HashMap::new(), told: Told::Ends }
    }

    #[test]
    fn a_bar_shows_the_state_of_its_task() {
        let mut progress = at_terminal();
        let mut task = task(TaskState::Running, None);
        progress.show(std::slice::from_ref(&task)).unwrap();
        let bar = progress.shown[&task.id].bar.clone();
        assert_eq!((bar.prefix(), bar.message()), ("vm.import web".to_owned(), "copy".to_owned()));
        assert_eq!(bar.length(), None);

        task.percent = Some(40);
        task.progress = Some(transfer::Progress { done: 2 << 30, total: 5 << 30 });
        progress.show(std::slice::from_ref(&task)).unwrap();
        assert_eq!((bar.position(), bar.length()), (40, Some(100)));
        assert_eq!(bar.message(), "copy: 2.0 GiB of 5.0 GiB");
        (task.bytes_per_second, task.seconds_left) = (Some(48 << 20), Some(64));
        progress.show(std::slice::from_ref(&task)).unwrap();
        assert_eq!(bar.message(), "copy: 2.0 GiB of 5.0 GiB, 48.0 MiB/s, 1m 4s left");
        (task.bytes_per_second, task.seconds_left) = (None, None);

        (task.state, task.progress) = (TaskState::RollingBack, None);
        task.step = "copy \u{1b}[2J".to_owned();
        progress.show(std::slice::from_ref(&task)).unwrap();
        assert_eq!(bar.message(), "rolling back: copy \u{fffd}[2J");
        assert!(!bar.is_finished());

        task.state = TaskState::Failed;
        progress.show(std::slice::from_ref(&task)).unwrap();
        assert!(bar.is_finished(), "a task that has ended has a bar");
        assert_eq!(progress.shown.len(), 1, "a second bar for one task");
    }

    #[test]
    fn a_bar_shows_how_far_a_migration_is_and_its_end_how_it_went() {
        let mut progress = at_terminal();
        let mut task = task(TaskState::Running, Some(40));
        task.migration =
            Some(Migration { phase: MigrationPhase::Connecting, progress: None, encrypted: None });
        progress.show(std::slice::from_ref(&task)).unwrap();
        let bar = progress.shown[&task.id].bar.clone();
        assert_eq!(bar.message(), "copy: connecting");
        let migrated = Migrated {
            milliseconds: 2000,
            sent: 2 << 30,
            memory_milliseconds: None,
            disks: None,
            passes: 3,
            downtime_milliseconds: 20,
            switch_milliseconds: Some(80),
            sealing_milliseconds: None,
            placed: None,
            encrypted: None,
        };
        (task.state, task.migration, task.migrated) = (TaskState::Done, None, Some(migrated));
        assert_eq!(state(&task), format!("done: {migrated}"));
        task.state = TaskState::Unknown;
        assert_eq!(state(&task), "unknown");
    }

    #[test]
    fn lines_are_printed_of_another_step_at_once_and_of_others_after_a_while() {
        let mut progress = at_terminal();
        let mut task = task(TaskState::Running, Some(40));
        let now = Instant::now();
        let shown = |at| Shown { bar: ProgressBar::hidden(), at, task: task.clone() };
        let (early, late) = (shown(now), shown(now.checked_sub(LINE_INTERVAL).unwrap()));
        let due = |progress: &Progress, task: &Task| {
            (progress.is_due(&early, task), progress.is_due(&late, task))
        };
        task.percent = Some(41);
        assert_eq!(due(&progress, &task), (false, false), "the line is the same");
        progress.told = Told::Documents(Output::Json);
        assert_eq!(due(&progress, &task), (false, true), "the percentage has changed");
        task.migration =
            Some(Migration { phase: MigrationPhase::Memory, progress: None, encrypted: None });
        assert_eq!(due(&progress, &task), (true, true), "the phase has");
        (task.migration, task.state) = (None, TaskState::Done);
        assert_eq!(due(&progress, &task), (true, true), "it has ended");
    }

    #[test]
    fn the_templates_are_valid() {
        for template in [MEASURED, UNMEASURED] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
