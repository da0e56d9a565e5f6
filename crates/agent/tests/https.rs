//! The contract suite over HTTPS: the server's client, certificates on both sides, the agent's router, a
//! simulated host behind it. And the requests that are refused.

#![allow(clippy::unwrap_used)] // in tests a panic is the report

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use vmseal_agent::contract::{self, Fixture};
use vmseal_agent::host::http::Endpoint;
use vmseal_agent::host::identity::Identity;
use vmseal_agent::simulated::{Call, SimulatedHost};
use vmseal_api::client::role::SERVER_ROLE;
use vmseal_api::client::{ClientIdentity, HostClient, host_server_name};
use vmseal_api::datastore::{DatastoreCondition, Messenger, RbdPool};
use vmseal_api::host::version::{CONTRACT_HEADER, POOL_WAYS};
use vmseal_api::host::{
    Allocation, ConsoleClaim, ContractRange, DatastoreLocation, DatastoreSpec, DiskLimits,
    DiskRole, DiskSpec, HostAgent, JobKind, JobState, NewDisk, STATE_WAIT_MAX,
};
use vmseal_api::id::{DatastoreId, DiskId, HostId};
use vmseal_api::problem::ErrorCode;
use vmseal_api::request_id::{HEADER, RequestId, during};
use zeroize::Zeroizing;

/// One certificate for every connection.
#[derive(Debug)]
struct Fixed(Arc<CertifiedKey>);

impl ResolvesClientCert for Fixed {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// A control plane's authority.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        Self { pem: params.self_signed(&key).unwrap().pem(), issuer: Issuer::new(params, key) }
    }

    fn sign(&self, name: SanType) -> (String, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![name];
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key)
    }

    fn host(&self) -> Identity {
        let host = HostId::new();
        let name = SanType::DnsName(host_server_name(host).try_into().unwrap());
        let (certificate, key) = self.sign(name);
        Identity {
            host,
            name: "here".to_owned(),
            address: "127.0.0.1:0".to_owned(),
            server: "https://127.0.0.1:1".to_owned(),
            certificate,
            authority: self.pem.clone(),
            key: Zeroizing::new(key.serialize_pem()),
        }
    }

    fn client(&self, name: SanType) -> ClientIdentity {
        let (certificate, key) = self.sign(name);
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&key).unwrap();
        ClientIdentity {
            authority: self.pem.clone(),
            certificate: Arc::new(Fixed(Arc::new(CertifiedKey::new(vec![certificate], key)))),
        }
    }

    fn server(&self) -> ClientIdentity {
        self.client(SanType::URI(SERVER_ROLE.try_into().unwrap()))
    }
}

/// Serves a simulated host; returns its id and address.
async fn serve(authority: &Authority, host: &SimulatedHost) -> (HostId, String) {
    let identity = authority.host();
    let endpoint = Endpoint::bind(&identity).await.unwrap();
    let address = endpoint.address().to_string();
    let agent = Arc::new(host.clone());
    tokio::spawn(async move { endpoint.serve(agent, std::future::pending()).await });
    (identity.host, address)
}

#[tokio::test]
async fn the_contract_holds_over_https() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("guest");
    contract::write_guest(&image).unwrap();
    let authority = Authority::new();
    let host = SimulatedHost::new();
    let (id, address) = serve(&authority, &host).await;
    let victims = host.clone();
    host.set_heeds_shutdown(false);
    let fixture = Fixture {
        datastore: directory.path().to_owned(),
        image,
        timeout: Duration::from_secs(20),
        kill_filter: Box::new(move |vm| victims.kill_filter(vm)),
    };
    let mut first = true;
    contract::all_runs(fixture, || {
        if !std::mem::take(&mut first) {
            host.restart();
        }
        let client = HostClient::new(id, "here", &address, &authority.server()).unwrap();
        std::future::ready(Arc::new(client) as Arc<dyn HostAgent>)
    })
    .await;
}

