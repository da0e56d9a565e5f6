//! Dirty bitmaps of disks in use.

use vmseal_agent::simulated::{Call, Fault};
use vmseal_api::problem::ErrorCode;

use super::*;

const PLACE: &str = "vms/web/disks/root/bitmaps";

/// A VM that runs.
async fn with_vm() -> Api {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    api.done(api.post("vms/web/start", Value::Null).await).await;
    api
}

async fn names(api: &Api) -> Value {
    let listed = api.get(PLACE).await;
    assert_eq!(listed.status, 200, "{}", listed.body);
    listed.body["items"].as_array().unwrap().iter().map(|it| it["name"].clone()).collect()
}

async fn events(api: &Api) -> Vec<Value> {
    let events = api.get("events?kind=disk&limit=1000").await.body["items"].take();
    events.as_array().unwrap().clone()
}

#[tokio::test]
async fn one_is_started_cleared_and_removed_and_each_is_an_event() {
    let api = with_vm().await;
    let name = |name: &str| json!({ "name": name });
    assert_eq!(names(&api).await, json!([]));
    let added = api.post(PLACE, name("sunday")).await;
    assert_eq!((added.status.as_u16(), &added.body["dirty_bytes"]), (201, &json!(0)));
    api.post(PLACE, name("sunday")).await.assert_problem(409, "already-exists");
    let cleared = api.post(&format!("{PLACE}/sunday/clear"), Value::Null).await;
    assert_eq!(cleared.status, 200, "{}", cleared.body);
    assert!(cleared.body["since"].as_str() > added.body["since"].as_str(), "{}", cleared.body);
    assert_eq!(names(&api).await, json!(["sunday"]));
    assert_eq!(api.delete(&format!("{PLACE}/sunday")).await.status, 204);
    assert_eq!(names(&api).await, json!([]));
    let told = events(&api).await;
    let kinds: Vec<_> = told.iter().map(|event| event["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["disk.bitmap-added", "disk.bitmap-cleared", "disk.bitmap-removed"]);
    for event in told {
        assert_eq!((&event["actor"], &event["target"]), (&json!("me"), &json!("web")));
        assert_eq!(event["detail"], "bitmap 'sunday' of disk 'root'");
    }
}

#[tokio::test]
async fn impossible_requests_are_refused_and_have_no_event() {
    let api = with_vm().await;
    for bad in ["", "a b", "..", "-f", &"a".repeat(65)] {
        api.post(PLACE, json!({ "name": bad })).await.assert_field("name");
    }
    api.delete(&format!("{PLACE}/a%2Fb")).await.assert_field("name");
    for (method, path, status, code) in [
        (Method::POST, format!("{PLACE}/none/clear"), 404, "not-found"),
        (Method::DELETE, format!("{PLACE}/none"), 404, "not-found"),
        (Method::GET, "vms/web/disks/none/bitmaps".to_owned(), 404, "not-found"),
        (Method::GET, "vms/none/disks/root/bitmaps".to_owned(), 404, "not-found"),
    ] {
        api.raw(method, &path, "").await.assert_problem(status, code);
    }
    for number in 0..4 {
        assert_eq!(api.post(PLACE, json!({ "name": format!("b{number}") })).await.status, 201);
    }
    api.post(PLACE, json!({ "name": "more" })).await.assert_problem(429, "limit-exceeded");
    let known = events(&api).await.len();
    api.fixture.agent.inject(Call::ChangeBitmap, 1, Fault::Refuse(ErrorCode::InUse));
    api.delete(&format!("{PLACE}/b0")).await.assert_problem(409, "in-use");
    assert_eq!(events(&api).await.len(), known);
    // They go on when the VM runs again.
    let kept = names(&api).await;
    api.done(api.post("vms/web/stop", json!({ "force": true })).await).await;
    let off = api.get(PLACE).await;
    let said = off.assert_problem(409, "wrong-state").body["detail"].to_string();
    assert!(said.contains("does not run") && said.contains("Start it"), "{said}");
    api.post(PLACE, json!({ "name": "b0" })).await.assert_problem(409, "wrong-state");
    api.done(api.post("vms/web/start", Value::Null).await).await;
    assert_eq!(names(&api).await, kept);
}

#[tokio::test]
async fn a_dry_run_says_what_would_be_done_or_refuses_as_it_would_be() {
    let api = with_vm().await;
    api.post(PLACE, json!({ "name": "sunday" })).await;
    let (told, sunday) = (events(&api).await, json!(["sunday"]));
    let of = |name: &str| json!({ "name": name });
    for (method, path, body, status, said) in [
        (Method::POST, PLACE.to_owned(), of("monday"), 200, "disk.bitmap.add"),
        (Method::POST, format!("{PLACE}/sunday/clear"), Value::Null, 200, "disk.bitmap.clear"),
        (Method::DELETE, format!("{PLACE}/sunday"), Value::Null, 200, "disk.bitmap.remove"),
        (Method::POST, PLACE.to_owned(), of("sunday"), 409, "already"),
        (Method::DELETE, format!("{PLACE}/monday"), Value::Null, 404, "full backup"),
    ] {
        let answer = api.raw(method, &format!("{path}?dry_run=true"), body.to_string()).await;
        assert_eq!(answer.status.as_u16(), status, "{path}: {}", answer.body);
        assert!(answer.body.to_string().contains(said), "{path}: {}", answer.body);
    }
    assert_eq!((events(&api).await, names(&api).await), (told, sunday));
}

/// The cache size of a policy reaches the host of its disks, and is limited for each VM.
#[tokio::test]
async fn a_policy_gives_disks_a_cache_and_a_vm_no_more_than_it_may_have() {
    let api = Api::new().await;
    let policy =
        |name: &str, cache: u64| json!({ "name": name, "encryption": true, "cache": cache });
    for cache in [0, 4096, (1 << 20) + 1, 257 << 20] {
        api.post("policies", policy("cached", cache)).await.assert_field("cache");
    }
    for (name, cache) in [("cached", 64 << 20), ("much", 256 << 20)] {
        let added = api.post("policies", policy(name, cache)).await;
        assert_eq!((added.status.as_u16(), &added.body["cache"]), (201, &json!(cache)));
        assert_eq!(api.get(&format!("policies/{name}")).await.body["cache"], json!(cache));
    }
    api.post("vms", vm_with("/policy", json!("much"))).await.assert_field("disks[1]");
    api.done(api.post("vms", vm_with("/policy", json!("cached"))).await).await;
    let shown = api.get("vms/web").await.body;
    assert_eq!(shown["disks"][1]["cache"], json!(64 << 20), "{shown}");
    api.done(api.post("vms", vm_with("/name", json!("bare"))).await).await;
    assert!(api.get("vms/bare").await.body["disks"][0]["cache"].is_null(), "nobody asked for one");
}
