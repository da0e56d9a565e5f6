//! Limits that the API document states of bodies: what is past one is refused by the schema and by the service, with the
//! same field.

use serde_json::Map;
use vmseal_api::cloud_init::{CLOUD_INIT_MAX, SSH_KEYS_MAX};
use vmseal_api::datastore::LOCATION_PATH_MAX;
use vmseal_api::guest::{ARGUMENTS_MAX, COMMAND_MAX};
use vmseal_api::request::{ADDRESS_MAX, DESCRIPTION_MAX};

use super::*;

const KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHJhxkLn+YHX65YPCVcGZ8RSKxoP4rmWZeb/AIWRZfne me@here";
const HASH: &str = "$6$saltsalt$qFmFH.bQmmtXzyBY0s9v7Oicd2z4XSIecDzlB5KiA2/jctKu9YterLp8wwnSq.qc.eoxqOmSuNp2xS0ktL3nh/";

/// The form of an id, which no name has.
const ID: &str = "0190b5a0-0000-7000-8000-000000000001";

/// Checks values as JSON Schema does, by the keywords that limits are made of.
struct Schemas(Value);

impl Schemas {
    fn fits(&self, schema: &Value, value: &Value) -> bool {
        match schema.as_object() {
            Some(all) => {
                all.iter().all(|(keyword, limit)| self.holds(all, (keyword.as_str(), limit), value))
            }
            None => *schema != json!(false),
        }
    }

    fn holds(&self, of: &Map<String, Value>, (keyword, limit): (&str, &Value), it: &Value) -> bool {
        let listed = || limit.as_array().into_iter().flatten();
        let number = limit.as_f64().unwrap_or_default();
        let known = |name: &String| of.get("properties").and_then(|all| all.get(name));
        match (keyword, it) {
            ("$ref", _) => {
                let place = limit.as_str().unwrap().trim_start_matches('#');
                self.fits(self.0.pointer(place).unwrap(), it)
            }
            ("anyOf", _) => listed().any(|schema| self.fits(schema, it)),
            ("allOf", _) => listed().all(|schema| self.fits(schema, it)),
            ("oneOf", _) => listed().filter(|schema| self.fits(schema, it)).count() == 1,
            ("not", _) => !self.fits(limit, it),
            ("const", _) => it == limit,
            ("enum", _) => listed().any(|one| one == it),
            ("type", _) => limit.as_str() == Some(kind(it)) || listed().any(|one| one == kind(it)),
            ("pattern", Value::String(text)) => {
                regex::Regex::new(limit.as_str().unwrap()).unwrap().is_match(text)
            }
            ("minLength", Value::String(text)) => text.chars().count() as f64 >= number,
            ("maxLength", Value::String(text)) => text.chars().count() as f64 <= number,
            ("minItems", Value::Array(items)) => items.len() as f64 >= number,
            ("maxItems", Value::Array(items)) => items.len() as f64 <= number,
            ("items", Value::Array(items)) => items.iter().all(|it| self.fits(limit, it)),
            ("contains", Value::Array(items)) => items.iter().any(|it| self.fits(limit, it)),
            ("required", Value::Object(fields)) => {
                listed().all(|name| fields.contains_key(name.as_str().unwrap()))
            }
            ("properties", Value::Object(fields)) => fields
                .iter()
                .all(|(name, it)| known(name).is_none_or(|schema| self.fits(schema, it))),
            ("additionalProperties", Value::Object(fields)) => {
                fields.iter().all(|(name, it)| known(name).is_some() || self.fits(limit, it))
            }
            ("minimum", Value::Number(it)) => it.as_f64().unwrap() >= number,
            ("maximum", Value::Number(it)) => it.as_f64().unwrap() <= number,
            ("multipleOf", Value::Number(it)) => {
                it.as_u64().unwrap().is_multiple_of(limit.as_u64().unwrap())
            }
            ("minProperties", Value::Object(fields)) => fields.len() as f64 >= number,
            ("maxProperties", Value::Object(fields)) => fields.len() as f64 <= number,
            _ => true,
        }
    }
}

/// The type of a value in JSON Schema; no number of these bodies is a fraction.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// A body with one thing changed, which need not be there.
fn with(body: &Value, pointer: &str, value: Value) -> Value {
    let mut body = body.clone();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    let parent = body.pointer_mut(parent).unwrap();
    match parent.as_array_mut() {
        Some(items) => items[name.parse::<usize>().unwrap()] = value,
        None => parent[name] = value,
    }
    body
}

