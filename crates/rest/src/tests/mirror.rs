//! Encryption, decryption and deep recryption through the API.

use vmseal_api::host::version::MIRROR;

use super::*;

/// A VM whose policy does not encrypt.
async fn plain(api: &Api) {
    api.done(api.post("vms", vm_with("/policy", json!("plain"))).await).await;
}

fn encrypted(vm: &Value) -> Vec<&Value> {
    vm["disks"].as_array().unwrap().iter().map(|disk| &disk["encrypted"]).collect()
}

#[tokio::test]
async fn a_vm_is_encrypted_given_new_data_keys_and_decrypted() {
    for runs in [false, true] {
        let api = Api::new().await;
        plain(&api).await;
        if runs {
            api.done(api.post("vms/web/start", Value::Null).await).await;
        }
        let power = || async { api.get("vms/web").await.body["power"].clone() };
        let before = power().await;
        let ended = api.done(api.post("vms/web/encrypt", Value::Null).await).await;
        assert_eq!((&ended["state"], &ended["kind"]), (&json!("done"), &json!("vm.encrypt")));
        let sealed = api.get("vms/web").await.body;
        assert_eq!((&sealed["policy"], &sealed["provider"]), (&json!("encrypted"), &json!("keys")));
        assert!(encrypted(&sealed).into_iter().all(|it| *it == json!(true)), "{sealed}");

        let ended = api.done(api.post("vms/web/recrypt", json!({ "deep": true })).await).await;
        assert_eq!((&ended["state"], &ended["kind"]), (&json!("done"), &json!("vm.recrypt-deep")));
        let again = api.get("vms/web").await.body;
        assert_eq!((&again["key"], &again["policy"]), (&sealed["key"], &sealed["policy"]));

        let ended = api.done(api.post("vms/web/decrypt", Value::Null).await).await;
        assert_eq!((&ended["state"], &ended["kind"]), (&json!("done"), &json!("vm.decrypt")));
        let open = api.get("vms/web").await.body;
        assert_eq!((&open["policy"], open.get("key")), (&json!("plain"), None));
        assert!(encrypted(&open).into_iter().all(|it| *it == json!(false)), "{open}");
        assert_eq!(power().await, before);
        assert_eq!(api.fixture.agent.mirrored(), (vec![], vec![]));
    }
}

#[tokio::test]
async fn what_cannot_be_is_refused_before_a_task_begins() {
    let api = Api::new().await;
    plain(&api).await;
    let tasks = async || api.get("tasks").await.body["items"].as_array().unwrap().len();
    let before = tasks().await;
    let refused = async |path: &str, body: Value, status: u16, says: &str| {
        for path in [path.to_owned(), format!("{path}?dry_run=true")] {
            let answer = api.post(&path, body.clone()).await;
            assert_eq!(answer.status.as_u16(), status, "{path}: {}", answer.body);
            assert!(answer.body["detail"].to_string().contains(says), "{path}: {}", answer.body);
        }
    };
    refused("vms/none/encrypt", Value::Null, 404, "none").await;
    refused("vms/web/decrypt", Value::Null, 409, "is not encrypted").await;
    refused("vms/web/recrypt", json!({ "deep": true }), 409, "no disk that is encrypted").await;
    refused("vms/web/encrypt", json!({ "policy": "none" }), 404, "none").await;
    refused("vms/web/encrypt", json!({ "policy": "plain" }), 409, "does not encrypt").await;
    refused("vms/web/encrypt", json!({ "provider": "none" }), 404, "none").await;
    let both = json!({ "deep": true, "provider": "keys" });
    refused("vms/web/recrypt", both, 400, "deep").await;
    api.post("vms/web/encrypt", json!({ "polcy": "x" })).await.assert_field("polcy");

    // A second policy that would do, and one that asks for something else.
    for policy in [
        json!({ "name": "secret", "encryption": true }),
        json!({ "name": "full", "encryption": true, "allocation": "preallocated" }),
    ] {
        assert_eq!(api.post("policies", policy).await.status, 201);
    }
    refused("vms/web/encrypt", Value::Null, 409, "'encrypted', 'secret'").await;
    refused("vms/web/encrypt", json!({ "policy": "full" }), 409, "stay thin").await;

    api.fixture.agent.lack_features(&[MIRROR]);
    api.fixture.agent.restart();
    let lacks = async || {
        let answer = api.post("vms/web/encrypt?dry_run=true", json!({ "policy": "secret" })).await;
        (answer.body["code"] == "unsupported").then_some(())
    };
    api.fixture.eventually("the server sees that the agent cannot do it", lacks).await;
    refused("vms/web/encrypt", json!({ "policy": "secret" }), 422, "upgrade vmseal there").await;
    assert_eq!(tasks().await, before);
}

#[tokio::test]
async fn a_vm_that_is_encrypted_already_is_refused_and_a_paused_one_is_not() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let again = api.post("vms/web/encrypt", Value::Null).await;
    let detail = again.assert_problem(409, "wrong-state").body["detail"].to_string();
    assert!(detail.contains("is encrypted already"), "{detail}");
    api.done(api.post("vms/web/start", Value::Null).await).await;
    assert_eq!(api.post("vms/web/pause", Value::Null).await.status, 200);
    api.done(api.post("vms/web/decrypt", Value::Null).await).await;
    let vm = api.get("vms/web").await.body;
    assert_eq!((&vm["power"], &vm["disks"][0]["encrypted"]), (&json!("paused"), &json!(false)));
}

