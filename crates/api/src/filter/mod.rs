//! The contract between the agent and a `vmseal-filter` process.
//!
//! The agent starts one filter per VM with a [`FilterConfig`] and open descriptors. The filter needs no
//! permission to open any path, and reads each key once from an inherited `memfd_secret`. After that the two
//! talk over the control socket: one JSON object per line, each [`ControlRequest`] answered by a
//! [`ControlReply`], in order. A filter outlives its agent; the next agent connects to the same socket.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::id::{DiskId, VmId};
use crate::pace::CopyPace;
use crate::size::Size;
use crate::transfer::ImageFormat;

mod chunks;
mod control;
mod replicate;

pub use chunks::*;
pub use control::*;
pub use replicate::*;

/// The version of this contract. A filter refuses a configuration of another version.
pub const VERSION: u32 = 1;

/// The longest line on the control socket, in bytes; a status of [`DISKS_MAX`] disks fits well within.
pub const LINE_MAX: usize = 256 * 1024;

/// How long drained disks wait to be resumed: a third of the time that Linux gives a request.
pub const DRAINED_MAX: Duration = Duration::from_secs(10);

/// The most descriptors that come with one request: those of new stacks for all disks, each with all that it can have.
pub const DESCRIPTORS_MAX: usize = DISKS_MAX * (BACKING_MAX + 2);

/// The most disks one filter serves: virtio's practical limit of one PCI bus.
pub const DISKS_MAX: usize = 28;

/// The most request queues of a disk; QEMU's default is one per vCPU, and more than 16 gain nothing.
pub const QUEUES_MAX: u16 = 16;

/// How many connections of one NBD front end are served at a time: the number that nbdcopy opens by default.
/// Others wait until one ends.
pub const NBD_CONNECTIONS: u16 = 4;

/// The part of a disk that one bit of a dirty bitmap stands for, in bytes, unless that exceeds
/// [`BITMAP_BYTES_MAX`]: smaller ones would save a backup little and cost more requests.
pub const BITMAP_GRANULE: u64 = 64 * 1024;

/// The most dirty bitmaps of a disk: one that is being read, one that was started after it, and as many for
/// another user of backups.
pub const BITMAPS_MAX: usize = 4;

/// The most memory of a dirty bitmap, in bytes: enough for 512 GiB. Those of larger disks have larger granules.
pub const BITMAP_BYTES_MAX: usize = 1024 * 1024;

/// The most memory of all dirty bitmaps of a filter, in bytes: what is left of its 32 MiB.
pub const BITMAPS_BYTES_MAX: usize = 4 * BITMAP_BYTES_MAX;

/// The longest name of a dirty bitmap, in bytes.
pub const BITMAP_NAME_MAX: usize = 64;

/// The most filters of a disk.
pub const CHAIN_MAX: usize = 8;

/// The unit in which an encrypted disk is encrypted, in bytes.
pub const CRYPT_SECTOR: u32 = 4096;

/// The length of a disk's device id (virtio-blk `VIRTIO_BLK_T_GET_ID`), in bytes.
pub const SERIAL_MAX: usize = 20;

/// An open descriptor, or a path to open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handle {
    /// An inherited descriptor: what the agent passes.
    Fd(i32),
    /// A path: for starting a filter by hand.
    Path(PathBuf),
}

/// The configuration that a filter process gets at its start. It contains no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilterConfig {
    /// [`VERSION`].
    pub version: u32,
    /// The VM of these disks; named in every log line.
    pub vm: VmId,
    /// The control socket: a listening unix stream socket, or the path to make one at (mode 0600).
    pub control: Handle,
    /// The only user that may connect to the control socket, by SO_PEERCRED; none means the filter's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control_uid: Option<u32>,
    /// The id of the request that it is started for, for the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Its log levels; none means those of `RUST_LOG`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_levels: Option<String>,
    /// The disks, at most [`DISKS_MAX`].
    pub disks: Vec<DiskConfig>,
}

