//! Tasks, as the server shows them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::former_image::FormerImage;
use crate::id::TaskId;
use crate::migration::{Migrated, Migration};
use crate::problem::Problem;
use crate::transfer::Progress;

/// Durable work of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Task {
    /// Its id.
    pub id: TaskId,
    /// What it does (`vm.create`, `vm.start`, …).
    pub kind: String,
    /// The resource that it is about, by name.
    pub target: String,
    /// How it stands.
    pub state: TaskState,
    /// The step that it is at or ended at, for people.
    pub step: String,
    /// How far it is, from 0 to 100, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u8>,
    /// The same in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// How fast it gets on, in bytes a second: on average of the last half minute, less what the guest has changed again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// How long the rest of this step takes at that speed, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
    /// How far the VM is that it has moved to another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    /// How that went, once the VM runs at the other host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migrated: Option<Migrated>,
    /// What has become of the images that its disks had before it copied them, once these are removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former_images: Vec<FormerImage>,
    /// The highest rate at which it copies each disk, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Whether it copies nothing until a user has it go on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// When it was asked for.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created: Timestamp,
    /// When it ended.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Timestamp>,
    /// The id of the request that asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// What it waits for, while it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// The task that it is a part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<TaskId>,
    /// It does not begin before this time.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Timestamp>,
    /// Why it failed or is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

/// What a task waits for; it goes on by itself, or is cancelled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Waiting {
    /// What kind of thing.
    pub on: WaitingOn,
    /// Which, by name: a host, a provider; a time for `time`, an id for `task`, the host or provider for `turn`.
    pub name: String,
    /// What was answered last, where something was; and what can be done if nothing is ever answered, where that is not plain. For
    /// `turn`, what the tasks do that have the turns.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = &self.name;
        match self.on {
            WaitingOn::Host => write!(f, "waiting for host '{name}'"),
            WaitingOn::Provider => write!(f, "waiting for key provider '{name}'"),
            WaitingOn::Passphrase => write!(
                f,
                "waiting for the passphrase of key provider '{name}' (vmseal provider unlock {name})"
            ),
            WaitingOn::Time => write!(f, "waiting until {name}"),
            WaitingOn::Task => write!(f, "waiting for task {name} (vmseal task show {name})"),
            WaitingOn::Turn => write!(f, "queued: {}", self.detail),
        }
    }
}

impl Task {
    /// The step that it is at and how, for people.
    #[must_use]
    pub fn at(&self) -> String {
        let step = &self.step;
        match (&self.waiting, self.state) {
            (Some(waiting), TaskState::Waiting) => format!("{step}: {waiting}"),
            (Some(waiting), TaskState::RollingBack) => format!("rolling back: {step}: {waiting}"),
            (_, state) if self.paused && state.is_open() => {
                format!("{step}: paused (vmseal task resume {})", self.id)
            }
            (Some(waiting), TaskState::Queued) => format!("{step}: {waiting}"),
            (None, TaskState::Queued) => format!("{step}: queued"),
            (_, TaskState::RollingBack) => format!("rolling back: {step}"),
            _ => step.clone(),
        }
    }
}

/// What kind of thing a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum WaitingOn {
    /// A host that does not answer.
    Host,
    /// A key provider that gives no keys: it does not answer, or a certificate must be replaced.
    Provider,
    /// A key provider that has to be unlocked (`vmseal provider unlock`).
    Passphrase,
    /// The time before which it does not begin.
    Time,
    /// Another task of its VM.
    Task,
    /// Its turn: as many tasks as may do the same on its host, or use its key provider, do. The task is `queued`.
    Turn,
}

/// How a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// It waits for its turn: as many tasks as may do the same on its host, or use its key provider, do.
    Queued,
    /// It goes on, also after a restart of the server.
    Running,
    /// It waits for what `waiting` says, or is paused.
    Waiting,
    /// A step failed or it was cancelled; what had been done is being undone.
    RollingBack,
    /// All of it is done.
    Done,
    /// It was cancelled, and none of it is left.
    Cancelled,
    /// A step failed, and none of it is left.
    Failed,
    /// It could neither be finished nor undone: what is left is in `problem`, and an operator is needed.
    Unknown,
}

impl TaskState {
    /// The states of tasks that have not ended.
    pub const OPEN: [Self; 4] = [Self::Queued, Self::Running, Self::Waiting, Self::RollingBack];

    /// Whether the task has not ended.
    #[must_use]
    pub fn is_open(self) -> bool {
        matches!(self, Self::Queued | Self::Running | Self::Waiting | Self::RollingBack)
    }
}
