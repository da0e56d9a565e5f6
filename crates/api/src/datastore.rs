//! Datastores: their places, their condition and their contents.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::fencing::Fencing;
use crate::id::{DatastoreId, DiskId, VmId};
use crate::osd_encryption::{OsdEncryption, StatedOsds};
use crate::passphrase::SealedPassphrase;
pub use crate::rbd_pool::{
    BetweenOsds, Messenger, POOL_FIELD_MAX, POOL_FIELD_PATTERN, POOL_USER_PATTERN, RbdPool, way_of,
};
use crate::redundancy::PoolFacts;

/// The longest path of a datastore on a host, in bytes: what Linux takes at once, minus the paths below it.
pub const LOCATION_PATH_MAX: usize = 3072;

/// The most images that a scan lists: enough for the disks of 1024 VMs.
pub const SCAN_IMAGES_MAX: usize = 10_000;

/// The most directory entries that a scan reads, so that a foreign tree does not delay it for long.
pub const SCAN_ENTRIES_MAX: u64 = 200_000;

/// A datastore, as an agent needs to know it.
///
/// Two are the same where their datastore and their place are: how the host gets to the cluster may change while VMs run and tasks are at
/// work ([`RbdPool::changed`]), and they go on with the datastore that they were told of.
#[derive(Clone, Debug, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatastoreSpec {
    /// The datastore's id; written into it at the first use, so that another (or an unmounted) one is
    /// noticed.
    pub datastore: DatastoreId,
    /// Where it is.
    pub location: DatastoreLocation,
}

impl PartialEq for DatastoreSpec {
    fn eq(&self, other: &Self) -> bool {
        let is_same_place = match (&self.location, &other.location) {
            (
                DatastoreLocation::Rbd { path, pool },
                DatastoreLocation::Rbd { path: other_path, pool: other_pool },
            ) => path == other_path && pool.is_same_pool(other_pool),
            (one, other) => one == other,
        };
        self.datastore == other.datastore && is_same_place
    }
}

/// Where a datastore is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum DatastoreLocation {
    /// A directory.
    Dir {
        /// Its absolute path on the host.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        path: PathBuf,
    },
    /// A pool of a Ceph cluster, which the host mounts: disks are RBD images.
    Rbd {
        /// Where the host mounts it: an absolute path.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        path: PathBuf,
        /// The pool.
        pool: Box<RbdPool>,
    },
}

impl DatastoreLocation {
    /// The directory on the host.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Dir { path } | Self::Rbd { path, .. } => path,
        }
    }

    /// The same without what is of interest only when it is added.
    #[must_use]
    pub fn kept(self) -> Self {
        match self {
            Self::Rbd { path, pool } => {
                Self::Rbd { path, pool: Box::new(RbdPool { create: None, ..*pool }) }
            }
            directory @ Self::Dir { .. } => directory,
        }
    }

    /// The same as it is asked for: without what only the server sets.
    #[must_use]
    pub fn asked(self) -> Self {
        match self {
            Self::Rbd { path, pool } => {
                Self::Rbd { path, pool: Box::new(RbdPool { changed: None, ..*pool }) }
            }
            directory @ Self::Dir { .. } => directory,
        }
    }

    /// The pool that is mounted there, if it is one.
    #[must_use]
    pub fn pool(&self) -> Option<&RbdPool> {
        match self {
            Self::Dir { .. } => None,
            Self::Rbd { pool, .. } => Some(pool),
        }
    }
}

/// How a pool is mounted, as what serves the mount says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountFacts {
    /// By which way ([`way_of`]).
    pub way: String,
    /// How its data goes over the network.
    pub messenger: Messenger,
    /// The cluster, by its fsid.
    pub cluster: String,
    /// How copies of data went between its OSDs when the pool was mounted. None of a `vmseal-rbd` of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_osds: Option<BetweenOsds>,
}

/// Gives the server another key of a pool's user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetDatastoreKey {
    /// The key, base64 as `ceph auth get-key` prints it, sealed for `key of datastore NAME`, the name as in the request's path.
    pub key: SealedPassphrase,
    /// Keep it untried: without this a host of the datastore that is connected tries it, and a key that the cluster refuses, or that no host
    /// can try, is not kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// Changes a datastore: what is stated of the OSDs of a pool's cluster, how hosts get to the pool, and the key of its user that the server
/// holds. What is not given stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetDatastore {
    /// What is stated of the OSDs of a pool's cluster: whether they are encrypted, or that the cluster is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osd_encryption: Option<StatedOsds>,
    /// The monitors' addresses, as in `mon_host` of `ceph.conf`. They must be of the same cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitors: Option<String>,
    /// The Ceph user, `client.NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// How data goes over the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messenger: Option<Messenger>,
    /// The file on each host with the user's key, an absolute path. The server forgets the key that it holds.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keyring: Option<PathBuf>,
    /// The user's key, sealed for `key of datastore NAME`, the name as in the request's path: the server holds it from then on, also where hosts
    /// had it in files. Not together with `keyring`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<SealedPassphrase>,
}

