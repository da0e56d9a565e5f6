//! Sends the disks of a new VM, which is off, to another host of this control plane: the way that a VM goes which is off and gets to
//! another control plane ([`super::away`]), with one task for both ends.
//!
//! ```text
//!   check ─► send ──────────────────────► switch ───────────────────────► remove what was sent
//!             the source reads each disk,   the destination names the copies   at the source
//!             the destination fills copies  and takes the lease; the
//!                   │                       inventory says so
//!                   │                         │  commit step
//!                   └── undone: the source has it, the destination nothing
//! ```
//! What the destination has made is in the task's record before it is asked to keep it: an agent that restarts afterwards knows nothing
//! of a VM that is off. Then its lease says whether it has it.

use vmseal_api::host::{
    Arrival, ArrivingCopies, ArrivingCopy, Departure, DiskState, HostState, JobKind, JobSpec,
    JobState, JobStatus, MIGRATION_KEY_LEN, Power, ReceiveJob, SendJob,
};
use vmseal_api::id::{DiskId, MigrationId};
use vmseal_api::migration::DOWNTIME_DEFAULT;
use vmseal_api::model::Lifecycle;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::Progress;
use vmseal_secret::SecretBytes;

use super::cause::{OtherHostWait, Said, Verdict, at_destination, at_source, judge};
use super::{NewSession, STREAMS, agent_of, end_at_source, nonce, reachable, tell_pace};
use crate::hosts::keys::{self, Purpose};
use crate::hosts::{self, is_silence};
use crate::operation::migration::{CHECK, CheckedClone};
use crate::operation::{Elsewhere, SentDisks};
use crate::store::events::NewEvent;
use crate::store::vms::{self, Vm};
use crate::store::{datastores, hosts as store_hosts, placements};
use crate::tasks::change_host;
use crate::tasks::create_vm::in_the_clear;
use crate::tasks::mirror_vm::set_image;
use crate::tasks::run::{Run, StepError, absent_is_fine, internal, state_of, wrong_state};
use crate::tasks::start_vm::locked;

/// The name of the step that sends, whose output is what the destination has made.
pub(in crate::tasks) const SENDS: &str = "send";

impl CheckedClone {
    fn disks(&self) -> Vec<DiskId> {
        self.copies.iter().map(|copy| copy.disk).collect()
    }

    fn sent(&self) -> SendJob {
        SendJob { disks: self.disks(), copies: self.disks(), begin: None }
    }

    fn received(&self) -> ReceiveJob {
        let (generation, disks) = (self.generation, self.copies.clone());
        let copies = ArrivingCopies { generation, disks, at_rest: true, suspended: false };
        ReceiveJob { disks: self.disks(), copies: Some(copies), begin: None }
    }

    fn streams(&self) -> u16 {
        STREAMS.saturating_add(u16::try_from(self.copies.len()).unwrap_or(u16::MAX))
    }
}

fn sent(elsewhere: Elsewhere) -> Result<SentDisks, StepError> {
    elsewhere.sent.ok_or_else(|| internal("the task sends no disks"))
}

fn checked(run: &Run<'_>) -> Result<CheckedClone, StepError> {
    run.output(CHECK).ok_or_else(|| internal("the task does not say which disks it sends"))
}

/// Settles what is sent, and where to.
pub(in crate::tasks) async fn check(
    run: &Run<'_>,
    elsewhere: Elsewhere,
) -> Result<CheckedClone, StepError> {
    let Elsewhere { from, to, .. } = elsewhere;
    let target = sent(elsewhere)?.datastore;
    let vm = run.vm().await?;
    if vm.host != from {
        return Err(wrong_state(format!(
            "VM '{}' has been changed meanwhile: begin again",
            vm.name
        )));
    }
    // One that does not answer is found before anything is sent.
    run.host_state(to, None).await?;
    let disks = run.disks().await?;
    let mut read = run.store().read().await?;
    let known = datastores::find(&mut read, &target.to_string()).await?;
    let generation = placements::next_generation(&mut read, vm.id).await?;
    drop(read);
    let place = known.and_then(|known| known.spec_on(to)).ok_or_else(|| {
        wrong_state("the other host does not have the datastore for the disks any more".to_owned())
    })?;
    let at = |disk, datastore| ArrivingCopy { disk, datastore };
    let copies = disks.iter().map(|disk| at(disk.id, place.clone())).collect();
    let former = disks.iter().map(|disk| at(disk.id, disk.datastore.clone())).collect();
    Ok(CheckedClone { generation, copies, former })
}

