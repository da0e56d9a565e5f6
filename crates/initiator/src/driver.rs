//! A small vhost-user-blk driver: the guest's side of one queue, which can also misbehave.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)] // it is for tests, which fail so

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// The start address of the guest's memory.
pub const BASE: u64 = 0x10_0000;
/// Its default length.
pub const MEMORY: u64 = 8 << 20;
/// Entries of the ring, unless asked for otherwise.
pub const RING: u16 = 16;
const AVAILABLE: u64 = BASE + 0x1000;
const USED: u64 = BASE + 0x2000;
/// The address of buffers.
pub const DATA: u64 = BASE + 0x10000;

/// The descriptor has a successor.
pub const NEXT: u16 = 1;
/// The device writes it.
pub const WRITE: u16 = 2;
/// It is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// The feature of logging what is written into the guest's memory (`VHOST_F_LOG_ALL`): a ring that is to be logged waits
/// for its log.
pub const LOG_ALL: u64 = 1 << 26;

/// A descriptor: address, length, flags, next.
pub type Descriptor = (u64, u32, u16, u16);

/// The driver of one queue.
pub struct Driver {
    /// The connection.
    pub frontend: Frontend,
    /// The guest's memory.
    pub memory: GuestMemoryMmap,
    file: File,
    ring: u16,
    features: u64,
    inflight: Option<(VhostUserInflight, File)>,
    kick: EventFd,
    call: EventFd,
    available: u16,
    seen: u16,
}

impl Driver {
    /// Connects and starts queue `queue`, acknowledging those of `features` that are offered.
    pub fn connect(stream: UnixStream, queue: usize, features: u64) -> Self {
        let protocol = VhostUserProtocolFeatures::empty();
        let mut driver = Self::new(stream, features, protocol, RING, MEMORY);
        driver.start(queue, 0);
        driver
    }

    /// Connects and starts queue 0, with a ring and a memory of these sizes.
    pub fn connect_sized(stream: UnixStream, ring: u16, memory: u64) -> Self {
        let protocol = VhostUserProtocolFeatures::empty();
        let mut driver = Self::new(stream, u64::MAX, protocol, ring, memory);
        driver.start(0, 0);
        driver
    }

    /// Connects and starts queue 0 with in-flight tracking (`INFLIGHT_SHMFD`).
    pub fn connect_with_record(stream: UnixStream, features: u64) -> Self {
        let protocol = VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        let mut driver = Self::new(stream, features, protocol, RING, MEMORY);
        let asked = VhostUserInflight::new(0, 0, 1, RING);
        driver.inflight = Some(driver.frontend.get_inflight_fd(&asked).unwrap());
        driver.keep_record();
        driver.start(0, 0);
        driver
    }

    fn new(
        stream: UnixStream,
        features: u64,
        protocol: VhostUserProtocolFeatures,
        ring: u16,
        length: u64,
    ) -> Self {
        let file = File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(length).unwrap();
        let shared = FileOffset::new(file.try_clone().unwrap(), 0);
        let range = (GuestAddress(BASE), length as usize, Some(shared));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        let frontend = negotiate(stream, features, protocol);
        let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
        let (inflight, available, seen) = (None, 0, 0);
        let mut driver =
            Self { frontend, memory, file, ring, features, inflight, kick, call, available, seen };
        driver.share_memory();
        driver
    }