/// What is sent where, its schema, and what of it is changed: a place, a value past its limit, and the field that is refused.
struct Try {
    method: Method,
    path: &'static str,
    schema: &'static str,
    body: Value,
    refused: Vec<(&'static str, Value, &'static str)>,
}

/// One network card that is connected to this.
fn cards(backend: &Value) -> Value {
    json!([{ "backend": backend }])
}

/// Bodies for VMs.
fn of_vms() -> Vec<Try> {
    let long = json!("x".repeat(DESCRIPTION_MAX + 1));
    let told = json!({ "user": "me", "ssh_keys": [KEY, KEY], "password_hash": HASH });
    let new = with(&vm_with("/name", json!("two")), "/description", json!("of a test"));
    let new = with(&new, "/migration_encryption", json!("required"));
    let user_data = |text: &str| json!({ "user_data": text });
    vec![
        Try {
            method: Method::POST,
            path: "vms?dry_run=true",
            schema: "CreateVm",
            body: with(&new, "/cloud_init", told),
            refused: vec![
                ("/description", long.clone(), "description"),
                ("/name", json!(ID), "name"),
                ("/disks/1/name", json!("cloud-init"), "disks[1].name"),
                (
                    "/nics",
                    cards(&json!({ "kind": "bridge", "bridge": ".." })),
                    "nics[0].backend.bridge",
                ),
                ("/uefi_variables", json!("/variables.fd"), "uefi_variables"),
                ("/tpm_state", json!("/tpm2-00.permall"), "tpm_state"),
                ("/cloud_init/user", json!("Admin"), "cloud_init.user"),
                ("/cloud_init/user", json!("root"), "cloud_init.user"),
                ("/cloud_init/user", json!("x".repeat(33)), "cloud_init.user"),
                ("/cloud_init/ssh_keys", json!(vec![KEY; SSH_KEYS_MAX + 1]), "cloud_init.ssh_keys"),
                ("/cloud_init/ssh_keys/1", json!("ssh-ed25519"), "cloud_init.ssh_keys[1]"),
                (
                    "/cloud_init/ssh_keys/0",
                    json!(format!("{KEY}\nruncmd: []")),
                    "cloud_init.ssh_keys[0]",
                ),
                ("/cloud_init/password_hash", json!("x".repeat(64)), "cloud_init.password_hash"),
                ("/cloud_init/password_hash", json!("$6$short"), "cloud_init.password_hash"),
                ("/cloud_init/user_data", json!("#!/bin/sh"), "cloud_init.user"),
                ("/cloud_init", json!({}), "cloud_init.user_data"),
                ("/cloud_init", user_data("runcmd: []"), "cloud_init.user_data"),
                (
                    "/cloud_init",
                    user_data(&format!("#!{}", "x".repeat(CLOUD_INIT_MAX))),
                    "cloud_init",
                ),
            ],
        },
        Try {
            method: Method::POST,
            path: "vms?dry_run=true",
            schema: "CreateVm",
            body: with(&new, "/memory", json!(33 << 20)),
            refused: vec![(
                "/hardware",
                json!({ "memory_backing": "hugepages" }),
                "hardware.memory_backing",
            )],
        },
        Try {
            method: Method::POST,
            path: "vms?dry_run=true",
            schema: "CreateVm",
            body: with(&new, "/hardware", json!({ "firmware": "uefi", "tpm": true })),
            refused: vec![
                ("/disks/0/name", json!("uefi-variables"), "disks[0].name"),
                ("/disks/0/name", json!("tpm"), "disks[0].name"),
                ("/uefi_variables", json!("variables.fd"), "uefi_variables"),
                ("/tpm_state", json!("tpm2-00.permall"), "tpm_state"),
            ],
        },
        Try {
            method: Method::POST,
            path: "vms/web/disks?dry_run=true",
            schema: "AddDisk",
            body: json!({ "name": "more", "size": 1 << 20 }),
            refused: vec![
                ("/name", json!("cloud-init"), "name"),
                ("/name", json!(ID), "name"),
                ("/size", json!((1 << 20) + 1), "size"),
            ],
        },
        Try {
            method: Method::POST,
            path: "vms/web/migrate?dry_run=true",
            schema: "MigrateVm",
            body: json!({ "rate": 1 << 20 }),
            refused: vec![
                ("/policy", json!("plain"), "policy"),
                ("/rate", json!(1), "rate"),
                ("/downtime_milliseconds", json!(5), "downtime_milliseconds"),
            ],
        },
        Try {
            method: Method::PATCH,
            path: "vms/web",
            schema: "SetVm",
            body: json!({ "description": "of a test" }),
            refused: vec![("/description", long.clone(), "description")],
        },
        Try {
            method: Method::POST,
            path: "vms/none/clone?dry_run=true",
            schema: "CloneVm",
            body: json!({ "name": "two", "linked": false }),
            refused: vec![("/linked", json!(true), "snapshot")],
        },
        Try {
            method: Method::POST,
            path: "vms/web/recrypt?dry_run=true",
            schema: "RecryptVm",
            body: json!({ "deep": true, "rate": 1 << 20, "disks": ["data"] }),
            refused: vec![
                ("/provider", json!("keys"), "provider"),
                ("/deep", json!(false), "rate"),
            ],
        },
        Try {
            method: Method::POST,
            path: "vms/web/decrypt?dry_run=true",
            schema: "DecryptVm",
            body: json!({ "disks": ["data"] }),
            refused: vec![("/policy", json!("plain"), "policy")],
        },
        Try {
            method: Method::POST,
            path: "vms/web/recrypt?dry_run=true",
            schema: "RecryptVm",
            body: json!({ "provider": "keys" }),
            refused: vec![
                ("/rate", json!(0), "rate"),
                ("/in_place", json!(true), "in_place"),
                ("/disks", json!(["data"]), "disks"),
            ],
        },
        Try {
            method: Method::POST,
            path: "vms/web/snapshots?dry_run=true",
            schema: "TakeSnapshot",
            body: json!({ "description": "of a test" }),
            refused: vec![("/description", long, "description")],
        },
        Try {
            method: Method::POST,
            path: "vms/web/backups?dry_run=true",
            schema: "CreateBackup",
            body: json!({ "name": "one", "directory": "/backups" }),
            refused: vec![
                ("/name", json!("../x"), "name"),
                ("/directory", json!("backups"), "directory"),
            ],
        },
        Try {
            method: Method::POST,
            path: "vms/none/backups/none/restore?dry_run=true",
            schema: "RestoreBackup",
            body: json!({ "new_vm": "other" }),
            refused: vec![("/name", json!("again"), "name"), ("/new_vm", json!(ID), "new_vm")],
        },
        Try {
            method: Method::POST,
            path: "vms/none/guest",
            schema: "GuestCommand",
            body: json!({ "ask": "exec", "path": "/bin/true", "arguments": ["x"] }),
            refused: vec![
                ("/arguments", json!(vec!["x"; ARGUMENTS_MAX + 1]), "arguments"),
                ("/arguments/0", json!("x".repeat(COMMAND_MAX + 1)), "arguments"),
                ("/path", json!("x".repeat(COMMAND_MAX + 1)), "arguments"),
            ],
        },
    ]
}

