//! A buffer for received bytes that are not yet parsed: requests come many at a time, with data.

use crate::stack::memory::{Cursor, Segment, Segments};

/// A piece of memory, part of which is filled.
#[derive(Debug)]
pub struct Arrivals {
    memory: Segment,
    start: usize,
    end: usize,
}

impl Arrivals {
    /// An empty buffer in this memory.
    #[must_use]
    pub fn new(memory: Segment) -> Self {
        Self { memory, start: 0, end: 0 }
    }

    /// How many bytes it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the next `N` bytes; none until they have all arrived.
    pub fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        if self.len() < N {
            return None;
        }
        let mut bytes = [0; N];
        self.memory.part(self.start, N).copy_to(&mut bytes);
        self.start += N;
        Some(bytes)
    }

    /// Moves its bytes into `to`, from the cursor on; returns how many.
    pub fn move_to(&mut self, to: &Segments, cursor: &mut Cursor) -> usize {
        let before = self.start;
        while self.start < self.end {
            let Some(target) = cursor.next(to, self.len()) else { break };
            target.copy_from_segment(&self.memory.part(self.start, target.len()));
            self.start += target.len();
        }
        self.start - before
    }

    /// The free space for the next bytes; those that it holds are moved to the front.
    pub fn room(&mut self) -> Segment {
        let rest = self.memory.part(self.start, self.len());
        self.memory.copy_from_segment(&rest);
        (self.start, self.end) = (0, rest.len());
        self.memory.part(self.end, self.memory.len() - self.end)
    }

    /// This many bytes were put there.
    pub fn arrived(&mut self, bytes: usize) {
        self.end += bytes;
        debug_assert!(self.end <= self.memory.len());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_leave_as_they_came(steps in prop::collection::vec((any::<bool>(), 1usize..40), 1..80)) {
            let (mut memory, mut out) = ([0u8; 48], [0u8; 40]);
            // SAFETY: both arrays outlive the segments; `out` is only looked at between uses.
            let (segment, target) = unsafe {
                (Segment::new(memory.as_mut_ptr(), 48), Segment::new(out.as_mut_ptr(), 40))
            };
            let (mut arrivals, mut came, mut left) = (Arrivals::new(segment), 0u8, 0u8);
            for (fixed, length) in steps {
                let room = arrivals.room();
                let fits = length.min(room.len());
                let bytes: Vec<u8> = (0..fits).map(|at| came.wrapping_add(at as u8)).collect();
                room.copy_from(&bytes);
                arrivals.arrived(fits);
                came = came.wrapping_add(fits as u8);
                let taken: Vec<u8> = if fixed {
                    arrivals.take::<28>().map(Vec::from).unwrap_or_default()
                } else {
                    let mut list = Segments::default();
                    list.push(target.part(0, 3));
                    list.push(target.part(3, length.saturating_sub(3)));
                    let moved = arrivals.move_to(&list, &mut Cursor::default());
                    let mut bytes = vec![0; moved];
                    target.copy_to(&mut bytes);
                    bytes
                };
                for byte in taken {
                    prop_assert_eq!(byte, left);
                    left = left.wrapping_add(1);
                }
            }
        }
    }
}