#[tokio::test]
async fn only_the_server_of_the_same_control_plane_is_let_in_and_only_the_right_host_is_talked_to()
{
    let authority = Authority::new();
    let host = SimulatedHost::new();
    let (id, address) = serve(&authority, &host).await;
    let describe = async |id: HostId, identity: ClientIdentity| {
        HostClient::new(id, "here", &address, &identity).unwrap().describe().await
    };
    describe(id, authority.server()).await.unwrap();
    let another_host = SanType::DnsName(host_server_name(HostId::new()).try_into().unwrap());
    let stranger = Authority::new();
    let strange_certificate =
        ClientIdentity { authority: authority.pem.clone(), ..stranger.server() };
    for (id, identity, who) in [
        (id, authority.client(another_host), "another host's certificate"),
        (id, strange_certificate, "another authority's certificate"),
        (id, stranger.server(), "a server that trusts another authority"),
        (HostId::new(), authority.server(), "a host with another id"),
    ] {
        let problem = describe(id, identity).await.expect_err(who);
        assert_eq!(problem.code, ErrorCode::Unreachable, "{who}: {problem}");
    }
    let calls = host.calls();
    assert_eq!(calls, [Call::Describe], "a call got through");
}

#[tokio::test]
async fn an_agent_that_shuts_down_does_not_wait_for_long_polls() {
    let authority = Authority::new();
    let identity = authority.host();
    let endpoint = Endpoint::bind(&identity).await.unwrap();
    let address = endpoint.address().to_string();
    let client = HostClient::new(identity.host, "here", &address, &authority.server()).unwrap();
    let (tell, told) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(endpoint.serve(Arc::new(SimulatedHost::new()), async {
        told.await.unwrap();
    }));
    let state = client.state_now().await.unwrap();
    let poll = tokio::spawn(async move { client.state(Some(state.known()), STATE_WAIT_MAX).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    tell.send(()).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(10), serving).await;
    ended.expect("the shutdown waits for the long poll").unwrap().unwrap();
    poll.abort();
}

/// The header with the server's contract versions.
const CONTRACT: HeaderName = HeaderName::from_static(CONTRACT_HEADER);
const CONTRACT_2: HeaderValue = HeaderValue::from_static("2-2");

/// Sends raw requests as the server.
async fn raw(
    authority: &Authority,
    id: HostId,
    address: &str,
    request: impl Fn(&reqwest::Client, String) -> reqwest::RequestBuilder,
    path: &str,
) -> (u16, String, String) {
    let identity = authority.server();
    let ca = CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ca).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_cert_resolver(identity.certificate);
    let name = host_server_name(id);
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .default_headers([(CONTRACT, CONTRACT_2)].into_iter().collect())
        .resolve(&name, address.parse().unwrap())
        .no_proxy()
        .build()
        .unwrap();
    let port = address.rsplit_once(':').unwrap().1;
    let answer = request(&client, format!("https://{name}:{port}{path}")).send().await.unwrap();
    let kind = answer.headers().get("content-type").map(|kind| kind.to_str().unwrap().to_owned());
    (answer.status().as_u16(), kind.unwrap_or_default(), answer.text().await.unwrap())
}

#[tokio::test]
async fn an_agent_works_for_the_request_that_the_server_works_for() {
    let authority = Authority::new();
    let host = SimulatedHost::new();
    let (id, address) = serve(&authority, &host).await;
    let client = HostClient::new(id, "here", &address, &authority.server()).unwrap();
    let request = RequestId::new();
    during(Some(request.clone()), client.describe()).await.unwrap();
    client.describe().await.unwrap();
    // An invalid id is not used: it did not come from the server.
    for hostile in ["a b", "x\u{9}y", &"x".repeat(65)] {
        let get = |client: &reqwest::Client, url: String| client.get(url).header(HEADER, hostile);
        assert_eq!(raw(&authority, id, &address, get, "/v1/host").await.0, 200);
    }
    assert_eq!(host.requests(Call::Describe), [Some(request), None, None, None, None]);
}

