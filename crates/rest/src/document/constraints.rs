//! The limits that the services enforce, in the words of JSON Schema. They come from the constants that the checks use.

use serde_json::{Value, json};
use vmseal_api::bitmap::NAME_PATTERN as BITMAP_NAME;
use vmseal_api::boot::MEDIUM_PATH_MAX;
use vmseal_api::cloud_init::{
    CLOUD_INIT_DISK, CLOUD_INIT_MAX, PASSWORD_HASH_MAX, PASSWORD_HASH_MIN, PASSWORD_HASH_PATTERN,
    SSH_KEY_PATTERN, SSH_KEYS_MAX, USER_DATA_KINDS, USER_MAX, USER_PATTERN, USER_REFUSED,
};
use vmseal_api::datastore::{
    LIMIT_MAX, LOCATION_PATH_MAX, POOL_FIELD_MAX, POOL_FIELD_PATTERN, POOL_USER_PATTERN,
};
use vmseal_api::drain::PARALLEL_MAX;
use vmseal_api::failure_domain::FailureDomain;
use vmseal_api::filter::{
    BITMAP_NAME_MAX, CACHE_BYTES_MAX, CACHE_BYTES_MIN, CRYPT_SECTOR, REPLICATE_RATE_MIN, SERIAL_MAX,
};
use vmseal_api::fingerprint::FINGERPRINT_PATTERN;
use vmseal_api::guest::{ARGUMENTS_MAX, COMMAND_MAX, EXEC_SECONDS_MAX};
use vmseal_api::hardware::CPU_MODEL_MAX;
use vmseal_api::host::{BANDWIDTH_MIN, SHUTDOWN_SECONDS_MAX, STALL_TIMEOUT_MAX, STALL_TIMEOUT_MIN};
use vmseal_api::id::{ID_PATTERN, NAME_MAX, NAME_PATTERN};
use vmseal_api::image_layout::{OBJECT_SIZE_MAX, OBJECT_SIZE_MIN, STRIPE_COUNT_MAX};
use vmseal_api::kmip::{
    COMMON_NAME_MAX, COMMON_NAME_PATTERN, HOST_MAX, HOST_PATTERN, PEM_MAX, SERVERS_MAX,
};
use vmseal_api::limits::SNAPSHOTS_MAX;
use vmseal_api::migration::{DOWNTIME_MAX, DOWNTIME_MIN};
use vmseal_api::model::CHANGE_MAX;
use vmseal_api::model::ChangeKind;
use vmseal_api::new_pools::CHOICES;
use vmseal_api::nic::{
    FORWARDS_MAX, INTERFACE_NAME_MAX, INTERFACE_NAME_PATTERN, INTERFACE_NAMES_REFUSED, MAC_PATTERN,
    MACS_REFUSED, NICS_MAX,
};
use vmseal_api::pace::{RATE_MAX, RATE_MIN};
use vmseal_api::redundancy::{DATA_CHUNKS_MAX, DATA_CHUNKS_MIN, FAILURES_MAX};
use vmseal_api::remote::GENERATION_MAX;
use vmseal_api::request::{
    ADDRESS_MAX, ADDRESS_PATTERN, DESCRIPTION_MAX, DISK_SIZE_MAX, DISK_SIZE_MIN, DISKS_MAX,
    LABEL_MAX, LABELS_MAX, MEMORY_MAX, MEMORY_MIN, MEMORY_UNIT, VCPUS_MAX,
};
use vmseal_control::setup::authority::REQUEST_MAX;
use vmseal_secret::sealed_box::BOX_OVERHEAD;

mod together;

use self::together::{
    backup_with_passphrase, chunks_of_coding, deep_or_with_provider, disks_or_policy,
    drive_with_order, encryption_with_provider, format_with_protection, image_with_format,
    keyring_or_key, linked_with_snapshot, memory_of_pages, name_or_new_vm, policy_with_remote,
    stripes_in_objects, suspended_at_rest, user_data_or_user,
};

/// A name that a person chooses, and no id. What is refused is a text: of null, where that is allowed, a pattern alone says nothing.
fn name() -> Value {
    let id = json!({ "type": "string", "pattern": ID_PATTERN });
    json!({ "minLength": 1, "maxLength": NAME_MAX, "pattern": NAME_PATTERN, "not": id })
}

