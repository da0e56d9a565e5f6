//! TLS settings of the clients: one CA, and a certificate where the other side asks for one.

use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, WebPkiServerVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

/// Why there is no TLS with these settings.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The CA certificate cannot be read.
    #[error("the authority's certificate is not a PEM file with one certificate: {0}")]
    Authority(String),
    /// AWS-LC or rustls refuses.
    #[error("TLS cannot be set up: {0}")]
    Setup(#[from] rustls::Error),
}

/// Whom this side trusts and what it proves itself with.
#[derive(Clone, Debug)]
pub struct ClientIdentity {
    /// The CA's certificate, PEM.
    pub authority: String,
    /// The certificate to show; a resolver, as certificates are renewed while a process runs.
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
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, TlsError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots(authority)?))
}

/// A client that shows no certificate.
pub(super) fn anonymous(authority: &str) -> Result<ClientConfig, TlsError> {
    Ok(builder(authority)?.with_no_client_auth())
}

/// A client that shows a certificate, and keeps that of the other side in `seen`.
pub(super) fn identified(
    identity: &ClientIdentity,
    seen: &SeenCertificate,
) -> Result<ClientConfig, TlsError> {
    let certificate = Arc::clone(&identity.certificate);
    let mut config = builder(&identity.authority)?.with_client_cert_resolver(certificate);
    let provider = Arc::clone(config.crypto_provider());
    let roots = Arc::new(roots(&identity.authority)?);
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider)
        .build()
        .map_err(|error| TlsError::Authority(error.to_string()))?;
    let recording = Recording { verifier, seen: SeenCertificate::clone(seen) };
    config.dangerous().set_certificate_verifier(Arc::new(recording));
    Ok(config)
}

/// What may have shown a certificate: an agent, where there is TLS in between.
pub trait ShowsCertificate {
    /// The certificate (DER) that it showed at its last connection; none before the first one.
    fn certificate(&self) -> Option<Vec<u8>> {
        None
    }
}

/// The certificate (DER) that the other side showed last, once it was found good.
pub(super) type SeenCertificate = Arc<Mutex<Option<Vec<u8>>>>;

/// Checks certificates as ever, and keeps those that are good.
#[derive(Debug)]
struct Recording {
    verifier: Arc<WebPkiServerVerifier>,
    seen: SeenCertificate,
}

impl ServerCertVerifier for Recording {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.verifier.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        )?;
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(end_entity.to_vec());
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
