//! Changes of the log levels of server and hosts.

use super::*;

impl Api {
    async fn put(&self, path: &str, body: Value) -> Answer {
        self.raw(Method::PUT, path, body.to_string()).await
    }

    async fn events_of(&self, kind: &str) -> Vec<Value> {
        let mut events = self.get(&format!("events?kind={kind}")).await.body["items"].take();
        events.as_array_mut().unwrap().drain(..).collect()
    }
}

#[tokio::test]
async fn levels_are_shown_and_changed_and_every_change_is_an_event() {
    let api = Api::new().await;
    for (path, kind, target) in [
        ("log-level", "server.log-level-set", "server"),
        ("hosts/here/log-level", "host.log-level-set", "here"),
    ] {
        assert_eq!(api.get(path).await.body, json!({ "levels": "info" }), "{path}");
        let changed = api.put(path, json!({ "levels": "WARN, vmseal_agent=debug" })).await;
        let now = json!({ "levels": "warn,vmseal_agent=debug" });
        assert_eq!((changed.status, &changed.body), (StatusCode::OK, &now), "{path}");
        assert_eq!(api.get(path).await.body, now, "{path}");

        let long = format!("{}=info", "a".repeat(vmseal_log::LEN_MAX));
        for wrong in
            ["", "debg", "info,", "[span{field=x}]=trace", "a=info,a=warn", "in\nfo", &long]
        {
            let refused = api.put(path, json!({ "levels": wrong })).await;
            refused.assert_field("levels");
        }
        api.put(path, json!({ "levels": "off", "for": "ever" })).await.assert_field("for");
        assert_eq!(api.get(path).await.body, now, "{path}: something was changed");
        let events = api.events_of(kind).await;
        let told: Vec<_> = events
            .iter()
            .map(|it| {
                (
                    it["actor"].as_str().unwrap(),
                    it["target"].as_str().unwrap(),
                    it["detail"].as_str().unwrap(),
                )
            })
            .collect();
        assert_eq!(told, [("me", target, "warn,vmseal_agent=debug")]);
        assert!(events[0]["request_id"].is_string());
        api.put(path, json!({ "levels": "info" })).await;
    }
    api.put("hosts/none/log-level", json!({ "levels": "off" }))
        .await
        .assert_problem(404, "not-found");
    api.fixture.agent.set_reachable(false);
    let silent = api.put("hosts/here/log-level", json!({ "levels": "off" })).await;
    silent.assert_problem(502, "unreachable");
    assert_eq!(api.events_of("host.log-level-set").await.len(), 2, "a refused change has an event");
}
