//! Proofs that VMs are encrypted.

use vmseal_api::id::TaskId;
use vmseal_api::proof::Verdict;

use super::*;
use crate::store::proofs;

#[tokio::test]
async fn a_proof_is_recorded_with_its_task_and_changes_nothing() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let mut reports = Vec::new();
    for seed in [1, 2] {
        let operation = Operation::ProveVm { vm, all: false, seed };
        let task = fixture.begin(operation, "web").await;
        assert_eq!(fixture.ended(task).await.state, TaskState::Done);
        let mut read = fixture.store.read().await.unwrap();
        let report = proofs::newest(&mut read, vm).await.unwrap().unwrap();
        let (digest, signed) = (proofs::digest_of(&report), report);
        let report = signed.read().unwrap();
        assert_eq!((report.task, report.vm, report.seed), (task, vm, seed));
        assert_eq!(report.verdict, Verdict::Encrypted, "{report:?}");
        assert!(!report.images.is_empty() && report.images.iter().all(|it| it.header.is_some()));
        reports.push((task, digest, signed));
    }
    // Each event has the digest of its report, by which an older one is found, as by its task.
    let events = fixture.events("vm.proved").await;
    assert_eq!(events.len(), 2, "{events:?}");
    let other = fixture.made("other", "encrypted").await;
    let mut write = fixture.store.write().await.unwrap();
    for ((task, digest, signed), event) in reports.iter().zip(&events) {
        assert!(event.detail.ends_with(&format!("; report {digest}")), "{event:?}");
        for name in [digest.clone(), task.to_string()] {
            let found = proofs::find(&mut write, vm, &name).await.unwrap();
            assert_eq!(found.as_ref(), Some(signed), "{name}");
        }
        // A task that is done again after a crash has one.
        assert!(!proofs::keep(&mut write, vm, *task, signed).await.unwrap());
    }
    // The oldest are removed; those of another VM do not count.
    let last = reports[1].clone();
    proofs::keep(&mut write, other, TaskId::new(), &last.2).await.unwrap();
    for _ in 1..proofs::PROOFS_MAX {
        proofs::keep(&mut write, vm, TaskId::new(), &last.2).await.unwrap();
    }
    assert!(proofs::find(&mut write, vm, &reports[0].1).await.unwrap().is_none());
    assert!(proofs::find(&mut write, vm, &last.0.to_string()).await.unwrap().is_some());
    assert!(proofs::newest(&mut write, other).await.unwrap().is_some());
}
