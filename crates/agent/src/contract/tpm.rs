//! The disk of a TPM: made with what the TPM keeps, and copied and exported with that; nothing else is done with it but to start the
//! VM.

use vmseal_api::hardware::{Hardware, TPM_DISK, TPM_DISK_SIZE};
use vmseal_api::host::{
    Device, DiskFacts, DiskRole, DiskSpec, ExportJob, Exposing, HostAgent, ImageSource, JobSpec,
    JobState, NewDisk, VmSpec,
};
use vmseal_api::id::{DiskId, SnapshotId, TaskId};
use vmseal_api::problem::ErrorCode;
use vmseal_api::transfer::{ExportFormat, ImageFormat};

use super::jobs::image;
use super::mirror::{copy, mirrored, moved, second_datastore};
use super::{Session, done, refused};

/// The session's VM with a TPM, and its disk.
pub fn added(session: &Session) -> (VmSpec, DiskId) {
    let disk = DiskSpec {
        disk: DiskId::new(),
        name: TPM_DISK.to_owned(),
        size: TPM_DISK_SIZE,
        role: DiskRole::Tpm,
        ..session.disk(0).clone()
    };
    let hardware = Hardware { tpm: true, ..Hardware::default() };
    let (id, mut spec) = (disk.disk, VmSpec { hardware, ..session.spec.clone() });
    spec.devices.push(Device::Disk(disk));
    (spec, id)
}

/// Such a disk is made and removed; in the end the VM is as it was.
pub async fn disks(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    let (spec, id) = added(session);
    let disk = spec.disk(id).cloned().expect("it was added");
    let hardware = spec.hardware.clone();
    let with = |hardware: &Hardware, disk: Option<&DiskSpec>| {
        let mut spec = VmSpec { hardware: hardware.clone(), ..session.spec.clone() };
        spec.devices.extend(disk.cloned().map(Device::Disk));
        spec
    };
    let plain = DiskSpec { encrypted: false, ..disk.clone() };
    let large = DiskSpec { size: 2 * TPM_DISK_SIZE, ..disk.clone() };
    let none = Hardware::default();
    for (what, spec) in [
        ("a TPM without a disk", with(&hardware, None)),
        ("a TPM's disk without a TPM", with(&none, Some(&disk))),
        ("a TPM's disk in the clear", with(&hardware, Some(&plain))),
        ("a TPM's disk of another size", with(&hardware, Some(&large))),
    ] {
        refused(agent.register_vm(spec).await, ErrorCode::InvalidRequest, what);
    }
    done(agent.examine_hardware(hardware.clone(), None).await, "examining a TPM");
    done(agent.register_vm(with(&hardware, Some(&disk))).await, "registering a TPM");
    let qcow2 = image(&session.fixture.image);
    let qcow2 = qcow2.map(|source| ImageSource { format: ImageFormat::Qcow2, ..source });
    let from_image = session.create(agent, disk.disk, qcow2).await;
    refused(from_image, ErrorCode::InvalidRequest, "a TPM's disk from an image of qcow2");
    let source = image(&session.fixture.image);
    let new = NewDisk { disk: disk.clone(), source, firmware: None };
    let no_state = agent.examine_disk(new).await;
    refused(no_state, ErrorCode::InvalidRequest, "a TPM that is to keep what is in an image");
    for what in ["making it", "making it again"] {
        let task = done(session.create(agent, disk.disk, None).await, what);
        let facts = session.made(agent, task, disk.disk).await;
        assert!(matches!(facts, DiskFacts::Luks2 { .. }), "{what}: {facts:?}");
    }
    let in_the_clear = agent.put_job(vm, TaskId::new(), copy(id, false)).await;
    refused(in_the_clear, ErrorCode::InvalidRequest, "a copy in the clear of a TPM's disk");
    let facts = mirrored(agent, session, id, copy(id, true)).await.facts;
    assert!(matches!(facts, DiskFacts::Luks2 { .. }), "{facts:?}");
    let second = second_datastore(agent, session).await;
    let seen = mirrored(agent, session, id, moved(id, true, &second)).await;
    assert_eq!(seen.datastore, Some(second.datastore));
    let disk = DiskSpec { datastore: second, facts: Some(seen.facts), ..disk };
    let spec = with(&hardware, Some(&disk));
    done(agent.register_vm(spec).await, "registering it where it is");
    let hold = agent.expose_disk(vm, disk.disk, Exposing::Hold { writable: false }).await;
    refused(hold.map(drop), ErrorCode::WrongState, "exposing it");
    exported(agent, session, &disk).await;
    done(agent.delete_disk(vm, disk.disk).await, "removing it");
    done(agent.register_vm(session.spec.clone()).await, "registering without it");
}

/// In its place, what the TPM keeps is written to a file, raw alone.
async fn exported(agent: &dyn HostAgent, session: &Session, disk: &DiskSpec) {
    let (vm, to) = (session.vm(), session.fixture.image.with_file_name("tpm.img"));
    let export = |format, snapshot| {
        let (disk, to) = (disk.disk, to.clone());
        JobSpec::Export(ExportJob { disk, to, format, passphrase: None, snapshot })
    };
    for format in [ExportFormat::Qcow2, ExportFormat::Sealed] {
        let other = agent.put_job(vm, TaskId::new(), export(format, None)).await;
        refused(other, ErrorCode::InvalidRequest, "exporting it otherwise than raw");
    }
    let kept = export(ExportFormat::Raw, Some(SnapshotId::new()));
    let kept = agent.put_job(vm, TaskId::new(), kept).await;
    refused(kept, ErrorCode::WrongState, "exporting what a snapshot keeps of it");
    let (task, job) = (TaskId::new(), export(ExportFormat::Raw, None));
    done(agent.examine_job(vm, job.clone()).await, "examining its export");
    for what in ["exporting it", "exporting it again"] {
        done(agent.put_job(vm, task, job.clone()).await, what);
        assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    }
    done(agent.cancel_job(vm, task, job).await, "cancelling the export");
}
