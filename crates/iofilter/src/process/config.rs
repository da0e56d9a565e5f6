//! Reads and checks the configuration that the process gets at its start.

mod chain;
mod convert;

use std::collections::HashSet;
use std::io::Read;

use vmseal_api::filter::{
    BackendSpec, CRYPT_SECTOR, CacheSpec, DISKS_MAX, DiskConfig, FilterConfig, FilterSpec,
    FrontEndSpec, Holes, MirrorSpec, NBD_CONNECTIONS, NewStack, QUEUES_MAX, ReplicateSpec,
    SERIAL_MAX, TargetFormat, VERSION, check_caches,
};
use vmseal_api::id::DiskId;
use vmseal_api::size::Size;

use crate::process::config::chain::{check_backend, check_chain, check_copy, has_files_below};

/// The longest configuration, in bytes; [`DISKS_MAX`] disks fit well within.
pub const CONFIG_MAX: u64 = 1024 * 1024;

/// The most queues of all disks together: each has tables of about 300 KiB, and the process must stay
/// under 32 MiB.
pub const ALL_QUEUES_MAX: usize = 64;

/// The longest disk, in bytes: what is behind a header still has a place that files can have.
pub const SIZE_MAX: u64 = i64::MAX as u64 / 2;

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

/// The disk's own cache.
#[must_use]
pub fn cache(disk: &DiskConfig) -> Option<&CacheSpec> {
    disk.chain.iter().find_map(of_cache)
}

fn of_cache(link: &FilterSpec) -> Option<&CacheSpec> {
    match link {
        FilterSpec::Cache(cache) => Some(cache),
        _ => None,
    }
}

/// The caches that the disk may have at a time: its own, and that of its mirror, also of one that begins later.
pub fn caches(disk: &DiskConfig) -> impl Iterator<Item = &CacheSpec> {
    let of_copy = match mirror(disk) {
        Some(mirror) => mirror.to.chain.iter().find_map(of_cache),
        None if can_change(disk) => cache(disk),
        None => None,
    };
    cache(disk).into_iter().chain(of_copy)
}

/// Whether zeroes in storage are zeroes to the guest, through such a chain.
#[must_use]
pub fn keeps_zeroes(chain: &[FilterSpec]) -> bool {
    let is_noise =
        |link: &FilterSpec| matches!(link, FilterSpec::Crypt { holes: Holes::Ciphertext, .. });
    !chain.iter().any(is_noise)
}

/// Whether requests of the disk fail while storage does not answer.
pub fn fails_when_stalled(disk: &DiskConfig) -> bool {
    disk.chain.iter().any(|link| matches!(link, FilterSpec::Stall(_)))
}

/// Whether what a guest reads goes through buffers of its own.
pub fn bounces_reads(disk: &DiskConfig) -> bool {
    disk.chain.iter().any(|link| matches!(link, FilterSpec::Bounce {}))
}

/// The disk's replica.
#[must_use]
pub fn replica(disk: &DiskConfig) -> Option<&ReplicateSpec> {
    disk.chain.iter().find_map(|link| match link {
        FilterSpec::Replicate(replica) => Some(&**replica),
        _ => None,
    })
}

/// Whether the disk's stack can be exchanged, and the disk be mirrored, while it is served: not what has a replica or is filled or written down
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

/// How many rings a disk takes while it is served, beyond those of its queues: those of another stack (and of its image's thread), opened
/// before the former is closed, or those of a copy, of its image's thread and of its two sides.
#[must_use]
pub fn spare_rings(disk: &DiskConfig) -> usize {
    if can_change(disk) { 2 * queues(disk) + 5 } else { 0 }
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
    stack.size.map_or(Ok(()), check_size)?;
    let Some(chain) = &stack.chain else { return Ok(()) };
    let at_start = |link: &FilterSpec| {
        matches!(
            link,
            FilterSpec::Cache(_)
                | FilterSpec::Replicate(_)
                | FilterSpec::Mirror(_)
                | FilterSpec::Stall(_)
        )
    };
    if chain.iter().any(at_start) {
        return Err("`cache`, `replicate`, `mirror` and `stall` are not part of a new stack".into());
    }
    check_chain(chain)
}

