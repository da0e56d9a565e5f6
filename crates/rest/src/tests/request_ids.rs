//! A request's id, from header to records.

use axum::http::HeaderValue;
use vmseal_agent::simulated::Call;
use vmseal_api::request_id::HEADER;

use super::*;

impl Api {
    async fn post_as(&self, id: &[u8], path: &str) -> Answer {
        let request = Request::post(format!("/api/v1/{path}"))
            .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
            .header(HEADER, HeaderValue::from_bytes(id).unwrap())
            .body(Body::empty())
            .unwrap();
        self.send(request).await
    }
}

#[tokio::test]
async fn a_requests_id_is_in_its_answer_its_task_its_events_and_the_calls_to_its_host() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let begun = api.post_as(b"mine-1", "vms/web/start").await;
    assert_eq!(begun.headers[HEADER], "mine-1");
    assert_eq!(begun.body["request_id"], "mine-1", "{}", begun.body);
    let task = api.done(begun).await;
    assert_eq!(task["request_id"], "mine-1", "{task}");
    let of = |events: &Value, kind: &str| -> Vec<Value> {
        let events = events["items"].as_array().unwrap();
        let of_kind = events.iter().filter(|event| event["kind"] == kind);
        of_kind.map(|event| event["request_id"].clone()).collect()
    };
    let events = api.get("events?limit=1000").await.body;
    assert_eq!(of(&events, "task.begun").last(), Some(&json!("mine-1")));
    assert_eq!(of(&events, "task.done").last(), Some(&json!("mine-1")));
    assert_eq!(of(&events, "vm.started"), [json!("mine-1")]);
    // Two requests have two ids, and work of the server itself has none.
    assert_ne!(of(&events, "task.begun")[0], "mine-1");
    assert_eq!(of(&events, "provider.added"), [Value::Null]);
    let told = api.fixture.agent.requests(Call::PowerOn);
    assert_eq!(told, [Some("mine-1".parse().unwrap())]);
}

#[tokio::test]
async fn an_id_that_could_forge_a_line_of_log_is_replaced() {
    let api = Api::new().await;
    let long = "x".repeat(65);
    let hostile: [&[u8]; 6] =
        [b"", b"a b", b"a\tb", b"\xe9\xff", long.as_bytes(), b"id: 2026 ERROR vmseal: forged"];
    for sent in hostile {
        let refused = api.post_as(sent, "vms/none/start").await;
        refused.assert_problem(404, "not-found");
        let told = refused.headers[HEADER].as_bytes();
        assert_ne!(told, sent);
        assert!(told.len() == 32 && told.iter().all(u8::is_ascii_alphanumeric), "{told:?}");
        assert_eq!(refused.body["request_id"].as_str().unwrap().as_bytes(), told);
    }
    // A request that no handler gets has an id too, and so has one that is refused before.
    let request = Request::get("/nothing").header(HEADER, "mine-2").body(Body::empty()).unwrap();
    let refused = api.send(request).await;
    assert_eq!(
        (&refused.headers[HEADER], &refused.body["request_id"]),
        (&HeaderValue::from_static("mine-2"), &json!("mine-2"))
    );
    let request = Request::get("/api/v1/vms").header(HEADER, "mine-3").body(Body::empty()).unwrap();
    let refused = api.send(request).await;
    refused.assert_problem(401, "unauthenticated");
    assert_eq!(refused.body["request_id"], "mine-3");
}
