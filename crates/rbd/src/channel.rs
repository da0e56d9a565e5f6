//! The channel: filters read and write images by queues in shared memory, without FUSE (crate `vmseal-channel`).
//!
//! ```text
//!  filter                        vmseal-rbd
//!  ioctl of its open file ─────> tickets: a ticket for the handle
//!  connection ── Attach ───────> connection, a thread each ─► queue ──> librbd
//!  ring, regions  <─────── answers, by librbd's threads ────────┘
//!  closes its file ────────────> release: the handle's gate is shut, what is in flight ends, then the file's lock is given up
//! ```
//! Who has a file open gets a ticket, and by it at the file's image, as the handle was opened. The ticket ends with the handle.
//!
//! | module | subject |
//! |---|---|
//! | [`tickets`] | handles whose files may be reached, and the end of that |
//! | [`gate`] | counts what is at work, and waits for it |
//! | [`budget`] | how many bytes each image has in flight |
//! | [`queue`] | requests of one queue |
//! | [`connection`] | the queues of one filter |
//! | [`listener`] | the socket |
//! | [`service`] | what they need of the file system |

pub mod budget;
pub mod connection;
pub mod gate;
pub mod listener;
pub mod queue;
pub mod service;
pub mod tickets;
