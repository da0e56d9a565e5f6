//! A VM that is sent to another host, and handed over to it.
//!
//! ```text
//!   Running ─ put ─► sending, the guest runs ─► all is sent, the guest stands still ─► handed over ─ commit ─► Off
//!      ▲                      │                       │ on record; disks drained, replaced, let go    │
//!      └── cancel, an error ──┴───────────────────────┴─────────────────────── cancel ────────────────┘
//!                                                        (the lease as it was, disks locked and served again)
//! ```
//! A guest that is handed over goes on when the server cancels, and never by itself: the other host may have it.

use std::ffi::OsStr;
use std::time::Instant;

use serde_json::Value;
use tokio::task::spawn_blocking;
use vmseal_api::hardware::OnCrash;
use vmseal_api::host::{Departure, DiskSpec, JobSpec, Notice, Power, SendJob, StopReason, VmSpec};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Owner, State};
use crate::filter::NewLayers;
use crate::process::run_record::{Phase, Record};
use crate::rules;
use crate::rules::exclusion::Action;
use crate::rules::find_disk;
use crate::storage::lease;
use crate::storage::locked::share_lock;
use crate::storage::opening::data_offset;
use crate::storage::placeholder;
use crate::storage::tpm_place;
use crate::vm::asleep;
use crate::vm::migration::{copy_secret, memory_transit, session_of};
use crate::vm::running::Running;
use crate::vm::sending::{GuestToSend, Sending, SendingEvent, Sent, ToSend};
use crate::vm::serve::{self, NotReplaced};
use crate::vm::service::{Service, serve_once};
use crate::vm::stream;
use crate::vm::to_copy::{Departing, ToCopy};
use crate::vm::{internal, tpm};

impl Owner {
    /// The guest has run here since it was received, and `went_on` then: the job of that is done.
    #[must_use]
    pub fn received(
        mut self,
        (task, job): (TaskId, JobSpec),
        notices: Vec<Notice>,
        went_on: Option<Instant>,
    ) -> Self {
        self.jobs.begin(task, job);
        self.jobs.committed(task);
        self.jobs.went_on(task, went_on);
        self.tell_received();
        self.header_notices = notices;
        self.serves_sizes = true;
        self
    }

    /// Has the disks of a guest that was received shown: the inventory may not know yet what was made here for it.
    pub(super) fn tell_received(&mut self) {
        if matches!(&self.state, State::Running(running) if running.live.received.is_some()) {
            self.tell_disks();
        }
    }

    pub(super) fn tell_disks(&mut self) {
        let facts = |disk: &DiskSpec| Some((disk.disk, disk.facts.clone()?));
        self.made.extend(self.spec.disks().filter_map(facts));
    }

    /// Whether the guest is handed over to another host.
    pub(super) fn is_handed_over(&self) -> bool {
        matches!(&self.state, State::Running(running) if running.live.handed_over.is_some())
    }

    /// Begins to send the VM.
    pub(super) async fn put_send(
        &mut self,
        task: TaskId,
        job: &SendJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        if self.is_handed_over() {
            // By an earlier agent.
            return Ok(());
        }
        self.require_no_panic()?;
        self.ready_to_send(&spec)?;
        self.require_unsaved().await?;
        self.require_awake("is not sent").await?;
        if self.power() != Power::Paused {
            // Of one that was begun later it is known whether the guest ran then.
            self.until_served().await?;
        }
        let mut copies = self.prepare_copies(&job.copies).await?;
        self.require_tpm().await?;
        self.may_replace_filter().await?;
        self.prepare_tpm(&job.copies).await?;
        let Some(departure) = job.begin.as_deref() else { return Err(internal("no destination")) };
        let session = session_of(&self.shared, self.spec.vm, &departure.session)?;
        if let Some(copies) = &mut copies {
            let kek = copies.kek.as_ref();
            copies.told_under = copy_secret(&self.shared, self.spec.vm, &departure.session, kek)?;
            copies.transit = memory_transit(&departure.session, copies.told_under.as_ref())?;
        }
        // Last: what is refused before it costs no replica.
        self.serve_without_replicas().await?;
        let vm = self.spec.clone();
        let State::Running(running) = &mut self.state else {
            return Err(internal("a VM that runs has no processes"));
        };
        let live = running.live.without_lease();
        let record = Record { boot: String::new(), spec: vm, slot: 0, phase: Phase::Running, live };
        running.sending = Some(Sending::begin(ToSend {
            session,
            to: departure.to,
            bytes_per_second: departure.bytes_per_second,
            guest: GuestToSend {
                downtime_milliseconds: departure.downtime_milliseconds,
                compresses: departure.compresses,
                record,
                qmp: running.qmp.clone(),
                migration: departure.session.migration,
                copies,
            },
        }));
        self.jobs.begin(task, spec);
        tracing::info!(vm = %self.spec.vm, to = %departure.to, "the VM is being sent to another host");
        Ok(())
    }

