//! The operations of tasks, in their stored form.

mod claim;
mod copies;
mod devices;
pub(crate) mod migration;
mod power;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmseal_api::boot::BootDevice;
use vmseal_api::host::survey::KeptMemory;
use vmseal_api::host::{
    DatastoreSpec, Device, KeyReference, NicSpec, SealedKey, SnapshotSpec, VmSpec,
};
use vmseal_api::id::{
    BackupId, DatastoreId, DiskId, DumpId, HostId, PolicyId, ProviderId, RemoteId, SnapshotId,
    TaskId, VmId,
};
use vmseal_api::model::Lifecycle;
use vmseal_api::transfer::ExportFormat;

pub use self::claim::Claim;
pub use self::copies::{Copies, Elsewhere, SentDisks, Temporary};
pub use self::power::PowerChange;

/// A VM that is to be adopted, as the inventory will have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    /// As its host is told of it.
    pub spec: VmSpec,
    /// Its host.
    pub host: HostId,
    /// That host's name.
    pub host_name: String,
    /// Its policy.
    pub policy: PolicyId,
    /// That policy's name.
    pub policy_name: String,
    /// The key that the inventory has of it: the VM is known, and gets the key of the definition in place of this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<KeyReference>,
    /// The disks and network cards that the inventory has of a VM that it knows, and that gets those of the definition in place of
    /// them; none where it keeps its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces_devices: Option<Vec<Device>>,
    /// The snapshots that the inventory has of a VM that it knows, and that gets more of them; none where it gets none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces_snapshots: Option<Vec<SnapshotSpec>>,
    /// The memory that its snapshots keep, as its host has found it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memories: Vec<KeptMemory>,
}

