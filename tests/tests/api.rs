//! The REST API towards faulty and hostile clients: every answer is a problem document with
//! status, code and, where there is one, the field at fault; and no request is served without TLS and credentials.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use vmseal_api::request::BODY_MAX;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::rest::{Answer, Caller, call, json_body};
use vmseal_tests::scan::contains;

/// An answer is a problem document (RFC 9457) with this status and code.
fn is_problem(answer: &Answer, status: u16, code: &str) {
    println!("{} {}", answer.status, answer.text);
    assert_eq!(answer.status, status, "{answer:?}");
    assert!(answer.head.contains("content-type: application/problem+json"), "{}", answer.head);
    let problem = answer.json().unwrap();
    assert_eq!(problem["status"], status, "{problem}");
    assert_eq!(problem["code"], code, "{problem}");
    assert_eq!(problem["type"], format!("urn:vmseal:problem:{code}"), "{problem}");
    for member in ["title", "detail"] {
        assert!(problem[member].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
    }
}

/// The problem names this field.
fn names(answer: &Answer, field: &str) {
    assert_eq!(answer.json().unwrap()["field"], field, "{}", answer.text);
}

/// A request that makes a VM, as JSON, with one change.
fn vm_request(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let mut request = json!({
        "name": "new", "policy": "encrypted", "memory": 32 << 20,
        "disks": [{"name": "disk0", "datastore": "local", "size": 1 << 20}],
    });
    change(&mut request);
    request.to_string()
}

#[test]
fn errors_in_a_request_name_the_field() {
    let here = Installation::new().unwrap();
    let post =
        |body: &str| call(&here, &Caller::Admin, "/api/v1/vms", &json_body("POST", body)).unwrap();
    type Case = (fn(&mut serde_json::Value), &'static str);
    let cases: [Case; 12] = [
        (|vm| vm["colour"] = "red".into(), "colour"),
        (|vm| vm["disks"][0]["colour"] = "red".into(), "disks[0].colour"),
        (|vm| vm["memory"] = "32MiB".into(), "memory"),
        (|vm| vm["memory"] = (-1).into(), "memory"),
        (|vm| vm["memory"] = 1.into(), "memory"),
        (|vm| vm["disks"][0]["size"] = true.into(), "disks[0].size"),
        (|vm| vm["disks"][0]["size"] = ((1 << 20) + 1).into(), "disks[0].size"),
        (|vm| vm["disks"] = json!([]), "disks"),
        (|vm| vm["vcpus"] = 256.into(), "vcpus"),
        (|vm| vm["vcpus"] = 0.into(), "vcpus"),
        (|vm| vm["name"] = "../../etc".into(), "name"),
        (|vm| vm["disks"][0]["image"] = "relative".into(), "disks[0].image"),
    ];
    for (change, field) in cases {
        let answer = post(&vm_request(change));
        is_problem(&answer, 400, "invalid-request");
        names(&answer, field);
    }
    let answer = post(&vm_request(|vm| drop(vm.as_object_mut().unwrap().remove("policy"))));
    is_problem(&answer, 400, "invalid-request");
    assert!(answer.text.contains("policy"), "{}", answer.text);

    for malformed in ["{", "", "null", "[]", "\u{1}", "{\"name\": \"a\", \"name\": \"b\"}"] {
        is_problem(&post(malformed), 400, "invalid-request");
    }
    // Deep nesting is not recursed into.
    is_problem(&post(&"[".repeat(100_000)), 400, "invalid-request");
    // References that are well-formed and lead nowhere.
    for (change, what) in [
        ((|vm| vm["policy"] = "nowhere".into()) as fn(&mut serde_json::Value), "nowhere"),
        (|vm| vm["disks"][0]["datastore"] = "nowhere".into(), "nowhere"),
    ] {
        let answer = post(&vm_request(change));
        assert!((400..500).contains(&answer.status) && answer.text.contains(what), "{answer:?}");
        let code = answer.json().unwrap()["code"].as_str().unwrap().to_owned();
        is_problem(&answer, answer.status, &code);
    }
    assert_eq!(here.json(&["vm", "list"]).unwrap(), json!([]), "a refused request made something");
    assert_eq!(here.json(&["task", "list"]).unwrap(), json!([]));
}

#[test]
fn bodies_have_a_limit_and_a_type() {
    let here = Installation::new().unwrap();
    let call = |arguments: &[&str]| call(&here, &Caller::Admin, "/api/v1/vms", arguments).unwrap();
    let body = here.path("body");
    // At the limit it is looked at, above it is not.
    for (length, status, code) in [
        (BODY_MAX, 400, "invalid-request"),
        (BODY_MAX + 1, 413, "too-large"),
        (16 * BODY_MAX, 413, "too-large"),
    ] {
        let mut content = vec![b' '; length];
        content[0] = b'{';
        std::fs::write(&body, content).unwrap();
        let from_file = format!("@{}", body.display());
        is_problem(&call(&json_body("POST", &from_file)), status, code);
        // The same without its length said beforehand. Not the longest: the server hangs up on who sends
        // on and on, and curl may not get to read its answer.
        if length <= BODY_MAX + 1 {
            let chunked =
                [&json_body("POST", &from_file)[..], &["-H", "Transfer-Encoding: chunked"]];
            is_problem(&call(&chunked.concat()), status, code);
        }
    }
    let answer = call(&["-X", "POST", "-H", "Content-Type: text/plain", "--data-binary", "{}"]);
    is_problem(&answer, 400, "invalid-request");
}

#[test]
fn nobody_gets_in_without_the_right_credentials() {
    let here = Installation::new().unwrap();
    let token = std::fs::read_to_string(here.path("server/admin.token")).unwrap();
    let token = token.trim();
    let shorter = format!("Bearer {}", &token[..token.len() - 1]);
    let longer = format!("Bearer {token}x");
    let other_scheme = format!("Basic {token}");
    let callers = [
        Caller::Nobody,
        Caller::Authorization("Bearer"),
        Caller::Authorization("Bearer wrong"),
        Caller::Authorization(&shorter),
        Caller::Authorization(&longer),
        Caller::Authorization(&other_scheme),
        Caller::Authorization(token),
    ];
    for caller in &callers {
        for (path, arguments) in [
            ("/api/v1/vms", &[][..]),
            ("/api/v1/hosts", &[]),
            ("/api/v1/events", &[]),
            ("/api/v1/alarms", &[]),
            ("/api/v1/vms/x/console", &[]),
            ("/api/v1/vms", &json_body("POST", "{")),
            ("/api/v1/hosts/tokens", &["-X", "POST"]),
            ("/api/v1/hosts/here", &["-X", "DELETE"]),
        ] {
            let answer = call(&here, caller, path, arguments).unwrap();
            is_problem(&answer, 401, "unauthenticated");
            assert!(answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
            assert!(!answer.text.contains(token), "the answer repeats the token");
        }
    }
    assert_eq!(call(&here, &Caller::Admin, "/api/v1/vms", &[]).unwrap().status, 200);
    assert_eq!(here.json(&["host", "list"]).unwrap().as_array().unwrap().len(), 1);
}

#[test]
fn unknown_routes_methods_and_ids_have_different_errors() {
    let here = Installation::new().unwrap();
    let call =
        |path: &str, arguments: &[&str]| call(&here, &Caller::Admin, path, arguments).unwrap();
    for path in ["/api/v1/nothing", "/api/v2/vms", "/api/v1/vms/a/b/c", "/api/v1/"] {
        is_problem(&call(path, &[]), 404, "not-found");
    }
    for (path, method) in
        [("/api/v1/vms", "PUT"), ("/api/v1/alarms", "DELETE"), ("/api/v1/about", "POST")]
    {
        let answer = call(path, &["-X", method]);
        println!("{} {}", answer.status, answer.text);
        assert_eq!(answer.status, 405);
        assert!(answer.head.contains("application/problem+json"), "{}", answer.head);
        assert!(answer.head.contains("allow: get"), "{}", answer.head);
    }
    for path in [
        "/api/v1/vms/nothing",
        "/api/v1/vms/0190b5a0-0000-7000-8000-000000000001",
        "/api/v1/vms/..%2f..%2fetc",
        "/api/v1/vms/%00",
        "/api/v1/tasks/not-an-id",
        "/api/v1/providers/nothing",
        "/api/v1/policies/nothing",
        "/api/v1/datastores/nothing",
        "/api/v1/hosts/nothing",
    ] {
        let answer = call(path, &[]);
        let problem = answer.json().unwrap();
        assert!([400, 404].contains(&answer.status), "{path}: {answer:?}");
        is_problem(&answer, answer.status, problem["code"].as_str().unwrap());
    }
    for query in ["?limit=-1", "?limit=many", "?colour=red"] {
        is_problem(&call(&format!("/api/v1/vms{query}"), &[]), 400, "invalid-request");
    }
}

/// What the peer sends back to these bytes on a plain connection.
fn in_the_clear(address: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn nothing_is_spoken_in_the_clear_and_no_old_tls() {
    let here = Installation::new().unwrap();
    let server = here.url().replace("https://", "");
    let agent = server.replace(":8443", ":8444");
    for address in [&server, &agent] {
        let request = format!("GET /api/v1/about HTTP/1.1\r\nHost: {address}\r\n\r\n");
        let answer = in_the_clear(address, request.as_bytes());
        assert!(!contains(&answer, b"HTTP"), "{answer:?}");
        let old = Command::new("openssl")
            .args(["s_client", "-connect", address, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0"])
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        assert!(!old.status.success(), "{}", String::from_utf8_lossy(&old.stdout));
    }
    // The authority is checked, and the name: curl without it refuses this server.
    let unknown =
        Command::new("curl").args(["-sS", "--max-time", "10", &here.url()]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(60), "{}", String::from_utf8_lossy(&unknown.stderr));
}

/// curl's exit status and the HTTP status, for a request to the agent with these arguments.
fn ask_agent(here: &Installation, path: &str, arguments: &[&str]) -> (i32, String) {
    let address = here.url().replace(":8443", ":8444");
    let output = Command::new("curl")
        .args(["-q", "-sS", "--max-time", "20", "--noproxy", "*", "--insecure"])
        .args(["-o", "/dev/null", "-w", "%{http_code}"])
        .args(arguments)
        .arg(format!("{address}{path}"))
        .output()
        .unwrap();
    println!("{}", String::from_utf8_lossy(&output.stderr).trim());
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn an_agent_serves_only_its_server() {
    let here = Installation::new().unwrap();
    here.create_counter("sealed", "encrypted").unwrap();
    let vm = here.vm("sealed").unwrap()["id"].as_str().unwrap().to_owned();
    let power_on = format!("/v1/vms/{vm}/power-on");
    // The agent's own certificate is of the same authority; it is a host's, not the server's.
    let (key, certificate) = agents_identity(&here);
    let agents = ["--cert", text(&certificate).unwrap(), "--key", text(&key).unwrap()];
    let stranger = stranger(&here);
    let strangers = ["--cert", text(&stranger.1).unwrap(), "--key", text(&stranger.0).unwrap()];
    for (who, arguments) in
        [("nobody", &[][..]), ("a stranger", &strangers[..]), ("a host", &agents[..])]
    {
        for (path, method) in [("/v1/host", "GET"), ("/v1/state", "GET"), (&*power_on, "POST")] {
            let arguments = [arguments, &["-X", method]].concat();
            let (exit, status) = ask_agent(&here, path, &arguments);
            println!("{who} {method} {path}: curl {exit}, HTTP {status}");
            assert!(exit != 0 && status == "000" || status == "401" || status == "403", "{who}");
        }
    }
    assert_eq!(here.vm("sealed").unwrap()["power"], "off");
    // The server itself is served.
    assert_eq!(here.boot_counter("sealed").unwrap(), 1);
}

/// The files of the agent's key and certificate.
fn agents_identity(here: &Installation) -> (std::path::PathBuf, std::path::PathBuf) {
    let holding = |label: &str| {
        let files = vmseal_tests::scan::regular_files(&here.path("agent")).unwrap();
        let found = files.into_iter().find(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let content = std::fs::read_to_string(path).unwrap_or_default();
            content.contains(label) && !name.contains("ca")
        });
        found.unwrap_or_else(|| panic!("no file with a {label} in the agent's state directory"))
    };
    (holding("PRIVATE KEY"), holding("BEGIN CERTIFICATE"))
}

/// A key and a self-signed certificate that calls itself the server.
fn stranger(here: &Installation) -> (std::path::PathBuf, std::path::PathBuf) {
    let (key, certificate) = (here.path("stranger.key"), here.path("stranger.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-subj", "/CN=vmseal-server", "-days", "1"])
        .args(["-addext", "subjectAltName=URI:urn:vmseal:server"])
        .args(["-addext", "extendedKeyUsage=clientAuth"])
        .args(["-keyout", text(&key).unwrap(), "-out", text(&certificate).unwrap()])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    (key, certificate)
}

#[test]
fn a_join_token_is_valid_once_and_no_other_one_at_all() {
    let here = Installation::new().unwrap();
    // The harness joined with this one.
    let used = std::fs::read_to_string(here.path("join.token")).unwrap();
    let fresh = here.vmseal(&["host", "token"]).unwrap();
    let forged = {
        // Another secret, and the right fingerprint.
        let (_, fingerprint) = fresh.trim().split_once('.').unwrap();
        format!("{}.{fingerprint}", "A".repeat(43))
    };
    let join = |token: &str, name: &str| {
        let file = here.path("other.token");
        std::fs::write(&file, token).unwrap();
        let (file, state) = (text(&file).unwrap().to_owned(), here.path(&format!("agent-{name}")));
        let to = here.url();
        let arguments = ["agent", "join", "--to", &to, "--name", name, "--join-token-file", &file];
        let place = ["--address", "127.0.0.1:1", "--state-dir", text(&state).unwrap()];
        here.try_vmseal(&[&arguments[..], &place].concat()).unwrap()
    };
    for (token, name) in [(&*used, "again"), (&*forged, "forged"), ("", "empty"), ("x", "short")] {
        let output = join(token, name);
        assert!(!output.status.success(), "'{name}' joined");
        println!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let elsewhere =
        format!("{}{}", fresh.trim().split_once('.').unwrap().0, ".".to_owned() + &"0".repeat(64));
    let output = join(&elsewhere, "elsewhere");
    assert!(!output.status.success(), "it joined a server with another authority");
    assert_eq!(here.json(&["host", "list"]).unwrap().as_array().unwrap().len(), 1);
    assert!(join(&fresh, "second").status.success());
    assert!(!join(&fresh, "third").status.success(), "a token served twice");
    assert_eq!(here.json(&["host", "list"]).unwrap().as_array().unwrap().len(), 2);
    let set = |more: &[&str]| {
        let verb = ["host", "set", "second", "--address", "127.0.0.1:2"];
        here.try_vmseal(&[&verb[..], more].concat()).unwrap()
    };
    let address = || here.json(&["host", "show", "second"]).unwrap()["address"].clone();
    assert!(set(&["--dry-run"]).status.success());
    assert_eq!(address(), "127.0.0.1:1");
    let output = set(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(address(), "127.0.0.1:2");
    let shown = here.json(&["host", "show", "here"]).unwrap();
    let taken = shown["address"].as_str().unwrap();
    let output = here.try_vmseal(&["host", "set", "second", "--address", taken]).unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("host 'here' is at"), "{output:?}");
}