#[tokio::test]
async fn copies_need_room() {
    let api = Api::new().await;
    plain(&api).await;
    api.fixture.agent.set_free(1 << 20);
    let planned = api.post("vms/web/encrypt?dry_run=true", Value::Null).await;
    let warnings = planned.body["warnings"].to_string();
    assert!(warnings.contains("copies of the disks may grow to"), "{}", planned.body);
    let policy = |name: &str, encryption: bool| json!({ "name": name, "encryption": encryption, "allocation": "preallocated" });
    for policy in [policy("full", false), policy("full-secret", true)] {
        assert_eq!(api.post("policies", policy).await.status, 201);
    }
    api.fixture.agent.set_free(1 << 40);
    let mut full = vm_with("/policy", json!("full"));
    full["name"] = json!("full");
    api.done(api.post("vms", full).await).await;
    api.fixture.agent.set_free(1 << 20);
    for path in ["vms/full/encrypt?dry_run=true", "vms/full/encrypt"] {
        let refused = api.post(path, Value::Null).await;
        assert_eq!(refused.body["code"], "no-space", "{}", refused.body);
    }
}

/// What a task is about to give a VM stays as it is until then.
#[tokio::test]
async fn a_policy_that_a_vm_is_about_to_get_is_kept() {
    let api = Api::new().await;
    plain(&api).await;
    api.fixture.agent.set_work(std::time::Duration::from_secs(600));
    let begun = api.post("vms/web/encrypt", Value::Null).await;
    assert_eq!(begun.status, 202, "{}", begun.body);
    let removed = api.raw(Method::DELETE, "policies/encrypted", String::new()).await;
    removed.assert_problem(409, "in-use");
    let changed = api.raw(Method::PATCH, "policies/encrypted", r#"{"iops": 100}"#).await;
    changed.assert_problem(409, "in-use");
    let task = begun.body["id"].as_str().unwrap();
    api.post(&format!("tasks/{task}/cancel"), Value::Null).await;
    let ended = async || {
        let task = api.get(&format!("tasks/{task}")).await.body;
        (task["state"] == "cancelled").then_some(())
    };
    api.fixture.eventually("it is cancelled", ended).await;
    assert_eq!(api.raw(Method::DELETE, "policies/encrypted", String::new()).await.status, 204);
}

/// The refusal of another policy names the command that it takes.
#[tokio::test]
async fn a_policy_that_encrypts_is_given_by_encrypting() {
    let api = Api::new().await;
    plain(&api).await;
    let set = api.raw(Method::PATCH, "vms/web", r#"{"policy": "encrypted"}"#).await;
    let detail = set.assert_problem(409, "wrong-state").body["detail"].to_string();
    assert!(detail.contains("vmseal vm encrypt web --policy encrypted"), "{detail}");
}

#[tokio::test]
async fn a_copy_has_a_rate_is_paused_and_goes_on() {
    let api = Api::new().await;
    plain(&api).await;
    api.fixture.agent.set_work(std::time::Duration::from_secs(600));
    let begun = api.post("vms/web/encrypt", json!({ "rate": 5 << 20 })).await;
    assert_eq!((begun.status.as_u16(), &begun.body["rate"]), (202, &json!(5 << 20)));
    let path = format!("tasks/{}", begun.body["id"].as_str().unwrap());
    let patched = async |body: &str| api.raw(Method::PATCH, &path, body.to_owned()).await;
    assert_eq!(patched(r#"{"rate": 8388608}"#).await.body["rate"], json!(8 << 20));
    patched(r#"{"rate": 5}"#).await.assert_field("rate");
    patched("{}").await.assert_problem(400, "invalid-request");
    let paused = api.post(&format!("{path}/pause"), Value::Null).await;
    assert_eq!((paused.status.as_u16(), &paused.body["paused"]), (200, &json!(true)));
    api.fixture.agent.set_work(std::time::Duration::ZERO);
    // Its first step, which would have lasted, is done again.
    api.fixture.agent.restart();
    let waits = async || {
        let task = api.get(&path).await.body;
        (task["state"] == "waiting" && task["paused"] == true).then_some(())
    };
    api.fixture.eventually("it waits", waits).await;
    let planned = api.post(&format!("{path}/resume?dry_run=true"), Value::Null).await;
    assert_eq!(planned.body["kind"], "task.resume", "{}", planned.body);
    assert_eq!(patched(r#"{"rate": 0}"#).await.body.get("rate"), None);
    let resumed = api.post(&format!("{path}/resume"), Value::Null).await;
    assert_eq!(resumed.body.get("paused"), None, "{}", resumed.body);
    let done = async || (api.get(&path).await.body["state"] == "done").then_some(());
    api.fixture.eventually("it is done", done).await;
    let late = api.post(&format!("{path}/pause"), Value::Null).await;
    late.assert_problem(409, "wrong-state");
}