#[tokio::test]
async fn invalid_requests_are_answered_with_a_problem() {
    let authority = Authority::new();
    let host = SimulatedHost::new();
    let (id, address) = serve(&authority, &host).await;
    let vm = vmseal_api::id::VmId::new();
    let body = |body: &'static str| {
        move |client: &reqwest::Client, url: String| client.put(url).body(body)
    };
    let huge = "x".repeat(vmseal_api::host::BODY_MAX + 1);
    let too_large = |client: &reqwest::Client, url: String| client.put(url).body(huge.clone());
    let get = |client: &reqwest::Client, url: String| client.get(url);
    let path = format!("/v1/vms/{vm}");
    let key = format!("{path}/key");
    let console = format!("{path}/console");
    let ask = async |request: &dyn Fn(&reqwest::Client, String) -> reqwest::RequestBuilder,
                     path: &str,
                     status: u16,
                     code: &str| {
        let (found, kind, text) = raw(&authority, id, &address, request, path).await;
        assert_eq!((found, kind.as_str()), (status, "application/problem+json"), "{path}: {text}");
        assert!(text.contains(&format!("urn:vmseal:problem:{code}")), "{path}: {text}");
    };
    ask(&body("{}"), &path, 400, "invalid-request").await;
    ask(&body("not JSON"), &key, 400, "invalid-request").await;
    ask(&body(r#"{"key_box":"","sealed":"","more":1}"#), &key, 400, "invalid-request").await;
    ask(&too_large, &path, 413, "too-large").await;
    ask(&body("{}"), "/v1/vms/no-id/key", 400, "invalid-request").await;
    ask(&get, "/v1/nothing", 404, "not-found").await;
    ask(&get, &key, 400, "invalid-request").await;
    ask(&get, "/v1/state?after=x", 400, "invalid-request").await;
    ask(&get, &console, 400, "invalid-request").await;
    // A longer wait than the maximum: it is bounded, so that the answer comes at all.
    assert!(STATE_WAIT_MAX < Duration::from_secs(60));
    let (status, _, text) = raw(&authority, id, &address, get, "/v1/state").await;
    assert_eq!(status, 200, "{text}");
}

#[tokio::test]
async fn an_agent_speaks_tls_1_3_alone() {
    let authority = Authority::new();
    let (id, address) = serve(&authority, &SimulatedHost::new()).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    for (version, taken) in [(&rustls::version::TLS12, false), (&rustls::version::TLS13, true)] {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_client_cert_resolver(authority.server().certificate);
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from(host_server_name(id)).unwrap();
        let shaken = connector.connect(name, stream).await;
        assert_eq!(shaken.is_ok(), taken, "{version:?}: {:?}", shaken.err());
    }
}

#[tokio::test]
async fn a_server_without_a_common_version_is_refused_and_gets_the_agents_version() {
    let authority = Authority::new();
    let host = SimulatedHost::new();
    let (id, address) = serve(&authority, &host).await;
    let speaking = |min, max| {
        let client = HostClient::new(id, "here", &address, &authority.server()).unwrap();
        client.speaking(ContractRange { min, max })
    };
    let older = speaking(1, 1).state_now().await.unwrap_err();
    assert_eq!(older.code, ErrorCode::Unsupported, "{older}");
    assert!(older.detail.contains("upgrade the server"), "{older}");
    let newer = speaking(3, 5).state_now().await.unwrap_err();
    assert_eq!(newer.code, ErrorCode::Unsupported, "{newer}");
    assert!(newer.detail.contains("versions 3 to 5"), "{newer}");
    for (min, max) in [(1, 2), (2, 3), (2, 2), (1, 9)] {
        speaking(min, max).state_now().await.unwrap();
    }
    for (min, max) in [(1, 1), (3, 5)] {
        speaking(min, max).describe().await.unwrap();
    }
    // A server of version 1 does not send its versions; the console does not bypass the check.
    let refused = speaking(3, 5).console(vmseal_api::id::VmId::new(), ConsoleClaim::IfFree).await;
    assert_eq!(refused.err().unwrap().code, ErrorCode::Unsupported);
    let bad = |client: &reqwest::Client, url: String| client.get(url).header(CONTRACT, "new");
    assert_eq!(raw(&authority, id, &address, bad, "/v1/state").await.0, 400);
}

#[tokio::test]
async fn a_job_that_only_a_later_agent_has_is_refused_as_such() {
    let authority = Authority::new();
    let host = SimulatedHost::new();
    let (id, address) = serve(&authority, &host).await;
    let (vm, task) = (vmseal_api::id::VmId::new(), vmseal_api::id::TaskId::new());
    let path = format!("/v1/vms/{vm}/jobs/{task}");
    let put = |body: &'static str| {
        move |client: &reqwest::Client, url: String| client.put(url).body(body)
    };
    let later = r#"{"kind":"defragment","name":"before"}"#;
    let (status, _, text) = raw(&authority, id, &address, put(later), &path).await;
    assert!(status == 422 && text.contains("defragment") && text.contains("upgrade it"), "{text}");
    // Fields unknown to this agent are refused, too.
    let more = r#"{"kind":"create","disks":[],"speed":1}"#;
    let (status, _, text) = raw(&authority, id, &address, put(more), &path).await;
    assert!(status == 400 && text.contains("speed"), "{text}");
}

