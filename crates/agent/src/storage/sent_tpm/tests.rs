//! What a TPM keeps goes to a host that has another key of the VM, and to a file.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use tokio::sync::oneshot;
use vmseal_api::hardware::{TPM_DISK, TPM_DISK_SIZE};
use vmseal_api::host::{Device, DiskRole, ExportJob};
use vmseal_api::id::{MigrationId, TaskId};
use vmseal_api::problem::ErrorCode;
use vmseal_api::transfer::ExportFormat;
use vmseal_secret::KEK_LEN;

use super::*;
use crate::hypervisor::tpm::PROGRAM;
use crate::process::run_dir::RunDir;
use crate::process::users::Users;
use crate::storage::arriving;
use crate::storage::datastore::{self, tests::unmarked};
use crate::storage::export::{self, Export, ExportRequest};
use crate::storage::gate::Gate;
use crate::storage::tpm_disk::{self, MakeTpm};
use crate::storage::tpm_import;
use crate::storage::transfer::TransferDirectories;

/// A control plane's host, with a VM that has a TPM as it has it: under a key of its own, on a datastore of its own.
struct Place {
    _directory: tempfile::TempDir,
    spec: VmSpec,
    kek: SecretBytes,
    builder: DiskBuilder,
}

impl Place {
    fn new(vm: VmId, disk: DiskId, key_id: &str) -> Self {
        let (directory, place) = unmarked();
        datastore::probe(&place).unwrap();
        let mut spec = crate::process::run_dir::tests::spec();
        let kek = SecretBytes::random(KEK_LEN).unwrap();
        spec.vm = vm;
        spec.key = Some(crate::keys::reference_of(&kek, vm, key_id));
        let of_tpm = DiskSpec {
            disk,
            datastore: place,
            size: TPM_DISK_SIZE,
            encrypted: true,
            role: DiskRole::Tpm,
            ..crate::rules::tests::disk(TPM_DISK)
        };
        spec.devices.push(Device::Disk(of_tpm));
        let run = RunDir::open(&directory.path().join("run")).unwrap();
        let builder = DiskBuilder {
            filter: Arc::new(File::open("/bin/false").unwrap()),
            users: Users::new(None),
            directory: run.import(disk),
            transfer: TransferDirectories::anywhere(),
            gate: Arc::new(Gate::new(Default::default())),
        };
        Self { _directory: directory, spec, kek, builder }
    }

    fn disk(&self) -> &DiskSpec {
        self.spec.disks().next().unwrap()
    }

    fn home(&self) -> Home {
        Home::of(&self.disk().datastore, self.spec.vm).unwrap()
    }

    fn begin(&self) -> ArrivingDisk {
        let disks = vec![(self.disk().disk, None)];
        arriving::begin(&self.spec, disks, Some(&self.kek)).unwrap().remove(0)
    }

    /// Makes its TPM; the facts of that one's disk.
    async fn make(&self) -> DiskFacts {
        let made = self.begin();
        let slot = self.builder.users.take().unwrap();
        let wanted = MakeTpm {
            swtpm: Swtpm::of(PROGRAM.into()),
            disk: self.disk(),
            home: &self.home(),
            file: &made.file,
            dek: made.dek.as_ref(),
            taken: None,
        };
        tpm_disk::make(wanted, &self.builder, &slot).await.unwrap();
        arriving::name(&self.spec, std::slice::from_ref(&made), 1).unwrap();
        made.facts
    }

    /// Sends what its TPM keeps.
    async fn send(&self, facts: &DiskFacts, way: &Arc<MemoryTransit>) -> Result<Vec<u8>, Problem> {
        let (theirs, mut ours) = UnixStream::pair().unwrap();
        let reading = spawn_blocking(move || {
            let mut sent = Vec::new();
            ours.read_to_end(&mut sent).map(|_| sent)
        });
        let kept = SendTpm {
            spec: self.spec.clone(),
            disk: self.disk().clone(),
            facts: facts.clone(),
            kek: Some(self.kek.try_clone().unwrap()),
            transit: Arc::clone(way),
            swtpm: Swtpm::of(PROGRAM.into()),
        };
        kept.run(&self.builder, theirs).await?;
        Ok(reading.await.unwrap().unwrap())
    }
}

fn clear(kept: &Permanent) -> Vec<u8> {
    let mut written = Vec::new();
    kept.write_to(&mut written).unwrap();
    written
}

