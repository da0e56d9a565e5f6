//! The channel between a filter and `vmseal-rbd`: queues in shared memory by which a filter reads and writes an image without FUSE.
//!
//! ```text
//!  filter                                                      vmseal-rbd
//!  Requester ──submissions──> ring (a memfd) ──submissions──> Answerer ──> librbd
//!      │     <───answers─────               <───answers─────     │            │
//!      └────────── doorbells, new regions: a socketpair ─────────┘            │
//!  regions (memfds): the data, which librbd reads and writes in place <───────┘
//! ```
//! Neither side trusts the other: what it reads from shared memory it reads once, and checks. A side that breaks the protocol loses its
//! queue, and nothing else.
//!
//! | module | subject |
//! |---|---|
//! | [`memory`] | memory that two processes share |
//! | [`ring`] | requests and answers in such memory, and when a doorbell is due |
//! | [`message`] | what goes over the sockets, with descriptors |
//! | [`limits`] | how much of each there may be |

pub mod limits;
pub mod memory;
pub mod message;
pub mod ring;

pub use limits::{
    CONNECTIONS_MAX, QUEUES_MAX, REGION_BYTES_MAX, REGIONS_MAX, REQUEST_BYTES_MAX, ZEROES_BYTES_MAX,
};
pub use memory::SharedMemory;
pub use message::{
    MESSAGE_BYTES, Message, TICKET_BYTES, ToFilter, ToServer, VERSION, receive, ring_doorbell, send,
};
pub use ring::{
    Answerer, Broken, Operation, PIECES_MAX, Piece, RING_BYTES, Requester, SLOTS, Submission,
};