/// Has the disks sent, unless they are. Returns what the destination has made.
pub(in crate::tasks) async fn send(
    run: &Run<'_>,
    elsewhere: Elsewhere,
) -> Result<Vec<DiskState>, StepError> {
    let Elsewhere { from, to, .. } = elsewhere;
    let checked = checked(run)?;
    may_send(run)?;
    let (source, destination) =
        (run.host_state(from, None).await?, run.host_state(to, None).await?);
    if !(is_ready(run, &source, JobKind::Send) && is_ready(run, &destination, JobKind::Receive)) {
        // A session serves one attempt; what an earlier one has left is removed.
        leave(run, elsewhere, &checked).await?;
        let begun = begin(run, elsewhere, &checked).await?;
        if let Err(error) = follow(run, elsewhere, begun).await {
            if let StepError::Paused(_) = error {
                // Nothing is sent until the task goes on; then it is sent from the beginning.
                leave(run, elsewhere, &checked).await?;
            }
            return Err(error);
        }
    }
    run.show(Progress::default());
    made(run, elsewhere, &checked).await
}

/// Ends the step while its task is paused.
fn may_send(run: &Run<'_>) -> Result<(), StepError> {
    if !run.pace().paused {
        return Ok(());
    }
    let detail = format!("{} of '{}' is paused", run.task.operation.kind(), run.task.target);
    Err(StepError::Paused(Problem::new(ErrorCode::WrongState, detail)))
}

/// The task's job of this kind: its host had one of another kind before.
fn job_of<'s>(run: &Run<'_>, state: &'s HostState, kind: JobKind) -> Option<&'s JobStatus> {
    run.job_in(state).filter(|job| job.kind == kind)
}

fn is_ready(run: &Run<'_>, state: &HostState, kind: JobKind) -> bool {
    job_of(run, state, kind).is_some_and(|job| job.state == JobState::ReadyToCommit)
}

/// Tells both hosts of a new session. Returns what the source was told.
async fn begin(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    checked: &CheckedClone,
) -> Result<SendJob, StepError> {
    let Elsewhere { from, to, .. } = elsewhere;
    let (source, destination) = (agent_of(run, from)?, agent_of(run, to)?);
    // An agent that has restarted knows no VM that is off.
    run.hosts().prepare(run.vm_id, Purpose::Open).await.map_err(locked)?;
    let vm = run.vm().await?;
    let (here, there) = (source.describe().await?, destination.describe().await?);
    let mut read = run.store().read().await?;
    let host = store_hosts::find(&mut read, &to.to_string()).await?;
    drop(read);
    let host = host.ok_or_else(|| internal("the other host is not known any more"))?;
    let address = there.migration_address.ok_or_else(|| {
        wrong_state(format!("host '{}' has no address for migrations", host.name))
    })?;
    let reached = reachable(address, &host.name, &host.address).await?;
    let spec = hosts::definition_with(run.store(), vm.id, to, &checked.copies).await?;
    let spec = hosts::for_agent(spec, Some(&there));
    let kek = match &vm.key {
        None => None,
        Some(key) => {
            // New disks are made with it.
            let kek = keys::fetch(&run.context.providers, &vm, key, Purpose::Encrypt).await;
            let at = Vm { host: to, host_name: host.name.clone(), ..vm.clone() };
            Some(keys::seal(run.store(), &there.key_box, &at, key, kek.map_err(locked)?).await?)
        }
    };
    let key = SecretBytes::random(MIGRATION_KEY_LEN).map_err(|error| crate::internal(&error))?;
    // As between two control planes, whose way this is: the keys of the copies are told under the session's key, not the VM's.
    let apart = vm.key.is_some();
    let new = NewSession { vm: vm.id, migration: MigrationId::new(), nonce: nonce()?, key, apart };
    let how = (sent(elsewhere)?.encrypted || apart, checked.streams());
    let arrival = Arrival {
        session: new.sealed(&there.key_box, &host.name, how)?,
        vm: spec,
        key: kek,
        generation: checked.generation,
    };
    let job = ReceiveJob { begin: Some(Box::new(arrival)), ..checked.received() };
    destination.put_job(vm.id, run.task.id, JobSpec::Receive(job)).await?;
    let departure = Departure {
        session: new.sealed(&here.key_box, &vm.host_name, how)?,
        to: reached,
        // No guest stands still.
        downtime_milliseconds: DOWNTIME_DEFAULT,
        bytes_per_second: run.pace().bytes_per_second,
        compresses: false,
        at_rest: true,
        suspended: false,
    };
    let job = SendJob { begin: Some(Box::new(departure)), ..checked.sent() };
    source.put_job(vm.id, run.task.id, JobSpec::Send(job.clone())).await?;
    Ok(job)
}

