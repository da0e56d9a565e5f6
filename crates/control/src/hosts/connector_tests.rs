//! Agents over HTTPS: the server's client and certificates, the agent's own router and TLS.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use vmseal_agent::host::http::Endpoint;
use vmseal_agent::host::identity::Identity as HostIdentity;
use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::client::{ClientIdentity, HostClient};
use vmseal_api::expose::LET_GO;
use vmseal_api::host::{
    ConsoleClaim, Exposing, HostAgent, PowerOff, STATE_WAIT_MAX, ShowsCertificate,
};
use vmseal_api::id::{HostId, VmId};
use vmseal_api::model::Connection;
use vmseal_api::problem::ErrorCode;
use zeroize::Zeroizing;

use super::Hosts;
use super::connector::HttpsConnector;
use crate::providers::Providers;
use crate::setup::authority::Authority;
use crate::setup::identity::Identity;
use crate::store::{alarms, hosts};
use crate::testing::Fixture;

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

    fn host_identity(&self, host: HostId) -> HostIdentity {
        let key = rcgen::KeyPair::generate().unwrap();
        let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
        let address = "127.0.0.1:0".to_owned();
        let csr = csr.pem().unwrap();
        HostIdentity {
            host,
            name: "here".to_owned(),
            certificate: self.authority.host_certificate(&csr, host).unwrap(),
            address,
            server: "https://127.0.0.1:1".to_owned(),
            authority: self.authority.pem().to_owned(),
            key: Zeroizing::new(key.serialize_pem()),
        }
    }

    /// An agent with a certificate for `host`, on loopback.
    async fn agent(&self, host: HostId, agent: SimulatedHost) -> SocketAddr {
        let endpoint = Endpoint::bind(&self.host_identity(host)).await.unwrap();
        let address = endpoint.address();
        tokio::spawn(endpoint.serve(Arc::new(agent), std::future::pending()));
        address
    }

    fn client(&self, host: HostId, address: SocketAddr) -> HostClient {
        HostClient::new(host, "here", &address.to_string(), &self.identity).unwrap()
    }
}

#[tokio::test]
async fn a_vm_is_seen_and_worked_on_through_it() {
    let (peers, fixture, host) = (Peers::new(), Fixture::new().await, HostId::new());
    let vm = fixture.running("web").await;
    let client = peers.client(host, peers.agent(host, fixture.agent.clone()).await);
    assert_eq!(client.describe().await.unwrap(), fixture.agent.describe().await.unwrap());
    // The end of the certificate's validity is known from the connection.
    let until = crate::setup::expiry::until(&client.certificate().unwrap()).unwrap();
    assert!(until > jiff::Timestamp::now() + jiff::SignedDuration::from_hours(24 * 365 * 9));
    let state = client.state_after(None, STATE_WAIT_MAX * 2).await.unwrap();
    assert_eq!(state, fixture.agent.state_now().await.unwrap());

    let mut console = client.console(vm, ConsoleClaim::IfFree).await.unwrap();
    console.write_all(b"hello").await.unwrap();
    let mut heard = Vec::new();
    while !heard.ends_with(b"hello") {
        heard.push(console.read_u8().await.unwrap());
    }
    let waiting = client.state_after(Some(&state), STATE_WAIT_MAX);
    let stopping = client.power_off(vm, PowerOff::Force);
    let (news, stopped) = tokio::join!(waiting, stopping);
    stopped.unwrap();
    assert!(news.unwrap().generation > state.generation);
    let refused = client.console(vm, ConsoleClaim::IfFree).await.err().unwrap();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    let nobody = client.power_on(VmId::new()).await.unwrap_err();
    assert_eq!(nobody.code, ErrorCode::NotFound, "{nobody}");
}

#[tokio::test]
async fn an_exposed_disk_is_carried_both_ways_at_once() {
    let (peers, fixture, host) = (Peers::new(), Fixture::new().await, HostId::new());
    let vm = fixture.made("web", "encrypted").await;
    let disk = fixture.disks(vm).await[0].id;
    let client = peers.client(host, peers.agent(host, fixture.agent.clone()).await);
    let hold = Exposing::Hold { writable: true };
    let mut holder = client.expose_disk(vm, disk, hold).await.unwrap();
    let refused = client.expose_disk(vm, disk, hold).await.err().unwrap();
    assert_eq!(refused.code, ErrorCode::InUse, "{refused}");
    let mut stream = client.expose_disk(vm, disk, Exposing::Connect).await.unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).await.unwrap();
    assert!(greeting.starts_with(b"NBDMAGIC"));
    let (mut from, mut to) = tokio::io::split(stream);
    let much: Vec<u8> = (0..2_000_000u32).map(|number| number as u8).collect();
    let mut echoed = vec![0; much.len()];
    let (said, heard) = tokio::join!(to.write_all(&much), from.read_exact(&mut echoed));
    said.unwrap();
    heard.unwrap();
    assert!(echoed == much);
    holder.write_all(&[LET_GO]).await.unwrap();
    assert_eq!(holder.read_to_end(&mut Vec::new()).await.unwrap(), 0);
    let late = client.expose_disk(vm, disk, Exposing::Connect).await.err().unwrap();
    assert_eq!(late.code, ErrorCode::WrongState, "{late}");
}

