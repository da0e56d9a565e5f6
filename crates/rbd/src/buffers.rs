//! Memory for reads, used again: the C library would give memory of these sizes back to the system each time, and the kernel clear it.

use std::sync::{Mutex, PoisonError};

/// The sizes of buffers, in bytes, and how many of each are kept: as many as several busy disks have in flight.
const SIZES: [(usize, usize); 2] = [(64 << 10, 512), (1 << 20, 64)];

static KEPT: [Mutex<Vec<Vec<u8>>>; SIZES.len()] = [const { Mutex::new(Vec::new()) }; SIZES.len()];

/// A buffer of this length. What it holds is of an earlier read.
#[must_use]
pub fn take(length: usize) -> Vec<u8> {
    let Some(class) = SIZES.iter().position(|(size, _)| length <= *size) else {
        return vec![0; length];
    };
    let kept = KEPT[class].lock().unwrap_or_else(PoisonError::into_inner).pop();
    let mut buffer = kept.unwrap_or_else(|| vec![0; SIZES[class].0]);
    buffer.truncate(length);
    buffer.resize(length, 0);
    buffer
}

/// Gives one back.
pub fn give(buffer: Vec<u8>) {
    let Some(class) = SIZES.iter().position(|(size, _)| buffer.capacity() == *size) else { return };
    let mut kept = KEPT[class].lock().unwrap_or_else(PoisonError::into_inner);
    if kept.len() < SIZES[class].1 {
        kept.push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_for_what_fits() {
        let size = SIZES[1].0;
        let buffer = take(size - 1);
        let place = buffer.as_ptr();
        assert_eq!(buffer.len(), size - 1);
        give(buffer);
        let again = take(SIZES[0].0 + 1);
        assert_eq!((again.as_ptr(), again.len()), (place, SIZES[0].0 + 1));
        give(again);
        let long = take(size + 1);
        assert_eq!(long.len(), size + 1);
        give(long);
        assert!(KEPT[1].lock().unwrap().iter().all(|kept| kept.capacity() == size));
    }
}
