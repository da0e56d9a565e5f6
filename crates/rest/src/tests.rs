//! The API from outside: every check with input that fails it, and the OpenAPI document.

mod bitmaps;
mod changes;
mod constraints;
mod dry_run;
mod hanging_up;
mod host_addresses;
mod log_level;
mod mirror;
mod privileges;
mod recrypt;
mod replicas;
mod request_ids;
mod stated;
mod tasks;
mod watching;

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;
use vmseal_api::id::{DatastoreId, HostId};
use vmseal_api::model::TaskState;
use vmseal_api::passphrase::passphrase_info;
use vmseal_api::request::BODY_MAX;
use vmseal_secret::SecretBytes;
use vmseal_secret::sealed_box::{Recipient, seal};

use vmseal_control::services::Services;
use vmseal_control::store::users::Role;
use vmseal_control::store::{datastores, hosts};
use vmseal_control::testing::Fixture;

use crate::routes::{document, router};

const TOKEN: &str = "a-token-for-tests";

struct Api {
    fixture: Fixture,
    control: Arc<Services>,
    router: axum::Router,
    passphrase_box: [u8; 32],
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Value,
}

impl Answer {
    /// Asserts that it is a problem of this status and code.
    #[track_caller]
    fn assert_problem(&self, status: u16, code: &str) -> &Self {
        assert_eq!(self.status.as_u16(), status, "{}", self.body);
        assert_eq!(self.headers[header::CONTENT_TYPE], "application/problem+json");
        assert_eq!((&self.body["status"], &self.body["code"]), (&json!(status), &json!(code)));
        assert_eq!(self.body["type"], format!("urn:vmseal:problem:{code}"));
        self
    }

    #[track_caller]
    fn assert_field(&self, field: &str) {
        self.assert_problem(400, "invalid-request");
        assert_eq!(self.body["field"], field, "{}", self.body);
    }
}

impl Api {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        fixture.add_user("me", TOKEN, Role::Administrator).await;
        let recipient = Recipient::generate().unwrap();
        let passphrase_box = recipient.public_key();
        let control = Arc::new(fixture.services(recipient));
        let router = router(Arc::clone(&control));
        Self { fixture, control, router, passphrase_box }
    }

    async fn send(&self, request: Request<Body>) -> Answer {
        self.answer(self.router.clone(), request).await
    }

    async fn answer(&self, router: axum::Router, request: Request<Body>) -> Answer {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let response = router.oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let answer = Answer { status: parts.status, headers: parts.headers, body };
        stated::assert_stated(&method, &path, &answer);
        answer
    }

    async fn raw(&self, method: Method, path: &str, body: impl Into<Body>) -> Answer {
        let request = Request::builder()
            .method(method)
            .uri(format!("/api/v1/{path}"))
            .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(body.into())
            .unwrap();
        self.send(request).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.raw(Method::GET, path, "").await
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.raw(Method::POST, path, body.to_string()).await
    }

    async fn delete(&self, path: &str) -> Answer {
        self.raw(Method::DELETE, path, "").await
    }

    /// A passphrase that is long enough.
    fn sealed(&self, provider: &str, passphrase: &str) -> Value {
        let mut long = format!("{passphrase}, as in the tests").into_bytes();
        let secret = SecretBytes::from_wiped(&mut long).unwrap();
        let sealed = seal(&self.passphrase_box, &passphrase_info(provider), &secret).unwrap();
        json!({
            "passphrase_box": STANDARD.encode(self.passphrase_box),
            "sealed": STANDARD.encode(sealed.as_bytes()),
        })
    }

    /// Waits for a task's end.
    async fn done(&self, begun: Answer) -> Value {
        assert_eq!(begun.status, StatusCode::ACCEPTED, "{}", begun.body);
        let place = begun.headers[header::LOCATION].to_str().unwrap();
        let path = place.strip_prefix("/api/v1/").unwrap().to_owned();
        self.fixture
            .eventually("the task ends", async || {
                Some(self.get(&path).await.body).filter(|task| !task["ended"].is_null())
            })
            .await
    }
}

