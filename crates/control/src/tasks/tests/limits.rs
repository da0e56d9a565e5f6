//! Concurrency limits of one host.

use vmseal_api::datastore::{Messenger, RbdPool};
use vmseal_api::host::{Allocation, DatastoreLocation, DiskRole, ImageSource};
use vmseal_api::id::TaskId;
use vmseal_api::model::WaitingOn;
use vmseal_api::transfer::ImageFormat;

use super::*;
use crate::operation::Copies;
use crate::store::disks::Disk;
use crate::tasks::limits::{HOST_COPIES, HOST_SHORT_WORK, Share};
use crate::tasks::step::Limit;

/// An export of a VM's first disk to a file of its own.
async fn export_of(fixture: &Fixture, vm: VmId) -> Operation {
    let disk = fixture.disks(vm).await[0].id;
    let to = format!("/exports/{disk}.raw").into();
    let format = ExportFormat::Raw;
    Operation::ExportDisk { vm, disk, to, format, passphrase: None, snapshot: None }
}

/// VMs, as many as a host may copy at a time.
pub(super) async fn vms_to_copy(fixture: &Fixture) -> Vec<VmId> {
    let mut vms = Vec::new();
    for index in 0..HOST_COPIES {
        vms.push(fixture.made(&format!("copied{index}"), "plain").await);
    }
    vms
}

/// Begins to copy a disk of each of these VMs, and waits until the host copies all of them.
pub(super) async fn copied(fixture: &Fixture, vms: &[VmId]) -> Vec<TaskId> {
    let puts = fixture.calls(Call::PutJob);
    let mut tasks = Vec::new();
    for (index, vm) in vms.iter().enumerate() {
        let export = export_of(fixture, *vm).await;
        tasks.push(fixture.begin(export, &format!("copied{index}")).await);
    }
    let all_work = async || (fixture.calls(Call::PutJob) >= puts + vms.len()).then_some(());
    fixture.eventually("the host copies all disks", all_work).await;
    tasks
}

