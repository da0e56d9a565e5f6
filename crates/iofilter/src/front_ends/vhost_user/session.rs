//! One connection of a VMM: the vhost-user protocol's side of a disk (QEMU docs/interop/vhost-user).
//!
//! ```text
//!  ring:  Stopped(chain) --enabled, kick and addresses known, memory mapped--> Running(thread)
//!         Running --disabled | GET_VRING_BASE | any change to it or to memory | disconnect-->
//!                   drained --> Stopped       (thread died --> Lost, for good)
//!         Stopped(chain) --exchanged, all rings together--> Stopped(another chain)
//! ```
//! The parts that a running ring depends on change only while it is stopped: it is drained, changed, and
//! started again if it still may run. All calls come from the disk's one protocol thread.
//!
//! The log of written memory is the exception ([`super::memory_log`]): it changes while rings run, as a VMM waits for
//! the answer and its guest with it, and requests may take long. A ring that is to be logged and has no log does not run.
//!
//! ```text
//!  log:   None --SET_LOG_BASE--> given --LOG_ALL acknowledged--> written by all rings --SET_LOG_BASE--> another
//!         written --features without LOG_ALL | reset | disconnect--> None, when no ring writes it any more
//! ```

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

use crate::front_ends::ServedDisk;
use crate::front_ends::vhost_user::config::{self, RING_MAX, SPACE};
use crate::front_ends::vhost_user::inflight::{Inflight, InflightError, Record};
use crate::front_ends::vhost_user::memory_log::{MemoryLog, RingLog};
use crate::front_ends::vhost_user::queue::{RunningQueue, Setup};
use crate::stack::chain::Chain;
use crate::stack::orders::Orders;

/// The most memory regions of a guest: what QEMU uses without memory slots, times four.
pub const REGIONS_MAX: usize = 32;

enum Serving {
    Stopped(Chain),
    Running(RunningQueue),
    Lost,
}

struct Ring {
    queue: Queue,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    error: Option<Arc<OwnedFd>>,
    enabled: bool,
    addressed: bool,
    /// Where its used ring is in the log of written memory, if that is to be marked.
    used_log: Option<u64>,
    serving: Serving,
}

impl Ring {
    /// Whether these are its addresses.
    fn is_at(&self, table: GuestAddress, used: GuestAddress, available: GuestAddress) -> bool {
        let queue = &self.queue;
        let now = [queue.desc_table(), queue.used_ring(), queue.avail_ring()];
        self.addressed && now == [table.0, used.0, available.0]
    }
}

/// A region of guest memory, as the VMM addresses it.
struct Region {
    guest: u64,
    user: u64,
    size: u64,
}

/// See the module.
pub struct Session {
    served: Arc<ServedDisk>,
    rings: Vec<Ring>,
    regions: Vec<Region>,
    memory: GuestMemoryMmap,
    acknowledged: u64,
    inflight: Option<Inflight>,
    log: Option<Arc<MemoryLog>>,
    /// Where the VMM wants to be told that something was logged.
    logged: Option<Arc<OwnedFd>>,
}

/// Refuses an invalid request of the VMM.
fn invalid(what: &str) -> Error {
    tracing::warn!(what, "the VMM's request is refused");
    Error::InvalidParam
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    tracing::error!(%error, "the VMM's request failed");
    Error::ReqHandlerError(std::io::Error::other(error))
}

impl Session {
    /// A session over these chains, one per queue.
    ///
    /// # Errors
    /// None in practice: the ring size is a constant that is allowed.
    pub fn new(
        served: Arc<ServedDisk>,
        chains: Vec<Chain>,
    ) -> std::result::Result<Self, virtio_queue::Error> {
        let rings = chains.into_iter().map(|chain| {
            let queue = Queue::new(RING_MAX)?;
            let serving = Serving::Stopped(chain);
            let (kick, call, error) = (None, None, None);
            let (enabled, addressed, used_log) = (false, false, None);
            Ok(Ring { queue, kick, call, error, enabled, addressed, used_log, serving })
        });
        let rings = rings.collect::<std::result::Result<_, _>>()?;
        let (regions, memory) = (Vec::new(), GuestMemoryMmap::new());
        let (inflight, log, logged) = (None, None, None);
        Ok(Self { served, rings, regions, memory, acknowledged: 0, inflight, log, logged })
    }

