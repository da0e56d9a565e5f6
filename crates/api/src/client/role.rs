//! The role of a certificate of the control plane's authority: server or host. Each side checks it besides
//! the authority and the name, so that no host can act as the server, whatever names its certificate has.

use std::sync::{Arc, Mutex};

use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, OtherError};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::id::HostId;

/// The URI in the server's certificate.
pub const SERVER_ROLE: &str = "urn:vmseal:server";

/// The URI in hosts' certificates. Certificates that were issued before it existed have none and are
/// recognised by their name.
pub const HOST_ROLE: &str = "urn:vmseal:host";

/// The domain of the names in hosts' certificates; no resolver knows it.
const HOSTS_DOMAIN: &str = ".host.vmseal.internal";

/// The name in the certificate of a host's agent.
#[must_use]
pub fn host_server_name(host: HostId) -> String {
    format!("{host}{HOSTS_DOMAIN}")
}

/// The host whose agent a certificate is for, whether or not its signature is valid.
fn host_of(certificate: &CertificateDer<'_>) -> Option<HostId> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let names = &certificate.subject_alternative_name().ok()??.value.general_names;
    names.iter().find_map(|name| match name {
        GeneralName::DNSName(name) => name.strip_suffix(HOSTS_DOMAIN)?.parse().ok(),
        _ => None,
    })
}

/// The role of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The control plane's server.
    Server,
    /// A host's agent.
    Host,
}

impl Role {
    /// The role in a certificate, whoever signed it; none where it has none or two.
    #[must_use]
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let names = &certificate.subject_alternative_name().ok()??.value.general_names;
        let uri = |role| names.contains(&GeneralName::URI(role));
        let of_host = |name: &GeneralName<'_>| matches!(name, GeneralName::DNSName(name) if name.ends_with(HOSTS_DOMAIN));
        match (uri(SERVER_ROLE), uri(HOST_ROLE)) {
            (true, false) => Some(Self::Server),
            (false, true) => Some(Self::Host),
            (true, true) => None,
            (false, false) => names.iter().any(of_host).then_some(Self::Host),
        }
    }
}

/// A valid certificate of the wrong role.
#[derive(Clone, Copy, thiserror::Error)]
#[error("the certificate is not {}", match .0 {
    Role::Server => "the server's: the peer is not the control plane's server",
    Role::Host => "a host's: the peer is not an agent",
})]
struct WrongRole(Role);

impl std::fmt::Debug for WrongRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// The certificate is valid, but for another host.
#[derive(Clone, Copy, thiserror::Error)]
#[error(
    "another host answers there, with id {0}: correct the address (vmseal host set NAME --address HOST:PORT)"
)]
struct AnotherHost(HostId);

impl std::fmt::Debug for AnotherHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Replaces the error about a wrong name: names the host that the certificate is for.
pub(super) fn tell_whose(error: rustls::Error, certificate: &CertificateDer<'_>) -> rustls::Error {
    use CertificateError::{NotValidForName, NotValidForNameContext};
    match error {
        rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }) => {}
        other => return other,
    }
    if let Err(wrong_role) = check(certificate, Role::Host) {
        return wrong_role;
    }
    match host_of(certificate) {
        Some(host) => CertificateError::Other(OtherError(Arc::new(AnotherHost(host)))).into(),
        None => error,
    }
}

/// Checks that an otherwise valid certificate has this role.
///
/// # Errors
/// It has another role or none.
pub fn check(certificate: &CertificateDer<'_>, role: Role) -> Result<(), rustls::Error> {
    if Role::of(certificate) == Some(role) {
        return Ok(());
    }
    Err(CertificateError::Other(OtherError(Arc::new(WrongRole(role)))).into())
}

/// The last valid certificate (DER) of the other side.
pub(super) type SeenCertificate = Arc<Mutex<Option<Vec<u8>>>>;
