//! Moves a VM that runs, is off or suspended, to a host of another control plane ([`crate::tasks::receive_vm`] has the other side).
//!
//! ```text
//!   check ─► announce ─► transfer ───────────────► switch ──────────────► finish ─► destroy-key ─► remove-rows
//!             the arrival  as within a control       the other control      the VM is forgotten here
//!             is prepared  plane; the guest stands   plane is asked until
//!                          still                     it says what it is
//!                    │                               commit step
//!                    └── undone: the guest goes on here; the arrival is given up
//! ```
//! Of one that is off or suspended the transfer copies the disks ([`at_rest`]); the steps are the same. Until its rows are removed this
//! task has it, so that nothing starts it here.

mod at_rest;

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use vmseal_api::host::{Departure, HostAgent, HostState, JobSpec, MIGRATION_KEY_LEN, SendJob};
use vmseal_api::id::{DiskId, HostId, MigrationId, RemoteId, TaskId};
use vmseal_api::migration::{DOWNTIME_DEFAULT, Migrated, MigrationPhase};
use vmseal_api::model::Lifecycle;
use vmseal_api::pace::CopyPace;
use vmseal_api::passphrase::{SealedPassphrase, passphrase_info};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{ArrivalSession, ArrivalShown, ArrivalState};
use vmseal_secret::{SecretBytes, sealed_box};

use super::cause::{OtherHostWait, Said, Verdict, at_source, judge};
use super::watched::{self, Watched};
use super::{
    NewSession, STREAMS, agent_of, end_at_source, has_sent, left, nonce, running_disks, standstill,
    tell_pace,
};
use crate::hosts::{is_silence, keys};
use crate::operation::Operation;
use crate::operation::migration::SWITCH;
use crate::remotes::{RemoteControlPlane, Wanted, describe};
use crate::store::events::NewEvent;
use crate::store::remotes::Remote;
use crate::store::{placements, remotes, vms};
use crate::tasks::delete_vm::destroy_keys;
use crate::tasks::run::{Run, StepError, absent_is_fine, internal, wrong_state};
use crate::tasks::step::{Limit, Output, Step, WaitPolicy};

/// How often the other control plane is asked while the VM is sent: it hears so that the source is there.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AwayStep {
    Check,
    Announce,
    Transfer,
    Switch,
    Finish,
    DestroyKey,
    RemoveRows,
}

pub(crate) const STEPS: &[&dyn Step] = &[
    &AwayStep::Check,
    &AwayStep::Announce,
    &AwayStep::Transfer,
    &AwayStep::Switch,
    &AwayStep::Finish,
    &AwayStep::DestroyKey,
    &AwayStep::RemoveRows,
];

#[async_trait]
impl Step for AwayStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Announce => "announce",
            // As `watched` knows them.
            Self::Transfer => "transfer",
            Self::Switch => SWITCH,
            Self::Finish => "finish",
            Self::DestroyKey => "destroy-key",
            Self::RemoveRows => "remove-rows",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Check => "check the VM",
            Self::Announce => "have the other control plane prepare for it, with a key of its own",
            Self::Transfer => "send its disks, and the memory of a guest that runs",
            Self::Switch => {
                "have the other control plane take it: there its guest goes on, if it runs"
            }
            Self::Finish => "end its processes at the former host, and delete its disks there",
            Self::DestroyKey => "destroy its former key",
            Self::RemoveRows => "remove it from this inventory",
        }
    }

    fn needs_key(&self) -> bool {
        matches!(self, Self::DestroyKey)
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Switch)
    }

    fn insists(&self) -> bool {
        // The guest stands still, and may run there already.
        matches!(self, Self::Switch)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::Check | Self::Announce | Self::Transfer | Self::Switch => WaitPolicy::NONE,
            Self::Finish | Self::DestroyKey | Self::RemoveRows => WaitPolicy::BOTH,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::DestroyKey => Some(Limit::Provider),
            _ => None,
        }
    }

    fn is_undone_by_monitor(&self) -> bool {
        // The other control plane gives an arrival up whose source it does not hear.
        matches!(self, Self::Announce)
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Check => check(run).await.map(|checked| Output::of(&checked)),
            Self::Announce => announce(run).await.map(Output::from),
            Self::Transfer => transfer(run).await.map(|watched| Output::of(&watched)),
            Self::Switch => {
                let migrated = switch(run).await?;
                Ok(migrated.map_or_else(Output::default, |migrated| Output::of(&migrated)))
            }
            Self::Finish => {
                watched::of(run).show(run, MigrationPhase::Finishing);
                finish(run).await.map(Output::from)
            }
            Self::DestroyKey => destroy_keys(run).await.map(Output::from),
            Self::RemoveRows => remove_rows(run).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Announce => call_off(run).await,
            Self::Transfer => stay(run).await,
            Self::Switch => switch_back(run).await,
            // Past the commit step, or nothing was done.
            Self::Check | Self::Finish | Self::DestroyKey | Self::RemoveRows => Ok(()),
        }
    }
}

