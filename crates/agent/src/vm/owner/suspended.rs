//! A VM whose memory is being saved, or is saved.

use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::host::{KeyState, StopReason, VmSpec};
use vmseal_api::problem::Problem;
use vmseal_api::request_id;

use super::{Event, Owner, State};
use crate::hypervisor::network::announce::announce;
use crate::process::run_record::{Phase, Record};
use crate::rules;
use crate::rules::exclusion::{Action, Permission};
use crate::storage::memory::{MemoryFiles, NOT_COUNTED};
use crate::storage::sealed_keys;
use crate::vm::internal;
use crate::vm::queues;
use crate::vm::running::ProcessEvent;
use crate::vm::serve::wait_connected;
use crate::vm::service::{FILTER_RESTART_TIMEOUT, Service};
use crate::vm::stream;
use crate::vm::suspend::{self, Resume, ToSave};

impl Owner {
    /// Begins to suspend the VM.
    pub(super) async fn suspend(&mut self, generation: Option<u64>) -> Result<(), Problem> {
        if self.situation().may(Action::Suspend, None)? == Permission::Already {
            return Ok(());
        }
        rules::check_suspend(&self.spec, self.key() == KeyState::Missing)?;
        let spec = self.spec.clone();
        let look = move || suspend::files_of(&spec);
        let files = spawn_blocking(look).await.map_err(internal)??;
        tracing::info!(vm = %self.spec.vm, "the VM is being suspended");
        self.not_suspended = None;
        self.save_memory(files, generation).await
    }

    /// Begins to save the memory of the guest, which stands still from now on. One that is paused needs no filter for that: QEMU has asked
    /// the one that served when it was paused.
    pub(super) async fn save_memory(
        &mut self,
        files: MemoryFiles,
        generation: Option<u64>,
    ) -> Result<(), Problem> {
        self.require_known_queues()?;
        // Before the wait: it would end with a filter that began while the guest stood still, which is not the reason.
        self.require_no_panic()?;
        self.require_tpm().await?;
        self.require_unsaved().await?;
        if !self.running().is_some_and(|running| running.live.paused) {
            self.until_served().await?;
        }
        // If the pool was mounted anew during the wait, the TPM is lost.
        self.require_tpm().await?;
        let kek = self.clone_kek()?;
        let spec = self.spec.clone();
        self.request = request_id::current();
        let State::Running(running) = &mut self.state else {
            return Err(internal("a VM that runs has no processes"));
        };
        let record = Record {
            boot: String::new(),
            spec,
            slot: 0,
            phase: Phase::Running,
            live: running.live.without_lease(),
        };
        let filter = match running.live.paused {
            true => None,
            false => Some(running.witness()?),
        };
        let qmp = running.qmp.clone();
        let generation = generation.unwrap_or(NOT_COUNTED);
        let what = ToSave { files, generation, record, kek, qmp, filter };
        running.saving = Some(suspend::begin(what));
        Ok(())
    }

    /// Refuses to save a guest that was paused, or to send it, where what QEMU saves of it might not be whole
    /// ([`crate::vm::queues`]).
    pub(super) fn require_known_queues(&self) -> Result<(), Problem> {
        match &self.state {
            State::Running(running) if running.live.paused && !running.live.queues_known => {
                let what = "is paused, and a filter has begun to serve it since, or it was reset after its memory had been saved, or an earlier vmseal has paused it: QEMU could not save all of its guest. Unpause it (vmseal vm unpause), pause it again if it is to be so, and try again";
                Err(rules::wrong_state(&self.spec, what))
            }
            _ => Ok(()),
        }
    }

    /// Refuses to save a guest that has been saved while it was paused, or to send it, before it has run again.
    pub(super) async fn require_unsaved(&self) -> Result<(), Problem> {
        let State::Running(running) = &self.state else { return Ok(()) };
        match running.was_saved_paused().await.map_err(internal)? {
            true => Err(rules::saved_while_paused(&self.spec)),
            false => Ok(()),
        }
    }

    /// Waits until a filter serves the disks that has begun while the guest ran, where one has died.
    pub(super) async fn until_served(&mut self) -> Result<(), Problem> {
        self.serve_again();
        loop {
            let lacks_key = self.lacks_key();
            let Some(running) = self.running() else {
                return Err(internal("its processes have ended"));
            };
            match &running.service {
                Service::Served(filter) if !filter.has_ended() => break,
                Service::Down(None) if lacks_key => return Err(rules::locked(&self.spec)),
                Service::Down(None) => return Err(internal("no filter serves its disks")),
                Service::Served(_) | Service::Down(Some(_)) => {}
            }
            let event = timeout(FILTER_RESTART_TIMEOUT, running.service.next()).await;
            let event = event.map_err(|_| internal("its disks are not served"))?;
            Box::pin(self.apply(Event::Process(ProcessEvent::Service(event)))).await;
        }
        let spec = self.spec.clone();
        let Some(running) = self.running() else {
            return Err(internal("its processes have ended"));
        };
        if running.begun_still {
            // An agent that starts does not know; and a guest that stood still has gone on.
            let has_device = |disk| running.live.disk(disk).is_some();
            wait_connected(&running.control, &spec, has_device).await?;
            running.begun_still =
                !queues::taken(&running.control, &spec, &running.live, &running.qmp).await;
        }
        if running.begun_still {
            let what = "has a filter that began while its guest stood still. Try again when its guest runs";
            return Err(rules::wrong_state(&spec, what));
        }
        Ok(())
    }

