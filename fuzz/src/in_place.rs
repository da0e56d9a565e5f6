//! A slot of the journal of a conversion in place, with what it saves. What is taken is written as it was read, and no
//! slot is whole but with the sum of what it saves.

use vmseal_iofilter::copy::in_place::journal::{HEADER, Slot};

/// See the module.
pub fn run(data: &[u8]) {
    let Some((header, rest)) = data.split_first_chunk::<HEADER>() else { return };
    let Some(slot) = Slot::parse(header) else { return };
    assert!(slot.done <= slot.plan.size && u64::from(slot.saved) <= slot.plan.size - slot.done);
    let Some(saved) = rest.get(..slot.saved as usize) else { return };
    let written = slot.encode(saved);
    assert!(Slot::is_whole(&written, saved));
    assert_eq!(Slot::is_whole(header, saved), written == *header);
    assert_eq!(Slot::parse(&written), Some(slot));
}
