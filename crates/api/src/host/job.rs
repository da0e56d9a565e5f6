//! Long work on the disks of a VM: a job of a task.
//!
//! ```text
//! put ─► Waiting ─► Running ─► ReadyToCommit ── commit ─► Done      (export)
//!                      │  └──────────────────────────────► Done      (create: nothing is to be committed)
//!                      │              │
//!                      ├── cancel ────┴─► Cancelled: nothing is left of it
//!                      └── an error ────► Failed:    nothing is left of it
//! ```
//! To put the same job again is to go on with it, or, when it failed or was cancelled, to begin it anew. A job
//! that an agent has lost with a restart is put again, too: what it had written serves.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::disk::ImageSource;
use super::key::SealedKey;
use crate::id::{DiskId, TaskId, VmId};
use crate::problem::Problem;
use crate::transfer::ExportFormat;

/// What is to be done. An agent refuses a kind that it does not know, as it does one that is not in its features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum JobSpec {
    /// To make disks.
    Create(CreateJob),
    /// To write a disk to a file of the host's.
    Export(ExportJob),
}

/// Makes disks of a registered VM that is off. A disk that is there and whole is not touched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateJob {
    /// Which, each once.
    pub disks: Vec<DiskToCreate>,
}

/// A disk of the VM's that is to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskToCreate {
    /// Which.
    pub disk: DiskId,
    /// What it is filled from; none leaves it empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ImageSource>,
}

/// Writes a disk of a VM that is off to a file. The file is whole before it has its name: it is written and
/// flushed beside it first, and renamed when the job is committed, so that whoever asked knows for certain how
/// far it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportJob {
    /// Which disk.
    pub disk: DiskId,
    /// The file's absolute path on the host; nothing is there yet.
    pub to: PathBuf,
    /// What is written.
    pub format: ExportFormat,
    /// The passphrase of a LUKS2 file, sealed to the agent's key box ([`export_info`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SealedKey>,
}

/// What a passphrase of an export is bound to when it is sealed for an agent.
#[must_use]
pub fn export_info(vm: VmId, disk: DiskId) -> Vec<u8> {
    format!("vmseal export passphrase v1\0{vm}\0{disk}").into_bytes()
}

impl JobSpec {
    /// What kind it is.
    #[must_use]
    pub fn kind(&self) -> JobKind {
        match self {
            Self::Create(_) => JobKind::Create,
            Self::Export(_) => JobKind::Export,
        }
    }

    /// The disks that it is about.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskId> {
        match self {
            Self::Create(create) => create.disks.iter().map(|disk| disk.disk).collect(),
            Self::Export(export) => vec![export.disk],
        }
    }
}

/// The kinds of job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// [`CreateJob`]
    Create,
    /// [`ExportJob`]
    Export,
    /// Something that a newer agent does and this side does not know.
    #[serde(other)]
    Unknown,
}

/// How far a job is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Whose job.
    pub task: TaskId,
    /// What it does.
    pub kind: JobKind,
    /// With which disks.
    pub disks: Vec<DiskId>,
    /// What is so.
    pub state: JobState,
    /// How much is done.
    pub progress: JobProgress,
}

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum JobState {
    /// It is to begin.
    Waiting,
    /// It is at work.
    Running,
    /// What it made is whole and flushed, and nobody sees it yet.
    ReadyToCommit,
    /// It is finished.
    Done,
    /// It could not be done; what it had made is removed.
    Failed {
        /// Why.
        problem: Problem,
    },
    /// It was cancelled; what it had made is removed.
    Cancelled,
    /// Something that a newer agent says and this side does not know: it is followed until it says another.
    #[serde(other)]
    Unknown,
}

/// How much of a job is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobProgress {
    /// Bytes dealt with.
    pub done: u64,
    /// Bytes in all; 0 where there is nothing to copy, or that is not known yet.
    pub total: u64,
    /// Bytes a second, over the time that this agent has worked on it; none before it has copied anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}