/// What a task does; stored with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Operation {
    /// Creates a VM whose rows are reserved.
    CreateVm {
        /// The VM.
        vm: VmId,
        /// The documents for cloud-init, packed, and sealed to the current run of the host's agent: nobody else can
        /// open them, nor can the agent after a restart.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cloud_init: Option<SealedKey>,
        /// What its disks are copied from, where it is the clone of another VM.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        copies: Option<Copies>,
    },
    /// Starts a VM that is off.
    StartVm {
        /// The VM.
        vm: VmId,
        /// What its firmware tries first this time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        boot_once: Option<BootDevice>,
    },
    /// Starts a VM because its host has rebooted.
    AutostartVm {
        /// The VM.
        vm: VmId,
    },
    /// Shuts a VM's guest down and starts it again.
    RebootVm {
        /// The VM.
        vm: VmId,
        /// How long the guest may take to shut down, in seconds.
        timeout_seconds: u32,
    },
    /// Adds a disk, whose row is there, to a VM.
    AddDisk {
        /// The VM.
        vm: VmId,
        /// The disk.
        disk: DiskId,
    },
    /// Removes a disk of a VM.
    RemoveDisk {
        /// The VM.
        vm: VmId,
        /// The disk.
        disk: DiskId,
    },
    /// Makes a disk of a VM longer.
    GrowDisk {
        /// The VM.
        vm: VmId,
        /// The disk.
        disk: DiskId,
        /// Its size after that, in bytes.
        size: u64,
    },
    /// Takes a snapshot of a VM, whose row is there.
    TakeSnapshot {
        /// The VM.
        vm: VmId,
        /// The snapshot.
        snapshot: SnapshotId,
        /// Whether the guest's file systems are frozen meanwhile, if its agent answers.
        quiesce: bool,
    },
    /// Has the disks of a VM hold what a snapshot keeps.
    RevertSnapshot {
        /// The VM.
        vm: VmId,
        /// The snapshot.
        snapshot: SnapshotId,
        /// Whether its guest runs afterwards; its power is cut first if it runs. Otherwise the VM is off or suspended.
        #[serde(default)]
        running: bool,
        /// Whether the saved memory of a VM that is suspended is given up; else such a VM is refused.
        #[serde(default)]
        discard_memory: bool,
    },
    /// Deletes a snapshot that is marked as being deleted.
    DeleteSnapshot {
        /// The VM.
        vm: VmId,
        /// The snapshot.
        snapshot: SnapshotId,
    },
    /// Has a VM's host read the VM's files and report whether they are encrypted.
    ProveVm {
        /// The VM.
        vm: VmId,
        /// Whether every byte is read.
        all: bool,
        /// What decides which parts of a file are in the sample.
        seed: u64,
    },
    /// Writes a core dump of a VM's guest, whose row is there.
    DumpVm {
        /// The VM.
        vm: VmId,
        /// The dump.
        dump: DumpId,
        /// The file of the host that it is decrypted to as well.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to: Option<PathBuf>,
    },
    /// Decrypts a core dump to a file of the VM's host.
    DecryptDump {
        /// The VM.
        vm: VmId,
        /// The dump.
        dump: DumpId,
        /// The file.
        to: PathBuf,
    },
    /// Removes a core dump.
    DeleteDump {
        /// The VM.
        vm: VmId,
        /// The dump.
        dump: DumpId,
    },
    /// Backs up a VM. The rows of the backup and of its snapshot are there.
    BackUpVm {
        /// The VM.
        vm: VmId,
        /// The backup.
        backup: BackupId,
        /// The snapshot that lasts as long as the backup is written.
        snapshot: SnapshotId,
        /// Whether the guest's file systems are frozen for its instant.
        quiesce: bool,
    },
    /// Reads a backup, and checks it.
    VerifyBackup {
        /// The VM.
        vm: VmId,
        /// The backup.
        backup: BackupId,
    },
    /// Restores the disks of a VM that is off from a backup.
    RestoreBackup {
        /// The VM.
        vm: VmId,
        /// The backup.
        backup: BackupId,
        /// The disks that are restored.
        disks: Vec<DiskId>,
    },
    /// Restores a VM that was deleted from a backup. Its rows are there.
    RestoreDeletedVm {
        /// The VM.
        vm: VmId,
        /// The backup.
        backup: BackupId,
        /// Its disks.
        disks: Vec<DiskId>,
        /// The SHA-256 of what the manifest says that its rows are made of.
        manifest: String,
    },
    /// Makes a new VM of a backup of another one, which may be deleted. Its rows are there.
    RestoreNewVm {
        /// The new VM.
        vm: VmId,
        /// The backup.
        backup: BackupId,
        /// The disks that were backed up, by those that are restored from them.
        disks: BTreeMap<DiskId, DiskId>,
        /// The SHA-256 of what the manifest says that its rows are made of.
        manifest: String,
    },
    /// Removes a backup, and with it keys that nothing else needs. Its VM may be deleted.
    DeleteBackup {
        /// The VM.
        vm: VmId,
        /// The backup.
        backup: BackupId,
    },
    /// Gives a VM that is off a TPM: adds the disk of its key, whose row is there.
    AddTpm {
        /// The VM.
        vm: VmId,
        /// The disk.
        disk: DiskId,
    },
    /// Takes its TPM from a VM that is off, with what the TPM keeps.
    RemoveTpm {
        /// The VM.
        vm: VmId,
        /// The disk of its key.
        disk: DiskId,
    },
    /// Adds a network card to a VM.
    AddNic {
        /// The VM.
        vm: VmId,
        /// The card.
        nic: NicSpec,
        /// Its place among the cards of the VM.
        position: usize,
    },
    /// Removes a network card of a VM.
    RemoveNic {
        /// The VM.
        vm: VmId,
        /// The card, to be put back if the VM does not let it go.
        nic: NicSpec,
        /// Its place among the cards of the VM.
        position: usize,
    },
    /// Stops a VM.
    StopVm {
        /// The VM.
        vm: VmId,
        /// Cut the power.
        force: bool,
        /// How long the guest may take, in seconds.
        timeout_seconds: u32,
    },
    /// Saves the memory of a VM's guest, and stops the VM.
    SuspendVm {
        /// The VM.
        vm: VmId,
    },
    /// Writes a disk of a VM that is off, or what a snapshot keeps of one, to a file of its host.
    ExportDisk {
        /// The VM.
        vm: VmId,
        /// The disk.
        disk: DiskId,
        /// The file.
        to: PathBuf,
        /// The format of the file.
        format: ExportFormat,
        /// The passphrase of a LUKS2 file, sealed to the current run of the host's agent: nobody else can open
        /// it, nor can the agent after a restart.
        passphrase: Option<SealedKey>,
        /// What the disk held then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        snapshot: Option<SnapshotId>,
    },
    /// Gives a VM that is off another KEK.
    RecryptVm {
        /// The VM.
        vm: VmId,
        /// Its key when the task begins.
        old: KeyReference,
        /// The provider of the new key.
        provider: ProviderId,
    },
    /// Encrypts the disks of a VM that are not, and gives it a policy that encrypts.
    EncryptVm {
        /// The VM.
        vm: VmId,
        /// Its policy after that.
        policy: PolicyId,
        /// The provider of its key; none where it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        provider: Option<ProviderId>,
        /// Whether each disk is converted in its own file, while the VM is off: there is room for no copy.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        in_place: bool,
        /// The disks of the guest's; none means all. What is no disk of the guest's is encrypted in any case.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        disks: Vec<DiskId>,
    },
    /// Decrypts the disks of a VM, and gives it a policy that does not encrypt; or decrypts some disks of a VM that keeps its key
    /// and its policy.
    DecryptVm {
        /// The VM.
        vm: VmId,
        /// Its policy after that.
        policy: PolicyId,
        /// Whether each disk is converted in its own file, while the VM is off: there is room for no copy.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        in_place: bool,
        /// The disks; none means all, and that the VM gives up its key.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        disks: Vec<DiskId>,
    },
    /// Gives the encrypted disks of a VM new data keys. Its KEK stays.
    DeepRecryptVm {
        /// The VM.
        vm: VmId,
        /// Whether each disk is converted in its own file, while the VM is off: there is room for no copy.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        in_place: bool,
        /// The disks; none means all that are encrypted.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        disks: Vec<DiskId>,
    },
    /// Moves disks of a VM to another datastore of its host. Encrypted ones get new data keys; the VM's KEK stays.
    MoveVm {
        /// The VM.
        vm: VmId,
        /// The disks, those that are there already among them.
        disks: Vec<DiskId>,
        /// Whether no disk was named, and these are all that the VM had; tasks of older versions do not say that they are.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        all: bool,
        /// The datastores that they were on.
        from: Vec<DatastoreId>,
        /// The datastore that they get.
        to: DatastoreSpec,
    },
    /// Moves a running VM to another host.
    MigrateVm {
        /// The VM.
        vm: VmId,
        /// Its host.
        from: HostId,
        /// The host that it goes to.
        to: HostId,
        /// Whether what is sent is encrypted.
        encrypted: bool,
        /// The datastore for copies of the disks on datastores that the other host does not have; none where there are no such
        /// disks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        datastore: Option<DatastoreId>,
        /// The longest that the guest is to stand still while the rest of its memory is sent, in milliseconds; none means
        /// [`vmseal_api::migration::DOWNTIME_DEFAULT`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        downtime_milliseconds: Option<u32>,
        /// Whether memory is compressed where that is faster.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        compresses: bool,
        /// Whether an operator has said that the other host is gone for good, or has lost the guest: its answer is not waited for.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        given_up: bool,
    },
    /// Moves a VM that runs, or is off, to a host of another control plane.
    MigrateAway {
        /// The VM.
        vm: VmId,
        /// Its host.
        from: HostId,
        /// The other control plane.
        remote: RemoteId,
        /// The task there that receives it.
        arrival: TaskId,
        /// The host there, as it was named; none leaves the choice to the other control plane.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<String>,
        /// The datastore there, as it was named; none leaves the choice to the other control plane.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        datastore: Option<String>,
        /// The policy there.
        policy: String,
        /// Whether what is sent is encrypted.
        encrypted: bool,
        /// The longest that the guest is to stand still while the rest of its memory is sent, in milliseconds; none means
        /// [`vmseal_api::migration::DOWNTIME_DEFAULT`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        downtime_milliseconds: Option<u32>,
        /// Whether it is off: its disks are sent alone.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        at_rest: bool,
        /// Whether it is suspended: the memory of its guest is sent with its disks. Then it is at rest, too.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        suspended: bool,
        /// Whether memory is compressed where that is faster.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        compresses: bool,
    },
    /// Receives a VM that runs, or is off, from another control plane. Its rows are there.
    ReceiveVm {
        /// The VM.
        vm: VmId,
        /// The host that it gets.
        host: HostId,
        /// The generation of its placement there.
        generation: u64,
        /// Whether the other control plane has asked to let the guest go: from then on this one decides.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        committed: bool,
        /// Whether it is off: its disks come alone.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        at_rest: bool,
        /// Whether it is suspended: the memory of its guest comes with its disks. Then it is at rest, too.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        suspended: bool,
        /// Whether an operator has said that what its guest has done here until the host rebooted may be lost.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        given_up: bool,
    },
    /// Gives a VM that is off or suspended to another host, which has all of its datastores.
    ChangeHost {
        /// The VM.
        vm: VmId,
        /// Its host.
        from: HostId,
        /// The host that it goes to.
        to: HostId,
    },
    /// Gives a VM to another host, which has its pools, from one that does not answer.
    EvacuateVm {
        /// The VM.
        vm: VmId,
        /// Its host.
        from: HostId,
        /// The host that it goes to.
        to: HostId,
        /// Whether it is started there.
        starts: bool,
    },
    /// Removes a VM that is off and marked as being deleted.
    DeleteVm {
        /// The VM.
        vm: VmId,
        /// Its lifecycle before.
        was: Lifecycle,
    },
    /// Adopts a VM that is on a datastore.
    AdoptVm {
        /// The VM.
        vm: VmId,
        /// What it will be here.
        definition: Box<Definition>,
    },
    /// Written by another version of vmseal and unreadable for this one: left unchanged.
    #[serde(skip)]
    Unreadable {
        /// Its name.
        kind: String,
        /// Its VM, if that can be read.
        vm: Option<VmId>,
        /// The unreadable text.
        why: String,
    },
}

