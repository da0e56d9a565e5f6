//! A VM that is off or suspended and comes from another host: copies of all its disks, and what its TPM keeps.
//!
//! ```text
//!            the source connects             all disks are whole            commit
//!   Coming ─────────────────────► Coming ───────────────────────► Copied ─────────► (the VM's owner, which is off)
//!
//!   commit:  copied disks named ─► lease taken
//! ```
//! The lease is the point from which it is here whatever dies. An agent that restarts after that does not know the VM: its disks stay,
//! and it is registered as the inventory says. One that restarts before that has none of them.

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskRole, DiskState, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::{CONNECT_TIMEOUT, MACHINE_TIMEOUT};
use super::{Coming, Pending, Receiving, Stage, copies_of};
use crate::migration::figures;
use crate::rules;
use crate::storage::arriving::{self, ArrivingDisk};
use crate::storage::lease;
use crate::vm::arriving_disks::ArrivingDisks;
use crate::vm::arriving_keys::ArrivingKeys;
use crate::vm::internal;
use crate::vm::migration::{Link, Message, SentBefore, lost, refused, unexpected};

/// A VM that is off, whose disks are here.
pub(super) struct Copied {
    /// With what is pinned of its disks.
    spec: VmSpec,
    /// They have no names yet.
    disks: Vec<ArrivingDisk>,
}

impl Copied {
    /// What was made here.
    pub(super) fn states(&self) -> Vec<DiskState> {
        let of = |arriving: &ArrivingDisk| DiskState {
            disk: arriving.disk.disk,
            facts: arriving.facts.clone(),
            datastore: Some(arriving.disk.datastore.datastore),
        };
        self.disks.iter().map(of).collect()
    }
}

impl Coming {
    /// Waits for the source, and has it write the disks.
    pub(super) async fn copy(self, pending: Pending) -> Result<Copied, Problem> {
        let _counted = figures::IN.begin();
        let mut link = Link::of(pending.session(CONNECT_TIMEOUT).await.map_err(lost)?)?;
        let (copies, before) = match link.receive(MACHINE_TIMEOUT).await? {
            Message::AtRest { copies, before } => (copies, before),
            Message::Refused { why } => return Err(refused(&why)),
            _ => return Err(unexpected()),
        };
        // All of them are: what is not copied would be missing.
        if copies != self.copies || copies.len() != self.vm.disks().count() {
            return Err(unexpected());
        }
        // Without its memory a VM that was suspended would be off.
        let memories = before.iter().filter(|before| before.own_memory).count();
        if memories != usize::from(self.suspended) {
            return Err(unexpected());
        }
        // Without what it keeps, its TPM would be another one, or none.
        let keeps = |place: usize| before.get(place).is_some_and(|before| before.tpm);
        if copies.iter().enumerate().any(|(place, disk)| self.is_of_tpm(*disk) != keeps(place)) {
            return Err(unexpected());
        }
        match self.take(&before, &mut link).await {
            Ok(copied) => {
                link.finish().await;
                Ok(copied)
            }
            Err(problem) => {
                let why = problem.detail.clone();
                let _ = link.send(&Message::Refused { why }).await;
                Err(problem)
            }
        }
    }

    fn is_of_tpm(&self, disk: DiskId) -> bool {
        self.vm.disk(disk).is_some_and(|disk| disk.role == DiskRole::Tpm)
    }

    async fn take(&self, before: &[SentBefore], link: &mut Link) -> Result<Copied, Problem> {
        let (told_under, migration) = (self.told_under.as_ref(), self.migration);
        let (kek, transit) = (self.kek.as_ref(), self.transit.as_ref());
        let under = ArrivingKeys { kek, told_under, transit, migration };
        let of = (&self.shared, &self.vm);
        let disks = ArrivingDisks::prepare(of, &self.copies, under, before, link).await?;
        let keys = disks.keys(self.told_under.as_ref(), self.migration)?;
        link.send(&Message::Prepared { keys }).await?;
        let disks = disks.filled_in_turn(link).await?;
        let mut spec = self.vm.clone();
        for disk in spec.disks_mut() {
            let made = disks.iter().find(|arriving| arriving.disk.disk == disk.disk);
            disk.facts = made.map(|arriving| arriving.facts.clone());
        }
        Ok(Copied { spec, disks })
    }
}

impl Receiving {
    /// Has the VM be here, with what has come; returns it. A failure ends its way to this host: what is named stays on record until
    /// it is given up.
    pub(super) async fn keep(&mut self) -> Result<VmSpec, Problem> {
        let copied = match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Copied(copied) => *copied,
            other => {
                self.stage = other;
                return Err(rules::wrong_state(&self.spec, rules::NOT_READY_TO_COMMIT));
            }
        };
        let (generation, copies) = (self.generation, copies_of(&self.job).cloned());
        let take = move || {
            let Copied { spec, disks } = copied;
            arriving::name(&spec, &disks, generation)?;
            // With their locks.
            drop(disks);
            lease::take(&spec, generation)?;
            if let Some(copies) = copies
                && let Err(problem) = arriving::settle(&spec, &copies)
            {
                tracing::warn!(vm = %spec.vm, %problem, "a note of copied disks is left");
            }
            Ok::<_, Problem>(spec)
        };
        let kept = spawn_blocking(take).await.unwrap_or_else(|error| Err(internal(error)));
        // Its job has been ready to commit, and is not any more: the server asks for no disks that are let go.
        kept.inspect_err(|problem| self.fail_job(problem.clone()))
    }
}
