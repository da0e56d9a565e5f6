//! What the server is asked for.

use std::sync::atomic::AtomicBool;

use super::*;

#[test]
fn zeroes_are_never_holes_where_room_is_kept_also_where_the_server_has_refused_meanwhile() {
    let discard = Operation::Discard;
    let [keeping, holes] = [false, true].map(|unmap| Operation::WriteZeroes { unmap });
    let (hole, kept) = (Asked::Zero, Asked::ZeroKeepingRoom);
    // What the server can do; what it is asked for a discard, for zeroes that keep their room, and for others.
    let cases = [
        ((true, true), [Some(hole), Some(kept), Some(hole)], [hole, kept, hole]),
        ((true, false), [Some(hole), None, Some(hole)], [hole, kept, hole]),
        ((false, true), [None, Some(kept), Some(kept)], [hole, kept, kept]),
        ((false, false), [None; 3], [hole, kept, kept]),
    ];
    for ((punches, zeroes), at_once, later) in cases {
        let file = tempfile::tempfile().unwrap().into();
        let (punches, zeroes) = (AtomicBool::new(punches), AtomicBool::new(zeroes));
        let target = FileTarget { punches, zeroes, ..FileTarget::whole(file) };
        let operations = [discard, keeping, holes];
        assert_eq!(operations.map(|operation| zeroing(&target, operation)), at_once);
        assert_eq!(operations.map(|operation| zeroing_or_refusal(&target, operation)), later);
    }
}
