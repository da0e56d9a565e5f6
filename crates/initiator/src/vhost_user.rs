//! The guest's side of vhost-user-blk without a guest: one queue, driven as fast as possible.
//!
//! It negotiates the event index as Linux's driver does and requests an interrupt only when it has nothing
//! left to do ([`Wait::Sleep`]), or never ([`Wait::Poll`]).

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VringConfigData};
use virtio_bindings::virtio_blk::VIRTIO_BLK_F_FLUSH;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::SharedMemory;
use crate::queue::{Layout, Queue};
use crate::{Completion, Initiator, InitiatorError, Operation, Wait, check_shape};

/// How long to wait for a server that may have missed a notification before it is notified again.
const RENOTIFY: Duration = Duration::from_millis(100);

const CALLED: u64 = 1;
const CLOSED: u64 = 2;

/// A connection to a vhost-user-blk server.
pub struct VhostUser {
    queue: Queue,
    depth: u16,
    block: u32,
    wait: Wait,
    capacity: u64,
    misses_notifications: bool,
    kick: EventFd,
    epoll: Epoll,
    // The server holds duplicates of these; the connection ends with the socket.
    _call: EventFd,
    _stream: UnixStream,
    _frontend: Frontend,
}

fn handshake(message: &'static str) -> impl FnOnce(vhost::Error) -> InitiatorError {
    move |source| InitiatorError::Handshake { message, source }
}

impl VhostUser {
    /// Connects and sets up one queue for `depth` requests of up to `block` bytes.
    ///
    /// # Errors
    /// Any [`InitiatorError`] but those of a running queue.
    pub fn connect(
        path: &Path,
        depth: u16,
        block: u32,
        wait: Wait,
    ) -> Result<Self, InitiatorError> {
        check_shape(depth, block)?;
        let stream = UnixStream::connect(path)
            .map_err(|source| InitiatorError::Connect { path: path.into(), source })?;
        let watched = stream.try_clone().map_err(InitiatorError::Events)?;
        let mut frontend = Frontend::from_stream(stream, 1);

        let features = negotiate(&mut frontend)?;
        let capacity = read_capacity(&mut frontend)?;
        frontend.set_features(features).map_err(handshake("SET_FEATURES"))?;

        let layout = Layout::new(depth, block);
        let memory = SharedMemory::new(layout.total)?;
        let (call, kick) = (event_descriptor()?, event_descriptor()?);
        start_ring(&mut frontend, &memory, &layout, &call, &kick)?;
        let epoll = watch(&call, &watched)?;

        let event_index = features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let queue = Queue::new(memory, layout, depth, event_index);
        let (_call, _stream, _frontend) = (call, watched, frontend);
        Ok(Self {
            queue,
            depth,
            block,
            wait,
            capacity,
            misses_notifications: false,
            kick,
            epoll,
            _call,
            _stream,
            _frontend,
        })
    }

    /// The same for a server that is known to miss notifications now and then: while the initiator waits for
    /// it, it is notified again. Not the default, as that would hide a server that begins to miss them.
    #[must_use]
    pub fn renotifying(self) -> Self {
        Self { misses_notifications: true, ..self }
    }

    fn sleep(&self, limit: Duration) -> Result<(), InitiatorError> {
        let slept = if self.queue.arm() { Ok(()) } else { self.event_or_renotify(limit) };
        self.queue.disarm();
        slept
    }

    fn event_or_renotify(&self, limit: Duration) -> Result<(), InitiatorError> {
        if self.misses_notifications {
            match self.event(RENOTIFY.min(limit)) {
                Err(InitiatorError::Stalled) => {
                    self.kick.write(1).map_err(InitiatorError::Events)?
                }
                result => return result,
            }
        }
        self.event(limit)
    }

