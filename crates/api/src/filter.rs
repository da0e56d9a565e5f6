//! The contract between the agent and a `vmseal-filter` process.
//!
//! The agent starts one filter per VM with a [`FilterConfig`] and open descriptors; the filter holds
//! no path it would have to be permitted to open, and reads each key once from an inherited
//! `memfd_secret`. From then on the two talk over the control socket: one JSON object a line, a
//! [`ControlRequest`] answered by a [`ControlReply`], in order. A filter outlives its agent; the next
//! agent connects to the same socket.

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::id::{DiskId, VmId};
use crate::problem::ErrorCode;
use crate::transfer::ImageFormat;

/// The version of this contract. A filter refuses a configuration of another version.
pub const VERSION: u32 = 1;

/// The longest line on the control socket, in bytes; a status of [`DISKS_MAX`] disks fits well within.
pub const LINE_MAX: usize = 256 * 1024;

/// The most disks one filter serves: virtio's practical limit of one PCI bus.
pub const DISKS_MAX: usize = 28;

/// The most request queues of a disk; QEMU's default is one per vCPU, and more than 16 gain nothing.
pub const QUEUES_MAX: u16 = 16;

/// The connections of one NBD front end that are served at a time: what nbdcopy opens by default. More
/// of them wait until one ends.
pub const NBD_CONNECTIONS: u16 = 4;

/// What one bit of a dirty bitmap stands for, in bytes, where that fits [`BITMAP_BYTES_MAX`]: with
/// smaller ones a backup would save little and ask more.
pub const BITMAP_GRANULE: u64 = 64 * 1024;

/// The most dirty bitmaps of a disk: one that is read, one that has begun after it, and as many for
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

/// Something that is open already or is to be opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Handle {
    /// An inherited descriptor: what the agent passes.
    Fd(i32),
    /// A path: for starting a filter by hand.
    Path(PathBuf),
}

/// All that a filter process is told at its start. Nothing secret is in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilterConfig {
    /// [`VERSION`].
    pub version: u32,
    /// Whose disks these are; named in every log line.
    pub vm: VmId,
    /// The control socket: a listening unix stream socket, or the path to make one at (mode 0600).
    pub control: Handle,
    /// The only user that may connect to the control socket, by SO_PEERCRED; none means the filter's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub control_uid: Option<u32>,
    /// The id of the request that it is started for, for the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// What it logs; none means what `RUST_LOG` says.
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
    /// What the guest sees as the disk's size, in bytes; a multiple of [`CRYPT_SECTOR`].
    pub size: u64,
    /// What the guest sees as the device id; at most [`SERIAL_MAX`] bytes of ASCII.
    pub serial: String,
    /// Refuse everything that changes the disk.
    #[serde(default)]
    pub read_only: bool,
    /// The filters, from the guest downwards.
    pub chain: Vec<FilterSpec>,
    /// Where the data rests.
    pub backend: BackendSpec,
    /// Who serves the guest; none for a filter that only runs an [`ImportSpec`] or [`ExportSpec`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub front_end: Option<FrontEndSpec>,
    /// Serves the disk to others at the same time, read-only, for backups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<BesideSpec>,
    /// An image to be written through the chain once, before anything else happens to the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub import: Option<ImportSpec>,
    /// A file that all of the disk is to be written to once. The disk is read-only then, and is neither
    /// served nor filled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<ExportSpec>,
}

/// A link of the chain.
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
    /// At most so many requests and bytes a second, of all queues together.
    Limit(LimitSpec),
    /// Requests are held back for a time: for tests and drills.
    Delay(DelaySpec),
    /// Requests fail, tear or get lost: for tests and drills.
    Fault(FaultSpec),
    /// What was read is kept in memory. Below encryption only, where there is any: it holds ciphertext.
    Cache(CacheSpec),
    /// A second place gets what the disk has, later. Below encryption, where there is any: it gets ciphertext.
    Replicate(ReplicateSpec),
}