#[tokio::test]
async fn what_arrives_is_the_same_under_the_key_of_the_disk_there_alone() {
    let (vm, disk) = (VmId::new(), DiskId::new());
    let (west, east) = (Place::new(vm, disk, "west"), Place::new(vm, disk, "east"));
    let swtpm = Swtpm::of(PROGRAM.into());
    let (session, migration) = (SecretBytes::random(KEK_LEN).unwrap(), MigrationId::new());
    let way = |migration: MigrationId| {
        Arc::new(MemoryTransit::new(session.try_clone().unwrap(), migration))
    };

    let facts = west.make().await;
    let at_west = tpm_state::read(&west.home().tpm_state(disk)).unwrap();

    let sent = west.send(&facts, &way(migration)).await.unwrap();
    let of = (vm, disk);
    let kept = receive(of, &way(migration), &sent[..]).unwrap();
    let state = clear(&kept);
    assert!(!sent.windows(64).any(|part| part == &state[..64]), "it is sent in the clear");
    // Of another attempt, of another disk, cut off, and a memory.
    let refused = |of: (VmId, DiskId), way: &MemoryTransit, sent: &[u8]| {
        receive(of, way, sent).map(drop).is_err()
    };
    assert!(refused(of, &way(MigrationId::new()), &sent));
    assert!(refused((vm, DiskId::new()), &way(migration), &sent));
    assert!(refused((VmId::new(), disk), &way(migration), &sent));
    assert!(refused(of, &way(migration), &sent[..sent.len() - 1]));
    let name = memory_transit::name_of_tpm(disk);
    let memory = Identity { vm: vm.0, kind: Kind::Memory, generation: GENERATION };
    let way_there = way(migration);
    let mut as_memory = file::create(Vec::new(), memory, Some(&way_there.key(vm, &name))).unwrap();
    as_memory.write_all(&state).unwrap();
    assert!(refused(of, &way_there, &as_memory.finish().unwrap()));

    let made = east.begin();
    keep(vm, &made, kept, &swtpm, &east.builder).await.unwrap();
    arriving::name(&east.spec, std::slice::from_ref(&made), 2).unwrap();
    let facts_there = made.facts.clone();
    drop(made);
    let at_east = tpm_state::read(&east.home().tpm_state(disk)).unwrap();
    assert!(at_east != at_west, "it is as the former host has it");
    // What opens there with the key of the disk there is the same.
    let back = east.send(&facts_there, &way(migration)).await.unwrap();
    assert!(clear(&receive(of, &way(migration), &back[..]).unwrap()) == state);
    // The file of the former host is of another key.
    let path = east.home().tpm_state(disk).join("tpm2-00.permall");
    std::fs::write(path, at_west).unwrap();
    let refused = east.send(&facts_there, &way(migration)).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
    east.builder.directory.sweep().await.unwrap();
}

/// In the clear, so for the agent's user alone; and none is left to who gives the export up.
#[tokio::test]
async fn what_is_exported_is_the_same_and_goes_with_an_export_that_is_given_up() {
    let place = Place::new(VmId::new(), DiskId::new(), "west");
    let (facts, disk) = (place.make().await, place.disk().disk);
    let (out, records) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (to, record) = (out.path().join("tpm2-00.permall"), records.path().join("record"));
    let anywhere = TransferDirectories::anywhere();
    let format = ExportFormat::Raw;
    let job = ExportJob { disk, to: to.clone(), format, passphrase: None, snapshot: None };
    let export = Export { task: TaskId::new(), job };
    let write = async |cancelled: oneshot::Receiver<()>| {
        let request = ExportRequest {
            spec: place.spec.clone(),
            disk: place.disk().clone(),
            facts: facts.clone(),
            kek: Some(place.kek.try_clone().unwrap()),
            export: export.clone(),
            passphrase: None,
            record: record.clone(),
            swtpm: Swtpm::of(PROGRAM.into()),
        };
        export::write(request, &place.builder, |_, _| {}, cancelled).await
    };
    let (cancel, cancelled) = oneshot::channel();
    cancel.send(()).unwrap();
    assert_eq!(write(cancelled).await.unwrap_err().code, ErrorCode::Cancelled);
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0, "something is left");

    let (_cancel, cancelled) = oneshot::channel();
    write(cancelled).await.unwrap();
    let unnamed = std::fs::read_dir(out.path()).unwrap().next().unwrap().unwrap();
    assert_eq!(unnamed.metadata().unwrap().mode() & 0o777, 0o600);
    export::name(&export, &record, &anywhere).unwrap();
    assert_eq!(to.metadata().unwrap().mode() & 0o777, 0o600);
    let session = SecretBytes::random(KEK_LEN).unwrap();
    let way = Arc::new(MemoryTransit::new(session, MigrationId::new()));
    let sent = place.send(&facts, &way).await.unwrap();
    let kept = receive((place.spec.vm, disk), &way, &sent[..]).unwrap();
    let exported = tpm_import::read(&to, &anywhere).unwrap();
    assert!(clear(exported.permanent()) == clear(&kept), "something else was exported");
}
