//! The control socket of a filter: what the agent asks, and what the filter says of its disks.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{BackendSpec, FilterSpec, MirrorSpec, MirrorStatus, ReplicaStatus};
use crate::id::{DiskId, VmId};
use crate::pace::CopyPace;
use crate::problem::ErrorCode;

/// A request of the agent to a filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// Report the status; answered by [`ControlReply::Status`].
    Status,
    /// Report the figures; answered by [`ControlReply::Figures`].
    Figures,
    /// Use these log levels until the process ends; answered by [`ControlReply::Done`].
    SetLogLevel {
        /// Directives, as operators write them.
        levels: String,
    },
    /// Start, clear or remove a dirty bitmap; answered by [`ControlReply::Bitmaps`].
    Bitmap {
        /// The disk.
        disk: DiskId,
        /// Its name ([`crate::bitmap::check_name`]). NBD clients know it as `qemu:dirty-bitmap:NAME`.
        name: String,
        /// The change.
        change: BitmapChange,
    },
    /// Write the extents that a dirty bitmap calls dirty to the file whose descriptor is sent with this request, one after another
    /// ([`super::Extent`]); answered by [`ControlReply::Done`]. Refused where they are more than [`super::EXTENTS_MAX`].
    ReadBitmap {
        /// The disk.
        disk: DiskId,
        /// Its name.
        name: String,
    },
    /// Tell the front end that a disk has another size than before; answered by [`ControlReply::Done`]. Refused while
    /// no driver uses it, as QEMU does not look then.
    AnnounceSize {
        /// The disk.
        disk: DiskId,
    },
    /// Finish the requests in flight, copy what the copy of a mirrored disk lacks, and serve the disk from the copy from
    /// then on. Answered by [`ControlReply::Done`], also if the disk has pivoted before. Refused while the copy is paused, or
    /// lacks more than [`super::pivot_bytes`], or while somebody reads the disk beside the guest. After any
    /// error the disk is served as before; only where the map can neither be written nor be wiped, what the guest changes waits
    /// until it can. A disk that a front end serves lets its former place and the map go when this is answered.
    Pivot {
        /// The disk.
        disk: DiskId,
    },
    /// Copy a mirrored disk, or do what else copies a disk, so fast from now on, or not at all; answered by [`ControlReply::Done`].
    /// It is in force when that is sent, also for what is being copied. Where the disk has pivoted nothing is changed.
    Pace {
        /// The disk.
        disk: DiskId,
        /// How fast.
        pace: CopyPace,
        /// Whether work of a filter that serves nobody rests after each piece, as another filter has the guest's disk on the same
        /// storage. A mirrored disk takes no notice: its filter sees what the guest asks for.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        rests: bool,
    },
    /// Finish the requests in flight of these disks, flush, and let further requests wait in their rings. Answered by
    /// [`ControlReply::Done`] when none of the disks has a request in flight, which is one instant for all of them. They
    /// wait until [`ControlRequest::Resume`], until this connection ends, or for [`super::DRAINED_MAX`]. A connection drains
    /// once; after any error none of the disks waits.
    Drain {
        /// The disks.
        disks: Vec<DiskId>,
    },
    /// Exchange the stacks of disks that this connection has drained, all of them or none: the new ones hold the same bytes, and
    /// perhaps more behind them ([`NewStack::size`]). A copy of a disk that stays ([`super::MirrorSpec::stays`]) ends. Answered by [`ControlReply::Done`]; the disks wait on. After an error they have their stacks as before. A `fd` in a
    /// stack is the number, from 0 on, of a descriptor that is sent with this request (SCM_RIGHTS).
    Replace {
        /// The stacks.
        stacks: Vec<NewStack>,
    },
    /// Never serve the disks that this connection has drained by the stacks that they have: others are about to be put on record.
    /// Answered by [`ControlReply::Done`]. If a disk would go on before it is replaced, the process ends instead. Refused when
    /// a disk no longer waits; then nothing has changed.
    Retire,
    /// Copy disks from now on, all of them or none. Answered by [`ControlReply::Done`]. Their requests in flight end before, and
    /// further ones wait meanwhile. After an error nothing has changed. Descriptors as for [`ControlRequest::Replace`].
    Mirror {
        /// What they are copied to.
        copies: Vec<NewCopy>,
    },
    /// Copy what the copies of these disks lack, which this connection has drained. Answered by [`ControlReply::Done`] when the
    /// copies have all that the disks have, durably; they do as long as the disks wait. Refused where a disk has no copy, or its
    /// copy is paused or lacks more than [`super::pivot_bytes`]. The disks wait on in either case.
    Complete {
        /// The disks.
        disks: Vec<DiskId>,
    },
    /// Serve the disks that this connection has drained; answered by [`ControlReply::Done`]. Refused when they no longer
    /// wait: they are served by the stacks that they have.
    Resume,
    /// Finish the requests in flight, flush, answer [`ControlReply::Done`], and exit with 0.
    Shutdown,
}

