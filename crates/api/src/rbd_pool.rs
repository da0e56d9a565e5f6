//! A pool of a Ceph cluster, and the ways by which hosts get to it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::new_pools::NewPools;

/// The longest value of a pool's field, in bytes: the addresses of a dozen monitors.
pub const POOL_FIELD_MAX: usize = 1024;

/// What such a value is, as a regular expression of ECMA 262: neither an option of a program nor with control characters.
pub const POOL_FIELD_PATTERN: &str = r"^[^\x00-\x1f\x7f-\x9f-][^\x00-\x1f\x7f-\x9f]*$";

/// What the Ceph user is.
pub const POOL_USER_PATTERN: &str = r"^client[.][^\x00-\x1f\x7f-\x9f]*$";

/// A pool of a Ceph cluster, and how a host gets to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RbdPool {
    /// The monitors' addresses, as in `mon_host` of `ceph.conf`.
    pub monitors: String,
    /// The Ceph user, `client.NAME`.
    pub user: String,
    /// The file on the host with the user's key: an absolute path. None where the server holds the key.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keyring: Option<PathBuf>,
    /// The pool of names and headers and, without `data_pool`, of data: a replicated one.
    pub pool: String,
    /// The namespace in the pool; none for the pool's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pool of data: it may be erasure-coded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_pool: Option<String>,
    /// How data goes over the network.
    #[serde(default)]
    pub messenger: Messenger,
    /// When the datastore is added: makes the pools that are not there, so that they are like this. Not kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create: Option<NewPools>,
    /// When monitors, user, messenger or keyring were changed last; none where they are as they were added. The server sets it. Of two ways
    /// to a pool hosts take the later one, so that a VM that was told an earlier one finds its disks. Agents without the feature
    /// `pool-ways` do not know it.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<Timestamp>,
}

/// How data goes between a host and a Ceph cluster (`ms_client_mode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Messenger {
    /// Encrypted and authenticated.
    #[default]
    Secure,
    /// With checksums, in the clear: encrypted disks are ciphertext anyway, names and sizes show.
    Crc,
}

impl Messenger {
    /// As `ms_client_mode` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Secure => "secure",
            Self::Crc => "crc",
        }
    }
}

impl FromStr for Messenger {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Secure, Self::Crc]
            .into_iter()
            .find(|mode| mode.name() == text)
            .ok_or_else(|| "it is 'secure' or 'crc'".to_owned())
    }
}

/// How copies of data go between the OSDs of a cluster (`ms_cluster_mode`), as its users are told: by what the monitors keep for all. What
/// they keep for OSDs alone, and what is in files of the OSDs' hosts, which counts before it, users are not told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum BetweenOsds {
    /// Encrypted and authenticated: what is set for all allows nothing else.
    Secure,
    /// Nothing is set for all, or a mode in the clear is allowed, as Ceph does by itself.
    MayBeClear,
}

impl fmt::Display for BetweenOsds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // No more than users are told: an OSD may have another value.
        let told = match self {
            Self::Secure => "are to be encrypted: ms_cluster_mode is 'secure' for all",
            Self::MayBeClear => "may be in the clear: ms_cluster_mode is not 'secure' for all",
        };
        write!(
            f,
            "copies between them {told} ('global' of the monitors' configuration). What an OSD has in force, ceph config show osd.0 ms_cluster_mode says"
        )
    }
}

/// Says which way to a cluster a mount uses: 16 hexadecimal digits that follow from monitors, user and messenger. It is compared with
/// another one of the same datastore, and nobody gains by making two alike: FNV-1a is enough.
#[must_use]
pub fn way_of(monitors: &str, user: &str, messenger: Messenger) -> String {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    // None of them has a control character.
    let text = format!("{monitors}\0{user}\0{}", messenger.name());
    let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
    format!("{:016x}", text.bytes().fold(BASIS, hash))
}

impl RbdPool {
    /// Which way to the cluster this is.
    #[must_use]
    pub fn way(&self) -> String {
        way_of(&self.monitors, &self.user, self.messenger)
    }

    /// Whether it is the same pool, whatever way goes there.
    #[must_use]
    pub fn is_same_pool(&self, other: &Self) -> bool {
        self.pool == other.pool
            && self.namespace == other.namespace
            && self.data_pool == other.data_pool
    }

    /// The command that lets the pool's user do what a datastore needs, and this at the monitors. It replaces all that the user may do.
    #[must_use]
    pub fn caps_command(&self, also: Option<&str>) -> String {
        let namespace = self.namespace.as_ref();
        let namespace = namespace.map_or_else(String::new, |it| format!(" namespace={it}"));
        let pools = [Some(&self.pool), self.data_pool.as_ref()].into_iter().flatten();
        let osd: Vec<_> = pools.map(|name| format!("profile rbd pool={name}{namespace}")).collect();
        let also = also.map_or_else(String::new, |also| format!(", {also}"));
        format!("ceph auth caps {} mon 'profile rbd{also}' osd '{}'", self.user, osd.join(", "))
    }

    /// Checks what can be checked without the cluster.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let fields = [
            ("monitors", Some(&self.monitors)),
            ("user", Some(&self.user)),
            ("pool", Some(&self.pool)),
            ("namespace", self.namespace.as_ref()),
            ("data_pool", self.data_pool.as_ref()),
        ];
        for (field, value) in fields {
            let Some(value) = value else { continue };
            if value.is_empty() || value.len() > POOL_FIELD_MAX {
                return Err((field, format!("must have 1 to {POOL_FIELD_MAX} bytes")));
            }
            // They are arguments of a program.
            if value.starts_with('-') || value.chars().any(char::is_control) {
                return Err((field, "must not begin with '-' or have control characters".into()));
            }
        }
        if !self.user.starts_with("client.") {
            return Err(("user", "must begin with 'client.', as 'client.vmseal'".to_owned()));
        }
        if let Some(create) = self.create {
            create.check()?;
        }
        if self.keyring.as_ref().is_some_and(|keyring| !keyring.is_absolute()) {
            return Err(("keyring", "must be an absolute path on the host".to_owned()));
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A pool with nothing behind it.
    pub(crate) fn pool() -> RbdPool {
        RbdPool {
            monitors: "v2:10.0.0.1:3300".to_owned(),
            user: "client.vmseal".to_owned(),
            keyring: Some("/etc/ceph/keyring".into()),
            pool: "vms".to_owned(),
            namespace: None,
            data_pool: None,
            messenger: Messenger::Crc,
            create: None,
            changed: None,
        }
    }

    #[test]
    fn each_part_of_a_way_makes_another_one_and_the_keyring_none() {
        let ways = [
            pool(),
            RbdPool { monitors: "v2:10.0.0.2:3300".to_owned(), ..pool() },
            RbdPool { user: "client.other".to_owned(), ..pool() },
            RbdPool { messenger: Messenger::Secure, ..pool() },
        ];
        let told: std::collections::BTreeSet<_> = ways.iter().map(RbdPool::way).collect();
        assert_eq!(told.len(), ways.len(), "{told:?}");
        assert!(told.iter().all(|way| way.len() == 16), "{told:?}");
        assert_eq!(RbdPool { keyring: None, ..pool() }.way(), pool().way());
    }
}
