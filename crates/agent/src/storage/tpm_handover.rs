//! What a TPM keeps, taken out of one directory and put into another one, where it is encrypted under another key: on one host as its
//! disk is copied ([`crate::storage::mirror::tpm`]), or on two as its VM goes to another control plane ([`crate::storage::sent_tpm`]).
//!
//! ```text
//! one swtpm loads it ─► in the clear, in locked memory ─► another one stores it ─► a third one loads it, as the VM's next start will
//! ```
//! Each of them ends by itself, also where nobody waits for it any more.

use std::fs::File;
use std::sync::Arc;

use tokio::task::spawn_blocking;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use crate::hypervisor::tpm::{END_TIMEOUT, Permanent, State, Swtpm};
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::storage::builder::internal;

/// A directory of what a TPM keeps, with all that swtpm needs for it.
pub struct Side {
    /// The directory.
    pub directory: File,
    /// The image of its disk, with its lock.
    pub lock: File,
    /// The key under which that is encrypted.
    pub key: SecretBytes,
    /// Whose user swtpm has. It is kept as long as anything is done here.
    pub slot: Arc<Slot>,
}

impl Side {
    fn state(&self) -> State<'_> {
        let user = self.slot.tpm();
        State { directory: &self.directory, lock: &self.lock, key: &self.key, user }
    }

    /// Takes what is kept there. swtpm is on record in this directory of processes.
    ///
    /// # Errors
    /// As [`Swtpm::take`].
    pub async fn take(
        self: &Arc<Self>,
        swtpm: &Swtpm,
        place: &ProcessDir,
    ) -> Result<Permanent, Problem> {
        let (of, swtpm, place) = (Arc::clone(self), swtpm.clone(), place.clone());
        let take = move || swtpm.take(&place, &of.state());
        let (permanent, process) = spawn_blocking(take).await.map_err(internal)??;
        process.end_within(END_TIMEOUT).await;
        Ok(permanent)
    }

    /// Has this be kept there, where nothing is. It is not made durable.
    ///
    /// # Errors
    /// As [`Swtpm::give`]; `internal` where it does not open afterwards.
    pub async fn give(
        self: &Arc<Self>,
        swtpm: &Swtpm,
        place: &ProcessDir,
        permanent: Permanent,
    ) -> Result<(), Problem> {
        let (of, program, inside) = (Arc::clone(self), swtpm.clone(), place.clone());
        let give = move || program.give(&inside, &of.state(), &permanent);
        spawn_blocking(give).await.map_err(internal)??.end_within(END_TIMEOUT).await;
        // As at the VM's next start: what is there opens with the new key.
        let (of, swtpm, place) = (Arc::clone(self), swtpm.clone(), place.clone());
        let load = move || {
            let started = swtpm.start(&place, &of.state()).map_err(not_opened)?;
            started.shut_down().map_err(internal)
        };
        spawn_blocking(load).await.map_err(internal)??.end_within(END_TIMEOUT).await;
        Ok(())
    }
}

/// What was just encrypted anew does not open: nothing is to be restored.
fn not_opened(problem: Problem) -> Problem {
    if problem.code != ErrorCode::Damaged {
        return problem;
    }
    internal(
        "swtpm does not load what it has just stored under another key: what the VM's TPM keeps is as it was, and may be copied again",
    )
}
