//! The client: connections over mutual TLS, a pool of them, and [`Client`].
//!
//! | module | what |
//! |---|---|
//! | [`settings`](Settings) | a server, whom to trust, who we are, time-outs, limits |
//! | `tls` | what is checked of a server's certificate, and our own |
//! | [`certificate`](show_certificate) | the certificate that a server shows, to be trusted by an operator |
//! | `connection` | one connection: opened, one exchange after the other |
//! | `plaintext` | what TLS decrypts, in secret memory |
//! | `pool` | the connections to a server |
//! | `keys` | [`Client`]: what is done with keys |
//! | [`observer`](Observer) | who is told of requests, for metrics |
//! | [`error`](Error) | what goes wrong, told apart |
//!
//! The answer to a request is decrypted into secret memory, and a key is taken from there into a
//! [`SecretBytes`](vmseal_secret::SecretBytes) of its own: no byte of it is ever in ordinary memory.

mod certificate;
mod connection;
mod error;
mod keys;
mod observer;
mod plaintext;
mod pool;
mod settings;
mod tls;

pub use certificate::{Fingerprint, ShownCertificate, show_certificate};
pub use error::{Error, OwnCertificate, Step, TlsProblem};
pub use keys::{Client, CreatedKey, NewKey, Versions};
pub use observer::{Ended, Observer};
pub use settings::{Endpoint, InvalidEndpoint, KMIP_PORT, PoolLimits, Settings, Timeouts};
pub use tls::{Identity, SetupError, Trust};
