//! The death of a filter under a guest, and the one that takes its place.

use tokio::time::Instant;

use super::Owner;
use crate::filter;
use crate::filter::metrics;
use crate::process::Exit;
use crate::vm::images;
use crate::vm::service::{Again, Attempt, Service};

impl Owner {
    /// The guest waits for another filter, unless too many have died.
    pub(super) async fn filter_ended(&mut self, exit: Exit) {
        let Some(running) = self.running() else { return };
        let why = filter::ended(exit, &running.directory).to_string();
        running.service = Service::Down(None);
        running.lost_still = running.panicked;
        let (directory, stands_still) = (running.directory.clone(), running.stands_still());
        tracing::error!(vm = %self.spec.vm, why, "the guest waits for another filter");
        self.exchanged = images::exchanged(&self.spec, &directory).await;
        // A guest that stands still loses nothing meanwhile, and its memory can be saved.
        if self.restarts.died(why.clone(), Instant::now().into_std()) || stands_still {
            self.serve_again();
        } else {
            let why = format!("{why}; {}", self.restarts.too_many());
            self.end_unserved(&why).await;
        }
    }

    /// Whether no filter can be started for want of its key.
    pub(super) fn lacks_key(&self) -> bool {
        // A VM without an encrypted disk has a key when one is being encrypted or has just been decrypted.
        self.spec.key.is_some() && self.kek.is_none()
    }

    /// Whether nobody serves the disks of a guest that stands still, and nobody will before it goes on.
    pub(super) fn stands_unserved(&mut self) -> bool {
        self.running().is_some_and(|running| running.service.waits() && running.stands_still())
    }

    /// Begins to start another filter, if one is needed, its key is here, and its guest does not stand still.
    pub(super) fn serve_again(&mut self) {
        let stands_still = self.running().is_some_and(|running| running.stands_still());
        // Another host may have the disks of one that is handed over.
        if self.lacks_key()
            || stands_still
            || self.is_handed_over()
            || !self.running().is_some_and(|running| running.service.waits())
        {
            return;
        }
        let (shared, plan) = (self.shared.clone(), self.plan());
        let Some(running) = self.running() else { return };
        match plan {
            Ok(plan) => {
                let attempt = Attempt::begin(
                    shared,
                    running.directory.clone(),
                    running.slot.clone(),
                    running.qmp.clone(),
                    plan,
                );
                running.service = Service::Down(Some(attempt));
            }
            Err(problem) => tracing::error!(%problem, "the disks cannot be served again"),
        }
    }

    pub(super) fn served_again(&mut self, again: Again) {
        if let Some(running) = self.running() {
            running.service = Service::Served(again.filter);
            running.begun_still = !again.guest_ran;
            self.serves_sizes = true;
            self.restarts.served(Instant::now().into_std());
            metrics::FILTERS_RESTARTED.add();
            tracing::warn!(vm = %self.spec.vm, "another filter serves the disks");
        }
    }

    pub(super) async fn end_unserved(&mut self, why: &str) {
        if let Some(running) = self.take_running() {
            self.request = None;
            let ending = running.end_unserved(&self.spec.name, why).await;
            self.went_off(ending).await;
        }
    }
}
