//! Starts VMs after their hosts have rebooted, if their users want that. A host's monitor records that the starts are due
//! when it sees another boot of the machine; here each becomes a task, which waits for the VM's key.

use std::sync::Arc;
use std::time::Duration;

use vmseal_api::problem::{ErrorCode, Problem};

use super::Engine;
use crate::operation::Operation;
use crate::store::vms;

/// How often to look again at VMs whose start was refused, because a task works on them or their host is emptied.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Makes tasks of starts that are due, until it is dropped.
pub async fn run(engine: Arc<Engine>) {
    let mut changes = engine.environment.context.store.changes();
    loop {
        changes.mark_unchanged();
        if let Err(problem) = begin_due(&engine).await {
            tracing::error!(%problem, "VMs could not be started after a reboot of their host");
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            Ok(()) = changes.changed() => {}
        }
    }
}

/// Makes a task of each start that is due.
pub(crate) async fn begin_due(engine: &Arc<Engine>) -> Result<(), Problem> {
    let store = &engine.environment.context.store;
    let due = vms::starts_due(&mut *store.read().await?).await?;
    for vm in due {
        let mut write = store.write().await?;
        vms::set_start_done(&mut write, vm.id).await?;
        let operation = Operation::AutostartVm { vm: vm.id };
        match Engine::record(&mut write, operation, &vm.name, crate::SELF).await {
            Ok(task) => {
                // The start is recorded once: either it is due, or it is a task.
                write.commit().await?;
                engine.begin(task);
            }
            // A task works on the VM, or its host is emptied: later.
            Err(problem) if problem.code == ErrorCode::WrongState => {}
            Err(problem) => return Err(problem),
        }
    }
    Ok(())
}
