//! Proofs that VMs are encrypted.

use vmseal_api::proof::Verdict;

use super::*;
use crate::store::proofs;

#[tokio::test]
async fn a_proof_is_recorded_with_its_task_and_changes_nothing() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    for seed in [1, 2] {
        let operation = Operation::ProveVm { vm, all: false, seed };
        let task = fixture.begin(operation, "web").await;
        assert_eq!(fixture.ended(task).await.state, TaskState::Done);
        let mut read = fixture.store.read().await.unwrap();
        let report = proofs::of_vm(&mut read, vm).await.unwrap().unwrap().read().unwrap();
        assert_eq!((report.task, report.vm, report.seed), (task, vm, seed));
        assert_eq!(report.verdict, Verdict::Encrypted, "{report:?}");
        assert!(!report.images.is_empty() && report.images.iter().all(|it| it.header.is_some()));
    }
}