fn vm() -> Value {
    json!({
        "name": "web", "policy": "encrypted", "memory": 32 << 20,
        "disks": [
            { "name": "root", "datastore": "local", "size": 1 << 20 },
            { "name": "data", "datastore": "local", "size": 1 << 20 },
        ],
    })
}

/// A VM's request with one thing changed.
fn vm_with(pointer: &str, value: Value) -> Value {
    let mut request = vm();
    *request.pointer_mut(pointer).unwrap() = value;
    request
}

/// Among several datastores of one name, the request must say which one it means.
#[tokio::test]
async fn datastores_of_two_hosts_may_have_one_name() {
    let api = Api::new().await;
    let mut write = api.fixture.store.write().await.unwrap();
    let known = datastores::find(&mut write, "local").await.unwrap().unwrap();
    let other = hosts::Host {
        id: HostId::new(),
        name: "there".into(),
        address: "127.0.0.1:1".into(),
        description: None,
        maintenance: Default::default(),
    };
    hosts::insert(&mut write, &other).await.unwrap();
    let twin = |id| datastores::Datastore {
        id,
        hosts: vec![datastores::OnHost {
            host: other.id,
            host_name: other.name.clone(),
            location: known.hosts[0].location.clone(),
            mounted_key: None,
            mount: None,
        }],
        ..known.clone()
    };
    datastores::insert(&mut write, &twin(DatastoreId::new())).await.unwrap();
    let again = datastores::insert(&mut write, &twin(DatastoreId::new())).await;
    assert!(again.is_err(), "one host has two of one name");
    write.commit().await.unwrap();
    for path in ["datastores/local", "datastores/local/scan"] {
        let several = api.get(path).await;
        several.assert_problem(400, "invalid-request");
        let said = several.body["detail"].to_string();
        assert!(said.contains("here:local or there:local"), "{said}");
    }
    for host in ["here", "there"] {
        let shown = api.get(&format!("datastores/{host}:local")).await.body;
        assert_eq!(shown["hosts"][0]["host"], host);
    }
    let shown = api.get(&format!("datastores/{}", known.id)).await.body;
    assert_eq!(shown["hosts"][0]["host"], "here");
    api.get("datastores/nowhere:local").await.assert_problem(404, "not-found");
    api.post("vms", vm()).await.assert_field("disks[0].datastore");
    let mut told = vm_with("/disks/0/datastore", json!("here:local"));
    told["disks"][1]["datastore"] = json!("here:local");
    let task = api.done(api.post("vms", told).await).await;
    assert_eq!(task["state"], "done", "{task}");
    assert_eq!(api.get("vms/web").await.body["host"], "here");
}

