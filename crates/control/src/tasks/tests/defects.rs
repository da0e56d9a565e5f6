//! A host that fails in the middle of a deletion: a VM whose disk may be gone is not reported as complete.

use super::*;

/// The name is removed, but the flush of the directory failed: it is unknown whether the disk exists.
#[tokio::test]
async fn a_vm_whose_disk_may_be_gone_does_not_count_as_whole() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.inject(Call::DeleteDisk, HostFault::Refuse(ErrorCode::Internal), 1);
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    let ended = fixture.ended(task).await;
    let problem = ended.problem.unwrap();
    assert_eq!(ended.state, TaskState::Unknown, "{problem}");
    assert!(problem.detail.contains("delete it again"), "{problem}");
    assert_eq!(fixture.vm(vm).await.unwrap().lifecycle, Lifecycle::Deleting);
    assert_eq!(fixture.alarms().await, ["task-unfinished web"]);
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Deleting }, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    fixture.assert_nothing_left(vm, "deleted again").await;
    assert!(fixture.alarms().await.is_empty(), "the alarm of a deleted VM is still active");
}
