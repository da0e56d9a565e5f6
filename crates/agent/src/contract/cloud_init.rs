//! Disks for cloud-init: made of documents that are sealed to this agent, and of no others.

use vmseal_api::cloud_init::{CLOUD_INIT_DISK, CLOUD_INIT_DISK_SIZE, Documents};
use vmseal_api::host::{
    CreateJob, Device, DiskFacts, DiskRole, DiskSpec, DiskToCreate, HostAgent, JobSpec, JobState,
    SealedKey,
};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::ErrorCode;

use super::{Session, done, refused};
use crate::keys::{KeyBox, seal_documents_for};

fn creation(disk: DiskId, cloud_init: &SealedKey) -> JobSpec {
    let cloud_init = Some(cloud_init.clone());
    JobSpec::Create(CreateJob {
        disks: vec![DiskToCreate { disk, source: None, cloud_init, copy_of: None }],
    })
}

/// A disk for cloud-init is made and removed; in the end the VM is as it was.
pub async fn disks(agent: &dyn HostAgent, session: &Session) {
    let (vm, [system, data]) = (session.vm(), [0, 1].map(|index| session.disk(index).clone()));
    let disk = DiskSpec {
        disk: DiskId::new(),
        name: CLOUD_INIT_DISK.to_owned(),
        size: CLOUD_INIT_DISK_SIZE,
        role: DiskRole::CloudInit,
        ..system
    };
    let mut spec = session.spec.clone();
    spec.devices.push(Device::Disk(disk.clone()));
    done(agent.register_vm(spec).await, "registering a disk for cloud-init");
    let documents = Documents {
        user_data: "#cloud-config\n".to_owned().into(),
        meta_data: "instance-id: i\n".to_owned().into(),
        network_config: None,
    };
    let seal = |key_box: &str, disk| seal_documents_for(key_box, vm, disk, &documents);
    let earlier = KeyBox::new().expect("locked memory").public();
    let lost = seal(&earlier, disk.disk);
    let good = seal(&session.key_box, disk.disk);

    let none = session.create(agent, disk.disk, None).await;
    refused(none, ErrorCode::InvalidRequest, "without documents");
    let put = |job| agent.put_job(vm, TaskId::new(), job);
    let other = put(creation(data.disk, &good)).await;
    refused(other, ErrorCode::InvalidRequest, "documents for a disk of another role");
    for (what, sealed, code) in [
        ("sealed to an earlier agent", &lost, ErrorCode::WrongState),
        ("of another disk", &seal(&session.key_box, data.disk), ErrorCode::InvalidRequest),
    ] {
        let task = TaskId::new();
        done(agent.put_job(vm, task, creation(disk.disk, sealed)).await, what);
        match session.worked(agent, task).await {
            JobState::Failed { problem } => assert_eq!(problem.code, code, "{what}: {problem}"),
            other => panic!("{what}: {other:?}"),
        }
    }
    for (what, sealed) in [("the disk", &good), ("a disk that is made", &lost)] {
        let task = TaskId::new();
        done(agent.put_job(vm, task, creation(disk.disk, sealed)).await, what);
        let facts = session.made(agent, task, disk.disk).await;
        assert!(matches!(facts, DiskFacts::Luks2 { .. }), "{what}: {facts:?}");
    }
    done(agent.delete_disk(vm, disk.disk).await, "removing it");
    done(agent.register_vm(session.spec.clone()).await, "registering without it");
}