    fn poll(&self, limit: Duration) -> Result<(), InitiatorError> {
        let begin = Instant::now();
        let mut renotify = self.misses_notifications;
        while !self.queue.has_used() {
            for _ in 0..100_000 {
                if self.queue.has_used() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            let elapsed = begin.elapsed();
            if renotify && elapsed > RENOTIFY.min(limit) {
                renotify = false;
                self.kick.write(1).map_err(InitiatorError::Events)?;
            }
            if elapsed > limit {
                return Err(InitiatorError::Stalled);
            }
            match self.event(Duration::ZERO) {
                Err(InitiatorError::Stalled) | Ok(()) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The call descriptor is watched for edges and never read: one system call per interrupt.
    fn event(&self, timeout: Duration) -> Result<(), InitiatorError> {
        let mut events = [EpollEvent::default(); 2];
        let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        let count = loop {
            match self.epoll.wait(timeout, &mut events) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map_err(InitiatorError::Events)?,
            }
        };
        if events[..count].iter().any(|event| event.data() == CLOSED) {
            return Err(InitiatorError::Closed);
        }
        if count == 0 { Err(InitiatorError::Stalled) } else { Ok(()) }
    }
}

impl Initiator for VhostUser {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn depth(&self) -> u16 {
        self.depth
    }

    fn fill(&mut self, slot: u16, bytes: &[u8]) {
        assert!(slot < self.depth && bytes.len() <= self.block as usize);
        self.queue.memory().write(self.queue.layout().buffer(slot), bytes);
    }

    fn copy(&self, slot: u16, bytes: &mut [u8]) {
        assert!(slot < self.depth && bytes.len() <= self.block as usize);
        self.queue.memory().read(self.queue.layout().buffer(slot), bytes);
    }

    fn submit(&mut self, slot: u16, operation: Operation, offset: u64, length: u32) {
        assert!(slot < self.depth && length <= self.block);
        self.queue.push(slot, operation, offset, length);
    }

    fn publish(&mut self) -> Result<(), InitiatorError> {
        if self.queue.publish() {
            self.kick.write(1).map_err(InitiatorError::Events)?;
        }
        Ok(())
    }

    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<(), InitiatorError> {
        while let Some((slot, status)) = self.queue.pop()? {
            completions.push(Completion { slot, status });
        }
        Ok(())
    }

    fn wait_for(&mut self, limit: Duration) -> Result<(), InitiatorError> {
        match self.wait {
            Wait::Sleep => self.sleep(limit),
            Wait::Poll => self.poll(limit),
        }
    }
}

fn event_descriptor() -> Result<EventFd, InitiatorError> {
    EventFd::new(nix::libc::EFD_NONBLOCK | nix::libc::EFD_CLOEXEC).map_err(InitiatorError::Events)
}

/// The virtio features that both sides support, of those that this initiator uses.
fn negotiate(frontend: &mut Frontend) -> Result<u64, InitiatorError> {
    frontend.set_owner().map_err(handshake("SET_OWNER"))?;
    let offered = frontend.get_features().map_err(handshake("GET_FEATURES"))?;
    let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    for (bit, name) in
        [(1 << VIRTIO_F_VERSION_1, "virtio 1"), (protocol, "vhost-user protocol features")]
    {
        if offered & bit == 0 {
            return Err(InitiatorError::Missing(name));
        }
    }
    let offered_protocol =
        frontend.get_protocol_features().map_err(handshake("GET_PROTOCOL_FEATURES"))?;
    let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::REPLY_ACK;
    let agreed = offered_protocol & wanted;
    if !agreed.contains(VhostUserProtocolFeatures::CONFIG) {
        return Err(InitiatorError::Missing("the device's configuration (CONFIG)"));
    }
    frontend.set_protocol_features(agreed).map_err(handshake("SET_PROTOCOL_FEATURES"))?;
    if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    let usable =
        protocol | 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_BLK_F_FLUSH;
    Ok(offered & usable)
}

/// The first field of virtio-blk's configuration: sectors of 512 bytes.
fn read_capacity(frontend: &mut Frontend) -> Result<u64, InitiatorError> {
    let mut sectors = [0; 8];
    let (_, payload) = frontend
        .get_config(0, 8, VhostUserConfigFlags::empty(), &sectors)
        .map_err(handshake("GET_CONFIG"))?;
    sectors.copy_from_slice(&payload[..8]);
    u64::from_le_bytes(sectors)
        .checked_mul(512)
        .ok_or(InitiatorError::Missing("a size that fits 64 bits"))
}

fn start_ring(
    frontend: &mut Frontend,
    memory: &SharedMemory,
    layout: &Layout,
    call: &EventFd,
    kick: &EventFd,
) -> Result<(), InitiatorError> {
    let region = memory.info().map_err(handshake("the memory region"))?;
    frontend.set_mem_table(&[region]).map_err(handshake("SET_MEM_TABLE"))?;
    let address = |offset: usize| region.userspace_addr + offset as u64;
    let ring = VringConfigData {
        queue_max_size: layout.queue_size,
        queue_size: layout.queue_size,
        flags: 0,
        desc_table_addr: address(0),
        used_ring_addr: address(layout.used),
        avail_ring_addr: address(layout.available),
        log_addr: None,
    };
    frontend.set_vring_num(0, layout.queue_size).map_err(handshake("SET_VRING_NUM"))?;
    frontend.set_vring_base(0, 0).map_err(handshake("SET_VRING_BASE"))?;
    frontend.set_vring_addr(0, &ring).map_err(handshake("SET_VRING_ADDR"))?;
    frontend.set_vring_call(0, call).map_err(handshake("SET_VRING_CALL"))?;
    frontend.set_vring_kick(0, kick).map_err(handshake("SET_VRING_KICK"))?;
    frontend.set_vring_enable(0, true).map_err(handshake("SET_VRING_ENABLE"))
}

fn watch(call: &EventFd, stream: &UnixStream) -> Result<Epoll, InitiatorError> {
    let epoll = Epoll::new().map_err(InitiatorError::Events)?;
    let sources = [
        (call.as_raw_fd(), EventSet::IN | EventSet::EDGE_TRIGGERED, CALLED),
        (stream.as_raw_fd(), EventSet::READ_HANG_UP | EventSet::HANG_UP, CLOSED),
    ];
    for (fd, events, name) in sources {
        epoll
            .ctl(ControlOperation::Add, fd, EpollEvent::new(events, name))
            .map_err(InitiatorError::Events)?;
    }
    Ok(epoll)
}
