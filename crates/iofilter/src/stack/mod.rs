//! How a request passes through a disk, the memory it uses, and the code that all layers share.

pub mod blocking;
pub mod buffer_queue;
pub mod chain;
pub mod contained;
pub mod dirty;
pub mod figures;
pub mod flight;
pub mod gate;
pub mod layer;
pub mod memory;
pub mod orders;
pub mod pool;
pub mod request;
pub mod socket;
pub mod stop;
pub mod tally;
pub mod waker;
