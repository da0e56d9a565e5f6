//! The I/O filter framework, and the parts that make up `vmseal-filter`.
//!
//! ```text
//!  process ─► front_ends, copy ─► disk ─► layers ─► storage ─► stack
//! ```
//! | module | subject |
//! |---|---|
//! | [`stack`] | how a request passes through a disk, and the memory it uses; start at [`stack::chain`] |
//! | [`storage`] | where a disk's bytes are stored: file, a file of a pool of Ceph by shared memory, qcow2, an NBD server, memory |
//! | [`layers`] | the filters above storage: alignment, encryption, cache, limits, a replica, faults; stacks of them, and legs |
//! | [`disk`] | a complete disk, and its status |
//! | [`front_ends`] | the protocols that serve it: vhost-user-blk to QEMU, NBD to tools |
//! | [`copy`] | filling a disk from an image, writing a disk to an image |
//! | [`process`] | the filter process: configuration, confinement, control socket |
//! | [`handle`] | the descriptors that a configuration names |
//! | [`nbd`] | the numbers and structures of the NBD protocol, which the front end and a storage speak |

pub mod copy;
pub mod disk;
pub mod front_ends;
pub mod handle;
pub mod layers;
pub mod nbd;
pub mod process;
pub mod stack;
pub mod storage;
mod sync;