/// It would refuse the field: `RbdPool` denies those that it does not know.
#[tokio::test]
async fn an_agent_that_does_not_know_when_the_way_to_a_pool_was_changed_is_not_told() {
    let authority = Authority::new();
    let host = SimulatedHost::new();
    let (id, address) = serve(&authority, &host).await;
    let client = HostClient::new(id, "here", &address, &authority.server()).unwrap();
    let pool = RbdPool {
        monitors: "v2:10.0.0.1:3300".to_owned(),
        user: "client.vmseal".to_owned(),
        keyring: Some("/etc/ceph/keyring".into()),
        pool: "vms".to_owned(),
        namespace: None,
        data_pool: None,
        messenger: Messenger::Secure,
        create: None,
        changed: Some(jiff::Timestamp::UNIX_EPOCH),
    };
    let location = DatastoreLocation::Rbd { path: "/ceph".into(), pool: Box::new(pool) };
    let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
    host.probe_datastore(spec.clone()).await.unwrap();
    // Such a mount is taken where the way was changed since, and is refused otherwise: so it shows what the agent was told.
    host.set_mounted_messenger(std::path::Path::new("/ceph"), Messenger::Crc);
    let is_told = async || match client.measure_datastore(spec.clone()).await.unwrap() {
        DatastoreCondition::Available { .. } => true,
        DatastoreCondition::WrongMark { detail } if detail.contains("by hand") => false,
        other => panic!("{other:?}"),
    };
    // Another call, whose body has the pool within a disk.
    let disk = DiskSpec {
        disk: DiskId::new(),
        name: "root".to_owned(),
        datastore: spec.clone(),
        size: 1 << 20,
        encrypted: false,
        allocation: Allocation::Thin,
        role: DiskRole::Data,
        limits: DiskLimits::default(),
        cache: None,
        replica: None,
        facts: None,
    };
    let new = NewDisk { disk, source: None, firmware: None };
    assert!(!is_told().await, "nothing is known of the agent");
    let refused = client.examine_disk(new.clone()).await.unwrap_err();
    assert!(refused.detail.contains("by hand"), "{refused}");
    client.describe().await.unwrap();
    assert!(is_told().await);
    client.examine_disk(new).await.unwrap();
    // An earlier version takes its place.
    host.lack_features(&[POOL_WAYS]);
    client.describe().await.unwrap();
    assert!(!is_told().await);
}

/// An agent of a later version of vmseal that also speaks this server's version.
#[tokio::test]
async fn a_later_agent_is_understood() {
    let authority = Authority::new();
    let host = SimulatedHost::new();
    host.set_contract(ContractRange { min: 2, max: 7 });
    let (id, address) = serve(&authority, &host).await;
    let client = HostClient::new(id, "here", &address, &authority.server()).unwrap();
    let description = client.describe().await.unwrap();
    assert_eq!(description.contract, ContractRange { min: 2, max: 7 });
    let mut told = serde_json::to_value(&description).unwrap();
    told["features"] = serde_json::json!(["job-create", "job-teleport"]);
    told["colour"] = "blue".into();
    let read: vmseal_api::host::HostDescription = serde_json::from_value(told).unwrap();
    assert_eq!(read.features.len(), 2);
    let status = serde_json::json!({
        "task": vmseal_api::id::TaskId::new(), "kind": "teleport", "disks": [],
        "state": {"is": "dematerialized"}, "progress": {"done": 0, "total": 0},
    });
    let status: vmseal_api::host::JobStatus = serde_json::from_value(status).unwrap();
    assert_eq!((status.kind, status.state), (JobKind::Unknown, JobState::Unknown));
}
