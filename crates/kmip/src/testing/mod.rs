//! For the tests of this crate and of its users: certificates, a real PyKMIP server, and a server that
//! misbehaves on purpose. Panics with a clear message when something is missing.
//!
//! ```no_run
//! use vmseal_kmip::client::{Client, Settings};
//! use vmseal_kmip::testing::{Authority, PyKmip, Validity};
//!
//! let authority = Authority::new("kms");
//! let server = PyKmip::start(&authority);
//! let identity = authority.client("vmseal", Validity::Now).identity();
//! let settings = Settings::new(server.endpoint(), authority.trust(), identity);
//! let client = Client::new(settings).unwrap();
//! ```
//!
//! PyKMIP must be installed first: `scripts/pykmip-environment`.

mod certificates;
mod pykmip;
mod raw;
mod scripted;

pub use certificates::{Authority, Issued, Validity, self_signed};
pub use pykmip::PyKmip;
pub use raw::RawConnection;
#[cfg(test)]
pub(crate) use scripted::server_config;
pub use scripted::{Asked, Reaction, ScriptedServer};