/// Bodies for other control planes and key servers; nothing is where they lead to.
fn of_others(api: &Api) -> Vec<Try> {
    let fingerprint = ["AB"; 32].join(":");
    vec![
        Try {
            method: Method::POST,
            path: "remotes?dry_run=true",
            schema: "AddRemote",
            body: json!({
                "name": "other", "url": "https://127.0.0.1:1", "fingerprint": fingerprint,
                "token": api.sealed("other", "a token"),
            }),
            refused: vec![
                ("/name", json!("../x"), "name"),
                ("/url", json!("http://127.0.0.1:1"), "url"),
                ("/url", json!("https://127.0.0.1:1/x"), "url"),
                ("/fingerprint", json!("AB:CD"), "fingerprint"),
            ],
        },
        Try {
            method: Method::POST,
            path: "remote-certificate",
            schema: "LookAtRemote",
            body: json!({ "url": "https://127.0.0.1:1" }),
            refused: vec![("/url", json!("127.0.0.1:1"), "url")],
        },
        Try {
            method: Method::POST,
            path: "providers/none/servers/none/trust?dry_run=true",
            schema: "TrustServer",
            body: json!({ "fingerprint": fingerprint }),
            refused: vec![("/fingerprint", json!("AB:CD"), "fingerprint")],
        },
    ]
}

