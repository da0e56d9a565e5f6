//! A policy that asks for encrypted connections to Ceph.

use vmseal_api::datastore::Messenger;
use vmseal_api::model::TaskState;
use vmseal_api::redundancy::{Layout, PoolFacts, PoolLayout};
use vmseal_api::request::MoveVm;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::operation::Operation;
use crate::services::mirror;
use crate::testing::Fixture;

#[tokio::test]
async fn vms_of_a_policy_that_asks_for_encrypted_connections_start_with_them_alone() {
    let fixture = Fixture::new().await;
    fixture.add_pool("ceph", Vec::new()).await;
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

fn mirrored(copies: u32, copies_min: u32) -> Vec<PoolFacts> {
    let layout = PoolLayout::Mirroring { copies, copies_min };
    vec![PoolFacts {
        pool: "vms".to_owned(),
        layout,
        failure_domain: "host".to_owned(),
        compression: None,
        fullness: None,
    }]
}

#[tokio::test]
async fn disks_of_a_policy_that_asks_for_redundancy_are_where_there_is_enough_of_it() {
    let fixture = Fixture::new().await;
    fixture.add_pool("ceph", mirrored(3, 2)).await;
    let vm = fixture.made("web", "encrypted").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let asks = async |failures, layout, dry_run| {
        let redundancy = Some(Redundancy { failures, layout, ..Redundancy::default() });
        let request = SetPolicy { redundancy, ..SetPolicy::default() };
        match set(&services, &me, "encrypted", request, dry_run).await? {
            Outcome::Planned(plan) => Ok(plan.steps.concat()),
            Outcome::Done(policy) => Ok::<_, Problem>(policy.redundancy.to_string()),
        }
    };
    let moved = async |to: &str| {
        let request = MoveVm { datastore: to.to_owned(), disks: Vec::new(), rate: None };
        mirror::move_disks(&services, &me, "web", request, false).await
    };
    let refused = asks(9, None, false).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("redundancy.failures"));

    // A VM that has its disks elsewhere keeps them, and is named.
    let planned = asks(2, None, true).await.unwrap();
    assert!(planned.contains("VM 'web': its disk") && planned.contains("a directory"), "{planned}");
    assert_eq!(asks(2, None, false).await.unwrap(), "2 failures");
    let refused = moved("ceph").await.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("guests go on with 1"), "{refused}");
    asks(1, Some(Layout::ErasureCoding), false).await.unwrap();
    let refused = moved("ceph").await.map(drop).unwrap_err();
    assert!(refused.detail.contains("3 copies, not erasure-coding"), "{refused}");
    asks(1, Some(Layout::Mirroring), false).await.unwrap();
    let Ok(Outcome::Done(task)) = moved("ceph").await else { panic!("it does not move") };
    fixture.ends_well(task.id).await;
    let refused = moved("local").await.map(drop).unwrap_err();
    assert!(refused.detail.contains("a directory"), "{refused}");
    assert!(asks(1, None, true).await.unwrap().contains("no VM needs anything"));

    // What is there starts, also where its pool has lost its redundancy.
    asks(3, None, false).await.unwrap();
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    asks(0, None, false).await.unwrap();
    let Ok(Outcome::Done(task)) = moved("local").await else { panic!("it does not move") };
    fixture.ends_well(task.id).await;
}

/// Changes the policy `encrypted`. What redundancy it asks for then, or what a dry run says.
async fn said_of_change(
    services: &Services,
    caller: &Caller,
    request: SetPolicy,
    dry_run: bool,
) -> Result<String, Problem> {
    Ok(match set(services, caller, "encrypted", request, dry_run).await? {
        Outcome::Planned(plan) => plan.steps.concat(),
        Outcome::Done(policy) => policy.redundancy.to_string(),
    })
}

/// A pool of names and headers, and one of data, which is erasure-coded.
fn coded(data: u32, coding: u32) -> Vec<PoolFacts> {
    let names = mirrored(coding + 1, 1).remove(0);
    let layout = PoolLayout::ErasureCoding { data, coding, parts_min: data };
    let data = PoolFacts { pool: "ec".to_owned(), layout, ..names.clone() };
    vec![names, data]
}

