//! The HTTPS client of agents against a TLS server with certificates of the authority: it takes the host
//! that it asks for and no other, shows who it is, and understands what it is told.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use vmseal_api::client::{ClientIdentity, HostClient};
use vmseal_api::host::{HostAgent, PowerOff, STATE_WAIT_MAX};
use vmseal_api::id::{HostId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::authority::Authority;
use crate::identity::Identity;
use crate::testing::FakeHost;

struct Peers {
    _directory: tempfile::TempDir,
    authority: Authority,
    identity: ClientIdentity,
}

impl Peers {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::open(directory.path()).unwrap();
        let names = vec!["localhost".to_owned()];
        let identity = Identity::open(directory.path(), &authority, names).unwrap();
        let identity = ClientIdentity {
            authority: authority.pem().to_owned(),
            certificate: Arc::new(identity),
        };
        Self { _directory: directory, authority, identity }
    }

    /// An agent with a certificate for `host`, on loopback.
    async fn agent(&self, host: HostId, router: Router) -> SocketAddr {
        let key = rcgen::KeyPair::generate().unwrap();
        let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
        let certificate =
            self.authority.host_certificate(&csr.pem().unwrap(), host, "127.0.0.1:1").unwrap();
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(vec![certificate], key)
            .unwrap();
        let tls = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let (tls, router) = (tls.clone(), router.clone());
                tokio::spawn(async move {
                    let Ok(stream) = tls.accept(tcp).await else { return };
                    let service = TowerToHyperService::new(router);
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .with_upgrades()
                        .await;
                });
            }
        });
        address
    }

    fn client(&self, host: HostId, address: SocketAddr) -> HostClient {
        HostClient::new(host, "here", &address.to_string(), &self.identity).unwrap()
    }
}

/// As much of an agent's API as shows how it is spoken to.
fn router(fake: FakeHost) -> Router {
    Router::new()
        .route(
            "/v1/host",
            get(|State(fake): State<FakeHost>| async move { Json(fake.describe().await.unwrap()) }),
        )
        .route(
            "/v1/state",
            get(|State(fake): State<FakeHost>, Query(query): Query<Value>| async move {
                assert_eq!(query, json!({ "wait_seconds": "25" }));
                Json(fake.state(None, Duration::ZERO).await.unwrap())
            }),
        )
        .route(
            "/v1/vms/{vm}/power-off",
            post(|Path(vm): Path<VmId>, Json(how): Json<PowerOff>| async move {
                assert_eq!(how, PowerOff::Force);
                let problem = Problem::not_found("VM", vm);
                (StatusCode::NOT_FOUND, Json(problem))
            }),
        )
        .route("/v1/vms/{vm}/power-on", post(|| async { StatusCode::NO_CONTENT }))
        .route(
            "/v1/vms/{vm}/console",
            get(|upgrade: axum::extract::WebSocketUpgrade| async {
                upgrade
                    .on_upgrade(|mut socket| async move {
                        while let Some(Ok(message)) = socket.recv().await {
                            if socket.send(message).await.is_err() {
                                break;
                            }
                        }
                    })
                    .into_response()
            }),
        )
        .with_state(fake)
}

#[tokio::test]
async fn it_speaks_as_the_contract_says() {
    let (peers, host, fake) = (Peers::new(), HostId::new(), FakeHost::new());
    let address = peers.agent(host, router(fake.clone())).await;
    let client = peers.client(host, address);
    assert_eq!(client.describe().await.unwrap(), fake.describe().await.unwrap());
    let state = client.state(None, STATE_WAIT_MAX * 2).await.unwrap();
    assert_eq!(state.incarnation, fake.describe().await.unwrap().incarnation);
    client.power_on(VmId::new()).await.unwrap();
    let vm = VmId::new();
    let problem = client.power_off(vm, PowerOff::Force).await.unwrap_err();
    assert_eq!(problem, Problem::not_found("VM", vm));
    // A path that the agent does not have: not a problem's body.
    let strange = client.unregister_vm(vm).await.unwrap_err();
    assert_eq!(strange.code, ErrorCode::Unreachable);
    assert!(strange.detail.contains("is it vmseal?"), "{strange}");

    let mut console = client.console(vm).await.unwrap();
    console.write_all(b"hello").await.unwrap();
    let mut heard = [0; 5];
    console.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"hello");
}

#[tokio::test]
async fn another_host_of_the_same_authority_is_refused() {
    let (peers, host) = (Peers::new(), HostId::new());
    let address = peers.agent(HostId::new(), router(FakeHost::new())).await;
    let client = peers.client(host, address);
    let problem = client.describe().await.unwrap_err();
    assert_eq!(problem.code, ErrorCode::Unreachable, "{problem}");
    let console = client.console(VmId::new()).await.err().unwrap();
    assert_eq!(console.code, ErrorCode::Unreachable, "{console}");
}

#[tokio::test]
async fn an_agent_of_another_authority_is_refused_and_refuses() {
    let (ours, theirs, host) = (Peers::new(), Peers::new(), HostId::new());
    let address = theirs.agent(host, router(FakeHost::new())).await;
    let problem = ours.client(host, address).describe().await.unwrap_err();
    assert_eq!(problem.code, ErrorCode::Unreachable, "{problem}");
    // Our authority trusted, and still the certificate of another shown.
    let mixed = ClientIdentity {
        authority: theirs.identity.authority.clone(),
        certificate: Arc::clone(&ours.identity.certificate),
    };
    let client = HostClient::new(host, "here", &address.to_string(), &mixed).unwrap();
    assert_eq!(client.describe().await.unwrap_err().code, ErrorCode::Unreachable);
}

#[tokio::test]
async fn nobody_there_is_unreachable_and_says_so() {
    let (peers, host) = (Peers::new(), HostId::new());
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let problem = peers.client(host, nobody).describe().await.unwrap_err();
    assert_eq!(problem.code, ErrorCode::Unreachable);
    assert!(problem.detail.contains("host 'here'"), "{problem}");
    assert!(problem.detail.contains("refused"), "{problem}");
}
