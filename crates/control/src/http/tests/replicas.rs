//! Replicas by policy.

use serde_json::json;

use super::{Api, vm_with};

/// A policy names a datastore that somebody has; each disk's host has to have it, and not as the disk's own.
#[tokio::test]
async fn a_policy_has_disks_replicated_to_another_datastore_of_their_host() {
    let api = Api::new().await;
    let second = api.plant.directory.path().join("second");
    std::fs::create_dir(&second).unwrap();
    let place = json!({ "kind": "dir", "path": second });
    let added = json!({ "name": "second", "host": "here", "location": place });
    assert_eq!(api.post("datastores", added).await.status.as_u16(), 201);
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
    // It is not forgotten while a replica is on it.
    api.delete("datastores/second").await.assert_problem(409, "in-use");
}
