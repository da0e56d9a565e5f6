//! Joining a server: the only call that an agent makes to it.
//!
//! The token carries the fingerprint of the control plane's authority: the connection is made only to a
//! server whose chain ends in exactly that certificate, before the token's secret is sent. The private key is
//! made here and stays here.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use rcgen::{CertificateParams, DnType, KeyPair};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{CertificateError, ClientConfig, RootCertStore};
use vmseal_api::client::role::{self, Role};
use vmseal_api::client::verifier::{ServerChain, ServerCheck, Verifier};
use vmseal_api::host::version::CONTRACT;
use vmseal_api::id::{HostId, NameError, check_name};
use vmseal_api::join_token::{JoinToken, NotAToken};
use vmseal_api::problem::Problem;
use vmseal_api::request::{JoinHost, Joined};
use zeroize::Zeroizing;

use crate::host::identity::{Identity, IdentityError};

/// The longest that joining may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The longest answer, in bytes: two certificates, or a problem.
const ANSWER_MAX: usize = 64 * 1024;

/// How to join.
pub struct JoinOptions {
    /// The server (`https://host:port`).
    pub server: String,
    /// The one-time token.
    pub token: Zeroizing<String>,
    /// The name of the host.
    pub name: String,
    /// Where the agent will listen (`host:port`), as the server reaches it; none for the address from which
    /// the server sees this machine, with the default port.
    pub address: Option<String>,
    /// Where the identity is kept.
    pub state_dir: PathBuf,
    /// Whether to replace the identity of a server that was joined before.
    pub replace: bool,
}

/// Why joining failed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The token.
    #[error(transparent)]
    Token(#[from] NotAToken),
    /// The name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The address.
    #[error("'{0}' is not an address to listen at: give it as host:port")]
    Address(String),
    /// The server's address.
    #[error("'{0}' is not a server's address: it must begin with https://")]
    Server(String),
    /// This machine has joined already.
    #[error(
        "this machine has joined {0} already, as {1} says: if that server is lost, or this host was removed there, join with --replace"
    )]
    Already(String, String),
    /// The key pair or request.
    #[error("the host's key cannot be made: {0}")]
    Key(#[from] rcgen::Error),
    /// The server is unreachable.
    #[error("{server} cannot be reached: {why}")]
    Unreachable {
        /// The server.
        server: String,
        /// Why.
        why: String,
    },
    /// The server refuses.
    #[error("the server refuses: {0}")]
    Refused(Problem),
    /// An unexpected answer.
    #[error("the server's answer is not understood: {0}")]
    Answer(String),
    /// The identity cannot be stored or used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// A machine that has joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinedAs {
    /// The host's id.
    pub host: HostId,
    /// Where its agent must listen, as the server calls it.
    pub address: String,
}

/// Joins a server.
///
/// # Errors
/// [`JoinError`]; nothing is stored then. The token can be used again unless the server has accepted it.
pub async fn join(options: JoinOptions) -> Result<JoinedAs, JoinError> {
    let token: JoinToken = options.token.trim().parse()?;
    check_name(&options.name)?;
    options.address.as_deref().map_or(Ok(()), check_address)?;
    if !options.replace {
        refuse_a_second_time(&options.state_dir)?;
    }
    let key = KeyPair::generate()?;
    let mut request = CertificateParams::default();
    request.distinguished_name.push(DnType::CommonName, options.name.clone());
    let request = request.serialize_request(&key)?.pem()?;
    let body = JoinHost {
        token: token.to_string(),
        name: options.name.clone(),
        address: options.address.clone(),
        certificate_request: request,
        contract: Some(CONTRACT),
    };
    let joined = post(&options.server, &token, &body).await?;
    check_authority(&joined, &token)?;
    // A server of an earlier version does not send an address: one was sent to it.
    let address = joined.address.or(options.address).ok_or_else(|| {
        JoinError::Answer("it does not say at which address the agent must listen".to_owned())
    })?;
    check_address(&address)?;
    let identity = Identity {
        host: joined.host,
        name: options.name,
        address,
        server: options.server,
        certificate: joined.certificate,
        authority: joined.authority,
        key: Zeroizing::new(key.serialize_pem()),
    };
    // Certificate, key and authority must belong together before they are stored.
    identity.tls()?;
    identity.store(&options.state_dir)?;
    Ok(JoinedAs { host: identity.host, address: identity.address })
}

fn check_address(address: &str) -> Result<(), JoinError> {
    let valid = address
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if valid { Ok(()) } else { Err(JoinError::Address(address.to_owned())) }
}

fn refuse_a_second_time(state_dir: &Path) -> Result<(), JoinError> {
    match Identity::load(state_dir) {
        Err(IdentityError::None(_)) => Ok(()),
        Err(other) => Err(other.into()),
        Ok(identity) => Err(JoinError::Already(identity.server, state_dir.display().to_string())),
    }
}

