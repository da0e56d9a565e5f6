//! The driver's side of a split virtqueue (virtio 1.2, section 2.7) with requests in fixed slots.
//!
//! ```text
//! region:  descriptors | available ring | used ring | headers and statuses | buffers
//! slot i:  descriptors 3i (header) → 3i+1 (data) → 3i+2 (status); buffer i
//! ```

use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use crate::memory::SharedMemory;
use crate::{InitiatorError, Operation};

/// Descriptors of a request: header, data, status.
const DESCRIPTORS: u16 = 3;
/// Header (16 bytes) and status (1 byte) of a slot share one cache line.
const SLOT_LINE: usize = 64;
const STATUS_AT: usize = 16;
const PAGE: usize = 4096;
/// `VRING_AVAIL_F_NO_INTERRUPT` and `VRING_USED_F_NO_NOTIFY`: the only flag of either ring.
const SUPPRESS: u16 = 1;

/// Where the parts of the region are, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) queue_size: u16,
    pub(crate) available: usize,
    pub(crate) used: usize,
    slots: usize,
    buffers: usize,
    block: usize,
    pub(crate) total: usize,
}

impl Layout {
    /// For `depth` requests of up to `block` bytes.
    pub(crate) fn new(depth: u16, block: u32) -> Self {
        let queue_size = (depth * DESCRIPTORS).next_power_of_two();
        let entries = usize::from(queue_size);
        let page = |at: usize| at.next_multiple_of(PAGE);
        let available = page(16 * entries);
        let used = page(available + 6 + 2 * entries);
        let slots = page(used + 6 + 8 * entries);
        let buffers = page(slots + usize::from(depth) * SLOT_LINE);
        let block = block as usize;
        let total = page(buffers + usize::from(depth) * block);
        Self { queue_size, available, used, slots, buffers, block, total }
    }

    fn header(&self, slot: u16) -> usize {
        self.slots + usize::from(slot) * SLOT_LINE
    }

    pub(crate) fn status(&self, slot: u16) -> usize {
        self.header(slot) + STATUS_AT
    }

    pub(crate) fn buffer(&self, slot: u16) -> usize {
        self.buffers + usize::from(slot) * self.block
    }

    /// The offset of the index at which the device wants its next notification (2.7.10); it follows the used
    /// ring.
    fn available_event(&self) -> usize {
        self.used + 4 + 8 * usize::from(self.queue_size)
    }

    /// The offset of the index at which we want the next interrupt (2.7.10); it follows the available ring.
    fn used_event(&self) -> usize {
        self.available + 4 + 2 * usize::from(self.queue_size)
    }
}