#[tokio::test]
async fn a_request_that_is_not_as_described_is_refused_with_the_fields_name() {
    let api = Api::new().await;
    let mut misspelt = vm();
    misspelt["disks"][1]["sice"] = json!(1);
    let answer = api.post("vms", misspelt).await;
    answer.assert_field("disks[1].sice");
    assert!(answer.body["detail"].as_str().unwrap().contains("sice"));
    let mut extra = vm();
    extra["encryptd"] = json!(true);
    api.post("vms", extra).await.assert_field("encryptd");
    api.post("vms", vm_with("/memory", json!("much"))).await.assert_field("memory");
    api.post("vms", vm_with("/disks/0/size", json!(-1))).await.assert_field("disks[0].size");
    for (pointer, value, field) in [
        ("/name", json!("../x"), "name"),
        ("/name", json!(""), "name"),
        ("/memory", json!(1), "memory"),
        ("/memory", json!((32 << 20) + 1), "memory"),
        ("/memory", json!(u64::MAX), "memory"),
        ("/disks", json!([]), "disks"),
        ("/disks/1/name", json!("root"), "disks[1].name"),
        ("/disks/1/name", json!("a-name-of-21-letters-"), "disks[1].name"),
        ("/disks/0/size", json!(4095), "disks[0].size"),
        ("/disks/0/size", json!((1 << 20) + 512), "disks[0].size"),
        ("/disks/0/size", json!(u64::MAX), "disks[0].size"),
    ] {
        api.post("vms", vm_with(pointer, value)).await.assert_field(field);
    }
    let mut relative = vm();
    relative["disks"][0]["image"] = json!("image.raw");
    api.post("vms", relative).await.assert_field("disks[0].image");
    let unknown = api.post("vms", vm_with("/policy", json!("none"))).await;
    assert_eq!(unknown.assert_problem(404, "not-found").body["field"], "policy");
    let unknown = api.post("vms", vm_with("/disks/1/datastore", json!("none"))).await;
    assert_eq!(unknown.assert_problem(404, "not-found").body["field"], "disks[1].datastore");
    api.post("vms/web/stop", json!({ "forse": true })).await.assert_field("forse");
    api.post("hosts/tokens", json!({ "x": 1 })).await.assert_field("x");
    api.get("tasks?limit=x").await.assert_field("query");
    api.get("events?befor=1").await.assert_field("query");
    let mut nameless = vm();
    nameless["disks"][0]["image"] = json!("/image.raw");
    api.post("vms", nameless.clone()).await.assert_field("disks[0].format");
    nameless["disks"][0]["format"] = json!("vmdk");
    api.post("vms", nameless).await.assert_field("disks[0].format");
    let mut imageless = vm();
    imageless["disks"][0]["format"] = json!("raw");
    api.post("vms", imageless).await.assert_field("disks[0].format");
    assert_eq!(api.get("vms").await.body["items"], json!([]), "something was made");
}

#[tokio::test]
async fn bodies_that_are_not_json_or_too_large_are_refused() {
    let api = Api::new().await;
    for bad in ["", "{", "[]", "nonsense", "{} {}", "\u{0}"] {
        api.raw(Method::POST, "vms", bad).await.assert_problem(400, "invalid-request");
    }
    let large = "x".repeat(BODY_MAX + 1);
    api.raw(Method::POST, "vms", large.clone()).await.assert_problem(413, "too-large");
    api.raw(Method::POST, "vms/web/stop", large).await.assert_problem(413, "too-large");
    let deep = "[".repeat(100_000);
    api.raw(Method::POST, "vms", deep).await.assert_problem(400, "invalid-request");
    let form = Request::post("/api/v1/policies")
        .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
        .header(header::CONTENT_TYPE, "text/plain")
        .body(Body::from(json!({ "name": "x", "encryption": true }).to_string()));
    api.send(form.unwrap()).await.assert_problem(400, "invalid-request");
}

#[tokio::test]
async fn requests_without_the_right_token_are_refused() {
    let api = Api::new().await;
    let long = format!("Bearer {}", "x".repeat(10_000));
    for authorization in [
        None,
        Some("Bearer wrong"),
        Some("Basic YTpi"),
        Some("Bearer"),
        Some("Bearer "),
        Some(TOKEN),
        Some(&*long),
    ] {
        for path in
            ["vms", "hosts", "events", "alarms", "vms/web/console", "vms/web/disks/disk0/expose"]
        {
            let mut request = Request::get(format!("/api/v1/{path}"));
            if let Some(value) = authorization {
                request = request.header(header::AUTHORIZATION, value);
            }
            let answer = api.send(request.body(Body::empty()).unwrap()).await;
            answer.assert_problem(401, "unauthenticated");
            assert!(
                answer.headers[header::WWW_AUTHENTICATE].to_str().unwrap().starts_with("Bearer")
            );
        }
    }
    let about = Request::get("/api/v1/about").body(Body::empty()).unwrap();
    assert_eq!(api.send(about).await.status, StatusCode::OK);
    let join = json!({ "token": "x", "name": "h", "address": "h:1", "certificate_request": "" });
    api.post("hosts/join", join).await.assert_problem(401, "unauthenticated");
}

