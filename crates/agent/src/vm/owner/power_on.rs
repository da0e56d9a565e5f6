//! Starting the VM, and whether it could be started.

use std::sync::Arc;

use tokio::sync::oneshot;
use vmseal_api::boot::BootDevice;
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;

use super::{Owner, State};
use crate::process::users::Slot;
use crate::rules;
use crate::rules::exclusion::{Action, Permission};
use crate::storage::builder;
use crate::storage::open;
use crate::timed;
use crate::vm::internal;
use crate::vm::serve::{Memory, Plan};
use crate::vm::start::{self, go_on};

impl Owner {
    /// Checks that the VM may be started, as it is and as it is defined.
    async fn may_power_on(&mut self, boot_once: Option<BootDevice>) -> Result<Permission, Problem> {
        if matches!(self.state, State::Off) {
            self.look_for_memory().await;
        }
        let may = self.situation().may(Action::PowerOn, None)?;
        if may == Permission::Granted {
            rules::check_not_sent(&self.spec, self.jobs.sends_at_rest())?;
            rules::check_start(&self.spec, self.key(), |disk| self.facts(disk).is_some())?;
            rules::boot::check_once(&self.spec, boot_once)?;
        }
        Ok(may)
    }

    /// The users of its processes, until they are dropped.
    fn take_users(&self) -> Result<Slot, Problem> {
        self.shared.users.take().ok_or_else(builder::too_many)
    }

    /// Checks that the VM could be started now. Its disks are opened for reading, and closed again.
    pub(super) async fn examine_start(
        &mut self,
        boot_once: Option<BootDevice>,
        discard_memory: bool,
        generation: Option<u64>,
    ) -> Result<(), Problem> {
        if self.may_power_on(boot_once).await? == Permission::Already {
            return Ok(());
        }
        let (spec, card_roms) = if self.suspended && !discard_memory {
            rules::check_resume(&self.spec, boot_once)?;
            let (spec, live, _) = self.open_memory(generation).await?;
            (spec, live.card_roms)
        } else {
            (self.spec.clone(), false)
        };
        drop(self.take_users()?);
        start::examine(&self.shared, &spec, (boot_once, card_roms)).await?;
        // What works on a disk has its lock, and is ended when the VM is started.
        let at_work: Vec<_> = self.jobs.activities().map(|(disk, _)| disk).collect();
        for disk in spec.disks().filter(|disk| !at_work.contains(&disk.disk)) {
            self.examine_disk(&spec, disk).await?;
        }
        Ok(())
    }

    async fn examine_disk(&self, spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
        let Some(facts) = self.facts(disk) else { return Err(internal("a disk without facts")) };
        let kek = if disk.encrypted { self.clone_kek()? } else { None };
        let (spec, disk) = (spec.clone(), disk.clone());
        let place = disk.datastore.location.path().to_owned();
        timed::call(&place, move || open::examine(&spec, &disk, &facts, kek.as_ref())).await
    }

    /// Begins to start the VM. Where it is suspended and a generation is expected, its memory must be of that one.
    pub(super) async fn power_on(
        &mut self,
        boot_once: Option<BootDevice>,
        generation: Option<u64>,
    ) -> Result<(), Problem> {
        if self.may_power_on(boot_once).await? == Permission::Already {
            return Ok(());
        }
        let plan = if self.suspended {
            rules::check_resume(&self.spec, boot_once)?;
            let (spec, live, resume) = self.open_memory(generation).await?;
            // Until it stops, it is what it was when it was suspended.
            let registered = std::mem::replace(&mut self.spec, spec);
            self.next = (registered != self.spec).then_some(registered);
            Plan { memory: Memory::Saved(resume), ..self.plan_with(live)? }
        } else {
            Plan { boot_once, ..self.plan()? }
        };
        let (shared, directory) = (self.shared.clone(), self.shared.run_dir.vm(self.spec.vm));
        // The users are released for another VM only after the last process of this one has ended.
        let slot = Arc::new(self.take_users()?);
        self.stop_copying().await;
        self.stop_merging().await;
        let (cancel, cancelled) = oneshot::channel();
        tracing::info!(vm = %self.spec.vm, name = self.spec.name, "the VM is being started");
        let plan = Arc::new(plan);
        let work = async move {
            let mut result = tokio::select! {
                result = start::start(&shared, &directory, plan.clone(), slot.clone()) => result,
                _ = cancelled => Err(Problem::new(ErrorCode::Cancelled, "the start was cancelled")),
            };
            if let Ok((running, _)) = &result
                && let Err(problem) = go_on(&plan, running).await
            {
                result = Err(problem);
            }
            if result.is_err()
                && let Err(error) = directory.sweep().await
            {
                tracing::warn!(directory = directory.name(), %error, "cannot remove a run directory");
            }
            result
        };
        let task = tokio::spawn(request_id::inherit(work));
        self.header_notices.clear();
        self.exposed_errors.clear();
        self.exchanged.clear();
        self.request = request_id::current();
        self.state = State::Starting { task, cancel };
        Ok(())
    }
}
