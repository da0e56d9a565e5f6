//! The keys of a VM's disks are being looked at or changed, beside its owner.

use tokio::task::JoinHandle;
use vmseal_api::problem::Problem;

use super::super::{Reply, internal};

/// The keys of the disks are being looked at or changed.
pub struct KeyChange {
    pub task: JoinHandle<Result<(), Problem>>,
    /// Who waits for that.
    pub reply: Reply<()>,
}

/// How the change of the keys went, when it has ended.
pub async fn changed(changing: &mut Option<KeyChange>) -> Result<(), Problem> {
    match changing {
        Some(change) => (&mut change.task).await.unwrap_or_else(|error| Err(internal(error))),
        None => std::future::pending().await,
    }
}