#[tokio::test]
async fn disks_of_a_policy_with_a_number_of_data_chunks_are_in_pools_that_have_so_many() {
    let fixture = Fixture::new().await;
    fixture.add_pool("ceph", coded(2, 2)).await;
    fixture.made("web", "encrypted").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let changed = async |request, dry_run| said_of_change(&services, &me, request, dry_run).await;
    let coding = |data_chunks| {
        let layout = Some(Layout::ErasureCoding);
        let redundancy = Redundancy { failures: 2, layout, data_chunks, failure_domain: None };
        SetPolicy { redundancy: Some(redundancy), ..SetPolicy::default() }
    };
    let chunks = |number| SetPolicy { data_chunks: Some(number), ..SetPolicy::default() };
    let moved = async || {
        let request = MoveVm { datastore: "ceph".to_owned(), disks: Vec::new(), rate: None };
        mirror::move_disks(&services, &me, "web", request, false).await
    };
    let refused = changed(chunks(4), false).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("data_chunks"));
    assert!(refused.detail.contains("erasure coding"), "{refused}");
    let refused = changed(coding(Some(1)), false).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("redundancy.data_chunks"));

    let four = "2 failures, erasure-coding, 4 data chunks";
    assert_eq!(changed(coding(Some(4)), false).await.unwrap(), four);
    let refused = moved().await.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("pool 'ec' has k=2 m=2, not k=4 (data chunks)"), "{refused}");
    assert!(refused.detail.contains("--data-chunks NUMBER"), "{refused}");
    // It stays where the layout does.
    assert_eq!(changed(coding(None), false).await.unwrap(), four);
    let two = "2 failures, erasure-coding, 2 data chunks";
    assert_eq!(changed(chunks(2), false).await.unwrap(), two);
    let Ok(Outcome::Done(task)) = moved().await else { panic!("it does not move") };
    fixture.ends_well(task.id).await;
    assert!(changed(coding(Some(2)), true).await.unwrap().contains("no VM needs anything"));
    let planned = changed(chunks(4), true).await.unwrap();
    assert!(planned.contains("not k=4") && planned.contains("with an alarm"), "{planned}");

    assert_eq!(changed(chunks(0), false).await.unwrap(), "2 failures, erasure-coding");
    assert_eq!(changed(chunks(4), false).await.unwrap(), four);
    // Copies have no data chunks.
    let redundancy = Some(Redundancy { failures: 1, ..Redundancy::default() });
    let failures = SetPolicy { redundancy, ..SetPolicy::default() };
    assert_eq!(changed(failures, false).await.unwrap(), "1 failure");
}

#[tokio::test]
async fn disks_of_a_policy_with_a_failure_domain_are_where_copies_are_kept_apart_on_it() {
    let fixture = Fixture::new().await;
    let racks = PoolFacts { failure_domain: "rack".to_owned(), ..mirrored(3, 2).remove(0) };
    fixture.add_pool("ceph", vec![racks]).await;
    fixture.made("web", "encrypted").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let changed = async |request, dry_run| said_of_change(&services, &me, request, dry_run).await;
    let domain = |name: &str| {
        let failure_domain = Some(name.to_owned());
        SetPolicy { failure_domain, ..SetPolicy::default() }
    };
    let moved = async |to: &str| {
        let request = MoveVm { datastore: to.to_owned(), disks: Vec::new(), rate: None };
        mirror::move_disks(&services, &me, "web", request, false).await
    };
    let refused = changed(domain("shelf"), false).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("failure_domain"));
    assert!(refused.detail.contains("rack"), "{refused}");

    // It stays where the number of failures is changed alone.
    assert_eq!(changed(domain("row"), false).await.unwrap(), "each copy in another row");
    let redundancy = Some(Redundancy { failures: 1, ..Redundancy::default() });
    let failures = SetPolicy { redundancy, ..SetPolicy::default() };
    assert_eq!(changed(failures, false).await.unwrap(), "1 failure, each copy in another row");

    let refused = moved("ceph").await.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(
        refused.detail.contains("pool 'vms' keeps each copy in another rack, not in another row"),
        "{refused}"
    );
    // What is smaller is met, too.
    changed(domain("host"), false).await.unwrap();
    let Ok(Outcome::Done(task)) = moved("ceph").await else { panic!("it does not move") };
    fixture.ends_well(task.id).await;
    let refused = moved("local").await.map(drop).unwrap_err();
    assert!(refused.detail.contains("a directory"), "{refused}");
    let planned = changed(domain("datacenter"), true).await.unwrap();
    assert!(planned.contains("not in another datacenter"), "{planned}");

    // Without it, and without failures, disks go anywhere.
    let redundancy = Some(Redundancy::default());
    let nothing = SetPolicy { redundancy, ..domain("") };
    assert_eq!(changed(nothing, false).await.unwrap(), "any number of failures");
    let Ok(Outcome::Done(task)) = moved("local").await else { panic!("it does not move") };
    fixture.ends_well(task.id).await;
}
