//! Whether answers are as the API document states them: the answer to every request of these tests is looked up there.

use std::sync::LazyLock;

use axum::http::{HeaderValue, Method, header};
use serde_json::Value;

use super::Answer;
use crate::routes::document;

/// What to do about an answer that the document does not state.
const REMEDY: &str = "add what it comes from to the route's causes (routes/table.rs)";

static DOCUMENT: LazyLock<Value> = LazyLock::new(document);

/// Asserts that the document states the status of an answer for its route and, of a problem, the code. That `default` has
/// all others does not count.
#[track_caller]
pub(super) fn assert_stated(method: &Method, path: &str, answer: &Answer) {
    let Some(operation) = operation(method, path) else { return };
    let Answer { status, headers, body } = answer;
    let response = &operation["responses"][status.as_str()];
    assert!(!response.is_null(), "{method} {path}: {status} is not stated: {REMEDY}. {body}");
    if headers.get(header::CONTENT_TYPE).is_none_or(|it| it != "application/problem+json") {
        return;
    }
    let place = response["$ref"].as_str().unwrap_or_default().trim_start_matches('#');
    let response = DOCUMENT.pointer(place).unwrap_or(response);
    let schema = &response["content"]["application/problem+json"]["schema"];
    let codes = schema["properties"]["code"]["enum"].as_array();
    let is_stated = codes.is_some_and(|codes| codes.contains(&body["code"]));
    assert!(is_stated, "{method} {path}: the code of {status} is not stated: {REMEDY}. {body}");
}

/// What the document has of a request; nothing where no route takes it.
fn operation(method: &Method, path: &str) -> Option<&'static Value> {
    let paths = DOCUMENT["paths"].as_object()?;
    let found = paths.iter().filter(|(pattern, _)| fits(pattern, path));
    // `hosts/tokens` is no host.
    let (_, operations) = found.min_by_key(|(pattern, _)| pattern.matches('{').count())?;
    operations.get(method.as_str().to_lowercase())
}

fn fits(pattern: &str, path: &str) -> bool {
    let (patterns, segments) = (pattern.split('/'), path.split('/'));
    patterns.clone().count() == segments.clone().count()
        && patterns.zip(segments).all(|(pattern, it)| pattern.starts_with('{') || pattern == it)
}

fn problem(status: u16, code: &str) -> Answer {
    let kind = HeaderValue::from_static("application/problem+json");
    Answer {
        status: status.try_into().unwrap(),
        headers: [(header::CONTENT_TYPE, kind)].into_iter().collect(),
        body: serde_json::json!({ "code": code }),
    }
}

#[test]
fn what_the_document_states_may_be_answered() {
    assert_stated(&Method::GET, "/api/v1/vms/web", &problem(404, "not-found"));
    assert_stated(&Method::POST, "/api/v1/hosts/tokens", &problem(400, "invalid-request"));
    // No routes.
    assert_stated(&Method::PATCH, "/api/v1/vms", &problem(405, "invalid-request"));
    assert_stated(&Method::GET, "/api/v1/nothing", &problem(404, "not-found"));
}

#[test]
#[should_panic(expected = "502 Bad Gateway is not stated")]
fn a_status_that_it_does_not_state_is_found() {
    assert_stated(&Method::GET, "/api/v1/vms/web", &problem(502, "unreachable"));
}

#[test]
#[should_panic(expected = "the code of 409 Conflict is not stated")]
fn a_code_that_it_does_not_state_is_found() {
    assert_stated(&Method::DELETE, "/api/v1/policies/x", &problem(409, "already-exists"));
}
