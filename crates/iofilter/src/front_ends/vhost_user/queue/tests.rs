//! How many requests a pass takes.

use nix::sys::eventfd::{EfdFlags, EventFd};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress};
use vmseal_api::id::DiskId;

use super::*;
use crate::front_ends::vhost_user::memory_log::tests::{log, marked};
use crate::stack::chain::{Io, Storage};

/// The guest's requests, more than a pass takes; each has three descriptors.
const REQUESTS: u16 = 16;

const SIZE: u16 = 64;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const STATUS: u64 = 0x4000;
const DATA: u64 = 0x1_0000;

/// Storage that completes requests at once; with an event, it claims to work asynchronously.
struct InstantStorage(Option<EventFd>);

impl Storage for InstantStorage {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        io.complete(id, Ok(()));
    }

    fn poll(&mut self, _io: &mut Io<'_>) {}

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(AsFd::as_fd)
    }
}

/// A guest's memory, with writes of `length` bytes in the ring.
fn memory(length: u32) -> GuestMemoryMmap {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 16 << 20)]).unwrap();
    let describe = |index: u16, address: u64, length: u32, flags: u32| {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&length.to_le_bytes());
        descriptor[12..14].copy_from_slice(&(flags as u16).to_le_bytes());
        descriptor[14..].copy_from_slice(&(index + 1).to_le_bytes());
        memory.write_slice(&descriptor, GuestAddress(u64::from(index) * 16)).unwrap();
    };
    memory.write_obj(VIRTIO_BLK_T_OUT.to_le(), GuestAddress(HEADER)).unwrap();
    for request in 0..REQUESTS {
        let head = request * 3;
        describe(head, HEADER, 16, VRING_DESC_F_NEXT);
        describe(head + 1, DATA, length, VRING_DESC_F_NEXT);
        describe(head + 2, STATUS + u64::from(request), 1, VRING_DESC_F_WRITE);
        let entry = AVAILABLE + 4 + u64::from(request) * 2;
        memory.write_obj(head.to_le(), GuestAddress(entry)).unwrap();
    }
    memory.write_obj(REQUESTS.to_le(), GuestAddress(AVAILABLE + 2)).unwrap();
    memory
}

/// A queue over these writes.
fn setup(length: u32) -> Setup {
    let mut queue = Queue::new(SIZE).unwrap();
    queue.set_size(SIZE);
    queue.try_set_desc_table_address(GuestAddress(0)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
    queue.set_ready(true);
    Setup {
        index: 0,
        queue,
        memory: memory(length),
        kick: Arc::new(EventFd::new().unwrap().into()),
        call: None,
        error: None,
        write_through: false,
        serial: Arc::from(""),
        state: Arc::new(DiskState::new(DiskId::new(), 1)),
        record: None,
        begun: Vec::new(),
        log: None,
    }
}

/// How many of the guest's writes of `length` bytes a pass takes.
fn taken(by_itself: bool, length: u32) -> usize {
    let setup = setup(length);
    let storage = InstantStorage(by_itself.then(|| EventFd::new().unwrap()));
    let chain = Chain::new(1 << 20, false, Vec::new(), Box::new(storage)).unwrap();
    let state = Arc::clone(&setup.state);
    let (chain, next) = serve_now(setup, chain, 1).unwrap();
    assert_eq!(chain.in_flight(), 0);
    assert_eq!(state.totals().writes, u64::from(next), "not all requests taken were done");
    usize::from(next)
}

/// Decisions 044 and 045.
#[test]
fn a_pass_takes_few_requests_and_of_large_ones_a_device_gets_one() {
    const SMALL: u32 = 4096;
    const LARGE: u32 = 512 * 1024;
    assert_eq!(taken(false, SMALL), PassLimit::AT_ONCE.requests);
    assert_eq!(taken(false, LARGE), PassLimit::AT_ONCE.requests);
    assert_eq!(taken(true, SMALL), PassLimit::DEVICE.requests);
    assert_eq!(taken(true, LARGE), 1);
}

#[test]
fn a_guest_whose_last_filter_died_before_it_notified_is_notified_by_the_next() {
    let call = Arc::new(OwnedFd::from(EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap()));
    let setup = Setup { call: Some(Arc::clone(&call)), ..setup(4096) };
    // All that the guest has asked for is answered already.
    setup.memory.write_obj(0u16, GuestAddress(AVAILABLE + 2)).unwrap();
    let (_, next) = serve_now(setup, spare(), 1).unwrap();
    assert_eq!(next, 0, "the ring is not empty");
    assert!(nix::unistd::read(&call, &mut [0; 8]).is_ok(), "nobody told the guest");
}

/// The pages that are marked when requests of an earlier filter are repeated, `reads` or writes.
fn marked_by_a_replay(reads: bool, used: Option<u64>) -> Vec<u64> {
    let setup = setup(4096);
    if reads {
        setup.memory.write_obj(VIRTIO_BLK_T_IN.to_le(), GuestAddress(HEADER)).unwrap();
        let flags = (VRING_DESC_F_NEXT | VRING_DESC_F_WRITE) as u16;
        setup.memory.write_obj(flags.to_le(), GuestAddress(4 * 16 + 12)).unwrap();
    }
    // Nothing new is to be taken.
    setup.memory.write_obj(0u16, GuestAddress(AVAILABLE + 2)).unwrap();
    let (bits, file) = log(512);
    let log = Some(RingLog { log: Arc::new(bits), used, changed: None });
    let state = Arc::clone(&setup.state);
    serve_now(Setup { begun: vec![3], log, ..setup }, spare(), 2).unwrap();
    assert_eq!(state.totals().errors, 0);
    assert_eq!(state.totals().reads, u64::from(reads));
    marked(&file)
}

#[test]
fn what_a_repeated_request_writes_is_logged() {
    assert_eq!(marked_by_a_replay(true, None), [STATUS / 4096, DATA / 4096]);
    assert_eq!(marked_by_a_replay(false, None), [STATUS / 4096]);
    // Wherever the VMM says that the used ring is.
    assert_eq!(marked_by_a_replay(false, Some(9 * 4096 - 1)), [STATUS / 4096, 8, 9]);
}

/// Counts lines of log.
#[derive(Clone, Default)]
struct Lines(Arc<std::sync::atomic::AtomicUsize>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_guest_that_loops_malformed_rings_and_resets_does_not_fill_the_log() {
    const ROUNDS: usize = 200;
    let (lines, state) = (Lines::default(), Arc::new(DiskState::new(DiskId::new(), 1)));
    let (begun, mut chain) = (
        Instant::now(),
        Chain::new(1 << 20, false, Vec::new(), Box::new(InstantStorage(None))).unwrap(),
    );
    tracing::subscriber::with_default(lines.clone(), || {
        for _ in 0..ROUNDS {
            let setup = Setup { state: Arc::clone(&state), ..setup(4096) };
            // The first descriptor points to itself.
            setup.memory.write_obj(0u16, GuestAddress(14)).unwrap();
            let served = serve_now(setup, std::mem::replace(&mut chain, spare()), 4).unwrap();
            chain = served.0;
        }
    });
    assert_eq!(state.totals().errors, ROUNDS as u64, "no ring was broken");
    // On a slow machine the time may be enough for some more.
    let most = 1 + begun.elapsed().as_secs() as usize / 5;
    assert!((1..=most).contains(&lines.0.load(std::sync::atomic::Ordering::SeqCst)));
}

fn spare() -> Chain {
    Chain::new(1 << 20, false, Vec::new(), Box::new(InstantStorage(None))).unwrap()
}