/// Follows both hosts until all disks are at the destination. The source is told when the task is given another rate.
async fn follow(run: &Run<'_>, elsewhere: Elsewhere, mut begun: SendJob) -> Result<(), StepError> {
    let Elsewhere { from, to, .. } = elsewhere;
    let (mut source, mut destination) =
        (run.host_state(from, None).await?, run.host_state(to, None).await?);
    // As it was told; the task may have been given another one since.
    let told = begun.begin.as_ref().and_then(|departure| departure.bytes_per_second);
    let mut pace = CopyPace { bytes_per_second: told, paused: false };
    let mut wait = OtherHostWait::default();
    loop {
        show(run, &source);
        let (here, there) = (at_source(run, &source), at_destination(run, &destination));
        if here == Said::Done && there == Said::Done {
            return Ok(());
        }
        match judge(&here, &there, wait.is_over()) {
            Verdict::GoesOn => {}
            Verdict::Waits => wait.begin(),
            Verdict::Ends(error) => return Err(error),
        }
        run.check_cancelled()?;
        tokio::select! {
            newer = run.host_state(from, Some(&source)) => source = newer?,
            newer = run.host_state(to, Some(&destination)) => destination = newer?,
            () = wait.over() => {}
            () = run.another_pace(pace) => {
                pace = run.pace();
                may_send(run)?;
                tell_pace(run, from, &mut begun, pace).await?;
            }
        }
    }
}

/// Publishes how much the source has sent.
fn show(run: &Run<'_>, source: &HostState) {
    let sending = job_of(run, source, JobKind::Send).and_then(|job| job.migration);
    if let Some(seen) = sending {
        let total = seen.sent.saturating_add(seen.remaining);
        run.show(Progress { done: seen.sent, total });
    }
}

/// What the destination says of the disks that it has made.
async fn made(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    checked: &CheckedClone,
) -> Result<Vec<DiskState>, StepError> {
    let state = run.host_state(elsewhere.to, None).await?;
    let seen = state_of(&state, run.vm_id).map(|seen| &seen.disks);
    let of = |copy: &ArrivingCopy| {
        let there = Some(copy.datastore.datastore);
        let is_it = |it: &&DiskState| it.disk == copy.disk && it.datastore == there;
        seen?.iter().find(is_it).cloned()
    };
    checked.copies.iter().map(of).collect::<Option<Vec<_>>>().ok_or_else(|| {
        // Its agent has restarted since, and has none of them: they are sent again.
        let detail =
            format!("the other host does not say what it has made for '{}'", run.task.target);
        StepError::Again(Problem::new(ErrorCode::Unreachable, detail))
    })
}

/// Has both hosts end an attempt. The destination has not been asked to keep anything.
async fn leave(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    checked: &CheckedClone,
) -> Result<(), StepError> {
    stop_sending(run, elsewhere, checked).await?;
    forget(run, elsewhere, checked).await
}

/// Has the source read the disks no more.
async fn stop_sending(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    checked: &CheckedClone,
) -> Result<(), StepError> {
    let state = run.host_state(elsewhere.from, None).await?;
    if job_of(run, &state, JobKind::Send).is_none() {
        return Ok(());
    }
    let job = JobSpec::Send(checked.sent());
    let source = agent_of(run, elsewhere.from)?;
    absent_is_fine(source.cancel_job(run.vm_id, run.task.id, job).await)
}

/// Has the destination remove what it has made.
async fn forget(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    checked: &CheckedClone,
) -> Result<(), StepError> {
    let destination = agent_of(run, elsewhere.to)?;
    let job = JobSpec::Receive(checked.received());
    absent_is_fine(destination.cancel_job(run.vm_id, run.task.id, job).await)?;
    absent_is_fine(destination.unregister_vm(run.vm_id).await)
}

