//! The errors that a route may give, by what it takes and does. The response `default` stays, for all others.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use vmseal_api::problem::ErrorCode;

/// Adds the errors of every operation to the document.
pub(super) fn add(document: &mut Value) {
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    for (path, operations) in paths {
        for (method, operation) in operations.as_object_mut().into_iter().flatten() {
            let codes = codes(method, path, operation);
            let Some(responses) = operation["responses"].as_object_mut() else { continue };
            describe(responses, &codes);
        }
    }
}

/// The codes that an operation may answer with.
fn codes(method: &str, path: &str, operation: &Value) -> Vec<ErrorCode> {
    let mut codes = Vec::new();
    // Its own security, where it has one, is none.
    let open = operation["security"].is_array();
    if !open {
        codes.extend([ErrorCode::Unauthenticated, ErrorCode::Forbidden]);
    }
    let parameters = operation["parameters"].as_array().is_some_and(|all| !all.is_empty());
    let body = operation["requestBody"].is_object();
    if parameters || body {
        codes.push(ErrorCode::InvalidRequest);
    }
    if path.contains('{') || body {
        codes.push(ErrorCode::NotFound);
    }
    if body {
        codes.push(ErrorCode::TooLarge);
    }
    if method != "get" {
        codes.extend([ErrorCode::WrongState, ErrorCode::AlreadyExists, ErrorCode::InUse]);
        codes.push(ErrorCode::LimitExceeded);
        // Of a host or a key server, as far as one is asked before the answer. What a task meets later is in the task.
        codes.extend([ErrorCode::Unreachable, ErrorCode::Unsupported]);
    }
    if !open {
        codes.extend([ErrorCode::Internal, ErrorCode::TimedOut]);
    }
    codes
}

fn describe(responses: &mut Map<String, Value>, codes: &[ErrorCode]) {
    let Some(content) = responses.get("default").map(|default| default["content"].clone()) else {
        return;
    };
    let mut titles: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
    for code in codes {
        titles.entry(code.status()).or_default().push(code.title());
    }
    for (status, titles) in titles {
        let description = titles.join("; ");
        let response = json!({ "description": description, "content": content });
        responses.insert(status.to_string(), response);
    }
}