/// Bodies for policies, hosts and datastores.
fn of_resources(api: &Api) -> Vec<Try> {
    let striped = json!({ "object_size": 8192, "stripe_unit": 4096, "stripe_count": 2 });
    let new = json!({
        "name": "more", "encryption": false, "image_layout": striped,
        "redundancy": { "failures": 2, "layout": "erasure_coding", "data_chunks": 4 },
    });
    let mut changed = striped;
    changed["encryption"] = json!(false);
    changed["redundancy"] = json!({ "failures": 2, "layout": "erasure_coding" });
    changed["data_chunks"] = json!(4);
    let directory = json!({ "kind": "dir", "path": "/more" });
    let pool = |pool: Value| json!({ "kind": "rbd", "path": "/more", "pool": pool });
    let monitors = json!({ "monitors": "192.0.2.1", "user": "client.a", "pool": "vms" });
    let new_pools = with(&monitors, "/create", json!({ "failures": 1, "failure_domain": "row" }));
    let compressed = with(&monitors, "/create", json!({ "compression": "aggressive" }));
    let coding =
        |chunks: u32| json!({ "failures": 2, "layout": "erasure_coding", "data_chunks": chunks });
    let copies = json!({ "failures": 2, "data_chunks": 4 });
    let key = api.sealed("datastore more", "a key");
    vec![
        Try {
            method: Method::POST,
            path: "policies?dry_run=true",
            schema: "AddPolicy",
            body: new,
            refused: vec![
                ("/image_layout/stripe_unit", json!(16384), "image_layout.stripe_unit"),
                ("/image_layout/stripe_count", Value::Null, "image_layout.stripe_unit"),
                ("/image_layout/stripe_unit", Value::Null, "image_layout.stripe_count"),
                ("/provider", json!("keys"), "provider"),
                ("/limits", json!({ "stall_timeout": 4 }), "limits.stall_timeout"),
                ("/redundancy", coding(1), "redundancy.data_chunks"),
                ("/redundancy", coding(33), "redundancy.data_chunks"),
                ("/redundancy", copies.clone(), "redundancy.data_chunks"),
            ],
        },
        Try {
            method: Method::PATCH,
            path: "policies/plain?dry_run=true",
            schema: "SetPolicy",
            body: changed,
            refused: vec![
                ("/stripe_unit", json!(16384), "stripe_unit"),
                ("/provider", json!("keys"), "provider"),
                ("/redundancy", copies.clone(), "redundancy.data_chunks"),
                ("/redundancy", json!({ "failures": 2 }), "data_chunks"),
                ("/data_chunks", json!(1), "data_chunks"),
                ("/data_chunks", json!(33), "data_chunks"),
            ],
        },
        Try {
            method: Method::POST,
            path: "hosts/here/drain?dry_run=true",
            schema: "DrainHost",
            body: json!({ "parallel": 1 }),
            refused: vec![("/parallel", json!(0), "parallel")],
        },
        Try {
            method: Method::PATCH,
            path: "hosts/here?dry_run=true",
            schema: "ChangeHost",
            body: json!({ "address": "[2001:db8::1]:8444" }),
            refused: vec![
                ("/address", json!("host.example"), "address"),
                ("/address", json!("host.example:0"), "address"),
                ("/address", json!("a b:1"), "address"),
                ("/address", json!(format!("{}:8444", "x".repeat(ADDRESS_MAX))), "address"),
            ],
        },
        Try {
            method: Method::POST,
            path: "datastores?dry_run=true",
            schema: "AddDatastore",
            body: json!({ "name": "more", "host": "none", "location": directory }),
            refused: vec![
                ("/location/path", json!("more"), "location.path"),
                (
                    "/location/path",
                    json!(format!("/{}", "x".repeat(LOCATION_PATH_MAX))),
                    "location.path",
                ),
                ("/location", pool(new_pools), "location.pool.create"),
                ("/osd_encryption", json!("yes"), "osd_encryption"),
                ("/create_for_policy", json!("plain"), "create_for_policy"),
                ("/key", key.clone(), "key"),
            ],
        },
        Try {
            method: Method::POST,
            path: "providers?dry_run=true",
            schema: "AddProvider",
            body: json!({
                "name": "more", "passphrase": api.sealed("more", "a passphrase"),
                "kmip": { "servers": [{ "alias": "one", "host": "127.0.0.1", "port": 1 }] },
            }),
            refused: vec![
                ("/kmip/servers/0/host", json!(""), "kmip.servers[0].host"),
                ("/kmip/servers/0/host", json!("a/b"), "kmip.servers[0].host"),
                ("/kmip/servers/0/alias", json!(ID), "kmip.servers[0].alias"),
                ("/backup", json!("eA=="), "backup"),
            ],
        },
        Try {
            method: Method::POST,
            path: "datastores?dry_run=true",
            schema: "AddDatastore",
            body: json!({ "name": "more", "host": "none", "key": key, "location": pool(monitors) }),
            refused: vec![
                ("/location/pool/user", json!("a"), "location.pool.user"),
                ("/location/pool/create", coding(1), "location.pool.create.data_chunks"),
                ("/location/pool/create", coding(33), "location.pool.create.data_chunks"),
                ("/location/pool/create", copies, "location.pool.create.data_chunks"),
                ("/location/pool/keyring", json!("/keyring"), "key"),
                ("/key", Value::Null, "location.pool.keyring"),
            ],
        },
        Try {
            method: Method::POST,
            path: "datastores?dry_run=true",
            schema: "AddDatastore",
            body: json!({
                "name": "more", "host": "none", "key": key, "location": pool(compressed),
                "create_for_policy": "none",
            }),
            refused: vec![
                ("/location/pool/create", json!({ "failures": 1 }), "create_for_policy"),
                ("/location/pool/create", json!({ "failure_domain": "rack" }), "create_for_policy"),
            ],
        },
        Try {
            method: Method::PATCH,
            path: "datastores/none?dry_run=true",
            schema: "SetDatastore",
            body: json!({ "keyring": "/keyring" }),
            refused: vec![("/key", key, "keyring")],
        },
    ]
}

