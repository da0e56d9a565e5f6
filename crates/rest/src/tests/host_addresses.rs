//! Changes of the addresses of hosts.

use axum::http::Method;
use serde_json::json;

use super::*;

#[tokio::test]
async fn a_hosts_address_can_be_changed_and_not_to_another_hosts() {
    let api = Api::new().await;
    let mut write = api.fixture.store.write().await.unwrap();
    let other = hosts::Host {
        id: vmseal_api::id::HostId::new(),
        name: "other".to_owned(),
        address: "192.0.2.9:8444".to_owned(),
        description: None,
        maintenance: Default::default(),
    };
    hosts::insert(&mut write, &other).await.unwrap();
    write.commit().await.unwrap();
    let set = async |path: &str, address: &str| {
        api.raw(Method::PATCH, path, json!({ "address": address }).to_string()).await
    };
    let before = api.get("hosts/here").await.body["address"].clone();
    set("hosts/here", "nonsense").await.assert_field("address");
    let taken = set("hosts/here", "192.0.2.9:8444").await;
    assert_eq!(taken.assert_problem(409, "already-exists").body["field"], "address");
    set("hosts/none", "192.0.2.7:8444").await.assert_problem(404, "not-found");
    let planned = set("hosts/here?dry_run=true", "192.0.2.7:8444").await;
    assert_eq!((planned.status.as_u16(), &planned.body["kind"]), (200, &json!("host.set")));
    assert_eq!(api.get("hosts/here").await.body["address"], before);

    let changed = set("hosts/here", "192.0.2.7:8444").await;
    assert_eq!(
        (changed.status.as_u16(), &changed.body["address"]),
        (200, &json!("192.0.2.7:8444"))
    );
    let events = api.get("events?kind=host.address-changed").await.body;
    let told = events["items"][0]["detail"].as_str().unwrap();
    assert!(told.ends_with("to 192.0.2.7:8444"), "{told}");
    // A host may keep its own address, and the other one's is free once that has changed.
    assert_eq!(set("hosts/here", "192.0.2.7:8444").await.status, 200);
    assert_eq!(set("hosts/other", "host.example:8444").await.status, 200);
    assert_eq!(set("hosts/here", "192.0.2.9:8444").await.status, 200);
    set("hosts/here", "HOST.example:8444").await.assert_problem(409, "already-exists");
}