#[tokio::test]
async fn another_host_of_the_same_authority_is_refused() {
    let (peers, host) = (Peers::new(), HostId::new());
    let client = peers.client(host, peers.agent(HostId::new(), SimulatedHost::new()).await);
    let problem = client.describe().await.unwrap_err();
    assert_eq!(problem.code, ErrorCode::Unreachable, "{problem}");
    let console = client.console(VmId::new(), ConsoleClaim::IfFree).await.err().unwrap();
    assert_eq!(console.code, ErrorCode::Unreachable, "{console}");
}

/// Whoever joins, or changes an address, may give that of another host: nothing is sent there, and the alarm says whose
/// it is.
#[tokio::test]
async fn an_address_at_which_another_host_answers_is_told_by_the_alarm() {
    let peers = Peers::new();
    let (host, other, agent) = (HostId::new(), HostId::new(), SimulatedHost::new());
    let address = peers.agent(other, agent.clone()).await;
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(crate::testing::new_store(directory.path()).await);
    let mut write = store.write().await.unwrap();
    let (name, address) = ("here".to_owned(), address.to_string());
    let maintenance = Default::default();
    let known = hosts::Host { id: host, name, address, description: None, maintenance };
    hosts::insert(&mut write, &known).await.unwrap();
    write.commit().await.unwrap();
    let providers = Providers::open(Arc::clone(&store), directory.path(), None).await.unwrap();
    let connector = Arc::new(HttpsConnector(peers.identity.clone()));
    let hosts = Hosts::start(Arc::clone(&store), Arc::new(providers), connector).await.unwrap();
    let begun = std::time::Instant::now();
    let alarm = loop {
        let raised = alarms::list(&mut store.read().await.unwrap()).await.unwrap();
        if let Some(alarm) = raised.into_iter().find(|it| it.code == "host-disconnected") {
            break alarm;
        }
        assert!(begun.elapsed().as_secs() < 30, "no alarm");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    };
    let whose = format!("another host answers there, with id {other}");
    assert!(alarm.detail.contains(&whose), "{}", alarm.detail);
    assert!(alarm.detail.contains("vmseal host set"), "{}", alarm.detail);
    assert_eq!(hosts.view(host).connection, Connection::Disconnected);
    assert_eq!(agent.calls(), [], "the other host was told something");
}

#[tokio::test]
async fn an_agent_of_another_authority_is_refused_and_refuses() {
    let (ours, theirs, host) = (Peers::new(), Peers::new(), HostId::new());
    let address = theirs.agent(host, SimulatedHost::new()).await;
    let problem = ours.client(host, address).describe().await.unwrap_err();
    assert_eq!(problem.code, ErrorCode::Unreachable, "{problem}");
    // Their authority is trusted, but our certificate is still sent.
    let mixed = ClientIdentity {
        authority: theirs.identity.authority.clone(),
        certificate: Arc::clone(&ours.identity.certificate),
    };
    let client = HostClient::new(host, "here", &address.to_string(), &mixed).unwrap();
    assert_eq!(client.describe().await.unwrap_err().code, ErrorCode::Unreachable);
}

#[tokio::test]
async fn a_missing_agent_is_unreachable_and_the_problem_says_so() {
    let (peers, host) = (Peers::new(), HostId::new());
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let problem = peers.client(host, nobody).describe().await.unwrap_err();
    assert_eq!(problem.code, ErrorCode::Unreachable);
    assert!(problem.detail.contains("host 'here'"), "{problem}");
    assert!(problem.detail.contains("refused"), "{problem}");
}

/// A server that is not a vmseal agent does not answer with problems.
#[tokio::test]
async fn another_service_at_the_address_is_recognized() {
    let (peers, host) = (Peers::new(), HostId::new());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await.unwrap();
    });
    let problem = peers.client(host, address).describe().await.unwrap_err();
    assert_eq!(problem.code, ErrorCode::Unreachable, "{problem}");
}
