//! Every route, and the privilege that it needs.

use std::collections::BTreeSet;

use axum::Extension;
use vmseal_control::services::{Caller, Privilege};

use super::*;
use crate::request::auth::Authenticated;
use crate::routes::{metrics, user_router};

/// Routes that need no credentials.
const PUBLIC: [(&str, &str); 3] =
    [("GET", "/api/v1/about"), ("GET", "/api/v1/openapi.json"), ("POST", "/api/v1/hosts/join")];

/// A passphrase in the form of requests.
const SEALED: &str = r#"{"passphrase_box": "", "sealed": ""}"#;

/// A VM that comes from another control plane.
const ARRIVING: &str = r#"{"vm": {"id": "0195d0a0-0000-7000-8000-000000000000", "name": "?", "has_key": true, "vcpus": 1,
    "memory": 33554432, "hardware": {}, "disks": []}, "policy": "none", "generation": 1,
    "source": {"name": "x", "vmseal": "x", "accelerator": {"kind": "tcg", "reason": ""}, "qemu": "7.2", "features": []}}"#;

/// The session that it is sent in.
const SESSION: &str = r#"{"migration": "0195d0a0-0000-7000-8000-000000000000", "nonce": 1, "key": SEALED, "streams": 2,
    "encrypted": true}"#;

/// A new remote.
const NEW_REMOTE: &str = r#"{"name": "?", "url": "x", "fingerprint": "", "token": SEALED}"#;

