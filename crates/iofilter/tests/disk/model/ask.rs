//! The requests of a guest.

use proptest::prelude::*;
use vmseal_iofilter::stack::chain::{Chain, Done};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::Operation;

use crate::model::{BLOCK, SIZE};
use crate::waiting;

/// One request: offset, length (in 512-byte blocks), operation, and how its memory is split.
#[derive(Clone, Debug)]
pub struct Ask {
    pub what: What,
    pub start: u64,
    pub blocks: u64,
    pub fill: u8,
    pub cut: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum What {
    Read,
    Write,
    Flush,
    Discard,
    Zero,
    Unmap,
}

pub fn asks() -> impl Strategy<Value = Vec<Ask>> {
    let what = prop_oneof![
        4 => Just(What::Read), 6 => Just(What::Write), 1 => Just(What::Flush),
        1 => Just(What::Discard), 1 => Just(What::Zero), 1 => Just(What::Unmap),
    ];
    let blocks = prop_oneof![4 => 1u64..20, 1 => 1u64..600];
    let ask = (what, 0..SIZE / BLOCK, blocks, any::<u8>(), 1usize..9000).prop_map(
        |(what, start, blocks, fill, cut)| Ask {
            what,
            start,
            blocks: blocks.min(SIZE / BLOCK - start),
            fill,
            // At most 1000 segments, as a request may have 1024.
            cut: cut.max((blocks as usize * 512).div_ceil(1000)),
        },
    );
    prop::collection::vec(ask, 1..60)
}

impl Ask {
    pub fn range(&self) -> std::ops::Range<usize> {
        (self.start * BLOCK) as usize..((self.start + self.blocks) * BLOCK) as usize
    }

    pub fn operation(&self) -> Operation {
        match self.what {
            What::Read => Operation::Read,
            What::Write => Operation::Write,
            What::Flush => Operation::Flush,
            What::Discard => Operation::Discard,
            What::Zero => Operation::WriteZeroes { unmap: false },
            What::Unmap => Operation::WriteZeroes { unmap: true },
        }
    }

    pub fn content(&self) -> Vec<u8> {
        // The low byte of the block's number in one half and the high one in the other: no two blocks of a
        // disk are alike.
        let number = |at: usize| if at & 256 == 0 { at >> 9 } else { at >> 17 };
        let byte = |at: usize| (at as u8).wrapping_mul(31) ^ number(at) as u8;
        self.range().map(|at| byte(at) ^ self.fill).collect()
    }
}

/// How many of the first requests do not touch the same 512-byte blocks; at least one.
pub fn apart(asks: &[Ask]) -> usize {
    let touch = |one: &Ask, other: &Ask| {
        one.range().start < other.range().end && other.range().start < one.range().end
    };
    let touches = |&next: &usize| asks[..next].iter().any(|other| touch(&asks[next], other));
    (1..asks.len()).find(touches).unwrap_or(asks.len())
}

/// Submits `buffer` as the request's memory, split into segments of `cut` bytes.
pub fn submit(chain: &mut Chain, ask: &Ask, buffer: &mut [u8], tag: u64) {
    let id = chain.begin().expect("fewer than the limit are in flight");
    if matches!(ask.what, What::Read | What::Write) {
        for part in buffer.chunks_mut(ask.cut) {
            // SAFETY: the buffers live until the chain has completed everything.
            chain.data_mut(id).push(unsafe { Segment::new(part.as_mut_ptr(), part.len()) });
        }
    }
    chain.submit(id, ask.operation(), ask.start * BLOCK, ask.blocks * BLOCK, tag);
}

pub fn drain(chain: &mut Chain) {
    finish(chain, |done| done.result.unwrap());
}

/// Runs the chain until all submitted requests are answered.
pub fn finish(chain: &mut Chain, mut answered: impl FnMut(Done)) {
    while chain.in_flight() > 0 {
        chain.poll();
        while let Some(done) = chain.next_done() {
            answered(done);
        }
        waiting::sleep([&mut *chain]);
    }
}
