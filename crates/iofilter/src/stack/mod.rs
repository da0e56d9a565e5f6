//! How a request gets through a disk: chains of layers over storage, the memory it moves through, and what all layers share.

pub mod blocking;
pub mod chain;
pub mod contained;
pub mod dirty;
pub mod figures;
pub mod layer;
pub mod memory;
pub mod pool;
pub mod request;
pub mod stop;
pub mod tally;
pub mod waker;