/// One disk: front end → filters → backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Which disk this is.
    pub disk: DiskId,
    /// The size that the guest sees, in bytes; a multiple of [`CRYPT_SECTOR`].
    pub size: u64,
    /// The device id that the guest sees; at most [`SERIAL_MAX`] bytes of ASCII.
    pub serial: String,
    /// Whether everything that changes the disk is refused.
    #[serde(default)]
    pub read_only: bool,
    /// The filters, from the guest downwards.
    pub chain: Vec<FilterSpec>,
    /// Where the data is stored.
    pub backend: BackendSpec,
    /// The front end that serves the guest; none for a filter that only runs an [`ImportSpec`] or
    /// [`ExportSpec`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub front_end: Option<FrontEndSpec>,
    /// Serves the disk to others at the same time, read-only, for backups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<BesideSpec>,
    /// The file that keeps its dirty bitmaps from one filter to the next ([`crate::bitmap::file`]), empty at first; none where they
    /// end with this filter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmaps: Option<Handle>,
    /// An image to write through the chain once, before anything else happens to the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub import: Option<ImportSpec>,
    /// A file to write the whole disk to once. The disk is read-only then, and is neither served nor filled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<ExportSpec>,
    /// What the image, a layer, is written to once. The disk is read-only then, has no filter but encryption, and is neither
    /// served, filled nor exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<MergeSpec>,
    /// How the disk is to be in the file that it has. It has no filter but encryption then, and nothing else is done with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub convert: Option<ConvertSpec>,
}

/// A layer of the chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FilterSpec {
    /// AES-256-XTS as dm-crypt's `aes-xts-plain64` does it with 4096-byte sectors: the tweak counts
    /// 512-byte units from the start of the data segment.
    Crypt {
        /// The DEK: 64 bytes (two AES-256 keys, data key first) in a `memfd_secret`.
        key: Handle,
        /// What a sector of zeroes on the datastore means.
        holes: Holes,
    },
    /// Reads go to the guest's memory when they are decrypted, and not before: above encryption, for a disk whose DEK others
    /// have as well.
    Bounce {},
    /// Has requests fail while storage does not answer. Below limits alone, and above all else.
    Stall(StallSpec),
    /// Limits requests and bytes a second, of all queues together.
    Limit(LimitSpec),
    /// Delays requests: for tests and drills.
    Delay(DelaySpec),
    /// Makes requests fail, tear or get lost: for tests and drills.
    Fault(FaultSpec),
    /// Caches reads in memory. Below encryption, where there is any, so that it holds ciphertext.
    Cache(CacheSpec),
    /// Copies the disk to a second place, with a lag. Below encryption, where there is any, so that it gets
    /// ciphertext.
    Replicate(Box<ReplicateSpec>),
    /// Copies the disk to another stack while it is used, until it pivots to that stack ([`ControlRequest::Pivot`]).
    Mirror(Box<MirrorSpec>),
}

/// Filters over a place where data is stored: what a disk is, and a leg that a filter of it owns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackSpec {
    /// The filters, from the guest downwards.
    pub chain: Vec<FilterSpec>,
    /// Where the data is stored.
    pub backend: BackendSpec,
}

/// A copy that the disk is to pivot to. What stands below this filter is copied, decrypted; what stands above
/// it stays above the copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MirrorSpec {
    /// What the disk is copied to: storage of the disk's size, which nobody else uses. A new one reads as zeroes.
    pub to: StackSpec,
    /// The map of what the copy lacks, and whether the disk has pivoted: a regular file beside the disk's own image; open
    /// for reading and writing, its lock held. Empty for a new copy.
    pub map: Handle,
    /// How fast it is copied; changed while it is by [`ControlRequest::Pace`].
    #[serde(default)]
    pub pace: CopyPace,
    /// Whether the disk and its copy are both images of QEMU's format, and what is below the one holds what is below the
    /// other. Then nothing is copied but what the disk's own image has. Of a copy for another host, that host knows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub same_below: bool,
    /// Whether the disk stays where it is: the copy is for another host, and the disk never pivots to it. It ends with
    /// [`ControlRequest::Replace`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stays: bool,
}

/// How far the copy of a mirrored disk is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorStatus {
    /// Whether the disk has pivoted: it is served from the copy, and its former place is no longer used.
    pub pivoted: bool,
    /// How much the copy may lack, in bytes, in whole chunks.
    pub dirty_bytes: u64,
    /// How fast it is copied. A filter of an earlier vmseal does not say, and knows no [`ControlRequest::Pace`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<CopyPace>,
    /// Bytes copied since the process started; holes, which cost nothing, do not count.
    #[serde(default)]
    pub copied_bytes: u64,
    /// What keeps the disk from being copied, or its map from being kept, at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// The least memory of a cache, in bytes: less is not worth the lookups.
pub const CACHE_BYTES_MIN: u64 = 1 << 20;

/// The most memory of all caches of one filter, in bytes: it is locked memory, which the host cannot
/// take back.
pub const CACHE_BYTES_MAX: u64 = 256 << 20;