    /// Stops all rings and returns the chains; fewer than it was given if threads panicked.
    pub fn end(&mut self) -> Vec<Chain> {
        self.stop_all();
        let rings = self.rings.drain(..);
        rings
            .filter_map(|ring| match ring.serving {
                Serving::Stopped(chain) => Some(chain),
                Serving::Running(_) | Serving::Lost => None,
            })
            .collect()
    }

    /// Exchanges the chains of all rings while they are stopped. If the thread of one died, the exchange is dropped.
    ///
    /// # Errors
    /// A ring cannot start again.
    pub fn exchange(&mut self, orders: &Orders) -> Result<()> {
        let used = self.is_used();
        self.stop_all();
        // The guest's driver has not gone: it can be told of another size before all rings have started again.
        self.served.state.set_driver(used);
        // Not before: whoever asked may have given up while requests were in flight.
        let Some(exchange) = orders.take() else { return self.start_all() };
        if self.rings.iter().all(|ring| matches!(ring.serving, Serving::Stopped(_))) {
            let taken = self.rings.iter_mut().filter_map(|ring| {
                match std::mem::replace(&mut ring.serving, Serving::Lost) {
                    Serving::Stopped(chain) => Some(chain),
                    Serving::Running(_) | Serving::Lost => None,
                }
            });
            let chains = exchange(taken.collect());
            for (ring, chain) in self.rings.iter_mut().zip(chains) {
                ring.serving = Serving::Stopped(chain);
            }
        }
        self.start_all()
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(index as usize).ok_or_else(|| invalid("there is no such queue"))
    }

