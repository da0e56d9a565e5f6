//! The driver of a guest that is moved while it uses its disk: several queues, the log of what the disk writes into the
//! guest's memory, and the other end, which has only what was sent.
//!
//! ```text
//!  guest, disk:  write memory ──> mark the pages, each in a log of its own
//!  round:        take the marks ──> send their pages        again and again; a last time when the rings are stopped
//! ```
//! It does what QEMU does, in its order, and panics where the server does what it must not.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)] // it is for tests, which fail so

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vhost::vhost_user::message::{
    VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{
    Address, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, MmapRegion, VolatileMemory,
};
use vmm_sys_util::eventfd::EventFd;

use crate::driver::{LOG_ALL, NEXT, WRITE};

/// The start of the guest's memory: not 0, so that an offset in it is no guest address.
pub const BASE: u64 = 0x10_0000;
/// The length of one of its two regions, which follow each other: a buffer may be in both.
const REGION: u64 = 2 << 20;
const END: u64 = BASE + 2 * REGION;
/// The memory for data, which all queues share.
pub const DATA: std::ops::Range<u64> = BASE + 0x8_0000..END;
const PAGE: u64 = 4096;

/// The most queues.
pub const QUEUES_MAX: usize = 4;
/// Requests of a queue; each has a header, up to two pieces of data, and a status.
pub const SLOTS: u16 = 16;
const PARTS: u16 = 4;
const RING: u16 = SLOTS * PARTS;

/// The place of a queue's parts. The used ring and the statuses each begin just before the end of a page.
const AREA: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2f00;
const HEADERS: u64 = 0x4000;
const STATUSES: u64 = 0x5ff8;

/// One bit a page, from address 0 on, taken as QEMU takes them: 64 at once.
pub struct Log {
    file: File,
    bits: MmapRegion,
}

impl Log {
    /// An empty log of the guest's memory, under this name in `/proc/self/maps`.
    #[must_use]
    pub fn new(name: &std::ffi::CStr) -> Self {
        let length = (END / PAGE).div_ceil(64) * 8;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(name, flags).unwrap());
        file.set_len(length).unwrap();
        let seals = SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        let shared = FileOffset::new(file.try_clone().unwrap(), 0);
        let bits = MmapRegion::from_file(shared, length as usize).unwrap();
        Self { file, bits }
    }

    fn chunk(&self, index: usize) -> &AtomicU64 {
        self.bits.get_atomic_ref(index * 8).unwrap()
    }

    fn mark(&self, address: u64, length: u64) {
        for page in address / PAGE..(address + length).div_ceil(PAGE) {
            self.chunk((page / 64) as usize).fetch_or(1 << (page % 64), Ordering::Release);
        }
    }

    /// The marked pages, which are not marked any more.
    pub fn take(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        for index in 0..self.bits.size() / 8 {
            let mut taken = self.chunk(index).swap(0, Ordering::AcqRel);
            while taken != 0 {
                pages.push(index as u64 * 64 + u64::from(taken.trailing_zeros()));
                taken &= taken - 1;
            }
        }
        pages
    }
}

/// The guest's memory, and who says what was written there.
#[derive(Clone)]
pub struct Source {
    memory: GuestMemoryMmap,
    /// What the guest itself has written.
    own: Arc<Log>,
    /// The disk's log of now, and former ones.
    logs: Arc<Mutex<Vec<Arc<Log>>>>,
}

impl Source {
    /// The disk's log, if it has one.
    #[must_use]
    pub fn log(&self) -> Option<Arc<Log>> {
        self.logs.lock().unwrap().last().cloned()
    }
}

/// The other end.
pub struct Destination {
    source: Source,
    memory: Vec<u8>,
}

impl Destination {
    /// All of the memory, sent once. The disk's log is on.
    #[must_use]
    pub fn new(source: Source) -> Self {
        source.own.take();
        let mut memory = vec![0; (END - BASE) as usize];
        source.memory.read_slice(&mut memory, GuestAddress(BASE)).unwrap();
        Self { source, memory }
    }

