//! Recryption through the API.

use super::*;

#[tokio::test]
async fn a_vm_is_given_a_key_of_another_provider_and_shows_it() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let before = api.get("vms/web").await.body;
    assert_eq!(before["provider"], "keys");
    let vm = before["id"].as_str().unwrap().parse().unwrap();
    api.fixture.recryption(vm).await;
    // Its backup has not been verified.
    let other = json!({ "provider": "other" });
    api.post("vms/web/recrypt", other.clone()).await.assert_problem(409, "wrong-state");
    let mut write = api.fixture.store.write().await.unwrap();
    let row = vmseal_control::store::providers::find(&mut write, "other").await.unwrap().unwrap();
    vmseal_control::store::providers::set_verified(&mut write, row.id).await.unwrap();
    write.commit().await.unwrap();

    let ended = api.done(api.post("vms/web/recrypt", other).await).await;
    assert_eq!((&ended["state"], &ended["kind"]), (&json!("done"), &json!("vm.recrypt")));
    let after = api.get("vms/web").await.body;
    assert_eq!(after["provider"], "other");
    assert_eq!(after["key"]["provider"], row.id.to_string());
    assert_ne!(after["key"]["check"], before["key"]["check"]);
    assert_eq!(after["disks"], before["disks"]);

    // Without a provider it is a rotation.
    let ended = api.done(api.post("vms/web/recrypt", Value::Null).await).await;
    assert_eq!(ended["state"], "done", "{ended}");
    let rotated = api.get("vms/web").await.body;
    assert_eq!(rotated["provider"], "other");
    assert_ne!(rotated["key"]["key_id"], after["key"]["key_id"]);
    // The old provider has no key in use.
    api.raw(Method::DELETE, "providers/other", String::new()).await.assert_problem(409, "in-use");
}

#[tokio::test]
async fn what_cannot_be_recrypted_is_refused_before_a_task_begins() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let mut open = vm_with("/policy", json!("plain"));
    open["name"] = json!("open");
    api.done(api.post("vms", open).await).await;
    api.post("vms/none/recrypt", Value::Null).await.assert_problem(404, "not-found");
    api.post("vms/open/recrypt", Value::Null).await.assert_problem(409, "wrong-state");
    let unknown = api.post("vms/web/recrypt", json!({ "provider": "none" })).await;
    assert_eq!(unknown.assert_problem(404, "not-found").body["field"], "provider");
    api.post("vms/web/recrypt", json!({ "provder": "x" })).await.assert_field("provder");
    assert_eq!(api.get("tasks").await.body["items"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_vm_that_runs_is_given_a_new_key() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    api.done(api.post("vms/web/start", Value::Null).await).await;
    let before = api.get("vms/web").await.body;
    let planned = api.post("vms/web/recrypt?dry_run=true", Value::Null).await;
    assert_eq!(planned.status, 200, "{}", planned.body);
    let ended = api.done(api.post("vms/web/recrypt", Value::Null).await).await;
    assert_eq!(ended["state"], "done", "{ended}");
    let after = api.get("vms/web").await.body;
    assert_eq!(after["power"], "running");
    assert_ne!(after["key"]["key_id"], before["key"]["key_id"]);
}
