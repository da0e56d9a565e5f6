//! The I/O-filter framework and what `vmseal-filter` is made of: chains of filters over backends, the
//! front ends that serve guests, the control socket, and the import and export of images.
//!
//! Start reading at [`chain`]; [`disk`] puts a disk together.

pub mod align;
pub mod allocation;
pub mod backend;
pub mod blocking;
pub mod cache;
pub mod chain;
pub mod config;
pub mod confinement;
pub mod contained;
pub mod control;
pub mod crypt;
pub mod delay;
pub mod dirty;
pub mod disk;
pub mod export;
pub mod fault;
pub mod figures;
pub mod front_end;
pub mod handle;
pub mod import;
pub mod layer;
pub mod limit;
pub mod memory;
pub mod nbd;
pub mod peer;
pub mod pool;
pub mod process;
pub mod replicate;
pub mod request;
pub mod source;
pub mod status;
pub mod stop;
mod sync;
pub mod tally;
pub mod vhost_user;
