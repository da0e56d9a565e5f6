//! Checking or changing the keys of a VM's disks, in the background of its owner.

use tokio::task::JoinHandle;
use vmseal_api::problem::Problem;

use super::super::{Reply, internal};

/// A check or change of keys in progress.
pub struct KeyChange {
    pub task: JoinHandle<Result<(), Problem>>,
    /// The caller that waits for it.
    pub reply: Reply<()>,
}

/// The result of the change of keys, when it has ended.
pub async fn changed(changing: &mut Option<KeyChange>) -> Result<(), Problem> {
    match changing {
        Some(change) => (&mut change.task).await.unwrap_or_else(|error| Err(internal(error))),
        None => std::future::pending().await,
    }
}