/// Begins to copy a disk of VM 'web', whose host copies as much as it may, and waits until that is queued.
async fn queued_copy(fixture: &Fixture, vm: VmId) -> Task {
    let task = fixture.begin(export_of(fixture, vm).await, "web").await;
    let is_queued = async || {
        let seen = fixture.task(task).await;
        (seen.state == TaskState::Queued && seen.step == "write-file").then_some(seen)
    };
    fixture.eventually("the copy is queued", is_queued).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_work_on_a_host_queues_and_power_does_not_wait_for_it() {
    let fixture = Fixture::new().await;
    let other = fixture.made("other", "plain").await;
    fixture.agent.set_work(LONG);
    let mut tasks = Vec::new();
    for index in 0..HOST_SHORT_WORK + 2 {
        tasks.push(fixture.create(&format!("web{index}"), "plain").await.1);
    }
    let count = async |state: TaskState| {
        let mut count = 0;
        for task in &tasks {
            count += usize::from(fixture.task(*task).await.state == state);
        }
        count
    };
    fixture
        .eventually("two are queued", async || (count(TaskState::Queued).await == 2).then_some(()))
        .await;
    assert_eq!(count(TaskState::Running).await, HOST_SHORT_WORK);
    fixture.begin(Operation::StartVm { vm: other, boot_once: None }, "other").await;
    let started = async || (fixture.calls(Call::PowerOn) > 0).then_some(());
    fixture.eventually("a start does not wait for short work", started).await;
    // A queued task can be cancelled, and another runs when it gets its permit.
    let queued = tasks.pop().unwrap();
    fixture.engine.cancel(&queued.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(queued).await.state, TaskState::Cancelled);
    let first = tasks.remove(0);
    fixture.engine.cancel(&first.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(first).await.state, TaskState::Cancelled);
    fixture
        .eventually("the last one has its turn", async || {
            let mut running = 0;
            for task in &tasks {
                running += usize::from(fixture.task(*task).await.state == TaskState::Running);
            }
            (running == HOST_SHORT_WORK).then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_work_goes_through_while_a_host_copies_as_much_as_it_may() {
    let fixture = Fixture::new().await;
    let (vms, guest) = (vms_to_copy(&fixture).await, fixture.running("web").await);
    fixture.agent.set_work(LONG);
    let copies = copied(&fixture, &vms).await;
    fixture.agent.set_work(std::time::Duration::ZERO);
    fixture.made("new", "plain").await;
    fixture.done(proving(guest), "web").await;
    for copy in copies {
        assert_eq!(fixture.task(copy).await.state, TaskState::Running);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_waits_for_its_turn_says_what_has_the_turns_and_has_the_next_one() {
    let fixture = Fixture::new().await;
    let (vms, last) = (vms_to_copy(&fixture).await, fixture.made("web", "plain").await);
    fixture.agent.set_work(LONG);
    let copies = copied(&fixture, &vms).await;
    let seen = queued_copy(&fixture, last).await;
    let shown = fixture.engine.shown(&seen);
    let waiting = shown.waiting.as_ref().unwrap();
    assert_eq!((waiting.on, waiting.name.as_str()), (WaitingOn::Turn, "here"));
    let told = format!("queued: {HOST_COPIES} tasks copy or read disks on host 'here'");
    assert!(shown.at().contains(&told), "{}", shown.at());
    fixture.engine.cancel(&copies[0].to_string(), "me").await.unwrap();
    let has_it = async || {
        let seen = fixture.task(seen.id).await;
        (seen.state == TaskState::Running).then_some(seen)
    };
    assert_eq!(fixture.eventually("it has its turn", has_it).await.waiting, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queued_task_that_was_cancelled_before_a_crash_does_not_wait_for_its_turn() {
    let mut fixture = Fixture::new().await;
    let (vms, last) = (vms_to_copy(&fixture).await, fixture.made("web", "plain").await);
    fixture.agent.set_work(LONG);
    let copies = copied(&fixture, &vms).await;
    let task = queued_copy(&fixture, last).await.id;
    fixture.engine.stop();
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    fixture.restart(|_| {}).await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    for copy in copies {
        assert!(fixture.task(copy).await.ended.is_none());
    }
}

/// The limit that a step falls under, for a VM with one new disk; `change` changes that disk first.
async fn share(
    limit: Limit,
    operation: impl FnOnce(VmId) -> Operation,
    change: fn(&mut Disk),
) -> Share {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "plain").await;
    let mut disk = fixture.disks(vm).await.remove(0);
    disk.facts = None;
    change(&mut disk);
    Share::of(limit, &operation(vm), &[disk])
}

#[tokio::test]
async fn work_is_short_unless_it_is_about_whole_disks() {
    let create = |vm| Operation::CreateVm { vm, cloud_init: None, copies: None };
    let from_an_image = |disk: &mut Disk| {
        let path = "/images/web.raw".into();
        disk.image = Some(ImageSource { path, format: ImageFormat::Raw, force: false });
    };
    let of_the_machine = |disk: &mut Disk| {
        let path = "/images/variables.fd".into();
        disk.image = Some(ImageSource { path, format: ImageFormat::Raw, force: false });
        disk.role = DiskRole::UefiVariables;
    };
    let preallocated = |disk: &mut Disk| disk.allocation = Allocation::Preallocated;
    let preallocated_in_a_pool = |disk: &mut Disk| {
        disk.allocation = Allocation::Preallocated;
        let pool = RbdPool {
            monitors: "v2:10.0.0.1:3300".to_owned(),
            user: "client.vmseal".to_owned(),
            keyring: None,
            pool: "vms".to_owned(),
            namespace: None,
            data_pool: None,
            messenger: Messenger::Secure,
            create: None,
            changed: None,
        };
        let pool = Box::new(pool);
        disk.datastore.location = DatastoreLocation::Rbd { path: "/ceph".into(), pool };
    };
    let clone = |vm, linked: bool| {
        let (origin, disk) = (VmId::new(), DiskId::new());
        let copies = Copies {
            vm: origin,
            snapshot: None,
            temporary: None,
            disks: Default::default(),
            linked: linked.then_some(disk).into_iter().collect(),
            elsewhere: None,
        };
        Operation::CreateVm { vm, cloud_init: None, copies: Some(copies) }
    };
    let prove = |vm, all| Operation::ProveVm { vm, all, seed: 1 };
    assert_eq!(share(Limit::NewDisks, create, |_| {}).await, Share::ShortWork);
    assert_eq!(share(Limit::NewDisks, create, from_an_image).await, Share::Fills);
    assert_eq!(share(Limit::NewDisks, create, of_the_machine).await, Share::ShortWork);
    assert_eq!(share(Limit::NewDisks, create, preallocated).await, Share::ShortWork);
    assert_eq!(share(Limit::NewDisks, create, preallocated_in_a_pool).await, Share::Fills);
    assert_eq!(share(Limit::NewDisks, |vm| clone(vm, false), |_| {}).await, Share::Copies);
    assert_eq!(share(Limit::NewDisks, |vm| clone(vm, true), |_| {}).await, Share::ShortWork);
    assert_eq!(share(Limit::Proof, |vm| prove(vm, true), |_| {}).await, Share::Copies);
    assert_eq!(share(Limit::Proof, |vm| prove(vm, false), |_| {}).await, Share::ShortWork);
}
