//! What an NBD server answers. The first byte says whether in chunks, how many requests are in flight, and how many bytes
//! arrive at a time; the rest is what the server sends, in which the lower half of a cookie may be any slot. Each request ends
//! once, data lies within the read that asked for it, and a read that succeeds got as much as it asked for.

use vmseal_iofilter::storage::nbd::replies::{Asked, Event, Replies};

use crate::INPUT_MAX;

/// Two of each length are reads.
const LENGTHS: [u32; 4] = [512, 4096, 65_536, 512];

/// See the module.
pub fn run(data: &[u8]) {
    let Some((&kind, stream)) = data.split_first() else { return };
    let stream = &stream[..stream.len().min(INPUT_MAX)];
    let (structured, slots, piece) =
        (kind & 1 != 0, 1 + usize::from(kind >> 1 & 7), 1 + usize::from(kind >> 4) * 9);
    let mut replies = Replies::new(structured, slots);
    let mut asked = Vec::new();
    for slot in 0..slots {
        let length = LENGTHS[slot % LENGTHS.len()];
        let it = Asked { read: slot % 3 != 2, offset: 4096 * slot as u64, length };
        // The first of its slot.
        assert_eq!(replies.begin(slot, it), 1 << 32 | slot as u64);
        if slot != 6 {
            replies.sent(slot);
        }
        asked.push((it, 0u64, false));
    }
    let (mut taken, mut arrived) = (0, 0);
    loop {
        let mut input = &stream[taken..arrived];
        let Ok(event) = replies.next(&mut input) else { return };
        taken = arrived - input.len();
        let within = |slot: usize, at: u32, length: u32| {
            let (asked, _, ended) = asked[slot];
            assert!(asked.read && !ended && length > 0);
            assert!(u64::from(at) + u64::from(length) <= u64::from(asked.length));
        };
        match event {
            Event::More if arrived == stream.len() => return,
            Event::More => arrived = stream.len().min(arrived + piece),
            Event::Data { slot, at, length } => {
                within(slot, at, length);
                if taken == arrived {
                    if arrived == stream.len() {
                        return;
                    }
                    arrived = stream.len().min(arrived + piece);
                    continue;
                }
                let count = (length as usize).min(arrived - taken);
                taken += count;
                replies.took(count as u32);
                asked[slot].1 += count as u64;
            }
            Event::Zeroes { slot, at, length } => {
                within(slot, at, length);
                asked[slot].1 += u64::from(length);
            }
            Event::Done { slot, result } => {
                let (it, came, ended) = &mut asked[slot];
                assert!(!std::mem::replace(ended, true), "it is answered twice");
                assert!(slot != 6, "it was not sent yet");
                assert!(result.is_err() || !it.read || *came == u64::from(it.length));
            }
        }
    }
}
