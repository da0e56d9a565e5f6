//! The requests behind `--watch`, and filters.

use vmseal_api::model::CHANGE_MAX;

use super::*;

#[tokio::test]
async fn the_change_number_changes_with_what_is_shown_and_only_then() {
    let api = Api::new().await;
    api.get("changes?kinds=vm,tape").await.assert_field("kinds");
    api.done(api.post("vms", vm()).await).await;
    let number = async || api.get("changes").await.body["change"].as_u64().unwrap();
    // The changes that the task made are visible.
    let mut last = number().await;
    loop {
        let waited = api.get(&format!("changes?after={last}&wait_seconds=1")).await;
        let now = waited.body["change"].as_u64().unwrap();
        if now == last {
            break;
        }
        last = now;
    }
    let waiting = async {
        let started = std::time::Instant::now();
        let path = format!("changes?after={last}&wait_seconds=20");
        (api.get(&path).await.body["change"].as_u64().unwrap(), started.elapsed())
    };
    let changing = async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        api.post("vms/web/start", Value::Null).await
    };
    let ((seen, after), begun) = tokio::join!(waiting, changing);
    assert!(seen != last && after < std::time::Duration::from_secs(10), "{after:?}");
    api.done(begun).await;
    // A number of another run of the server, larger or smaller, counts as a different one.
    for other in [0, CHANGE_MAX] {
        let path = format!("changes?after={other}&wait_seconds=20");
        let answer = tokio::time::timeout(std::time::Duration::from_secs(5), api.get(&path)).await;
        assert_eq!(answer.unwrap().status, 200);
    }
    // Larger ones are not as the API document says.
    for larger in [CHANGE_MAX + 1, u64::MAX] {
        api.get(&format!("changes?after={larger}")).await.assert_field("after");
    }
}

#[tokio::test]
async fn events_and_tasks_are_filtered() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    api.done(api.post("vms/web/start", Value::Null).await).await;
    let events = async |query: &str| {
        let answer = api.get(&format!("events?{query}")).await;
        answer.body["items"].as_array().unwrap().clone()
    };
    let all = events("limit=1000").await;
    let tasks = events("kind=task").await;
    assert!(tasks.len() >= 4 && tasks.len() < all.len());
    assert!(tasks.iter().all(|event| event["kind"].as_str().unwrap().starts_with("task.")));
    assert_eq!(events("kind=task.done&target=web").await.len(), 2);
    assert_eq!(events("kind=tas").await.len(), 0, "a part of a word");
    assert_eq!(events("target=nobody").await.len(), 0);
    let newest = all.last().unwrap()["at"].as_str().unwrap();
    assert!(events(&format!("since={newest}")).await.contains(all.last().unwrap()));
    assert_eq!(events("since=2999-01-01T00:00:00Z").await.len(), 0);
    let asked = all.last().unwrap()["request_id"].as_str().unwrap();
    let of_request = events(&format!("request={asked}")).await;
    assert!(of_request.len() > 1 && of_request.len() < all.len(), "{of_request:?}");
    assert!(of_request.iter().all(|event| event["request_id"] == asked), "{of_request:?}");
    assert_eq!(events("last=2").await, all[all.len() - 2..]);
    assert_eq!(events("last=1&kind=task").await, tasks[tasks.len() - 1..]);
    api.get("events?since=yesterday").await.assert_field("query");
    let listed = async |state: &str| {
        api.get(&format!("tasks?state={state}")).await.body["items"].as_array().unwrap().len()
    };
    assert_eq!((listed("done").await, listed("failed").await), (2, 0));
    api.get("tasks?state=half").await.assert_field("query");
}
