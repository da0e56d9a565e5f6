//! Reads and checks the configuration that the process gets at its start.

mod convert;

use std::collections::HashSet;
use std::io::Read;

use vmseal_api::filter::{
    BACKING_MAX, BackendSpec, Budget, CHAIN_MAX, CRYPT_SECTOR, CacheSpec, DELAY_MAX, DISKS_MAX,
    DelaySpec, DiskConfig, FAULT_RULES_MAX, FaultKind, FaultRule, FaultSpec, FilterConfig,
    FilterSpec, FrontEndSpec, LimitSpec, MirrorSpec, NBD_CONNECTIONS, NewStack, OperationKind,
    QUEUES_MAX, REPLICATE_RATE_MIN, ReplicateSpec, SERIAL_MAX, TargetFormat, VERSION, check_caches,
};
use vmseal_api::id::DiskId;
use vmseal_api::transfer::ImageFormat;

/// The longest configuration, in bytes; [`DISKS_MAX`] disks fit well within.
pub const CONFIG_MAX: u64 = 1024 * 1024;

/// The most queues of all disks together: each has tables of about 300 KiB, and the process must stay
/// under 32 MiB.
pub const ALL_QUEUES_MAX: usize = 64;

/// The largest error number of Linux (`MAX_ERRNO`).
const ERRNO_MAX: i32 = 4095;

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("the configuration cannot be read: {0}")]
    Read(#[from] std::io::Error),
    /// Longer than [`CONFIG_MAX`].
    #[error("the configuration is longer than {CONFIG_MAX} bytes")]
    TooLong,
    /// Not the JSON that it should be.
    #[error("the configuration is not understood: {0}")]
    Json(#[from] serde_json::Error),
    /// Its version is not the one that this program reads.
    #[error(
        "the configuration has version {0}, this program understands {VERSION}; install vmseal and vmseal-filter of one version"
    )]
    Version(u32),
    /// A fault of the disks together.
    #[error("{0}")]
    Disks(String),
    /// A fault of one disk.
    #[error("disk {disk}: {what}")]
    Disk {
        /// Which disk.
        disk: DiskId,
        /// What is wrong.
        what: String,
    },
}

