//! A host that fails in the middle of a deletion: what may be gone is not called whole.

use super::*;

/// The name is gone, the flush of the directory failed: nobody can say that the disk is there.
#[tokio::test]
async fn a_vm_whose_disk_may_be_gone_does_not_count_as_whole() {
    let plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    plant.inject(Call::DeleteDisk, HostFault::Refuse(ErrorCode::Internal), 1);
    let task = plant.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    let ended = plant.ended(task).await;
    let problem = ended.problem.unwrap();
    assert_eq!(ended.state, TaskState::Unknown, "{problem}");
    assert!(problem.detail.contains("delete it again"), "{problem}");
    assert_eq!(plant.vm(vm).await.unwrap().lifecycle, Lifecycle::Deleting);
    assert_eq!(plant.alarms().await, ["task-unfinished web"]);
    let task = plant.begin(Operation::DeleteVm { vm, was: Lifecycle::Deleting }, "web").await;
    assert_eq!(plant.ended(task).await.state, TaskState::Done);
    plant.assert_nothing_left(vm, "deleted again").await;
    assert!(plant.alarms().await.is_empty(), "the alarm of a VM that is gone stands");
}
