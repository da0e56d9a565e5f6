//! One request, one id: in all logs, in its task, in its events; and nothing forged by it.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::Path;

use vmseal_tests::installation::Installation;
use vmseal_tests::rest::{Caller, call, json_body};

/// The lines of a log with the id in them.
fn lines(log: &Path, id: &str) -> Vec<String> {
    let text = std::fs::read_to_string(log).unwrap();
    let told = format!("request_id={id}");
    text.lines().filter(|line| line.contains(&told)).map(str::to_owned).collect()
}

#[test]
fn the_id_of_a_request_is_in_the_logs_of_all_who_work_for_it_in_its_task_and_its_events() {
    let here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    let id = "operator-7f3a.start";
    here.vmseal(&["--request-id", id, "vm", "start", "web"]).unwrap();

    let said = |lines: &[String], words: &str| {
        assert!(lines.iter().any(|line| line.contains(words)), "no '{words}' in {lines:#?}");
    };
    let server = lines(&here.path("server.log"), id);
    said(&server, "/vms/web/start");
    said(&server, "the task goes on");
    said(&server, "the task has ended");
    let agent = lines(&here.path("agent.log"), id);
    said(&agent, "power-on");
    said(&agent, "the VM is being started");
    said(&agent, "the VM runs");
    let vm = here.vm("web").unwrap()["id"].as_str().unwrap().to_owned();
    said(&lines(&here.path(&format!("run/vms/{vm}/filter.log")), id), "serving");

    let tasks = here.json(&["task", "list"]).unwrap();
    let started = tasks.as_array().unwrap().iter().find(|task| task["kind"] == "vm.start").unwrap();
    assert_eq!(started["request_id"], id);
    let shown = here.vmseal(&["task", "show", started["id"].as_str().unwrap()]).unwrap();
    assert!(shown.contains(id), "{shown}");
    let of_request = |id: &str| -> Vec<String> {
        let events = here.json(&["events"]).unwrap();
        let caused = events.as_array().unwrap().iter().filter(|event| event["request_id"] == id);
        let kinds = caused.map(|event| event["kind"].as_str().unwrap().to_owned());
        // It does not matter to this test whether the key is on its host already.
        kinds.filter(|kind| kind != "key.delivered").collect()
    };
    assert_eq!(of_request(id), ["task.begun", "vm.started", "task.done"]);
    // From the environment, through to the task's end.
    let stop = here
        .command()
        .unwrap()
        .env("VMSEAL_REQUEST_ID", "stop-1")
        .args(["vm", "stop", "web", "--force"])
        .status();
    assert!(stop.unwrap().success());
    assert_eq!(of_request("stop-1"), ["task.begun", "vm.stopped", "task.done"]);
    said(&lines(&here.path("agent.log"), "stop-1"), "the VM is off");
}

#[test]
fn a_hostile_id_is_replaced_or_refused_and_forges_nothing() {
    let here = Installation::new().unwrap();
    let long = "x".repeat(65);
    for hostile in ["a b", &long, "\u{e9}", "1}: ERROR vmseal_control: forged", "x\u{1b}[2J"] {
        let header = format!("X-Request-Id: {hostile}");
        let arguments = [&json_body("POST", "{}")[..], &["-H", &header]].concat();
        let answer = call(&here, &Caller::Admin, "/api/v1/vms/none/start", &arguments).unwrap();
        let log = std::fs::read_to_string(here.path("server.log")).unwrap();
        assert!(!log.contains(hostile), "{log}");
        if hostile.contains('\u{1b}') {
            // HTTP has no control characters: this is refused before it is a request.
            assert_eq!((answer.status, answer.text.as_str()), (400, ""), "{answer:?}");
            continue;
        }
        assert_eq!(answer.status, 404, "{answer:?}");
        let told = answer.head.lines().find_map(|line| line.strip_prefix("x-request-id: "));
        let told = told.unwrap().trim();
        assert!(told.len() == 32 && told.bytes().all(|byte| byte.is_ascii_alphanumeric()));
        assert_eq!(answer.json().unwrap()["request_id"], told);
        assert!(log.contains(told), "{log}");
    }
    let refused = here.refused(&["--request-id", "a b", "vm", "list"]).unwrap();
    assert!(refused.contains("a request id has 1 to 64"), "{refused}");
}