/// Every route requires credentials, including one added later.
#[tokio::test]
async fn every_documented_path_but_three_wants_credentials() {
    let api = Api::new().await;
    let document = document();
    let mut open = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            let place = path.replace(['{', '}'], "");
            let request = Request::builder().method(&method).uri(place).body(Body::empty());
            let answer = api.send(request.unwrap()).await;
            assert_ne!(answer.status, StatusCode::NOT_FOUND, "{method} {path} leads nowhere");
            if answer.status != StatusCode::UNAUTHORIZED {
                open.push(path.clone());
            }
        }
    }
    assert_eq!(open, ["/api/v1/about", "/api/v1/hosts/join", "/api/v1/openapi.json"]);
}

#[tokio::test]
async fn unknown_paths_methods_and_resources_are_problems() {
    let api = Api::new().await;
    api.get("nothing").await.assert_problem(404, "not-found");
    let root = Request::get("/").body(Body::empty()).unwrap();
    api.send(root).await.assert_problem(404, "not-found");
    let wrong = api.raw(Method::PATCH, "vms", "").await;
    wrong.assert_problem(405, "invalid-request");
    assert!(wrong.headers[header::ALLOW].to_str().unwrap().contains("POST"), "{:?}", wrong.headers);
    for path in ["vms/x", "hosts/x", "datastores/x", "providers/x", "policies/x", "tasks/x"] {
        api.get(path).await.assert_problem(404, "not-found");
    }
    for socket in ["vms/x/console", "vms/x/disks/y/expose"] {
        api.get(socket).await.assert_problem(400, "invalid-request");
    }
    api.get("vms/%ff").await.assert_problem(400, "invalid-request");
}

#[tokio::test]
async fn a_vm_through_its_life() {
    let api = Api::new().await;
    let begun = api.post("vms", vm()).await;
    let task = api.done(begun).await;
    assert_eq!(task["state"], json!(TaskState::Done), "{task}");
    let shown = api.get("vms/web").await.body;
    assert_eq!(
        (&shown["lifecycle"], &shown["power"], &shown["key_state"]),
        (&json!("ready"), &json!("off"), &json!("held")),
        "{shown}"
    );
    assert_eq!(shown["disks"][1]["facts"]["format"], "luks2");
    api.post("vms", vm()).await.assert_problem(409, "already-exists");
    for path in ["policies/encrypted", "datastores/local", "providers/keys", "hosts/here"] {
        api.delete(path).await.assert_problem(409, "in-use");
    }
    let begun = api.post("vms/web/start", Value::Null).await;
    api.done(begun).await;
    api.post("vms/web/start", json!({})).await.assert_problem(409, "wrong-state");
    api.delete("vms/web").await.assert_problem(409, "wrong-state");
    assert_eq!(api.get("vms/web").await.body["power"], "running");
    let begun = api.raw(Method::POST, "vms/web/stop", "").await;
    api.done(begun).await;
    assert_eq!(api.get("vms/web").await.body["power"], "off");
    let begun = api.delete("vms/web").await;
    assert_eq!(api.done(begun).await["state"], "done");
    api.get("vms/web").await.assert_problem(404, "not-found");
    assert_eq!(api.delete("policies/encrypted").await.status, StatusCode::NO_CONTENT);
    assert_eq!(api.delete("datastores/local").await.status, StatusCode::NO_CONTENT);
    assert_eq!(api.delete("hosts/here").await.status, StatusCode::NO_CONTENT);
    let events = api.get("events?limit=1000").await.body;
    let told: Vec<_> =
        events["items"].as_array().unwrap().iter().map(|event| &event["kind"]).collect();
    for kind in [
        "vm.created",
        "vm.started",
        "vm.stopped",
        "vm.deleted",
        "key.created",
        "key.delivered",
        "key.destroyed",
        "task.begun",
        "task.done",
    ] {
        assert!(told.contains(&&json!(kind)), "no {kind} in {told:?}");
    }
}

