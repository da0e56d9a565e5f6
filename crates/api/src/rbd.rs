//! The contract between `vmseal-rbd`, which serves the files of a pool of Ceph over FUSE, and those who use its files.

use serde::{Deserialize, Serialize};

use crate::datastore::{BetweenOsds, Messenger, MountFacts};

/// An extended attribute of the root directory: how the cluster keeps what is stored there, a JSON list of
/// [`crate::redundancy::PoolFacts`], that of names and headers first, and that of data after it where it is another one.
pub const POOLS_ATTRIBUTE: &str = "user.vmseal.pools";

/// The longest value of [`POOLS_ATTRIBUTE`], in bytes.
pub const POOLS_MAX: usize = 4096;

/// An extended attribute of the root directory: whether the OSDs of the cluster are encrypted, a [`crate::osd_encryption::OsdEncryption`] in
/// JSON. A `vmseal-rbd` of an earlier version has none.
pub const OSDS_ATTRIBUTE: &str = "user.vmseal.osd-encryption";

/// The longest value of [`OSDS_ATTRIBUTE`], in bytes.
pub const OSDS_MAX: usize = 256;

/// An extended attribute of the root directory: who serves it, and with which key; a [`Mounted`] in JSON. A `vmseal-rbd` of an earlier
/// version has none.
pub const MOUNTED_ATTRIBUTE: &str = "user.vmseal.mounted";

/// The longest value of [`MOUNTED_ATTRIBUTE`], in bytes.
pub const MOUNTED_MAX: usize = 512;

/// Who serves a mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// The process.
    pub process: u32,
    /// The fingerprint of the key that it has connected with: it was given, or is of a keyring. None where a `vmseal-rbd` of an earlier version
    /// reads a keyring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The socket at which filters connect that are to read and write images without FUSE; none where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    /// How data goes over the network, as the library has it in force. None of a `vmseal-rbd` of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messenger: Option<Messenger>,
    /// By which way it has connected ([`way_of`](crate::datastore::way_of)). None of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub way: Option<String>,
    /// The cluster, by its fsid. None of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// How copies of data went between its OSDs when it connected. None of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between_osds: Option<BetweenOsds>,
}

impl Mounted {
    /// How it gets to the cluster, where it says all of that.
    #[must_use]
    pub fn facts(&self) -> Option<MountFacts> {
        let (way, cluster) = (self.way.clone()?, self.cluster.clone()?);
        let between_osds = self.between_osds;
        Some(MountFacts { way, messenger: self.messenger?, cluster, between_osds })
    }
}

/// An extended attribute of directories: how images that are made there from now on are cut into objects, a
/// [`crate::image_layout::ImageLayout`] in JSON.
pub const IMAGE_LAYOUT_ATTRIBUTE: &str = "user.vmseal.image-layout";

/// An extended attribute of directories that is set, with any value, and not kept: all below the directory is taken from other hosts. Processes
/// that have the exclusive lock of an image there lose it and are put on the cluster's blocklist, so that nothing of theirs lands any more.
pub const FENCE_ATTRIBUTE: &str = "user.vmseal.fence";

/// An extended attribute of the root directory: whether the user may do that, a [`crate::fencing::Fencing`] in JSON. A `vmseal-rbd` of an
/// earlier version has none.
pub const FENCING_ATTRIBUTE: &str = "user.vmseal.fencing";

/// The longest value of [`FENCING_ATTRIBUTE`], in bytes.
pub const FENCING_MAX: usize = 64;

/// Extended attributes of files that are images: metadata of the image, without `user.` in front, which `rbd image-meta list` shows. They
/// tell an operator who has nothing but Ceph's tools what the image is, and its header is what counts. `vmseal-rbd` takes no others.
/// The last one is written last: where it is right, the others are.
pub const NOTE_ATTRIBUTES: [&str; 4] =
    [VM_ATTRIBUTE, DISK_ATTRIBUTE, FORMAT_ATTRIBUTE, KEK_ATTRIBUTE];

/// The VM's id.
pub const VM_ATTRIBUTE: &str = "user.vmseal.vm";

/// The disk's id.
pub const DISK_ATTRIBUTE: &str = "user.vmseal.disk";

/// What the image is: `luks2` or `raw`.
pub const FORMAT_ATTRIBUTE: &str = "user.vmseal.format";

/// The keys that open it, `PROVIDER/KEY`, the provider's id and the key's there; with a comma between two. `none` of a disk in the clear.
pub const KEK_ATTRIBUTE: &str = "user.vmseal.kek";

/// The longest value of one of [`NOTE_ATTRIBUTES`], in bytes: two keys with long ids.
pub const NOTE_MAX: usize = 1024;

/// An extended attribute of files that are images, to be read: the state of the image, a text that is another one after anybody has had it
/// open to be written. Where it is open here to be written, it is the state in which it was found, as long as nothing is written; after that
/// it is `EBUSY`, as it is while another host writes, and where another program had it open to be written at that moment, too. `ENODATA` of
/// an image that only earlier versions have written.
pub const STATE_ATTRIBUTE: &str = "user.vmseal.state";

/// The longest value of [`STATE_ATTRIBUTE`], in bytes.
pub const STATE_MAX: usize = 256;

/// An `ioctl(2)` of its files: answers [`WHOLE`], four bytes. `_IOR('v', 0x52, u32)` (linux/ioctl.h).
pub const ASK_WHOLE: u32 = 2 << 30 | 4 << 16 | (b'v' as u32) << 8 | 0x52;

/// An `ioctl(2)` of its files: answers a ticket, [`TICKET_BYTES`] long, with which who has the file open attaches queues to it
/// ([`Mounted::channel`]). It is good for as long as the file is open. `_IOR('v', 0x53, [u8; 16])` (linux/ioctl.h).
pub const ASK_TICKET: u32 = 2 << 30 | (TICKET_BYTES as u32) << 16 | (b'v' as u32) << 8 | 0x53;

/// The bytes of a ticket.
pub const TICKET_BYTES: usize = 16;

/// Reads and writes are answered whole or with an error, never in part. And when the process that serves the file dies, nothing that it
/// had under way is done any more once a successor serves it: the requests can be made again.
pub const WHOLE: u32 = 1;
