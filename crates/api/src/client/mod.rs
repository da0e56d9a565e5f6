//! HTTPS clients: [`ServerClient`] for the command line, [`HostClient`] for the server.
//!
//! Both speak HTTP/1.1 over TLS 1.3. They trust only the control plane's own CA, and only certificates with
//! the role of the peer ([`role`]). Every failure is a [`Problem`]: the one that the other side answered, or
//! `unreachable` or `timed-out`.

mod exchange;
mod host_client;
mod older_agents;
pub mod role;
mod server_client;
mod shown;
mod tls;
pub mod verifier;
mod websocket;

pub use exchange::CUT_OFF;
pub use host_client::HostClient;
pub use role::host_server_name;
pub use server_client::ServerClient;
pub use shown::shown_authority;
pub use tls::{ClientIdentity, TlsError};

use crate::problem::Problem;

/// The part between the scheme and the path: no user, no query, a host and a port.
fn base_url(text: &str) -> Result<url::Url, Problem> {
    let url = url::Url::parse(text)
        .map_err(|error| Problem::invalid("server", format!("'{text}' is not a URL: {error}")))?;
    if url.scheme() != "https" || url.host().is_none() || url.path() != "/" {
        let detail = format!("'{text}' does not have the form https://HOST:PORT");
        return Err(Problem::invalid("server", detail));
    }
    Ok(url)
}
