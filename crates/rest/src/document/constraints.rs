//! The limits that the services enforce, in the words of JSON Schema. They come from the constants that the checks use.

use serde_json::{Value, json};
use vmseal_api::bitmap::NAME_PATTERN as BITMAP_NAME;
use vmseal_api::datastore::LIMIT_MAX;
use vmseal_api::filter::{
    BITMAP_NAME_MAX, CACHE_BYTES_MAX, CACHE_BYTES_MIN, CRYPT_SECTOR, SERIAL_MAX,
};
use vmseal_api::guest::EXEC_SECONDS_MAX;
use vmseal_api::host::{BANDWIDTH_MIN, SHUTDOWN_SECONDS_MAX};
use vmseal_api::id::{NAME_MAX, NAME_PATTERN};
use vmseal_api::kmip::SERVERS_MAX;
use vmseal_api::nic::{FORWARDS_MAX, INTERFACE_NAME_MAX, INTERFACE_NAME_PATTERN, NICS_MAX};
use vmseal_api::request::{
    DISK_SIZE_MAX, DISK_SIZE_MIN, DISKS_MAX, MEMORY_MAX, MEMORY_MIN, VCPUS_MAX,
};

/// A name that a person chooses.
fn name() -> Value {
    json!({ "minLength": 1, "maxLength": NAME_MAX, "pattern": NAME_PATTERN })
}

fn interface() -> Value {
    json!({ "minLength": 1, "maxLength": INTERFACE_NAME_MAX, "pattern": INTERFACE_NAME_PATTERN })
}

fn bitmap() -> Value {
    json!({ "minLength": 1, "maxLength": BITMAP_NAME_MAX, "pattern": BITMAP_NAME })
}

/// An absolute path of a file.
fn file() -> Value {
    json!({ "minLength": 2, "pattern": "^/.*[^/.]$" })
}

fn vcpus() -> Value {
    json!({ "minimum": 1, "maximum": VCPUS_MAX })
}

fn memory() -> Value {
    json!({ "minimum": MEMORY_MIN, "maximum": MEMORY_MAX, "multipleOf": 1 << 20 })
}

fn disk_size() -> Value {
    json!({ "minimum": DISK_SIZE_MIN, "maximum": DISK_SIZE_MAX, "multipleOf": CRYPT_SECTOR })
}

fn shutdown_seconds() -> Value {
    json!({ "minimum": 1, "maximum": SHUTDOWN_SECONDS_MAX })
}

/// No fields but those that are said.
fn closed() -> Value {
    json!({ "additionalProperties": false })
}

/// An image has a format, and nothing else has one.
fn image_with_format() -> Value {
    let text = json!({ "type": "string" });
    json!({ "anyOf": [
        { "properties": { "image": text, "format": text }, "required": ["image", "format"] },
        { "properties": { "image": { "type": "null" }, "format": { "type": "null" } } },
    ] })
}

fn port(least: u16) -> Value {
    json!({ "minimum": least, "maximum": u16::MAX })
}

/// What the schemas of bodies get: by schema, or its variant, and field.
fn of_bodies() -> Vec<(&'static str, Value)> {
    let disk_name = json!({ "minLength": 1, "maxLength": SERIAL_MAX, "pattern": NAME_PATTERN });
    let cache =
        json!({ "minimum": CACHE_BYTES_MIN, "maximum": CACHE_BYTES_MAX, "multipleOf": 1 << 20 });
    vec![
        ("AddDatastore/properties/name", name()),
        ("AddPolicy/properties/name", name()),
        ("AddProvider/properties/name", name()),
        ("JoinHost/properties/name", name()),
        ("AddKmipServer/properties/alias", name()),
        ("AddKmipServer/properties/port", port(1)),
        ("SetKmipServer/properties/port", port(1)),
        ("MoveKmipServer/properties/place", json!({ "minimum": 1, "maximum": SERVERS_MAX })),
        ("AddKmip/properties/servers", json!({ "minItems": 1, "maxItems": SERVERS_MAX })),
        ("CreateVm/properties/name", name()),
        ("CreateVm/properties/vcpus", vcpus()),
        ("CreateVm/properties/memory", memory()),
        ("CreateVm/properties/disks", json!({ "minItems": 1, "maxItems": DISKS_MAX })),
        ("CreateVm/properties/nics", json!({ "maxItems": NICS_MAX })),
        ("CreateDisk/properties/name", disk_name),
        ("CreateDisk/properties/size", disk_size()),
        ("ResizeDisk/properties/size", disk_size()),
        ("CreateDisk/properties/image", file()),
        ("CreateDisk", image_with_format()),
        ("CreateNic/properties/name", name()),
        ("MacAddress", json!({ "pattern": "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$" })),
        ("NicBackend/oneOf/0/properties/forwards", json!({ "maxItems": FORWARDS_MAX })),
        ("NicBackend/oneOf/1/properties/tap", interface()),
        ("NicBackend/oneOf/2/properties/bridge", interface()),
        ("PortForward/properties/guest_port", port(1)),
        ("PortForward/properties/host_port", port(0)),
        ("DatastoreLocation/oneOf/0/properties/path", json!({ "pattern": "^/" })),
        ("DiskLimits/properties/iops", json!({ "minimum": 1, "maximum": LIMIT_MAX })),
        (
            "DiskLimits/properties/bandwidth",
            json!({ "minimum": BANDWIDTH_MIN, "maximum": LIMIT_MAX }),
        ),
        ("AddBitmap/properties/name", bitmap()),
        ("ExportDisk/properties/to", file()),
        ("StopVm/properties/timeout_seconds", shutdown_seconds()),
        ("RebootVm/properties/timeout_seconds", shutdown_seconds()),
        ("SetVm/properties/name", name()),
        ("SetVm/properties/vcpus", vcpus()),
        ("SetVm/properties/memory", memory()),
        ("SetPolicy/properties/name", name()),
        ("AddPolicy/properties/cache", cache),
        ("AdoptVms/properties/vcpus", vcpus()),
        ("AdoptVms/properties/memory", memory()),
        ("Rename/properties/name", name()),
        ("GuestCommand/oneOf/1/properties/path", json!({ "minLength": 1 })),
        (
            "GuestCommand/oneOf/1/properties/seconds",
            json!({ "minimum": 1, "maximum": EXEC_SECONDS_MAX }),
        ),
        ("NicBackend/oneOf/0", closed()),
        ("NicBackend/oneOf/1", closed()),
        ("NicBackend/oneOf/2", closed()),
        ("DatastoreLocation/oneOf/0", closed()),
        ("SetLogLevel/properties/levels", json!({ "minLength": 1 })),
        ("TrustServer", json!({ "minProperties": 1, "maxProperties": 1 })),
    ]
}