/// The least that a replica may be given, in bytes a second: less than one chunk of it in a second only gets
/// further behind.
pub const REPLICATE_RATE_MIN: u64 = 1 << 20;

/// Where the replica is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicateSpec {
    /// A file as long as `offset` and the disk's size together, or a device that is not shorter; open for reading
    /// and writing, its lock held.
    pub replica: Handle,
    /// Where the disk's first byte is in it, in bytes.
    #[serde(default)]
    pub offset: u64,
    /// The map of what the replica does not have: a regular file beside the disk's own image, not beside the
    /// replica; open for reading and writing, its lock held. Empty for a new replica.
    pub map: Handle,
    /// How fast it is copied at most; at least [`REPLICATE_RATE_MIN`].
    pub bytes_per_second: u64,
}

/// How a replica stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReplicaStatus {
    /// How much may differ from the disk, in bytes, in whole chunks. At 0 they are equal.
    pub dirty_bytes: u64,
    /// All that was done on the disk so long ago is in the replica, durably; none if it was never complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_milliseconds: Option<u64>,
    /// What keeps it from being copied, or its map from being kept, at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// The least memory of a cache, in bytes: less is not worth its looking up.
pub const CACHE_BYTES_MIN: u64 = 1 << 20;

/// The most memory of all caches of one filter, in bytes: it is locked memory, which the host cannot
/// take back.
pub const CACHE_BYTES_MAX: u64 = 256 << 20;

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheSpec {
    /// Memory for data, in bytes; a multiple of [`CACHE_BYTES_MIN`], and at most [`CACHE_BYTES_MAX`] for
    /// all disks together.
    pub bytes: u64,
}

/// Checks what the caches of a VM's disks are to be, in bytes: each a multiple of [`CACHE_BYTES_MIN`], and all
/// of them [`CACHE_BYTES_MAX`] at most.
///
/// # Errors
/// Which of them is wrong, and what it may be.
pub fn check_caches(caches: impl IntoIterator<Item = Option<u64>>) -> Result<(), (usize, String)> {
    let mut all = 0u64;
    for (index, bytes) in caches.into_iter().enumerate() {
        let Some(bytes) = bytes else { continue };
        if bytes < CACHE_BYTES_MIN || !bytes.is_multiple_of(CACHE_BYTES_MIN) {
            let what = format!("a cache of {bytes} bytes: give a multiple of {CACHE_BYTES_MIN}");
            return Err((index, what));
        }
        all = all.saturating_add(bytes);
        if all > CACHE_BYTES_MAX {
            let what = format!(
                "caches of {all} bytes in all; at most {CACHE_BYTES_MAX} are possible for a VM, as it is locked memory"
            );
            return Err((index, what));
        }
    }
    Ok(())
}

/// What a disk may use. At least one of the two is given.
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

/// So many a second, and so many at once after a pause. Neither is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Units a second.
    pub per_second: u64,
    /// Units that may go at once.
    pub burst: u64,
}

/// The longest that a request can be told to be held back, in microseconds: a minute, longer than which
/// guests' own time-outs are what is tested.
pub const DELAY_MAX: u64 = 60_000_000;

/// How long requests are held back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DelaySpec {
    /// Which; none are all.
    #[serde(default)]
    pub operations: Vec<OperationKind>,
    /// At least so long; at most [`DELAY_MAX`].
    pub microseconds: u64,
    /// And up to so much longer, at random; at most [`DELAY_MAX`].
    #[serde(default)]
    pub jitter_microseconds: u64,
    /// Whether it is known that jitter makes requests overtake each other; it must be said above
    /// encryption, where the guest's own order is.
    #[serde(default)]
    pub reorders: bool,
    /// Where the random numbers begin.
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

/// The most rules of a [`FaultSpec`]: each request is held against each.
pub const FAULT_RULES_MAX: usize = 16;

/// Which requests fail, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultSpec {
    /// Where the random numbers begin: the same requests in the same order meet the same faults.
    #[serde(default)]
    pub seed: u64,
    /// The rules; the first one that strikes a request counts. At most [`FAULT_RULES_MAX`].
    pub rules: Vec<FaultRule>,
}

