//! The progress of tasks: a bar for each on a terminal, else a line for each step if that is wanted.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::Duration;

use bytesize::ByteSize;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use vmseal_api::id::TaskId;
use vmseal_api::model::{Task, TaskState};
use vmseal_api::transfer;

use crate::print;
use crate::rows::column::Cell;
use crate::rows::word;

/// How often a bar without a percentage turns.
const TICK: Duration = Duration::from_millis(120);

/// The bar of a task with a percentage.
const MEASURED: &str = "{prefix} {bar:30} {pos} % {msg} ({elapsed})";

/// The bar of a task without one.
const UNMEASURED: &str = "{prefix} {spinner} {msg} ({elapsed})";

pub struct Progress {
    bars: Option<MultiProgress>,
    shown: HashMap<TaskId, (ProgressBar, TaskState, String)>,
    /// Whether steps are printed without a terminal.
    verbose: bool,
}

impl Progress {
    /// Without a terminal, only ends are printed.
    pub fn quiet() -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self { bars: terminal.then(MultiProgress::new), shown: HashMap::new(), verbose: false }
    }

    /// Without a terminal, every step is a line.
    pub fn verbose() -> Self {
        Self { verbose: true, ..Self::quiet() }
    }

    /// Shows the present state of the tasks.
    pub fn show(&mut self, tasks: &[Task]) {
        for task in tasks {
            let (open, step) = (task.state.is_open(), task.at());
            let (bar, known) = match self.shown.get(&task.id) {
                Some((bar, state, known)) => (bar.clone(), (*state, known) == (task.state, &step)),
                None => (self.bar(task), false),
            };
            if open {
                advance(&bar, task);
            } else {
                bar.finish_and_clear();
            }
            self.shown.insert(task.id, (bar, task.state, step));
            // Failures are reported when the program ends.
            if !known && (task.state == TaskState::Done || (self.verbose && self.bars.is_none())) {
                self.print(task);
            }
        }
    }

    fn print(&self, task: &Task) {
        let state = match task.state {
            open if open.is_open() => task.at(),
            ended => word(&ended),
        };
        self.say(&format!("{} {}: {state}", task.kind, task.target));
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
    let message = match task.progress {
        Some(transfer::Progress { done, total }) => {
            let (done, total) = (ByteSize(done).display().iec(), ByteSize(total).display().iec());
            let speed = |speed| format!(", {}/s", ByteSize(speed).display().iec());
            let left = |left| format!(", {} left", Cell::Seconds(left).for_people());
            let speed = task.bytes_per_second.map(speed).unwrap_or_default();
            let left = task.seconds_left.map(left).unwrap_or_default();
            format!("{step}: {done} of {total}{speed}{left}")
        }
        None => step,
    };
    bar.set_message(print::printable(&message));
}

#[cfg(test)]
mod tests {
    use indicatif::ProgressDrawTarget;

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
        Progress { bars: Some(bars), shown: HashMap::new(), verbose: false }
    }

    #[test]
    fn a_bar_shows_the_state_of_its_task() {
        let mut progress = at_terminal();
        let mut task = task(TaskState::Running, None);
        progress.show(std::slice::from_ref(&task));
        let bar = progress.shown[&task.id].0.clone();
        assert_eq!((bar.prefix(), bar.message()), ("vm.import web".to_owned(), "copy".to_owned()));
        assert_eq!(bar.length(), None);

        task.percent = Some(40);
        task.progress = Some(transfer::Progress { done: 2 << 30, total: 5 << 30 });
        progress.show(std::slice::from_ref(&task));
        assert_eq!((bar.position(), bar.length()), (40, Some(100)));
        assert_eq!(bar.message(), "copy: 2.0 GiB of 5.0 GiB");
        (task.bytes_per_second, task.seconds_left) = (Some(48 << 20), Some(64));
        progress.show(std::slice::from_ref(&task));
        assert_eq!(bar.message(), "copy: 2.0 GiB of 5.0 GiB, 48.0 MiB/s, 1m 4s left");
        (task.bytes_per_second, task.seconds_left) = (None, None);

        (task.state, task.progress) = (TaskState::RollingBack, None);
        task.step = "copy \u{1b}[2J".to_owned();
        progress.show(std::slice::from_ref(&task));
        assert_eq!(bar.message(), "rolling back: copy \u{fffd}[2J");
        assert!(!bar.is_finished());

        task.state = TaskState::Failed;
        progress.show(std::slice::from_ref(&task));
        assert!(bar.is_finished(), "a task that has ended has a bar");
        assert_eq!(progress.shown.len(), 1, "a second bar for one task");
    }

    #[test]
    fn the_templates_are_valid() {
        for template in [MEASURED, UNMEASURED] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
