//! What a client sends to open a WebSocket (RFC 6455, section 4.1): headers of the routes that answer 101.

use serde_json::{Value, json};

/// The headers, and what they say; the key is any.
const HEADERS: [(&str, Option<&str>); 4] = [
    ("Connection", Some("Upgrade")),
    ("Upgrade", Some("websocket")),
    ("Sec-WebSocket-Version", Some("13")),
    ("Sec-WebSocket-Key", None),
];

/// Adds them to the document.
pub(super) fn add(document: &mut Value) {
    let operations = document["paths"].as_object_mut().into_iter().flatten();
    let operations = operations.flat_map(|(_, path)| path.as_object_mut().into_iter().flatten());
    for (_, operation) in operations {
        if operation["responses"].get("101").is_none() {
            continue;
        }
        if let Some(parameters) = operation["parameters"].as_array_mut() {
            parameters.extend(HEADERS.map(header));
        }
    }
}

fn header((name, value): (&str, Option<&str>)) -> Value {
    let schema = match value {
        Some(value) => json!({ "type": "string", "enum": [value] }),
        None => json!({ "type": "string", "minLength": 1 }),
    };
    let description = "Of the WebSocket; clients of WebSockets send it by themselves";
    json!({ "name": name, "in": "header", "required": true, "description": description, "schema": schema })
}

#[cfg(test)]
mod tests {
    #[test]
    fn routes_that_switch_to_a_websocket_say_what_they_need() {
        let document = crate::routes::document();
        let mut found = 0;
        for (path, operations) in document["paths"].as_object().unwrap() {
            for operation in operations.as_object().unwrap().values() {
                let headers = operation["parameters"].as_array().into_iter().flatten();
                let headers = headers.filter(|it| it["in"] == "header").count();
                let switches = operation["responses"].get("101").is_some();
                assert_eq!(headers, if switches { super::HEADERS.len() } else { 0 }, "{path}");
                found += usize::from(switches);
            }
        }
        assert_eq!(found, 3);
    }
}