#[tokio::test]
async fn while_a_host_is_away_its_vms_power_is_not_known_and_nothing_begins() {
    let api = Api::new().await;
    api.fixture.made("web", "encrypted").await;
    api.fixture.agent.set_reachable(false);
    api.fixture
        .eventually("away", async || {
            (api.get("hosts/here").await.body["connection"] == "disconnected").then_some(())
        })
        .await;
    assert!(api.get("vms/web").await.body["power"].is_null());
    api.post("vms/web/start", Value::Null).await.assert_problem(502, "unreachable");
    api.delete("vms/web").await.assert_problem(502, "unreachable");
    assert_eq!(api.get("vms/web").await.body["lifecycle"], "ready");
    api.fixture
        .eventually("alarm", async || {
            (api.get("alarms").await.body["items"][0]["code"] == "host-disconnected").then_some(())
        })
        .await;
}

#[tokio::test]
async fn a_provider_is_usable_only_after_its_backup_was_verified() {
    let api = Api::new().await;
    let added =
        api.post("providers", json!({ "name": "two", "passphrase": api.sealed("two", "p") })).await;
    assert_eq!(added.body["status"], "needs_backup", "{}", added.body);
    api.post("providers/two/default", Value::Null).await;
    let refused = api.post("vms", vm()).await;
    let refused = refused.assert_problem(409, "wrong-state");
    assert!(refused.body["detail"].as_str().unwrap().contains("vmseal provider backup two"));
    let backup =
        api.post("providers/two/backup", json!({ "passphrase": api.sealed("two", "b") })).await;
    let backup = &backup.body["backup"];
    let wrong = json!({ "backup": backup, "passphrase": api.sealed("two", "p") });
    api.post("providers/two/verify", wrong).await.assert_problem(422, "key-mismatch");
    let right = json!({ "backup": backup, "passphrase": api.sealed("two", "b") });
    assert_eq!(api.post("providers/two/verify", right).await.body["status"], "normal");
    assert_eq!(api.get("providers/two").await.body["default"], true);
    let begun = api.post("vms", vm()).await;
    assert_eq!(api.done(begun).await["state"], "done");
}

#[tokio::test]
async fn a_passphrase_is_for_this_run_of_the_server_and_one_provider() {
    let api = Api::new().await;
    let for_another = json!({ "name": "two", "passphrase": api.sealed("three", "p") });
    api.post("providers", for_another).await.assert_field("passphrase.sealed");
    let mut old = api.sealed("two", "p");
    old["passphrase_box"] = json!(STANDARD.encode([7; 32]));
    let answer = api.post("providers", json!({ "name": "two", "passphrase": old })).await;
    let answer = answer.assert_problem(409, "wrong-state");
    assert_eq!(answer.body["field"], "passphrase.passphrase_box");
    let mut broken = api.sealed("two", "p");
    broken["sealed"] = json!("!");
    let answer = api.post("providers", json!({ "name": "two", "passphrase": broken })).await;
    answer.assert_field("passphrase.sealed");
    api.post("providers", json!({ "name": "two" })).await.assert_field("passphrase");
    let half = json!({ "name": "two", "passphrase": api.sealed("two", "p"), "backup": "" });
    api.post("providers", half).await.assert_field("backup_passphrase");
}

