//! A switch whose outcome is not known. The destination was asked to let the guest go, or may have been, and says alone whether the
//! guest runs there. Where it does not answer, the guest goes on nowhere, and the task asks until it does.
//!
//! Where the hosts share the disks, the lease beside these would keep the source from going on after the destination. Of disks that
//! were copied each host has a lease of its own, which says nothing of the other host: there only the destination's answer does, or the
//! word of an operator ([`crate::operation::Operation::MigrateVm`], `given_up`). A destination that has rebooted after its guest ran says
//! that it has taken the copies over, and that it has no such VM: that decides nothing.

use vmseal_api::host::{JobSpec, Power, VmState};
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Ends, agent_of, checked, ends, finish, record};
use crate::operation::Operation;
use crate::operation::migration::CheckedMigration;
use crate::store::{evacuations, hosts, placements, tasks};
use crate::tasks::run::{Run, StepError, state_of, wrong_state};
use crate::tasks::step::Awaited;

/// What the destination says of the guest.
enum Answer {
    Runs,
    /// It does not, and this task will not have it run there.
    DoesNotRun,
    /// It says neither.
    Unknown(Problem),
}

/// Undoes [`super::switch`], which is possible only while the guest has not gone on at the destination. Otherwise it goes on to the end.
pub(super) async fn switch_back(run: &Run<'_>) -> Result<(), StepError> {
    let (ends, checked) = (ends(run)?, checked(run)?);
    if is_decided(run, &ends, &checked).await? {
        return Ok(());
    }
    let answer = match run.vm().await?.host == ends.to {
        // It has said so before.
        true => Answer::Runs,
        false => ask(run, &ends, &checked).await,
    };
    match answer {
        // What is left there is removed as the transfer is undone.
        Answer::DoesNotRun => Ok(()),
        Answer::Runs => Err(stay_there(run, &ends, &checked).await?),
        Answer::Unknown(problem) => match is_given_up(run).await? {
            true => give_up(run, &ends, &checked).await,
            false => Err(StepError::Again(problem)),
        },
    }
}

/// Has the destination give the guest up, unless it runs there.
async fn ask(run: &Run<'_>, ends: &Ends, checked: &CheckedMigration) -> Answer {
    let destination = match agent_of(run, ends.to) {
        Ok(destination) => destination,
        // That it is not in the inventory any more says nothing of the guest.
        Err(problem) => return Answer::Unknown(problem),
    };
    let job = JobSpec::Receive(checked.received());
    match destination.cancel_job(run.vm_id, run.task.id, job).await {
        Ok(()) => Answer::DoesNotRun,
        Err(problem) if problem.code == ErrorCode::NotFound => Answer::DoesNotRun,
        Err(problem) if problem.code == ErrorCode::WrongState => {
            match lost(run, ends.to, &problem, !checked.copies.is_empty()).await {
                Ok(None) => Answer::Runs,
                Ok(Some(lost)) => Answer::Unknown(lost),
                Err(silence) => Answer::Unknown(silence),
            }
        }
        Err(problem) => Answer::Unknown(problem),
    }
}

/// Why a host that has refused to give a guest up does not run it all the same: it does not list the VM. It has rebooted since the guest
/// ran there, or, of an earlier version, has rebooted without the datastore of its copies. With `copies` also one whose agent says only that
/// the guest has ended ([`is_lost`]). None where it has the VM.
pub(in crate::tasks) async fn lost(
    run: &Run<'_>,
    host: HostId,
    refusal: &Problem,
    copies: bool,
) -> Result<Option<Problem>, Problem> {
    let state = run.host_state(host, None).await?;
    let seen = state_of(&state, run.vm_id);
    if seen.is_some() && !(copies && is_lost(seen)) {
        return Ok(None);
    }
    let Problem { code, detail, .. } = ended(run);
    Ok(Some(Problem::new(code, format!("{detail}. The host says: {}", refusal.detail))))
}

/// Whether a host that a guest was sent to with copies of its disks does not run it, and does not say what was made of these: it was rebooted,
/// or its agent has restarted since the guest has ended.
pub(in crate::tasks) fn is_lost(seen: Option<&VmState>) -> bool {
    seen.is_none_or(|seen| seen.power == Power::Off && seen.disks.is_empty())
}