    /// Asks once more whether the guest runs with its filter, where that was not so when the filter began: a disk was being plugged in, the guest
    /// stood still, or QEMU was busy. When a guest stops by itself, as it panics or is sent, it is too late to ask.
    pub(super) async fn look_whether_taken(&mut self) {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return };
        let served = matches!(running.service, Service::Served(_));
        if running.begun_still && served && !running.stands_still() {
            running.begun_still =
                !queues::taken(&running.control, &spec, &running.live, &running.qmp).await;
        }
    }

    /// The memory is saved, or is not.
    pub(super) async fn memory_saved(&mut self, saved: Result<(), Problem>) {
        if let Some(keeping) = self.keeping.take() {
            return self.memory_kept(keeping, saved).await;
        }
        let kept = match saved {
            Ok(()) => self.with_files(|files| files.keep()).await,
            Err(problem) => Err(problem),
        };
        match kept {
            Ok(()) => {
                self.suspended = true;
                let Some(running) = self.take_running() else { return };
                running.force_off().await;
                let detail = "an operator suspended it: its memory is saved".to_owned();
                self.went_off((StopReason::Suspended, detail)).await;
            }
            Err(problem) => self.goes_on(problem).await,
        }
    }

    /// The guest has panicked in the instant before it was stopped to have its memory saved: that is given up. QEMU writes no core dump while
    /// it saves, and a guest that boots again is another one than what would be saved.
    pub(super) async fn panicked_while_saved(&mut self) {
        let Some(running) = self.running() else { return };
        if running.saving.take().is_none() {
            return;
        }
        let what = "has a guest that panicked before its memory was saved: nothing is saved";
        let problem = rules::wrong_state(&self.spec, what);
        self.memory_saved(Err(problem)).await;
    }

    /// The guest goes on, as its memory could not be saved.
    async fn goes_on(&mut self, problem: Problem) {
        tracing::error!(vm = %self.spec.vm, %problem, "the VM is not suspended, and goes on");
        // Before its guest changes its disks: the file may have its name already.
        if let Err(problem) = self.with_files(|files| files.discard()).await {
            tracing::warn!(vm = %self.spec.vm, %problem, "what was saved cannot be removed");
        }
        self.let_go_on().await;
        self.not_suspended = Some(problem.detail);
    }

    /// Has the guest go on whose memory was saved, or was not.
    pub(super) async fn let_go_on(&mut self) {
        if let Some(running) = self.running() {
            // One that has panicked goes on when what is done about that is done.
            let paused = running.live.paused || running.panicked;
            let qmp = running.qmp.clone();
            let go_on = async {
                stream::give_up(&qmp).await?;
                if !paused {
                    qmp.execute("cont", Value::Null).await?;
                }
                Ok::<_, crate::hypervisor::qmp::QmpError>(())
            };
            match go_on.await {
                // Another host may have announced it meanwhile.
                Ok(()) if !paused => announce(&qmp, self.spec.vm).await,
                Ok(()) => {}
                Err(error) => {
                    tracing::error!(vm = %self.spec.vm, %error, "its guest does not go on");
                }
            }
        }
        // One that died meanwhile had to wait.
        self.serve_again();
    }

    /// Gives the saved memory up; a VM that has none is as asked.
    pub(super) async fn discard_memory(&mut self) -> Result<(), Problem> {
        if !matches!(self.state, State::Off) {
            return Ok(());
        }
        self.look_for_memory().await;
        if self.suspended {
            self.with_files(|files| files.discard()).await?;
            tracing::info!(vm = %self.spec.vm, "its saved memory was given up");
            self.suspended = false;
        }
        Ok(())
    }

    /// An agent may have ended before it removed what its guest has used.
    pub(super) async fn sweep_memory(&self) {
        if !matches!(self.state, State::Running(_)) {
            return;
        }
        if let Err(problem) = self.with_files(|files| files.sweep()).await {
            tracing::warn!(vm = %self.spec.vm, %problem, "a memory that was used cannot be removed");
        }
    }

    /// Finds whether the VM that is off is suspended; what is known stays where its datastore is not there.
    pub(super) async fn look_for_memory(&mut self) {
        if let Some(suspended) = suspend::is_suspended(&self.spec).await {
            self.suspended = suspended;
        }
    }

    /// What a suspended VM starts as, with memory of this generation where one is expected.
    pub(super) async fn open_memory(
        &self,
        generation: Option<u64>,
    ) -> Result<(VmSpec, crate::process::live::Live, Resume), Problem> {
        let (spec, kek) = (self.spec.clone(), self.clone_kek()?);
        let open = move || suspend::open(&spec, kek.as_ref(), generation);
        spawn_blocking(open).await.map_err(internal)?
    }

    pub(super) async fn with_files(
        &self,
        work: impl FnOnce(&MemoryFiles) -> Result<(), Problem> + Send + 'static,
    ) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let work = move || work(&suspend::files_of(&spec)?);
        spawn_blocking(work).await.map_err(internal)?
    }

    /// Refuses to be rid of the key of files that are under it: memory, core dumps.
    pub(super) async fn require_nothing_sealed(&self) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let look = move || sealed_keys::first_sealed(&spec);
        match spawn_blocking(look).await.map_err(internal)?? {
            None => Ok(()),
            Some(path) => Err(rules::needs_its_key(&self.spec, &path.display().to_string())),
        }
    }
}