    /// Starts a ring if it may run.
    fn start(&mut self, index: usize) -> Result<()> {
        if self.waits_for_log() {
            return Ok(());
        }
        let log = self.log_of(index)?;
        let write_through = !config::flushes(self.acknowledged);
        let (served, memory) = (&self.served, self.memory.clone());
        let Some(ring) = self.rings.get_mut(index) else { return Ok(()) };
        let (Some(kick), true, true) = (ring.kick.clone(), ring.enabled, ring.addressed) else {
            return Ok(());
        };
        let chain = match std::mem::replace(&mut ring.serving, Serving::Lost) {
            Serving::Stopped(chain) => chain,
            other => {
                ring.serving = other;
                return Ok(());
            }
        };
        ring.queue.set_event_idx(self.acknowledged & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
        ring.queue.set_ready(true);
        let used = ring.queue.used_idx(&memory, std::sync::atomic::Ordering::Acquire);
        let used = used.map_or(ring.queue.next_avail(), |used| used.0);
        ring.queue.set_next_used(used);
        let resumed = self.inflight.as_ref().map(|kept| resume(kept, index, &mut ring.queue, used));
        let (record, begun) = match resumed.transpose() {
            Ok(resumed) => resumed.unzip(),
            Err(error) => {
                ring.serving = Serving::Stopped(chain);
                return Err(failed(error));
            }
        };
        let setup = Setup {
            index,
            queue: Queue::try_from(ring.queue.state()).map_err(failed)?,
            memory,
            kick,
            call: ring.call.clone(),
            error: ring.error.clone(),
            write_through,
            serial: Arc::clone(&served.serial),
            state: Arc::clone(&served.state),
            record,
            begun: begun.unwrap_or_default(),
            log,
        };
        match RunningQueue::start(setup, chain) {
            Ok(running) => {
                ring.serving = Serving::Running(running);
                served.state.set_driver(true);
            }
            Err((chain, error)) => {
                ring.serving = Serving::Stopped(*chain);
                return Err(failed(error));
            }
        }
        Ok(())
    }

    /// Drains a ring and stops it.
    fn stop(&mut self, index: usize) {
        let Some(ring) = self.rings.get_mut(index) else { return };
        ring.serving = match std::mem::replace(&mut ring.serving, Serving::Lost) {
            Serving::Running(running) => match running.stop() {
                Some((chain, next)) => {
                    ring.queue.set_next_avail(next);
                    Serving::Stopped(chain)
                }
                None => Serving::Lost,
            },
            other => other,
        };
        self.served.state.set_driver(self.is_used());
    }

    /// Whether the guest's driver uses the disk.
    fn is_used(&self) -> bool {
        self.rings.iter().any(|ring| matches!(ring.serving, Serving::Running(_)))
    }

    fn stop_all(&mut self) {
        (0..self.rings.len()).for_each(|index| self.stop(index));
    }

    fn start_all(&mut self) -> Result<()> {
        (0..self.rings.len()).try_for_each(|index| self.start(index))
    }

    /// Whether rings are to be logged, and there is no log yet: what they write would be lost at the VMM's other end.
    fn waits_for_log(&self) -> bool {
        config::logs(self.acknowledged) && self.log.is_none()
    }

    /// What a ring is to log, in a log that has bits for all of the guest's memory.
    fn log_of(&self, index: usize) -> Result<Option<RingLog>> {
        let (Some(log), true) = (&self.log, config::logs(self.acknowledged)) else {
            return Ok(None);
        };
        for region in &self.regions {
            log.check(region.guest, region.size).map_err(failed)?;
        }
        let Some(ring) = self.rings.get(index) else { return Ok(None) };
        let (log, changed) = (Arc::clone(log), self.logged.clone());
        let log = RingLog { log, used: ring.used_log, changed };
        log.check_used(ring.queue.size()).map_err(failed)?;
        Ok(Some(log))
    }

    /// Has running rings mark in the log of now, and waits until they do: what they have written until then is marked
    /// in the former one. A ring that cannot is stopped.
    fn log_in_all(&mut self, rings: std::ops::Range<usize>) -> Result<()> {
        let waits = self.waits_for_log();
        let (mut taken, mut refused) = (Vec::new(), Ok(()));
        for index in rings {
            let log = self.log_of(index);
            let Some(Ring { serving: Serving::Running(running), .. }) = self.rings.get(index)
            else {
                continue;
            };
            match log {
                Ok(log) if !waits => taken.push(running.log(log)),
                Ok(_) => self.stop(index),
                Err(error) => {
                    self.stop(index);
                    refused = Err(error);
                }
            }
        }
        for taken in taken {
            // The channel's end: the thread is dead, and writes nothing more.
            let _ = taken.recv();
        }
        refused
    }

    /// The features of now; nothing else that rings depend on has changed.
    fn acknowledge(&mut self, features: u64) {
        if config::logs(self.acknowledged) && !config::logs(features) {
            self.log = None;
        }
        self.acknowledged = features;
    }

    /// The VMM's log is not used: there is no answer that says so, and it would wait for one.
    fn refuse_log(error: &dyn std::error::Error) -> Error {
        tracing::error!(%error, "the VMM's log of written memory is refused");
        Error::InvalidMessage
    }

    /// The VMM wants to be told on this eventfd that something was logged. The crate `vhost` does not handle that message.
    ///
    /// # Errors
    /// None that the VMM could cause.
    pub fn set_log_fd(&mut self, event: OwnedFd) -> Result<()> {
        self.logged = Some(Arc::new(event));
        self.log_in_all(0..self.rings.len())
    }

    /// Changes a ring while it is stopped.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut Ring)) -> Result<()> {
        self.ring(index)?;
        self.stop(index as usize);
        change(self.ring(index)?);
        self.start(index as usize)
    }

