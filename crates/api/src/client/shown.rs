//! The authority that a server shows, before anybody trusts it.

use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{CertificateError, ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::base_url;
use super::exchange::{CONNECT_TIMEOUT, Peer};
use super::role::{Role, check};
use super::verifier::{ServerChain, ServerCheck, Verifier};
use crate::problem::{ErrorCode, Problem};

/// Accepts a server of whatever authority it shows, whose chain is valid under that one; keeps the authority's certificate.
#[derive(Debug)]
struct AnyAuthority {
    provider: Arc<CryptoProvider>,
    seen: Arc<Mutex<Option<Vec<u8>>>>,
}

impl ServerCheck for AnyAuthority {
    fn check(&self, chain: &ServerChain<'_>) -> Result<(), rustls::Error> {
        let authority = chain.above.last().ok_or(CertificateError::UnknownIssuer)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        let provider = Arc::clone(&self.provider);
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        let ServerChain { certificate, above, name, ocsp, now } = chain;
        verifier.verify_server_cert(certificate, above, name, ocsp, *now)?;
        check(certificate, Role::Server)?;
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(authority.to_vec());
        Ok(())
    }
}

/// Connects to the server at `url` and returns the certificate of the authority that it presents. Nothing vouches for that authority: a
/// machine in the middle can present its own, so a user must compare the fingerprint before the certificate is trusted.
///
/// # Errors
/// `invalid-request`: it is not a URL; `unreachable`; it is not the server of a control plane.
pub async fn shown_authority(url: &str) -> Result<CertificateDer<'static>, Problem> {
    let url = base_url(url)?;
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let name = ServerName::try_from(host.clone()).map_err(|_| {
        Problem::new(ErrorCode::InvalidRequest, format!("'{host}' is not a host name"))
    })?;
    let internal = |error: rustls::Error| Problem::new(ErrorCode::Internal, error.to_string());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let seen = Arc::new(Mutex::new(None));
    let check = AnyAuthority { provider: Arc::clone(&provider), seen: Arc::clone(&seen) };
    let verifier = Arc::new(Verifier::new(check, Arc::clone(&provider)));
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(internal)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let peer = Peer(url.as_str());
    let connected = async {
        let address = (host.as_str(), url.port_or_known_default().unwrap_or(443));
        let tcp = TcpStream::connect(address).await.map_err(|error| peer.unreachable(&error))?;
        let connector = TlsConnector::from(Arc::new(config));
        connector.connect(name, tcp).await.map_err(|error| peer.unreachable(&error))
    };
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, connected).await;
    connected.unwrap_or_else(|_| Err(peer.unreachable(&"it took too long")))?;
    let der = seen.lock().unwrap_or_else(PoisonError::into_inner).take();
    der.map(CertificateDer::from).ok_or_else(|| peer.unreachable(&"it shows no authority"))
}
