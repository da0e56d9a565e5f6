//! The settings of a client: the server, timeouts and limits.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;

use super::observer::Observer;
use super::tls::{Identity, Trust};
use crate::ProtocolVersion;

/// The port that IANA gave KMIP.
pub const KMIP_PORT: u16 = 5696;

/// A host that is neither a DNS name nor an IP address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither a DNS name nor an IP address")]
pub struct InvalidEndpoint(String);

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    host: String,
    port: u16,
    name: ServerName<'static>,
}

impl Endpoint {
    /// A DNS name or IP address, and a port. The server's certificate must be for this name or address.
    ///
    /// # Errors
    /// [`InvalidEndpoint`].
    pub fn new(host: impl Into<String>, port: u16) -> Result<Self, InvalidEndpoint> {
        let host = host.into();
        match ServerName::try_from(host.clone()) {
            Ok(name) => Ok(Self { host, port, name }),
            Err(_) => Err(InvalidEndpoint(host)),
        }
    }

    /// As given.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// As given.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn name(&self) -> ServerName<'static> {
        self.name.clone()
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.parse::<IpAddr>() {
            Ok(IpAddr::V6(address)) => write!(f, "[{address}]:{}", self.port),
            _ => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The timeouts of the steps. A starting VM may wait for all of them in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Waiting for a free connection of the pool.
    pub wait: Duration,
    /// Resolving the name and connecting, for all addresses together.
    pub connect: Duration,
    /// The TLS handshake.
    pub handshake: Duration,
    /// Sending a request.
    pub write: Duration,
    /// Receiving the whole answer. Hardware may take some seconds to create a key.
    pub read: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(30),
            connect: Duration::from_secs(5),
            handshake: Duration::from_secs(10),
            write: Duration::from_secs(10),
            read: Duration::from_secs(20),
        }
    }
}

/// The limits of connections to one server. KMSs limit and license them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLimits {
    /// How many may be open at a time; further requests wait.
    pub connections: usize,
    /// How many are kept open while idle.
    pub idle: usize,
    /// How long they are kept idle. Servers close idle connections too, often after a minute.
    pub idle_for: Duration,
    /// The age from which a connection is no longer used, so that certificates are checked again.
    pub lifetime: Duration,
}

impl Default for PoolLimits {
    fn default() -> Self {
        Self {
            connections: 8,
            idle: 2,
            idle_for: Duration::from_secs(30),
            lifetime: Duration::from_secs(600),
        }
    }
}

/// The settings of a client.
#[derive(Debug)]
pub struct Settings {
    /// The server.
    pub endpoint: Endpoint,
    /// How its certificate is checked.
    pub trust: Trust,
    /// The client certificate.
    pub identity: Identity,
    /// The timeouts.
    pub timeouts: Timeouts,
    /// The limits of connections.
    pub limits: PoolLimits,
    /// The versions allowed: the latest that the server speaks too is used. Restrict them for a server
    /// that implements a later one badly.
    pub versions: Vec<ProtocolVersion>,
    /// Called after each request.
    pub observer: Option<Arc<dyn Observer>>,
}

impl Settings {
    /// Settings with default timeouts and limits, and all versions.
    #[must_use]
    pub fn new(endpoint: Endpoint, trust: Trust, identity: Identity) -> Self {
        Self {
            endpoint,
            trust,
            identity,
            timeouts: Timeouts::default(),
            limits: PoolLimits::default(),
            versions: ProtocolVersion::SPOKEN.to_vec(),
            observer: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_or_addresses() {
        let shown = |host, port| Endpoint::new(host, port).map(|endpoint| endpoint.to_string());
        assert_eq!(shown("kms-1.example.org", KMIP_PORT).unwrap(), "kms-1.example.org:5696");
        assert_eq!(shown("127.0.0.1", 1).unwrap(), "127.0.0.1:1");
        assert_eq!(shown("::1", 1).unwrap(), "[::1]:1");
        for wrong in ["", "a b", "kms:5696", "[::1]", "https://kms", "-", "a..b"] {
            assert_eq!(shown(wrong, 1), Err(InvalidEndpoint(wrong.to_owned())));
        }
    }
}