    /// Sends what was written; returns how many pages the disk had written.
    pub fn round(&mut self) -> usize {
        let logs = self.source.logs.lock().unwrap().clone();
        let of_disk: Vec<u64> = logs.iter().flat_map(|log| log.take()).collect();
        for page in of_disk.iter().copied().chain(self.source.own.take()) {
            let address = page * PAGE;
            assert!((BASE..END).contains(&address), "page {address:#x} is not the guest's");
            let at = (address - BASE) as usize;
            let to = &mut self.memory[at..at + PAGE as usize];
            self.source.memory.read_slice(to, GuestAddress(address)).unwrap();
        }
        of_disk.len()
    }

    /// The pages that are not as at the source.
    #[must_use]
    pub fn differing(&self) -> Vec<u64> {
        let mut now = vec![0; self.memory.len()];
        self.source.memory.read_slice(&mut now, GuestAddress(BASE)).unwrap();
        let pages = now.chunks(PAGE as usize).zip(self.memory.chunks(PAGE as usize));
        let pages = (0..).zip(pages).filter(|(_, (source, destination))| source != destination);
        pages.map(|(page, _)| BASE + page * PAGE).collect()
    }
}

/// A request: virtio-blk's number of its kind, its place, and its data.
pub struct Asked {
    /// The kind.
    pub kind: u32,
    /// The place, in blocks of 512 bytes.
    pub sector: u64,
    /// Address and length of up to two pieces of [`DATA`].
    pub data: Vec<(u64, u32)>,
}

struct Ring {
    kick: EventFd,
    call: EventFd,
    free: Vec<u16>,
    available: u16,
    seen: u16,
    /// How many were answered with each status.
    answered: [u64; 3],
}

/// See the module.
pub struct MovedGuest {
    frontend: Frontend,
    source: Source,
    files: Vec<File>,
    rings: Vec<Ring>,
    features: u64,
    logs: bool,
    inflight: Option<(VhostUserInflight, File)>,
}

impl MovedGuest {
    /// Connects and starts this many queues, acknowledging those of `features` that are offered; with a record of
    /// requests in flight, if `records`.
    pub fn connect(stream: UnixStream, queues: usize, features: u64, records: bool) -> Self {
        assert!((1..=QUEUES_MAX).contains(&queues));
        let file = || {
            let file = File::from(memfd_create(c"moved", MFdFlags::MFD_CLOEXEC).unwrap());
            file.set_len(REGION).unwrap();
            file
        };
        let files = vec![file(), file()];
        let range = |(at, file): (u64, &File)| {
            let shared = FileOffset::new(file.try_clone().unwrap(), 0);
            (GuestAddress(BASE + at * REGION), REGION as usize, Some(shared))
        };
        let ranges: Vec<_> = (0..).zip(&files).map(range).collect();
        let memory = GuestMemoryMmap::from_ranges_with_files(ranges).unwrap();
        let own = Arc::new(Log::new(c"own"));
        let source = Source { memory, own, logs: Arc::default() };
        let ring = |_| Ring {
            kick: EventFd::new(0).unwrap(),
            call: EventFd::new(0).unwrap(),
            free: (0..SLOTS).collect(),
            available: 0,
            seen: 0,
            answered: [0; 3],
        };
        let rings: Vec<_> = (0..queues).map(ring).collect();
        let features = features & !LOG_ALL;
        let frontend = negotiate(stream, features);
        let mut guest =
            Self { frontend, source, files, rings, features, logs: false, inflight: None };
        if records {
            let asked = VhostUserInflight::new(0, 0, queues as u16, RING);
            guest.inflight = Some(guest.frontend.get_inflight_fd(&asked).unwrap());
        }
        guest.set_up();
        guest
    }

    /// Goes on with another server after the last one died, as QEMU does: features first, the log after the rings, which
    /// are enabled last.
    pub fn reconnect(&mut self, stream: UnixStream) {
        let features = self.features | if self.logs { LOG_ALL } else { 0 };
        self.frontend = negotiate(stream, features);
        self.set_up();
        (0..self.rings.len()).for_each(|queue| self.kick(queue));
    }

