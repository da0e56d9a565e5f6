//! Limits of several fields together, in the words of JSON Schema. A field that is null counts as one that is absent.

use serde_json::{Value, json};
use vmseal_api::cloud_init::CLOUD_INIT_DISK;
use vmseal_api::hardware::{Firmware, HUGE_PAGE, MemoryBacking, TPM_DISK, VARIABLES_DISK};
use vmseal_api::image_layout::OBJECT_SIZE;
use vmseal_api::redundancy::Layout;
use vmseal_api::transfer::ExportFormat;

use super::object_sizes;

/// All that is said of a VM that is made.
pub(super) fn new_vm() -> Value {
    let [told, variables, tpm] = names_of_machine();
    json!({ "allOf": [
        card_with_order(),
        memory_of_pages(),
        variables_with_firmware(),
        state_with_tpm(),
        told,
        variables,
        tpm,
    ] })
}

/// All that is said of a policy that is changed.
pub(super) fn changed_policy() -> Value {
    json!({ "allOf": [
        replica_with_rate(),
        changed_encryption_with_provider(),
        changed_stripes_in_objects(),
        changed_chunks_of_coding(),
    ] })
}

/// An image has a format, and nothing else has one.
pub(super) fn image_with_format() -> Value {
    let text = json!({ "type": "string" });
    json!({ "anyOf": [
        { "properties": { "image": text, "format": text }, "required": ["image", "format"] },
        { "properties": { "image": { "type": "null" }, "format": { "type": "null" } } },
    ] })
}

/// A format that is in the clear is said to be so, one with a passphrase has it, and no other has either.
pub(super) fn format_with_protection() -> Value {
    let of = |format: ExportFormat| {
        let plaintext = json!({ "const": format.is_plain() });
        let passphrase = if format.has_passphrase() { "object" } else { "null" };
        let required = [("plaintext", format.is_plain()), ("passphrase", format.has_passphrase())];
        let required: Vec<_> =
            required.iter().filter(|(_, is)| *is).map(|(name, _)| name).collect();
        json!({
            "properties": {
                "format": { "const": format.name() },
                "plaintext": plaintext,
                "passphrase": { "type": passphrase },
            },
            "required": required,
        })
    };
    use ExportFormat::{Luks2, Qcow2, Raw, Sealed};
    let formats = [Raw, Qcow2, Luks2, Sealed].map(of);
    json!({ "anyOf": formats })
}

/// A replica that is nowhere has no rate.
fn replica_with_rate() -> Value {
    let named = json!({ "type": "string", "minLength": 1 });
    let nothing = json!({ "type": "null" });
    json!({ "anyOf": [
        { "properties": { "replicate_to": named }, "required": ["replicate_to"] },
        { "properties": { "replicate_to": nothing } },
        { "properties": { "replicate_rate": nothing } },
    ] })
}

/// A provider from a backup is native, and has the backup's passphrase.
pub(super) fn backup_with_passphrase() -> Value {
    let nothing = json!({ "type": "null" });
    let object = json!({ "type": "object" });
    let text = json!({ "type": "string" });
    json!({ "anyOf": [
        { "properties": { "backup": nothing, "backup_passphrase": nothing } },
        {
            "properties": { "kmip": nothing, "backup": text, "backup_passphrase": object },
            "required": ["backup", "backup_passphrase"],
        },
    ] })
}

/// A VM that starts from the network has a network card.
fn card_with_order() -> Value {
    let network = json!({ "const": "network" });
    json!({ "anyOf": [
        { "properties": { "nics": { "minItems": 1 } }, "required": ["nics"] },
        { "properties": { "hardware": { "properties": { "boot": { "not": { "contains": network } } } } } },
    ] })
}

/// User-data is given, or made of a user's keys and password.
pub(super) fn user_data_or_user() -> Value {
    let (text, nothing) = (json!({ "type": "string" }), json!({ "type": "null" }));
    json!({ "anyOf": [
        {
            "properties": { "user_data": text, "user": nothing, "ssh_keys": { "maxItems": 0 }, "password_hash": nothing },
            "required": ["user_data"],
        },
        {
            "properties": { "user_data": nothing, "ssh_keys": { "minItems": 1 } },
            "required": ["ssh_keys"],
        },
        {
            "properties": { "user_data": nothing, "password_hash": text },
            "required": ["password_hash"],
        },
    ] })
}

/// A linked clone stands on a snapshot.
pub(super) fn linked_with_snapshot() -> Value {
    json!({ "anyOf": [
        { "properties": { "linked": { "const": false } } },
        { "properties": { "snapshot": { "type": "string" } }, "required": ["snapshot"] },
    ] })
}

