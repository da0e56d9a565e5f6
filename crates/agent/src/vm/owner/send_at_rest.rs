//! A VM that is off and is sent to another host: its disks are copied there, all of them, and nothing else is sent; of one that is
//! suspended the memory of its guest, too, which is a file beside its first disk; and what its TPM keeps, if it has one.
//!
//! ```text
//!   Off ─ put ─► a worker sends the disks ─► all are there: ready to commit ─ commit ─► the server removes them here
//!    ▲                     │                                │
//!    └── cancel, an error ─┴───────────── cancel ───────────┘
//! ```
//! Meanwhile nothing starts it, or changes its disks: the other host may have it. An agent that restarts knows nothing of this; then
//! the server's task keeps others from the VM.

use tokio::sync::watch;
use vmseal_api::host::{JobSpec, MigrationProgress, SendJob};
use vmseal_api::id::TaskId;
use vmseal_api::problem::Problem;

use super::Owner;
use crate::filter::Control;
use crate::rules;
use crate::vm::internal;
use crate::vm::migration::{copy_secret, memory_transit, session_of};
use crate::vm::sending_at_rest::SendingAtRest;
use crate::vm::to_copy::{Departing, ToCopy};

impl Owner {
    /// The disks of the VM, which was off, have been received here: the job of that is done.
    #[must_use]
    pub fn received_at_rest(mut self, task: TaskId, job: JobSpec) -> Self {
        self.jobs.begin(task, job);
        self.jobs.committed(task);
        self.tell_disks();
        self.describe();
        self
    }

    /// Begins to send the VM.
    pub(super) async fn put_send_at_rest(
        &mut self,
        task: TaskId,
        job: &SendJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        self.ready_to_send(&spec)?;
        let Some(departure) = job.begin.as_deref() else { return Err(internal("no destination")) };
        rules::check_sent_memory(&self.spec, self.suspended, departure.suspended)?;
        let Some(first) = job.copies.first().copied() else { return Err(internal("no disks")) };
        let (shared, vm) = (self.shared.clone(), self.spec.clone());
        let session = session_of(&shared, vm.vm, &departure.session)?;
        let (disks, kek) = (self.departing(&job.copies).await?, self.clone_kek()?);
        let disks: Vec<_> = disks.into_iter().map(Departing::at_rest).collect();
        if disks.iter().any(|departing| departing.before().tpm) {
            shared.swtpm.examine()?;
        }
        let told_under = copy_secret(&shared, vm.vm, &departure.session, kek.as_ref())?;
        let transit = memory_transit(&departure.session, told_under.as_ref())?;
        // No filter of a guest is there, and none is asked.
        let control = Control::of(&shared.run_dir.vm(vm.vm));
        let copies = ToCopy { shared, spec: vm, kek, told_under, transit, control, disks };
        let (rate, rates) = watch::channel(departure.bytes_per_second);
        let (to, migration) = (departure.to, departure.session.migration);
        tracing::info!(vm = %self.spec.vm, %to, "the VM, which is off, is being sent to another host");
        self.jobs.begin(task, spec);
        self.rate_at_rest = Some(rate);
        let sending = SendingAtRest { session, to, rates, migration, copies };
        self.workers.begin_sending(first, sending);
        Ok(())
    }

    /// It is sent at another rate from now on, if it is off and is sent.
    pub(super) fn set_rate_at_rest(&self, bytes_per_second: Option<u64>) {
        if let Some(rate) = &self.rate_at_rest {
            rate.send_replace(bytes_per_second);
        }
    }

    /// How far it is.
    pub(super) fn sending_at_rest(&mut self, progress: MigrationProgress) {
        if let Some(task) = self.jobs.sender() {
            self.jobs.migrates(task, progress);
        }
    }

    /// Its disks are at the other host, or could not be sent.
    pub(super) fn sent_at_rest(&mut self, sent: Result<(), Problem>) {
        self.rate_at_rest = None;
        if let Some(task) = self.jobs.sender() {
            self.jobs.migrated(task, sent);
        }
    }

    /// The other host has it.
    pub(super) fn committed_at_rest(&mut self) {
        if let Some(task) = self.jobs.sender() {
            self.jobs.committed(task);
        }
    }

    /// It stays here.
    pub(super) async fn cancel_send_at_rest(&mut self, task: TaskId) {
        self.rate_at_rest = None;
        for disk in self.jobs.cancel(task) {
            self.workers.cancel(disk).await;
        }
    }
}
