//! A VM that is off or suspended and arrives: what is recorded before its host is asked to keep it, and its registration there afterwards.

use vmseal_api::host::{DiskState, VmState};
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::hosts::keys::Purpose;
use crate::store::disks::Disk;
use crate::tasks::mirror_vm::set_image;
use crate::tasks::run::{self, Run, StepError, state_of};

/// Records the images that its host has made. No guest holds them there: an agent that restarts when it has the VM knows nothing of
/// them, and is told by the inventory. Where the arrival is undone, the rows go.
pub(super) async fn note_images(run: &Run<'_>, host: HostId) -> Result<(), StepError> {
    let state = run.host_state(host, None).await?;
    // One that has restarted says when it is asked whether it has the VM.
    let seen = state_of(&state, run.vm_id).filter(|_| run.job_in(&state).is_some());
    let Some(seen) = seen else { return Ok(()) };
    let disks = run.disks().await?;
    let made = disks.iter().map(|disk| image_of(seen, disk)).collect::<Option<Vec<_>>>();
    let Some(made) = made else {
        let detail =
            format!("the host does not say yet what it has made for '{}'", run.task.target);
        return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
    };
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    for image in made {
        set_image(&mut write, image, true).await?;
    }
    Ok(write.commit().await?)
}

/// Has the host know the VM, and its key, where its agent has restarted. What that still needs is the host's monitor's.
pub(super) async fn register(run: &Run<'_>) {
    let registered = async {
        run::register(run).await?;
        let vm = run.vm().await?;
        let _unchanged = run.hosts().lock(vm.id).await;
        Ok::<_, StepError>(run.hosts().deliver(&vm, Purpose::Encrypt).await?)
    };
    if let Err(error) = registered.await {
        let problem = error.as_problem();
        tracing::info!(vm = %run.vm_id, %problem, "the VM that has arrived is left to the host's monitor");
    }
}

/// What a host has made of a disk where it is to be.
fn image_of<'s>(seen: &'s VmState, disk: &Disk) -> Option<&'s DiskState> {
    let there = Some(disk.datastore.datastore);
    seen.disks.iter().find(|made| made.disk == disk.id && made.datastore == there)
}