/// Data is encrypted again under the key-encryption key that is there, or another such key is taken.
pub(super) fn deep_or_with_provider() -> Value {
    let nothing = json!({ "type": "null" });
    json!({ "anyOf": [
        {
            "properties": { "deep": { "const": true }, "provider": nothing },
            "required": ["deep"],
        },
        { "properties": {
            "deep": { "const": false },
            "rate": nothing,
            "in_place": { "const": false },
            "disks": { "maxItems": 0 },
        } },
    ] })
}

/// A VM of which some disks are decrypted keeps its policy.
pub(super) fn disks_or_policy() -> Value {
    json!({ "anyOf": [
        { "properties": { "disks": { "maxItems": 0 } } },
        { "properties": { "policy": { "type": "null" } } },
    ] })
}

/// A policy without encryption has no provider of keys.
pub(super) fn encryption_with_provider() -> Value {
    json!({ "anyOf": [
        { "properties": { "encryption": { "const": true } } },
        { "properties": { "provider": { "type": "null" } } },
    ] })
}

/// A machine that starts from its CD-ROM drive has one.
pub(super) fn drive_with_order() -> Value {
    let drive = json!({ "const": "cdrom" });
    json!({ "anyOf": [
        { "properties": { "cdrom": { "type": "object" } }, "required": ["cdrom"] },
        { "properties": { "boot": { "not": { "contains": drive } } } },
    ] })
}

/// Memory of huge pages is a multiple of one.
pub(super) fn memory_of_pages() -> Value {
    let pages = json!({ "const": MemoryBacking::Pages });
    json!({ "anyOf": [
        { "properties": { "memory": { "multipleOf": HUGE_PAGE } } },
        { "properties": { "hardware": { "properties": { "memory_backing": pages } } } },
    ] })
}

/// The firmwares that keep variables, or those that do not.
fn firmwares(with_variables: bool) -> Value {
    let all = Firmware::NAMES.into_iter().map(|(_, firmware)| firmware);
    let these = all.filter(|firmware| firmware.has_variables() == with_variables);
    json!({ "enum": these.collect::<Vec<_>>() })
}

/// Variables of UEFI are for firmware that has any.
fn variables_with_firmware() -> Value {
    let firmware =
        json!({ "properties": { "firmware": firmwares(true) }, "required": ["firmware"] });
    json!({ "anyOf": [
        { "properties": { "uefi_variables": { "type": "null" } } },
        { "properties": { "hardware": firmware }, "required": ["hardware"] },
    ] })
}

/// What a TPM keeps is for a machine that has one.
fn state_with_tpm() -> Value {
    let tpm = json!({ "properties": { "tpm": { "const": true } }, "required": ["tpm"] });
    json!({ "anyOf": [
        { "properties": { "tpm_state": { "type": "null" } } },
        { "properties": { "hardware": tpm }, "required": ["hardware"] },
    ] })
}

/// No disk has the name of one that the machine is made with.
fn names_of_machine() -> [Value; 3] {
    let hardware =
        |fields: Value| json!({ "properties": { "hardware": { "properties": fields } } });
    let or_other_names = |without: Value, name: &str| {
        let disk = json!({ "properties": { "name": { "not": { "const": name } } } });
        json!({ "anyOf": [without, { "properties": { "disks": { "items": disk } } }] })
    };
    let told_nothing = json!({ "properties": { "cloud_init": { "type": "null" } } });
    [
        or_other_names(told_nothing, CLOUD_INIT_DISK),
        or_other_names(hardware(json!({ "firmware": firmwares(false) })), VARIABLES_DISK),
        or_other_names(hardware(json!({ "tpm": { "const": false } })), TPM_DISK),
    ]
}

/// Stripes have a unit and a count, and a unit is not longer than an object.
pub(super) fn stripes_in_objects() -> Value {
    let nothing = json!({ "type": "null" });
    let none = json!({ "properties": { "stripe_unit": nothing, "stripe_count": nothing } });
    let of_objects = object_sizes().map(|size| {
        // Where no size is said, it is the usual one.
        let sizes = if size == OBJECT_SIZE { vec![None, Some(size)] } else { vec![Some(size)] };
        let mut required = vec!["stripe_unit", "stripe_count"];
        if size != OBJECT_SIZE {
            required.push("object_size");
        }
        json!({
            "properties": {
                "object_size": { "enum": sizes },
                "stripe_unit": { "type": "integer", "maximum": size },
                "stripe_count": { "type": "integer" },
            },
            "required": required,
        })
    });
    json!({ "anyOf": std::iter::once(none).chain(of_objects).collect::<Vec<_>>() })
}