    /// Prepares what the TPM keeps to be beside what the other host's TPM keeps, where both hosts have its disk.
    async fn prepare_tpm(&self, copies: &[DiskId]) -> Result<(), Problem> {
        let of_tpm = tpm::disk_of(&self.spec).filter(|disk| !copies.contains(&disk.disk));
        let (Some(disk), State::Running(running)) = (of_tpm.cloned(), &self.state) else {
            return Ok(());
        };
        let (spec, received) = (self.spec.clone(), running.live.received);
        let images = running.tpm.descriptors(OsStr::new(&format!("{}.raw", disk.disk)));
        let prepare = move || {
            // An earlier version has started it with the image's lock alone. That is the lock of each copy of its descriptor.
            let shared = images.and_then(|images| images.iter().try_for_each(share_lock));
            if let Err(error) = shared {
                tracing::info!(vm = %spec.vm, %error, "the lock of the TPM's disk stays as it is");
            }
            tpm_place::before_sent(&spec, &disk, received)
        };
        spawn_blocking(prepare).await.map_err(internal)?
    }

    /// The guest stays: removes what the other host has made for what its TPM keeps, if that has not.
    async fn drop_arriving_tpm(&self) {
        let (Some(disk), State::Running(_)) = (tpm::disk_of(&self.spec).cloned(), &self.state)
        else {
            return;
        };
        let spec = self.spec.clone();
        let drop_debris = move || tpm_place::drop_debris(&spec, &disk);
        let dropped =
            spawn_blocking(drop_debris).await.unwrap_or_else(|error| Err(internal(error)));
        if let Err(problem) = dropped {
            // The next start, or migration, removes it.
            tracing::warn!(vm = %self.spec.vm, %problem, "what was made for a TPM at another host is left");
        }
    }

    /// The VM is sent at another rate from now on.
    pub(super) fn set_departure(&mut self, task: TaskId, departure: &Departure) {
        self.jobs.set_departure(task, departure);
        self.set_rate_at_rest(departure.bytes_per_second);
        if let State::Running(running) = &self.state
            && let Some(sending) = &running.sending
        {
            sending.set_rate(departure.bytes_per_second);
        }
    }

    /// What is needed to copy these disks; none where there are none.
    async fn prepare_copies(&mut self, copies: &[DiskId]) -> Result<Option<ToCopy>, Problem> {
        if copies.is_empty() {
            return Ok(None);
        }
        let disks = self.departing(copies).await?;
        let (shared, spec, kek) = (self.shared.clone(), self.spec.clone(), self.clone_kek()?);
        let Some(running) = self.running() else { return Err(internal("it has ended")) };
        let control = running.control.clone();
        let status = control.status().await.map_err(internal)?;
        if !status.completes {
            let what = "is served by a filter of an earlier vmseal, which copies no disks to other hosts. Restart the VM first, or share its datastores with that host";
            return Err(rules::wrong_state(&self.spec, what));
        }
        let (told_under, transit) = (None, None);
        Ok(Some(ToCopy { shared, spec, kek, told_under, transit, control, disks }))
    }