    /// Continues with another server after the last one died, as QEMU does: the ring's base is taken from the
    /// used ring.
    pub fn reconnect(&mut self, stream: UnixStream) {
        let protocol = VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        self.frontend = negotiate(stream, self.features, protocol);
        self.share_memory();
        self.keep_record();
        let used: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).unwrap();
        self.start(0, used);
        self.kick();
    }

    fn share_memory(&mut self) {
        let base = self.memory.get_host_address(GuestAddress(BASE)).unwrap() as u64;
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            memory_size: self.file.metadata().unwrap().len(),
            userspace_addr: base,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        self.frontend.set_mem_table(&[region]).unwrap();
    }

    fn keep_record(&mut self) {
        let (about, file) = self.inflight.as_ref().unwrap();
        self.frontend.set_inflight_fd(about, file.as_raw_fd()).unwrap();
    }

    /// Sets the ring up, starting at `position`.
    pub fn start(&mut self, queue: usize, position: u16) {
        self.frontend.set_vring_num(queue, self.ring).unwrap();
        self.frontend.set_vring_base(queue, position).unwrap();
        assert!(self.set_addresses(queue, None));
        self.frontend.set_vring_call(queue, &self.call).unwrap();
        self.frontend.set_vring_kick(queue, &self.kick).unwrap();
        self.frontend.set_vring_enable(queue, true).unwrap();
    }

    /// Says where the ring is; `log` is where its used ring is in the log of written memory. False if the device refuses.
    pub fn set_addresses(&mut self, queue: usize, log: Option<u64>) -> bool {
        let host = |address| self.memory.get_host_address(GuestAddress(address)).unwrap() as u64;
        let ring = VringConfigData {
            queue_max_size: self.ring,
            queue_size: self.ring,
            flags: u32::from(log.is_some()),
            desc_table_addr: host(BASE),
            used_ring_addr: host(USED),
            avail_ring_addr: host(AVAILABLE),
            log_addr: log,
        };
        self.frontend.set_vring_addr(queue, &ring).is_ok()
    }

    /// The configuration space.
    pub fn config(&mut self) -> Vec<u8> {
        let flags = VhostUserConfigFlags::empty();
        self.frontend.get_config(0, 60, flags, &[0; 60]).unwrap().1
    }

    /// Writes a descriptor into the table.
    pub fn describe(&self, index: u16, descriptor: Descriptor) {
        self.describe_at(BASE + u64::from(index) * 16, descriptor);
    }

    /// Writes a descriptor anywhere.
    pub fn describe_at(&self, address: u64, (base, length, flags, next): Descriptor) {
        let put = |offset, bytes: &[u8]| {
            self.memory.write_slice(bytes, GuestAddress(address + offset)).unwrap();
        };
        put(0, &base.to_le_bytes());
        put(8, &length.to_le_bytes());
        put(12, &flags.to_le_bytes());
        put(14, &next.to_le_bytes());
    }

    /// Makes the chain that starts at `head` available; [`Self::kick`] notifies the device.
    pub fn offer(&mut self, head: u16) {
        let slot = AVAILABLE + 4 + u64::from(self.available % self.ring) * 2;
        self.memory.write_obj(head, GuestAddress(slot)).unwrap();
        self.available = self.available.wrapping_add(1);
        self.publish(self.available);
    }

    /// Sets the available index, even to an invalid value.
    pub fn publish(&self, index: u16) {
        self.memory.store(index, GuestAddress(AVAILABLE + 2), Ordering::Release).unwrap();
    }

    /// Notifies the device.
    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// The next answer: head and length; none if there is none within `timeout`.
    pub fn answer(&mut self, timeout: Duration) -> Option<(u32, u32)> {
        let until = Instant::now() + timeout;
        loop {
            let used: u16 = self.memory.load(GuestAddress(USED + 2), Ordering::Acquire).unwrap();
            if used != self.seen {
                let slot = USED + 4 + u64::from(self.seen % self.ring) * 8;
                let entry: [u32; 2] = self.memory.read_obj(GuestAddress(slot)).unwrap();
                self.seen = self.seen.wrapping_add(1);
                return Some((entry[0], entry[1]));
            }
            if Instant::now() > until {
                return None;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// One request in the usual form (header, data, status): returns its status and the data after it.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[u8]) -> (u8, Vec<u8>) {
        let header = BASE + 0x3000;
        let status = BASE + 0x3100;
        let put = |bytes: &[u8], at: u64| self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        put(&kind.to_le_bytes(), header);
        put(&sector.to_le_bytes(), header + 8);
        put(data, DATA);
        put(&[0xff], status);
        let reads = matches!(kind, 0 | 8);
        self.describe(0, (header, 16, NEXT, if data.is_empty() { 2 } else { 1 }));
        self.describe(1, (DATA, data.len() as u32, NEXT | if reads { WRITE } else { 0 }, 2));
        self.describe(2, (status, 1, WRITE, 0));
        self.offer(0);
        self.kick();
        let answer = self.answer(Duration::from_secs(10));
        assert_eq!(answer.expect("an answer").0, 0);
        let mut out = vec![0; data.len()];
        self.memory.read_slice(&mut out, GuestAddress(DATA)).unwrap();
        (self.memory.read_obj(GuestAddress(status)).unwrap(), out)
    }

    /// How often the guest was notified since the last call.
    pub fn notifications(&self) -> u64 {
        let _ = self.call.write(1);
        self.call.read().unwrap() - 1
    }
}

fn negotiate(stream: UnixStream, features: u64, protocol: VhostUserProtocolFeatures) -> Frontend {
    let mut frontend = Frontend::from_stream(stream, 16);
    frontend.set_owner().unwrap();
    let offered = frontend.get_features().unwrap();
    frontend.set_features(offered & features & !LOG_ALL).unwrap();
    let wanted = protocol
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::REPLY_ACK;
    assert!(frontend.get_protocol_features().unwrap().contains(wanted));
    frontend.set_protocol_features(wanted).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend
}
