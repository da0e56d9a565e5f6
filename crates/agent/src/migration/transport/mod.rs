//! What carries a migration between two agents: sealed streams, one TCP connection each (docs/formats/migration-wire.md).
//!
//! ```text
//!  source agent                                            destination agent
//!  connect(spec, address) ──► Session ═ N connections ═ Session ◄── Listener::expect(spec).session(..)
//!                               │ take(number) → Stream              │
//!                               ├─ Control::new   messages of the agents (JSON, async)
//!                               ├─ Bridge::start  a local socket's bytes, both ways (QEMU), threads of its own
//!                               ├─ Carrier        those of several, one after the other (the layers of a disk); compressed, if asked
//!                               └─ records        frames with a kind, for threads of the caller (disk blocks, pages)
//! ```
//! A session succeeds or fails as a whole. The first error of any stream fails the session ([`Handle::failure`]): it closes every connection
//! and every bridged local socket, and every call that waits for a stream returns this error. The reader of a stream is told of its end only
//! when the authenticated end frame has come. Dropping the [`Session`] cancels it: drop it when the last stream has ended in both directions,
//! or frames that are in flight are lost.
//!
//! A spec serves one session: [`connect`] takes it, and the accepting end takes each stream once. The spec says how frames are protected
//! ([`Cipher`]); nothing is negotiated. The caller chooses the numbers of the streams, and the kinds of frames other than bytes and messages.

mod bridge;
mod compression;
mod connect;
mod control;
mod error;
mod listener;
mod pace;
mod records;
mod session;
mod socket;

use std::time::Duration;

pub use vmseal_seal::frame::{CONTENT_MAX, Kind};
pub use vmseal_seal::wire::{Cipher, STREAMS_MAX, Spec};

pub use bridge::{Bridge, Carrier, Compressed, Moved, Part};
pub use connect::{connect, examine};
pub use control::{Control, ControlReceiver, ControlSender};
pub use error::TransportError;
pub use listener::{Expected, Listener, Refused};
pub use records::{RecordReceiver, RecordSender, records};
pub use session::{Handle, Session, Stream, StreamCounters};

/// How long a TCP connection to the other host may take: two lost SYNs on a path of 150 ms.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection may take that is only tried: a SYN that is lost is sent again after 1 s and after 3 s, and somebody waits for the
/// answer.
pub const EXAMINE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a handshake may take: its two round trips and a busy host. Until then a stranger holds one of [`UNPROVEN_MAX`] places.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How many connections may be there that have not proved themselves: each costs a socket and some kilobytes.
pub const UNPROVEN_MAX: usize = 256;

/// How many of them may come from one address: a host opens all streams of a migration at once.
pub const UNPROVEN_PER_SOURCE: usize = STREAMS_MAX as usize;

/// How long the other host may take nothing and answer nothing before the connection counts as lost. A destination whose storage hangs for
/// longer is no place for the VM.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest message, in bytes: a list of a VM's disks fits, and a receiver holds no more before it trusts anything.
pub const MESSAGE_MAX: usize = 64 * 1024;

#[cfg(test)]
mod tests;