/// The name of a disk within its VM.
fn disk_name() -> Value {
    let mut limits = name();
    extend(&mut limits, json!({ "maxLength": SERIAL_MAX }));
    limits
}

/// The same of a disk that is added.
fn added_disk_name() -> Value {
    let mut limits = disk_name();
    let refused = json!({ "anyOf": [limits["not"], { "const": CLOUD_INIT_DISK }] });
    extend(&mut limits, json!({ "not": refused }));
    limits
}

fn interface() -> Value {
    json!({
        "minLength": 1,
        "maxLength": INTERFACE_NAME_MAX,
        "pattern": INTERFACE_NAME_PATTERN,
        "not": { "enum": INTERFACE_NAMES_REFUSED },
    })
}

/// Where an agent is called.
fn agent_address() -> Value {
    json!({ "maxLength": ADDRESS_MAX, "pattern": ADDRESS_PATTERN })
}

/// Where a server over KMIP is.
fn kmip_host() -> Value {
    json!({ "minLength": 1, "maxLength": HOST_MAX, "pattern": HOST_PATTERN })
}

fn pem() -> Value {
    json!({ "maxLength": PEM_MAX })
}

/// Bytes in base64.
fn base64() -> Value {
    json!({ "pattern": BASE64_PATTERN })
}

const BASE64_PATTERN: &str = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$";

/// An absolute path of whatever is there.
fn path() -> Value {
    json!({ "pattern": "^/" })
}

/// The path of a datastore on a host.
fn location_path() -> Value {
    json!({ "pattern": "^/", "maxLength": LOCATION_PATH_MAX })
}

fn bitmap() -> Value {
    json!({ "minLength": 1, "maxLength": BITMAP_NAME_MAX, "pattern": BITMAP_NAME })
}

/// An absolute path of a file.
fn file() -> Value {
    json!({ "minLength": 2, "pattern": "^/.*[^/.]$" })
}

/// What something is for. The services count bytes, and a schema characters, which are at most as many.
fn description() -> Value {
    json!({ "maxLength": DESCRIPTION_MAX })
}

/// Where another control plane's server is.
fn url() -> Value {
    json!({ "pattern": r"^https://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?$" })
}

fn fingerprint() -> Value {
    json!({ "pattern": FINGERPRINT_PATTERN })
}

/// A field of a pool of Ceph.
fn pool_field() -> Value {
    json!({ "minLength": 1, "maxLength": POOL_FIELD_MAX, "pattern": POOL_FIELD_PATTERN })
}

fn pool_user() -> Value {
    json!({ "maxLength": POOL_FIELD_MAX, "pattern": POOL_USER_PATTERN })
}

/// What pools can be made for, or what the cluster's usual rule says.
fn domain_of_new_pools() -> Value {
    let domains = CHOICES.into_iter().map(Some);
    json!({ "enum": std::iter::once(None).chain(domains).collect::<Vec<_>>() })
}

/// The generation of a placement, or of a memory.
fn generation() -> Value {
    json!({ "maximum": GENERATION_MAX })
}

fn vcpus() -> Value {
    json!({ "minimum": 1, "maximum": VCPUS_MAX })
}

