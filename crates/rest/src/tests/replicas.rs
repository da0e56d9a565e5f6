//! Replicas by policy.

use serde_json::{Value, json};
use vmseal_api::host::version::{GROW_REPLICA, MIRROR_REPLICAS, REPLICA_SNAPSHOTS};

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

/// Makes a VM whose disks are replicated to the datastore `second`; returns the directory of that.
async fn add_web(api: &Api) -> std::path::PathBuf {
    let second = add_second(api).await;
    let replica = json!({ "datastore": "second", "bytes_per_second": 5 << 20 });
    let policy = json!({ "name": "kept", "encryption": true, "replica": replica });
    assert_eq!(api.post("policies", policy).await.status.as_u16(), 201);
    api.done(api.post("vms", vm_with("/policy", json!("kept"))).await).await;
    second
}

/// The status comes from the host's filter, while one writes the replica.
#[tokio::test]
async fn how_far_a_replica_is_behind_is_shown_while_its_vm_runs() {
    let api = Api::new().await;
    let second = add_web(&api).await;
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

/// What a snapshot keeps of a disk does not change its replica. What is made of such a VM has replicas of its own.
#[tokio::test]
async fn a_vm_with_replicas_grows_and_is_backed_up_restored_cloned_and_kept_by_snapshots() {
    let api = Api::new().await;
    add_web(&api).await;
    let done = async |path: &str, body: Value| {
        let ended = api.done(api.post(path, body).await).await;
        assert_eq!(ended["state"], "done", "{path}: {ended}");
    };
    done("vms/web/disks/root/resize", json!({ "size": 4 << 20 })).await;
    done("vms/web/start", Value::Null).await;
    done("vms/web/disks/root/resize", json!({ "size": 8 << 20 })).await;
    let shown = api.get("vms/web").await.body;
    let root = shown["disks"].as_array().unwrap().iter().find(|disk| disk["name"] == "root");
    assert_eq!(root.unwrap()["size"], 8 << 20, "{shown}");
    done("vms/web/backups", json!({ "name": "one", "directory": "/backups" })).await;
    done("vms/web/clone", json!({ "name": "copied" })).await;
    done("vms/web/backups/one/restore", json!({ "new_vm": "other" })).await;
    done("vms/web/snapshots", json!({ "name": "first" })).await;
    let linked = json!({ "name": "linked", "snapshot": "first", "linked": true });
    let refused = api.post("vms/web/clone", linked).await;
    let said = refused.assert_problem(409, "wrong-state").body["detail"].to_string();
    assert!(said.contains("make a full clone"), "{said}");
    done("vms/web/snapshots/first/revert", json!({ "running": true })).await;
    api.done(api.delete("vms/web/snapshots/first").await).await;
    done("vms/web/stop", json!({ "force": true })).await;
    done("vms/web/backups/one/restore", json!({})).await;
    api.done(api.delete("vms/web").await).await;
    done("vms/web/backups/one/restore", json!({})).await;
    for name in ["web", "copied", "other"] {
        let shown = api.get(&format!("vms/{name}")).await.body;
        let disks = shown["disks"].as_array().unwrap();
        let kept = disks.iter().filter(|disk| disk["replica"]["datastore"] == "second");
        assert_eq!(kept.count(), 2, "{shown}");
    }

    api.fixture.agent.lack_features(&[REPLICA_SNAPSHOTS, GROW_REPLICA]);
    api.fixture.agent.restart();
    let refused = async || {
        let answer = api.post("vms/web/backups?dry_run=true", Value::Null).await;
        (answer.status.as_u16() == 422).then(|| answer.body["detail"].to_string())
    };
    let said = api.fixture.eventually("the server knows what the agent cannot do", refused).await;
    assert!(said.contains("upgrade vmseal there"), "{said}");
    let snapshot = api.post("vms/web/snapshots?dry_run=true", Value::Null).await;
    snapshot.assert_problem(422, "unsupported");
    let longer = json!({ "size": 16 << 20 });
    let longer = api.post("vms/web/disks/root/resize?dry_run=true", longer).await;
    longer.assert_problem(422, "unsupported");
}

/// A copy gets a replica of its own, where the former one was: until that is complete there is no second copy, which is said before and after.
#[tokio::test]
async fn a_vm_with_replicas_is_encrypted_moved_and_decrypted() {
    let api = Api::new().await;
    add_second(&api).await;
    let third = api.fixture.directory.path().join("third");
    std::fs::create_dir(&third).unwrap();
    let place = json!({ "kind": "dir", "path": third });
    let added = json!({ "name": "third", "host": "here", "location": place });
    assert_eq!(api.post("datastores", added).await.status.as_u16(), 201);
    for (name, encryption) in [("open", false), ("kept", true)] {
        let replica = json!({ "datastore": "second", "bytes_per_second": 5 << 20 });
        let policy = json!({ "name": name, "encryption": encryption, "replica": replica });
        assert_eq!(api.post("policies", policy).await.status.as_u16(), 201);
    }
    api.done(api.post("vms", vm_with("/policy", json!("open"))).await).await;
    let refused = async |path: &str, body: Value, word: &str| {
        let answer = api.post(path, body).await;
        let said = answer.assert_problem(409, "wrong-state").body["detail"].to_string();
        assert!(said.contains(word), "{path}: {said}");
    };
    refused("vms/web/encrypt", json!({ "in_place": true }), "leave out --in-place").await;
    let planned = api.post("vms/web/encrypt?dry_run=true", Value::Null).await.body;
    let warned = planned["warnings"].to_string();
    assert!(warned.contains("no second copy") && warned.contains("next start"), "{planned}");
    api.done(api.post("vms/web/start", Value::Null).await).await;
    let steps = [
        ("encrypt", Value::Null, "vm.encrypted"),
        ("recrypt", json!({ "deep": true }), "vm.deep-recrypted"),
        ("move", json!({ "datastore": "third" }), "vm.moved"),
        ("decrypt", Value::Null, "vm.decrypted"),
    ];
    for (what, body, event) in steps {
        let ended = api.done(api.post(&format!("vms/web/{what}"), body).await).await;
        assert_eq!(ended["state"], "done", "{what}: {ended}");
        let told = api.get(&format!("events?kind={event}")).await.body["items"].to_string();
        assert!(told.contains("no second copy of"), "{what}: {told}");
        let shown = api.get("vms/web").await.body;
        let disks = shown["disks"].as_array().unwrap();
        assert!(disks.iter().all(|disk| disk["replica"]["datastore"] == "second"), "{shown}");
        assert!(disks.iter().all(|disk| disk["encrypted"] == (what != "decrypt")), "{shown}");
    }
    refused("vms/web/move", json!({ "datastore": "second" }), "another datastore than its disk")
        .await;
    assert_eq!(api.fixture.agent.mirrored(), (vec![], vec![]));

    api.fixture.agent.lack_features(&[MIRROR_REPLICAS]);
    api.fixture.agent.restart();
    let refused = async || {
        let answer = api.post("vms/web/encrypt?dry_run=true", Value::Null).await;
        (answer.status.as_u16() == 422).then(|| answer.body["detail"].to_string())
    };
    let said = api.fixture.eventually("the server knows what the agent cannot do", refused).await;
    assert!(said.contains("upgrade vmseal there"), "{said}");
}