impl Operation {
    /// Its name.
    #[must_use]
    pub fn kind(&self) -> &str {
        match self {
            Self::CreateVm { copies: Some(_), .. } => "vm.clone",
            Self::CreateVm { .. } => "vm.create",
            Self::StartVm { .. } => "vm.start",
            Self::AutostartVm { .. } => "vm.autostart",
            Self::RebootVm { .. } => "vm.reboot",
            Self::AddDisk { .. } => "disk.add",
            Self::RemoveDisk { .. } => "disk.remove",
            Self::GrowDisk { .. } => "disk.resize",
            Self::TakeSnapshot { .. } => "snapshot.create",
            Self::RevertSnapshot { .. } => "snapshot.revert",
            Self::DeleteSnapshot { .. } => "snapshot.delete",
            Self::ProveVm { .. } => "vm.prove",
            Self::DumpVm { .. } => "vm.dump",
            Self::DecryptDump { .. } => "dump.decrypt",
            Self::DeleteDump { .. } => "dump.delete",
            Self::BackUpVm { .. } => "backup.create",
            Self::VerifyBackup { .. } => "backup.verify",
            Self::RestoreBackup { .. }
            | Self::RestoreDeletedVm { .. }
            | Self::RestoreNewVm { .. } => "backup.restore",
            Self::DeleteBackup { .. } => "backup.delete",
            Self::AddTpm { .. } => "tpm.add",
            Self::RemoveTpm { .. } => "tpm.remove",
            Self::AddNic { .. } => "nic.add",
            Self::RemoveNic { .. } => "nic.remove",
            Self::StopVm { .. } => "vm.stop",
            Self::SuspendVm { .. } => "vm.suspend",
            Self::ExportDisk { .. } => "disk.export",
            Self::RecryptVm { .. } => "vm.recrypt",
            Self::EncryptVm { .. } => "vm.encrypt",
            Self::DecryptVm { .. } => "vm.decrypt",
            Self::DeepRecryptVm { .. } => "vm.recrypt-deep",
            Self::MoveVm { .. } => "vm.move",
            Self::MigrateVm { .. } | Self::MigrateAway { .. } | Self::ChangeHost { .. } => {
                "vm.migrate"
            }
            Self::ReceiveVm { .. } => "vm.arrive",
            Self::EvacuateVm { .. } => "vm.evacuate",
            Self::DeleteVm { .. } => "vm.delete",
            Self::AdoptVm { .. } => "vm.adopt",
            Self::Unreadable { kind, .. } => kind,
        }
    }

