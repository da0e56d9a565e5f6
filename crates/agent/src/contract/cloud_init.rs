//! Disks for cloud-init: made of documents that are sealed to this agent, or of those of another VM, and of no others.

use std::time::Duration;

use vmseal_api::cloud_init::{CLOUD_INIT_DISK, CLOUD_INIT_DISK_SIZE, Documents};
use vmseal_api::host::{
    CopyOf, CreateJob, Device, DiskFacts, DiskRole, DiskSpec, DiskToCreate, HostAgent, JobSpec,
    JobState, SealedKey, VmSpec,
};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::problem::ErrorCode;
use vmseal_secret::{KEK_LEN, SecretBytes};

use super::{Session, done, refused};
use crate::keys::{KeyBox, reference_of, seal_documents_for, seal_for};

fn creation(disk: DiskId, cloud_init: &SealedKey) -> JobSpec {
    let cloud_init = Some(cloud_init.clone());
    JobSpec::Create(CreateJob {
        disks: vec![DiskToCreate { disk, source: None, cloud_init, copy_of: None }],
    })
}

/// The disk of a clone is made of that of the suite's VM, under a key of its own.
async fn copies(agent: &dyn HostAgent, session: &Session, of: &DiskSpec) {
    let (vm, kek) = (VmId::new(), SecretBytes::random(KEK_LEN).expect("locked memory"));
    let told = DiskSpec { disk: DiskId::new(), facts: None, ..of.clone() };
    let data = DiskSpec { disk: DiskId::new(), role: DiskRole::Data, ..told.clone() };
    let clone = VmSpec {
        vm,
        name: "contract-clone".to_owned(),
        key: Some(reference_of(&kek, vm, "clone-key")),
        devices: vec![Device::Disk(data.clone()), Device::Disk(told.clone())],
        ..session.spec.clone()
    };
    done(agent.register_vm(clone.clone()).await, "registering a clone");
    let reference = clone.key.as_ref().expect("it has a key");
    let sealed = seal_for(&session.key_box, vm, reference, &kek);
    done(agent.offer_key(vm, sealed).await, "the clone's key");
    let copy = |disk, of| {
        let copy_of = Some(CopyOf { vm: session.vm(), disk: of, snapshot: None, linked: false });
        let wanted = DiskToCreate { disk, source: None, cloud_init: None, copy_of };
        JobSpec::Create(CreateJob { disks: vec![wanted] })
    };
    let put = agent.put_job(vm, TaskId::new(), copy(data.disk, of.disk)).await;
    refused(put, ErrorCode::InvalidRequest, "a disk of another role");
    for what in ["copying the documents", "copying what is copied"] {
        let task = TaskId::new();
        for _ in 0..2 {
            done(agent.put_job(vm, task, copy(told.disk, of.disk)).await, what);
        }
        loop {
            match done(agent.job(vm, task).await, what).state {
                JobState::Done => break,
                JobState::Waiting | JobState::Running => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                ended => panic!("{what}: {ended:?}"),
            }
        }
    }
    done(agent.delete_disk(vm, told.disk).await, "removing it");
    done(agent.unregister_vm(vm).await, "forgetting the clone");
}

/// A disk for cloud-init is made, copied and removed; in the end the VM is as it was.
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
    copies(agent, session, &disk).await;
    done(agent.delete_disk(vm, disk.disk).await, "removing it");
    done(agent.register_vm(session.spec.clone()).await, "registering without it");
}
