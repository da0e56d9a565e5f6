//! Clients that hang up.

use std::time::Duration;

use super::*;

/// The client disconnects while the handler is in the middle of its work: the handler finishes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_leaves_no_task_that_does_not_run() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    // The inventory has one writer: the handler waits for it.
    let writer = api.fixture.store.write().await.unwrap();
    let request = api.post("vms/web/start", Value::Null);
    assert!(tokio::time::timeout(Duration::from_millis(200), request).await.is_err());
    drop(writer);
    let ended = api
        .fixture
        .eventually("the start ends", async || {
            let mut read = api.fixture.store.read().await.unwrap();
            let all = vmseal_control::store::Part::all();
            let tasks = vmseal_control::store::tasks::list(&mut read, &all, None).await.unwrap();
            tasks
                .into_iter()
                .find(|task| task.operation.kind() == "vm.start" && task.ended.is_some())
        })
        .await;
    assert_eq!(ended.state, TaskState::Done);
}
