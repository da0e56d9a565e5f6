//! What a task that works on a disk says of itself to the VM's owner.

use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use vmseal_api::host::{DiskFacts, Notice};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

/// What a task says of itself.
pub enum Report {
    /// It is being made or exported: bytes done, and in all.
    Progress(u64, u64),
    /// It has been made, or could not be.
    Made(Result<DiskFacts, Problem>),
    /// It has been exported, or could not be.
    Written(Result<(), Problem>),
    /// It is exposed, and answers with these errors.
    ExposedErrors(Vec<Notice>),
    /// The disk is no longer exposed. The end of the stream tells the client that held it.
    Exposed(Option<DuplexStream>),
}

impl Report {
    /// Whether the task goes on.
    pub fn is_progress(&self) -> bool {
        match self {
            Self::Progress(..) | Self::ExposedErrors(_) => true,
            Self::Made(_) | Self::Written(_) | Self::Exposed(_) => false,
        }
    }
}

/// The way of a task to say how far it is.
pub struct Progress {
    pub disk: DiskId,
    pub number: u64,
    pub sender: mpsc::Sender<(DiskId, u64, Report)>,
}

impl Progress {
    /// Says something that must arrive.
    pub async fn tell(&self, report: Report) {
        // The owner may be gone.
        let _ = self.sender.send((self.disk, self.number, report)).await;
    }

    pub fn progress(&self, report: Report) {
        // A report that finds no room is followed by a newer one.
        let _ = self.sender.try_send((self.disk, self.number, report));
    }
}