/// One way in which requests fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultRule {
    /// Which; none are all.
    #[serde(default)]
    pub operations: Vec<OperationKind>,
    /// Those that touch this part of the disk; none means any. A flush is everywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<FaultRange>,
    /// The first so many of them are spared.
    #[serde(default)]
    pub after: u64,
    /// One in so many, on average; 1 is each.
    pub one_in: u64,
    /// At most so many times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// What happens.
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

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case", deny_unknown_fields)]
pub enum FaultKind {
    /// It fails and nothing is done.
    Error {
        /// As the kernel would answer: 5 is EIO, 28 ENOSPC.
        errno: i32,
    },
    /// A write of which the first half is done, and which fails.
    Torn,
    /// It is not done and nobody is told. Not for reads.
    Lost,
}

/// What a 4096-byte sector means whose ciphertext is all zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holes {
    /// It was never written or was discarded, and reads as zeroes.
    Zero,
    /// It is ciphertext as any other, as dm-crypt has it; discard then never punches holes.
    Ciphertext,
}

/// Where data rests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum BackendSpec {
    /// A raw file or block device.
    File {
        /// The file, open for reading and (unless read-only) writing, its lock held.
        file: Handle,
        /// Where the guest's first byte is, in bytes from the start of the file (LUKS2: the data segment).
        offset: u64,
        /// Whether to bypass the page cache.
        #[serde(default)]
        direct: Direct,
        /// Whether the file keeps its room whatever the guest discards: a preallocated disk.
        #[serde(default)]
        keeps_room: bool,
    },
    /// An image of QEMU's format.
    Qcow2 {
        /// The image, open for reading and (unless read-only) writing, its lock held.
        file: Handle,
        /// The files below it, from the one right below downwards; at most [`BACKING_MAX`]. The names that
        /// the images have of each other are not followed.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        backing: Vec<BackingSpec>,
        /// Where the guest's first byte is, in bytes from the start of the image's disk (LUKS2: the data
        /// segment).
        offset: u64,
    },
    /// Memory that is gone when the filter ends: for tests, drills and measurements.
    Mem {},
}

/// The most files below a qcow2 image: each costs a look at its tables for what the ones above lack.
pub const BACKING_MAX: usize = 8;

/// A file below a qcow2 image, which is only read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackingSpec {
    /// The file, open for reading.
    pub file: Handle,
    /// What it is: never guessed. A raw one is the last of its chain.
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

/// Who serves the guest, or whoever else the disk is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum FrontEndSpec {
    /// vhost-user-blk: QEMU's fast path, on shared guest memory.
    VhostUserBlk {
        /// A unix stream socket: one that listens, or the path to make one at (mode 0600), for one VMM after
        /// the other; or one that is connected to the VMM, which is served as long as that lasts.
        socket: Handle,
        /// The only user that may connect where it listens, by SO_PEERCRED; none means the filter's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer_uid: Option<u32>,
        /// The number of request queues, 1 to [`QUEUES_MAX`].
        queues: u16,
    },
    /// NBD (fixed newstyle, without TLS): tools on the host, such as nbdcopy, qemu-img and fio. The
    /// export is called by the disk's id, or not at all; up to [`NBD_CONNECTIONS`] are served at a time.
    Nbd {
        /// The listening unix stream socket, or the path to make one at (mode 0600).
        listen: Handle,
        /// The only user that may connect, by SO_PEERCRED; none means the filter's own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer_uid: Option<u32>,
    },
}

/// An image to be written through the chain. Zeroes and holes of the source stay holes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportSpec {
    /// The image, open for reading; its disk is not longer than this one, the rest of which reads as
    /// zeroes.
    pub source: Handle,
    /// What the image is.
    pub format: ImageFormat,
    /// Where to go on: what is before it has been written and flushed by an earlier import of the same
    /// image. A multiple of [`CRYPT_SECTOR`].
    #[serde(default)]
    pub from: u64,
}

