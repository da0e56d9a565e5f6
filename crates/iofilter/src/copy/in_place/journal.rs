//! The journal of a conversion in place (docs/formats/in-place.md): how far it is, and what stood in the part that is being
//! written, where that part has no other place.
//!
//! Two slots are written in turn, so that the last one that is whole is there whatever write the power cut. A slot counts
//! only with the right sum over its header and what it saves.

use vmseal_api::filter::{
    IN_PLACE_JOURNAL, IN_PLACE_SAVED_MAX, IN_PLACE_SLOT, IN_PLACE_SLOT_HEADER,
};
use vmseal_secret::digest::{SHA256_LEN, Sha256};

use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::request::{IoError, Operation};

/// What a slot begins with.
const MAGIC: [u8; 16] = *b"vmseal in place\0";

/// The version of slots.
const VERSION: u32 = 1;

/// Where the sum is in a slot; before it is what it is over.
const SUM: usize = 96;

/// The length of a slot's header.
pub const HEADER: usize = IN_PLACE_SLOT_HEADER as usize;

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Storage.
    #[error("the journal cannot be read or written: {0}")]
    Io(#[from] IoError),
    /// Neither slot is whole.
    #[error("the journal is damaged, and says no more how far the conversion is")]
    Damaged,
    /// It is of another disk, or of another conversion.
    #[error("the journal is of another conversion")]
    Another,
}

/// What a conversion is: the same in each slot of its journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The disk's id.
    pub disk: [u8; 16],
    /// Its size, in bytes.
    pub size: u64,
    /// Where its first byte was, in bytes.
    pub from: u64,
    /// Where it is to be.
    pub to: u64,
}

/// What a slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The conversion.
    pub plan: Plan,
    /// Slots have numbers from 1 on; the number says which place it has.
    pub number: u64,
    /// How many bytes are converted: the first ones of the disk, or the last ones where they move towards the end.
    pub done: u64,
    /// How many bytes behind the header stood where the conversion goes on.
    pub saved: u32,
}

impl Slot {
    /// As it is stored, with the sum over it and `saved`.
    #[must_use]
    pub fn encode(&self, saved: &[u8]) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        let Plan { disk, size, from, to } = self.plan;
        header[..16].copy_from_slice(&MAGIC);
        header[16..20].copy_from_slice(&VERSION.to_le_bytes());
        header[20..24].copy_from_slice(&self.saved.to_le_bytes());
        header[24..40].copy_from_slice(&disk);
        for (index, number) in [size, from, to, self.number, self.done].into_iter().enumerate() {
            header[40 + 8 * index..48 + 8 * index].copy_from_slice(&number.to_le_bytes());
        }
        let sum = sum_of(&header, saved);
        header[SUM..SUM + SHA256_LEN].copy_from_slice(&sum);
        header
    }

    /// What a header says, if it is one; its sum is not checked.
    #[must_use]
    pub fn parse(header: &[u8; HEADER]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| header[at + index]));
        let number =
            |at: usize| u64::from_le_bytes(std::array::from_fn(|index| header[at + index]));
        let disk = std::array::from_fn(|index| header[24 + index]);
        let rest = &header[80..SUM];
        let ends_with_zeroes = |part: &[u8]| part.iter().all(|byte| *byte == 0);
        let known = header[..16] == MAGIC && word(16) == VERSION;
        if !known || !ends_with_zeroes(rest) || !ends_with_zeroes(&header[SUM + SHA256_LEN..]) {
            return None;
        }
        let plan = Plan { disk, size: number(40), from: number(48), to: number(56) };
        let slot = Self { plan, number: number(64), done: number(72), saved: word(20) };
        let sane = slot.number > 0
            && slot.done <= plan.size
            && u64::from(slot.saved) <= IN_PLACE_SAVED_MAX.min(plan.size - slot.done);
        sane.then_some(slot)
    }

    /// Whether the sum in a header is that over it and what is saved.
    #[must_use]
    pub fn is_whole(header: &[u8; HEADER], saved: &[u8]) -> bool {
        header[SUM..SUM + SHA256_LEN] == sum_of(header, saved)
    }

    /// Where it is in the journal.
    fn place(&self) -> u64 {
        self.number % 2 * IN_PLACE_SLOT
    }
}

fn sum_of(header: &[u8; HEADER], saved: &[u8]) -> [u8; SHA256_LEN] {
    let mut sum = Sha256::new();
    sum.update(&header[..SUM]);
    sum.update(&header[SUM + SHA256_LEN..]);
    sum.update(saved);
    sum.finish()
}

/// The journal of a conversion.
pub struct Journal {
    chain: Chain,
    plan: Plan,
    /// The number of the last slot.
    number: u64,
    /// A header, then room for what is saved.
    buffer: Vec<u8>,
}