/// A datastore on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DatastoreHost {
    /// The host's name.
    pub host: String,
    /// Where it is on that host.
    #[serde(deserialize_with = "crate::shown_location::location")]
    pub location: DatastoreLocation,
    /// The key that the host's mount of a pool uses: one that the server gave, or that of the keyring on the host, as that was when the pool
    /// was mounted. None where the host has not said it: its agent or what serves the pool there is of an earlier version, or it was not
    /// asked yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mounted_key: Option<MountedKey>,
    /// How the host's mount of a pool gets to the cluster. None where the host has not said it: its agent or what serves the pool there is
    /// of an earlier version, or it was not asked yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mounted: Option<MountedWay>,
}

/// How a mount of a pool gets to the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MountedWay {
    /// How its data goes over the network.
    pub messenger: Messenger,
    /// The cluster, by its fsid.
    pub cluster: String,
    /// Whether monitors, user and messenger are those of the datastore now. Where they are not, the host uses them from when it mounts the
    /// pool anew.
    pub current: bool,
    /// How copies of data went between the cluster's OSDs when the pool was mounted, as its users are told. None of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_osds: Option<BetweenOsds>,
}

/// The key that a mount of a pool uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MountedKey {
    /// Which one it is: eight hexadecimal digits that follow from the key, and from which it does not follow.
    pub fingerprint: String,
    /// Whether it is the one that the server holds now. Of a keyring on the host it never is: the server does not know what is in that.
    pub current: bool,
}

/// A step on the way to a datastore that two hosts share: whether both see the same files, and each sees the other's
/// locks.
///
/// ```text
/// a host that has it                            the host that is to have it
///   hold: writes `check` to a file, locks it
///                                                 try: finds that file, and does not get the lock
///   release: removes the file
///   mark: marks the datastore as shared
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sharing {
    /// The datastore, at its place on the host that is asked.
    pub datastore: DatastoreSpec,
    /// What tells this check from others.
    pub check: Uuid,
    /// What to do.
    pub step: SharingStep,
}

/// A step of [`Sharing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SharingStep {
    /// Hold a lock that the other host must see. It is given up after a minute.
    Hold,
    /// Try to get that lock, which must fail.
    Try,
    /// Give the lock up.
    Release,
    /// Mark the datastore as shared, for good: from when this returns, this host removes nothing of VMs that are not
    /// registered with it.
    Mark,
}

/// Room in a datastore, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DatastoreUsage {
    /// In all.
    pub capacity: u64,
    /// Free for the agent.
    pub free: u64,
}

/// The highest limit, of either kind: more than any datastore gives.
pub const LIMIT_MAX: u64 = 1 << 40;

/// The condition of a datastore, as its host sees it. Asking changes nothing on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum DatastoreCondition {
    /// It is there, and it is the right one.
    Available {
        /// Its room.
        usage: DatastoreUsage,
        /// How the cluster keeps what is stored there: none of a directory, or of a host of an earlier version.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pools: Vec<PoolFacts>,
        /// The fingerprint of the key that the mount of a pool uses, from the server or a keyring: none of a directory, or of a host of an
        /// earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mounted_key: Option<String>,
        /// Whether the OSDs of the cluster are encrypted: none of a directory, or of a host of an earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        osds: Option<OsdEncryption>,
        /// How the mount of a pool gets to the cluster: none of a directory, or of a host of an earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mount: Option<MountFacts>,
        /// Whether the pool's user may have the cluster take nothing more from other hosts: none of a directory, or where the host, or the
        /// `vmseal-rbd` that serves the pool, is of an earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fencing: Option<Fencing>,
    },
    /// Something else is at its place: another datastore, or a directory without a mark.
    WrongMark {
        /// What is there, and what to do.
        detail: String,
    },
    /// It is not there, or does not answer.
    Unavailable {
        /// What happened, and what to do.
        detail: String,
    },
}

/// The contents of a datastore, as a host found them. Nothing of it is authenticated: a writer to the
/// datastore can fake everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatastoreContents {
    /// The disk images, in the order of their paths.
    pub images: Vec<FoundImage>,
    /// Files that are not disk images, pipes, links and devices included.
    pub others: u64,
    /// Directories that are other datastores, by their paths within this one: not looked into.
    #[serde(default)]
    pub datastores: Vec<String>,
    /// Why the list is incomplete; none when it is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
}