/// Each other route: method, path, privilege, and a body of the right form. The content is refused, or names
/// resources that do not exist.
fn routes() -> Vec<(&'static str, &'static str, Privilege, String)> {
    use Privilege::*;
    let of = |text: &str| text.replace("SEALED", SEALED);
    [
        ("GET", "/api/v1/hosts", Read, ""),
        ("GET", "/api/v1/hosts/{host}", Read, ""),
        ("PATCH", "/api/v1/hosts/{host}", RegisterHost, r#"{"address": "?"}"#),
        ("DELETE", "/api/v1/hosts/{host}", RegisterHost, ""),
        ("POST", "/api/v1/hosts/{host}/drain", RegisterHost, "{}"),
        ("POST", "/api/v1/hosts/{host}/undrain", RegisterHost, "{}"),
        ("POST", "/api/v1/hosts/tokens", RegisterHost, ""),
        ("GET", "/api/v1/log-level", Read, ""),
        ("PUT", "/api/v1/log-level", Diagnostics, r#"{"levels": "?"}"#),
        ("GET", "/api/v1/hosts/{host}/log-level", Read, ""),
        ("PUT", "/api/v1/hosts/{host}/log-level", Diagnostics, r#"{"levels": "?"}"#),
        ("GET", "/api/v1/datastores", Read, ""),
        (
            "POST",
            "/api/v1/datastores",
            ManageDatastores,
            r#"{"name": "?", "host": "none", "location": {"kind": "dir", "path": "/x"}}"#,
        ),
        ("GET", "/api/v1/datastores/{datastore}", Read, ""),
        ("PATCH", "/api/v1/datastores/{datastore}", ManageDatastores, r#"{"user": "client.x"}"#),
        ("DELETE", "/api/v1/datastores/{datastore}", ManageDatastores, ""),
        (
            "PUT",
            "/api/v1/datastores/{datastore}/key",
            ManageDatastores,
            r#"{"key": {"passphrase_box": "", "sealed": ""}}"#,
        ),
        ("POST", "/api/v1/datastores/{datastore}/hosts", ManageDatastores, r#"{"host": "none"}"#),
        ("DELETE", "/api/v1/datastores/{datastore}/hosts/{host}", ManageDatastores, ""),
        ("POST", "/api/v1/datastores/{datastore}/hosts/{host}/remount", ManageDatastores, ""),
        ("GET", "/api/v1/datastores/{datastore}/scan", Read, ""),
        ("POST", "/api/v1/datastores/{datastore}/adopt", VmConfigure, "{}"),
        ("GET", "/api/v1/providers", Read, ""),
        ("POST", "/api/v1/providers", ManageProviders, r#"{"name": "?"}"#),
        ("GET", "/api/v1/providers/{provider}", Read, ""),
        ("DELETE", "/api/v1/providers/{provider}", ManageProviders, ""),
        (
            "POST",
            "/api/v1/providers/{provider}/unlock",
            ManageProviders,
            r#"{"passphrase": SEALED}"#,
        ),
        (
            "POST",
            "/api/v1/providers/{provider}/passphrase",
            ManageProviders,
            r#"{"old": SEALED, "new": SEALED}"#,
        ),
        ("POST", "/api/v1/providers/{provider}/backup", ManageKeys, r#"{"passphrase": SEALED}"#),
        (
            "POST",
            "/api/v1/providers/{provider}/verify",
            ManageKeys,
            r#"{"backup": "", "passphrase": SEALED}"#,
        ),
        ("POST", "/api/v1/providers/{provider}/default", ManageProviders, ""),
        ("GET", "/api/v1/providers/{provider}/servers/{server}/certificate", ManageProviders, ""),
        (
            "POST",
            "/api/v1/providers/{provider}/servers/{server}/trust",
            ManageProviders,
            r#"{"fingerprint": "?"}"#,
        ),
        (
            "POST",
            "/api/v1/providers/{provider}/certificate-request",
            ManageProviders,
            r#"{"common_name": "x"}"#,
        ),
        (
            "POST",
            "/api/v1/providers/{provider}/self-signed-certificate",
            ManageProviders,
            r#"{"common_name": "x"}"#,
        ),
        (
            "PUT",
            "/api/v1/providers/{provider}/certificate",
            ManageProviders,
            r#"{"certificate": "x"}"#,
        ),
        ("POST", "/api/v1/providers/{provider}/test", ManageProviders, r#"{"key": false}"#),
        (
            "POST",
            "/api/v1/providers/{provider}/servers",
            ManageProviders,
            r#"{"alias": "x", "host": "x", "port": 5696}"#,
        ),
        (
            "PUT",
            "/api/v1/providers/{provider}/servers/{server}",
            ManageProviders,
            r#"{"host": "x", "port": 5696}"#,
        ),
        ("DELETE", "/api/v1/providers/{provider}/servers/{server}", ManageProviders, ""),
        (
            "POST",
            "/api/v1/providers/{provider}/servers/{server}/move",
            ManageProviders,
            r#"{"place": 1}"#,
        ),
        ("GET", "/api/v1/policies", Read, ""),
        ("POST", "/api/v1/policies", ManagePolicies, r#"{"name": "?", "encryption": false}"#),
        ("GET", "/api/v1/policies/{policy}", Read, ""),
        ("PATCH", "/api/v1/policies/{policy}", ManagePolicies, r#"{"iops": 1}"#),
        ("DELETE", "/api/v1/policies/{policy}", ManagePolicies, ""),
        ("GET", "/api/v1/remotes", Read, ""),
        ("POST", "/api/v1/remotes", RegisterHost, NEW_REMOTE),
        ("POST", "/api/v1/remote-certificate", RegisterHost, r#"{"url": "x"}"#),
        ("GET", "/api/v1/remotes/{remote}", Read, ""),
        ("GET", "/api/v1/remotes/{remote}/check", Read, ""),
        ("DELETE", "/api/v1/remotes/{remote}", RegisterHost, ""),
        ("POST", "/api/v1/arrivals/check", VmConfigure, ARRIVING),
        ("PUT", "/api/v1/arrivals/{arrival}", VmConfigure, ARRIVING),
        ("GET", "/api/v1/arrivals/{arrival}", VmConfigure, ""),
        ("POST", "/api/v1/arrivals/{arrival}/session", VmConfigure, SESSION),
        ("POST", "/api/v1/arrivals/{arrival}/commit", VmConfigure, ""),
        ("POST", "/api/v1/arrivals/{arrival}/cancel", VmConfigure, ""),
        ("GET", "/api/v1/vms", Read, ""),
        (
            "POST",
            "/api/v1/vms",
            VmConfigure,
            r#"{"name": "?", "policy": "none", "memory": 0, "disks": []}"#,
        ),
        ("GET", "/api/v1/vms/{vm}", Read, ""),
        ("PATCH", "/api/v1/vms/{vm}", VmConfigure, r#"{"vcpus": 2}"#),
        ("DELETE", "/api/v1/vms/{vm}", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/start", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/stop", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/reboot", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/reset", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/suspend", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/resume", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/pause", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/unpause", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/wakeup", VmPower, ""),
        ("POST", "/api/v1/vms/{vm}/encrypt", Encrypt, ""),
        ("POST", "/api/v1/vms/{vm}/decrypt", Decrypt, ""),
        ("POST", "/api/v1/vms/{vm}/recrypt", Recrypt, ""),
        ("POST", "/api/v1/vms/{vm}/migrate", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/evacuate", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/move", VmConfigure, r#"{"datastore": "?"}"#),
        ("GET", "/api/v1/vms/{vm}/console", VmConsole, ""),
        ("POST", "/api/v1/vms/{vm}/nics", VmConfigure, r#"{"backend": {"kind": "user"}}"#),
        ("GET", "/api/v1/vms/{vm}/screen", VmConsole, ""),
        ("POST", "/api/v1/vms/{vm}/guest", VmGuest, r#"{"ask": "ping"}"#),
        ("PATCH", "/api/v1/vms/{vm}/nics/{nic}", VmConfigure, r#"{"link": "up"}"#),
        ("DELETE", "/api/v1/vms/{vm}/nics/{nic}", VmConfigure, ""),
        (
            "POST",
            "/api/v1/vms/{vm}/disks",
            VmConfigure,
            r#"{"name": "x", "datastore": "none", "size": 1048576}"#,
        ),
        ("DELETE", "/api/v1/vms/{vm}/disks/{disk}", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/tpm", VmConfigure, ""),
        ("DELETE", "/api/v1/vms/{vm}/tpm", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/disks/{disk}/resize", VmConfigure, r#"{"size": 1048576}"#),
        (
            "POST",
            "/api/v1/vms/{vm}/disks/{disk}/export",
            DirectAccess,
            r#"{"to": "/x", "format": "raw", "plaintext": true}"#,
        ),
        ("GET", "/api/v1/vms/{vm}/disks/{disk}/expose", DirectAccess, ""),
        ("GET", "/api/v1/vms/{vm}/disks/{disk}/replica", Read, ""),
        ("POST", "/api/v1/vms/{vm}/clone", VmConfigure, r#"{"name": "copy"}"#),
        ("POST", "/api/v1/vms/{vm}/prove", Read, ""),
        ("GET", "/api/v1/vms/{vm}/proof", Read, ""),
        ("GET", "/api/v1/backups", Read, ""),
        ("GET", "/api/v1/vms/{vm}/backups", Read, ""),
        ("POST", "/api/v1/vms/{vm}/backups", DirectAccess, ""),
        ("GET", "/api/v1/vms/{vm}/backups/{backup}", Read, ""),
        ("DELETE", "/api/v1/vms/{vm}/backups/{backup}", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/backups/{backup}/verify", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/backups/{backup}/restore", VmConfigure, ""),
        ("GET", "/api/v1/vms/{vm}/dumps", Read, ""),
        ("POST", "/api/v1/vms/{vm}/dumps", DirectAccess, ""),
        ("GET", "/api/v1/vms/{vm}/dumps/{dump}", Read, ""),
        ("DELETE", "/api/v1/vms/{vm}/dumps/{dump}", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/dumps/{dump}/decrypt", DirectAccess, r#"{"to": "/x"}"#),
        ("GET", "/api/v1/vms/{vm}/snapshots", Read, ""),
        ("POST", "/api/v1/vms/{vm}/snapshots", VmConfigure, ""),
        ("GET", "/api/v1/vms/{vm}/snapshots/{snapshot}", Read, ""),
        ("DELETE", "/api/v1/vms/{vm}/snapshots/{snapshot}", VmConfigure, ""),
        ("POST", "/api/v1/vms/{vm}/snapshots/{snapshot}/revert", VmConfigure, ""),
        ("GET", "/api/v1/vms/{vm}/disks/{disk}/bitmaps", Read, ""),
        ("POST", "/api/v1/vms/{vm}/disks/{disk}/bitmaps", VmConfigure, r#"{"name": "b"}"#),
        ("POST", "/api/v1/vms/{vm}/disks/{disk}/bitmaps/{bitmap}/clear", VmConfigure, ""),
        ("DELETE", "/api/v1/vms/{vm}/disks/{disk}/bitmaps/{bitmap}", VmConfigure, ""),
        ("GET", "/api/v1/usage", Read, ""),
        ("GET", "/api/v1/tasks", Read, ""),
        ("GET", "/api/v1/tasks/{task}", Read, ""),
        ("POST", "/api/v1/tasks/{task}/cancel", ManageTasks, ""),
        ("POST", "/api/v1/tasks/{task}/resolve", ManageTasks, ""),
        ("PATCH", "/api/v1/tasks/{task}", ManageTasks, r#"{"rate": 0}"#),
        ("POST", "/api/v1/tasks/{task}/pause", ManageTasks, ""),
        ("POST", "/api/v1/tasks/{task}/resume", ManageTasks, ""),
        ("GET", "/api/v1/events", Read, ""),
        ("GET", "/api/v1/alarms", Read, ""),
        ("GET", "/api/v1/changes", Read, ""),
        ("POST", "/api/v1/server/backup", BackUpServer, r#"{"passphrase": SEALED}"#),
        ("GET", "/metrics", ReadMetrics, ""),
        ("GET", "/metrics/hosts/{host}", ReadMetrics, ""),
        ("GET", "/metrics/targets", ReadMetrics, ""),
    ]
    .map(|(method, path, privilege, body)| (method, path, privilege, of(body)))
    .into()
}

/// Routes, by method and path.
type Routes = BTreeSet<(String, String)>;

/// The routes of the router, and which of them have a dry run.
fn served() -> (Routes, Routes) {
    let document = document();
    let (mut all, mut dry) = (Routes::new(), Routes::new());
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let route = (method.to_uppercase(), path.clone());
            let parameters = operation["parameters"].as_array();
            if parameters.into_iter().flatten().any(|it| it["name"] == "dry_run") {
                dry.insert(route.clone());
            }
            all.insert(route);
        }
    }
    // They are not in the OpenAPI document, and are only read.
    all.extend(metrics::routes().map(|(path, _)| ("GET".to_owned(), path.to_owned())));
    (all, dry)
}

fn caller(privileges: impl IntoIterator<Item = Privilege>) -> Caller {
    Caller::new("somebody", privileges.into_iter().collect())
}

/// A request about resources that do not exist; it asks for a WebSocket if the route is one.
fn request(method: &str, path: &str, body: &str) -> Request<Body> {
    let segments = path.split('/').map(|it| if it.starts_with('{') { "none" } else { it });
    let mut request = Request::builder()
        .method(method)
        .uri(segments.collect::<Vec<_>>().join("/"))
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==")
        .body(Body::from(body.to_owned()))
        .unwrap();
    let upgrade = hyper::upgrade::on(&mut request);
    request.extensions_mut().insert(upgrade);
    request
}

impl Api {
    /// The answer to an authenticated user.
    async fn send_as(&self, caller: Caller, request: Request<Body>) -> Answer {
        let router = user_router().layer(Extension(Authenticated(caller)));
        self.answer(router.with_state(Arc::clone(&self.control)), request).await
    }
}

#[test]
fn every_route_that_is_not_public_has_its_privilege_in_the_table() {
    let known: Routes = routes()
        .iter()
        .map(|(method, path, ..)| (*method, *path))
        .chain(PUBLIC)
        .map(|(method, path)| (method.to_owned(), path.to_owned()))
        .collect();
    assert_eq!(known, served().0);
    assert_eq!(known.len(), routes().len() + PUBLIC.len(), "a route is in the table twice");
}

#[tokio::test]
async fn every_route_refuses_requests_without_a_token() {
    let api = Api::new().await;
    for (method, path, _, body) in routes() {
        let answer = api.send(request(method, path, &body)).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{method} {path}: {}", answer.body);
    }
    for (method, path) in PUBLIC {
        let answer = api.send(request(method, path, "{}")).await;
        assert_ne!(answer.status, StatusCode::UNAUTHORIZED, "{method} {path}");
    }
}

#[tokio::test]
async fn every_route_is_forbidden_without_its_privilege_and_allowed_with_it_alone() {
    let api = Api::new().await;
    let (_, dry) = served();
    let mut sent = Vec::new();
    for (method, path, privilege, body) in routes() {
        if dry.contains(&(method.to_owned(), path.to_owned())) {
            sent.push((method, format!("{path}?dry_run=true"), privilege, body.clone()));
        }
        sent.push((method, path.to_owned(), privilege, body));
    }
    let stands = async || {
        let events = api.get("events?limit=1000").await.body["items"].clone();
        let lists = ["hosts", "datastores", "providers", "policies", "vms", "tasks", "log-level"];
        let mut all = vec![events];
        for list in lists {
            all.push(api.get(list).await.body);
        }
        all
    };
    let before = stands().await;
    for (method, path, privilege, body) in &sent {
        let others = Privilege::ALL.into_iter().filter(|other| other != privilege);
        for caller in [caller([]), caller(others)] {
            let answer = api.send_as(caller, request(method, path, body)).await;
            let what = format!("{method} {path}: {} {}", answer.status, answer.body);
            assert_eq!(answer.status, StatusCode::FORBIDDEN, "{what}");
            assert_eq!(answer.body["code"], "forbidden", "{what}");
            let named = format!("the privilege '{}'", privilege.name());
            assert!(answer.body["detail"].as_str().unwrap().ends_with(&named), "{what}");
        }
    }
    assert_eq!(stands().await, before, "a request that was forbidden changed something");
    for (method, path, privilege, body) in &sent {
        let answer = api.send_as(caller([*privilege]), request(method, path, body)).await;
        let what = format!("{method} {path}: {} {}", answer.status, answer.body);
        assert_ne!(answer.status, StatusCode::FORBIDDEN, "{what}");
        assert!(!answer.status.is_server_error(), "{what}");
    }
}

/// What a request is refused for is not found out by whoever may not send it.
#[tokio::test]
async fn who_may_not_is_told_so_before_what_they_sent_is_understood() {
    let api = Api::new().await;
    for (method, path, privilege, _) in routes() {
        let others = || caller(Privilege::ALL.into_iter().filter(|other| *other != privilege));
        for body in ["{", "nonsense", &"x".repeat(BODY_MAX + 1)] {
            for query in ["", "?nonsense=1"] {
                let send = || request(method, &format!("{path}{query}"), body);
                let what = format!("{method} {path}{query}");
                let answer = api.send_as(others(), send()).await;
                assert_eq!(answer.status, StatusCode::FORBIDDEN, "{what}: {}", answer.body);
                let answer = api.send(send()).await;
                assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{what}: {}", answer.body);
            }
        }
        let mut plain = request(method, path, "{");
        plain.headers_mut().clear();
        let answer = api.send_as(others(), plain).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{method} {path}: {}", answer.body);
    }
}

#[tokio::test]
async fn encrypted_resources_need_the_cryptography_privileges_too() {
    let api = Api::new().await;
    api.fixture.made("secret", "encrypted").await;
    api.fixture.made("open", "plain").await;
    let forbidden = async |with: &[Privilege], method, path: &str, body: &Value, lacks: &str| {
        let caller = caller(with.iter().copied());
        let answer = api.send_as(caller, request(method, path, &body.to_string())).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{path}: {}", answer.body);
        let detail = answer.body["detail"].as_str().unwrap();
        assert!(detail.ends_with(&format!("'{lacks}'")), "{path}: {detail}");
    };
    let allowed = async |with: &[Privilege], method, path: &str, body: &Value| {
        let caller = caller(with.iter().copied());
        let answer = api.send_as(caller, request(method, path, &body.to_string())).await;
        assert_ne!(answer.status, StatusCode::FORBIDDEN, "{path}: {}", answer.body);
        answer
    };
    use Privilege::*;

    let plain = vm_with("/policy", json!("plain"));
    let path = "/api/v1/vms?dry_run=true";
    forbidden(&[VmConfigure], "POST", path, &vm(), "encrypt-new").await;
    assert_eq!(allowed(&[VmConfigure], "POST", path, &plain).await.status, StatusCode::OK);
    let both = [VmConfigure, EncryptNew];
    assert_eq!(allowed(&both, "POST", path, &vm()).await.status, StatusCode::OK);

    let export = |vm: &str| format!("/api/v1/vms/{vm}/disks/disk0/export?dry_run=true");
    let raw = json!({ "to": "/x", "format": "raw", "plaintext": true });
    let sealed = json!({ "to": "/x", "format": "sealed" });
    forbidden(&[DirectAccess], "POST", &export("secret"), &raw, "decrypt").await;
    allowed(&[DirectAccess], "POST", &export("secret"), &sealed).await;
    allowed(&[DirectAccess], "POST", &export("open"), &raw).await;
    allowed(&[DirectAccess, Decrypt], "POST", &export("secret"), &raw).await;

    let (dumps, to) = (|vm: &str| format!("/api/v1/vms/{vm}/dumps"), json!({ "to": "/x" }));
    let decrypt = |vm: &str| format!("{}/first/decrypt", dumps(vm));
    let both = json!({ "decrypt_to": "/x" });
    allowed(&[DirectAccess], "POST", &dumps("secret"), &json!({})).await;
    for (path, body) in [(dumps("secret"), &both), (decrypt("secret"), &to)] {
        forbidden(&[DirectAccess], "POST", &path, body, "decrypt").await;
        allowed(&[DirectAccess, Decrypt], "POST", &path, body).await;
    }
    allowed(&[DirectAccess], "POST", &decrypt("open"), &to).await;

    let console = |vm: &str| format!("/api/v1/vms/{vm}/console");
    forbidden(&[VmConsole], "GET", &console("secret"), &Value::Null, "direct-access").await;
    allowed(&[VmConsole], "GET", &console("open"), &Value::Null).await;
    allowed(&[VmConsole, DirectAccess], "GET", &console("secret"), &Value::Null).await;
    let screen = |vm: &str| format!("/api/v1/vms/{vm}/screen");
    forbidden(&[VmConsole], "GET", &screen("secret"), &Value::Null, "direct-access").await;
    allowed(&[VmConsole, DirectAccess], "GET", &screen("secret"), &Value::Null).await;
    let guest = |vm: &str| format!("/api/v1/vms/{vm}/guest");
    let exec = json!({ "ask": "exec", "path": "/bin/true", "arguments": ["word"] });
    forbidden(&[VmGuest], "POST", &guest("secret"), &exec, "direct-access").await;
    allowed(&[VmGuest], "POST", &guest("open"), &exec).await;
    allowed(&[VmGuest, DirectAccess], "POST", &guest("secret"), &exec).await;
    let asked = api.fixture.events("vm.guest-asked").await;
    assert!(!asked.is_empty() && asked.iter().all(|it| it.detail == "to run /bin/true"));
    assert!(api.fixture.events("vm.console-opened").await.iter().all(|it| it.actor == "somebody"));
}

/// Prometheus gets the metrics with its token, and nothing else.
#[tokio::test]
async fn the_token_for_metrics_is_good_for_nothing_else() {
    const METRICS_TOKEN: &str = "of-prometheus";
    let api = Api::new().await;
    api.fixture.add_user("prometheus", METRICS_TOKEN, Role::Metrics).await;
    let ask = async |method: &str, path: &str| {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::AUTHORIZATION, format!("Bearer {METRICS_TOKEN}"))
            .body(Body::empty())
            .unwrap();
        api.send(request).await.status.as_u16()
    };
    for path in ["/metrics", "/metrics/targets"] {
        assert_eq!(ask("GET", path).await, 200, "{path}");
    }
    for (method, path) in [
        ("GET", "/api/v1/vms"),
        ("GET", "/api/v1/events"),
        ("GET", "/api/v1/alarms"),
        ("DELETE", "/api/v1/vms/web"),
        ("POST", "/api/v1/hosts/join-token"),
    ] {
        let status = ask(method, path).await;
        assert!(matches!(status, 403..=405), "{method} {path}: {status}");
    }
    assert_eq!(ask("GET", "/api/v1/vms").await, 403);
}