    /// These disks, as they are copied to another host.
    pub(super) async fn departing(&self, copies: &[DiskId]) -> Result<Vec<Departing>, Problem> {
        self.are_unshared(copies.iter().copied()).await?;
        let of = |disk: &DiskId| {
            let disk = find_disk(&self.spec, *disk)?.clone();
            let facts = self.facts(&disk).ok_or_else(|| internal("a disk without facts"))?;
            Ok((disk, facts))
        };
        let disks = copies.iter().map(of).collect::<Result<Vec<_>, Problem>>()?;
        let spec = self.spec.clone();
        let look = move || {
            let each = disks.into_iter().map(|known| Departing::of(&spec, known));
            each.collect::<Result<Vec<_>, Problem>>()
        };
        spawn_blocking(look).await.map_err(internal)?
    }

    /// Checks whether the VM could be sent.
    pub(super) fn ready_to_send(&self, spec: &JobSpec) -> Result<(), Problem> {
        let at_rest = matches!(spec, JobSpec::Send(job) if job.begins_at_rest());
        let action = if at_rest { Action::SendAtRest } else { Action::Send };
        self.situation().may(action, None)?;
        self.require_known_queues()?;
        rules::check_job(&self.spec, spec, self.key(), |disk| self.facts(disk).is_some())
    }

    /// How far it is.
    pub(super) async fn sending(&mut self, event: SendingEvent) {
        let Some(task) = self.jobs.sender() else { return };
        match event {
            SendingEvent::Progress(progress) => self.jobs.migrates(task, progress),
            SendingEvent::Ended(sent) => {
                if let Some(running) = self.running() {
                    running.sending = None;
                }
                let handed_over = match sent {
                    Ok(sent) => {
                        self.jobs.all_sent(task, sent.all_sent);
                        self.hand_over(sent).await
                    }
                    Err(problem) => Err(problem),
                };
                match &handed_over {
                    Ok(()) => {}
                    // Some of its disks are not served: the server cancels, and so tries again to give them back.
                    Err(problem) if self.is_handed_over() => {
                        tracing::error!(vm = %self.spec.vm, %problem, "the VM is not sent, and stands still");
                    }
                    Err(problem) => {
                        tracing::warn!(vm = %self.spec.vm, %problem, "the VM is not sent, and goes on");
                        self.let_go_on().await;
                        self.let_go_of_copies().await;
                    }
                }
                self.jobs.migrated(task, handed_over);
            }
        }
    }

    /// The guest has panicked while it is sent, and is sent no more: QEMU writes no core dump while it sends memory, what it has sent of a guest
    /// is not what that has when it boots again, and the other host would have one go on that is to be left as it is. Only while its
    /// disks are being copied may it boot again without a core dump: its memory is not sent yet.
    pub(super) async fn panicked_while_sent(&mut self) {
        let restarts = self.spec.hardware.on_crash == OnCrash::Restart;
        let Some(task) = self.jobs.sender() else { return };
        let Some(running) = self.running().filter(|running| running.sending.is_some()) else {
            return;
        };
        if restarts && matches!(stream::is_under_way(&running.qmp).await, Ok(false)) {
            return;
        }
        running.sending = None;
        let problem = rules::panicked_while_sent(&self.spec);
        tracing::warn!(vm = %self.spec.vm, %problem, "the VM is not sent");
        // Of the stream alone: the guest goes on when what is done about its panic is done. The next check has its filter let go of copies.
        self.let_go_on().await;
        self.jobs.migrated(task, Err(problem));
    }

    /// The guest has ended, and its sending with it: else the task would wait until the other host notices. One that was handed over before
    /// has been sent.
    pub(super) fn ended_while_sent(&mut self, why: &str) {
        if self.jobs.sends_at_rest() {
            return;
        }
        if let Some(task) = self.jobs.sender() {
            self.jobs.migrated(task, Err(rules::ended_while_sent(&self.spec, why)));
        }
    }