/// What is known of a guest that such a host has lost.
pub(in crate::tasks) fn ended(run: &Run<'_>) -> Problem {
    let detail = format!(
        "the host that VM '{}' was sent to answers, and does not run it: the host or its agent has restarted since. The guest may have run there until then, and written to its disks there",
        run.task.target
    );
    Problem::new(ErrorCode::WrongState, detail)
}

/// Whether [`give_up`] has been recorded, by a server that has ended since: the destination is not asked any more. It may say that the
/// guest runs there, and its monitor ends that.
async fn is_decided(
    run: &Run<'_>,
    ends: &Ends,
    checked: &CheckedMigration,
) -> Result<bool, StepError> {
    let mut read = run.store().read().await?;
    let taken = evacuations::generation(&mut read, run.vm_id, ends.to).await?;
    Ok(taken == Some(checked.generation))
}

/// Records that the guest runs at the destination, and has the source forget it. Returns why the task ends so.
async fn stay_there(
    run: &Run<'_>,
    ends: &Ends,
    checked: &CheckedMigration,
) -> Result<StepError, StepError> {
    record(run, ends, checked, None).await?;
    if let Err(error) = finish(run).await {
        tracing::warn!(vm = %run.vm_id, error = %error.as_problem(), "the source's monitor removes what is left of it");
    }
    let detail = format!(
        "VM '{}' runs on the other host: its migration could not be cancelled any more",
        run.task.target
    );
    Ok(wrong_state(detail))
}

/// Whether an operator has said that the guest does not go on at the destination; it may have been said since the task was read.
pub(in crate::tasks) async fn is_given_up(run: &Run<'_>) -> Result<bool, StepError> {
    let mut read = run.store().read().await?;
    let task = tasks::get(&mut read, &run.task.id.to_string()).await?;
    let given_up = |task: &tasks::Task| {
        matches!(
            task.operation,
            Operation::MigrateVm { given_up: true, .. }
                | Operation::ReceiveVm { given_up: true, .. }
        )
    };
    Ok(task.as_ref().is_some_and(given_up))
}

/// Records that the guest does not go on at the destination: should that answer again, it ends and forgets the VM.
async fn give_up(run: &Run<'_>, ends: &Ends, checked: &CheckedMigration) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    // The destination may have taken the lease of its copies, with the generation that was checked: this one is later, and so is the next,
    // so that a next migration there finds that these copies are none of its own.
    let later = checked.generation.saturating_add(1);
    placements::set_owner(&mut write, run.vm_id, ends.from, later).await?;
    if hosts::find(&mut write, &ends.to.to_string()).await?.is_some() {
        evacuations::insert(&mut write, run.vm_id, ends.to, checked.generation).await?;
    }
    write.commit().await?;
    tracing::warn!(vm = %run.vm_id, host = %ends.to, "the destination is given up: the guest goes on at the source");
    Ok(())
}

/// The host that the switch waits for.
pub(super) async fn destination(run: &Run<'_>) -> Option<Awaited> {
    let ends = ends(run).ok()?;
    let (name, from) = (name_of(run, ends.to).await?, name_of(run, ends.from).await?);
    let advice = format!(
        "VM '{}' goes on nowhere until host '{name}' has said whether it runs there. If that host is off for good, or has restarted and what the VM has done there may be lost, have the VM go on at host '{from}' as it was when it was sent: vmseal task cancel {} --force",
        run.task.target, run.task.id
    );
    Some(Awaited { host: ends.to, name, advice })
}

/// The host that the end of a migration waits for.
pub(super) async fn source(run: &Run<'_>) -> Option<Awaited> {
    let ends = ends(run).ok()?;
    let (name, to) = (name_of(run, ends.from).await?, name_of(run, ends.to).await?);
    let advice = format!(
        "VM '{}' runs on host '{to}': what is left of it on host '{name}' is removed when that answers",
        run.task.target
    );
    Some(Awaited { host: ends.from, name, advice })
}

async fn name_of(run: &Run<'_>, host: HostId) -> Option<String> {
    let mut read = run.store().read().await.ok()?;
    let found = hosts::find(&mut read, &host.to_string()).await.ok()?;
    found.map(|host| host.name)
}