/// The stack that a disk is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewStack {
    /// The disk.
    pub disk: DiskId,
    /// Its filters, from the guest downwards; none: those that it has, with their keys, caches and counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<Vec<FilterSpec>>,
    /// Where the data is stored.
    pub backend: BackendSpec,
    /// How long the disk is from then on, in bytes: no shorter than it is, and none of it is copied or read beside the guest where
    /// it is longer; none: as it is. A filter that does not say that it [grows](FilterStatus::grows) disks does not know this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// What a disk is to be copied to while it is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewCopy {
    /// The disk.
    pub disk: DiskId,
    /// The copy. It stands below the disk's limits, delays and faults.
    pub mirror: MirrorSpec,
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

/// An answer of a filter.
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
    /// The request is done.
    Done,
    /// The request was refused, failed or could not be parsed.
    Error {
        /// The error code.
        #[serde(default = "unnamed")]
        code: ErrorCode,
        /// What happened, to which disk, and what to do.
        message: String,
    },
}

fn unnamed() -> ErrorCode {
    ErrorCode::Internal
}

/// The status of a filter process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterStatus {
    /// [`VERSION`] of the running process.
    pub version: u32,
    /// Its process id.
    pub pid: u32,
    /// The VM whose disks it serves.
    pub vm: VmId,
    /// The disks, in the configuration's order.
    pub disks: Vec<DiskStatus>,
    /// Whether it exchanges the stacks of disks while it runs ([`ControlRequest::Replace`]). One of an earlier vmseal does not.
    #[serde(default)]
    pub replaces: bool,
    /// Whether it ends rather than serve a disk by a stack that is out of date ([`ControlRequest::Retire`]). One of an earlier
    /// vmseal does not.
    #[serde(default)]
    pub retires: bool,
    /// Whether it begins to copy disks while it runs ([`ControlRequest::Mirror`]), and lets their former places go when they
    /// pivot. One of an earlier vmseal does not.
    #[serde(default)]
    pub mirrors: bool,
    /// Whether it copies disks for other hosts ([`ControlRequest::Complete`]). One of an earlier vmseal does not.
    #[serde(default)]
    pub completes: bool,
    /// Whether it makes disks longer while it runs ([`NewStack::size`]). One of an earlier vmseal does not.
    #[serde(default)]
    pub grows: bool,
    /// Whether it gets to images of pools by channels ([`BackendSpec::File`]). One of an earlier vmseal does not, and refuses them.
    #[serde(default)]
    pub channels: bool,
    /// How it is confined; none from a filter of an earlier vmseal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confinement: Option<Confinement>,
}

/// What limits a filter process that an attacker has taken over to serving its disks. Its system calls are
/// always filtered: otherwise it does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Whether Landlock restricts its access to paths and ports.
    pub files: FilesConfined,
    /// The most private memory that it can have, in bytes; guest memory does not count.
    pub memory_bytes: u64,
}

/// How much of the requested Landlock rules the kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesConfined {
    /// All of it.
    Fully,
    /// The part that this kernel supports.
    Partly,
    /// None: the kernel has no Landlock, or it is switched off.
    No,
}

