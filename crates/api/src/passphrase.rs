//! Passphrases on their way from a user to the server.

use serde::{Deserialize, Serialize};

/// A passphrase, sealed to the server's passphrase box (`GET /api/v1/about`): HTTP buffers never hold it. The info string is
/// `vmseal passphrase v1`, a zero byte, and what it is for: the name of a provider, or `key of datastore` and its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SealedPassphrase {
    /// The box it is sealed to.
    pub passphrase_box: String,
    /// The sealed box, base64.
    pub sealed: String,
}

/// What the passphrase of a server's backup is sealed for, in place of a provider: no provider has this name.
pub const SERVER_BACKUP: &str = "backup of the server";

/// What the key of a datastore is sealed for, in place of a provider: no provider has such a name.
#[must_use]
pub fn of_datastore(name: &str) -> String {
    format!("key of datastore {name}")
}

/// The context that a passphrase is sealed with: one provider, by name.
#[must_use]
pub fn passphrase_info(provider: &str) -> Vec<u8> {
    format!("vmseal passphrase v1\0{provider}").into_bytes()
}