    fn set_up(&mut self) {
        let info = |(region, file): (&vm_memory::GuestRegionMmap, &File)| {
            let base = region.start_addr();
            VhostUserMemoryRegionInfo {
                guest_phys_addr: base.raw_value(),
                memory_size: REGION,
                userspace_addr: self.source.memory.get_host_address(base).unwrap() as u64,
                mmap_offset: 0,
                mmap_handle: file.as_raw_fd(),
            }
        };
        let regions: Vec<_> = self.source.memory.iter().zip(&self.files).map(info).collect();
        self.frontend.set_mem_table(&regions).unwrap();
        if let Some((about, file)) = &self.inflight {
            self.frontend.set_inflight_fd(about, file.as_raw_fd()).unwrap();
        }
        for queue in 0..self.rings.len() {
            let position = self.load(area(queue) + USED + 2);
            self.start(queue, position);
        }
        if self.logs {
            self.give(&self.source.log().unwrap());
        }
        for queue in 0..self.rings.len() {
            self.frontend.set_vring_enable(queue, true).unwrap();
        }
    }

    /// Memory and logs, for the other end.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source.clone()
    }

    fn start(&mut self, queue: usize, position: u16) {
        self.frontend.set_vring_num(queue, RING).unwrap();
        self.frontend.set_vring_base(queue, position).unwrap();
        self.set_addresses(queue);
        self.frontend.set_vring_call(queue, &self.rings[queue].call).unwrap();
        self.frontend.set_vring_kick(queue, &self.rings[queue].kick).unwrap();
    }

    fn set_addresses(&mut self, queue: usize) {
        let memory = &self.source.memory;
        let host = |address| memory.get_host_address(GuestAddress(address)).unwrap() as u64;
        let ring = VringConfigData {
            queue_max_size: RING,
            queue_size: RING,
            flags: u32::from(self.logs),
            desc_table_addr: host(area(queue)),
            used_ring_addr: host(area(queue) + USED),
            avail_ring_addr: host(area(queue) + AVAILABLE),
            log_addr: self.logs.then_some(area(queue) + USED),
        };
        self.frontend.set_vring_addr(queue, &ring).unwrap();
    }

    fn give(&self, log: &Log) {
        let region = VhostUserDirtyLogRegion {
            mmap_size: log.bits.size() as u64,
            mmap_offset: 0,
            mmap_handle: log.file.as_raw_fd(),
        };
        self.frontend.set_log_base(0, Some(region)).unwrap();
    }

    /// From the reply on the disk writes into this log, and no other. What it wrote into former ones is still there.
    pub fn use_log(&mut self, log: Log) {
        let log = Arc::new(log);
        self.give(&log);
        self.source.logs.lock().unwrap().push(log);
    }

    /// Has the disk log all that it writes, in a log that it was given.
    pub fn begin_logging(&mut self) {
        self.logs = true;
        self.frontend.set_features(self.features | LOG_ALL).unwrap();
        (0..self.rings.len()).for_each(|queue| self.set_addresses(queue));
    }

    /// The move has failed.
    pub fn end_logging(&mut self) {
        self.logs = false;
        self.frontend.set_features(self.features).unwrap();
        (0..self.rings.len()).for_each(|queue| self.set_addresses(queue));
        self.source.logs.lock().unwrap().clear();
    }

    /// Stops all rings: nothing is in flight then. [`Self::go_on`] starts them again.
    pub fn stop(&mut self) {
        for queue in 0..self.rings.len() {
            let position = self.frontend.get_vring_base(queue).unwrap() as u16;
            let used: u16 = self.load(area(queue) + USED + 2);
            assert_eq!(position, used, "queue {queue}: it has taken what it has not answered");
        }
    }

    /// How many queues there are.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.rings.len()
    }

    /// Starts the rings again.
    pub fn go_on(&mut self) {
        for queue in 0..self.rings.len() {
            let position = self.load(area(queue) + USED + 2);
            self.start(queue, position);
            self.kick(queue);
        }
    }

    /// How many requests of a queue are not answered.
    #[must_use]
    pub fn in_flight(&self, queue: usize) -> usize {
        usize::from(SLOTS) - self.rings[queue].free.len()
    }

    /// How many requests were answered with each status: OK, IOERR, UNSUPP.
    #[must_use]
    pub fn answered(&self) -> [u64; 3] {
        let all = self.rings.iter().map(|ring| ring.answered);
        all.fold([0; 3], |sum, one| std::array::from_fn(|status| sum[status] + one[status]))
    }

    /// Writes into the guest's memory, as the guest's processor would.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.source.memory.write_slice(bytes, GuestAddress(address)).unwrap();
        self.source.own.mark(address, bytes.len() as u64);
    }

    fn load(&self, address: u64) -> u16 {
        self.source.memory.load(GuestAddress(address), Ordering::Acquire).unwrap()
    }

    /// Puts a request into a queue; false if it is full. The disk sees it after [`Self::kick`], or before.
    pub fn offer(&mut self, queue: usize, asked: &Asked) -> bool {
        let Some(slot) = self.rings[queue].free.pop() else { return false };
        let (area, slot_at) = (area(queue), u64::from(slot));
        let (header, status) = (area + HEADERS + slot_at * 16, area + STATUSES + slot_at);
        self.write(header, &u64::from(asked.kind).to_le_bytes());
        self.write(header + 8, &asked.sector.to_le_bytes());
        self.write(status, &[0xff]);
        let reads = if matches!(asked.kind, 0 | 8) { WRITE } else { 0 };
        let data = asked.data.iter().map(|&(at, length)| (at, length, reads));
        let parts = [(header, 16, 0)].into_iter().chain(data).chain([(status, 1, WRITE)]);
        let (head, parts) = (slot * PARTS, parts.collect::<Vec<_>>());
        for (index, &(at, length, flags)) in (head..).zip(&parts) {
            let last = usize::from(index - head) + 1 == parts.len();
            let flags: u16 = if last { flags } else { flags | NEXT };
            let next = u64::from(length) | u64::from(flags) << 32 | u64::from(index + 1) << 48;
            let descriptor = [at.to_le_bytes(), next.to_le_bytes()].concat();
            self.write(area + u64::from(index) * 16, &descriptor);
        }
        let available = self.rings[queue].available;
        self.write(area + AVAILABLE + 4 + u64::from(available % RING) * 2, &head.to_le_bytes());
        self.rings[queue].available = available.wrapping_add(1);
        let index = GuestAddress(area + AVAILABLE + 2);
        self.source.memory.store(available.wrapping_add(1), index, Ordering::Release).unwrap();
        self.source.own.mark(index.raw_value(), 2);
        true
    }

    /// Notifies the disk.
    pub fn kick(&self, queue: usize) {
        self.rings[queue].kick.write(1).unwrap();
    }

    /// Takes what is answered; returns how many.
    pub fn take_answers(&mut self, queue: usize) -> usize {
        let used = area(queue) + USED;
        let index = self.load(used + 2);
        let count = index.wrapping_sub(self.rings[queue].seen);
        for _ in 0..count {
            let seen = self.rings[queue].seen;
            let entry = GuestAddress(used + 4 + u64::from(seen % RING) * 8);
            let head: u32 = self.source.memory.read_obj(entry).unwrap();
            let slot = u16::try_from(head).unwrap() / PARTS;
            let status = GuestAddress(area(queue) + STATUSES + u64::from(slot));
            let status: u8 = self.source.memory.read_obj(status).unwrap();
            let ring = &mut self.rings[queue];
            assert!(!ring.free.contains(&slot), "queue {queue}: {head} is answered twice");
            ring.free.push(slot);
            ring.seen = seen.wrapping_add(1);
            ring.answered[usize::from(status)] += 1;
        }
        usize::from(count)
    }
}

fn area(queue: usize) -> u64 {
    BASE + queue as u64 * AREA
}

fn negotiate(stream: UnixStream, features: u64) -> Frontend {
    let mut frontend = Frontend::from_stream(stream, QUEUES_MAX as u64);
    frontend.set_owner().unwrap();
    let offered = frontend.get_features().unwrap();
    assert!(offered & LOG_ALL != 0, "the disk cannot log what it writes");
    let wanted = VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
    assert!(frontend.get_protocol_features().unwrap().contains(wanted));
    frontend.set_protocol_features(wanted).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend.set_features(offered & features).unwrap();
    frontend
}
