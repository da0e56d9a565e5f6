//! Keys on their way to a host: by reference, and sealed.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::datastore::DatastoreSpec;
use crate::id::{DiskId, ProviderId, VmId};

/// Which key of which provider, and how to know that it is the right one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct KeyReference {
    /// The provider.
    pub provider: ProviderId,
    /// The key's id at the provider.
    pub key_id: String,
    /// The check value: 128 bits derived from the key, in hexadecimal.
    pub check: String,
}

/// A KEK or another secret, encrypted to an agent's key box (HPKE base mode, X25519, HKDF-SHA256, AES-256-GCM). A KEK's info
/// string is `vmseal kek v1`, and the VM's id, the provider's id, the check value and the key's id, each after a zero byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SealedKey {
    /// The key box it is sealed to; an agent that has restarted since answers `wrong-state`.
    pub key_box: String,
    /// The sealed box, base64.
    pub sealed: String,
}

/// Another KEK for a VM's disks, besides the registered one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherKey {
    /// The registered one.
    pub beside: KeyReference,
    /// The other one.
    pub key: KeyReference,
    /// The other KEK, sealed with the [`key_info`] of `key`.
    pub sealed: SealedKey,
}

/// The disks of a VM whose data keys (DEKs) another VM gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareDataKeys {
    /// The registered key.
    pub key: KeyReference,
    /// The disks; those that are not encrypted stay as they are.
    pub disks: Vec<DiskId>,
}

/// The key (cephx) of a pool's user, for the host that mounts the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolKey {
    /// Where the host mounts the pool.
    pub path: PathBuf,
    /// The key, sealed with [`pool_key_info`]; none has the host forget the one that it holds, and how it got to the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<SealedKey>,
}

/// Has another process serve a pool that a host has mounted, as when the one that does dies: with the key and the keyring of now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remount {
    /// The pool.
    pub datastore: DatastoreSpec,
    /// Only sees whether the cluster takes the key.
    pub only_try: bool,
    /// A key that is tried in place of the one that the host holds, and not held: with `only_try`. It is sealed with
    /// [`pool_key_info`]. Agents without the feature [`TRY_POOL_KEYS`](super::version::TRY_POOL_KEYS)
    /// do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<SealedKey>,
    /// The cluster, by its fsid, that it must be: with `only_try`. The way in the location is tried then, and what is mounted is not looked
    /// at. Agents without the feature [`POOL_WAYS`](super::version::POOL_WAYS) do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
}

/// The context that the key of a pool is sealed with: it cannot be offered for another mount.
#[must_use]
pub fn pool_key_info(path: &Path) -> Vec<u8> {
    [b"vmseal pool key v1\0", path.as_os_str().as_encoded_bytes()].concat()
}

/// The context that a KEK is sealed with: it cannot be offered for another VM or as another key.
#[must_use]
pub fn key_info(vm: VmId, key: &KeyReference) -> Vec<u8> {
    format!("vmseal kek v1\0{vm}\0{}\0{}\0{}", key.provider, key.check, key.key_id).into_bytes()
}