/// A VM of another control plane.
fn of_arrivals() -> Vec<Try> {
    let disk =
        json!({ "id": ID, "name": "root", "size": 1 << 20, "encrypted": false, "role": "data" });
    let accelerator = json!({ "kind": "tcg", "reason": "of a test" });
    vec![Try {
        method: Method::POST,
        path: "arrivals/check",
        schema: "BeginArrival",
        body: json!({
            "vm": {
                "id": ID, "name": "theirs", "has_key": false, "vcpus": 1, "memory": 33 << 20,
                "hardware": {}, "disks": [disk],
            },
            "policy": "plain",
            "source": {
                "name": "there", "vmseal": "1", "accelerator": accelerator, "qemu": "9.0", "features": [],
            },
            "generation": 2,
        }),
        refused: vec![
            ("/vm/name", json!("../x"), "vm.name"),
            ("/vm/vcpus", json!(0), "vcpus"),
            ("/vm/memory", json!(1), "memory"),
            ("/vm/hardware", json!({ "memory_backing": "hugepages" }), "hardware.memory_backing"),
            ("/vm/disks", json!([]), "vm.disks"),
            ("/vm/disks/0/size", json!(0), "vm.disks"),
            ("/vm/disks/0/role", json!("x"), "vm.disks[0].role"),
            ("/generation", json!(u64::MAX), "generation"),
            ("/suspended", json!({}), "suspended"),
        ],
    }]
}

#[tokio::test]
async fn what_is_past_a_limit_is_refused_by_the_schema_and_by_the_service() {
    let api = Api::new().await;
    api.done(api.post("vms", vm()).await).await;
    let schemas = Schemas(document());
    let tries = [of_vms(), of_others(&api), of_resources(&api), of_arrivals()];
    for Try { method, path, schema, body, refused } in tries.into_iter().flatten() {
        let place = format!("/components/schemas/{schema}");
        let of = schemas.0.pointer(&place).unwrap_or_else(|| panic!("{place}"));
        assert!(schemas.fits(of, &body), "{schema} is not to have {body}");
        let answer = api.raw(method.clone(), path, body.to_string()).await;
        assert_ne!(answer.status, StatusCode::BAD_REQUEST, "{path}: {}", answer.body);
        for (pointer, value, field) in refused {
            let changed = with(&body, pointer, value);
            assert!(!schemas.fits(of, &changed), "{schema} may have {changed}");
            api.raw(method.clone(), path, changed.to_string()).await.assert_field(field);
        }
    }
}
