//! The client: connections over mutual TLS, a pool of them, and [`Client`].
//!
//! | module | what |
//! |---|---|
//! | [`settings`](Settings) | a server, trusted certificates, our certificate, timeouts, limits |
//! | `tls` | the checks of a server's certificate, and our own certificate |
//! | [`certificate`](show_certificate) | fetches a server's certificate for an operator to trust |
//! | `connection` | one connection: one exchange after the other |
//! | `plaintext` | decrypted data of TLS, in secret memory |
//! | `pool` | the connections to a server |
//! | `keys` | [`Client`]: the operations on keys |
//! | [`observer`](Observer) | is called after each request, for metrics |
//! | [`error`](Error) | the errors |
//!
//! The answer to a request is decrypted into secret memory, and a key is copied from there into its own
//! [`SecretBytes`](vmseal_secret::SecretBytes): no byte of it is ever in ordinary memory.

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
