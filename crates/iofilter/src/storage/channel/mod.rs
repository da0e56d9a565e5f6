//! A file of a pool of Ceph whose data goes through memory that this process and `vmseal-rbd` share, instead of through the
//! file: less is copied, and long requests stay whole. The file is open all the while: it has the lock, and by a ticket
//! of that open file the server knows what the queues may do ([`connection`]).
//!
//! ```text
//!  write, sealed into shared memory   by reference ([`regions`])
//!  other writes                       copied into the queue's buffers
//!  read, of a cipher just above       stays in the queue's buffers: decrypted from there into the guest's memory
//!  other reads                        copied from the queue's buffers
//! ```
//! Only what the server may know is ever in shared memory: what goes to the image, and what comes from it. So plaintext of
//! an encrypted disk never is, and a read never goes into shared memory of a filter, where it would be decrypted in place.
//!
//! Where the server breaks the protocol, all requests of the disk fail from then on: what one queue has written may still land. Nothing
//! of its memory is believed twice ([`queue`]). A server that is gone ends this process, as the file's own errors do ([`super::served`]).

mod budget;
pub mod connection;
mod queue;
mod regions;

pub use budget::{BUFFER_BYTES, SHARED_BYTES_MAX};
pub use connection::Connection;
pub(super) use queue::Queue;