    /// The guest address that an address of the VMM stands for.
    fn guest_address(&self, user: u64) -> Result<GuestAddress> {
        let inside = |region: &&Region| user >= region.user && user - region.user < region.size;
        let region = self.regions.iter().find(inside);
        let region = region.ok_or_else(|| invalid("a ring is not in the guest's memory"))?;
        Ok(GuestAddress(region.guest + (user - region.user)))
    }

    fn map(&self, region: &VhostUserMemoryRegion, file: File) -> Result<GuestRegionMmap> {
        let size = usize::try_from(region.memory_size).map_err(|_| invalid("a region's size"))?;
        region
            .guest_phys_addr
            .checked_add(region.memory_size)
            .and(region.user_addr.checked_add(region.memory_size))
            .ok_or_else(|| invalid("a region wraps around"))?;
        // Beyond the end of its file an access would raise SIGBUS.
        let about = file.metadata().map_err(failed)?;
        let end = region.mmap_offset.checked_add(region.memory_size);
        if about.is_file() && end.is_none_or(|end| end > about.len()) {
            return Err(invalid("a region reaches beyond the end of its file"));
        }
        let mapping = MmapRegion::from_file(FileOffset::new(file, region.mmap_offset), size);
        let mapping = mapping.map_err(failed)?;
        GuestRegionMmap::new(mapping, GuestAddress(region.guest_phys_addr))
            .ok_or_else(|| invalid("a region wraps around"))
    }
}