    /// Its VM.
    #[must_use]
    pub fn vm(&self) -> Option<VmId> {
        match self {
            Self::CreateVm { vm, .. }
            | Self::StartVm { vm, .. }
            | Self::AutostartVm { vm }
            | Self::RebootVm { vm, .. }
            | Self::AddDisk { vm, .. }
            | Self::RemoveDisk { vm, .. }
            | Self::GrowDisk { vm, .. }
            | Self::TakeSnapshot { vm, .. }
            | Self::RevertSnapshot { vm, .. }
            | Self::DeleteSnapshot { vm, .. }
            | Self::ProveVm { vm, .. }
            | Self::DumpVm { vm, .. }
            | Self::DecryptDump { vm, .. }
            | Self::DeleteDump { vm, .. }
            | Self::BackUpVm { vm, .. }
            | Self::VerifyBackup { vm, .. }
            | Self::RestoreBackup { vm, .. }
            | Self::RestoreDeletedVm { vm, .. }
            | Self::RestoreNewVm { vm, .. }
            | Self::DeleteBackup { vm, .. }
            | Self::AddTpm { vm, .. }
            | Self::RemoveTpm { vm, .. }
            | Self::AddNic { vm, .. }
            | Self::RemoveNic { vm, .. }
            | Self::StopVm { vm, .. }
            | Self::SuspendVm { vm }
            | Self::ExportDisk { vm, .. }
            | Self::RecryptVm { vm, .. }
            | Self::EncryptVm { vm, .. }
            | Self::DecryptVm { vm, .. }
            | Self::DeepRecryptVm { vm, .. }
            | Self::MoveVm { vm, .. }
            | Self::MigrateVm { vm, .. }
            | Self::MigrateAway { vm, .. }
            | Self::ReceiveVm { vm, .. }
            | Self::ChangeHost { vm, .. }
            | Self::EvacuateVm { vm, .. }
            | Self::DeleteVm { vm, .. }
            | Self::AdoptVm { vm, .. } => Some(*vm),
            Self::Unreadable { vm, .. } => *vm,
        }
    }