/// Checks what a disk is to be copied to while it is served; `cache` is its own.
///
/// # Errors
/// What is wrong with it.
pub fn check_new_copy(mirror: &MirrorSpec, cache: Option<&CacheSpec>) -> Result<(), String> {
    check_copy(mirror)?;
    check_cache_of_copy(mirror, cache)
}

/// The disks' own caches are checked together; each copy's has the memory that its disk's gives up when it pivots.
fn check_cache_of_copy(mirror: &MirrorSpec, cache: Option<&CacheSpec>) -> Result<(), String> {
    let own = cache.map_or(0, |cache| cache.bytes);
    let Some(copy) = mirror.to.chain.iter().find_map(of_cache) else { return Ok(()) };
    if copy.bytes > own {
        let (copy, own) = (Size(copy.bytes), Size(own));
        return Err(format!("its copy has a cache of {copy}: at most the disk's own, {own}"));
    }
    check_caches([Some(copy.bytes)]).map_err(|(_, what)| what)
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
    let caches = config.disks.iter();
    let caches = caches.filter_map(|disk| cache(disk).map(|cache| (disk.disk, cache.bytes)));
    let caches: Vec<_> = caches.collect();
    check_caches(caches.iter().map(|(_, bytes)| Some(*bytes)))
        .map_err(|(index, what)| ConfigError::Disk { disk: caches[index].0, what })
}

/// Checks the size of a disk, in bytes.
fn check_size(size: u64) -> Result<(), String> {
    if size == 0 || !size.is_multiple_of(u64::from(CRYPT_SECTOR)) {
        return Err(format!("its size, {size}, is not a multiple of {CRYPT_SECTOR}"));
    }
    if size > SIZE_MAX {
        return Err(format!("its size, {size}, is beyond what a file can have"));
    }
    Ok(())
}

fn check_disk(disk: &DiskConfig) -> Result<(), ConfigError> {
    let refuse = |what: String| Err(ConfigError::Disk { disk: disk.disk, what });
    check_size(disk.size).or_else(refuse)?;
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
            || export.changed.is_some()
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
        .and_then(|()| check_stall(disk))
        .and_then(|()| check_merge(disk))
        .and_then(|()| convert::check(disk))
        .or_else(refuse)?;
    if disk.read_only && disk.import.is_some() {
        return refuse("an image cannot be imported to a read-only disk".into());
    }
    Ok(())
}

/// Checks the place of a mirror, and that all that is written meanwhile passes it.
fn check_mirror(disk: &DiskConfig) -> Result<(), String> {
    let is_mirror = |link: &FilterSpec| matches!(link, FilterSpec::Mirror(_));
    let mut parts = disk.chain.split(is_mirror);
    let (above, Some(_)) = (parts.next().unwrap_or_default(), parts.next()) else { return Ok(()) };
    if parts.next().is_some() {
        return Err("it is mirrored more than once".into());
    }
    let stays = |link: &FilterSpec| {
        matches!(
            link,
            FilterSpec::Limit(_)
                | FilterSpec::Stall(_)
                | FilterSpec::Delay(_)
                | FilterSpec::Fault(_)
        )
    };
    if !above.iter().all(stays) {
        return Err("only `limit`, `stall`, `delay` and `fault` may stand above `mirror`".into());
    }
    if let Some(copy) = mirror(disk) {
        check_cache_of_copy(copy, cache(disk))?;
        if copy.same_below && !has_files_below(&disk.backend) {
            return Err("it has nothing below it that its copy could share".into());
        }
    }
    if disk.import.is_some() || disk.export.is_some() || disk.backend == (BackendSpec::Mem {}) {
        return Err(
            "a disk that is imported or exported, or is in memory, cannot be mirrored".into()
        );
    }
    Ok(())
}

/// Checks that what serves a disk whose requests may fail before storage has answered them knows of that, and that the next filter does
/// not serve before storage has.
fn check_stall(disk: &DiskConfig) -> Result<(), String> {
    if !fails_when_stalled(disk) {
        return Ok(());
    }
    if !matches!(disk.front_end, Some(FrontEndSpec::VhostUserBlk { .. })) {
        return Err("`stall` is for a disk that a guest has (vhost-user-blk)".into());
    }
    if matches!(disk.backend, BackendSpec::Nbd { .. }) {
        return Err(
            "`stall` needs storage whose lock lasts as long as its requests, and an NBD server has none"
                .into(),
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

#[cfg(test)]
mod tests;
