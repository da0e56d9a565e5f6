//! What carries a migration between two agents: sealed streams, one TCP connection each (docs/formats/migration-wire.md).
//!
//! ```text
//!  source agent                                            destination agent
//!  connect(spec, address) ──► Session ═ N connections ═ Session ◄── Listener::expect(spec).session(..)
//!                               │ take(number) → Stream              │
//!                               ├─ Control::new   messages of the agents (JSON, async)
//!                               ├─ Bridge::start  a local socket's bytes, both ways (QEMU), threads of its own
//!                               └─ records        frames with a kind, for threads of the caller (disk blocks, pages)
//! ```
//! A session succeeds or fails as a whole. The first error of any stream is the session's ([`Handle::failure`]); from then on every
//! connection and every bridged local socket is shut down, and whoever waits for a stream gets that first error. A stream is whole only
//! when its authenticated end has come; where it has not, nobody hears of an end. Dropping the [`Session`] cancels it.
//!
//! A spec serves one session: [`connect`] takes it, and the accepting end takes each stream once. What protects the frames is in the spec
//! ([`Cipher`]); nothing is negotiated. Numbers of streams, and kinds of frames other than bytes and messages, are the caller's. A session is
//! dropped only when its last stream has ended both ways, or what is still on its way is lost.

mod bridge;
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

pub use bridge::{Bridge, Moved};
pub use connect::connect;
pub use control::{Control, ControlReceiver, ControlSender};
pub use error::TransportError;
pub use listener::{Expected, Listener, Refused};
pub use records::{RecordReceiver, RecordSender, records};
pub use session::{Handle, Session, Stream, StreamCounters};

/// How long a TCP connection to the other host may take: two lost SYNs on a path of 150 ms.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a handshake may take: its two round trips and a busy host. Until then a stranger holds one of [`UNPROVEN_MAX`] places.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How many connections may be there that have not proved themselves: each costs a socket and some kilobytes.
pub const UNPROVEN_MAX: usize = 256;

/// How many of them may come from one address: all streams of one migration open together.
pub const UNPROVEN_PER_SOURCE: usize = STREAMS_MAX as usize;

/// How long the other host may take nothing and answer nothing before the connection counts as lost. A destination whose storage hangs for
/// longer is no place for the VM.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest message, in bytes: a list of a VM's disks fits, and a receiver holds no more before it trusts anything.
pub const MESSAGE_MAX: usize = 64 * 1024;

#[cfg(test)]
mod tests;