/// The same of a change, where 0 gives back what a policy asks for, and what is not said stays.
fn changed_stripes_in_objects() -> Value {
    let no_size = json!({ "properties": { "object_size": { "type": "null" } } });
    let no_unit = json!({ "properties": { "stripe_unit": { "enum": [null, 0] } } });
    let no_stripes =
        json!({ "properties": { "stripe_count": { "const": 0 } }, "required": ["stripe_count"] });
    let usual = std::iter::once((0, OBJECT_SIZE));
    let of_objects = usual.chain(object_sizes().map(|size| (size, size))).map(|(said, size)| {
        json!({
            "properties": { "object_size": { "const": said }, "stripe_unit": { "maximum": size } },
            "required": ["object_size"],
        })
    });
    let choices = [no_size, no_unit, no_stripes].into_iter().chain(of_objects);
    json!({ "anyOf": choices.collect::<Vec<_>>() })
}

/// The layout is erasure coding.
fn coding() -> Value {
    json!({
        "properties": { "layout": { "const": Layout::ErasureCoding } },
        "required": ["layout"],
    })
}

/// Data chunks are of erasure coding.
pub(super) fn chunks_of_coding() -> Value {
    json!({ "anyOf": [{ "properties": { "data_chunks": { "type": "null" } } }, coding()] })
}

/// The same of a change, where 0 leaves them to the pool. Where a change does not have the layout, the policy has it.
fn changed_chunks_of_coding() -> Value {
    json!({ "anyOf": [
        { "properties": { "data_chunks": { "enum": [null, 0] } } },
        { "properties": { "redundancy": coding() } },
    ] })
}

/// A policy that is to encrypt nothing gets no provider of keys but the default one, which is none.
fn changed_encryption_with_provider() -> Value {
    json!({ "anyOf": [
        { "properties": { "encryption": { "enum": [null, true] } } },
        { "properties": { "provider": { "enum": [null, ""] } } },
    ] })
}

/// All that is said of a datastore that is added.
pub(super) fn new_datastore() -> Value {
    json!({ "allOf": [key_with_pool(), policy_or_numbers()] })
}

/// A pool of Ceph has a keyring on its host or comes with its key; a directory has neither, nor OSDs, nor pools that are made.
fn key_with_pool() -> Value {
    let nothing = json!({ "type": "null" });
    let of_kind = |kind: &str| json!({ "kind": { "const": kind } });
    let pool = |pool: Value| json!({ "properties": { "kind": { "const": "rbd" }, "pool": pool }, "required": ["pool"] });
    let with_keyring =
        json!({ "properties": { "keyring": { "type": "string" } }, "required": ["keyring"] });
    let without_keyring = json!({ "properties": { "keyring": nothing } });
    json!({ "anyOf": [
        { "properties": {
            "location": { "properties": of_kind("dir") },
            "key": nothing,
            "osd_encryption": nothing,
            "create_for_policy": nothing,
        } },
        { "properties": { "location": pool(with_keyring), "key": nothing } },
        {
            "properties": { "location": pool(without_keyring), "key": { "type": "object" } },
            "required": ["key"],
        },
    ] })
}

/// Pools are made for a policy, or by numbers: not both. Their compression is no policy's.
fn policy_or_numbers() -> Value {
    let nothing = json!({ "type": "null" });
    let no_numbers = json!({ "properties": {
        "failures": { "const": 0 },
        "layout": nothing,
        "data_chunks": nothing,
        "failure_domain": nothing,
    } });
    let pool = json!({ "properties": { "create": no_numbers } });
    json!({ "anyOf": [
        { "properties": { "create_for_policy": nothing } },
        { "properties": { "location": { "properties": { "pool": pool } } } },
    ] })
}

/// The key of a pool is in a file on each host, or with the server: not both.
pub(super) fn keyring_or_key() -> Value {
    json!({ "anyOf": [
        { "properties": { "keyring": { "type": "null" } } },
        { "properties": { "key": { "type": "null" } } },
    ] })
}

/// A VM that is made again has a name of its own, or a new one is made: not both.
pub(super) fn name_or_new_vm() -> Value {
    json!({ "anyOf": [
        { "properties": { "name": { "type": "null" } } },
        { "properties": { "new_vm": { "type": "null" } } },
    ] })
}

/// A VM keeps its policy unless it goes to another control plane.
pub(super) fn policy_with_remote() -> Value {
    json!({ "anyOf": [
        { "properties": { "policy": { "type": "null" } } },
        { "properties": { "remote": { "type": "string" } }, "required": ["remote"] },
    ] })
}

/// A VM that is suspended does not run.
pub(super) fn suspended_at_rest() -> Value {
    json!({ "anyOf": [
        { "properties": { "suspended": { "type": "null" } } },
        { "properties": { "at_rest": { "const": true } }, "required": ["at_rest"] },
    ] })
}