/// The size of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheSpec {
    /// Memory for data, in bytes; a multiple of [`CACHE_BYTES_MIN`], and at most [`CACHE_BYTES_MAX`] for
    /// all disks together.
    pub bytes: u64,
}

/// Checks the sizes of the caches of a VM's disks, in bytes: each a multiple of [`CACHE_BYTES_MIN`], all
/// together at most [`CACHE_BYTES_MAX`].
///
/// # Errors
/// The index of the wrong one, and what is allowed.
pub fn check_caches(caches: impl IntoIterator<Item = Option<u64>>) -> Result<(), (usize, String)> {
    let mut all = 0u64;
    for (index, bytes) in caches.into_iter().enumerate() {
        let Some(bytes) = bytes else { continue };
        if bytes < CACHE_BYTES_MIN || !bytes.is_multiple_of(CACHE_BYTES_MIN) {
            let what =
                format!("a cache of {}: give a multiple of {}", Size(bytes), Size(CACHE_BYTES_MIN));
            return Err((index, what));
        }
        all = all.saturating_add(bytes);
        if all > CACHE_BYTES_MAX {
            let what = format!(
                "caches of {} in all; at most {} are possible for a VM, as it is locked memory",
                Size(all),
                Size(CACHE_BYTES_MAX)
            );
            return Err((index, what));
        }
    }
    Ok(())
}

/// When requests fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StallSpec {
    /// For how long storage may have a request before all of the disk's fail, in milliseconds; at least 1.
    pub milliseconds: u64,
}

/// The limits of a disk. At least one of the two is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitSpec {
    /// Requests; flushes do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<Budget>,
    /// Bytes read and written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Budget>,
}

/// A rate, and a burst after a pause. Neither is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Units a second.
    pub per_second: u64,
    /// Units that may be used at once.
    pub burst: u64,
}

/// The longest delay, in microseconds: a minute. A longer one would only test the time-outs of guests.
pub const DELAY_MAX: u64 = 60_000_000;

/// How requests are delayed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DelaySpec {
    /// The kinds of request; empty means all.
    #[serde(default)]
    pub operations: Vec<OperationKind>,
    /// The least delay; at most [`DELAY_MAX`].
    pub microseconds: u64,
    /// A random addition up to this; at most [`DELAY_MAX`].
    #[serde(default)]
    pub jitter_microseconds: u64,
    /// Confirms that jitter reorders requests. It must be set above encryption, where the requests are in the
    /// guest's own order.
    #[serde(default)]
    pub reorders: bool,
    /// The seed of the random numbers.
    #[serde(default)]
    pub seed: u64,
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OperationKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Discards and write-zeroes.
    Discard,
}

/// The most rules of a [`FaultSpec`]: each request is compared with each rule.
pub const FAULT_RULES_MAX: usize = 16;

/// Which requests fail, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultSpec {
    /// The seed of the random numbers: the same requests in the same order get the same faults.
    #[serde(default)]
    pub seed: u64,
    /// The rules; the first one that applies to a request counts. At most [`FAULT_RULES_MAX`].
    pub rules: Vec<FaultRule>,
}

/// One way in which requests fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultRule {
    /// The kinds of request; empty means all.
    #[serde(default)]
    pub operations: Vec<OperationKind>,
    /// The part of the disk; none means all of it. A flush touches every part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<FaultRange>,
    /// How many requests are spared at first.
    #[serde(default)]
    pub after: u64,
    /// One in this many fails, on average; 1 is each.
    pub one_in: u64,
    /// The most failures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// The failure.
    pub kind: FaultKind,
}

/// A part of a disk, as the layer sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultRange {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: u64,
}

/// A failure of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultKind {
    /// It fails and nothing is done.
    Error {
        /// The error, as the kernel would report it: 5 is EIO, 28 ENOSPC.
        errno: i32,
    },
    /// Only the first half of a write is done, and it fails.
    Torn,
    /// It is not done and reported as done. Not for reads.
    Lost,
}

/// The meaning of a 4096-byte sector whose ciphertext is all zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holes {
    /// It was never written or was discarded, and reads as zeroes.
    Zero,
    /// It is ordinary ciphertext, as in dm-crypt; a discard then never punches holes.
    Ciphertext,
}

