//! What a guest writes into its memory for a queue of its disk: the first byte says how the queue is set
//! up, the rest is the memory from its start on, where the ring is, and, if the first byte says so, also
//! the record of requests under way that a VMM gives back. What the parser gives for data is in the
//! guest's memory, the queue comes to an end, and each page that was written is in the log.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use vhost::vhost_user::message::VhostUserLog;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmseal_iofilter::front_ends::vhost_user::inflight::{Inflight, Record};
use vmseal_iofilter::front_ends::vhost_user::memory_log::{MemoryLog, PAGE, RingLog};
use vmseal_iofilter::front_ends::vhost_user::queue::{Setup, serve_now};
use vmseal_iofilter::front_ends::vhost_user::request::Parser;
use vmseal_iofilter::stack::memory::{Segment, Segments};
use vmseal_iofilter::storage::mem::MemDisk;

use crate::{INPUT_MAX, disk};

const SIZE: usize = 128 * 1024;

/// The guest's memory: two regions, with a gap between them. The second is so large that descriptors of
/// the same memory can come to more than 4 GiB.
const REGIONS: [(GuestAddress, usize); 2] =
    [(GuestAddress(0), 64 * 1024), (GuestAddress(128 * 1024), 8 << 20)];

/// Where the used ring is: behind all input.
const USED: u64 = 0xf000;

/// The largest queue.
const RING_MAX: u16 = 1024;

/// The most passes. A queue whose used ring lies over its available ring feeds itself without end.
const PASSES: usize = 64;

fn queue(size: u16, event_idx: bool) -> Queue {
    let mut queue = Queue::new(RING_MAX).unwrap();
    queue.set_size(size);
    queue.try_set_desc_table_address(GuestAddress(0)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(u64::from(size) * 16)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
    queue.set_event_idx(event_idx);
    queue.set_ready(true);
    queue
}

/// Whether a segment lies in one region of the guest's memory.
fn is_inside(segment: &Segment, memory: &GuestMemoryMmap) -> bool {
    let start = segment.base() as usize;
    memory.iter().any(|region| {
        let base = memory.get_host_address(region.start_addr()).unwrap() as usize;
        start >= base && start + segment.len() <= base + region.len() as usize
    })
}

fn check_parser(mut queue: Queue, memory: &GuestMemoryMmap) {
    let mut parser = Parser::default();
    let Ok(chains) = queue.iter(memory) else { return };
    for chain in chains {
        let mut data = Segments::default();
        if let Ok(parsed) = parser.parse(chain, memory, &mut data) {
            assert_eq!(parsed.status.len(), 1);
            assert!(is_inside(&parsed.status, memory));
            assert!(data.as_slice().iter().all(|segment| is_inside(segment, memory)));
        }
    }
}

/// A record with this content, and what it says was begun; none if it is refused.
fn record(content: &[u8], size: u16) -> Option<(Record, Vec<u16>)> {
    let (about, file) = Inflight::make(1, size).unwrap();
    let length = content.len().min(about.mmap_size as usize);
    file.write_all_at(&content[..length], 0).unwrap();
    let mut record = Inflight::adopt(&about, file, 1).unwrap().record(0, size).unwrap();
    let begun = record.resume(0).ok()?.unwrap_or_default();
    assert!(begun.len() <= usize::from(size));
    Some((record, begun))
}

/// How much of each region is compared with what it was: all of the second one would take long.
const COMPARED: usize = 256 * 1024;

/// A log that covers the guest's memory, and its file.
fn log() -> (MemoryLog, File) {
    let length = (REGIONS[1].0.0 + REGIONS[1].1 as u64) / PAGE / 8;
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create("log", flags).unwrap());
    file.set_len(length).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
    let about = VhostUserLog::new(length, 0);
    (MemoryLog::map(&about, file.try_clone().unwrap()).unwrap(), file)
}

/// The beginnings of the regions.
fn beginnings(memory: &GuestMemoryMmap) -> Vec<(u64, Vec<u8>)> {
    let beginning = |(start, length): (GuestAddress, usize)| {
        let mut bytes = vec![0; length.min(COMPARED)];
        memory.read_slice(&mut bytes, start).unwrap();
        (start.0, bytes)
    };
    REGIONS.into_iter().map(beginning).collect()
}

fn check_log(log: &File, before: &[(u64, Vec<u8>)], after: &[(u64, Vec<u8>)]) {
    let mut bits = vec![0; log.metadata().unwrap().len() as usize];
    log.read_exact_at(&mut bits, 0).unwrap();
    for ((start, before), (_, after)) in before.iter().zip(after) {
        let pages = before.chunks(PAGE as usize).zip(after.chunks(PAGE as usize));
        for (page, (before, after)) in (start / PAGE..).zip(pages) {
            let marked = bits[(page / 8) as usize] & (1 << (page % 8)) != 0;
            assert!(marked || before == after, "page {page} was written and is not in the log");
        }
    }
}

/// See the module.
pub fn run(data: &[u8]) {
    let Some((&kind, content)) = data.split_first() else { return };
    let content = &content[..content.len().min(INPUT_MAX)];
    let (size, event_idx) = (1 << (kind & 7), kind & 8 != 0);
    let (write_through, read_only, encrypted) = (kind & 16 != 0, kind & 32 != 0, kind & 64 == 0);
    let memory = GuestMemoryMmap::from_ranges(&REGIONS).unwrap();
    memory.write_slice(content, GuestAddress(0)).unwrap();
    check_parser(queue(size, event_idx), &memory);

    let bytes = MemDisk::new(SIZE);
    let (disk, served) = disk(&bytes, read_only, encrypted, 1);
    let (record, begun) = match kind & 128 != 0 {
        true => record(content, size).map_or((None, Vec::new()), |(one, begun)| (Some(one), begun)),
        false => (None, Vec::new()),
    };
    let before = beginnings(&memory);
    let (log, bits) = log();
    let log = RingLog { log: Arc::new(log), used: Some(USED), changed: None };
    let event = || Arc::new(OwnedFd::from(EventFd::new().unwrap()));
    let setup = Setup {
        index: 0,
        queue: queue(size, event_idx),
        memory: memory.clone(),
        kick: event(),
        call: Some(event()),
        error: Some(event()),
        write_through,
        serial: Arc::clone(&served.serial),
        state: Arc::clone(&served.state),
        record,
        begun,
        log: Some(log),
    };
    let (chain, _) = serve_now(setup, disk.chain().unwrap(), PASSES).unwrap();
    assert_eq!(chain.in_flight(), 0);
    check_log(&bits, &before, &beginnings(&memory));
    assert!(!read_only || bytes.bytes().iter().all(|&byte| byte == 0), "read-only, and changed");
}