/// A disk image as a host finds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FoundImage {
    /// Its path within the datastore.
    pub path: String,
    /// Which disk of which VM its name says it is; none for a name that is not ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<NamedImage>,
    /// Its length, in bytes.
    pub size: u64,
    /// What of it takes room on the datastore, in bytes.
    pub allocated: u64,
    /// When it was last written to.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified: Option<Timestamp>,
    /// What its content looks like.
    pub content: ImageContent,
    /// Until when a half-made disk is kept for its interrupted import to go on; none where it is not.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_until: Option<Timestamp>,
    /// What the image says of its keys to Ceph's tools, in its metadata, where its header says something else; none where the two agree,
    /// or there is nothing to compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misnoted: Option<String>,
}

/// What an image's name says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NamedImage {
    /// The VM that its directory is called by.
    pub vm: VmId,
    /// The disk that it is called by.
    pub disk: DiskId,
    /// Whether its name says that it is still being made.
    pub half_made: bool,
    /// Whether its name says that it is a replica of the disk, which is elsewhere.
    #[serde(default)]
    pub replica: bool,
}

/// What an image's content looks like. What it claims is not authenticated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum ImageContent {
    /// No LUKS header: a raw image, or nothing yet.
    Raw,
    /// A LUKS2 header with tokens of vmseal.
    Vmseal {
        /// What each token says.
        claims: Vec<Claim>,
    },
    /// A LUKS header that is not vmseal's, or a damaged one.
    ForeignLuks {
        /// What it lacks of ours.
        detail: String,
    },
    /// It cannot be read.
    Unreadable {
        /// Why.
        detail: String,
    },
}

/// What a token in an image's header says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Claim {
    /// The VM.
    pub vm: VmId,
    /// The disk.
    pub disk: DiskId,
    /// The key provider.
    pub provider: crate::id::ProviderId,
    /// The key's id there.
    pub key_id: String,
    /// What the disk is for.
    #[serde(default, skip_serializing_if = "HeaderRole::is_data")]
    pub role: HeaderRole,
}

/// What a disk is for, as its header says it. What an earlier version of vmseal made says nothing, and counts as data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum HeaderRole {
    /// It is the guest's.
    #[default]
    Data,
    /// It has the documents that cloud-init reads.
    CloudInit,
    /// It has the variables of a UEFI firmware.
    UefiVariables,
    /// It has the variables of a UEFI firmware with Secure Boot.
    SecureBootVariables,
    /// It has the key of what a TPM keeps.
    Tpm,
}

impl HeaderRole {
    /// Whether it is the guest's.
    #[must_use]
    pub fn is_data(&self) -> bool {
        *self == Self::Data
    }
}

/// What is on a datastore, compared with the inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DatastoreScan {
    /// The datastore.
    pub datastore: String,
    /// The images, in the order of their paths, and then the disks that are missing.
    pub images: Vec<ScannedImage>,
    /// Files that are no disk images.
    pub others: u64,
    /// Directories that are other datastores, by their paths within this one: not looked into.
    #[serde(default)]
    pub datastores: Vec<String>,
    /// Why the list is not whole, and so nothing is called missing; none when it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
}

/// An image, or the lack of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScannedImage {
    /// How it stands to the inventory.
    pub status: ImageStatus,
    /// The VM that it belongs to, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The disk of that VM, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// What was found; none for a disk that is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<FoundImage>,
    /// What an operator should know.
    pub detail: String,
}

/// How an image stands to the inventory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ImageStatus {
    /// The disk of a VM.
    InUse,
    /// The disk of a VM, or its replica, whose file is shorter than the disk.
    Truncated,
    /// No VM of the inventory has it.
    Orphan,
    /// A disk that is being made, or debris of one.
    HalfMade,
    /// An image that vmseal did not make.
    Foreign,
    /// The inventory has the disk, and the datastore does not.
    Missing,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rbd_pool::tests::pool;

    #[test]
    fn a_datastore_is_the_same_by_whatever_way_a_host_gets_to_it() {
        let datastore = DatastoreId::new();
        let spec = |path: &str, pool: RbdPool| {
            let location = DatastoreLocation::Rbd { path: path.into(), pool: Box::new(pool) };
            DatastoreSpec { datastore, location }
        };
        let one = spec("/ceph", pool());
        let monitors = "v2:10.0.0.2:3300".to_owned();
        let changed = Some(Timestamp::UNIX_EPOCH);
        assert_eq!(one, spec("/ceph", RbdPool { monitors, changed, ..pool() }));
        assert_ne!(one, spec("/other", pool()));
        assert_ne!(one, spec("/ceph", RbdPool { pool: "other".to_owned(), ..pool() }));
        assert_ne!(one, DatastoreSpec { datastore: DatastoreId::new(), ..one.clone() });
        let directory = DatastoreLocation::Dir { path: "/ceph".into() };
        assert_ne!(one, DatastoreSpec { datastore, location: directory });
    }
}
