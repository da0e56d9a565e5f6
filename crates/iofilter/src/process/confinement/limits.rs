//! Limits: of memory, which depends on the disks that are served; of threads, where they are counted for
//! this process alone.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use vmseal_api::filter::{DiskConfig, FilterConfig, NBD_CONNECTIONS};

use super::ConfinementError;
use crate::copy::engine;
use crate::disk::{POOLS_BYTES, READER_POOL_BYTES};
use crate::front_ends::nbd::beside::POOL_BYTES as BESIDE_POOL_BYTES;
use crate::layers::bounce;
use crate::layers::cache;
use crate::layers::leg::{COPY_POOL_BYTES, REMOTE_POOL_BYTES};
use crate::layers::replicate;
use crate::layers::stall;
use crate::process::config;

/// The program itself: its data, the log, control connections, the caches of an import, and the
/// allocator's memory for a few threads.
const BASE_BYTES: u64 = 64 << 20;

/// For each queue: its thread's stack, its tables, and the allocator's memory for its thread.
const QUEUE_BYTES: u64 = 2 << 20;

/// For each reader beside a front end: the same, its buffers, and those of its chain.
const READER_BYTES: u64 = QUEUE_BYTES + (READER_POOL_BYTES + BESIDE_POOL_BYTES) as u64;

/// The chains of a copier: from the disk, and to its copy.
const COPY_CHAINS: usize = 2;

/// For their buffers.
const COPY_CHAINS_BYTES: u64 = (COPY_POOL_BYTES + REMOTE_POOL_BYTES) as u64;

/// The most threads, the kernel's for io_uring included: two to four for each of the most queues.
const THREADS_MAX: u64 = 512;

/// The most private writable memory, in bytes, mapped or used: stacks, tables, buffers. Guest memory is
/// shared and not included, and so are buffers that `vmseal-rbd` has, too. Less than half of it is ever used, except
/// for caches, which fill their part.
pub(super) fn memory(config: &FilterConfig) -> u64 {
    let queues: usize = config.disks.iter().map(config::pools).sum();
    let readers =
        |disk: &DiskConfig| disk.beside.as_ref().map_or(0, |_| usize::from(NBD_CONNECTIONS));
    let caches = config.disks.iter().flat_map(|disk| {
        // The copier has chains of its own, which go through a cache too.
        let chains = config::queues(disk) + readers(disk) + COPY_CHAINS;
        config::caches(disk).map(move |cache| cache::memory(cache, chains))
    });
    // A disk that may grow may be copied after that.
    let longest =
        |disk: &DiskConfig| if config::can_change(disk) { config::SIZE_MAX } else { disk.size };
    let of_copy =
        |disk: &DiskConfig| replicate::memory(disk.disk, longest(disk)) + COPY_CHAINS_BYTES;
    let copies = |disk: &DiskConfig| {
        let may_come = config::mirror(disk).is_none() && config::can_change(disk);
        // The chains of one that is there from the start are among the disk's pools.
        let chains = if may_come { config::queues(disk) as u64 * QUEUE_BYTES } else { 0 };
        let count = [config::replica(disk).is_some(), config::mirror(disk).is_some(), may_come];
        count.iter().filter(|is| **is).count() as u64 * of_copy(disk) + chains
    };
    let replicas = config.disks.iter().map(copies).sum::<u64>();
    let may_come = config.disks.iter().any(config::can_change);
    // The buffers of copies that begin while the process runs are not within those of the start.
    let pools = if may_come { 2 * POOLS_BYTES } else { POOLS_BYTES };
    let all_readers = config.disks.iter().map(readers).sum::<usize>() as u64;
    let served = queues as u64 * QUEUE_BYTES + all_readers * READER_BYTES;
    let bounced = config.disks.iter().filter(|disk| config::bounces_reads(disk));
    let bounced = bounced.map(|disk| config::queues(disk) + readers(disk)).sum::<usize>();
    let bounced = bounced as u64 * bounce::POOL_BYTES as u64;
    // Those of the disk, and of one that is copied while it is served, which has the former chains for a moment: its own, and those to its copy.
    let guarded = config.disks.iter().filter(|disk| config::fails_when_stalled(disk));
    let guarded = guarded.map(|disk| 3 * config::queues(disk)).sum::<usize>();
    let guarded = guarded as u64 * stall::POOL_BYTES as u64;
    let copied =
        |disk: &&DiskConfig| disk.import.is_some() || disk.export.is_some() || disk.merge.is_some();
    let copied = config.disks.iter().filter(copied).count() as u64 * engine::BYTES as u64;
    BASE_BYTES + pools as u64 + served + caches.sum::<u64>() + replicas + bounced + guarded + copied
}

/// Sets them, never above the limits in force.
pub(super) fn set(memory: u64, alone: bool) -> Result<(), ConfinementError> {
    lower("RLIMIT_DATA", Resource::RLIMIT_DATA, memory)?;
    if alone {
        lower("RLIMIT_NPROC", Resource::RLIMIT_NPROC, THREADS_MAX)?;
    }
    Ok(())
}

fn lower(name: &'static str, resource: Resource, to: u64) -> Result<(), ConfinementError> {
    let set =
        getrlimit(resource).and_then(|(_, hard)| setrlimit(resource, to.min(hard), to.min(hard)));
    set.map_err(|error| ConfinementError::Limit { limit: name, error: error.into() })
}
