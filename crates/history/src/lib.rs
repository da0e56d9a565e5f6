//! Whether a disk could have behaved as its guest saw it, for tests.
//!
//! A guest writes [`stamp`]s, and keeps a history of what it did and saw; the [`checker`] judges it. Tests of the data path are such guests
//! themselves. `vmseal-guest-history` is one in a real guest: its writes follow from their numbers ([`load`]), so that they are known
//! after a boot as well.

pub mod checker;
pub mod load;
pub mod stamp;