/// A file that all of a disk is written to. Zeroes and holes of the disk stay holes, where the format
/// has holes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportSpec {
    /// The file: new, and open for reading and writing.
    pub target: Handle,
    /// What is written.
    pub format: TargetFormat,
}

/// What is written to a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TargetFormat {
    /// The bytes; the file has the disk's length already.
    Raw,
    /// QEMU's format; the file is empty.
    Qcow2,
    /// The data segment of a LUKS2 volume, whose header is there already. It has no holes: dm-crypt would
    /// read them as noise.
    Luks2 {
        /// The volume's key: 64 bytes in a `memfd_secret`.
        key: Handle,
        /// Where the data segment begins, in bytes.
        offset: u64,
    },
}

/// NBD as in [`FrontEndSpec::Nbd`], but read-only whatever the disk is, and beside its front end. It takes
/// memory only while someone is connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BesideSpec {
    /// The listening unix stream socket, or the path to make one at (mode 0600).
    pub listen: Handle,
    /// The only user that may connect, by SO_PEERCRED; none means the filter's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_uid: Option<u32>,
}

/// What the agent asks of a filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// How things stand; answered by [`ControlReply::Status`].
    Status,
    /// What was measured; answered by [`ControlReply::Figures`].
    Figures,
    /// Log this from now on, until the process ends; answered by [`ControlReply::Done`].
    SetLogLevel {
        /// Directives, as operators write them.
        levels: String,
    },
    /// Start, clear or remove a dirty bitmap; answered by [`ControlReply::Bitmaps`].
    Bitmap {
        /// Of which disk.
        disk: DiskId,
        /// Its name ([`crate::bitmap::check_name`]). NBD clients know it as `qemu:dirty-bitmap:NAME`.
        name: String,
        /// What happens to it.
        change: BitmapChange,
    },
    /// Finish what is under way, flush, answer [`ControlReply::Done`], and exit with 0.
    Shutdown,
}

/// What happens to a dirty bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BitmapChange {
    /// A new one: all is clean, and what changes from now on is dirty.
    Start,
    /// All is clean again. Not while a client reads it.
    Clear,
    /// It is forgotten. Not while a client reads it.
    Remove,
}

/// How a dirty bitmap of a running VM's disk stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BitmapStatus {
    /// Its name.
    pub name: String,
    /// What changed after this is dirty: when it was started, or last cleared.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
    /// What one bit stands for, in bytes.
    pub granularity: u64,
    /// How much of the disk is dirty, in bytes.
    pub dirty_bytes: u64,
}

/// What a filter answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlReply {
    /// The answer to [`ControlRequest::Status`].
    Status(FilterStatus),
    /// The answer to [`ControlRequest::Figures`].
    Figures(FilterFigures),
    /// A dirty bitmap is changed.
    Bitmaps {
        /// The bitmaps that the disk has now.
        bitmaps: Vec<BitmapStatus>,
    },
    /// It is done.
    Done,
    /// It was not done, or not understood.
    Error {
        /// The same for programs.
        #[serde(default = "unnamed")]
        code: ErrorCode,
        /// What happened, to which disk, and what to do.
        message: String,
    },
}

fn unnamed() -> ErrorCode {
    ErrorCode::Internal
}

/// How a filter process stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterStatus {
    /// [`VERSION`] of the running process.
    pub version: u32,
    /// Its process id.
    pub pid: u32,
    /// Whose disks it serves.
    pub vm: VmId,
    /// The disks, in the configuration's order.
    pub disks: Vec<DiskStatus>,
    /// What keeps it from doing anything else; none of an earlier vmseal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confinement: Option<Confinement>,
}

/// What keeps a filter process, should somebody take it over, from doing more than serving its disks.
/// Its system calls are always filtered: it does not serve otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Whether Landlock keeps it from paths and ports.
    pub files: FilesConfined,
    /// The most private memory that it can have, in bytes: guest memory is not in it.
    pub memory_bytes: u64,
}