impl From<&VhostUserMemoryRegion> for Region {
    fn from(region: &VhostUserMemoryRegion) -> Self {
        Self { guest: region.guest_phys_addr, user: region.user_addr, size: region.memory_size }
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        for ring in &mut self.rings {
            ring.queue.reset();
            (ring.enabled, ring.addressed, ring.used_log) = (false, false, None);
        }
        (self.acknowledged, self.log, self.logged) = (0, None, None);
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(self.served.read_only, self.rings.len() as u16))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.get_features()? != 0 {
            return Err(invalid("features were acknowledged that were not offered"));
        }
        if config::differ_in_logging(self.acknowledged, features) {
            self.acknowledge(features);
            self.log_in_all(0..self.rings.len())?;
            return self.start_all();
        }
        self.stop_all();
        self.acknowledge(features);
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            self.rings.iter_mut().for_each(|ring| ring.enabled = true);
        }
        self.start_all()
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        // BACKEND_REQ's one message is handled in `descriptor_message`.
        Ok(VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        if regions.len() != files.len() || regions.len() > REGIONS_MAX {
            return Err(invalid("not one descriptor per memory region, or too many"));
        }
        let mapped = regions.iter().zip(files).map(|(region, file)| self.map(region, file));
        let mut mapped = mapped.collect::<Result<Vec<_>>>()?;
        mapped.sort_by_key(GuestMemoryRegion::start_addr);
        let memory = GuestMemoryMmap::from_regions(mapped).map_err(failed)?;
        self.stop_all();
        self.memory = memory;
        self.regions = regions.iter().map(Region::from).collect();
        self.start_all()?;
        Ok(None)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(invalid("too many memory regions"));
        }
        let mapped = Arc::new(self.map(region, file)?);
        let memory = self.memory.insert_region(mapped).map_err(failed)?;
        self.stop_all();
        self.memory = memory;
        self.regions.push(Region::from(&**region));
        self.start_all()?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let known = |one: &Region| {
            (one.guest, one.user, one.size)
                == (region.guest_phys_addr, region.user_addr, region.memory_size)
        };
        let index = self.regions.iter().position(known);
        let index = index.ok_or_else(|| invalid("there is no such memory region"))?;
        let base = GuestAddress(region.guest_phys_addr);
        let (memory, _removed) =
            self.memory.remove_region(base, region.memory_size).map_err(failed)?;
        self.stop_all();
        self.memory = memory;
        self.regions.remove(index);
        self.start_all()
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).map_err(|_| invalid("a ring's size"))?;
        self.ring(index)?;
        self.stop(index as usize);
        let ring = self.ring(index)?;
        ring.queue.try_set_size(size).map_err(|_| invalid("a ring's size"))?;
        self.start(index as usize)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let [table, used, available] =
            [descriptor, used, available].map(|user| self.guest_address(user));
        let (table, used, available) = (table?, used?, available?);
        let ring = self.ring(index)?;
        ring.used_log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        if ring.is_at(table, used, available) {
            let index = index as usize;
            self.log_in_all(index..index + 1)?;
            return self.start(index);
        }
        self.stop(index as usize);
        let ring = self.ring(index)?;
        let queue = &mut ring.queue;
        queue
            .try_set_desc_table_address(table)
            .and_then(|()| queue.try_set_avail_ring_address(available))
            .and_then(|()| queue.try_set_used_ring_address(used))
            .map_err(|_| invalid("a ring is not aligned"))?;
        ring.addressed = true;
        self.start(index as usize)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| invalid("a ring's position"))?;
        self.change(index, |ring| ring.queue.set_next_avail(base))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.ring(index)?;
        self.stop(index as usize);
        let ring = self.ring(index)?;
        // The ring is stopped until it gets a new kick descriptor (vhost-user, "Ring states").
        (ring.kick, ring.call) = (None, None);
        Ok(VhostUserVringState::new(index, u32::from(ring.queue.next_avail())))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let kick = fd.ok_or_else(|| invalid("a ring without kicks would have to be polled"))?;
        self.change(u32::from(index), |ring| ring.kick = Some(Arc::new(kick.into())))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.change(u32::from(index), |ring| ring.call = fd.map(|file| Arc::new(file.into())))
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.change(u32::from(index), |ring| ring.error = fd.map(|file| Arc::new(file.into())))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.change(index, |ring| ring.enabled = enable)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let space = config::space(self.served.size.get(), self.rings.len() as u16);
        let end = offset.checked_add(size).filter(|&end| end as usize <= SPACE);
        let end = end.ok_or_else(|| invalid("beyond the configuration space"))?;
        Ok(space[offset as usize..end as usize].to_vec())
    }

    fn set_config(
        &mut self,
        _offset: u32,
        _buf: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        Err(invalid("nothing in the configuration space can be changed"))
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        Err(not_offered())
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(not_offered())
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        if usize::from(asked.num_queues) > self.rings.len() {
            return Err(invalid("the record is for more queues than the disk has"));
        }
        Inflight::make(asked.num_queues, asked.queue_size).map_err(failed)
    }

    fn set_inflight_fd(&mut self, about: &VhostUserInflight, file: File) -> Result<()> {
        let kept = Inflight::adopt(about, file, self.rings.len()).map_err(failed)?;
        self.stop_all();
        self.inflight = Some(kept);
        self.start_all()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(not_offered())
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(not_offered())
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(not_offered())
    }

    fn set_log_base(&mut self, about: &VhostUserLog, file: File) -> Result<()> {
        let log = MemoryLog::map(about, file).map_err(|error| Self::refuse_log(&error))?;
        for region in &self.regions {
            log.check(region.guest, region.size).map_err(|error| Self::refuse_log(&error))?;
        }
        self.log = Some(Arc::new(log));
        let taken = self.log_in_all(0..self.rings.len()).and_then(|()| self.start_all());
        taken.map_err(|error| Self::refuse_log(&error))
    }
}

/// A ring's record, and the requests to repeat; the ring continues after them.
fn resume(
    kept: &Inflight,
    index: usize,
    queue: &mut Queue,
    used: u16,
) -> std::result::Result<(Record, Vec<u16>), InflightError> {
    let mut record = kept.record(index, queue.size()).ok_or(InflightError::Shape)?;
    let begun = record.resume(used)?;
    if let Some(begun) = &begun {
        queue.set_next_avail(used.wrapping_add(begun.len() as u16));
    }
    Ok((record, begun.unwrap_or_default()))
}

/// The VMM uses a protocol feature that was not offered.
fn not_offered() -> Error {
    Error::InvalidOperation("a protocol feature that was not offered")
}