/// What the steps after the first one need.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Checked {
    disks: Vec<DiskId>,
    generation: u64,
    began: Timestamp,
}

impl Checked {
    fn sent(&self) -> SendJob {
        SendJob { disks: self.disks.clone(), copies: self.disks.clone(), begin: None }
    }

    /// How many connections the session has.
    fn streams(&self) -> u16 {
        STREAMS.saturating_add(u16::try_from(self.disks.len()).unwrap_or(u16::MAX))
    }
}

/// From where the VM goes where.
struct Route {
    from: HostId,
    remote: RemoteId,
    arrival: TaskId,
    encrypted: bool,
    downtime_milliseconds: u32,
    at_rest: bool,
    suspended: bool,
    compresses: bool,
}

fn route(run: &Run<'_>) -> Result<Route, StepError> {
    match run.task.operation {
        Operation::MigrateAway {
            from,
            remote,
            arrival,
            encrypted,
            downtime_milliseconds,
            at_rest,
            suspended,
            compresses,
            ..
        } => Ok(Route {
            from,
            remote,
            arrival,
            encrypted,
            downtime_milliseconds: downtime_milliseconds.unwrap_or(DOWNTIME_DEFAULT),
            at_rest,
            suspended,
            compresses,
        }),
        _ => Err(internal("the task does not say where the VM goes")),
    }
}

fn checked(run: &Run<'_>) -> Result<Checked, StepError> {
    let known = run.output(AwayStep::Check.name());
    known.ok_or_else(|| internal("the task does not say which disks it moves"))
}

/// The other control plane of a task, as the inventory has it.
async fn known(run: &Run<'_>, remote: RemoteId) -> Result<Option<Remote>, StepError> {
    let mut read = run.store().read().await?;
    Ok(remotes::find(&mut read, &remote.to_string()).await?)
}

/// The name of the other control plane, where a task has one.
pub(in crate::tasks) async fn remote_of(run: &Run<'_>) -> Option<String> {
    let Operation::MigrateAway { remote, .. } = run.task.operation else { return None };
    known(run, remote).await.ok().flatten().map(|remote| remote.name)
}

async fn remote(run: &Run<'_>) -> Result<Arc<dyn RemoteControlPlane>, StepError> {
    let known = known(run, route(run)?.remote).await?;
    let known = known.ok_or_else(|| wrong_state("the remote was removed meanwhile".to_owned()))?;
    Ok(run.context.remotes.of(&known)?)
}

/// Checks the preconditions.
async fn check(run: &Run<'_>) -> Result<Checked, StepError> {
    Watched::default().show(run, MigrationPhase::Connecting);
    let Route { from, at_rest, suspended, .. } = route(run)?;
    let disks = match at_rest {
        true => at_rest::disks(run, from, suspended).await?,
        false => running_disks(run, from).await?,
    };
    left::require_nothing(run, &disks).await?;
    let disks = disks.iter().map(|disk| disk.id).collect();
    let mut read = run.store().read().await?;
    let generation = placements::next_generation(&mut read, run.vm_id).await?;
    Ok(Checked { disks, generation, began: Timestamp::now() })
}

/// What became of an arrival that is given up, for people.
fn cancelled(arrival: ArrivalShown) -> StepError {
    let problem = arrival
        .problem
        .unwrap_or_else(|| Problem::new(ErrorCode::Cancelled, "it was cancelled there"));
    let detail = format!("the other control plane does not take it: {}", problem.detail);
    StepError::Final(Problem::new(problem.code, detail))
}

