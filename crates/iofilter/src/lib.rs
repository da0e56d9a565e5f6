//! The I/O-filter framework and what `vmseal-filter` is made of.
//!
//! ```text
//!  process ─► front_ends, copy ─► disk ─► layers ─► storage ─► stack
//! ```
//! | module | subject |
//! |---|---|
//! | [`stack`] | how a request gets through a disk, and the memory it moves through; start at [`stack::chain`] |
//! | [`storage`] | where a disk's bytes lie: file, qcow2, memory |
//! | [`layers`] | what may stand above storage: alignment, encryption, cache, limits, a replica, faults |
//! | [`disk`] | a disk put together, and its status |
//! | [`front_ends`] | who serves it: vhost-user-blk to QEMU, NBD to tools |
//! | [`copy`] | filling a disk from an image, writing one from a disk |
//! | [`process`] | the filter process: configuration, confinement, control socket |
//! | [`handle`] | the descriptors that a configuration names |

pub mod copy;
pub mod disk;
pub mod front_ends;
pub mod handle;
pub mod layers;
pub mod process;
pub mod stack;
pub mod storage;
mod sync;
