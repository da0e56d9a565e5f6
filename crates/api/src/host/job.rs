//! Long work on the disks of a VM: a job of a task.
//!
//! ```text
//! put ─► Waiting ─► Running ─► ReadyToCommit ── commit ─► Done      (export)
//!                      │  └──────────────────────────────► Done      (create: nothing to commit)
//!                      │              │
//!                      ├── cancel ────┴─► Cancelled: nothing is left of it
//!                      └── an error ────► Failed:    nothing is left of it
//! ```
//! Putting the same job again continues it, or begins it again if it failed or was cancelled. A job that an
//! agent has lost with a restart is put again, too, and continues with what it had written.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::disk::ImageSource;
use super::key::SealedKey;
use crate::id::{DiskId, TaskId, VmId};
use crate::problem::Problem;
use crate::transfer::ExportFormat;

/// The work. An agent refuses a kind that it does not know or that is not in its features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum JobSpec {
    /// Make disks.
    Create(CreateJob),
    /// Write a disk to a file on the host.
    Export(ExportJob),
}

/// Makes disks of a registered VM that is off. A complete disk is not touched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateJob {
    /// The disks, each once.
    pub disks: Vec<DiskToCreate>,
}

/// A disk of the VM to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskToCreate {
    /// The disk.
    pub disk: DiskId,
    /// The image to fill it from; none leaves it empty. The agent has what the firmware's variables begin with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<ImageSource>,
    /// The documents of a disk for cloud-init, packed ([`crate::cloud_init::Documents::packed`]) and sealed to the
    /// agent's key box ([`crate::cloud_init::cloud_init_info`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<SealedKey>,
}

/// Writes a disk of a VM that is off to a file. The file is written and flushed under another name, and
/// renamed when the job is committed, so that the caller knows for certain whether it is complete.
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

/// The context that the passphrase of an export is sealed with.
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

    /// Its disks.
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
    /// A kind of a newer agent that this side does not know.
    #[serde(other)]
    Unknown,
}

/// The status of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The task of the job.
    pub task: TaskId,
    /// What it does.
    pub kind: JobKind,
    /// Its disks.
    pub disks: Vec<DiskId>,
    /// Its state.
    pub state: JobState,
    /// Its progress.
    pub progress: JobProgress,
}

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum JobState {
    /// It has not begun.
    Waiting,
    /// It is in progress.
    Running,
    /// Its result is complete and flushed, but not visible yet.
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
    /// A state of a newer agent that this side does not know; the job is followed until the state changes.
    #[serde(other)]
    Unknown,
}

/// The progress of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobProgress {
    /// Bytes dealt with.
    pub done: u64,
    /// All bytes; 0 where there is nothing to copy, or that is not known yet.
    pub total: u64,
    /// Bytes a second while this agent has worked on it; none before it has copied anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}
