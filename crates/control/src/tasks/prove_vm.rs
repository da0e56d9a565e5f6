//! Has a VM's host read the VM's files and report whether they are encrypted.
//!
//! ```text
//! prepare ─► prove ─► record: the report in the inventory, and an event with its digest
//! ```
//! A report that the host's agent has not signed with its key is refused.
//! Nothing of the VM changes. A proof that is cancelled ends at the host.

use async_trait::async_trait;
use vmseal_api::host::{JobKind, JobSpec, ProveJob};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::proof::SignedReport;

use super::job::{follow, put};
use super::run::{Run, StepError, absent_is_fine, internal};
use super::start_vm::prepare;
use super::step::{Limit, Output, Step};
use crate::hosts::reports;
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::proofs;
use crate::store::vms::Vm;

/// The steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProveVmStep {
    Prepare,
    Prove,
    Record,
}

pub(crate) const STEPS: &[&dyn Step] =
    &[&ProveVmStep::Prepare, &ProveVmStep::Prove, &ProveVmStep::Record];

#[async_trait]
impl Step for ProveVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Prove => "prove",
            Self::Record => "record-proof",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Prepare => "register and deliver the key",
            Self::Prove => "read the files of the VM",
            Self::Record => "record the report",
        }
    }

    fn needs_key(&self) -> bool {
        matches!(self, Self::Prepare)
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Prepare => Some(Limit::Provider),
            Self::Prove => Some(Limit::Proof),
            Self::Record => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Prepare => prepare(run).await.map(Output::from),
            Self::Prove => prove(run).await.map(|report| Output::of(&report)),
            Self::Record => record(run).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Prove => {
                let vm = run.vm().await?;
                let (agent, job) = (run.agent(&vm)?, job(run).await?);
                absent_is_fine(agent.cancel_job(vm.id, run.task.id, job).await)
            }
            _ => Ok(()),
        }
    }
}

/// The job of the task: of all disks that are made.
async fn job(run: &Run<'_>) -> Result<JobSpec, StepError> {
    let Operation::ProveVm { all, seed, .. } = run.task.operation else {
        return Err(internal("the task is not to prove anything"));
    };
    let disks = run.disks().await?;
    let made = disks.iter().filter(|disk| disk.facts.is_some() && !disk.detached);
    let disks = made.map(|disk| disk.id).collect();
    Ok(JobSpec::Prove(ProveJob { disks, all, seed }))
}

async fn prove(run: &Run<'_>) -> Result<SignedReport, StepError> {
    let vm = run.vm().await?;
    put(run, &vm, job(run).await?).await?;
    follow(run, &vm, JobKind::Prove).await?;
    let agent = run.agent(&vm)?;
    match agent.job(vm.id, run.task.id).await {
        Ok(status) => {
            let report = status.proof.ok_or_else(|| internal("the host's proof has no report"))?;
            // None in tests alone: a simulated host in this process has no certificate.
            if let Some(shown) = agent.certificate() {
                check(&vm, &report, &shown)?;
            }
            Ok(*report)
        }
        // The agent has restarted since: it reads the files again.
        Err(problem) if problem.code == ErrorCode::NotFound => Err(StepError::Again(problem)),
        Err(problem) => Err(problem.into()),
    }
}

/// Refuses a report that is not signed with the key of the certificate that the host's agent shows.
fn check(vm: &Vm, report: &SignedReport, shown: &[u8]) -> Result<(), StepError> {
    reports::check(report, shown).map_err(|why| {
        let host = &vm.host_name;
        let detail = format!(
            "the report of host '{host}' on VM '{}' is refused: {why}. Make sure that vmseal's own agent runs there (vmseal host show {host}), and prove the VM again",
            vm.name
        );
        StepError::Final(Problem::new(ErrorCode::Damaged, detail))
    })
}

async fn record(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let signed: SignedReport = run
        .output(ProveVmStep::Prove.name())
        .ok_or_else(|| internal("the task has lost the report"))?;
    let report = signed.read().map_err(|error| internal(&format!("the host's report: {error}")))?;
    if (report.vm, report.task) != (vm.id, run.task.id) {
        return Err(internal("the host's report is of another VM or task"));
    }
    let mut write = run.store().write().await?;
    if proofs::keep(&mut write, vm.id, run.task.id, &signed).await? {
        // Last, as a reason has names from a datastore in it.
        let detail = format!("{}; report {}", report.summary(), proofs::digest_of(&signed));
        let (kind, actor) = ("vm.proved", run.task.actor.as_str());
        write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    }
    Ok(write.commit().await?)
}