fn check_authority(joined: &Joined, token: &JoinToken) -> Result<(), JoinError> {
    let authority = CertificateDer::from_pem_slice(joined.authority.as_bytes())
        .map_err(|error| JoinError::Answer(error.to_string()))?;
    if fingerprint(&authority) == token.authority {
        return Ok(());
    }
    Err(JoinError::Answer("it names another authority than the token".to_owned()))
}

fn fingerprint(certificate: &CertificateDer<'_>) -> [u8; 32] {
    let mut fingerprint = [0; 32];
    fingerprint.copy_from_slice(digest(&SHA256, certificate).as_ref());
    fingerprint
}

async fn post(server: &str, token: &JoinToken, body: &JoinHost) -> Result<Joined, JoinError> {
    if !server.starts_with("https://") {
        return Err(JoinError::Server(server.to_owned()));
    }
    let unreachable = |error: &(dyn std::error::Error + 'static)| {
        // The last cause says most; those before it repeat it.
        let mut cause = error;
        while let Some(next) = cause.source() {
            cause = next;
        }
        JoinError::Unreachable { server: server.to_owned(), why: cause.to_string() }
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let pinned = PinnedAuthority { fingerprint: token.authority, provider: provider.clone() };
    let verifier = Verifier::new(pinned, provider.clone());
    let tls = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unreachable(&error))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .timeout(TIMEOUT)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .build()
        .map_err(|error| unreachable(&error))?;
    let url = format!("{}/api/v1/hosts/join", server.trim_end_matches('/'));
    let mut answer =
        client.post(url).json(body).send().await.map_err(|error| unreachable(&error))?;
    let mut text = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(|error| unreachable(&error))? {
        if text.len() + chunk.len() > ANSWER_MAX {
            return Err(JoinError::Answer(format!("it is longer than {ANSWER_MAX} bytes")));
        }
        text.extend_from_slice(&chunk);
    }
    if answer.status().is_success() {
        return serde_json::from_slice(&text).map_err(|error| JoinError::Answer(error.to_string()));
    }
    match serde_json::from_slice(&text) {
        Ok(problem) => Err(JoinError::Refused(problem)),
        Err(_) => Err(JoinError::Answer(format!("HTTP status {}", answer.status()))),
    }
}

/// Accepts a server whose chain contains the authority with this fingerprint and is valid under it alone.
#[derive(Debug)]
struct PinnedAuthority {
    fingerprint: [u8; 32],
    provider: Arc<CryptoProvider>,
}

impl ServerCheck for PinnedAuthority {
    fn check(&self, chain: &ServerChain<'_>) -> Result<(), rustls::Error> {
        let authority = chain
            .above
            .iter()
            .find(|certificate| fingerprint(certificate) == self.fingerprint)
            .ok_or(CertificateError::UnknownIssuer)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned())?;
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?
            .verify_server_cert(
                chain.certificate,
                chain.above,
                chain.name,
                chain.ocsp,
                chain.now,
            )?;
        // A host's certificate is not accepted as the server's.
        role::check(chain.certificate, Role::Server)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::post;
    use axum::{Json, Router};
    use rcgen::SanType;
    use rustls::pki_types::PrivateKeyDer;
    use vmseal_api::problem::ErrorCode;

    use super::*;
    use crate::host::http::TlsListener;
    use crate::host::peer_tests::Authority;

    /// A server that signs any request, or refuses; returns its address.
    async fn server(authority: Authority, chain: bool, refuse: bool) -> String {
        serving(authority, chain, refuse, Some(role::SERVER_ROLE)).await
    }

