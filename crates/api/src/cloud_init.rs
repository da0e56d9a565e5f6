//! What a guest reads at its first boot: the documents of cloud-init's NoCloud data source.
//!
//! They hold passwords and tokens. So a document is a [`SecretText`], `Debug` shows none, and to a host they cross
//! packed and sealed to its agent's key box ([`cloud_init_info`]), which is also the only form that is stored.

use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

use crate::id::{DiskId, VmId};

mod clone;

pub use self::clone::{made_user_data_begin, meta_data};

/// The name of the disk that holds the documents.
pub const CLOUD_INIT_DISK: &str = "cloud-init";

/// The size of that disk, in bytes.
pub const CLOUD_INIT_DISK_SIZE: u64 = 1 << 20;

/// The longest that the three documents may be together, in bytes: as much as is sealed in one box.
pub const CLOUD_INIT_MAX: usize = 60 * 1024;

/// The most SSH keys that are given beside documents.
pub const SSH_KEYS_MAX: usize = 64;

/// What an SSH key is, as a regular expression of ECMA 262: a line of `authorized_keys` without options. That its data
/// begins with its type, too, is not said.
pub const SSH_KEY_PATTERN: &str = r"^\s*(ssh-|ecdsa-sha2-|sk-ssh-|sk-ecdsa-)[^\s\x00-\x1f\x7f-\x9f]* +[A-Za-z0-9+/]+={0,2}( [^\x00-\x1f\x7f-\x9f]*)?\s*$";

/// The longest name of the user that is made, in bytes; Linux's limit.
pub const USER_MAX: usize = 32;

/// What that name is within [`USER_MAX`], as a regular expression of ECMA 262. It is another than [`USER_REFUSED`].
pub const USER_PATTERN: &str = "^[a-z_][a-z0-9_-]*$";

/// The user whom images do not let in.
pub const USER_REFUSED: &str = "root";

/// The shortest hash of a password, in bytes.
pub const PASSWORD_HASH_MIN: usize = 20;

/// The longest hash of a password, in bytes.
pub const PASSWORD_HASH_MAX: usize = 256;

/// What such a hash is within these limits, as a regular expression of ECMA 262.
pub const PASSWORD_HASH_PATTERN: &str = r"^\$(6|5|2a|2b|2y|1)\$[A-Za-z0-9./$=]*$";

/// How user-data begins, of every kind that cloud-init knows; what begins otherwise it ignores, and says so only in
/// the guest's log.
pub const USER_DATA_KINDS: [&str; 11] = [
    "#cloud-config",
    "#!",
    "#include",
    "#cloud-boothook",
    "#part-handler",
    "#upstart-job",
    "## template:",
    "Content-Type:",
    "MIME-Version:",
    "From ",
    "{",
];

/// A text that is not to be seen: wiped when it goes, and not shown by `Debug`.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(value_type = String))]
#[serde(transparent)]
pub struct SecretText(String);

impl SecretText {
    /// The text. What is done with it must not outlive this value.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for SecretText {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl Drop for SecretText {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretText({} bytes)", self.0.len())
    }
}

/// What cloud-init in the guest is to be told at its first boot. It is kept on a small disk of the VM's own, which
/// the guest can only read, and which is encrypted where the VM's disks are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CloudInit {
    /// The user-data: `#cloud-config`, a script, or another kind that cloud-init knows. None has one made of
    /// `user`, `ssh_keys` and `password_hash`, at least one of the latter two; with user-data none of them is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<SecretText>,
    /// The meta-data (YAML). None is `instance-id` (the VM's id) and `local-hostname` (its name).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meta_data: Option<SecretText>,
    /// The network configuration (YAML, version 1 or 2). None leaves it to cloud-init: DHCP on the first card.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_config: Option<SecretText>,
    /// The user that is made: none is the image's own (`debian`, `ubuntu`, ...). It may use sudo.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Public keys that the user logs in with, as lines of `authorized_keys`; at most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<String>,
    /// The user's password as crypt(3) has it (`$6$...`); never the password itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_hash: Option<SecretText>,
}

/// The documents as a guest reads them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Documents {
    /// `user-data`
    pub user_data: SecretText,
    /// `meta-data`
    pub meta_data: SecretText,
    /// `network-config`, where there is one.
    pub network_config: Option<SecretText>,
}

/// What was packed is no documents.
#[derive(Debug, thiserror::Error)]
#[error("the cloud-init data is damaged")]
pub struct NoDocuments;