#[tokio::test]
async fn lists_come_in_pages_and_events_are_waited_for() {
    let api = Api::new().await;
    for name in ["a", "b", "c"] {
        api.post("policies", json!({ "name": name, "encryption": false })).await;
    }
    let mut names = Vec::new();
    let mut path = "policies?limit=2".to_owned();
    loop {
        let page = api.get(&path).await.body;
        let items = page["items"].as_array().unwrap();
        assert!(items.len() <= 2);
        names.extend(items.iter().map(|item| item["name"].as_str().unwrap().to_owned()));
        let Some(next) = page["next"].as_str() else { break };
        path = format!("policies?limit=2&after={next}");
    }
    assert_eq!(names, ["encrypted", "plain", "a", "b", "c"]);

    let events = api.get("events?limit=1000").await.body;
    let last = events["items"].as_array().unwrap().last().unwrap()["sequence"].as_i64().unwrap();
    let path = format!("events?after={last}&wait_seconds=20");
    let waiting = api.get(&path);
    let adding = async {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        api.post("policies", json!({ "name": "d", "encryption": false })).await
    };
    let (waited, _) = tokio::join!(waiting, adding);
    assert_eq!(waited.body["items"][0]["kind"], "policy.created");
    let begun = std::time::Instant::now();
    let none = api.get(&format!("events?after={}", i64::MAX)).await;
    assert_eq!(none.body["items"], json!([]));
    assert!(begun.elapsed().as_secs() < 5, "it waited without being asked");
}

#[tokio::test]
async fn a_datastore_that_is_added_again_keeps_its_id() {
    let api = Api::new().await;
    let request = |path: &str| json!({ "name": "more", "host": "here", "location": { "kind": "dir", "path": path } });
    let first = api.post("datastores", request("/more")).await;
    assert_eq!(first.status, StatusCode::CREATED, "{}", first.body);
    assert_eq!(first.body["usage"]["capacity"], 1u64 << 40);
    api.post("datastores", request("/elsewhere")).await.assert_problem(409, "already-exists");
    assert_eq!(api.delete("datastores/more").await.status, StatusCode::NO_CONTENT);
    assert_eq!(api.post("datastores", request("/more")).await.body["id"], first.body["id"]);
    api.post("datastores", request("relative")).await.assert_field("location.path");
    let nowhere = json!({ "name": "x", "host": "y", "location": { "kind": "dir", "path": "/x" } });
    assert_eq!(
        api.post("datastores", nowhere).await.assert_problem(404, "not-found").body["field"],
        "host"
    );
}

#[test]
fn the_checked_in_openapi_document_is_the_one_of_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
    let written = format!("{:#}\n", document());
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(path, &written).unwrap();
    }
    let checked_in = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        checked_in == written,
        "crates/rest/openapi.json is not what the code describes; check the difference, then run: UPDATE_OPENAPI=1 cargo test -p vmseal-rest"
    );
}

#[tokio::test]
async fn an_export_has_an_event_with_its_details() {
    let api = Api::new().await;
    let vm = api.fixture.made("web", "encrypted").await;
    let export = |body: Value| {
        let api = &api;
        async move { api.post("vms/web/disks/disk0/export", body).await }
    };
    let raw = json!({ "to": "/out.raw", "format": "raw", "plaintext": true });
    for (pointer, value, field) in [
        ("to", json!("out.raw"), "to"),
        ("to", json!("/"), "to"),
        ("format", json!("vmdk"), "format"),
        ("format", json!("luks2"), "plaintext"),
        ("plaintext", json!(false), "plaintext"),
        ("passphrase", json!({ "key_box": "x", "sealed": "y" }), "passphrase"),
    ] {
        let mut body = raw.clone();
        body[pointer] = value;
        export(body).await.assert_field(field);
    }
    let bare = json!({ "to": "/out", "format": "luks2" });
    export(bare).await.assert_field("passphrase");
    let none = api.post("vms/web/disks/none/export", raw.clone()).await;
    none.assert_problem(404, "not-found");
    assert!(api.fixture.events("disk.export").await.is_empty(), "a refused export is on record");

    api.done(export(raw.clone()).await).await;
    let told = api.fixture.events("disk.export").await;
    assert_eq!(told.len(), 1);
    let detail = &told[0].detail;
    assert!(detail.contains("IN THE CLEAR") && detail.contains("/out.raw"), "{detail}");
    assert_eq!((told[0].actor.as_str(), told[0].target.as_str()), ("me", "web"));

    let task = api
        .fixture
        .begin(vmseal_control::operation::Operation::StartVm { vm, boot_once: None }, "web")
        .await;
    api.fixture.ended(task).await;
    let answer = export(raw).await;
    answer.assert_problem(409, "wrong-state");
    assert!(answer.body["detail"].as_str().unwrap().contains("stop it first"), "{}", answer.body);
}