    /// The same, with a certificate of this role.
    async fn serving(
        authority: Authority,
        chain: bool,
        refuse: bool,
        role: Option<&str>,
    ) -> String {
        let uri = role.map(|role| SanType::URI(role.try_into().unwrap()));
        let address = SanType::IpAddress("127.0.0.1".parse().unwrap());
        let (certificate, key) = authority.sign(std::iter::once(address).chain(uri).collect());
        let mut certificates = vec![certificate.der().clone()];
        if chain {
            certificates.push(authority.certificate.der().clone());
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certificates, PrivateKeyDer::try_from(key.serialize_der()).unwrap())
            .unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("https://{}", listener.local_addr().unwrap());
        let authority = Arc::new(authority);
        let answer = move |Json(body): Json<JoinHost>| async move {
            if refuse {
                return Err((
                    axum::http::StatusCode::UNAUTHORIZED,
                    Json(Problem::new(ErrorCode::Unauthenticated, "the token is used up")),
                ));
            }
            Ok(Json(Joined {
                certificate: authority.sign_request(&body.certificate_request).pem(),
                authority: authority.certificate.pem(),
                host: HostId::new(),
                address: body.address.is_none().then(|| "192.0.2.7:8444".to_owned()),
            }))
        };
        let router = Router::new().route("/api/v1/hosts/join", post(answer));
        let listener = TlsListener::new(listener, Arc::new(tls)).unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    fn options(server: &str, authority: [u8; 32], state_dir: &Path) -> JoinOptions {
        let token = JoinToken { secret: [7; 32], authority };
        JoinOptions {
            replace: false,
            server: server.to_owned(),
            token: Zeroizing::new(format!("{token}\n")),
            name: "here".to_owned(),
            address: Some("127.0.0.1:8444".to_owned()),
            state_dir: state_dir.to_owned(),
        }
    }

    #[tokio::test]
    async fn a_machine_joins_once_and_keeps_its_identity() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let pin = fingerprint(authority.certificate.der());
        let server = server(authority, true, false).await;
        let joined = join(options(&server, pin, directory.path())).await.unwrap();
        assert_eq!(joined.address, "127.0.0.1:8444");
        assert_eq!(Identity::load(directory.path()).unwrap().host, joined.host);
        let again = join(options(&server, pin, directory.path())).await.unwrap_err();
        assert!(matches!(again, JoinError::Already(..)), "{again}");
    }

    #[tokio::test]
    async fn a_machine_that_gives_no_address_takes_the_one_that_the_server_sees() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let pin = fingerprint(authority.certificate.der());
        let server = server(authority, true, false).await;
        let options = JoinOptions { address: None, ..options(&server, pin, directory.path()) };
        assert_eq!(join(options).await.unwrap().address, "192.0.2.7:8444");
        assert_eq!(Identity::load(directory.path()).unwrap().address, "192.0.2.7:8444");
    }

    #[tokio::test]
    async fn a_host_that_passes_for_the_server_gets_no_token() {
        let directory = tempfile::tempdir().unwrap();
        for role in [None, Some(role::HOST_ROLE)] {
            let authority = Authority::new();
            let pin = fingerprint(authority.certificate.der());
            let server = serving(authority, true, false, role).await;
            let error = join(options(&server, pin, directory.path())).await.unwrap_err();
            assert!(error.to_string().contains("not the server's"), "{error}");
        }
        assert!(std::fs::read_dir(directory.path()).unwrap().next().is_none());
    }

    #[tokio::test]
    async fn another_authoritys_server_gets_no_token() {
        let directory = tempfile::tempdir().unwrap();
        let server = server(Authority::new(), true, false).await;
        let pin = fingerprint(Authority::new().certificate.der());
        let error = join(options(&server, pin, directory.path())).await.unwrap_err();
        assert!(matches!(error, JoinError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("certificate"), "{error}");
    }

    #[tokio::test]
    async fn a_chain_without_the_authority_cannot_be_known() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let pin = fingerprint(authority.certificate.der());
        let server = server(authority, false, false).await;
        let error = join(options(&server, pin, directory.path())).await.unwrap_err();
        assert!(matches!(error, JoinError::Unreachable { .. }), "{error}");
    }

    #[tokio::test]
    async fn the_servers_refusal_is_reported_and_nothing_is_stored() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new();
        let pin = fingerprint(authority.certificate.der());
        let server = server(authority, true, true).await;
        let error = join(options(&server, pin, directory.path())).await.unwrap_err();
        assert!(error.to_string().contains("used up"), "{error}");
        assert!(std::fs::read_dir(directory.path()).unwrap().next().is_none());
    }

    #[tokio::test]
    async fn invalid_options_are_refused_before_anything_is_sent() {
        let directory = tempfile::tempdir().unwrap();
        let with = |change: fn(&mut JoinOptions)| {
            let mut options = options("https://127.0.0.1:1", [0; 32], directory.path());
            change(&mut options);
            join(options)
        };
        let token = with(|options| *options.token = "abc".to_owned()).await.unwrap_err();
        assert!(matches!(token, JoinError::Token(_)));
        let name = with(|options| options.name = "a b".to_owned()).await.unwrap_err();
        assert!(matches!(name, JoinError::Name(_)));
        for address in ["here", ":1", "here:", "here:99999"] {
            let mut options = options("https://127.0.0.1:1", [0; 32], directory.path());
            options.address = Some(address.to_owned());
            let error = join(options).await.unwrap_err();
            assert!(matches!(error, JoinError::Address(_)), "{address}");
        }
        let server = with(|options| options.server = "http://a".to_owned()).await.unwrap_err();
        assert!(matches!(server, JoinError::Server(_)));
        let nobody = with(|_| {}).await.unwrap_err();
        assert!(matches!(nobody, JoinError::Unreachable { .. }), "{nobody}");
    }
}
