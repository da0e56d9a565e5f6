//! Certificate verifiers: the checks that differ from peer to peer, besides the signatures, which are always
//! checked alike.

use std::fmt::Debug;
use std::sync::{Arc, PoisonError};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};

use super::role::{Role, SeenCertificate, check, tell_whose};

/// A server's certificate chain.
pub struct ServerChain<'a> {
    /// Its certificate.
    pub certificate: &'a CertificateDer<'a>,
    /// The certificates above it.
    pub above: &'a [CertificateDer<'a>],
    /// The name that was called.
    pub name: &'a ServerName<'a>,
    /// Its stapled OCSP answer; may be empty.
    pub ocsp: &'a [u8],
    /// The current time.
    pub now: UnixTime,
}

/// Decides which servers are accepted.
pub trait ServerCheck: Debug + Send + Sync {
    /// Checks one server.
    ///
    /// # Errors
    /// Why it is refused.
    fn check(&self, chain: &ServerChain<'_>) -> Result<(), rustls::Error>;
}

/// Accepts a server if `check` does and its signatures are valid.
#[derive(Debug)]
pub struct Verifier<C> {
    check: C,
    provider: Arc<CryptoProvider>,
}

impl<C> Verifier<C> {
    /// With the signature algorithms of `provider`.
    pub fn new(check: C, provider: Arc<CryptoProvider>) -> Self {
        Self { check, provider }
    }
}

/// The methods that both kinds of verifier share.
macro_rules! signatures {
    () => {
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
    };
}

impl<C: ServerCheck> ServerCertVerifier for Verifier<C> {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check.check(&ServerChain { certificate, above, name, ocsp, now })?;
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

/// Accepts servers of one authority with a role; keeps the last certificate.
#[derive(Debug)]
pub(super) struct ServerOfRole {
    authority: Arc<WebPkiServerVerifier>,
    role: Role,
    seen: SeenCertificate,
}

impl ServerOfRole {
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

impl ServerCheck for ServerOfRole {
    fn check(&self, chain: &ServerChain<'_>) -> Result<(), rustls::Error> {
        let ServerChain { certificate, above, name, ocsp, now } = chain;
        let verified = self.authority.verify_server_cert(certificate, above, name, ocsp, *now);
        verified.map_err(|error| match self.role {
            // The name comes last: the chain is good.
            Role::Host => tell_whose(error, certificate),
            Role::Server => error,
        })?;
        check(certificate, self.role)?;
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(certificate.to_vec());
        Ok(())
    }
}

/// Accepts the control plane's server as a client: nobody else may call an agent, not even another host.
#[derive(Debug)]
pub struct ServerAsClient(Arc<dyn ClientCertVerifier>);

impl Verifier<ServerAsClient> {
    /// With certificates of this authority.
    ///
    /// # Errors
    /// The defect of the authority's certificate.
    pub fn server_as_client(
        authority: CertificateDer<'static>,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        roots.add(authority).map_err(|error| error.to_string())?;
        let of_authority =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()
                .map_err(|error| error.to_string())?;
        Ok(Self::new(ServerAsClient(of_authority), provider))
    }
}

impl ClientCertVerifier for Verifier<ServerAsClient> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.check.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.check.0.verify_client_cert(certificate, above, now)?;
        check(certificate, Role::Server).map(|()| verified).inspect_err(|_| {
            tracing::warn!(
                "a certificate of this control plane that is not its server's was refused"
            );
        })
    }

    signatures!();
}
