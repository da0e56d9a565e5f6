//! A policy that asks for encrypted connections to Ceph.

use vmseal_api::datastore::{Messenger, RbdPool};
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, HostAgent as _};
use vmseal_api::id::DatastoreId;
use vmseal_api::model::TaskState;
use vmseal_api::request::MoveVm;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::operation::Operation;
use crate::services::mirror;
use crate::store::datastores;
use crate::testing::Fixture;

/// A pool whose connections are in the clear, as a datastore of the fixture's host.
async fn add_pool(fixture: &Fixture) {
    let pool = RbdPool {
        monitors: "v2:10.0.0.1:3300".to_owned(),
        user: "client.vmseal".to_owned(),
        keyring: "/etc/ceph/keyring".into(),
        pool: "vms".to_owned(),
        namespace: None,
        data_pool: None,
        messenger: Messenger::Crc,
    };
    let location = DatastoreLocation::Rbd { path: "/ceph".into(), pool: Box::new(pool) };
    let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
    fixture.agent.probe_datastore(spec.clone()).await.unwrap();
    let mut write = fixture.store.write().await.unwrap();
    let local = datastores::find(&mut write, "local").await.unwrap().unwrap();
    let on = datastores::OnHost { location: spec.location, ..local.hosts[0].clone() };
    let (id, name) = (spec.datastore, "ceph".to_owned());
    let added = datastores::Datastore { id, name, hosts: vec![on], usage: local.usage };
    datastores::insert(&mut write, &added).await.unwrap();
    write.commit().await.unwrap();
}

#[tokio::test]
async fn vms_of_a_policy_that_asks_for_encrypted_connections_start_with_them_alone() {
    let fixture = Fixture::new().await;
    add_pool(&fixture).await;
    let vm = fixture.made("web", "encrypted").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let asks = async |messenger, dry_run| {
        let request = SetPolicy { messenger: Some(messenger), ..SetPolicy::default() };
        match set(&services, &me, "encrypted", request, dry_run).await.unwrap() {
            Outcome::Planned(plan) => plan.steps.concat(),
            Outcome::Done(policy) => format!("{:?}", policy.messenger),
        }
    };
    let moved = async || {
        let request = MoveVm { datastore: "ceph".to_owned(), disks: Vec::new(), rate: None };
        mirror::move_disks(&services, &me, "web", request, false).await
    };
    let start = Operation::StartVm { vm, boot_once: None };

    assert!(asks(Messenger::Secure, true).await.contains("no VM needs anything"));
    assert_eq!(asks(Messenger::Secure, false).await, "Some(Secure)");
    let refused = moved().await.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("'vms'"), "{refused}");
    assert!(refused.detail.contains("vmseal policy set encrypted --messenger any"), "{refused}");

    assert_eq!(asks(Messenger::Crc, false).await, "None");
    let Ok(Outcome::Done(task)) = moved().await else { panic!("it does not move") };
    fixture.ends_well(task.id).await;
    let planned = asks(Messenger::Secure, true).await;
    assert!(planned.contains("VM 'web': its disk") && planned.contains("'vms'"), "{planned}");
    asks(Messenger::Secure, false).await;
    let task = fixture.begin(start.clone(), "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    assert!(ended.problem.unwrap().detail.contains("messenger 'crc'"));
    fixture.assert_whole(vm, Power::Off, "it was not started").await;
    asks(Messenger::Crc, false).await;
    fixture.done(start, "web").await;
}