/// How far a conversion is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// [`Slot::done`].
    pub done: u64,
    /// How many bytes of [`Journal::saved`] stood there.
    pub saved: usize,
}

enum Place {
    Empty,
    Broken,
    Whole(Slot),
}

impl Journal {
    /// Reads the journal of a conversion that saves at most `saved` bytes; no position before it has begun.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(
        chain: Chain,
        plan: Plan,
        saved: usize,
    ) -> Result<(Self, Option<Position>), JournalError> {
        debug_assert!(chain.size() == IN_PLACE_JOURNAL && saved as u64 <= IN_PLACE_SAVED_MAX);
        let mut journal = Self { chain, plan, number: 0, buffer: vec![0; HEADER + saved] };
        let places = [journal.look(0)?, journal.look(1)?];
        let whole = places.iter().filter_map(|place| match place {
            Place::Whole(slot) => Some(*slot),
            Place::Empty | Place::Broken => None,
        });
        let Some(last) = whole.max_by_key(|slot| slot.number) else {
            // The first slot is in the second place. Nothing is written to the disk before that is durable.
            return match places {
                [Place::Empty, _] => Ok((journal, None)),
                _ => Err(JournalError::Damaged),
            };
        };
        if last.plan != plan {
            return Err(JournalError::Another);
        }
        // What the other place had is gone from the buffer.
        journal.look(last.number % 2)?;
        journal.number = last.number;
        Ok((journal, Some(Position { done: last.done, saved: last.saved as usize })))
    }

    fn look(&mut self, place: u64) -> Result<Place, JournalError> {
        let at = place * IN_PLACE_SLOT;
        let (header, saved) = self.buffer.split_at_mut(HEADER);
        blocking::move_bytes(&mut self.chain, Operation::Read, header, at)?;
        if header.iter().all(|byte| *byte == 0) {
            return Ok(Place::Empty);
        }
        let Ok(header) = <&[u8; HEADER]>::try_from(&*header) else { return Ok(Place::Broken) };
        let slot = Slot::parse(header).filter(|slot| slot.number % 2 == place);
        let Some(slot) = slot.filter(|slot| slot.saved as usize <= saved.len()) else {
            return Ok(Place::Broken);
        };
        let saved = &mut saved[..slot.saved as usize];
        if !saved.is_empty() {
            blocking::move_bytes(&mut self.chain, Operation::Read, saved, at + HEADER as u64)?;
        }
        Ok(if Slot::is_whole(header, saved) { Place::Whole(slot) } else { Place::Broken })
    }

    /// What is saved, or the room for it.
    pub fn saved(&mut self, length: usize) -> &mut [u8] {
        &mut self.buffer[HEADER..HEADER + length]
    }

    /// Notes how far the conversion is, with what is saved, durably.
    ///
    /// # Errors
    /// Those of storage.
    pub fn note(&mut self, position: Position) -> Result<(), JournalError> {
        let Position { done, saved } = position;
        let number = self.number + 1;
        let slot = Slot { plan: self.plan, number, done, saved: saved as u32 };
        let header = slot.encode(&self.buffer[HEADER..HEADER + saved]);
        self.buffer[..HEADER].copy_from_slice(&header);
        let bytes = &mut self.buffer[..HEADER + saved];
        blocking::move_bytes(&mut self.chain, Operation::Write, bytes, slot.place())?;
        blocking::flush(&mut self.chain)?;
        self.number = number;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot() -> Slot {
        let plan = Plan { disk: [0x33; 16], size: 64 << 20, from: 16 << 20, to: 16 << 20 };
        Slot { plan, number: 5, done: 4 << 20, saved: 4096 }
    }

    #[test]
    fn a_slot_matches_its_description() {
        let golden = include_bytes!("../../../tests/golden/in-place-slot-v1.bin");
        let saved = [0xa7; 4096];
        let header = slot().encode(&saved);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write("tests/golden/in-place-slot-v1.bin", header).unwrap();
        }
        assert!(header[..] == golden[..], "the format of slots has changed");
        assert_eq!(Slot::parse(&header), Some(slot()));
        assert!(Slot::is_whole(&header, &saved));
        assert!(!Slot::is_whole(&header, &saved[..4095]));
    }

    #[test]
    fn no_changed_bit_of_a_slot_goes_unnoticed() {
        let (saved, header) = ([0xa7; 64], slot().encode(&[0xa7; 64]));
        for bit in 0..8 * HEADER {
            let mut changed = header;
            changed[bit / 8] ^= 1 << (bit % 8);
            let accepted = Slot::parse(&changed).is_some() && Slot::is_whole(&changed, &saved);
            assert!(!accepted, "bit {bit}");
        }
    }
}