    /// The disk that it is about, where it is about one.
    #[must_use]
    pub fn disk(&self) -> Option<DiskId> {
        match self {
            Self::ExportDisk { disk, .. }
            | Self::RemoveDisk { disk, .. }
            | Self::GrowDisk { disk, .. } => Some(*disk),
            _ => None,
        }
    }

    /// Whether it copies the disks of a VM and uses the copies.
    #[must_use]
    pub fn mirrors_disks(&self) -> bool {
        matches!(
            self,
            Self::EncryptVm { .. }
                | Self::DecryptVm { .. }
                | Self::DeepRecryptVm { .. }
                | Self::MoveVm { .. }
        )
    }

    /// Whether it makes, reads or merges disks without a guest ([`vmseal_api::host::JobKind::has_work_pace`]).
    #[must_use]
    pub fn has_work_pace(&self) -> bool {
        matches!(
            self,
            Self::CreateVm { .. }
                | Self::AddDisk { .. }
                | Self::ExportDisk { .. }
                | Self::DeleteSnapshot { .. }
                | Self::ProveVm { .. }
                | Self::BackUpVm { .. }
                | Self::VerifyBackup { .. }
                | Self::RestoreBackup { .. }
                | Self::RestoreDeletedVm { .. }
                | Self::RestoreNewVm { .. }
        )
    }

    /// Whether it moves a running VM to another host.
    #[must_use]
    pub fn is_migration(&self) -> bool {
        matches!(self, Self::MigrateVm { .. } | Self::MigrateAway { .. })
    }

