//! Changes the pace of tasks that copy disks: slower, paused, resumed; and the rate of migrations. The inventory records the pace before the task is
//! told, so it holds over restarts of the server.

use vmseal_api::model::TaskState;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};

use super::engine::Engine;
use super::mirror_vm::former;
use super::steps;
use crate::store::Write;
use crate::store::events::NewEvent;
use crate::store::tasks::{self, Task};

/// What a user changes of a task's pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaceChange {
    /// It copies nothing for now.
    Pause,
    /// It goes on.
    Resume,
    /// It copies at most so many bytes a second; none is no limit.
    Rate(Option<u64>),
}

impl PaceChange {
    fn of(self, pace: CopyPace) -> CopyPace {
        match self {
            Self::Pause => CopyPace { paused: true, ..pace },
            Self::Resume => CopyPace { paused: false, ..pace },
            Self::Rate(bytes_per_second) => CopyPace { bytes_per_second, ..pace },
        }
    }

    /// What is done with the task, for messages.
    fn verb(self) -> &'static str {
        match self {
            Self::Pause => "paused",
            Self::Resume => "resumed",
            Self::Rate(_) => "given a rate",
        }
    }
}

impl Engine {
    /// Changes how fast a task copies disks. The same again changes nothing.
    ///
    /// # Errors
    /// `not-found`; `wrong-state` when it copies none, has ended, or its guest is being given the copies.
    pub async fn change_pace(
        &self,
        id: &str,
        change: PaceChange,
        actor: &str,
    ) -> Result<Task, Problem> {
        let _in_order = self.pacing.lock().await;
        let mut write = self.environment.context.store.write().await?;
        let before = Self::note_pace(&mut write, id, change).await?;
        let task = Task { pace: change.of(before.pace), ..before.clone() };
        if task.pace == before.pace {
            return Ok(task);
        }
        tasks::set_pace(&mut write, &task).await?;
        let (kind, more) = match change {
            PaceChange::Pause => ("task.paused", String::new()),
            PaceChange::Resume => ("task.resumed", String::new()),
            PaceChange::Rate(None) => ("task.rate-set", ": no limit".to_owned()),
            PaceChange::Rate(Some(rate)) => ("task.rate-set", format!(": {rate} bytes a second")),
        };
        let detail = format!("{} as task {}{more}", task.operation.kind(), task.id);
        let target = task.target.as_str();
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        write.commit().await?;
        self.tell_pace(&task);
        Ok(task)
    }

    /// Whether [`Engine::change_pace`] would succeed; changes nothing.
    ///
    /// # Errors
    /// Those of [`Engine::change_pace`].
    pub async fn check_change_pace(&self, id: &str, change: PaceChange) -> Result<Task, Problem> {
        // The transaction is not committed.
        Self::note_pace(&mut self.environment.context.store.write().await?, id, change).await
    }

    async fn note_pace(
        write: &mut Write<'_>,
        id: &str,
        change: PaceChange,
    ) -> Result<Task, Problem> {
        let task = tasks::get(write, id).await?.ok_or_else(|| Problem::not_found("task", id))?;
        let refused = |why| Err(Problem::new(ErrorCode::WrongState, why));
        let verb = change.verb();
        let kind = task.operation.kind();
        let is_rate = matches!(change, PaceChange::Rate(_));
        let copies = task.operation.mirrors_disks() || task.operation.has_work_pace();
        let can = copies || (task.operation.is_migration() && is_rate);
        if !can {
            let and_migrations = if is_rate { ", or send a VM (vm migrate)" } else { "" };
            return refused(format!(
                "{kind} cannot be {verb}: only tasks that copy disks can, or read them (vm create, clone, encrypt, decrypt, recrypt --deep, move, prove; disk add, export; snapshot delete; backup create, verify, restore){and_migrations}"
            ));
        }
        if !task.state.is_open() || task.state == TaskState::RollingBack || task.cancelled {
            return refused("the task has ended, or is being undone".to_owned());
        }
        // One that was paused at the last instant goes on from there.
        let is_late = steps::is_committing(&task) && !former::removes(&task);
        if is_late && change != PaceChange::Resume {
            let what = if is_rate && task.operation.is_migration() {
                "sent the VM"
            } else {
                "copied the disks"
            };
            return refused(format!(
                "the task has {what} ({}), and cannot be {verb} any more: wait for it",
                steps::title(&task)
            ));
        }
        Ok(task)
    }
}
