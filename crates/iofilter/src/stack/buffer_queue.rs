//! The requests of a filter that wait for one of its buffers, oldest first.
//!
//! ```text
//!  no buffer is free ──────────────────────────────> wait
//!  a buffer came back, and others came before ─────> goes_behind ──> wait
//!  a buffer came back ──> next ── no buffer is free again ──> stays_first
//! ```

use std::collections::VecDeque;

use crate::stack::chain::Io;
use crate::stack::request::RequestId;

/// See the module.
#[derive(Debug, Default)]
pub struct BufferQueue {
    line: VecDeque<RequestId>,
    /// Whether each request is in the line, by request.
    waits: Vec<bool>,
}

impl BufferQueue {
    /// Makes room for the requests of a chain with this many slots.
    pub fn prepare(&mut self, capacity: usize) {
        self.line.reserve(capacity);
        self.waits.resize(capacity, false);
    }

    /// Holds a request for which there was no buffer.
    pub fn wait(&mut self, id: RequestId, io: &mut Io<'_>) {
        io.hold(id);
        if !std::mem::replace(&mut self.waits[id.index()], true) {
            self.line.push_back(id);
        }
    }

    /// Whether a request of which a buffer has come back has to leave it to others. `wants`: it could use another one
    /// itself; then it waits behind those that came before.
    pub fn goes_behind(&mut self, id: RequestId, wants: bool, io: &mut Io<'_>) -> bool {
        if self.waits[id.index()] {
            return true;
        }
        let behind = wants && !self.line.is_empty();
        if behind {
            self.wait(id, io);
        }
        behind
    }

    /// The request that has waited longest, which waits no more.
    pub fn take_next(&mut self) -> Option<RequestId> {
        let id = self.line.pop_front()?;
        self.waits[id.index()] = false;
        Some(id)
    }

    /// None of them waits any more: they have failed.
    pub fn clear(&mut self) {
        while self.take_next().is_some() {}
    }

    /// Whether a request from [`BufferQueue::take_next`] waits again, as all buffers are in use. Then it is the first once more.
    pub fn stays_first(&mut self, id: RequestId) -> bool {
        let waits = self.line.back() == Some(&id);
        if waits {
            self.line.rotate_right(1);
        }
        waits
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::stack::chain::{Chain, Filter, Limits};
    use crate::stack::request::Operation;
    use crate::storage::mem::MemDisk;

    /// Splits requests into sectors, one at a time of each, with two buffers for all. Notes whose parts go down, in order.
    struct Splits {
        free: usize,
        left: Vec<u64>,
        waiting: BufferQueue,
        order: Arc<Mutex<Vec<u64>>>,
    }

    const BUFFERS: usize = 2;

    impl Splits {
        fn pump(&mut self, id: RequestId, io: &mut Io<'_>) {
            if self.left[id.index()] > 0 {
                if self.free == 0 {
                    return self.waiting.wait(id, io);
                }
                let whole = io.request(id);
                let (at, tag) = (whole.offset, whole.tag);
                let part = io.child(id, Operation::WriteZeroes { unmap: true }, at, 512).unwrap();
                self.free -= 1;
                self.left[id.index()] -= 1;
                self.order.lock().unwrap().push(tag);
                return io.pass(part);
            }
            io.complete(id, Ok(()));
        }
    }

    impl Filter for Splits {
        fn limits(&self) -> Limits {
            Limits { children: BUFFERS }
        }

        fn prepare(&mut self, capacity: usize) {
            self.left.resize(capacity, 0);
            self.waiting.prepare(capacity);
        }

        fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
            self.left[id.index()] = io.request(id).length / 512;
            self.pump(id, io);
        }

        fn up(&mut self, part: RequestId, io: &mut Io<'_>) {
            let whole = io.parent(part).unwrap();
            io.release(part);
            self.free += 1;
            let wants = self.left[whole.index()] > 0;
            if !self.waiting.goes_behind(whole, wants, io) {
                self.pump(whole, io);
            }
            while let Some(next) = self.waiting.take_next() {
                self.pump(next, io);
                if self.waiting.stays_first(next) {
                    return;
                }
            }
        }
    }

    #[test]
    fn buffers_go_to_who_has_waited_longest_and_nobody_is_forgotten() {
        let order = Arc::default();
        let (waiting, left) = (BufferQueue::default(), Vec::new());
        let filter = Splits { free: BUFFERS, left, waiting, order: Arc::clone(&order) };
        let storage = MemDisk::new(1 << 20).queue();
        let mut chain = Chain::new(1 << 20, false, vec![Box::new(filter)], storage).unwrap();
        // More requests than there are buffers.
        let parts = [5, 3, 1, 4];
        for (tag, parts) in (0..).zip(parts) {
            let id = chain.begin().unwrap();
            chain.submit(id, Operation::Discard, 0, parts * 512, tag);
        }
        let mut done = 0;
        while done < parts.len() {
            chain.poll();
            while let Some(ended) = chain.next_done() {
                assert_eq!(ended.result, Ok(()));
                done += 1;
            }
        }
        let order = order.lock().unwrap();
        for (tag, parts) in (0..).zip(parts) {
            assert_eq!(order.iter().filter(|part| **part == tag).count() as u64, parts);
        }
        // Whose buffer comes back leaves it to those that have none yet, in the order in which they came.
        assert_eq!(order[..4], [0, 1, 2, 3], "{order:?}");
    }
}
