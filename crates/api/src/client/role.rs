//! What a certificate of the control plane's authority is for: the server or a host. Each side checks it beside the
//! authority and the name, so that no host can pass for the server, whatever names its certificate has.

use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, OtherError, RootCertStore, SignatureScheme};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::id::HostId;

/// The URI in the server's certificate.
pub const SERVER_ROLE: &str = "urn:vmseal:server";

/// The URI in hosts' certificates. Those that were issued before there was one have none: they are known by
/// their name.
pub const HOST_ROLE: &str = "urn:vmseal:host";

/// What the names in hosts' certificates end with; no resolver knows it.
const HOSTS_DOMAIN: &str = ".host.vmseal.internal";

/// The name in the certificate of a host's agent.
#[must_use]
pub fn host_server_name(host: HostId) -> String {
    format!("{host}{HOSTS_DOMAIN}")
}

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The control plane's server.
    Server,
    /// A host's agent.
    Host,
}

impl Role {
    /// The role that a certificate carries, whoever signed it; none where it carries none, or two.
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

/// The certificate is good, and of somebody else.
#[derive(Clone, Copy, thiserror::Error)]
#[error("the certificate is not {}", match .0 {
    Role::Server => "the server's: whoever answers is not the control plane's server",
    Role::Host => "a host's: whoever answers is not the agent",
})]
struct WrongRole(Role);

impl std::fmt::Debug for WrongRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Checks that a certificate, which is good otherwise, has this role.
///
/// # Errors
/// It has another one, or none.
pub fn check(certificate: &CertificateDer<'_>, role: Role) -> Result<(), rustls::Error> {
    if Role::of(certificate) == Some(role) {
        return Ok(());
    }
    Err(CertificateError::Other(OtherError(Arc::new(WrongRole(role)))).into())
}

/// The certificate (DER) that the other side showed last, once it was found good.
pub(super) type SeenCertificate = Arc<Mutex<Option<Vec<u8>>>>;

/// Accepts certificates with one role, of one authority, for the name that is asked for, and keeps the last one.
#[derive(Debug)]
pub(super) struct RoleVerifier {
    authority: Arc<WebPkiServerVerifier>,
    role: Role,
    seen: SeenCertificate,
}

impl RoleVerifier {
    pub(super) fn new(
        roots: RootCertStore,
        provider: Arc<CryptoProvider>,
        role: Role,
        seen: SeenCertificate,
    ) -> Result<Self, String> {
        let authority = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| error.to_string())?;
        Ok(Self { authority, role, seen })
    }
}

impl ServerCertVerifier for RoleVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.authority.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        )?;
        check(end_entity, self.role)?;
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(end_entity.to_vec());
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.supported_verify_schemes()
    }
}
