//! A TPM that the guest has lost while it runs: its process has ended, or what served its directory has (docs/decisions/342).

use vmseal_api::problem::Problem;

use super::Owner;
use crate::rules;

impl Owner {
    /// Refuses what needs the guest's TPM, where the guest has lost it. It cannot say what it holds when the guest is saved or sent, and at a
    /// reset QEMU ends if it does not start again.
    pub(super) async fn require_tpm(&mut self) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Ok(()) };
        // It may have been lost since the last look.
        running.tpm.look_after(&spec).await;
        if !running.tpm.is_lost() {
            return Ok(());
        }
        let what = "has lost its TPM while its guest runs (alarm 'tpm-died'). Stop it and start it again first";
        Err(rules::wrong_state(&spec, what))
    }
}