/// Where data is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum BackendSpec {
    /// A raw file or block device.
    File {
        /// The file, open for reading and (unless read-only) writing, its lock held.
        file: Handle,
        /// The offset of the guest's first byte in the file (LUKS2: the data segment), in bytes.
        offset: u64,
        /// Whether to bypass the page cache.
        #[serde(default)]
        direct: Direct,
        /// Whether the file stays allocated when the guest discards: a preallocated disk.
        #[serde(default)]
        keeps_room: bool,
        /// For a file of a pool of Ceph: a connected sequenced-packet socket of the `vmseal-rbd` that serves it, by which the disk's
        /// queues ask for shared memory. Without it, or where `vmseal-rbd` refuses, data goes through the file.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        channel: Option<Handle>,
    },
    /// An image of QEMU's format.
    Qcow2 {
        /// The image, open for reading and (unless read-only) writing, its lock held.
        file: Handle,
        /// The files below it, from the nearest downwards; at most [`BACKING_MAX`]. File names stored in the
        /// images are not used.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        backing: Vec<BackingSpec>,
        /// The offset of the guest's first byte in the image's disk (LUKS2: the data segment), in bytes.
        offset: u64,
        /// A file whose lock is the disk's, kept open and not used: where the lowest file below is another disk's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lock: Option<Handle>,
    },
    /// An export of an NBD server (fixed newstyle, without TLS). The filter never connects: it negotiates on sockets that
    /// are passed to it.
    Nbd {
        /// Connected stream sockets, which are not negotiated on yet; by a path, for starting a filter by hand, a unix socket
        /// to connect to. Each chain needs one: the disk's queues; a copy of the disk that begins while it is served, as
        /// many again and one more; the copy of a mirrored disk, its queues and one, or one where the disk stays
        /// ([`MirrorSpec::stays`]); a replica, one; each reader beside the front end, one.
        /// 1 to [`NBD_SOCKETS_MAX`].
        sockets: Vec<Handle>,
        /// The export's name; at most 255 bytes.
        #[serde(default)]
        export: String,
        /// The offset of the guest's first byte in the export, in bytes.
        #[serde(default)]
        offset: u64,
    },
    /// Memory that is lost when the filter ends: for tests, drills and measurements.
    Mem {},
}

/// The most connections to an NBD server: for all chains that a disk with [`QUEUES_MAX`] queues may have at one time.
pub const NBD_SOCKETS_MAX: usize = 40;

/// The most files below a qcow2 image: a read may have to look into the tables of each.
pub const BACKING_MAX: usize = 8;

/// A file below a qcow2 image; it is only read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackingSpec {
    /// The file, open for reading.
    pub file: Handle,
    /// Its format, which is never guessed. A raw file is the last of its chain.
    pub format: ImageFormat,
}

/// Whether the page cache is bypassed (O_DIRECT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direct {
    /// Where the file system allows it and the file's pages are not in memory anyway (tmpfs).
    #[default]
    Auto,
    /// Always; an error where the file system does not allow it.
    On,
    /// Never.
    Off,
}

/// The front end that serves the guest or another client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FrontEndSpec {
    /// vhost-user-blk: QEMU's fast path, on shared guest memory.
    VhostUserBlk {
        /// A unix stream socket: a listening one, or the path to make one at (mode 0600), for one VMM after
        /// the other; or one that is connected to the VMM, which is served as long as the connection lasts.
        socket: Handle,
        /// Where another process connects `socket` later: the reading end of a pipe, whose writing end that process
        /// closes when it has. If `socket` is not connected then, that process has died, and the disk fails.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        connected: Option<Handle>,
        /// The only user that may connect to a listening socket, by SO_PEERCRED; none means the filter's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer_uid: Option<u32>,
        /// The number of request queues, 1 to [`QUEUES_MAX`].
        queues: u16,
    },
    /// NBD (fixed newstyle, without TLS): for tools on the host, such as nbdcopy, qemu-img and fio. The
    /// export's name is the disk's id, or empty; up to [`NBD_CONNECTIONS`] are served at a time.
    Nbd {
        /// The listening unix stream socket, or the path to make one at (mode 0600).
        listen: Handle,
        /// The only user that may connect, by SO_PEERCRED; none means the filter's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer_uid: Option<u32>,
    },
}

/// An image to write through the chain. Zeroes and holes of the source stay holes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportSpec {
    /// The image, open for reading; its disk is not longer than this one, the rest of which reads as
    /// zeroes.
    pub source: Handle,
    /// What the image is.
    pub format: ImageFormat,
    /// Where to continue: the part before it has been written and flushed by an earlier import of the same
    /// image. A multiple of [`CRYPT_SECTOR`].
    #[serde(default)]
    pub from: u64,
}

