//! Makes a new VM of a backup, beside the one that was backed up, whatever that is now: running, encrypted or decrypted since, or
//! deleted. It is another VM, with an id, a key, addresses and a TPM of its own. Nothing is encrypted anew, so its disks keep the data
//! keys (DEKs) that are in the backup.

use std::collections::BTreeMap;

use vmseal_api::hardware::{TPM_DISK, TPM_DISK_SIZE};
use vmseal_api::host::backup::BackupManifest;
use vmseal_api::host::version::RESTORE_AS;
use vmseal_api::host::{Allocation, Device, DiskFacts, DiskLimits, DiskRole, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, VmId, check_name};
use vmseal_api::model::{BackupState, Lifecycle, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::RestoreBackup;

use super::reader::{Reader, require_found};
use super::{OfVm, define, manifest_of, replicas, require_places, shared_keys, without_memory};
use crate::operation::{Definition, Operation};
use crate::services::caller::{Caller, Privilege};
use crate::services::create_vm::provider_of;
use crate::services::vms::begin;
use crate::services::{Outcome, Services, hardware, nics, room};
use crate::store::backups::{self, Backup};
use crate::store::vms::Vm;
use crate::store::{Write, disks, policies};
use crate::tasks::adopt_vm;
use crate::tasks::backups::digest_of;

/// Makes a new VM of a backup, which this host reads. The request was [checked](check).
pub(super) async fn restore(
    services: &Services,
    caller: &Caller,
    (of, backup, by): (&OfVm, &Backup, Reader<'_>),
    request: &RestoreBackup,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    if by.id != backup.host {
        require_found(services, backup, by).await?;
    }
    // The backups of the other VM are read by the host that has read them.
    let backup = &Backup { host: by.id, host_name: by.name.to_owned(), ..backup.clone() };
    let manifest = manifest_of(services, backup).await?;
    if manifest.vm.key.is_some() {
        caller.require(Privilege::Clone)?;
        // That host gets the key of a VM which another one runs.
        if of.vm.as_ref().is_some_and(|vm| vm.host != backup.host) {
            caller.require(Privilege::Migrate)?;
        }
    }
    require_feature(services, backup)?;
    if is_encrypted(&manifest) {
        shared_keys::require_of_origin(services, of)?;
    }
    let (machine, memory) = (&manifest.vm.hardware, manifest.vm.memory);
    hardware::examine(services, backup.host, &backup.host_name, machine, memory).await?;
    let mut write = services.store.write().await?;
    // It may have been deleted meanwhile.
    let known = backups::get(&mut write, backup.id).await?;
    if known.is_none_or(|known| known.state != BackupState::Ready) {
        return Err(Problem::not_found("backup", &backup.name));
    }
    let (vm, operation) = reserve(services, &mut write, backup, &manifest, request).await?;
    room::check_memory(services, vm.host, &vm.host_name, vm.memory)?;
    let made = disks::of_vm(&mut write, vm.id).await?;
    require_places(services, &mut write, &vm, &made).await?;
    replicas::require(services, backup, &made)?;
    let mut begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    if let Outcome::Planned(plan) = &mut begun {
        plan.steps.insert(0, room::understood(&vm, &made));
        plan.warnings.extend(room::examine(services, &vm, &made).await?);
        plan.warnings.extend(warnings(of, backup, &manifest, &vm));
    }
    Ok(begun)
}

/// Checks what can be checked without the backup.
pub(super) fn check(request: &RestoreBackup, new: &str) -> Result<(), Problem> {
    if request.name.is_some() {
        let what = "is for a VM that was deleted and is made again: a new one has the name that it is restored as";
        return Err(Problem::invalid("name", what));
    }
    check_name(new).map_err(|error| Problem::invalid("new_vm", error.to_string()))
}

fn require_feature(services: &Services, backup: &Backup) -> Result<(), Problem> {
    if services.hosts.view(backup.host).has(RESTORE_AS) {
        return Ok(());
    }
    services.hosts.connected(backup.host)?;
    let detail = format!(
        "the agent of host '{}' cannot restore a backup as another VM: upgrade vmseal there",
        backup.host_name
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// Whether disks in a backup are encrypted; that of a TPM, which is not restored, always is.
pub(super) fn is_encrypted(manifest: &BackupManifest) -> bool {
    manifest.disks.iter().any(|disk| disk.tpm.is_none() && disk.facts != DiskFacts::Raw)
}

/// Writes the rows of the new VM; returns it, and what makes it.
pub(crate) async fn reserve(
    services: &Services,
    write: &mut Write<'_>,
    backup: &Backup,
    manifest: &BackupManifest,
    request: &RestoreBackup,
) -> Result<(Vm, Operation), Problem> {
    let found = define(write, backup, manifest, request).await?;
    let policy = policies::find(write, &found.policy.to_string()).await?;
    let policy = policy.ok_or_else(|| Problem::not_found("policy", &found.policy_name))?;
    let provider = provider_of(services, write, &policy).await?;
    let cards = nics::place_alike(write, found.spec.nics().cloned()).await?;
    let (mut restored, mut devices) = (BTreeMap::new(), Vec::new());
    for of in found.spec.disks().filter(|disk| disk.role != DiskRole::Tpm) {
        let disk = DiskSpec { disk: DiskId::new(), ..of.clone() };
        restored.insert(disk.disk, of.disk);
        devices.push(Device::Disk(disk));
    }
    // Whether what its TPM kept is in the backup is no matter: it gets a new one.
    let mut hardware = manifest.vm.hardware.clone();
    hardware.tpm &= policy.encryption;
    if hardware.tpm {
        devices.extend(found.spec.disks().next().map(tpm_beside).map(Device::Disk));
    }
    devices.extend(cards.into_iter().map(Device::Nic));
    let spec = VmSpec { vm: VmId::new(), key: None, hardware, devices, ..found.spec };
    let definition = Definition { spec, ..found };
    let (provider, lifecycle) = (provider.map(|provider| provider.id), Lifecycle::Creating);
    let vm = Vm { provider, lifecycle, ..adopt_vm::row(&definition) };
    adopt_vm::insert_rows(write, &definition, &vm).await?;
    let operation = Operation::RestoreNewVm {
        vm: vm.id,
        backup: backup.id,
        disks: restored,
        manifest: digest_of(manifest),
    };
    Ok((vm, operation))
}

/// Defines the disk of the new VM's TPM, on the datastore of its first disk.
fn tpm_beside(first: &DiskSpec) -> DiskSpec {
    DiskSpec {
        disk: DiskId::new(),
        name: TPM_DISK.to_owned(),
        size: TPM_DISK_SIZE,
        // The first disk may be in the clear.
        encrypted: true,
        role: DiskRole::Tpm,
        allocation: Allocation::Thin,
        limits: DiskLimits::default(),
        cache: None,
        replica: None,
        facts: None,
        ..first.clone()
    }
}

/// What the dry run warns of: what the new VM shares with the other one, and what it does not get.
fn warnings(of: &OfVm, backup: &Backup, manifest: &BackupManifest, vm: &Vm) -> Vec<String> {
    let mut warnings = Vec::new();
    if is_encrypted(manifest) {
        warnings.push(format!(
            "the new VM has a key-encryption key of its own, and the data keys that are in backup '{}'. VM '{}' has the same data keys, unless it was encrypted, moved or deeply recrypted since; what either of them reads goes through buffers, until vmseal vm recrypt --deep gives it data keys of its own. For the new VM: vmseal vm recrypt {} --deep",
            backup.name,
            of.name(),
            vm.name
        ));
    }
    let sealed = "what the other one has sealed cannot be opened, and BitLocker and the like ask for their recovery keys";
    if vm.hardware.tpm {
        warnings.push(format!("the new VM has a new TPM, which is empty: {sealed}"));
    } else if manifest.vm.hardware.tpm {
        warnings.push(format!("the new VM has no TPM, as its policy does not encrypt: {sealed}"));
    }
    let lacks = manifest.contents().lacks;
    let lacks = lacks.iter().filter(|it| it.role != DiskRole::Tpm);
    warnings
        .extend(lacks.map(|it| format!("'{}' is not in it, and the VM will not have it", it.name)));
    warnings.extend(without_memory(manifest));
    warnings.push(format!(
        "the guest is what it was, with its host name, SSH host keys and machine id, and its network cards have new addresses: change it before it meets the guest of VM '{}'",
        of.name()
    ));
    warnings
}