    /// The guest has fallen asleep while it is sent, and is sent no more where QEMU would not send it as it is.
    pub(super) async fn asleep_while_sent(&mut self) {
        let Some(task) = self.jobs.sender() else { return };
        let Some(running) = self.running().filter(|running| running.sending.is_some()) else {
            return;
        };
        // Also where QEMU does not say it.
        if matches!(asleep::may_be_sent(&running.qmp).await, Ok(true)) {
            return;
        }
        running.sending = None;
        let problem = rules::sleeps(&self.spec, "is not sent");
        tracing::warn!(vm = %self.spec.vm, %problem, "the VM is not sent, and goes on");
        self.let_go_on().await;
        self.let_go_of_copies().await;
        self.jobs.migrated(task, Err(problem));
    }

    /// Refuses what QEMU does not do right with a guest that sleeps. `what` says what is not done.
    pub(super) async fn require_awake(&self, what: &str) -> Result<(), Problem> {
        match &self.state {
            State::Running(running) => asleep::require_awake(&running.qmp, &self.spec, what).await,
            _ => Ok(()),
        }
    }

    /// All of the guest's memory is sent, and it stands still: the copies of its disks are completed, and its disks let go.
    async fn hand_over(&mut self, mut sent: Sent) -> Result<(), Problem> {
        // What is done about a panic is done where the core dump is.
        self.require_no_panic()?;
        sent.copy_still().await?;
        let spec = self.spec.clone();
        let read = move || lease::read(&spec);
        let generation = spawn_blocking(read).await.map_err(internal)??;
        let spec = self.spec.clone();
        let disks = self.served_disks();
        let Some(running) = self.running() else { return Err(internal("it has ended")) };
        require_whole(running, &spec).await?;
        running.live.handed_over = Some(generation);
        if let Err(problem) = running.write(&spec) {
            running.live.handed_over = None;
            // What was written may be there, though it failed.
            let _ = running.write(&spec);
            return Err(problem);
        }
        let control = running.control.clone();
        let copied = sent.disks.as_ref().map_or_else(Vec::new, |it| it.written().to_vec());
        let let_go = move || {
            let new = disks.iter().map(|(disk, offset)| {
                let file = placeholder::file(disk, *offset)?;
                let (layers, own, keeps_room) = (Vec::new(), None, false);
                // Nobody serves it.
                let (disk, offset, channel) = (disk.disk, *offset, None);
                Ok(NewLayers { disk, file, layers, offset, keeps_room, own, channel })
            });
            let new = new.collect::<Result<Vec<_>, Problem>>().map_err(NotReplaced::AsBefore)?;
            serve::replace(&control, &new, &copied)
        };
        let ended = match spawn_blocking(let_go).await.map_err(internal)? {
            Ok(()) => sent.end().await,
            Err(NotReplaced::Unknown(problem)) => Err(problem),
            Err(NotReplaced::AsBefore(problem)) => {
                let Some(running) = self.running() else { return Err(problem) };
                running.live.handed_over = None;
                running.write(&spec)?;
                return Err(problem);
            }
        };
        let problem = match ended {
            Ok(progress) => {
                if let (Some(task), Some(progress)) = (self.jobs.sender(), progress) {
                    self.jobs.migrates(task, progress);
                }
                tracing::info!(vm = %self.spec.vm, "the guest is handed over: its disks are free");
                return Ok(());
            }
            Err(problem) => problem,
        };
        // It has what it had before it goes on.
        self.take_back().await?;
        Err(problem)
    }

    /// The disks that the filter serves, and where the first byte of each is.
    fn served_disks(&self) -> Vec<(DiskSpec, u64)> {
        let Ok(plan) = self.plan() else { return Vec::new() };
        plan.disks.into_iter().map(|(disk, facts)| (disk, data_offset(&facts))).collect()
    }

