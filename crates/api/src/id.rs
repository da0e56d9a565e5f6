//! Ids and names. A resource has a UUID for life and a name that people choose; processes use ids, people
//! type names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The longest name a person may give a resource, in bytes: as long as a label of DNS, as names end up in
/// file names, certificates and URLs.
pub const NAME_MAX: usize = 63;

/// What [`check_name`] accepts within [`NAME_MAX`], as a regular expression of ECMA 262; but no id.
pub const NAME_PATTERN: &str = "^[A-Za-z0-9](([.]?[A-Za-z0-9_-])*[.]?[A-Za-z0-9])?$";

/// What of that has the form of an id, and so is no name.
pub const ID_PATTERN: &str =
    "^([0-9A-Fa-f]{32}|[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12})$";

macro_rules! identity {
    ($(#[$doc:meta] $name:ident),* $(,)?) => {$(
        #[$doc]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A new identity; time-ordered (UUID version 7), so that listings are in order of creation.
            #[must_use]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Uuid::parse_str(text).map(Self)
            }
        }
    )*};
}

identity! {
    /// A virtual machine.
    VmId,
    /// A virtual disk; never reused, not even for the copy of a disk.
    DiskId,
    /// A network card of a VM.
    NicId,
    /// A machine with an agent.
    HostId,
    /// A place where disks are kept.
    DatastoreId,
    /// A key provider.
    ProviderId,
    /// A storage policy.
    PolicyId,
    /// A snapshot of a VM.
    SnapshotId,
    /// A core dump of a VM.
    DumpId,
    /// A backup of a VM.
    BackupId,
    /// Another control plane.
    RemoteId,
    /// An attempt to move a running VM to another host.
    MigrationId,
    /// A task: durable work of the server.
    TaskId,
    /// One life of an agent process: changes when the agent restarts and its keys are gone.
    Incarnation,
}

/// Why a text cannot be the name of a resource.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NameError {
    /// Nothing was given.
    #[error("a name is needed")]
    Empty,
    /// Longer than [`NAME_MAX`].
    #[error("the name is {0} bytes long; at most {NAME_MAX} are allowed")]
    TooLong(usize),
    /// Something other than letters, digits, and inner hyphens, dots and underscores.
    #[error(
        "the name may hold only letters a-z and A-Z, digits, hyphens, dots and underscores, and must begin and end with a letter or digit"
    )]
    Characters,
    /// Two dots in a row.
    #[error("the name may not hold two dots in a row")]
    Dots,
    /// A name that reads as an id would make `vm show <id>` ambiguous.
    #[error("the name has the form of an id; choose another one")]
    LooksLikeId,
}

/// Checks a name that a person chose for a resource.
///
/// # Errors
/// [`NameError`], which says what is allowed.
pub fn check_name(name: &str) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > NAME_MAX {
        return Err(NameError::TooLong(name.len()));
    }
    let end = |c: char| c.is_ascii_alphanumeric();
    if !name.chars().all(|c| end(c) || matches!(c, '-' | '.' | '_'))
        || !name.starts_with(end)
        || !name.ends_with(end)
    {
        return Err(NameError::Characters);
    }
    // A name may become a part of a path: two dots beside each other are never needed, and look like one.
    if name.contains("..") {
        return Err(NameError::Dots);
    }
    if Uuid::parse_str(name).is_ok() {
        return Err(NameError::LooksLikeId);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_people_give_are_accepted_and_dangerous_ones_refused() {
        for good in ["web1", "a", "DB-01", "x--y", "web.example.org", "db_1", "a._-b"] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        assert_eq!(check_name(""), Err(NameError::Empty));
        assert_eq!(check_name(&"a".repeat(64)), Err(NameError::TooLong(64)));
        for bad in ["../x", "a b", "-a", "a-", "a/b", "ä", "a\0", ".a", "a.", "_a", "a_", ".", ".."]
        {
            assert_eq!(check_name(bad), Err(NameError::Characters), "{bad:?}");
        }
        assert_eq!(check_name("a..b"), Err(NameError::Dots));
        let id = VmId::new().to_string();
        assert_eq!(check_name(&id), Err(NameError::LooksLikeId));
    }

    #[test]
    fn ids_are_time_ordered_and_survive_text() {
        let (first, second) = (VmId::new(), VmId::new());
        assert!(first < second);
        assert_eq!(first.to_string().parse::<VmId>(), Ok(first));
    }
}
