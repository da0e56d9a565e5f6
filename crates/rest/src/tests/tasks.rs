//! Tasks over HTTP: forced stops, and tasks that an operator resolves.

use super::*;
use vmseal_control::store::tasks;

#[tokio::test]
async fn a_forced_stop_takes_over_the_task_that_waits_for_the_guest() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    api.done(api.post("vms/web/start", Value::Null).await).await;
    api.fixture.agent.set_heeds_shutdown(false);
    let graceful = api.post("vms/web/stop", json!({ "timeout_seconds": 600 })).await;
    assert_eq!(graceful.status, 202);
    let again = api.post("vms/web/stop", json!({ "timeout_seconds": 600 })).await;
    again.assert_problem(409, "wrong-state");
    let planned = api.post("vms/web/stop?dry_run=true", json!({ "force": true })).await;
    assert!(
        planned.body["steps"][0].as_str().unwrap().contains("cut the power"),
        "{}",
        planned.body
    );
    let forced = api.post("vms/web/stop", json!({ "force": true })).await;
    assert_eq!((forced.status.as_u16(), &forced.body["id"]), (202, &graceful.body["id"]));
    let ended = api.done(forced).await;
    assert_eq!(ended["state"], json!(TaskState::Done), "{ended}");
    assert_eq!(api.get("vms/web").await.body["power"], "off");
}

#[tokio::test]
async fn a_task_of_another_version_is_shown_and_resolved() {
    let api = Api::new().await;
    let begun = api.post("vms", vm()).await;
    let id = begun.body["id"].as_str().unwrap().to_owned();
    api.done(begun).await;
    let refused = api.post(&format!("tasks/{id}/resolve"), Value::Null).await;
    refused.assert_problem(409, "wrong-state");
    api.post("tasks/x/resolve", Value::Null).await.assert_problem(404, "not-found");
    let mut write = api.fixture.store.write().await.unwrap();
    let done = tasks::get(&mut write, &id).await.unwrap().unwrap();
    let start = vmseal_control::operation::Operation::StartVm {
        vm: done.operation.vm().unwrap(),
        boot_once: None,
    };
    let task = vmseal_control::tasks::Engine::record(&mut write, start, "web", "me").await.unwrap();
    let rubbish = "UPDATE tasks SET operation = '{}', kind = 'vm.levitate' WHERE id = ?";
    sqlx::query(rubbish).bind(task.id.to_string()).execute(&mut *write).await.unwrap();
    write.commit().await.unwrap();
    let path = format!("tasks/{}", task.id);
    let shown = api.get(&path).await.body;
    assert_eq!((&shown["kind"], &shown["state"]), (&json!("vm.levitate"), &json!("running")));
    let list = api.get("tasks").await.body;
    assert_eq!(list["items"].as_array().unwrap().len(), 2, "{list}");
    api.post(&format!("{path}/cancel"), Value::Null).await.assert_problem(409, "wrong-state");
    api.post("vms/web/start", Value::Null).await.assert_problem(409, "wrong-state");
    let tried = api.post(&format!("{path}/resolve?dry_run=true"), Value::Null).await;
    assert_eq!((tried.status.as_u16(), &tried.body["kind"]), (200, &json!("task.resolve")));
    let resolved = api.post(&format!("{path}/resolve"), Value::Null).await;
    assert_eq!((resolved.status.as_u16(), &resolved.body["state"]), (200, &json!("unknown")));
    api.done(api.post("vms/web/start", Value::Null).await).await;
}