impl Documents {
    /// The files and their contents.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let network = self.network_config.as_ref().map(|it| ("network-config", it.expose()));
        [("user-data", self.user_data.expose()), ("meta-data", self.meta_data.expose())]
            .into_iter()
            .chain(network)
    }

    /// How long all are together, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.files().map(|(_, text)| text.len()).sum()
    }

    /// Whether there is nothing in any.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The documents of a clone: the same but for what names the VM. The instance id is the clone's, so that cloud-init sets the
    /// guest up as at a first boot, and so is the host name in meta-data, and in user-data that vmseal has made. Meta-data that is
    /// not one `key: value` below the other is replaced as a whole.
    #[must_use]
    pub fn for_clone(&self, vm: VmId, name: &str) -> Self {
        Self {
            user_data: clone::user_data(self.user_data.expose(), name),
            meta_data: clone::meta_data_of(self.meta_data.expose(), vm, name),
            network_config: self.network_config.clone(),
        }
    }

    /// As they are sealed: each document's length (4 bytes, little-endian; all ones for one that there is not),
    /// then its text. The caller wipes it.
    #[must_use]
    pub fn packed(&self) -> Vec<u8> {
        // At once as long as it gets: no copy is left behind by growing.
        let mut packed = Vec::with_capacity(3 * 4 + self.len());
        let documents =
            [Some(&self.user_data), Some(&self.meta_data), self.network_config.as_ref()];
        for document in documents {
            let length = document.map_or(u32::MAX, |it| {
                // At most CLOUD_INIT_MAX.
                u32::try_from(it.0.len()).unwrap_or(u32::MAX - 1)
            });
            packed.extend_from_slice(&length.to_le_bytes());
            packed.extend_from_slice(document.map_or(b"", |it| it.0.as_bytes()));
        }
        packed
    }

    /// The documents that were packed.
    ///
    /// # Errors
    /// [`NoDocuments`].
    pub fn unpacked(packed: &[u8]) -> Result<Self, NoDocuments> {
        let mut rest = packed;
        let mut next = || {
            let (length, behind) = rest.split_first_chunk::<4>().ok_or(NoDocuments)?;
            rest = behind;
            let length = u32::from_le_bytes(*length);
            if length == u32::MAX {
                return Ok(None);
            }
            let length = usize::try_from(length).map_err(|_| NoDocuments)?;
            let (text, behind) = rest.split_at_checked(length).ok_or(NoDocuments)?;
            rest = behind;
            let text = std::str::from_utf8(text).map_err(|_| NoDocuments)?;
            Ok(Some(SecretText(text.to_owned())))
        };
        let (user_data, meta_data, network_config) = (next()?, next()?, next()?);
        if !rest.is_empty() {
            return Err(NoDocuments);
        }
        let user_data = user_data.ok_or(NoDocuments)?;
        Ok(Self { user_data, meta_data: meta_data.ok_or(NoDocuments)?, network_config })
    }
}

/// What documents are bound to when they are sealed for an agent.
#[must_use]
pub fn cloud_init_info(vm: VmId, disk: DiskId) -> Vec<u8> {
    format!("vmseal cloud-init v1\0{vm}\0{disk}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(network: Option<&str>) -> Documents {
        Documents {
            user_data: "#cloud-config\n".to_owned().into(),
            meta_data: "a: ü\n".to_owned().into(),
            network_config: network.map(|text| text.to_owned().into()),
        }
    }

    #[test]
    fn documents_are_packed_and_unpacked_and_nothing_else_is() {
        for documents in [documents(None), documents(Some("")), documents(Some("version: 2\n"))] {
            let packed = documents.packed();
            assert_eq!(packed.capacity(), 12 + documents.len());
            assert_eq!(Documents::unpacked(&packed).unwrap(), documents);
            for length in 0..packed.len() {
                assert!(Documents::unpacked(&packed[..length]).is_err(), "{length} bytes");
            }
            let longer = [packed.as_slice(), b"x"].concat();
            assert!(Documents::unpacked(&longer).is_err());
        }
        assert!(Documents::unpacked(&[0xff; 12]).is_err(), "without user-data");
        assert!(Documents::unpacked(b"\x01\0\0\0\xff\0\0\0\0\xff\xff\xff\xff").is_err());
    }

    #[test]
    fn debug_shows_no_text() {
        let asked = CloudInit {
            user_data: Some("MARKER".to_owned().into()),
            password_hash: Some("MARKER".to_owned().into()),
            ..CloudInit::default()
        };
        let shown = format!("{asked:?} {:?}", documents(Some("MARKER")));
        assert!(shown.contains("SecretText(6 bytes)") && !shown.contains("MARKER"), "{shown}");
        let json = serde_json::to_string(&asked).unwrap();
        assert_eq!(serde_json::from_str::<CloudInit>(&json).unwrap(), asked);
    }
}