    /// Gives a guest that was handed over its disks again.
    async fn take_back(&mut self) -> Result<(), Problem> {
        let (spec, plan, shared) = (self.spec.clone(), self.plan()?, self.shared.clone());
        let Some(running) = self.running() else { return Ok(()) };
        let Some(before) = running.live.handed_over else { return Ok(()) };
        let of = spec.clone();
        let now = spawn_blocking(move || lease::read(&of)).await.map_err(internal)??;
        if now != before {
            let what = format!(
                "VM '{}' has run on another host since it was handed over, and does not go on here",
                spec.name
            );
            return Err(Problem::new(ErrorCode::Conflict, what));
        }
        match running.service {
            Service::Served(_) => {
                let (directory, control) = (running.directory.clone(), running.control.clone());
                let status = control.status().await.map_err(internal)?;
                let again = move || match serve::has_own_files(&plan.spec, &status)? {
                    // An agent ended when it had only recorded that it hands the guest over.
                    true => Ok(()),
                    false => serve::take_over(&directory, &control, &plan),
                };
                spawn_blocking(again).await.map_err(internal)??;
            }
            // It is paused, and another filter begins when it goes on.
            Service::Down(_) if running.live.paused => {}
            Service::Down(_) => {
                let (directory, slot) = (running.directory.clone(), running.slot.clone());
                let qmp = running.qmp.clone();
                let served = serve_once(&shared, &directory, plan.into(), &slot, &qmp).await;
                running.service = Service::Served(served.map_err(|error| error.into_problem())?);
                running.begun_still = true;
            }
        }
        running.live.handed_over = None;
        running.write(&spec)
    }

    /// The other host has the guest: its processes here end.
    pub(super) async fn commit_send(&mut self) -> Result<(), Problem> {
        if !self.is_handed_over() {
            return match self.state {
                State::Off => {
                    self.committed_at_rest();
                    Ok(())
                }
                _ => Err(rules::wrong_state(&self.spec, rules::NOT_READY_TO_COMMIT)),
            };
        }
        if let Some(running) = self.take_running() {
            running.force_off().await;
            let detail = "it runs on another host now".to_owned();
            self.went_off((StopReason::Migrated, detail)).await;
            // The server may have to know later which images are former ones.
            self.tell_disks();
        }
        if let Some(task) = self.jobs.sender() {
            self.jobs.committed(task);
        }
        Ok(())
    }

    /// The guest goes on here.
    pub(super) async fn cancel_send(&mut self, task: TaskId) -> Result<(), Problem> {
        if self.jobs.is_at_rest(task) {
            self.cancel_send_at_rest(task).await;
            return Ok(());
        }
        let sending = self.jobs.sender().is_some_and(|sender| sender == task);
        let handed_over = self.is_handed_over();
        if handed_over {
            self.take_back().await?;
        }
        self.drop_arriving_tpm().await;
        if let Some(running) = self.running()
            && running.sending.take().is_none()
            && !handed_over
        {
            self.jobs.cancel(task);
            return Ok(());
        }
        self.let_go_on().await;
        self.let_go_of_copies().await;
        if sending || handed_over {
            tracing::info!(vm = %self.spec.vm, "the VM stays on this host");
        }
        self.jobs.cancel(task);
        Ok(())
    }
}

/// Checks that what QEMU has sent of a guest, which stands still since, is whole ([`crate::vm::queues`]): QEMU stops a guest by itself when it has
/// sent the most of it, and its filter may have died just before.
async fn require_whole(running: &Running, spec: &VmSpec) -> Result<(), Problem> {
    let begun = if running.live.paused { !running.live.queues_known } else { running.begun_still };
    if begun {
        return Err(internal(
            "its filter has died, and the next one began when its guest stood still",
        ));
    }
    let guest = running.qmp.execute("query-status", Value::Null).await.map_err(internal)?;
    if !stream::stands_still(&guest) {
        return Err(internal("its guest does not stand still any more"));
    }
    match running.witness()?.silent(spec, &running.live).await {
        Some(why) => Err(internal(format!("its filter serves its disks no more: {why}"))),
        None => Ok(()),
    }
}