/// Reads and checks a configuration.
///
/// # Errors
/// [`ConfigError`].
pub fn read(from: impl Read) -> Result<FilterConfig, ConfigError> {
    let mut text = Vec::new();
    from.take(CONFIG_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > CONFIG_MAX {
        return Err(ConfigError::TooLong);
    }
    let config: FilterConfig = serde_json::from_slice(&text)?;
    check(&config)?;
    Ok(config)
}

/// How many chains a disk needs: one per queue, and one for an import.
#[must_use]
pub fn queues(disk: &DiskConfig) -> usize {
    match &disk.front_end {
        Some(FrontEndSpec::VhostUserBlk { queues, .. }) => usize::from(*queues),
        Some(FrontEndSpec::Nbd { .. }) => usize::from(NBD_CONNECTIONS),
        None => 1,
    }
}

/// How many pools of buffers a disk needs: one per chain, those to the copy of a mirrored disk and to the image below a
/// merged layer included, and one for the data of each NBD connection, which is not in guest memory.
#[must_use]
pub fn pools(disk: &DiskConfig) -> usize {
    match &disk.front_end {
        Some(FrontEndSpec::Nbd { .. }) => 2 * queues(disk),
        Some(FrontEndSpec::VhostUserBlk { .. }) | None
            if mirror(disk).is_some() || disk.merge.is_some() =>
        {
            2 * queues(disk)
        }
        // Its own, as it was, as it is to be, as it is stored, and the journal.
        None if disk.convert.is_some() => 5,
        Some(FrontEndSpec::VhostUserBlk { .. }) | None => queues(disk),
    }
}

/// The disk's mirror.
#[must_use]
pub fn mirror(disk: &DiskConfig) -> Option<&MirrorSpec> {
    disk.chain.iter().find_map(|link| match link {
        FilterSpec::Mirror(mirror) => Some(&**mirror),
        _ => None,
    })
}

/// The disk's caches: its own, and that of its mirror.
pub fn caches(disk: &DiskConfig) -> impl Iterator<Item = &CacheSpec> {
    let copy = mirror(disk).map(|mirror| &mirror.to.chain[..]).unwrap_or_default();
    disk.chain.iter().chain(copy).filter_map(|link| match link {
        FilterSpec::Cache(cache) => Some(cache),
        _ => None,
    })
}

/// The disk's replica.
#[must_use]
pub fn replica(disk: &DiskConfig) -> Option<&ReplicateSpec> {
    disk.chain.iter().find_map(|link| match link {
        FilterSpec::Replicate(replica) => Some(replica),
        _ => None,
    })
}

/// Whether the disk's stack can be exchanged while it is served: not what has a replica or is filled or written down
/// meanwhile, and not what is in memory only.
#[must_use]
pub fn can_change(disk: &DiskConfig) -> bool {
    let works = disk.import.is_some()
        || disk.export.is_some()
        || disk.merge.is_some()
        || disk.convert.is_some();
    let fixed = replica(disk).is_some() || disk.backend == (BackendSpec::Mem {});
    disk.front_end.is_some() && !works && !fixed
}

/// Whether the disk can be mirrored, or be mirrored again, while it is served.
#[must_use]
pub fn can_be_mirrored(disk: &DiskConfig) -> bool {
    let written = !disk.read_only && is_of_a_guest(disk);
    can_change(disk) && written
}

/// How many rings a disk takes while it is served, beyond those of its queues: those of another stack, which is opened
/// before the former is closed, or those of a copy and of its two sides.
#[must_use]
pub fn spare_rings(disk: &DiskConfig) -> usize {
    match (can_change(disk), can_be_mirrored(disk)) {
        (_, true) => 2 * queues(disk) + 2,
        (true, false) => queues(disk),
        (false, false) => 0,
    }
}

fn is_of_a_guest(disk: &DiskConfig) -> bool {
    matches!(disk.front_end, Some(FrontEndSpec::VhostUserBlk { .. }))
}

/// Checks the stack that a disk is to have while it is served.
///
/// # Errors
/// What is wrong with it.
pub fn check_new_stack(stack: &NewStack) -> Result<(), String> {
    if stack.backend == (BackendSpec::Mem {}) {
        return Err("what a disk holds is not in new memory".into());
    }
    check_backend(&stack.backend)?;
    let Some(chain) = &stack.chain else { return Ok(()) };
    let at_start = |link: &FilterSpec| {
        matches!(link, FilterSpec::Cache(_) | FilterSpec::Replicate(_) | FilterSpec::Mirror(_))
    };
    if chain.iter().any(at_start) {
        return Err("`cache`, `replicate` and `mirror` are not part of a new stack".into());
    }
    check_chain(chain)
}

/// Checks what a disk is to be copied to while it is served.
///
/// # Errors
/// What is wrong with it.
pub fn check_new_copy(mirror: &MirrorSpec) -> Result<(), String> {
    // Its memory would be beyond what was checked for all disks.
    if mirror.to.chain.iter().any(|link| matches!(link, FilterSpec::Cache(_))) {
        return Err("`cache` is given when the filter starts".into());
    }
    if mirror.same_below {
        return Err("a copy with the same below it is given when the filter starts".into());
    }
    check_copy(mirror)
}

fn check(config: &FilterConfig) -> Result<(), ConfigError> {
    if config.version != VERSION {
        return Err(ConfigError::Version(config.version));
    }
    if config.disks.is_empty() || config.disks.len() > DISKS_MAX {
        let count = config.disks.len();
        return Err(ConfigError::Disks(format!("{count} disks; 1 to {DISKS_MAX} are possible")));
    }
    let mut seen = HashSet::new();
    if !config.disks.iter().all(|disk| seen.insert(disk.disk)) {
        return Err(ConfigError::Disks("a disk is named twice".into()));
    }
    let all: usize = config.disks.iter().map(queues).sum();
    if all > ALL_QUEUES_MAX {
        let message = format!("{all} queues in all; at most {ALL_QUEUES_MAX} are possible");
        return Err(ConfigError::Disks(message));
    }
    config.disks.iter().try_for_each(check_disk)?;
    let caches =
        config.disks.iter().flat_map(|disk| caches(disk).map(|cache| (disk.disk, cache.bytes)));
    let caches: Vec<_> = caches.collect();
    check_caches(caches.iter().map(|(_, bytes)| Some(*bytes)))
        .map_err(|(index, what)| ConfigError::Disk { disk: caches[index].0, what })
}

fn check_disk(disk: &DiskConfig) -> Result<(), ConfigError> {
    let refuse = |what: String| Err(ConfigError::Disk { disk: disk.disk, what });
    if disk.size == 0 || !disk.size.is_multiple_of(u64::from(CRYPT_SECTOR)) {
        return refuse(format!("its size, {}, is not a multiple of {CRYPT_SECTOR}", disk.size));
    }
    if disk.size > i64::MAX as u64 / 2 {
        return refuse(format!("its size, {}, is beyond what a file can have", disk.size));
    }
    if disk.serial.len() > SERIAL_MAX || !disk.serial.is_ascii() {
        return refuse(format!("its serial is not {SERIAL_MAX} bytes of ASCII at most"));
    }
    if let Err(what) = check_chain(&disk.chain).and_then(|()| check_backend(&disk.backend)) {
        return refuse(what);
    }
    if !(1..=usize::from(QUEUES_MAX)).contains(&queues(disk)) {
        return refuse(format!("{} queues; 1 to {QUEUES_MAX} are possible", queues(disk)));
    }
    let export_alone = disk.read_only && disk.import.is_none() && disk.front_end.is_none();
    if disk.export.is_some() && !export_alone {
        return refuse("what is exported must be read-only, and neither filled nor served".into());
    }
    if let Some(export) = &disk.export
        && export.sums.is_none()
        && (export.except.is_some()
            || matches!(export.format, TargetFormat::Overlay | TargetFormat::Sums))
    {
        return refuse("what is written depends on sums, and no file is to get them".into());
    }
    if disk.beside.is_some() && disk.front_end.is_none() {
        return refuse("`beside` needs a front end".into());
    }
    if replica(disk).is_some() && disk.backend == (BackendSpec::Mem {}) {
        return refuse("a disk in memory cannot have a replica".into());
    }
    check_mirror(disk)
        .and_then(|()| check_merge(disk))
        .and_then(|()| convert::check(disk))
        .or_else(refuse)?;
    if disk.read_only && disk.import.is_some() {
        return refuse("an image cannot be imported to a read-only disk".into());
    }
    Ok(())
}

/// Checks the filters of a chain, each and together.
fn check_chain(chain: &[FilterSpec]) -> Result<(), String> {
    let is_crypt = |link: &FilterSpec| matches!(link, FilterSpec::Crypt { .. });
    if chain.len() > CHAIN_MAX {
        return Err(format!("{} filters; at most {CHAIN_MAX} are possible", chain.len()));
    }
    if chain.iter().filter(|link| is_crypt(link)).count() > 1 {
        return Err("it is encrypted more than once".into());
    }
    chain.iter().try_for_each(|link| match link {
        FilterSpec::Crypt { .. } => Ok(()),
        FilterSpec::Limit(limit) => check_limit(limit),
        FilterSpec::Delay(delay) => check_delay(delay),
        FilterSpec::Fault(fault) => check_fault(fault),
        // Its memory is checked with that of the other disks.
        FilterSpec::Cache(_) => Ok(()),
        FilterSpec::Replicate(replica) => check_replica(replica),
        FilterSpec::Mirror(mirror) => check_copy(mirror),
    })?;
    check_place_of_replica(chain)?;
    let is_cache = |link: &FilterSpec| matches!(link, FilterSpec::Cache(_));
    if chain.iter().filter(|link| is_cache(link)).count() > 1 {
        return Err("it is cached more than once".into());
    }
    // Without encryption all filters are in the order that the guest sees.
    let above = chain.split(is_crypt).next().unwrap_or(chain);
    if chain.iter().any(is_crypt) && above.iter().any(is_cache) {
        return Err("a cache above the encryption would keep plaintext: put it below".into());
    }
    let reorders = |link: &FilterSpec| match link {
        FilterSpec::Delay(delay) => delay.jitter_microseconds > 0 && !delay.reorders,
        _ => false,
    };
    if above.iter().any(reorders) {
        return Err(
            "a delay with jitter reorders what it is given: put it below the encryption, or \
                    say `reorders`"
                .into(),
        );
    }
    Ok(())
}

/// Only filters that imitate a datastore may be below: with others the copier would get faults meant for the guest.
fn check_place_of_replica(chain: &[FilterSpec]) -> Result<(), String> {
    let is_replica = |link: &FilterSpec| matches!(link, FilterSpec::Replicate(_));
    let mut after = chain.split(is_replica).skip(1);
    let Some(below) = after.next() else { return Ok(()) };
    if after.next().is_some() {
        return Err("it is replicated more than once".into());
    }
    if below.iter().any(|link| matches!(link, FilterSpec::Crypt { .. })) {
        return Err("a replica above the encryption would be plaintext: put it below".into());
    }
    let harmless = |link: &FilterSpec| matches!(link, FilterSpec::Delay(_) | FilterSpec::Fault(_));
    if !below.iter().all(harmless) {
        return Err("only `delay` and `fault` may stand below `replicate`".into());
    }
    Ok(())
}

/// Checks what a disk is copied to.
fn check_copy(mirror: &MirrorSpec) -> Result<(), String> {
    let MirrorSpec { to, pace, .. } = mirror;
    pace.check().map_err(|wrong| format!("a copy that gets {wrong}"))?;
    let other_copy =
        |link: &FilterSpec| matches!(link, FilterSpec::Mirror(_) | FilterSpec::Replicate(_));
    if to.chain.iter().any(other_copy) {
        return Err("what a disk is mirrored to can be neither mirrored nor replicated".into());
    }
    if to.backend == (BackendSpec::Mem {}) {
        return Err("a disk cannot be mirrored to memory".into());
    }
    if mirror.same_below && !has_files_below(&to.backend) {
        return Err("its copy has nothing below it that could be the same".into());
    }
    check_chain(&to.chain).and_then(|()| check_backend(&to.backend))
}

fn has_files_below(backend: &BackendSpec) -> bool {
    matches!(backend, BackendSpec::Qcow2 { backing, .. } if !backing.is_empty())
}

/// Checks the place of a mirror, and that nobody but the guest writes the disk meanwhile.
fn check_mirror(disk: &DiskConfig) -> Result<(), String> {
    let is_mirror = |link: &FilterSpec| matches!(link, FilterSpec::Mirror(_));
    let mut parts = disk.chain.split(is_mirror);
    let (above, Some(_)) = (parts.next().unwrap_or_default(), parts.next()) else { return Ok(()) };
    if parts.next().is_some() {
        return Err("it is mirrored more than once".into());
    }
    let stays = |link: &FilterSpec| {
        matches!(link, FilterSpec::Limit(_) | FilterSpec::Delay(_) | FilterSpec::Fault(_))
    };
    if !above.iter().all(stays) {
        return Err("only `limit`, `delay` and `fault` may stand above `mirror`".into());
    }
    let served = disk.front_end.is_none() || is_of_a_guest(disk);
    if !served || disk.read_only {
        return Err("only a disk that is written by its guest alone can be mirrored".into());
    }
    if mirror(disk).is_some_and(|it| it.same_below) && !has_files_below(&disk.backend) {
        return Err("it has nothing below it that its copy could share".into());
    }
    if disk.import.is_some() || disk.export.is_some() || disk.backend == (BackendSpec::Mem {}) {
        return Err(
            "a disk that is imported or exported, or is in memory, cannot be mirrored".into()
        );
    }
    Ok(())
}

/// Checks what is merged, and that nothing else is done with the disk.
fn check_merge(disk: &DiskConfig) -> Result<(), String> {
    let Some(merge) = &disk.merge else { return Ok(()) };
    let used = disk.front_end.is_some() || disk.import.is_some() || disk.export.is_some();
    if !disk.read_only || used || !encrypts_only(&disk.chain) {
        return Err(
            "a layer that is merged must be read-only, without filters but encryption, and neither served, filled nor exported"
                .into(),
        );
    }
    let is_lowest = |backing: &[_]| backing.is_empty();
    if matches!(&disk.backend, BackendSpec::Qcow2 { backing, .. } if is_lowest(backing)) {
        return Err("an image of QEMU's format can be merged only with another below it".into());
    }
    if disk.backend == (BackendSpec::Mem {}) || merge.into.backend == (BackendSpec::Mem {}) {
        return Err("nothing in memory can be merged".into());
    }
    if !encrypts_only(&merge.into.chain) {
        return Err("a layer is merged through no filter but encryption".into());
    }
    check_chain(&merge.into.chain).and_then(|()| check_backend(&merge.into.backend))
}

fn encrypts_only(chain: &[FilterSpec]) -> bool {
    chain.iter().all(|link| matches!(link, FilterSpec::Crypt { .. }))
}

fn check_replica(replica: &ReplicateSpec) -> Result<(), String> {
    if replica.bytes_per_second < REPLICATE_RATE_MIN {
        return Err(format!(
            "a replica that gets {} bytes a second: give at least {REPLICATE_RATE_MIN}",
            replica.bytes_per_second
        ));
    }
    if !replica.offset.is_multiple_of(u64::from(CRYPT_SECTOR)) {
        let offset = replica.offset;
        return Err(format!(
            "its replica begins at {offset}, which is not a multiple of {CRYPT_SECTOR}"
        ));
    }
    if replica.replica == replica.map {
        return Err("its replica and the map of the replica are the same file".into());
    }
    Ok(())
}

fn check_backend(backend: &BackendSpec) -> Result<(), String> {
    let BackendSpec::Qcow2 { backing, offset, .. } = backend else { return Ok(()) };
    if backing.len() > BACKING_MAX {
        let count = backing.len();
        return Err(format!("{count} files below its image; at most {BACKING_MAX} are possible"));
    }
    if backing.iter().rev().skip(1).any(|file| file.format == ImageFormat::Raw) {
        return Err("a raw file is the last of its chain: nothing can be below it".into());
    }
    if !offset.is_multiple_of(u64::from(CRYPT_SECTOR)) {
        return Err(format!(
            "its data begins at {offset}, which is not a multiple of {CRYPT_SECTOR}"
        ));
    }
    Ok(())
}

fn check_limit(limit: &LimitSpec) -> Result<(), String> {
    let budgets = [limit.requests, limit.bytes];
    if budgets.iter().all(Option::is_none) {
        return Err("a limit limits nothing: give `requests`, `bytes` or both".into());
    }
    let empty = |budget: &Budget| budget.per_second == 0 || budget.burst == 0;
    if budgets.iter().flatten().any(empty) {
        return Err(
            "a limit of 0 would stop the disk: `per_second` and `burst` are at least 1".into()
        );
    }
    Ok(())
}

fn check_delay(delay: &DelaySpec) -> Result<(), String> {
    if delay.microseconds.max(delay.jitter_microseconds) > DELAY_MAX {
        return Err(format!("a delay of more than {DELAY_MAX} microseconds"));
    }
    Ok(())
}

fn check_fault(fault: &FaultSpec) -> Result<(), String> {
    if fault.rules.len() > FAULT_RULES_MAX {
        let count = fault.rules.len();
        return Err(format!("{count} fault rules; at most {FAULT_RULES_MAX} are possible"));
    }
    let only = |rule: &FaultRule, kinds: &[OperationKind]| {
        !rule.operations.is_empty() && rule.operations.iter().all(|kind| kinds.contains(kind))
    };
    fault.rules.iter().try_for_each(|rule| match rule.kind {
        _ if rule.one_in == 0 => Err("a fault rule's `one_in` is at least 1".into()),
        FaultKind::Error { errno } if !(1..=ERRNO_MAX).contains(&errno) => {
            Err(format!("{errno} is no error number of Linux"))
        }
        FaultKind::Torn if !only(rule, &[OperationKind::Write]) => {
            Err("only writes can be torn: give `operations` as [\"write\"]".into())
        }
        FaultKind::Lost
            if rule.operations.is_empty() || rule.operations.contains(&OperationKind::Read) =>
        {
            Err("a read cannot be lost, the guest would be given memory that nobody filled: name \
                 the other `operations`"
                .into())
        }
        FaultKind::Error { .. } | FaultKind::Torn | FaultKind::Lost => Ok(()),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use vmseal_api::filter::{CACHE_BYTES_MAX, CACHE_BYTES_MIN};

    use super::*;

    fn good() -> Value {
        json!({
            "version": 1,
            "vm": "01890a5d-ac96-774b-bcce-b302099a8057",
            "control": { "path": "/run/x" },
            "disks": [{
                "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
                "size": 8192,
                "serial": "vmseal-0",
                "chain": [{ "kind": "crypt", "key": { "fd": 5 }, "holes": "zero" }],
                "export": null,
                "backend": { "kind": "file", "file": { "fd": 6 }, "offset": 16777216 },
                "front_end": { "kind": "vhost_user_blk", "socket": { "fd": 7 }, "queues": 2 }
            }]
        })
    }

    fn read_value(value: &Value) -> Result<FilterConfig, ConfigError> {
        read(value.to_string().as_bytes())
    }

    #[test]
    fn a_good_configuration_is_read() {
        assert_eq!(read_value(&good()).unwrap().disks.len(), 1);
    }

    #[test]
    fn the_files_below_an_image_are_checked() {
        let file = |format: &str| json!({ "file": { "fd": 8 }, "format": format });
        let image = |backing: Vec<Value>, offset: u64| {
            let mut config = good();
            let file = json!({ "fd": 6 });
            config["disks"][0]["backend"] =
                json!({ "kind": "qcow2", "file": file, "backing": backing, "offset": offset });
            read_value(&config).map_err(|error| error.to_string())
        };
        assert!(image(vec![], 0).is_ok());
        assert!(image(vec![file("qcow2"), file("raw")], 4096).is_ok());
        for (backing, offset, reason) in [
            (vec![file("raw"), file("qcow2")], 0, "last of its chain"),
            (vec![file("qcow2"); BACKING_MAX + 1], 0, "9 files below"),
            (vec![file("vmdk")], 0, "vmdk"),
            (vec![], 512, "not a multiple"),
        ] {
            let refusal = image(backing, offset).unwrap_err();
            assert!(refusal.contains(reason), "{refusal}");
        }
        let mut memory = good();
        memory["disks"][0]["backend"] = json!({ "kind": "mem" });
        assert!(read_value(&memory).is_ok());
    }

    #[test]
    fn a_chain_is_checked_for_sense() {
        let crypt = || json!({ "kind": "crypt", "key": { "fd": 5 }, "holes": "zero" });
        let budget = json!({ "per_second": 100, "burst": 10 });
        let limit = json!({ "kind": "limit", "requests": budget, "bytes": budget });
        let delay = |reorders: bool| json!({ "kind": "delay", "microseconds": 5, "jitter_microseconds": 5, "reorders": reorders });
        let fault = |kind: Value, operations: &[&str]| {
            let rule = json!({ "kind": kind, "operations": operations, "one_in": 10 });
            json!({ "kind": "fault", "rules": [rule] })
        };
        let lost = || json!({ "is": "lost" });
        let cache = |bytes: u64| json!({ "kind": "cache", "bytes": bytes });
        let copy = |to: i32, map: i32, offset: u64, rate: u64| {
            json!({
                "kind": "replicate", "replica": { "fd": to }, "map": { "fd": map },
                "offset": offset, "bytes_per_second": rate
            })
        };
        let replica = || copy(10, 11, 16 << 20, REPLICATE_RATE_MIN);
        let good_chains = [
            json!([limit, crypt(), delay(false), fault(json!({ "is": "error", "errno": 5 }), &[])]),
            json!([delay(true), limit, fault(lost(), &["flush", "write"])]),
            json!([crypt(), fault(json!({ "is": "torn" }), &["write"])]),
            json!([limit, crypt(), cache(1 << 20), delay(false)]),
            json!([limit, cache(CACHE_BYTES_MAX)]),
            json!([limit, crypt(), cache(1 << 20), replica(), delay(false)]),
            json!([limit, replica()]),
            json!([]),
        ];
        for chain in good_chains {
            let mut config = good();
            config["disks"][0]["chain"] = chain.clone();
            read_value(&config).unwrap_or_else(|error| panic!("{chain}: {error}"));
        }
        let bad = [
            (json!([crypt(), limit, crypt()]), "more than once"),
            (json!([{ "kind": "limit" }]), "limits nothing"),
            (json!([{ "kind": "limit", "bytes": { "per_second": 0, "burst": 1 } }]), "limit of 0"),
            (json!([delay(false), crypt()]), "reorders"),
            (json!([delay(false)]), "reorders"),
            (json!([{ "kind": "delay", "microseconds": DELAY_MAX + 1 }]), "a delay of more"),
            (json!([fault(lost(), &[])]), "cannot be lost"),
            (json!([fault(lost(), &["read"])]), "cannot be lost"),
            (json!([fault(json!({ "is": "torn" }), &["write", "read"])]), "only writes"),
            (json!([fault(json!({ "is": "torn" }), &[])]), "only writes"),
            (json!([fault(json!({ "is": "error", "errno": 0 }), &[])]), "no error number"),
            (json!([{ "kind": "fault", "rules": [{ "kind": lost(), "one_in": 0 }] }]), "one_in"),
            (json!([cache(1 << 20), crypt()]), "would keep plaintext"),
            (json!([crypt(), cache(1 << 20), cache(1 << 20)]), "cached more than once"),
            (json!([crypt(), cache(0)]), "a cache of 0 bytes"),
            (json!([crypt(), cache((1 << 20) + 4096)]), "give a multiple"),
            (json!([crypt(), cache(CACHE_BYTES_MAX + CACHE_BYTES_MIN)]), "in all"),
            (json!([replica(), crypt()]), "replica above the encryption"),
            (json!([crypt(), replica(), replica()]), "replicated more than once"),
            (json!([crypt(), replica(), cache(1 << 20)]), "only `delay` and `fault`"),
            (json!([replica(), limit]), "only `delay` and `fault`"),
            (json!([copy(10, 11, 0, REPLICATE_RATE_MIN - 1)]), "give at least 1048576"),
            (json!([copy(10, 11, 512, REPLICATE_RATE_MIN)]), "begins at 512"),
            (json!([copy(10, 10, 0, REPLICATE_RATE_MIN)]), "the same file"),
            (json!([{ "kind": "tape" }]), "tape"),
            (Value::from(vec![limit.clone(); CHAIN_MAX + 1]), "filters"),
        ];
        for (chain, reason) in bad {
            let mut config = good();
            config["disks"][0]["chain"] = chain.clone();
            let refusal = read_value(&config).expect_err(&chain.to_string()).to_string();
            assert!(refusal.contains(reason), "{chain}: {refusal}");
        }
    }

    #[test]
    fn what_a_layer_is_written_to_is_checked_for_sense() {
        let crypt = |fd: i32| json!({ "kind": "crypt", "key": { "fd": fd }, "holes": "zero" });
        let below = json!([{ "file": { "fd": 8 }, "format": "raw" }]);
        let layer = |fd: i32, backing: &Value| json!({ "kind": "qcow2", "file": { "fd": fd }, "backing": backing, "offset": 0 });
        let raw = |fd: i32| json!({ "kind": "file", "file": { "fd": fd }, "offset": 0 });
        let memory = || json!({ "kind": "mem" });
        let read = |chain: Value, backend: Value, to_chain: Value, to: Value| {
            let mut config = good();
            let disk = &mut config["disks"][0];
            disk.as_object_mut().unwrap().remove("front_end");
            disk.as_object_mut().unwrap().remove("import");
            disk["read_only"] = json!(true);
            (disk["chain"], disk["backend"]) = (chain, backend);
            let into = json!({ "chain": to_chain, "backend": to });
            disk["merge"] = json!({ "into": into, "lock": { "fd": 20 } });
            read_value(&config).map(drop).map_err(|error| error.to_string())
        };
        let no = || json!([]);
        // Down to the image below; the copies of a layer and of an image.
        read(no(), layer(6, &below), no(), raw(9)).unwrap();
        read(json!([crypt(5)]), layer(6, &below), json!([crypt(11)]), layer(9, &below)).unwrap();
        read(json!([crypt(5)]), raw(6), no(), raw(9)).unwrap();
        let cache = || json!([{ "kind": "cache", "bytes": 1 << 20 }]);
        for (refused, reason) in [
            (read(no(), layer(6, &json!([])), no(), raw(9)), "another below it"),
            (read(no(), memory(), no(), raw(9)), "in memory"),
            (read(no(), raw(6), no(), memory()), "in memory"),
            (read(cache(), raw(6), no(), raw(9)), "without filters but encryption"),
            (read(no(), raw(6), cache(), raw(9)), "no filter but encryption"),
        ] {
            let refused = refused.unwrap_err();
            assert!(refused.contains(reason), "{refused}");
        }
    }

    #[test]
    fn a_mirror_is_checked_for_sense() {
        let crypt = |fd: i32| json!({ "kind": "crypt", "key": { "fd": fd }, "holes": "zero" });
        let file = |fd: i32| json!({ "kind": "file", "file": { "fd": fd }, "offset": 0 });
        let mirror = |chain: Value, backend: Value, rate: u64| {
            json!({
                "kind": "mirror", "to": { "chain": chain, "backend": backend },
                "map": { "fd": 12 }, "pace": { "bytes_per_second": rate }
            })
        };
        let good_mirror = || mirror(json!([crypt(10)]), file(11), REPLICATE_RATE_MIN);
        let limit = json!({ "kind": "limit", "requests": { "per_second": 9, "burst": 9 } });
        let cache = json!({ "kind": "cache", "bytes": 1 << 20 });
        let replica = json!({
            "kind": "replicate", "replica": { "fd": 20 }, "map": { "fd": 21 },
            "bytes_per_second": REPLICATE_RATE_MIN
        });
        let with = |chain: &Value| {
            let mut config = good();
            config["disks"][0]["chain"] = chain.clone();
            config
        };
        for chain in [
            json!([good_mirror()]),
            json!([limit, good_mirror(), crypt(5), cache, replica]),
            json!([mirror(json!([]), file(11), REPLICATE_RATE_MIN), crypt(5)]),
            json!([{
                "kind": "mirror", "to": { "chain": [], "backend": file(11) }, "map": { "fd": 12 }
            }]),
        ] {
            let config = read_value(&with(&chain));
            let config = config.unwrap_or_else(|error| panic!("{chain}: {error}"));
            assert_eq!(pools(&config.disks[0]), 4, "a queue of the disk, and one of the copy");
        }
        let rate = REPLICATE_RATE_MIN;
        for (chain, reason) in [
            (json!([crypt(5), good_mirror()]), "above `mirror`"),
            (json!([cache, good_mirror()]), "above `mirror`"),
            (json!([good_mirror(), good_mirror()]), "mirrored more than once"),
            (json!([mirror(json!([]), file(11), rate - 1)]), "give at least"),
            (json!([mirror(json!([replica]), file(11), rate)]), "neither mirrored nor"),
            (json!([mirror(json!([good_mirror()]), file(11), rate)]), "neither mirrored nor"),
            (json!([mirror(json!([]), json!({ "kind": "mem" }), rate)]), "to memory"),
            (json!([mirror(json!([crypt(8), crypt(9)]), file(11), rate)]), "more than once"),
        ] {
            let refusal = read_value(&with(&chain)).expect_err(&chain.to_string()).to_string();
            assert!(refusal.contains(reason), "{chain}: {refusal}");
        }
        for (pointer, value) in [
            ("/disks/0/read_only", json!(true)),
            ("/disks/0/front_end", json!({ "kind": "nbd", "listen": { "fd": 7 } })),
        ] {
            let mut config = with(&json!([good_mirror()]));
            config["disks"][0][pointer.rsplit('/').next().unwrap()] = value;
            let refusal = read_value(&config).expect_err(pointer).to_string();
            assert!(refusal.contains("its guest alone"), "{pointer}: {refusal}");
        }
    }

    #[test]
    fn each_invalid_value_is_refused_with_its_reason() {
        let cases: [(&str, Value, &str); 12] = [
            ("/version", json!(2), "version 2"),
            ("/disks", json!([]), "0 disks"),
            ("/disks/0/size", json!(1000), "multiple of 4096"),
            ("/disks/0/size", json!(u64::MAX - 4095), "beyond what a file"),
            ("/disks/0/serial", json!("123456789012345678901"), "serial"),
            ("/disks/0/front_end/queues", json!(0), "0 queues"),
            ("/disks/0/front_end/queues", json!(17), "17 queues"),
            ("/disks/0/backend/kind", json!("tape"), "tape"),
            ("/disks/0/chain/0/holes", json!("maybe"), "maybe"),
            ("/disks/0/disk", json!("x"), "not understood"),
            (
                "/disks/0/export",
                json!({ "target": { "fd": 8 }, "format": { "kind": "raw" } }),
                "must be read-only",
            ),
            (
                "/disks/0",
                json!({
                    "disk": "01890a5d-ac96-774b-bcce-b302099a8058",
                    "size": 8192,
                    "serial": "",
                    "read_only": true,
                    "chain": [],
                    "backend": { "kind": "file", "file": { "fd": 6 }, "offset": 0 },
                    "export": { "target": { "fd": 8 }, "format": { "kind": "sums" } }
                }),
                "no file is to get them",
            ),
        ];
        for (pointer, value, reason) in cases {
            let mut config = good();
            *config.pointer_mut(pointer).unwrap() = value;
            let refusal = read_value(&config).unwrap_err().to_string();
            assert!(refusal.contains(reason), "{pointer}: {refusal}");
        }
        let mut config = good();
        config["disks"][0]["beside"] = json!({ "listen": { "fd": 9 } });
        assert!(read_value(&config).unwrap().disks[0].beside.is_some());
        config["disks"][0]["front_end"] = Value::Null;
        assert!(read_value(&config).unwrap_err().to_string().contains("needs a front end"));
        let mut config = good();
        config["disks"][0]["backend"] = json!({ "kind": "mem" });
        assert!(read_value(&config).is_ok());
        config["disks"][0]["chain"] = json!([{
            "kind": "replicate", "replica": { "fd": 8 }, "map": { "fd": 9 },
            "bytes_per_second": REPLICATE_RATE_MIN
        }]);
        assert!(read_value(&config).unwrap_err().to_string().contains("disk in memory"));
        let mut config = good();
        config["surprise"] = json!(1);
        assert!(read_value(&config).unwrap_err().to_string().contains("surprise"));
        let mut config = good();
        let disk = config["disks"][0].clone();
        config["disks"] = json!([disk, disk]);
        assert!(read_value(&config).unwrap_err().to_string().contains("twice"));
        let mut config = good();
        let nbd = |number: usize| {
            let mut disk = disk.clone();
            disk["disk"] = json!(format!("01890a5d-ac96-774b-bcce-{number:012}"));
            disk["front_end"] = json!({ "kind": "nbd", "listen": { "path": "/run/y" } });
            disk
        };
        config["disks"] = (0..16).map(nbd).collect();
        assert_eq!(read_value(&config).unwrap().disks.iter().map(pools).sum::<usize>(), 128);
        config["disks"] = (0..17).map(nbd).collect();
        assert!(read_value(&config).unwrap_err().to_string().contains("68 queues in all"));
        config["disks"] = (0..3).map(nbd).collect();
        for disk in config["disks"].as_array_mut().unwrap() {
            disk["chain"] = json!([{ "kind": "cache", "bytes": CACHE_BYTES_MAX / 2 }]);
        }
        assert!(read_value(&config).unwrap_err().to_string().contains("384 MiB in all"));
        config["disks"].as_array_mut().unwrap().pop();
        assert!(read_value(&config).is_ok());
        let endless = std::io::repeat(b' ');
        assert!(matches!(read(endless), Err(ConfigError::TooLong)));
    }
}
