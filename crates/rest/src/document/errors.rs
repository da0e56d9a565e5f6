//! The errors that each route may give: those of the form of its request, and those of the causes that it was registered
//! with. The response `default` stays, for all others.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use vmseal_api::problem::ErrorCode;

use super::causes::Causes;

/// Errors of one status: their codes, each with its title.
type Codes = BTreeMap<String, &'static str>;

/// Adds the errors of every operation to the document. Those of one status and with the same codes are one response, which
/// the operations refer to.
pub(super) fn add(document: &mut Value, causes: &Causes) {
    let mut named = Map::new();
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    for (path, operations) in paths {
        for (method, operation) in operations.as_object_mut().into_iter().flatten() {
            let declared = causes.get(&(path.clone(), method.clone())).into_iter().flatten();
            let declared = declared.flat_map(|cause| cause.codes().iter().copied());
            let stated = by_status(of_form(method, path, operation).into_iter().chain(declared));
            let Some(responses) = operation["responses"].as_object_mut() else { continue };
            for (status, codes) in stated {
                let name = name(status, &codes);
                let reference = json!({ "$ref": format!("#/components/responses/{name}") });
                responses.insert(status.to_string(), reference);
                named.entry(name).or_insert_with(|| response(&codes));
            }
        }
    }
    document["components"]["responses"] = named.into();
}

/// What follows from the form of a request: a user, parameters, a body, a resource in the path.
fn of_form(method: &str, path: &str, operation: &Value) -> Vec<ErrorCode> {
    let mut codes = Vec::new();
    // Its own security, where it has one, is none.
    let open = operation["security"].is_array();
    if !open {
        codes.extend([ErrorCode::Unauthenticated, ErrorCode::Forbidden]);
        // Of connections. All of them are looked for in the inventory, and have a time.
        codes.extend([ErrorCode::LimitExceeded, ErrorCode::TimedOut]);
        codes.extend([ErrorCode::Internal, ErrorCode::Busy]);
    }
    let has_parameters = operation["parameters"].as_array().is_some_and(|all| !all.is_empty());
    // What changes something refuses parameters that it does not have.
    if has_parameters || method != "get" {
        codes.push(ErrorCode::InvalidRequest);
    }
    // Where none is asked for, an empty one may be sent.
    if !matches!(method, "get" | "delete") {
        codes.push(ErrorCode::TooLarge);
    }
    if path.contains('{') {
        codes.push(ErrorCode::NotFound);
    }
    codes
}

fn by_status(codes: impl Iterator<Item = ErrorCode>) -> BTreeMap<u16, Codes> {
    let mut stated: BTreeMap<u16, Codes> = BTreeMap::new();
    for code in codes {
        stated.entry(code.status()).or_default().insert(text(code), code.title());
    }
    stated
}

/// A code as answers have it. A variant without fields can always be serialized.
fn text(code: ErrorCode) -> String {
    let value = serde_json::to_value(code).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

/// The name of a response: `409-in-use-wrong-state`.
fn name(status: u16, codes: &Codes) -> String {
    let codes: Vec<_> = codes.keys().map(String::as_str).collect();
    format!("{status}-{}", codes.join("-"))
}

/// A problem with one of these codes.
fn response(codes: &Codes) -> Value {
    let told: Vec<_> = codes.iter().map(|(code, title)| format!("`{code}`: {title}")).collect();
    let codes: Vec<_> = codes.keys().collect();
    let schema = json!({
        "allOf": [{ "$ref": "#/components/schemas/Problem" }],
        "properties": { "code": { "enum": codes } },
    });
    json!({
        "description": told.join("; "),
        "content": { "application/problem+json": { "schema": schema } },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::routes::{described, document};

    /// The codes that the document states for a route, by their status.
    fn stated(document: &Value, method: &str, path: &str) -> BTreeMap<String, Vec<String>> {
        let responses = document["paths"][path][method]["responses"].as_object().unwrap();
        let errors = responses.iter().filter_map(|(status, response)| {
            let place = response["$ref"].as_str()?.trim_start_matches('#');
            let response = document.pointer(place).unwrap_or_else(|| panic!("{place}"));
            let schema = &response["content"]["application/problem+json"]["schema"];
            let codes = schema["properties"]["code"]["enum"].as_array().unwrap().iter();
            let codes = codes.map(|code| code.as_str().unwrap().to_owned());
            Some((status.clone(), codes.collect()))
        });
        errors.collect()
    }

    #[test]
    fn every_route_says_what_its_errors_come_from() {
        let (document, (_, causes)) = (document(), described());
        let mut known = BTreeSet::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            for method in operations.as_object().unwrap().keys() {
                let route = (path.clone(), method.clone());
                assert!(causes.get(&route).is_some_and(|causes| !causes.is_empty()), "{route:?}");
                known.insert(route);
            }
        }
        assert_eq!(known.len(), causes.len(), "causes of a route that there is not");
    }

    #[test]
    fn routes_state_the_errors_that_they_can_give_and_no_others() {
        let document = document();
        let has = |method: &str, path: &str, status: &str, code: &str| {
            let stated = stated(&document, method, &format!("/api/v1/{path}"));
            stated.get(status).is_some_and(|codes| codes.iter().any(|it| it == code))
        };
        for (method, path, status, code) in [
            ("post", "vms", "507", "no-space"),
            ("post", "vms/{vm}/start", "423", "locked"),
            ("post", "vms/{vm}/reboot", "423", "locked"),
            ("post", "vms/{vm}/resume", "422", "damaged"),
            ("post", "vms/{vm}/pause", "413", "too-large"),
            ("get", "datastores/{datastore}/scan", "502", "unreachable"),
            ("get", "datastores/{datastore}/scan", "409", "in-use"),
            ("get", "vms/{vm}/disks/{disk}/bitmaps", "409", "wrong-state"),
            ("get", "hosts/{host}/log-level", "422", "unsupported"),
            ("get", "vms/{vm}/console", "429", "limit-exceeded"),
            ("get", "tasks/{task}", "503", "busy"),
            ("post", "hosts/join", "503", "busy"),
            ("post", "hosts/join", "401", "unauthenticated"),
            ("post", "providers/{provider}/unlock", "422", "key-mismatch"),
        ] {
            assert!(has(method, path, status, code), "{method} {path}: {status} {code}");
        }
        for (method, path, status, code) in [
            ("get", "vms", "409", "wrong-state"),
            ("get", "vms", "404", "not-found"),
            ("get", "vms/{vm}", "502", "unreachable"),
            ("post", "policies", "502", "unreachable"),
            ("delete", "policies/{policy}", "409", "already-exists"),
            ("delete", "policies/{policy}", "413", "too-large"),
            ("post", "hosts/join", "403", "forbidden"),
        ] {
            assert!(!has(method, path, status, code), "{method} {path}: {status} {code}");
        }
    }

    /// A code that no route states would be one that no route gives.
    #[test]
    fn every_code_is_stated_by_some_route() {
        let document = document();
        let responses = document["components"]["responses"].to_string();
        let all = document["components"]["schemas"]["ErrorCode"]["enum"].as_array().unwrap();
        for code in all {
            assert!(responses.contains(&code.to_string()), "{code}");
        }
    }
}