/// The status of one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Which disk.
    pub disk: DiskId,
    /// Its activity.
    pub state: DiskActivity,
    /// Whether a guest's driver uses it. A filter of an earlier vmseal does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<bool>,
    /// What its requests wait for, if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<DiskWaits>,
    /// The file that is written: of a disk with layers, the active one. None of a disk in memory; a filter of an
    /// earlier vmseal does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<DiskFile>,
    /// For how long the oldest request of its guest is in flight, in milliseconds, without the time for which a limit of the disk has kept
    /// it back. None while none is in flight; a filter of an earlier vmseal does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_milliseconds: Option<u64>,
    /// Whether its requests fail, as storage has not answered one for too long. Then the oldest one is that which storage has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fails: bool,
    /// Its counters since the process started.
    pub counters: DiskCounters,
    /// The last error of the datastore that the guest got, and what to do about it; the disk continues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Its dirty bitmaps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapStatus>,
    /// Its replica, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<ReplicaStatus>,
    /// Its copy, if it is mirrored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<MirrorStatus>,
}

/// What the requests of a disk wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskWaits {
    /// Those in flight end, and no other begins.
    Draining,
    /// None is in flight: the disk waits to be resumed.
    Drained,
}

/// A file, as fstat(2) identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFile {
    /// The device of its file system.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
}

/// The activity of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum DiskActivity {
    /// An import runs.
    Importing {
        /// Bytes of the source that are processed.
        done: u64,
        /// Bytes of the source.
        total: u64,
        /// The part of `done` that is flushed: where another import may continue ([`ImportSpec::from`]).
        durable: u64,
    },
    /// What its image has itself is written to the next image below.
    Merging {
        /// Bytes of the disk dealt with.
        done: u64,
        /// All bytes.
        total: u64,
    },
    /// It is encrypted, decrypted or encrypted anew in the file that it has.
    Converting {
        /// Bytes of the disk that are converted.
        done: u64,
        /// Bytes of the disk.
        total: u64,
    },
    /// An export runs.
    Exporting {
        /// Bytes of the disk that are processed.
        done: u64,
        /// Bytes of the disk.
        total: u64,
    },
    /// Nobody is connected; an import, export, merge or conversion, if one was asked for, is finished and flushed.
    Idle,
    /// A front end is connected.
    Connected,
    /// It cannot continue.
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

/// The upper bound of a bucket of a latency histogram, in seconds; each is twice the one before, and the last
/// bucket has none.
#[must_use]
pub fn latency_bound_seconds(bucket: usize) -> Option<f64> {
    (bucket + 1 < LATENCY_BUCKETS)
        .then(|| (1u64 << (LATENCY_FIRST_BITS as usize + bucket)) as f64 / 1e9)
}

/// The figures of a filter since it started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterFigures {
    /// The disks, in the configuration's order.
    pub disks: Vec<DiskFigures>,
    /// The most private memory that it can have, in bytes ([`Confinement::memory_bytes`]); none from a filter
    /// of an earlier vmseal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
}

/// The figures of one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFigures {
    /// Which disk.
    pub disk: DiskId,
    /// Requests and bytes.
    pub counters: DiskCounters,
    /// The latencies of the requests that succeeded.
    pub latencies: LatencyFigures,
    /// The CPU time of the cipher; none for a plain disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cipher: Option<CipherFigures>,
    /// The other layers of its chain, from the guest downwards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerFigures>,
    /// How far its replica is behind, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<ReplicaStatus>,
}

/// The figures of a layer since the process started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFigures {
    /// Its kind, as in [`FilterSpec`].
    pub kind: String,
    /// Its counters, by name.
    pub counters: BTreeMap<String, u64>,
}

/// Latencies, from taking a request from the front end until its answer.
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
    /// The count of each bucket alone; [`LATENCY_BUCKETS`] of them.
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pace_without_a_word_of_rests_has_none_and_is_written_as_before() {
        let disk = DiskId::new();
        let earlier = json!({ "do": "pace", "disk": disk, "pace": {} });
        let none = ControlRequest::Pace { disk, pace: CopyPace::default(), rests: false };
        assert_eq!(serde_json::to_value(&none).unwrap(), earlier);
        assert_eq!(serde_json::from_value::<ControlRequest>(earlier).unwrap(), none);
        let rests = ControlRequest::Pace { disk, pace: CopyPace::default(), rests: true };
        let written = serde_json::to_value(&rests).unwrap();
        assert_eq!(written, json!({ "do": "pace", "disk": disk, "pace": {}, "rests": true }));
        assert_eq!(serde_json::from_value::<ControlRequest>(written).unwrap(), rests);
    }
}
