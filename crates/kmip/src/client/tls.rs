//! TLS: which certificates are trusted, and which one the client sends.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};
use vmseal_secret::SecretBytes;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::plaintext;

/// Why a client cannot be made with these settings.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The authorities' certificates, or the pinned one.
    #[error("the certificates to trust cannot be read: {0}")]
    Trust(String),
    /// The client's certificate.
    #[error("the client certificate cannot be read: {0}")]
    Certificate(String),
    /// The client's key.
    #[error("the client key is not a PKCS #8 key that TLS can use, or not that of the certificate")]
    Key,
    /// No version is allowed.
    #[error("none of the KMIP versions 1.0 to 1.4 is allowed")]
    NoVersion,
    /// The pool allows no connection.
    #[error("the pool may have no connection")]
    NoConnection,
    /// rustls rejects the settings.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
}

/// How a server's certificate is checked.
#[derive(Clone, Debug)]
pub enum Trust {
    /// One of these authorities must have signed it; it must be valid now, for servers, and for the name
    /// or address that the client connects to.
    Authorities(Vec<CertificateDer<'static>>),
    /// It must be exactly this certificate, which an operator trusts, whatever its issuer and names; it
    /// must be valid now.
    Pinned(CertificateDer<'static>),
}

impl Trust {
    /// Trusts authorities, from their certificates in PEM.
    ///
    /// # Errors
    /// [`SetupError::Trust`]: no certificate in it, or one that cannot be read.
    pub fn authorities(pem: &str) -> Result<Self, SetupError> {
        certificates(pem).map(Self::Authorities).map_err(SetupError::Trust)
    }

    /// Trusts one server certificate in PEM.
    ///
    /// # Errors
    /// [`SetupError::Trust`]: not exactly one certificate, or one that cannot be read.
    pub fn pinned(pem: &str) -> Result<Self, SetupError> {
        match <[_; 1]>::try_from(certificates(pem).map_err(SetupError::Trust)?) {
            Ok([certificate]) => Ok(Self::Pinned(certificate)),
            Err(more) => Err(SetupError::Trust(format!("{} instead of one", more.len()))),
        }
    }
}

fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    if certificates.is_empty() {
        return Err("there is no certificate in PEM".to_owned());
    }
    for certificate in &certificates {
        X509Certificate::from_der(certificate).map_err(|error| error.to_string())?;
    }
    Ok(certificates)
}

/// The certificate and key with which this client authenticates.
#[derive(Clone)]
pub struct Identity {
    resolver: Arc<SingleCertAndKey>,
    not_before: i64,
    not_after: i64,
}

impl Identity {
    /// Makes it from a certificate with its chain in PEM, and the private key in PKCS #8 DER.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn new(chain: &str, private_key: &SecretBytes) -> Result<Self, SetupError> {
        let chain = certificates(chain).map_err(SetupError::Certificate)?;
        let validity = chain.first().and_then(|der| validity(der));
        let (not_before, not_after) =
            validity.ok_or_else(|| SetupError::Certificate("it has no validity".to_owned()))?;
        // Borrowed: the only copy of the key in ordinary memory is AWS-LC's own.
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(private_key.expose()));
        let key = aws_lc_rs::sign::any_supported_type(&der).map_err(|_| SetupError::Key)?;
        let key = CertifiedKey::new(chain, key);
        key.keys_match().map_err(|_| SetupError::Key)?;
        Ok(Self { resolver: Arc::new(SingleCertAndKey::from(key)), not_before, not_after })
    }

    /// Start and end of the certificate's validity, in seconds since 1970.
    #[must_use]
    pub fn validity(&self) -> (i64, i64) {
        (self.not_before, self.not_after)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("validity", &self.validity()).finish_non_exhaustive()
    }
}

/// Start and end of the validity of a certificate (DER), in seconds since 1970.
pub(super) fn validity(certificate: &[u8]) -> Option<(i64, i64)> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let validity = certificate.validity();
    Some((validity.not_before.timestamp(), validity.not_after.timestamp()))
}

/// The TLS settings of a client.
pub(super) fn config(trust: &Trust, identity: &Identity) -> Result<ClientConfig, SetupError> {
    let provider = plaintext::provider();
    let verifier: Arc<dyn ServerCertVerifier> = match trust {
        Trust::Authorities(authorities) => {
            let mut roots = RootCertStore::empty();
            for authority in authorities {
                let added = roots.add(authority.clone());
                added.map_err(|error| SetupError::Trust(error.to_string()))?;
            }
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()
                .map_err(|error| SetupError::Trust(error.to_string()))?
        }
        Trust::Pinned(certificate) => {
            Arc::new(Pinned { certificate: certificate.clone(), provider: Arc::clone(&provider) })
        }
    };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::clone(&identity.resolver) as Arc<dyn ResolvesClientCert>);
    // Both sides check certificates again at every connection, to notice one that has expired or was
    // replaced.
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Settings that record the server's certificates and then end the handshake.
pub(super) fn recorder() -> Result<(ClientConfig, Arc<Recorder>), rustls::Error> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let recorder = Arc::new(Recorder { seen: Mutex::default(), provider: Arc::clone(&provider) });
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&recorder) as Arc<dyn ServerCertVerifier>)
        .with_no_client_auth();
    Ok((config, recorder))
}

/// Accepts one certificate.
#[derive(Debug)]
struct Pinned {
    certificate: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if *end_entity != self.certificate {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        let (from, to) = validity(end_entity).ok_or(CertificateError::BadEncoding)?;
        match i64::try_from(now.as_secs()) {
            Ok(now) if now < from => Err(CertificateError::NotValidYet.into()),
            Ok(now) if now <= to => Ok(ServerCertVerified::assertion()),
            _ => Err(CertificateError::Expired.into()),
        }
    }

    // Whether the server has the certificate's key is checked as for any certificate.
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Accepts no certificate, and records the one it gets.
#[derive(Debug)]
pub(super) struct Recorder {
    seen: Mutex<Vec<CertificateDer<'static>>>,
    provider: Arc<CryptoProvider>,
}

impl Recorder {
    /// The server's certificate and chain; empty if the handshake did not get that far.
    pub(super) fn seen(&self) -> Vec<CertificateDer<'static>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ServerCertVerifier for Recorder {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain = std::iter::once(end_entity).chain(intermediates);
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) =
            chain.map(|certificate| certificate.clone().into_owned()).collect();
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    // Never reached: the certificate comes first.
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(CertificateError::ApplicationVerificationFailure.into())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
