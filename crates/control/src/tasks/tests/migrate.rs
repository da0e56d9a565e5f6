//! VMs that move to another host while they run: at every point exactly one host runs the guest, or none while a task decides, and the
//! inventory says where it is.

use vmseal_api::id::HostId;

use super::*;
use crate::store::hosts;

/// The name of the other host.
const OTHER_HOST: &str = "there";

/// A VM that runs, and another host.
pub(super) async fn before(fixture: &Fixture) -> VmId {
    let (other, _) = fixture.add_host(OTHER_HOST).await;
    fixture.share_datastore(other, OTHER_HOST).await;
    fixture.running("web").await
}

async fn other(fixture: &Fixture) -> HostId {
    let found = hosts::find(&mut fixture.store.read().await.unwrap(), OTHER_HOST).await;
    found.unwrap().unwrap().id
}

pub(super) async fn operation(fixture: &Fixture, vm: VmId) -> Operation {
    let to = other(fixture).await;
    Operation::MigrateVm { vm, from: fixture.host, to, encrypted: true }
}

pub(super) fn any(vm: VmId) -> Operation {
    Operation::MigrateVm { vm, from: HostId::new(), to: HostId::new(), encrypted: true }
}

/// The guest runs at the other host, which has its key, and nothing of it is left at the first.
pub(super) async fn assert_done(fixture: &Fixture, vm: VmId, what: &str) {
    assert_eq!(fixture.vm(vm).await.unwrap().host, other(fixture).await, "{what}");
    assert!(
        fixture.agent_of(OTHER_HOST).runs(vm) && !fixture.agent.runs(vm),
        "{what}: where it runs"
    );
    fixture
        .eventually("the first host has forgotten it", async || {
            (!fixture.agent.registered().contains(&vm)).then_some(())
        })
        .await;
    fixture
        .eventually("the other host has its key", async || {
            fixture.agent_of(OTHER_HOST).keys_held().contains(&vm).then_some(())
        })
        .await;
}

/// It runs at the other host, and the task says so; what is left of it is removed.
pub(super) async fn assert_unfinished(fixture: &Fixture, vm: VmId, problem: &Problem, what: &str) {
    assert!(problem.detail.contains("runs on the other host"), "{what}: {problem}");
    assert_done(fixture, vm, what).await;
}

/// The guest runs where it was, and the other host knows nothing of it.
pub(super) async fn assert_undone(fixture: &Fixture, vm: VmId, what: &str) {
    fixture.assert_whole(vm, Power::Running, what).await;
    assert!(
        fixture.agent.runs(vm) && !fixture.agent_of(OTHER_HOST).runs(vm),
        "{what}: where it runs"
    );
    fixture
        .eventually("the other host has forgotten it", async || {
            (!fixture.agent_of(OTHER_HOST).registered().contains(&vm)).then_some(())
        })
        .await;
}

#[tokio::test]
async fn a_migration_is_done_or_undone_at_every_step() {
    matrix(Kind::Migrate).await;
}