    /// Whether it sends a VM that is off to another control plane, or receives one.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        matches!(
            self,
            Self::MigrateAway { at_rest: true, .. } | Self::ReceiveVm { at_rest: true, .. }
        )
    }

    /// Whether that VM is suspended.
    #[must_use]
    pub fn is_of_suspended(&self) -> bool {
        matches!(
            self,
            Self::MigrateAway { suspended: true, .. } | Self::ReceiveVm { suspended: true, .. }
        )
    }

    /// Whether what it sends is encrypted; none of what sends nothing.
    #[must_use]
    pub fn is_sent_encrypted(&self) -> Option<bool> {
        match self {
            Self::MigrateVm { encrypted, .. } | Self::MigrateAway { encrypted, .. } => {
                Some(*encrypted)
            }
            _ => None,
        }
    }

    /// Whether its VM has no key when it is done, unless a TPM needs it.
    #[must_use]
    pub fn gives_up_key(&self) -> bool {
        matches!(self, Self::DecryptVm { disks, .. } if disks.is_empty())
    }

    /// Whether it converts disks in their own files.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        matches!(
            self,
            Self::EncryptVm { in_place: true, .. }
                | Self::DecryptVm { in_place: true, .. }
                | Self::DeepRecryptVm { in_place: true, .. }
        )
    }

    /// The other host that a clone is for.
    #[must_use]
    pub fn elsewhere(&self) -> Option<Elsewhere> {
        match self {
            Self::CreateVm { copies: Some(copies), .. } => copies.elsewhere,
            _ => None,
        }
    }

    /// Whether it moves disks to a datastore, or away from it.
    #[must_use]
    pub fn moves_disks_of(&self, datastore: DatastoreId) -> bool {
        match self {
            Self::MoveVm { from, to, .. } => to.datastore == datastore || from.contains(&datastore),
            _ => self
                .elsewhere()
                .and_then(|elsewhere| elsewhere.sent)
                .is_some_and(|sent| sent.datastore == datastore),
        }
    }

    /// Whether it will need a datastore that no disk in the inventory may be on yet.
    #[must_use]
    pub fn needs_datastore(&self, datastore: DatastoreId) -> bool {
        match self {
            Self::AdoptVm { definition, .. } => definition.spec.disks().any(|disk| {
                let replica = disk.replica.as_ref().map(|place| place.datastore.datastore);
                disk.datastore.datastore == datastore || replica == Some(datastore)
            }),
            _ => self.moves_disks_of(datastore),
        }
    }

    /// Where it has a VM that was not there, or did not run there.
    #[must_use]
    pub fn places(&self) -> Option<Placed> {
        if let Some(elsewhere) = self.elsewhere() {
            return Some(Placed::On(elsewhere.to));
        }
        match self {
            Self::CreateVm { vm, .. }
            | Self::RestoreDeletedVm { vm, .. }
            | Self::RestoreNewVm { vm, .. }
            | Self::StartVm { vm, .. }
            | Self::AutostartVm { vm } => Some(Placed::WhereItIs(*vm)),
            Self::AdoptVm { definition, .. } => Some(Placed::On(definition.host)),
            Self::MigrateVm { to, .. }
            | Self::ChangeHost { to, .. }
            | Self::EvacuateVm { to, .. } => Some(Placed::On(*to)),
            Self::ReceiveVm { host, .. } => Some(Placed::On(*host)),
            _ => None,
        }
    }

    /// The policy that it gives a VM when it has succeeded.
    #[must_use]
    pub fn next_policy(&self) -> Option<PolicyId> {
        match self {
            Self::EncryptVm { policy, .. } | Self::DecryptVm { policy, .. } => Some(*policy),
            _ => None,
        }
    }

    /// The provider that it makes a key at.
    #[must_use]
    pub fn provider_of_new_key(&self) -> Option<ProviderId> {
        match self {
            Self::RecryptVm { provider, .. } => Some(*provider),
            Self::EncryptVm { provider, .. } => *provider,
            _ => None,
        }
    }

    /// Whether it can be cancelled; a deletion cannot be undone.
    #[must_use]
    pub fn can_be_cancelled(&self) -> bool {
        !matches!(self, Self::DeleteVm { .. } | Self::Unreadable { .. })
    }

    /// Whether another control plane has asked for its end, and waits for what becomes of it.
    #[must_use]
    pub fn is_asked_to_commit(&self) -> bool {
        matches!(self, Self::ReceiveVm { committed: true, .. })
    }

    /// The resources that it holds until it ends: only one task holds a resource at a time. A change of power holds less where
    /// [`Operation::leaves_power`] says so.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let cloned = match self {
            Self::CreateVm { copies: Some(copies), .. } => Some(copies.vm),
            _ => None,
        };
        // A backup that a VM is made of is not removed meanwhile. The VM that was backed up is free for other tasks.
        let backup = match self {
            Self::RestoreNewVm { backup, .. } | Self::DeleteBackup { backup, .. } => Some(*backup),
            _ => None,
        };
        let vms = self.vm().into_iter().chain(cloned).map(Claim::Vm);
        vms.chain(backup.map(Claim::Backup)).collect()
    }
}

/// Where an operation has a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// On the host that the inventory has it on.
    WhereItIs(VmId),
    /// On this host.
    On(HostId),
}
