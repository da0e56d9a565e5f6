//! What another control plane is told of a VM that is to go there.

use vmseal_api::host::{Attachment, DiskRole};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{ArrivingVm, BeginArrival, DiskOfArrival, SourceHost, SuspendedMemory};

use super::snapshots;
use crate::hosts::Hosts;
use crate::store::disks::Disk;
use crate::store::vms::Vm;
use crate::store::{Store, disks, memory_generations, nics};

/// What the VM is to get there.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its policy, by name or id.
    pub policy: String,
    /// Its host, by name or id.
    pub host: Option<String>,
    /// Its datastore, by name or id.
    pub datastore: Option<String>,
    /// Whether it is off, and stays so.
    pub at_rest: bool,
    /// Whether it is suspended, and stays so.
    pub suspended: bool,
    /// Whether memory is compressed.
    pub compresses: bool,
}

/// Describes a VM to another control plane.
///
/// # Errors
/// `unreachable`: its host has not answered since this server was started. `wrong-state`: a snapshot is not complete. The inventory's.
pub async fn describe(
    store: &Store,
    hosts: &Hosts,
    vm: &Vm,
    wanted: Wanted,
    generation: u64,
) -> Result<BeginArrival, Problem> {
    let Some(here) = hosts.view(vm.host).description.clone() else {
        let detail =
            format!("host '{}' has not answered yet since this server was started", vm.host_name);
        return Err(Problem::new(ErrorCode::Unreachable, detail));
    };
    let mut read = store.read().await?;
    let disks = disks::of_vm(&mut read, vm.id).await?;
    let nics = nics::of_vm(&mut read, vm.id).await?;
    let snapshots = snapshots::of_vm(&mut read, vm).await?;
    let suspended = match wanted.suspended {
        true => {
            let generation = memory_generations::expected(&mut read, vm.id).await?;
            Some(SuspendedMemory { generation })
        }
        false => None,
    };
    drop(read);
    let of = |disk: &Disk| DiskOfArrival {
        id: disk.id,
        name: disk.name.clone(),
        size: disk.size,
        encrypted: disk.encrypted,
        role: disk.role,
    };
    let Wanted { policy, host, datastore, at_rest, compresses, .. } = wanted;
    Ok(BeginArrival {
        vm: ArrivingVm {
            id: vm.id,
            name: vm.name.clone(),
            description: vm.description.clone(),
            labels: vm.labels.clone(),
            autostart: vm.autostart,
            migration_encryption: vm.migration_encryption,
            on_drain: vm.on_drain,
            has_key: vm.key.is_some(),
            vcpus: vm.vcpus,
            memory: vm.memory,
            hardware: vm.hardware.clone(),
            disks: disks.iter().filter(|disk| !disk.detached).map(of).collect(),
            nics,
            snapshots,
            kept: None,
        },
        policy,
        host,
        datastore,
        source: SourceHost {
            name: vm.host_name.clone(),
            vmseal: here.vmseal.clone(),
            accelerator: here.accelerator.clone(),
            qemu: here.qemu.clone(),
            features: here.features.clone(),
        },
        generation,
        at_rest,
        suspended,
        compresses,
    })
}

/// Whether any of some disks is one that firmware or a TPM keeps its data on, which not every agent copies.
#[must_use]
pub fn keeps_state(mut roles: impl Iterator<Item = DiskRole>) -> bool {
    roles.any(|role| role.attachment() != Attachment::Disk)
}