fn memory() -> Value {
    json!({ "minimum": MEMORY_MIN, "maximum": MEMORY_MAX, "multipleOf": MEMORY_UNIT })
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

/// User-data of a kind that cloud-init knows, or nothing in it.
fn user_data() -> Value {
    let kinds = USER_DATA_KINDS.map(|kind| kind.replace('{', r"\{")).join("|");
    json!({ "maxLength": CLOUD_INIT_MAX, "pattern": format!("^($|{kinds})") })
}

/// The user whom cloud-init makes.
fn user() -> Value {
    json!({ "maxLength": USER_MAX, "pattern": USER_PATTERN, "not": { "const": USER_REFUSED } })
}

fn password_hash() -> Value {
    json!({
        "minLength": PASSWORD_HASH_MIN,
        "maxLength": PASSWORD_HASH_MAX,
        "pattern": PASSWORD_HASH_PATTERN,
    })
}

/// What is sealed to a box, in base64: at least a byte.
fn sealed() -> Value {
    json!({ "minLength": (BOX_OVERHEAD + 1).div_ceil(3) * 4, "pattern": "^[A-Za-z0-9+/]+=*$" })
}

/// The sizes that an object can have, in bytes: powers of two.
fn object_sizes() -> impl Iterator<Item = u64> {
    (0..).map(|power| OBJECT_SIZE_MIN << power).take_while(|size| *size <= OBJECT_SIZE_MAX)
}

/// The size of an object or of a stripe unit, or none.
fn part_of_image() -> Value {
    let sizes = object_sizes().map(Value::from);
    json!({ "enum": std::iter::once(Value::Null).chain(sizes).collect::<Vec<_>>() })
}

fn stripe_count() -> Value {
    json!({ "minimum": 2, "maximum": STRIPE_COUNT_MAX })
}

/// How many data chunks erasure coding has.
fn data_chunks() -> Value {
    json!({ "minimum": DATA_CHUNKS_MIN, "maximum": DATA_CHUNKS_MAX })
}

/// A limit that 0 takes away.
fn none_or(limit: Value) -> Value {
    json!({ "anyOf": [{ "type": "null" }, { "const": 0 }, limit] })
}

/// After how many seconds requests fail.
fn stall_timeout() -> Value {
    json!({ "minimum": STALL_TIMEOUT_MIN, "maximum": STALL_TIMEOUT_MAX })
}

/// How long a guest may stand still when it moves.
fn downtime() -> Value {
    json!({ "minimum": DOWNTIME_MIN, "maximum": DOWNTIME_MAX })
}

/// How fast is copied or sent; 0 is no limit.
fn rate() -> Value {
    none_or(json!({ "minimum": RATE_MIN, "maximum": RATE_MAX }))
}

/// A name of a processor model.
fn cpu_model(least: u32) -> Value {
    json!({ "minLength": least, "maxLength": CPU_MODEL_MAX, "pattern": "^[A-Za-z0-9._-]*$" })
}

/// A failure domain, or an empty text.
fn failure_domain() -> Value {
    json!({ "pattern": format!("^({})?$", FailureDomain::ALL.map(FailureDomain::name).join("|")) })
}

/// The keys and the values of labels.
fn labels(value: &Value) -> Value {
    json!({
        "maxProperties": LABELS_MAX,
        "propertyNames": { "type": "string", "minLength": 1, "maxLength": LABEL_MAX, "pattern": LABEL_KEY },
        "additionalProperties": { "type": value, "maxLength": LABEL_MAX, "pattern": LABEL_VALUE },
    })
}

/// What is no control character, `=` or comma, nor a space where it is a key.
const LABEL_KEY: &str = r"^[^\s\x00-\x1f\x7f-\x9f=,]+$";
const LABEL_VALUE: &str = r"^[^\x00-\x1f\x7f-\x9f=,]*$";

/// Log levels: `LEVEL` at most once and `TARGET=LEVEL`, separated by commas. That a target is given once is not said.
fn levels() -> Value {
    let any_case = |name: &str| -> String {
        let letters = name.chars().map(|c| format!("[{}{c}]", c.to_ascii_uppercase()));
        letters.collect()
    };
    let names = ["off", "error", "warn", "info", "debug", "trace"].map(any_case).join("|");
    let all = format!(" *({names}) *");
    let one = format!(" *[A-Za-z0-9_]+(::[A-Za-z0-9_]+)*=({names}) *");
    let pattern = format!("^({all}(,{one})*|{one}(,{one})*(,{all}(,{one})*)?)$");
    json!({ "pattern": pattern, "maxLength": vmseal_log::LEN_MAX })
}

/// The kinds of changes, separated by commas.
fn kinds() -> Value {
    let names = ChangeKind::ALL.iter().filter_map(|kind| serde_json::to_value(kind).ok());
    let names: Vec<_> = names.filter_map(|name| Some(name.as_str()?.to_owned())).collect();
    let one = names.join("|");
    json!({ "pattern": format!("^({one})(,({one}))*$") })
}

fn replica_rate() -> Value {
    json!({ "minimum": REPLICATE_RATE_MIN, "maximum": LIMIT_MAX })
}

fn port(least: u16) -> Value {
    json!({ "minimum": least, "maximum": u16::MAX })
}

/// What the schemas of bodies get: by schema, or its variant, and field.
fn of_bodies() -> Vec<(&'static str, Value)> {
    let cache = json!({
        "minimum": CACHE_BYTES_MIN,
        "maximum": CACHE_BYTES_MAX,
        "multipleOf": CACHE_BYTES_MIN,
    });
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
        ("CreateVm", together::new_vm()),
        ("CreateVm/properties/uefi_variables", path()),
        ("CreateVm/properties/tpm_state", path()),
        ("CreateVm/properties/description", description()),
        ("CloudInit", user_data_or_user()),
        ("CloudInit/properties/user_data", user_data()),
        ("CloudInit/properties/meta_data", json!({ "maxLength": CLOUD_INIT_MAX })),
        ("CloudInit/properties/network_config", json!({ "maxLength": CLOUD_INIT_MAX })),
        ("CloudInit/properties/user", user()),
        ("CloudInit/properties/ssh_keys", json!({ "maxItems": SSH_KEYS_MAX })),
        ("CloudInit/properties/ssh_keys/items", json!({ "pattern": SSH_KEY_PATTERN })),
        ("CloudInit/properties/password_hash", password_hash()),
        ("SealedPassphrase/properties/sealed", sealed()),
        ("SealedKey/properties/sealed", sealed()),
        ("CreateVm/properties/vcpus", vcpus()),
        ("CreateVm/properties/memory", memory()),
        ("CreateVm/properties/disks", json!({ "minItems": 1, "maxItems": DISKS_MAX })),
        ("CreateVm/properties/nics", json!({ "maxItems": NICS_MAX })),
        ("AddDisk/properties/name", added_disk_name()),
        ("AddDisk/properties/size", disk_size()),
        ("AddDisk/properties/image", file()),
        ("AddDisk", image_with_format()),
        ("CreateDisk/properties/name", disk_name()),
        ("CreateDisk/properties/size", disk_size()),
        ("ResizeDisk/properties/size", disk_size()),
        ("CreateDisk/properties/image", file()),
        ("CreateDisk", image_with_format()),
        ("CreateNic/properties/name", name()),
        (
            "MacAddress",
            json!({
                "pattern": MAC_PATTERN,
                "not": { "enum": MACS_REFUSED },
            }),
        ),
        ("NicBackend/oneOf/0/properties/forwards", json!({ "maxItems": FORWARDS_MAX })),
        ("NicBackend/oneOf/1/properties/tap", interface()),
        ("NicBackend/oneOf/2/properties/bridge", interface()),
        ("PortForward/properties/guest_port", port(1)),
        ("PortForward/properties/host_port", port(0)),
        ("DatastoreLocation/oneOf/0/properties/path", location_path()),
        ("DatastoreLocation/oneOf/1/properties/path", location_path()),
        ("RbdPool/properties/keyring", path()),
        ("RbdPool/properties/user", pool_user()),
        ("RbdPool/properties/monitors", pool_field()),
        ("SetDatastore/properties/keyring", path()),
        ("SetDatastore/properties/user", pool_user()),
        ("SetDatastore/properties/monitors", pool_field()),
        ("RbdPool/properties/pool", pool_field()),
        ("RbdPool/properties/namespace", pool_field()),
        ("RbdPool/properties/data_pool", pool_field()),
        ("DiskLimits/properties/iops", json!({ "minimum": 1, "maximum": LIMIT_MAX })),
        (
            "DiskLimits/properties/bandwidth",
            json!({ "minimum": BANDWIDTH_MIN, "maximum": LIMIT_MAX }),
        ),
        ("DiskLimits/properties/stall_timeout", stall_timeout()),
        ("AddBitmap/properties/name", bitmap()),
        ("CloneVm/properties/name", name()),
        ("CloneVm", linked_with_snapshot()),
        ("RecryptVm", deep_or_with_provider()),
        ("DecryptVm", disks_or_policy()),
        ("TakeSnapshot/properties/name", name()),
        ("TakeSnapshot/properties/description", description()),
        ("CreateBackup/properties/name", name()),
        ("CreateBackup/properties/directory", path()),
        ("AddRemote/properties/name", name()),
        ("AddRemote/properties/url", url()),
        ("LookAtRemote/properties/url", url()),
        ("AddRemote/properties/fingerprint", fingerprint()),
        ("TakeDump/properties/name", name()),
        ("RestoreBackup/properties/name", name()),
        ("RestoreBackup/properties/new_vm", name()),
        ("TakeDump/properties/decrypt_to", file()),
        ("DecryptDump/properties/to", file()),
        ("ExportDisk/properties/to", file()),
        ("StopVm/properties/timeout_seconds", shutdown_seconds()),
        ("RebootVm/properties/timeout_seconds", shutdown_seconds()),
        ("SetVm/properties/name", name()),
        ("SetVm/properties/description", description()),
        ("SetVm/properties/vcpus", vcpus()),
        ("SetVm/properties/memory", memory()),
        ("SetPolicy/properties/name", name()),
        ("AddPolicy/properties/cache", cache.clone()),
        ("AdoptVms/properties/vcpus", vcpus()),
        ("AdoptVms/properties/memory", memory()),
        ("Rename/properties/name", name()),
        (
            "GuestCommand/oneOf/1/properties/path",
            json!({ "minLength": 1, "maxLength": COMMAND_MAX }),
        ),
        ("GuestCommand/oneOf/1/properties/arguments/items", json!({ "maxLength": COMMAND_MAX })),
        ("GuestCommand/oneOf/1/properties/arguments", json!({ "maxItems": ARGUMENTS_MAX })),
        (
            "GuestCommand/oneOf/1/properties/seconds",
            json!({ "minimum": 1, "maximum": EXEC_SECONDS_MAX }),
        ),
        ("NicBackend/oneOf/0", closed()),
        ("NicBackend/oneOf/1", closed()),
        ("NicBackend/oneOf/2", closed()),
        ("DatastoreLocation/oneOf/0", closed()),
        ("DatastoreLocation/oneOf/1", closed()),
        ("RbdPool", closed()),
        ("SetLogLevel/properties/levels", levels()),
        ("GuestCommand/oneOf/0", closed()),
        ("GuestCommand/oneOf/1", closed()),
        ("GuestCommand/oneOf/2", closed()),
        ("GuestCommand/oneOf/3", closed()),
        ("CreateVm/properties/labels", labels(&json!("string"))),
        ("SetVm/properties/labels", labels(&json!(["string", "null"]))),
        ("Replication/properties/bytes_per_second", replica_rate()),
        ("SetPolicy/properties/replicate_rate", replica_rate()),
        ("SetPolicy", together::changed_policy()),
        ("DrainHost/properties/parallel", json!({ "minimum": 1, "maximum": PARALLEL_MAX })),
        ("CloneVm/properties/rate", rate()),
        ("CreateBackup/properties/rate", rate()),
        ("DecryptVm/properties/rate", rate()),
        ("DrainHost/properties/rate", rate()),
        ("EncryptVm/properties/rate", rate()),
        ("ExportDisk/properties/rate", rate()),
        ("MigrateVm/properties/rate", rate()),
        ("MoveVm/properties/rate", rate()),
        ("RecryptVm/properties/rate", rate()),
        ("SetTask/properties/rate", rate()),
        ("ImageLayout/properties/object_size", part_of_image()),
        ("ImageLayout/properties/stripe_unit", part_of_image()),
        ("ImageLayout/properties/stripe_count", stripe_count()),
        ("SetPolicy/properties/object_size", none_or(part_of_image())),
        ("SetPolicy/properties/stripe_unit", none_or(part_of_image())),
        ("SetPolicy/properties/stripe_count", none_or(stripe_count())),
        ("Redundancy/properties/failures", json!({ "maximum": FAILURES_MAX })),
        ("NewPools/properties/failures", json!({ "maximum": FAILURES_MAX })),
        ("Redundancy/properties/data_chunks", data_chunks()),
        ("NewPools/properties/data_chunks", data_chunks()),
        ("SetPolicy/properties/data_chunks", none_or(data_chunks())),
        ("Redundancy", chunks_of_coding()),
        ("NewPools", chunks_of_coding()),
        ("SetPolicy/properties/failure_domain", failure_domain()),
        ("SetPolicy/properties/iops", none_or(json!({ "minimum": 1, "maximum": LIMIT_MAX }))),
        (
            "SetPolicy/properties/bandwidth",
            none_or(json!({ "minimum": BANDWIDTH_MIN, "maximum": LIMIT_MAX })),
        ),
        ("SetPolicy/properties/stall_timeout", none_or(stall_timeout())),
        ("SetPolicy/properties/cache", none_or(cache.clone())),
        ("SetPolicy/properties/downtime_milliseconds", none_or(downtime())),
        ("MigrateVm/properties/downtime_milliseconds", downtime()),
        ("AddPolicy/properties/downtime_milliseconds", downtime()),
        ("SetPolicy/properties/cpu_model", cpu_model(0)),
        ("AddPolicy/properties/cpu_model", cpu_model(1)),
        ("AddPolicy", encryption_with_provider()),
        ("AddProvider", backup_with_passphrase()),
        ("Hardware/properties/cpu_model", cpu_model(1)),
        ("Hardware/properties/boot", json!({ "uniqueItems": true })),
        ("SetVm/properties/boot", json!({ "uniqueItems": true })),
        ("Hardware", drive_with_order()),
        (
            "Cdrom/properties/medium",
            json!({ "pattern": r"^/[^\x00-\x1f\x7f-\x9f]*$", "maxLength": MEDIUM_PATH_MAX }),
        ),
        ("ExportDisk", format_with_protection()),
        ("TrustServer", json!({ "minProperties": 1, "maxProperties": 1 })),
        ("TrustServer/properties/fingerprint", fingerprint()),
        (
            "ClientName/properties/common_name",
            json!({ "minLength": 1, "maxLength": COMMON_NAME_MAX, "pattern": COMMON_NAME_PATTERN }),
        ),
        ("JoinHost/properties/address", agent_address()),
        ("JoinHost/properties/certificate_request", json!({ "maxLength": REQUEST_MAX })),
        ("ChangeHost/properties/address", agent_address()),
        ("AddKmipServer/properties/host", kmip_host()),
        ("SetKmipServer/properties/host", kmip_host()),
        ("SetClientCertificate/properties/certificate", pem()),
        ("TrustServer/properties/authorities", pem()),
        ("AddProvider/properties/backup", base64()),
        ("VerifyBackup/properties/backup", base64()),
        ("AddDatastore", together::new_datastore()),
        ("SetDatastore", keyring_or_key()),
        ("NewPools/properties/failure_domain", domain_of_new_pools()),
        ("ImageLayout", stripes_in_objects()),
        ("MigrateVm", policy_with_remote()),
        ("RestoreBackup", name_or_new_vm()),
        ("BeginArrival", suspended_at_rest()),
        ("ArrivingVm", memory_of_pages()),
        ("ArrivingVm/properties/name", name()),
        ("ArrivingVm/properties/description", description()),
        ("ArrivingVm/properties/labels", labels(&json!("string"))),
        ("ArrivingVm/properties/vcpus", vcpus()),
        ("ArrivingVm/properties/memory", memory()),
        ("ArrivingVm/properties/disks", json!({ "minItems": 1, "maxItems": DISKS_MAX })),
        ("ArrivingVm/properties/snapshots", json!({ "maxItems": SNAPSHOTS_MAX })),
        ("DiskOfArrival/properties/name", disk_name()),
        ("DiskOfArrival/properties/size", json!({ "minimum": 1, "maximum": DISK_SIZE_MAX })),
        ("SnapshotOfArrival/properties/name", name()),
        ("SnapshotOfArrival/properties/description", description()),
        ("BeginArrival/properties/generation", generation()),
        ("SnapshotOfArrival/properties/memory_generation", generation()),
        ("SuspendedMemory/properties/generation", generation()),
        ("ArrivalSession/properties/streams", json!({ "maximum": u16::MAX })),
    ]
}

