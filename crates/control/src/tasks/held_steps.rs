//! Holds tasks before and after each of their steps until they are let go on: for tests that have a process die just there.
//!
//! ```text
//!  a step is to be done or undone ──► <directory>/<task> says which ──► someone removes it ──► it is done
//!  it was done, nothing is recorded yet ──► the same
//! ```
//! The file also says at how many moments the task is held if each of its steps is done once: a test can choose one of all.

use std::path::PathBuf;
use std::time::Duration;

use vmseal_api::atomic_file::{self, PRIVATE};

use super::run::Run;
use super::step::Step;
use super::steps;

/// How often a held task looks whether it may go on.
const INTERVAL: Duration = Duration::from_millis(10);

/// When a step is held.
#[derive(Clone, Copy, Debug)]
pub(super) enum Moment {
    /// Before it is done or undone.
    Before,
    /// After that, and before it is recorded.
    After,
}

/// See the module.
#[derive(Debug)]
pub(super) struct HeldSteps {
    directory: PathBuf,
}

impl HeldSteps {
    pub(super) fn in_directory(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Holds a step. A directory that cannot be written holds nothing.
    pub(super) async fn hold(
        &self,
        run: &Run<'_>,
        step: &'static dyn Step,
        undone: bool,
        moment: Moment,
    ) {
        let path = self.directory.join(run.task.id.to_string());
        let (verb, when) = (if undone { "undo" } else { "do" }, moment);
        let operation = &run.task.operation;
        // Before and after each step.
        let moments = 2 * steps::of(operation).len();
        let (kind, name) = (operation.kind(), step.name());
        let line = format!("{kind} {name} {verb} {when:?} of {moments}\n");
        if let Err(error) = atomic_file::write(&path, line.as_bytes(), PRIVATE) {
            tracing::warn!(%error, path = %path.display(), "no step is held");
            return;
        }
        while path.exists() {
            tokio::time::sleep(INTERVAL).await;
        }
    }
}