/// Has the other control plane prepare for the VM.
async fn announce(run: &Run<'_>) -> Result<(), StepError> {
    let (route, checked, remote) = (route(run)?, checked(run)?, remote(run).await?);
    let Operation::MigrateAway { host, datastore, policy, at_rest, suspended, compresses, .. } =
        &run.task.operation
    else {
        return Err(internal("the task does not say where the VM goes"));
    };
    let wanted = Wanted {
        policy: policy.clone(),
        host: host.clone(),
        datastore: datastore.clone(),
        at_rest: *at_rest,
        suspended: *suspended,
        compresses: *compresses,
    };
    let vm = run.vm().await?;
    let told = describe(run.store(), run.hosts(), &vm, wanted, checked.generation).await?;
    loop {
        let arrival = remote.begin_arrival(route.arrival, &told).await?;
        match arrival.state {
            ArrivalState::Prepared => return Ok(()),
            ArrivalState::Preparing => run.check_cancelled()?,
            _ => return Err(cancelled(arrival)),
        }
        // The other side waits before it answers so; one that does not is not asked without a pause.
        sleep(ASK_EVERY).await;
    }
}

/// Undoes [`announce`]. One that does not answer is asked again, as an agent is: until it has given the arrival up, the VM's name and ids are taken
/// there, and it cannot be sent there once more.
async fn call_off(run: &Run<'_>) -> Result<(), StepError> {
    let arrival = route(run)?.arrival;
    let called_off = match remote(run).await {
        Ok(remote) => remote.cancel_arrival(arrival).await.map(drop),
        Err(error) => Err(error.problem()),
    };
    match called_off {
        Err(problem) if is_silence(&problem) => Err(problem.into()),
        Err(problem) => {
            tracing::warn!(vm = %run.vm_id, %problem, "the other control plane gives the arrival up later");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Has the guest sent, unless it is.
async fn transfer(run: &Run<'_>) -> Result<Watched, StepError> {
    let (route, checked) = (route(run)?, checked(run)?);
    let source = run.host_state(route.from, None).await?;
    if is_sent(run, &route, &source) {
        left::require_no_dump(run, &source, &checked.sent())?;
        // Sent before the server restarted; the other control plane knows whether all of it has come.
        return Ok(Watched::late(run, &source));
    }
    if route.at_rest {
        at_rest::prepare(run).await?;
    }
    // A session serves one attempt; what an earlier one has left is removed.
    let agent = agent_of(run, route.from)?;
    let job = JobSpec::Send(checked.sent());
    absent_is_fine(agent.cancel_job(run.vm_id, run.task.id, job).await)?;
    let sent = begin(run, &route, &checked, &*agent).await?;
    follow(run, &route, sent).await
}

/// Whether the source has sent all: its guest stands still, or the disks of the VM that is off are at the other host.
fn is_sent(run: &Run<'_>, route: &Route, source: &HostState) -> bool {
    if route.at_rest { at_rest::is_sent(run, source) } else { has_sent(run, source) }
}

/// Tells both sides of a new session. Returns what the source was told.
async fn begin(
    run: &Run<'_>,
    route: &Route,
    checked: &Checked,
    agent: &dyn HostAgent,
) -> Result<SendJob, StepError> {
    let remote = remote(run).await?;
    let here = agent.describe().await?;
    let about = remote.about().await?;
    let key = SecretBytes::random(MIGRATION_KEY_LEN).map_err(|error| crate::internal(&error))?;
    let (migration, nonce) = (MigrationId::new(), nonce()?);
    let public = keys::public_key(&about.passphrase_box, "of the other control plane")?;
    let info = passphrase_info(&route.arrival.to_string());
    let sealed = sealed_box::seal(&public, &info, &key).map_err(|error| crate::internal(&error))?;
    let sealed = STANDARD.encode(sealed.as_bytes());
    let (streams, encrypted) = (checked.streams(), route.encrypted);
    let told = ArrivalSession {
        migration,
        nonce,
        key: SealedPassphrase { passphrase_box: about.passphrase_box, sealed },
        streams,
        encrypted,
    };
    let to = remote.begin_session(route.arrival, &told).await.map_err(of_session)?.address;
    let vm = run.vm().await?;
    let new = NewSession { vm: vm.id, migration, nonce, key, apart: vm.key.is_some() };
    let departure = Departure {
        session: new.sealed(&here.key_box, &vm.host_name, (encrypted, streams))?,
        to,
        downtime_milliseconds: route.downtime_milliseconds,
        bytes_per_second: run.pace().bytes_per_second,
        compresses: route.compresses,
        at_rest: route.at_rest,
        suspended: route.suspended,
    };
    let job = SendJob { begin: Some(Box::new(departure)), ..checked.sent() };
    agent.put_job(vm.id, run.task.id, JobSpec::Send(job.clone())).await?;
    Ok(job)
}

/// Why a session did not begin. If the other server has restarted since it said what its keys are sealed to, it is asked again.
fn of_session(problem: Problem) -> StepError {
    let is_to_box = problem.field.as_deref().is_some_and(|it| it.ends_with(".passphrase_box"));
    if is_to_box && problem.code == ErrorCode::WrongState {
        return StepError::Again(problem);
    }
    problem.into()
}

/// Follows the source until its guest stands still with all sent, and asks the other control plane from time to time. The source
/// is told when the task is given another rate.
async fn follow(run: &Run<'_>, route: &Route, mut sent: SendJob) -> Result<Watched, StepError> {
    let remote = remote(run).await?;
    let mut watched = Watched::default();
    let mut source = run.host_state(route.from, None).await?;
    // As it was told; the task may have been given another one since.
    let told = sent.begin.as_ref().and_then(|departure| departure.bytes_per_second);
    let mut pace = CopyPace { bytes_per_second: told, paused: false };
    let mut asking = tokio::time::interval(ASK_EVERY);
    asking.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut there, mut wait) = (Said::Works, OtherHostWait::default());
    loop {
        watched.note(run, &source);
        left::require_no_dump(run, &source, &sent)?;
        if is_sent(run, route, &source) {
            return Ok(watched);
        }
        match judge(&at_source(run, &source), &there, wait.is_over()) {
            Verdict::GoesOn => {}
            Verdict::Waits => wait.begin(),
            Verdict::Ends(error) => return Err(error),
        }
        run.check_cancelled()?;
        tokio::select! {
            newer = run.host_state(route.from, Some(&source)) => source = newer?,
            _ = asking.tick() => there = arrives(remote.arrival(route.arrival).await, there),
            () = wait.over() => {}
            () = run.another_pace(pace) => {
                pace = run.pace();
                tell_pace(run, route.from, &mut sent, pace).await?;
            }
        }
    }
}

/// What the other control plane says of its host. One that does not answer has said what it said `before`: the hosts need it at the end
/// only.
fn arrives(answer: Result<ArrivalShown, Problem>, before: Said) -> Said {
    match answer {
        Ok(arrival) if arrival.state == ArrivalState::Cancelled || arrival.problem.is_some() => {
            let of_other_host = arrival.problem.as_ref().is_some_and(|it| it.of_other_host);
            Said::Failed(Problem { of_other_host, ..cancelled(arrival).problem() })
        }
        Ok(_) => Said::Works,
        Err(problem) => {
            tracing::info!(%problem, "the other control plane does not answer while a VM is sent");
            before
        }
    }
}

/// Undoes [`transfer`]: the guest goes on here.
async fn stay(run: &Run<'_>) -> Result<(), StepError> {
    let (route, checked) = (route(run)?, checked(run)?);
    let source = agent_of(run, route.from)?;
    let job = JobSpec::Send(checked.sent());
    absent_is_fine(source.cancel_job(run.vm_id, run.task.id, job).await)?;
    let state = run.host_state(route.from, None).await?;
    run.hosts().until_shown(route.from, &state).await;
    Ok(())
}

/// Has the other control plane let the guest go. Returns how it went, where that is known. Until it says which, the guest runs there
/// or will not: this step is done again.
async fn switch(run: &Run<'_>) -> Result<Option<Migrated>, StepError> {
    let (route, checked, watched) = (route(run)?, checked(run)?, watched::of(run));
    watched.show(run, MigrationPhase::SwitchOver);
    let remote = remote(run).await?;
    let arrived = match remote.commit_arrival(route.arrival).await {
        Ok(arrival) => match arrival.state {
            ArrivalState::Running => arrival,
            ArrivalState::Cancelled => return Err(cancelled(arrival)),
            _ => return Err(undecided(&arrival)),
        },
        // Whatever it says: that is not what became of the guest.
        Err(problem) => return Err(StepError::Again(problem)),
    };
    let (committed, now) = (Instant::now(), Timestamp::now());
    let watched = watched.with_placed(arrived.placed);
    let said = match route.at_rest {
        true => None,
        false => standstill::asked(run, (route.from, None), committed).await,
    };
    // Of one that is off no guest stood still, and no memory was sent.
    let migrated = watched.ended(checked.began, now, true, said).filter(|_| !route.at_rest);
    leave(run).await?;
    Ok(migrated)
}

/// Records that the VM runs elsewhere: nothing has it run here any more, whatever becomes of this task.
async fn leave(run: &Run<'_>) -> Result<(), StepError> {
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    vms::set_lifecycle(&mut write, run.vm_id, Lifecycle::Deleting).await?;
    Ok(write.commit().await?)
}

/// The other control plane does not know yet what becomes of the guest.
fn undecided(arrival: &ArrivalShown) -> StepError {
    let detail = match &arrival.problem {
        Some(problem) => format!("it is not decided there yet: {}", problem.detail),
        None => "it is not decided there yet".to_owned(),
    };
    StepError::Again(Problem::new(ErrorCode::Unreachable, detail))
}

/// Undoes [`switch`], which is possible only while the guest does not run there. Where it does, it goes on to the end.
async fn switch_back(run: &Run<'_>) -> Result<(), StepError> {
    let route = route(run)?;
    let Some(known) = known(run, route.remote).await? else {
        // An operator has said that it is gone for good.
        return keep(run, &route).await;
    };
    let remote = run.context.remotes.of(&known).map_err(StepError::Again)?;
    let arrival = remote.cancel_arrival(route.arrival).await.map_err(StepError::Again)?;
    match arrival.state {
        ArrivalState::Cancelled => keep(run, &route).await,
        ArrivalState::Running => {
            leave(run).await?;
            finish(run).await?;
            destroy_keys(run).await?;
            remove_rows(run).await?;
            let detail = format!(
                "VM '{}' is at remote '{}': its migration could not be cancelled any more",
                run.task.target, known.name
            );
            Err(wrong_state(detail))
        }
        _ => Err(undecided(&arrival)),
    }
}

/// Records that the VM stays here. The host there may have taken the lease of its copies, with the generation that was checked: the next one is
/// later, so that a next migration there finds that these copies are none of its own.
async fn keep(run: &Run<'_>, route: &Route) -> Result<(), StepError> {
    let generation = checked(run)?.generation;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    placements::set_owner(&mut write, run.vm_id, route.from, generation).await?;
    Ok(write.commit().await?)
}

/// Has the source end the VM's processes, delete its images, and forget it.
async fn finish(run: &Run<'_>) -> Result<(), StepError> {
    // The inventory has the disks where they were.
    let (from, former) = (route(run)?.from, Some(&[][..]));
    let _unchanged = run.hosts().lock(run.vm_id).await;
    if route(run)?.suspended {
        at_rest::give_up_memory(run, from).await?;
    }
    end_at_source(run, from, checked(run)?.sent(), former).await
}

/// Forgets the VM.
async fn remove_rows(run: &Run<'_>) -> Result<(), StepError> {
    let name = remote_of(run).await.unwrap_or_else(|| "a former remote".to_owned());
    let migrated: Option<Migrated> = run.output(AwayStep::Switch.name());
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let Some(vm) = run.find_vm().await? else { return Ok(()) };
    let how = if route(run)?.encrypted { "encrypted" } else { "not encrypted" };
    let went = migrated.map(|migrated| format!(": {migrated}")).unwrap_or_default();
    let off = match (route(run)?.at_rest, route(run)?.suspended) {
        (_, true) => ", while it was suspended",
        (true, false) => ", while it was off",
        (false, false) => "",
    };
    let mut write = run.store().write().await?;
    let stays = left::backups_of(&mut write, &vm).await?;
    let stays = stays.map(|stays| format!("; {stays}")).unwrap_or_default();
    let host = &vm.host_name;
    let detail = format!("from host '{host}' to remote '{name}', {how}{off}{went}{stays}");
    vms::delete(&mut write, vm.id).await?;
    let (kind, actor) = ("vm.migrated", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// The problem of a failure after the guest has gone on at the other control plane.
pub(in crate::tasks) fn unfinished(target: &str, cause: &Problem) -> Problem {
    let detail = format!(
        "VM '{target}' is at the other control plane, and what is left of it here could not be removed: {cause}. It does not start here any more: delete it (vmseal vm delete {target})"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