/// A file to write the whole disk to. Zeroes and holes of the disk stay holes, where the format has holes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportSpec {
    /// The file: new, and open for reading and writing.
    pub target: Handle,
    /// What is written.
    pub format: TargetFormat,
    /// An empty file that gets the sums of the disk's blocks ([`SUM_BLOCK`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sums: Option<Handle>,
    /// Such sums of what is there already: blocks that have them are not written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub except: Option<Handle>,
    /// The extents that may have changed since those sums ([`Extent`]), one after another as [`Extent::LEN`] bytes each, in order.
    /// Other blocks are not read: they have their sums still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<Handle>,
}

/// A part of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its first byte.
    pub offset: u64,
    /// Its length, in bytes; not 0.
    pub length: u64,
}

impl Extent {
    /// The length of its written form: offset and length, little-endian.
    pub const LEN: usize = 16;

    /// Its written form.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// The extent that is written so; none where it is empty, or ends beyond what a number counts.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Option<Self> {
        let number =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
        let (offset, length) = (number(&bytes[..8]), number(&bytes[8..]));
        (length > 0 && offset.checked_add(length).is_some()).then_some(Self { offset, length })
    }
}

/// The most extents that a file of them has: 16 MiB. What is more scattered is read as a whole.
pub const EXTENTS_MAX: usize = 1 << 20;

/// The bytes of a disk that have one sum, SHA-256, in a file of sums; the last block may be shorter. The sum of a block that is
/// all zeroes is written as zeroes.
pub const SUM_BLOCK: usize = 64 * 1024;

/// The length of a sum, in bytes.
pub const SUM_LEN: usize = 32;

/// Writes what an image has itself, without the files below it, to another one: the next one below; or an empty one above
/// files that hold what those below the image hold, so that it is the image's copy. Afterwards that reads as the image did.
/// Doing it again changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeSpec {
    /// The image that is written, and what is below that; no filter but encryption. Others may read the bytes of the next
    /// image below that the image above does not have.
    pub into: StackSpec,
    /// A file whose lock is held for as long as this process, or the kernel for it, may write.
    pub lock: Handle,
}

/// Encrypts, decrypts or re-encrypts a disk in its own file, which is long enough for both forms. An interrupted conversion
/// continues with the same journal. The header is not written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConvertSpec {
    /// How it is to be: the same file, perhaps with another offset; no filter but encryption.
    pub into: StackSpec,
    /// The journal: a file of [`IN_PLACE_JOURNAL`] bytes of its own, zeroes before the conversion begins.
    pub journal: Handle,
    /// The highest rate, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// The length of the header of a slot in the journal of a conversion, in bytes.
pub const IN_PLACE_SLOT_HEADER: u64 = 4096;

/// The most that a slot saves, in bytes: enough that two flushes for each take little of the time.
pub const IN_PLACE_SAVED_MAX: u64 = 4 << 20;

/// The length of a slot, in bytes.
pub const IN_PLACE_SLOT: u64 = IN_PLACE_SLOT_HEADER + IN_PLACE_SAVED_MAX;

/// The length of the journal of a conversion, in bytes: two slots.
pub const IN_PLACE_JOURNAL: u64 = 2 * IN_PLACE_SLOT;

/// The format of an export's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TargetFormat {
    /// The bytes of the disk; the file has the disk's length already.
    Raw,
    /// QEMU's format; the file is empty.
    Qcow2,
    /// An overlay of QEMU's format with clusters of [`SUM_BLOCK`], which is there already and has nothing. It gets whole blocks.
    Overlay,
    /// Nothing but the sums.
    Sums,
    /// A disk as vmseal keeps it, whose header is there already, and which reads as zeroes.
    Disk {
        /// Its DEK: 64 bytes in a `memfd_secret`; none for a plain one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<Handle>,
        /// Where its first byte is, in bytes.
        offset: u64,
        /// Whether it stays allocated where it is zero.
        keeps_room: bool,
    },
    /// The data segment of a LUKS2 volume, whose header is there already. It has no holes: dm-crypt would
    /// decrypt them to noise.
    Luks2 {
        /// The volume's key: 64 bytes in a `memfd_secret`.
        key: Handle,
        /// Where the data segment begins, in bytes.
        offset: u64,
    },
}

/// NBD as in [`FrontEndSpec::Nbd`], but always read-only, and beside the disk's front end. It uses memory
/// only while a client is connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BesideSpec {
    /// The listening unix stream socket, or the path to make one at (mode 0600).
    pub listen: Handle,
    /// The only user that may connect, by SO_PEERCRED; none means the filter's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_uid: Option<u32>,
}