/// Whether the step from `old` to `new` passes the index at which the other side wants a notification
/// (`vring_need_event`, 2.7.7.2).
fn passes(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// The rings.
pub(crate) struct Queue {
    memory: SharedMemory,
    layout: Layout,
    event_index: bool,
    /// Our available index; published up to `published`.
    available: u16,
    published: u16,
    /// The next used entry to read.
    used: u16,
    in_flight: Vec<bool>,
}

impl Queue {
    pub(crate) fn new(memory: SharedMemory, layout: Layout, depth: u16, event_index: bool) -> Self {
        let in_flight = vec![false; usize::from(depth)];
        let queue =
            Self { memory, layout, event_index, available: 0, published: 0, used: 0, in_flight };
        queue.disarm();
        queue
    }

    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Puts a request into a slot that is not in flight; the device sees it after [`Self::publish`].
    pub(crate) fn push(&mut self, slot: u16, operation: Operation, offset: u64, length: u32) {
        let in_flight = &mut self.in_flight[usize::from(slot)];
        assert!(!*in_flight, "slot {slot} is in flight");
        *in_flight = true;

        let header = self.layout.header(slot);
        self.memory.store(header, u64::from(operation.request_type()).to_le(), Ordering::Relaxed);
        self.memory.store(header + 8, (offset / 512).to_le(), Ordering::Relaxed);
        self.memory.store(self.layout.status(slot), u8::MAX, Ordering::Relaxed);

        let first = slot * DESCRIPTORS;
        let has_data = length > 0;
        let after_header = if has_data { first + 1 } else { first + 2 };
        self.describe(first, header, 16, VRING_DESC_F_NEXT, after_header);
        if has_data {
            let direction = if operation == Operation::Read { VRING_DESC_F_WRITE } else { 0 };
            let flags = VRING_DESC_F_NEXT | direction;
            self.describe(first + 1, self.layout.buffer(slot), length, flags, first + 2);
        }
        self.describe(first + 2, self.layout.status(slot), 1, VRING_DESC_F_WRITE, 0);

        let entry = usize::from(self.available % self.layout.queue_size);
        self.memory.store(self.layout.available + 4 + 2 * entry, first.to_le(), Ordering::Relaxed);
        self.available = self.available.wrapping_add(1);
    }

    fn describe(&self, index: u16, address: usize, length: u32, flags: u32, next: u16) {
        let at = 16 * usize::from(index);
        let rest = u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48;
        self.memory.store(at, (address as u64).to_le(), Ordering::Relaxed);
        self.memory.store(at + 8, rest.to_le(), Ordering::Relaxed);
    }

    /// Publishes the pushed requests; true if the device wants to be notified.
    pub(crate) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.available);
        if old == new {
            return false;
        }
        self.memory.store(self.layout.available + 2, new.to_le(), Ordering::Release);
        self.published = new;
        // The device may go to sleep on the index it saw: read its event index after our store (2.7.13.4).
        fence(Ordering::SeqCst);
        if self.event_index {
            let event =
                u16::from_le(self.memory.load(self.layout.available_event(), Ordering::Relaxed));
            passes(event, new, old)
        } else {
            u16::from_le(self.memory.load(self.layout.used, Ordering::Relaxed)) & SUPPRESS == 0
        }
    }

    pub(crate) fn has_used(&self) -> bool {
        u16::from_le(self.memory.load(self.layout.used + 2, Ordering::Acquire)) != self.used
    }

    /// The next completed slot and its status byte.
    pub(crate) fn pop(&mut self) -> Result<Option<(u16, u8)>, InitiatorError> {
        if !self.has_used() {
            return Ok(None);
        }
        let entry = usize::from(self.used % self.layout.queue_size);
        let id: u32 = self.memory.load(self.layout.used + 4 + 8 * entry, Ordering::Relaxed);
        let id = u32::from_le(id);
        let slot = u16::try_from(id / u32::from(DESCRIPTORS)).unwrap_or(u16::MAX);
        let head = id.is_multiple_of(u32::from(DESCRIPTORS));
        match self.in_flight.get_mut(usize::from(slot)) {
            Some(in_flight) if *in_flight && head => *in_flight = false,
            _ => return Err(InitiatorError::NotInFlight { id: id.into() }),
        }
        self.used = self.used.wrapping_add(1);
        Ok(Some((slot, self.memory.load(self.layout.status(slot), Ordering::Relaxed))))
    }

    /// Requests an interrupt with the next completion; true if one is there already.
    pub(crate) fn arm(&self) -> bool {
        if self.event_index {
            let event = self.used.to_le();
            self.memory.store(self.layout.used_event(), event, Ordering::Relaxed);
        } else {
            self.memory.store(self.layout.available, 0u16, Ordering::Relaxed);
        }
        // The device may complete before it sees the request: check again after the store (2.7.14).
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Suppresses interrupts. With the event index, an index that was just passed comes again only after
    /// 65535 completions.
    pub(crate) fn disarm(&self) {
        if self.event_index {
            let event = self.used.wrapping_sub(1).to_le();
            self.memory.store(self.layout.used_event(), event, Ordering::Relaxed);
        } else {
            self.memory.store(self.layout.available, SUPPRESS.to_le(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A minimal device: it completes the request at available index `next`.
    fn complete(queue: &Queue, next: u16, status: u8) {
        let (memory, layout) = (&queue.memory, &queue.layout);
        let entry = usize::from(next % layout.queue_size);
        let head: u16 = memory.load(layout.available + 4 + 2 * entry, Ordering::Relaxed);
        memory.store(layout.status(head / DESCRIPTORS), status, Ordering::Relaxed);
        memory.store(layout.used + 4 + 8 * entry, u32::from(head), Ordering::Relaxed);
        memory.store(layout.used + 2, next.wrapping_add(1), Ordering::Release);
    }

    fn queue(depth: u16, event_index: bool) -> Queue {
        let layout = Layout::new(depth, 512);
        Queue::new(SharedMemory::new(layout.total).unwrap(), layout, depth, event_index)
    }

    #[test]
    fn requests_come_back_through_many_turns_of_the_indices() {
        let mut queue = queue(3, true);
        for turn in 0..70_000_u32 {
            let slot = (turn % 3) as u16;
            queue.push(slot, Operation::Read, u64::from(turn) * 512, 512);
            queue.publish();
            complete(&queue, turn as u16, slot as u8);
            assert_eq!(queue.pop().unwrap(), Some((slot, slot as u8)));
            assert_eq!(queue.pop().unwrap(), None);
        }
    }

    #[test]
    fn a_request_is_laid_out_as_virtio_says() {
        let mut queue = queue(2, true);
        queue.push(1, Operation::Write, 4096, 512);
        let (layout, word) = (queue.layout, |at| queue.memory.load::<u64>(at, Ordering::Relaxed));
        // descriptors 3 (header), 4 (data), 5 (status): address, then length | flags | next
        assert_eq!(word(48), layout.header(1) as u64);
        assert_eq!(word(56), 16 | 1 << 32 | 4 << 48);
        assert_eq!(word(64), layout.buffer(1) as u64);
        assert_eq!(word(72), 512 | 1 << 32 | 5 << 48);
        assert_eq!(word(80), layout.status(1) as u64);
        assert_eq!(word(88), 1 | 2 << 32);
        // the header: type OUT, sector 8
        assert_eq!((word(layout.header(1)), word(layout.header(1) + 8)), (1, 8));
        assert_eq!(queue.memory.load::<u16>(layout.available + 4, Ordering::Relaxed), 3);
        // a flush has no data
        queue.push(0, Operation::Flush, 0, 0);
        let word = |at| queue.memory.load::<u64>(at, Ordering::Relaxed);
        assert_eq!(word(8), 16 | 1 << 32 | 2 << 48);
        assert_eq!(word(layout.header(0)), 4);
    }

    #[test]
    fn the_device_is_notified_only_when_it_asked() {
        let mut queue = queue(8, true);
        let wish = |queue: &Queue, index: u16| {
            let at = queue.layout.available_event();
            queue.memory.store(at, index, Ordering::Relaxed);
        };
        wish(&queue, 0);
        queue.push(0, Operation::Read, 0, 512);
        assert!(queue.publish());
        assert!(!queue.publish(), "nothing new");
        wish(&queue, 2);
        queue.push(1, Operation::Read, 0, 512);
        assert!(!queue.publish());
        queue.push(2, Operation::Read, 0, 512);
        queue.push(3, Operation::Read, 0, 512);
        assert!(queue.publish());
    }

    #[test]
    fn without_the_event_index_flags_decide() {
        let mut queue = queue(2, false);
        let flags =
            |queue: &Queue| -> u16 { queue.memory.load(queue.layout.available, Ordering::Relaxed) };
        assert_eq!(flags(&queue), SUPPRESS);
        queue.push(0, Operation::Read, 0, 512);
        assert!(queue.publish());
        assert!(!queue.arm());
        assert_eq!(flags(&queue), 0);
        queue.memory.store(queue.layout.used, SUPPRESS, Ordering::Relaxed);
        queue.push(1, Operation::Read, 0, 512);
        assert!(!queue.publish());
        complete(&queue, 0, 0);
        assert!(queue.arm(), "a completion before the interrupt was asked for");
    }

    #[test]
    fn a_completion_of_nothing_is_an_error() {
        for id in [0, 1, 3, 300, u32::MAX] {
            let mut queue = queue(2, true);
            queue.push(1, Operation::Read, 0, 512);
            queue.publish();
            queue.memory.store(queue.layout.used + 4, id, Ordering::Relaxed);
            queue.memory.store(queue.layout.used + 2, 1u16, Ordering::Release);
            let popped = queue.pop();
            if id == 3 {
                assert_eq!(popped.unwrap().map(|(slot, _)| slot), Some(1));
            } else {
                assert!(
                    matches!(popped, Err(InitiatorError::NotInFlight { id: i }) if i == u64::from(id))
                );
            }
        }
    }

    proptest! {
        /// Compares the formula of the specification with walking the steps one by one.
        #[test]
        fn an_event_is_passed_when_one_of_the_steps_is_it(old: u16, steps in 0u16..300, event: u16) {
            let new = old.wrapping_add(steps);
            let walked = (0..steps).any(|step| old.wrapping_add(step) == event);
            prop_assert_eq!(passes(event, new, old), walked);
        }
    }
}
