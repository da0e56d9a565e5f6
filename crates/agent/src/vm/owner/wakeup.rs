//! A guest that sleeps (ACPI S3): whether it does, and that it is woken.

use vmseal_api::problem::Problem;

use super::set_running::not_there;
use super::{Owner, State};
use crate::vm::asleep;

impl Owner {
    /// Whether the guest sleeps, as QEMU has said last.
    pub(super) fn is_asleep(&self) -> bool {
        match &self.state {
            State::Running(running) | State::Stopping { running, .. } => running.asleep,
            State::Off | State::Starting { .. } => false,
        }
    }

    /// Asks QEMU whether the guest sleeps, and notes it. Its events say only when to ask: a guest that slept and was reset is awake and was
    /// not woken, and QEMU since 9.0 has one sleep on that it had stopped.
    pub(super) async fn note_sleep(&mut self) {
        let vm = self.spec.vm;
        let Some(running) = self.running() else { return };
        match asleep::is_asleep(&running.qmp).await {
            Ok(asleep) => running.asleep = asleep,
            Err(error) => tracing::info!(%vm, %error, "whether the guest sleeps is not known"),
        }
    }

    /// Wakes the guest.
    pub(super) async fn wake(&mut self) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Err(not_there()) };
        let mut reported = Vec::new();
        let woken = asleep::wake(&running.qmp, &spec, &mut running.events, &mut reported).await;
        // What QEMU has reported meanwhile is handled as ever, its answer too.
        for event in reported {
            self.qemu_reported(event).await;
        }
        woken
    }
}
