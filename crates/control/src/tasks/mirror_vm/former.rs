//! The images that disks had before they got copies: they are removed, and it is told what has become of them.

use std::convert::identity;

use vmseal_api::former_image::{Discard, FormerFate, FormerImage};
use vmseal_api::host::{DropSourcesJob, JobKind, JobSpec};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::ErrorCode;

use super::{MirrorVmStep, copied, is_told, known_to_host, put};
use crate::hosts::keys::Purpose;
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::tasks::Task;
use crate::store::vms::Vm;
use crate::tasks::job::follow_as;
use crate::tasks::run::{Run, StepError, register};
use crate::tasks::start_vm::locked;
use crate::tasks::step::Step;

/// The event that says what has become of former images.
const KIND: &str = "vm.former-images-removed";

/// Has the host overwrite and remove the former images. Returns what has become of all that the task has had removed.
pub(super) async fn drop_sources(run: &Run<'_>) -> Result<Vec<FormerImage>, StepError> {
    register(run).await?;
    let vm = run.vm().await?;
    let mut former: Vec<FormerImage> = run.output(MirrorVmStep::Clear.name()).unwrap_or_default();
    let in_place = run.task.operation.is_in_place();
    // The disks are put into use, and nothing is overwritten.
    let held: fn(CopyPace) -> CopyPace = if in_place { not_paused } else { identity };
    let dropped = remove_sources(run, &vm, held).await?;
    let silent = if in_place { vec![] } else { silent(run, &dropped).await? };
    for image in dropped.into_iter().chain(silent) {
        // Where no disk was copied since, the host has one job for both steps.
        if !former.contains(&image) {
            former.push(image);
        }
    }
    tell(run, &vm, &former).await?;
    let state = run.host_state(vm.host, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    Ok(former)
}

/// The disks that were copied, and of whose former images the host says nothing.
async fn silent(run: &Run<'_>, said: &[FormerImage]) -> Result<Vec<FormerImage>, StepError> {
    let (known, copied) = (run.disks().await?, copied(run)?);
    let is_said = |disk: DiskId| said.iter().any(|image| image.disk == disk);
    let silent = known.into_iter().filter(|disk| copied.contains(&disk.id) && !is_said(disk.id));
    let image = |disk: Disk| FormerImage {
        disk: disk.id,
        name: disk.name,
        fate: FormerFate::NotKnown,
        discard: Discard::NotKnown,
    };
    Ok(silent.map(image).collect())
}

/// The pace of what a task does at its rate also while it is paused: it is the copying that waits then.
pub(super) fn not_paused(pace: CopyPace) -> CopyPace {
    CopyPace { paused: false, ..pace }
}

/// Of all disks, at what `held` makes of the task's pace: where there is none, there is nothing to do. The host opens the header of each copy
/// before: an agent that has restarted gets the VM's key for that.
pub(super) async fn remove_sources(
    run: &Run<'_>,
    vm: &Vm,
    held: fn(CopyPace) -> CopyPace,
) -> Result<Vec<FormerImage>, StepError> {
    let disks = run.disks().await?;
    let disks: Vec<DiskId> = disks.iter().filter(|it| !it.detached).map(|it| it.id).collect();
    if disks.is_empty() {
        return Ok(Vec::new());
    }
    let job = JobSpec::DropSources(DropSourcesJob { disks });
    put(run, vm, job.clone()).await?;
    match follow_as(run, vm, JobKind::DropSources, held).await {
        Err(StepError::Final(problem)) if problem.code == ErrorCode::Locked => {
            known_to_host(run).await?;
            run.hosts().deliver(vm, Purpose::Open).await.map_err(locked)?;
            put(run, vm, job).await?;
            follow_as(run, vm, JobKind::DropSources, held).await.map(drop)?;
        }
        followed => followed.map(drop)?,
    }
    let state = run.host_state(vm.host, None).await?;
    let job = run.job_in(&state).filter(|job| job.kind == JobKind::DropSources);
    Ok(job.map(|job| job.former.clone()).unwrap_or_default())
}

/// Writes the event that says what has become of former images; once, as this step may be repeated.
async fn tell(run: &Run<'_>, vm: &Vm, former: &[FormerImage]) -> Result<(), StepError> {
    if former.is_empty() {
        return Ok(());
    }
    let mut write = run.store().write().await?;
    let by = format!("as task {}", run.task.id);
    if is_told(run, &mut write, KIND, &vm.name, &by).await? {
        return Ok(());
    }
    let told: Vec<_> = former.iter().map(ToString::to_string).collect();
    let detail = format!("{}; {by}", told.join("; "));
    let (actor, target) = (run.task.actor.as_str(), vm.name.as_str());
    write.event(NewEvent { kind: KIND, actor, target, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Whether a task uses its copies, and has the former images overwritten: that is slowed and paused as the copying before.
pub(crate) fn removes(task: &Task) -> bool {
    let operation = &task.operation;
    operation.mirrors_disks()
        && !operation.is_in_place()
        && task.step == MirrorVmStep::DropSource.name()
}

/// What has become of the former images that a task has had removed so far.
pub(in crate::tasks) fn of_task(task: &Task) -> Vec<FormerImage> {
    if !task.operation.mirrors_disks() {
        return Vec::new();
    }
    // The later step tells of the earlier one's, too.
    let steps = [MirrorVmStep::DropSource, MirrorVmStep::Clear];
    let output = steps.iter().find_map(|step| task.outputs.get(step.name()));
    output.and_then(|value| serde_json::from_value(value.clone()).ok()).unwrap_or_default()
}