/// How much of what is asked of Landlock the kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesConfined {
    /// All of it.
    Fully,
    /// What this kernel knows of it.
    Partly,
    /// The kernel has no Landlock, or it is switched off.
    No,
}

/// How one disk stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Which disk.
    pub disk: DiskId,
    /// What it is doing.
    pub state: DiskActivity,
    /// What it has done since the process started.
    pub counters: DiskCounters,
    /// The last error the datastore gave the guest, and what to do about it; the disk goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Its dirty bitmaps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapStatus>,
    /// Its replica, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<ReplicaStatus>,
}

/// What a disk is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum DiskActivity {
    /// An import runs.
    Importing {
        /// Bytes of the source dealt with.
        done: u64,
        /// Bytes of the source.
        total: u64,
        /// What of `done` is flushed: where another import may go on ([`ImportSpec::from`]).
        durable: u64,
    },
    /// An export runs.
    Exporting {
        /// Bytes of the disk dealt with.
        done: u64,
        /// Bytes of the disk.
        total: u64,
    },
    /// Nobody is connected; an import or export, if one was asked for, is finished and flushed.
    Idle,
    /// A front end is connected.
    Connected,
    /// It cannot go on.
    Failed {
        /// What happened and what to do.
        message: String,
    },
}

/// Requests and bytes as the guest counts them, since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCounters {
    /// Reads completed.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes completed.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes completed.
    pub flushes: u64,
    /// Discards and write-zeroes completed.
    pub discards: u64,
    /// Requests answered with an error.
    pub errors: u64,
}

/// How many buckets a latency histogram has; the last one has no bound.
pub const LATENCY_BUCKETS: usize = 22;

/// The first bucket of a latency histogram ends at 2 to this power, in nanoseconds: about 8 µs.
pub const LATENCY_FIRST_BITS: u32 = 13;

/// Where a bucket of a latency histogram ends, in seconds; each ends at twice the one before, and the last
/// has no end.
#[must_use]
pub fn latency_bound_seconds(bucket: usize) -> Option<f64> {
    (bucket + 1 < LATENCY_BUCKETS)
        .then(|| (1u64 << (LATENCY_FIRST_BITS as usize + bucket)) as f64 / 1e9)
}

/// What a filter has measured since it started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterFigures {
    /// The disks, in the configuration's order.
    pub disks: Vec<DiskFigures>,
    /// The most private memory that it can have, in bytes ([`Confinement::memory_bytes`]); none of an earlier vmseal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
}

/// What was measured of one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFigures {
    /// Which disk.
    pub disk: DiskId,
    /// Requests and bytes.
    pub counters: DiskCounters,
    /// How long the requests took that were answered well.
    pub latencies: LatencyFigures,
    /// The CPU time of the cipher; none for a disk in the clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cipher: Option<CipherFigures>,
    /// The other layers of its chain, from the guest downwards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerFigures>,
    /// How far its replica is behind, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<ReplicaStatus>,
}

/// What a layer has done since the process started, and how it stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFigures {
    /// What it is, as in [`FilterSpec`].
    pub kind: String,
    /// Its counters, by name.
    pub counters: BTreeMap<String, u64>,
}

/// How long requests took, from being taken from the front end until their answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyFigures {
    /// Reads.
    pub read: Histogram,
    /// Writes.
    pub write: Histogram,
    /// Flushes.
    pub flush: Histogram,
    /// Discards and write-zeroes.
    pub discard: Histogram,
}

/// Durations in buckets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// How many in each bucket alone; [`LATENCY_BUCKETS`] of them.
    pub counts: Vec<u64>,
    /// Their sum.
    pub nanoseconds: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; LATENCY_BUCKETS], nanoseconds: 0 }
    }
}

/// The CPU time of a disk's cipher, estimated from samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CipherFigures {
    /// Of writes, in nanoseconds.
    pub encrypt_nanoseconds: u64,
    /// Of reads, in nanoseconds.
    pub decrypt_nanoseconds: u64,
}
