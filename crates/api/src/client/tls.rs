//! TLS settings of the clients: one CA, and a certificate where the other side asks for one.

use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

use super::role::{Role, SeenCertificate};
use super::verifier::{ServerOfRole, Verifier};

/// Why TLS cannot be used with these settings.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The CA certificate cannot be read.
    #[error("the authority's certificate is not a PEM file with one certificate: {0}")]
    Authority(String),
    /// AWS-LC or rustls refuses.
    #[error("TLS cannot be set up: {0}")]
    Setup(#[from] rustls::Error),
}

/// The authority that this side trusts, and its own certificate.
#[derive(Clone, Debug)]
pub struct ClientIdentity {
    /// The CA's certificate, PEM.
    pub authority: String,
    /// The certificate to present; a resolver, as certificates are renewed while a process runs.
    pub certificate: Arc<dyn ResolvesClientCert>,
}

fn roots(authority: &str) -> Result<RootCertStore, TlsError> {
    let certificate = CertificateDer::from_pem_slice(authority.as_bytes())
        .map_err(|error| TlsError::Authority(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    roots.add(certificate).map_err(|error| TlsError::Authority(error.to_string()))?;
    Ok(roots)
}

fn builder(
    authority: &str,
    role: Role,
    seen: SeenCertificate,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, TlsError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let check = ServerOfRole::new(roots(authority)?, Arc::clone(&provider), role, seen)
        .map_err(TlsError::Authority)?;
    let verifier = Verifier::new(check, Arc::clone(&provider));
    Ok(ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        // It checks all that the usual one does, and the role.
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier)))
}

/// A client of the server, without a certificate.
pub(super) fn anonymous(authority: &str) -> Result<ClientConfig, TlsError> {
    Ok(builder(authority, Role::Server, SeenCertificate::default())?.with_no_client_auth())
}

/// A client of a host's agent, with a certificate; stores the other side's in `seen`.
pub(super) fn identified(
    identity: &ClientIdentity,
    seen: &SeenCertificate,
) -> Result<ClientConfig, TlsError> {
    let certificate = Arc::clone(&identity.certificate);
    let builder = builder(&identity.authority, Role::Host, SeenCertificate::clone(seen))?;
    Ok(builder.with_client_cert_resolver(certificate))
}