impl Api {
    /// The metrics that Prometheus gets.
    async fn scrape(&self, path: &str) -> String {
        let request = Request::builder()
            .uri(path)
            .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
            .header(header::HOST, "server.example:8443")
            .body(Body::empty())
            .unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(bytes.to_vec()).unwrap()
    }
}

/// The value of a sample; 0 if it is absent.
fn sample(text: &str, name: &str) -> f64 {
    let line =
        text.lines().find(|line| line.strip_prefix(name).is_some_and(|it| it.starts_with(' ')));
    line.map_or(0.0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

#[tokio::test]
async fn metrics_count_requests_and_need_a_token() {
    let api = Api::new().await;
    for path in ["/metrics", "/metrics/targets", "/metrics/hosts/here"] {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        api.send(request).await.assert_problem(401, "unauthenticated");
    }
    // Other tests of this process count in the same registry.
    let tasks = "vmseal_server_tasks_total{kind=\"vm.create\",outcome=\"done\"}";
    let lists =
        "vmseal_server_http_requests_total{method=\"GET\",route=\"/api/v1/vms\",status=\"200\"}";
    let before = api.scrape("/metrics").await;
    assert_eq!(api.done(api.post("vms", vm()).await).await["state"], "done");
    for _ in 0..3 {
        api.get("vms").await;
    }
    let strange = Request::builder().method("BREW").uri("/coffee/17").body(Body::empty()).unwrap();
    api.send(strange).await;
    api.fixture.agent.set_free(1 << 30);
    let after = api.scrape("/metrics").await;
    assert!(sample(&after, tasks) > sample(&before, tasks), "{after}");
    assert!(sample(&after, lists) >= sample(&before, lists) + 3.0, "{after}");
    let none = "vmseal_server_http_requests_total{method=\"other\",route=\"none\",status=\"404\"}";
    assert!(sample(&after, none) >= 1.0, "{after}");
    assert!(!after.contains("coffee") && !after.contains("BREW"), "clients choose labels");
    let keys = after.lines().find(|line| {
        line.starts_with("vmseal_server_key_operations_total{")
            && line.contains("operation=\"create\",outcome=\"done\"")
    });
    assert!(keys.is_some(), "{after}");
    assert_eq!(sample(&after, "vmseal_host_up{host=\"here\"}"), 1.0);
    assert!(
        after
            .lines()
            .any(|line| line.starts_with("vmseal_vm_info{") && line.contains("name=\"web\""))
    );
    let provider = |line: &str| {
        line.starts_with("vmseal_provider_info{") && line.contains("status=\"normal\"")
    };
    assert!(after.lines().any(provider), "{after}");
    assert!(after.ends_with("# EOF\n"), "{after}");
    assert_eq!(after.matches("# EOF").count(), 1);

    let targets: Value = serde_json::from_str(&api.scrape("/metrics/targets").await).unwrap();
    assert_eq!(targets.as_array().unwrap().len(), 2);
    assert_eq!(targets[0]["targets"], json!(["server.example:8443"]));
    let path = targets[1]["labels"]["__metrics_path__"].as_str().unwrap();
    assert_eq!(targets[1]["labels"]["instance"], "here");
    assert_eq!(api.scrape(path).await, "# EOF\n");
}