/// What parameters get, by name: on all routes that have them.
fn of_parameters() -> Vec<(&'static str, Value)> {
    vec![("bitmap", bitmap()), ("label", json!({ "pattern": "^[^=, ]+(=[^=,]*)?$" }))]
}

/// Adds the limits to the document.
pub(super) fn add(document: &mut Value) {
    unsigned(document);
    let schemas = &mut document["components"]["schemas"];
    for (place, limits) in of_bodies() {
        if let Some(schema) = schemas.pointer_mut(&format!("/{place}")) {
            extend(schema, limits);
        }
    }
    let operations = document["paths"].as_object_mut().into_iter().flatten();
    let operations = operations.flat_map(|(_, path)| path.as_object_mut().into_iter().flatten());
    for (_, operation) in operations {
        // An index would add what is not there.
        let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
        for parameter in parameters.into_iter().flatten() {
            let known = of_parameters().into_iter().find(|(name, _)| parameter["name"] == *name);
            if let Some((_, limits)) = known {
                extend(&mut parameter["schema"], limits);
            }
        }
    }
}

fn extend(schema: &mut Value, limits: Value) {
    if let (Some(schema), Value::Object(limits)) = (schema.as_object_mut(), limits) {
        schema.extend(limits);
    }
}

/// OpenAPI's `int32` is signed, and our numbers of 32 bits are not.
fn unsigned(value: &mut Value) {
    match value {
        Value::Object(object) => {
            if object.get("format") == Some(&json!("int32")) {
                object.remove("format");
                object.insert("minimum".to_owned(), json!(0));
                object.insert("maximum".to_owned(), json!(u32::MAX));
            }
            object.values_mut().for_each(unsigned);
        }
        Value::Array(values) => values.iter_mut().for_each(unsigned),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a text matches, as the checks of JSON Schema do it.
    fn matches(pattern: &str, text: &str) -> bool {
        regex::Regex::new(pattern).unwrap().is_match(text)
    }

    #[test]
    fn patterns_accept_what_the_checks_accept() {
        use vmseal_api::{bitmap, id, nic};
        let texts = [
            "a",
            "web1",
            "DB-01",
            "x--y",
            "web.example.org",
            "db_1",
            "a._-b",
            "a..b",
            "-a",
            "a-",
            ".a",
            "a.",
            "a b",
            "a/b",
            "\u{e4}",
            "a:b",
            "br0",
            "br%d",
            "a\"b",
            "a\\b",
            "a]b",
            "[a",
            "_a",
            "a_",
        ];
        for text in texts {
            assert_eq!(matches(NAME_PATTERN, text), id::check_name(text).is_ok(), "{text}");
            assert_eq!(matches(BITMAP_NAME, text), bitmap::check_name(text).is_ok(), "{text}");
            let interface = nic::check_interface_name(text).is_ok();
            assert_eq!(
                matches(INTERFACE_NAME_PATTERN, text) && text.len() <= 15,
                interface,
                "{text}"
            );
        }
    }

    #[test]
    fn every_limit_is_of_something_that_is_in_the_document() {
        let document = crate::routes::document();
        for (place, limits) in of_bodies() {
            let schema = document.pointer(&format!("/components/schemas/{place}"));
            let schema = schema.unwrap_or_else(|| panic!("{place}"));
            for (key, limit) in limits.as_object().unwrap() {
                assert_eq!(schema[key], *limit, "{place}");
            }
        }
        let text = document.to_string();
        for (name, _) in of_parameters() {
            assert!(text.contains(&format!("\"name\":\"{name}\"")), "{name}");
        }
    }
}
