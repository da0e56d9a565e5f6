//! The whole server over TLS, through the command line's client, with a simulated host that joined like a
//! real one and is called over HTTPS.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use vmseal_agent::JoinOptions;
use vmseal_agent::host::http::Endpoint;
use vmseal_agent::host::identity::Identity;
use vmseal_agent::join;
use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::client::role::{HOST_ROLE, SERVER_ROLE};
use vmseal_api::client::{CUT_OFF, ClientIdentity, HostClient, ServerClient, host_server_name};
use vmseal_api::host::{ConsoleClaim, DatastoreLocation, HostAgent};
use vmseal_api::model::*;
use vmseal_api::passphrase::{SealedPassphrase, passphrase_info};
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::*;
use vmseal_secret::SecretBytes;
use vmseal_secret::sealed_box::seal;

use crate::server::{Server, ServerOptions};
use vmseal_control::setup::authority::Authority;

struct Installation {
    directory: tempfile::TempDir,
    agent: SimulatedHost,
    server: Option<Server>,
}

impl Installation {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let credentials = directory.path().join("credentials");
        std::fs::create_dir(&credentials).unwrap();
        std::fs::write(credentials.join("vmseal-provider-keys"), "pass, as in the tests").unwrap();
        let mut this = Self { directory, agent: SimulatedHost::new(), server: None };
        this.start().await;
        this
    }

    async fn start(&mut self) {
        let options = ServerOptions {
            data_dir: self.directory.path().join("data"),
            listen: "127.0.0.1:0".parse().unwrap(),
            names: Vec::new(),
            credentials_dir: Some(self.directory.path().join("credentials")),
            keep_events_days: vmseal_control::retention::DAYS,
            hold_steps: None,
        };
        self.server = Some(Server::start(options).await.unwrap());
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.path().join("data").join(name)).unwrap()
    }

    fn client_with(&self, token: &str) -> ServerClient {
        let url = format!("https://{}", self.server.as_ref().unwrap().address());
        ServerClient::new(&url, &self.file("ca.pem"), token).unwrap()
    }

    fn client(&self) -> ServerClient {
        self.client_with(self.file("admin.token").trim())
    }

    async fn sealed(&self, passphrase: &str) -> SealedPassphrase {
        let about: About = self.client().get("about").await.unwrap();
        let public = STANDARD.decode(&about.passphrase_box).unwrap().try_into().unwrap();
        let secret = SecretBytes::from_wiped(&mut passphrase.as_bytes().to_vec()).unwrap();
        let sealed = seal(&public, &passphrase_info("keys"), &secret).unwrap();
        SealedPassphrase {
            passphrase_box: about.passphrase_box,
            sealed: STANDARD.encode(sealed.as_bytes()),
        }
    }

    async fn set_up(&self) {
        let client = self.client();
        let token: JoinToken = client.post("hosts/tokens", &Value::Null).await.unwrap();
        let address = {
            let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            free.local_addr().unwrap().to_string()
        };
        let state_dir = self.directory.path().join("agent");
        let options = JoinOptions {
            replace: false,
            server: format!("https://{}", self.server.as_ref().unwrap().address()),
            token: token.token.into(),
            name: "here".to_owned(),
            address: Some(address),
            state_dir: state_dir.clone(),
        };
        join(options).await.unwrap();
        let endpoint = Endpoint::bind(&Identity::load(&state_dir).unwrap()).await.unwrap();
        tokio::spawn(endpoint.serve(Arc::new(self.agent.clone()), std::future::pending()));
        self.until(async || {
            let host: Host = client.get("hosts/here").await.unwrap();
            host.connection == Connection::Connected
        })
        .await;
        let datastore = AddDatastore {
            name: "local".to_owned(),
            host: "here".to_owned(),
            location: DatastoreLocation::Dir { path: "/store".into() },
            existing: false,
            key: None,
            osd_encryption: None,
            create_for_policy: None,
        };
        let _: Datastore = client.post("datastores", &datastore).await.unwrap();
        // The passphrase comes as a credential.
        let provider = AddProvider {
            name: "keys".to_owned(),
            passphrase: None,
            backup: None,
            backup_passphrase: None,
            kmip: None,
        };
        let _: Provider = client.post("providers", &provider).await.unwrap();
        let request = GivePassphrase { passphrase: self.sealed("b, as in the tests").await };
        let backup: Backup = client.post("providers/keys/backup", &request).await.unwrap();
        let verify = VerifyBackup {
            backup: backup.backup,
            passphrase: self.sealed("b, as in the tests").await,
        };
        let _: Provider = client.post("providers/keys/verify", &verify).await.unwrap();
        let _: Provider = client.post("providers/keys/default", &Value::Null).await.unwrap();
        let policy = AddPolicy {
            name: "encrypted".to_owned(),
            encryption: true,
            provider: None,
            allocation: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            cpu_model: None,
            downtime_milliseconds: None,
            messenger: None,
            osd_encryption: None,
            redundancy: Default::default(),
            image_layout: Default::default(),
        };
        let _: Policy = client.post("policies", &policy).await.unwrap();
    }

    async fn until(&self, test: impl AsyncFn() -> bool) {
        let begun = Instant::now();
        while !test().await {
            assert!(begun.elapsed() < Duration::from_secs(20));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn done(&self, task: Task) {
        let path = format!("tasks/{}", task.id);
        self.until(async || {
            let task: Task = self.client().get(&path).await.unwrap();
            assert!(matches!(task.state, TaskState::Running | TaskState::Done), "{task:?}");
            task.state == TaskState::Done
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encrypted_vm_through_the_command_lines_client_and_a_restart_of_the_server() {
    let mut here = Installation::new().await;
    here.set_up().await;
    let client = here.client();
    let request = CreateVm {
        name: "web".to_owned(),
        policy: "encrypted".to_owned(),
        vcpus: 1,
        memory: 32 << 20,
        host: None,
        hardware: Default::default(),
        description: String::new(),
        labels: Default::default(),
        autostart: false,
        migration_encryption: Default::default(),
        cloud_init: None,
        uefi_variables: None,
        tpm_state: None,
        disks: vec![CreateDisk {
            name: "root".to_owned(),
            datastore: "local".to_owned(),
            size: 1 << 20,
            image: None,
            format: None,
            force: false,
            encrypted: None,
        }],
        nics: Vec::new(),
    };
    here.done(client.post("vms", &request).await.unwrap()).await;
    here.done(client.post("vms/web/start", &Value::Null).await.unwrap()).await;

    let mut console = client.console("web", ConsoleClaim::IfFree).await.unwrap();
    console.write_all(b"hello").await.unwrap();
    let mut heard = Vec::new();
    while !heard.ends_with(b"hello") {
        heard.push(console.read_u8().await.unwrap());
    }
    let refused = client.console("nobody", ConsoleClaim::IfFree).await.err().unwrap();
    assert_eq!(refused.code, ErrorCode::NotFound, "{refused}");

    // It ends although a console is open, and starts with its provider unlocked by the credential.
    here.server.take().unwrap().shutdown().await;
    here.agent.restart();
    here.start().await;
    let client = here.client();
    here.until(async || {
        let vm: Vm = client.get("vms/web").await.unwrap();
        vm.key_state == Some(vmseal_api::host::KeyState::Held)
    })
    .await;
    let stop = StopVm { force: true, timeout_seconds: None };
    here.done(client.post("vms/web/stop", &stop).await.unwrap()).await;
    here.done(client.delete_task("vms/web").await.unwrap()).await;
    let vms: Vec<Vm> = client.all("vms").await.unwrap();
    assert_eq!(vms, []);
    let events: Vec<Event> = client.all("events").await.unwrap();
    let in_small_pages: Vec<Event> = client.all("events?limit=3").await.unwrap();
    assert!(events.len() > 20);
    assert_eq!(in_small_pages, events);
    client.delete("policies/encrypted").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_tokens_and_wrong_authorities_are_refused() {
    let here = Installation::new().await;
    let refused = here.client_with("wrong").get::<Page<Vm>>("vms").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unauthenticated);
    let console =
        here.client_with("wrong").console("web", ConsoleClaim::IfFree).await.err().unwrap();
    assert_eq!(console.code, ErrorCode::Unauthenticated);
    let other = Installation::new().await;
    let url = format!("https://{}", here.server.as_ref().unwrap().address());
    let client = ServerClient::new(&url, &other.file("ca.pem"), "x").unwrap();
    let refused = client.get::<About>("about").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unreachable);
    assert!(refused.detail.contains("certificate"), "{refused}");
}

/// A client that sends nothing, or half a header, is disconnected, and other clients are not affected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_clients_do_not_affect_others_and_headers_have_a_limit() {
    let here = Installation::new().await;
    let address = here.server.as_ref().unwrap().address();
    let mut silent = Vec::new();
    // More than the server's limit.
    for _ in 0..600 {
        silent.push(tokio::net::TcpStream::connect(address).await.unwrap());
    }
    let _: About = here.client().get("about").await.unwrap();
    let long = here.client_with(&"x".repeat(64 * 1024)).get::<Page<Vm>>("vms").await.unwrap_err();
    // A client that still sends when the server closes the connection may not get the answer.
    let hung_up = long.code == ErrorCode::Unreachable && long.detail.contains("Broken pipe");
    let hung_up = hung_up || long.detail.contains("Connection reset");
    assert!(hung_up || long.detail.contains("431"), "a header of 64 KiB was taken: {long}");
    let mut byte = [0];
    let last = silent.last_mut().unwrap();
    let hung_up = tokio::time::timeout(Duration::from_secs(15), last.read(&mut byte)).await;
    assert!(matches!(hung_up, Ok(Ok(0) | Err(_))), "{hung_up:?}");
}

impl Installation {
    /// A certificate of this installation's authority, for these names.
    fn signed(
        &self,
        names: Vec<rcgen::SanType>,
    ) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
        let ca = rcgen::KeyPair::from_pem(&self.file("ca.key")).unwrap();
        let issuer = rcgen::Issuer::from_ca_cert_pem(&self.file("ca.pem"), ca).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.subject_alt_names = names;
        let certificate = params.signed_by(&key, &issuer).unwrap();
        (certificate.der().clone(), PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }

    /// Answers TLS with this certificate; returns the address.
    async fn answers_with(&self, names: Vec<rcgen::SanType>) -> std::net::SocketAddr {
        self.answers(names, "HTTP/1.1 204 No Content\r\n\r\n").await
    }

    /// Answers requests with this, and hangs up as a process does that is killed.
    async fn answers(
        &self,
        names: Vec<rcgen::SanType>,
        answer: &'static str,
    ) -> std::net::SocketAddr {
        let (certificate, key) = self.signed(names);
        let tls = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                if let Ok(mut stream) = acceptor.accept(stream).await {
                    let _ = stream.read(&mut [0; 1024]).await;
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            }
        });
        address
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// With a certificate as hosts of an early version had: for an address that they chose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_does_not_pass_for_the_server_nor_the_server_for_a_host() {
    let here = Installation::new().await;
    let host = vmseal_api::id::HostId::new();
    let chosen = || rcgen::SanType::IpAddress("127.0.0.1".parse().unwrap());
    let name = || rcgen::SanType::DnsName(host_server_name(host).try_into().unwrap());
    let role = |role: &str| rcgen::SanType::URI(role.try_into().unwrap());
    for names in [vec![chosen()], vec![name(), chosen()], vec![name(), chosen(), role(HOST_ROLE)]] {
        let address = here.answers_with(names).await;
        let client =
            ServerClient::new(&format!("https://{address}"), &here.file("ca.pem"), "x").unwrap();
        let refused = client.get::<About>("about").await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable);
        assert!(refused.detail.contains("not the server's"), "{refused}");
        let console = client.console("web", ConsoleClaim::IfFree).await.err().unwrap();
        assert!(console.detail.contains("not the server's"), "{console}");
    }
    let address = here.answers_with(vec![name(), role(SERVER_ROLE)]).await;
    let authority = Authority::open(&here.directory.path().join("data")).unwrap();
    let identity = vmseal_control::setup::identity::Identity::open(
        &here.directory.path().join("data"),
        &authority,
        vec!["localhost".to_owned()],
    );
    let identity =
        ClientIdentity { authority: here.file("ca.pem"), certificate: Arc::new(identity.unwrap()) };
    let client = HostClient::new(host, "here", &address.to_string(), &identity).unwrap();
    let refused = client.describe().await.unwrap_err();
    assert!(refused.detail.contains("not a host's"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_ends_meanwhile_is_told_in_plain_words() {
    let here = Installation::new().await;
    let names = || {
        let role = rcgen::SanType::URI(SERVER_ROLE.try_into().unwrap());
        vec![rcgen::SanType::IpAddress("127.0.0.1".parse().unwrap()), role]
    };
    for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"] {
        let url = format!("https://{}", here.answers(names(), answer).await);
        let client = ServerClient::new(&url, &here.file("ca.pem"), "x").unwrap();
        let mut told = vec![client.get::<About>("about").await.unwrap_err()];
        if answer.is_empty() {
            told.push(client.console("web", ConsoleClaim::IfFree).await.err().unwrap());
        }
        for problem in told {
            assert_eq!(problem.code, ErrorCode::Unreachable);
            let expected = format!("the connection to {url}/ {CUT_OFF}");
            assert!(problem.detail.starts_with(&expected), "{answer}: {problem}");
            assert!(!problem.detail.contains("rustls"), "{answer}: {problem}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_1_2_is_refused() {
    let here = Installation::new().await;
    let mut roots = rustls::RootCertStore::empty();
    let ca = CertificateDer::from_pem_slice(here.file("ca.pem").as_bytes()).unwrap();
    roots.add(ca).unwrap();
    for (version, taken) in [(&rustls::version::TLS12, false), (&rustls::version::TLS13, true)] {
        let config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let address = here.server.as_ref().unwrap().address();
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
        let shaken = connector.connect(name, stream).await;
        assert_eq!(shaken.is_ok(), taken, "{version:?}: {:?}", shaken.err());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_is_called_at_its_new_address() {
    let here = Installation::new().await;
    here.set_up().await;
    let client = here.client();
    let before: Host = client.get("hosts/here").await.unwrap();
    let set = async |address: &str| {
        let request = ChangeHost { address: address.to_owned() };
        client.patch::<Host>("hosts/here", &request).await.unwrap()
    };
    // Nobody listens there.
    assert_eq!(set("127.0.0.1:1").await.address, "127.0.0.1:1");
    here.until(async || {
        let alarms: Page<Alarm> = client.get("alarms").await.unwrap();
        alarms.items.iter().any(|alarm| alarm.code == "host-disconnected")
    })
    .await;
    set(&before.address).await;
    here.until(async || {
        let host: Host = client.get("hosts/here").await.unwrap();
        host.connection == Connection::Connected
    })
    .await;
}
