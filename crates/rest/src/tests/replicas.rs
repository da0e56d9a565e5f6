//! Replicas by policy.

use serde_json::{Value, json};

use super::{Api, vm_with};

/// The directory of the host's datastore `second`.
async fn add_second(api: &Api) -> std::path::PathBuf {
    let second = api.fixture.directory.path().join("second");
    std::fs::create_dir(&second).unwrap();
    let place = json!({ "kind": "dir", "path": second });
    let added = json!({ "name": "second", "host": "here", "location": place });
    assert_eq!(api.post("datastores", added).await.status.as_u16(), 201);
    second
}

/// A policy names a datastore that some host has; each disk's host must have it, and it must not be the disk's own.
#[tokio::test]
async fn a_policy_has_disks_replicated_to_another_datastore_of_their_host() {
    let api = Api::new().await;
    add_second(&api).await;
    let policy = |name: &str, to: &str, rate: u64| {
        let replica = json!({ "datastore": to, "bytes_per_second": rate });
        json!({ "name": name, "encryption": true, "replica": replica })
    };
    let rate = 5 << 20;
    let nowhere = api.post("policies", policy("kept", "nowhere", rate)).await;
    nowhere.assert_problem(404, "not-found");
    assert_eq!(nowhere.body["field"], "replica.datastore");
    for rate in [0, (1 << 20) - 1, (1 << 40) + 1] {
        let refused = api.post("policies", policy("kept", "second", rate)).await;
        refused.assert_field("replica.bytes_per_second");
    }
    for (name, to) in [("kept", "second"), ("same", "local")] {
        let added = api.post("policies", policy(name, to, rate)).await;
        assert_eq!(added.status.as_u16(), 201, "{}", added.body);
        let shown = api.get(&format!("policies/{name}")).await.body;
        assert_eq!(shown["replica"]["bytes_per_second"], json!(rate));
    }
    api.post("vms", vm_with("/policy", json!("same"))).await.assert_field("disks[0]");
    api.done(api.post("vms", vm_with("/policy", json!("kept"))).await).await;
    let shown = api.get("vms/web").await.body;
    let expected = json!({ "datastore": "second", "bytes_per_second": rate });
    assert_eq!(shown["disks"][1]["replica"], expected, "{shown}");
    // It cannot be removed while a replica is on it.
    api.delete("datastores/second").await.assert_problem(409, "in-use");
}

/// The status comes from the host's filter, while one writes the replica.
#[tokio::test]
async fn how_far_a_replica_is_behind_is_shown_while_its_vm_runs() {
    let api = Api::new().await;
    let second = add_second(&api).await;
    let replica = json!({ "datastore": "second", "bytes_per_second": 5 << 20 });
    let policy = json!({ "name": "kept", "encryption": true, "replica": replica });
    assert_eq!(api.post("policies", policy).await.status.as_u16(), 201);
    api.done(api.post("vms", vm_with("/policy", json!("kept"))).await).await;
    api.done(api.post("vms", vm_with("/name", json!("bare"))).await).await;
    let place = "vms/web/disks/root/replica";
    let refused = async |path: &str, word: &str| {
        let answer = api.get(path).await;
        let said = answer.assert_problem(409, "wrong-state").body["detail"].to_string();
        assert!(said.contains(word), "{path}: {said}");
    };
    for unknown in ["vms/web/disks/none/replica", "vms/none/disks/root/replica"] {
        api.get(unknown).await.assert_problem(404, "not-found");
    }
    refused(place, "while its VM is off").await;
    refused("vms/bare/disks/root/replica", "has no replica: its policy").await;

    api.done(api.post("vms/web/start", Value::Null).await).await;
    let shown = api.get(place).await;
    let caught_up = json!({ "dirty_bytes": 0, "lag_milliseconds": 0 });
    assert_eq!((shown.status.as_u16(), &shown.body), (200, &caught_up));
    api.fixture.agent.change_mark(&second);
    refused(place, "without its replica").await;
    api.done(api.post("vms/web/stop", json!({ "force": true })).await).await;
    refused(place, "while its VM is off").await;
    api.fixture.agent.set_reachable(false);
    api.get(place).await.assert_problem(502, "unreachable");
}