/// What parameters get, by name: on all routes that have them.
fn of_parameters() -> Vec<(&'static str, Value)> {
    vec![
        ("bitmap", bitmap()),
        ("kinds", kinds()),
        ("label", json!({ "pattern": "^[^=]" })),
        ("arrival", json!({ "format": "uuid" })),
    ]
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
            if parameter["name"] == "after" && parameter["schema"]["minimum"] == 0 {
                extend(&mut parameter["schema"], json!({ "maximum": CHANGE_MAX }));
            }
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
    fn what_has_the_form_of_an_id_is_no_name() {
        use vmseal_api::id::{NameError, check_name};
        let id = "0190b5a0-0000-7000-8000-00000000000f";
        let texts = [id, &id.replace('-', ""), &id.to_uppercase(), &id[1..], &id.replace('f', "g")];
        for text in texts {
            let is_id = check_name(text) == Err(NameError::LooksLikeId);
            assert_eq!(matches(ID_PATTERN, text), is_id, "{text}");
        }
        let name = name();
        assert_eq!(name["not"], json!({ "type": "string", "pattern": ID_PATTERN }));
        assert_eq!(added_disk_name()["not"]["anyOf"][0], name["not"]);
    }

    #[test]
    fn addresses_of_cards_and_servers_are_those_that_the_checks_accept() {
        use rustls::pki_types::ServerName;
        use vmseal_api::nic::{MacAddress, check_interface_name};
        for text in [
            "52:54:00:12:34:56",
            "52-54-00-12-34-56",
            "AA:bb:CC:00:00:01",
            "52:54-00:12:34:56",
            "52:54:00:12:34",
            "01:00:5e:00:00:01",
            "00:00:00:00:00:00",
            "00-00-00-00-00-00",
        ] {
            let is = text.parse::<MacAddress>().is_ok_and(|mac| mac.check().is_ok());
            assert_eq!(matches(MAC_PATTERN, text) && !MACS_REFUSED.contains(&text), is, "{text}");
        }
        for text in ["kms.example.org", "kms-1", "192.0.2.1", "2001:db8::1", "", "a b", "a/b"] {
            assert_eq!(matches(HOST_PATTERN, text), ServerName::try_from(text).is_ok(), "{text}");
        }
        for name in INTERFACE_NAMES_REFUSED {
            assert!(check_interface_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn fields_of_pools_are_those_that_the_checks_accept() {
        let checked = |monitors: &str, user: &str| {
            let pool = json!({ "monitors": monitors, "user": user, "pool": "vms" });
            let pool: vmseal_api::datastore::RbdPool = serde_json::from_value(pool).unwrap();
            pool.check().is_ok()
        };
        for text in ["v2:10.0.0.1:3300", "a b", "-a", "a-b", "a\nb", "a\u{85}", "\u{e4}", ""] {
            assert_eq!(matches(POOL_FIELD_PATTERN, text), checked(text, "client.a"), "{text:?}");
        }
        for user in ["client.a", "client.", "a", "Client.a", "client.a\tb", "client.a\u{9f}"] {
            assert_eq!(matches(POOL_USER_PATTERN, user), checked("a", user), "{user:?}");
        }
    }

    #[test]
    fn grammars_accept_what_the_checks_accept() {
        let levels = levels()["pattern"].as_str().unwrap().to_owned();
        for text in [
            "info",
            "TRACE",
            "warn, vmseal_agent=debug",
            "vmseal_agent::vm=trace",
            "a=info,off,b=warn",
            "00",
            "",
            "info,info",
            "a=info,off,off",
            "a b=info",
            "a:=info",
            "info,",
            "a=",
        ] {
            assert_eq!(
                matches(&levels, text),
                text.parse::<vmseal_log::Levels>().is_ok(),
                "{text}"
            );
        }
        let kinds = kinds()["pattern"].as_str().unwrap().to_owned();
        for (text, is) in
            [("vm", true), ("vm,task", true), ("", false), ("vm,", false), ("vms", false)]
        {
            assert_eq!(matches(&kinds, text), is, "{text}");
        }
        for (key, is) in [("a", true), ("a.b/c", true), ("", false), ("a b", false), ("a=", false)]
        {
            assert_eq!(matches(LABEL_KEY, key), is, "{key}");
        }
        assert!(matches(LABEL_VALUE, "a b") && !matches(LABEL_VALUE, "a,b"));
        let (digits, pairs) = ("ab".repeat(32), ["AB"; 32].join(":"));
        for text in ["ab:cd", &digits, &pairs, &format!(" {pairs} "), &digits.replace('b', "x")] {
            let is = vmseal_api::fingerprint::check(text).is_ok();
            assert_eq!(matches(FINGERPRINT_PATTERN, text), is, "{text}");
        }
        for text in ["", "vmseal", "\u{e4} b", "a\nb", "a\u{7f}", "\u{85}", "a\u{a0}"] {
            let is = vmseal_api::kmip::check_common_name(text).is_ok();
            assert_eq!(matches(COMMON_NAME_PATTERN, text), is, "{text:?}");
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
