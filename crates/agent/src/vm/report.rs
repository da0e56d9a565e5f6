//! Reports of a task that works on a disk, for the VM's owner.

use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use vmseal_api::former_image::FormerImage;
use vmseal_api::host::backup::BackupManifest;
use vmseal_api::host::{DiskFacts, MigrationProgress, Notice};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;
use vmseal_api::proof::SignedReport;

use crate::storage::layers::LayerId;

/// A report of such a task.
pub enum Report {
    /// It is being made or exported: bytes done, and in all.
    Progress(u64, u64),
    /// It has been made, or could not be.
    Made(Result<DiskFacts, Problem>),
    /// It has been exported, or could not be.
    Written(Result<(), Problem>),
    /// What nobody writes of it is copied, or could not be.
    TreeCopied(Result<(), Problem>),
    /// Its copy may lack so many bytes.
    Lacking(u64),
    /// Its copy is as good as complete, or cannot be made.
    Copied(Result<(), Problem>),
    /// It is converted in its file, or could not be.
    Converted(Result<DiskFacts, Problem>),
    /// Its former image is removed, and this has become of it, if there was one; or it cannot be removed.
    SourceRemoved(Result<Option<FormerImage>, Problem>),
    /// A layer of it has been merged, or could not be.
    Merged(LayerId, Result<(), Problem>),
    /// The files of its VM were read, or could not be.
    Proved(Result<SignedReport, Problem>),
    /// A core dump of its guest was written, of so many bytes, or could not be.
    Dumped(Result<u64, Problem>),
    /// A backup of its VM was written, with so many bytes read of the disks, or was read or restored, or could not be.
    BackedUp(Result<(Box<BackupManifest>, Option<u64>), Problem>),
    /// The VM, which is off, is being sent to another host, and is so far.
    Sending(MigrationProgress),
    /// The disks of a VM that is off are at another host, or could not be sent.
    SentAtRest(Result<(), Problem>),
    /// It is exposed, and answers with these errors.
    ExposedErrors(Vec<Notice>),
    /// The disk is no longer exposed. The end of the stream tells the client that held it.
    Exposed(Option<DuplexStream>),
}

impl Report {
    /// Whether the task continues.
    pub fn is_progress(&self) -> bool {
        match self {
            Self::Progress(..) | Self::Lacking(_) | Self::Sending(_) | Self::ExposedErrors(_) => {
                true
            }
            Self::Made(_)
            | Self::Written(_)
            | Self::TreeCopied(_)
            | Self::Copied(_)
            | Self::Converted(_)
            | Self::SourceRemoved(_)
            | Self::Merged(..)
            | Self::Proved(_)
            | Self::Dumped(_)
            | Self::BackedUp(_)
            | Self::SentAtRest(_)
            | Self::Exposed(_) => false,
        }
    }
}

/// Sends a task's reports.
pub struct Progress {
    pub disk: DiskId,
    pub number: u64,
    pub sender: mpsc::Sender<(DiskId, u64, Report)>,
}

impl Progress {
    /// Sends a report that must arrive.
    pub async fn tell(&self, report: Report) {
        // The owner may be gone.
        let _ = self.sender.send((self.disk, self.number, report)).await;
    }

    pub fn progress(&self, report: Report) {
        // A report that finds no room is followed by a newer one.
        let _ = self.sender.try_send((self.disk, self.number, report));
    }
}