/// Undoes [`send`]. What a destination that does not answer has left it or its monitor removes.
pub(in crate::tasks) async fn take_back(
    run: &Run<'_>,
    elsewhere: Elsewhere,
) -> Result<(), StepError> {
    let checked = checked(run)?;
    stop_sending(run, elsewhere, &checked).await?;
    match forget(run, elsewhere, &checked).await {
        Err(StepError::Again(problem)) => {
            tracing::warn!(vm = %run.vm_id, %problem, "the other host may keep what it received for a while");
            Ok(())
        }
        forgotten => forgotten,
    }
}

/// Whether the destination has the VM, as it has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Yes,
    /// It does not, and will not get the VM by this task.
    No,
}

/// Has the destination keep the disks, and records that the VM is there. `how` is told of it.
pub(in crate::tasks) async fn switch(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    how: &str,
) -> Result<(), StepError> {
    // Recorded by a server that has restarted since.
    if run.vm().await?.host != elsewhere.to {
        let checked = checked(run)?;
        let job = JobSpec::Receive(checked.received());
        let destination = agent_of(run, elsewhere.to)?;
        match destination.commit_job(run.vm_id, run.task.id, job).await {
            Ok(()) => {}
            Err(problem) if is_silence(&problem) => return Err(problem.into()),
            Err(problem) => match give_up(run, elsewhere, &checked).await? {
                Kept::Yes => {}
                Kept::No => return Err(StepError::Final(problem)),
            },
        }
        record(run, elsewhere, &checked, how).await?;
    }
    if let Err(error) = change_host::arrive(run).await {
        let problem = error.as_problem();
        tracing::info!(vm = %run.vm_id, %problem, "the VM that has arrived is left to the host's monitor");
    }
    Ok(())
}

/// Has the destination give the VM up, unless it has it.
async fn give_up(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    checked: &CheckedClone,
) -> Result<Kept, StepError> {
    let destination = agent_of(run, elsewhere.to)?;
    let job = JobSpec::Receive(checked.received());
    match destination.cancel_job(run.vm_id, run.task.id, job).await {
        Ok(()) => Ok(Kept::No),
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(Kept::No),
        Err(problem) if problem.code == ErrorCode::WrongState => Ok(Kept::Yes),
        // It is not decided: the host is asked again.
        Err(problem) => Err(StepError::Again(problem)),
    }
}

/// Records that the VM is at the destination, and ready.
async fn record(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    checked: &CheckedClone,
    how: &str,
) -> Result<(), StepError> {
    let made: Option<Vec<DiskState>> = run.output(SENDS);
    let made = made.ok_or_else(|| internal("the task does not say what the other host made"))?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let vm = run.vm().await?;
    let clear = in_the_clear(&vm, &run.disks().await?);
    let mut write = run.store().write().await?;
    for disk in &made {
        set_image(&mut write, disk, true).await?;
    }
    placements::set_owner(&mut write, vm.id, elsewhere.to, checked.generation).await?;
    vms::set_lifecycle(&mut write, vm.id, Lifecycle::Ready).await?;
    vms::set_seen(&mut write, vm.id, Power::Off, None).await?;
    let host = store_hosts::find(&mut write, &elsewhere.to.to_string()).await?;
    let host = host.map_or_else(|| elsewhere.to.to_string(), |host| host.name);
    let detail = format!("on host '{host}', policy '{}'{how}{clear}", vm.policy_name);
    let (kind, actor) = ("vm.created", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Undoes [`switch`], if the destination says that it does not have the VM. Where it does, this goes on to the end.
pub(in crate::tasks) async fn switch_back(
    run: &Run<'_>,
    elsewhere: Elsewhere,
    how: &str,
) -> Result<(), StepError> {
    let checked = checked(run)?;
    match give_up(run, elsewhere, &checked).await? {
        Kept::No => Ok(()),
        Kept::Yes => {
            if run.vm().await?.host != elsewhere.to {
                record(run, elsewhere, &checked, how).await?;
            }
            remove_sent(run, elsewhere).await?;
            let detail = format!(
                "VM '{0}' is complete on the host that it is for, and nothing of it is left on the one that made it: it could not be undone any more, and can be used (vmseal vm delete {0} removes it)",
                run.task.target
            );
            Err(wrong_state(detail))
        }
    }
}

/// Has the source delete the disks of which the destination has copies, and forget the VM.
pub(in crate::tasks) async fn remove_sent(
    run: &Run<'_>,
    elsewhere: Elsewhere,
) -> Result<(), StepError> {
    let checked = checked(run)?;
    end_at_source(run, elsewhere.from, checked.sent(), Some(&checked.former)).await
}
