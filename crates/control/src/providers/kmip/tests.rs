//! A KMIP provider against a real KMS (PyKMIP), and against one that misbehaves on purpose.

mod client_keys;
mod servers;
mod several;
mod upkeep;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use vmseal_api::kmip::{AddKmipServer, KmipKeyTested};
use vmseal_kmip::operation::{ApplicationInformation, Create, Locate, Text};
use vmseal_kmip::testing::{
    Asked, Authority, Issued, PyKmip, Reaction, ScriptedServer, Validity, self_signed,
};
use vmseal_kmip::ttlv::{Encoder, Tag};
use vmseal_kmip::{OperationCode, ResultReason, RevocationReason, State};

use super::*;
use crate::providers::Providers;
use crate::store::key_requests::KeyRequest;
use crate::store::providers::Provider;
use crate::store::{alarms, events, keys};

/// How long anything may take in a test.
const TIMEOUT: Duration = Duration::from_secs(30);

const PASSPHRASE: &str = "correct horse battery";

fn secret(text: &str) -> SecretBytes {
    SecretBytes::from_wiped(&mut text.as_bytes().to_vec()).unwrap()
}

fn at(alias: &str, endpoint: &Endpoint) -> AddKmipServer {
    let (host, port) = (endpoint.host().to_owned(), endpoint.port());
    AddKmipServer { alias: alias.to_owned(), host, port }
}

struct Here {
    directory: tempfile::TempDir,
    store: Arc<Store>,
    providers: Providers,
}

impl Here {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(crate::testing::new_store(directory.path()).await);
        let providers = Providers::open(Arc::clone(&store), directory.path(), None).await.unwrap();
        Self { directory, store, providers }
    }

    /// A provider of these servers that sends `client` and trusts `authority`.
    async fn add(
        &self,
        servers: &[AddKmipServer],
        authority: &Authority,
        client: &Issued,
    ) -> (Provider, Arc<dyn KeyProvider>) {
        let name = format!("kms{}", self.names());
        let added = self.providers.add_kmip(&name, servers, Some(secret(PASSPHRASE)), "me");
        let provider = added.await.unwrap();
        assert_eq!(self.providers.status(&provider), ProviderStatus::NeedsTrust);
        for server in servers {
            let authorities = authority.certificate().to_owned();
            let trusted =
                self.providers.trust_authorities(&provider, &server.alias, authorities, "me");
            trusted.await.unwrap();
        }
        assert_eq!(self.providers.status(&provider), ProviderStatus::NeedsCertificate);
        let (certificate, key) = (client.certificate.clone(), Some(client.private_key()));
        let new = NewCertificate { key, ..new_certificate(&certificate) };
        self.providers.set_certificate(&provider, new, "me").await.unwrap();
        let keys = self.providers.get(provider.id).unwrap();
        (provider, keys)
    }

    fn names(&self) -> usize {
        std::fs::read_dir(self.directory.path().join("providers")).map_or(0, Iterator::count)
    }

    async fn note(&self, vm: VmId, key: &KeyReference) {
        let mut write = self.store.write().await.unwrap();
        keys::insert(&mut write, vm, key).await.unwrap();
        write.commit().await.unwrap();
    }

    async fn events(&self, kind: &str) -> Vec<String> {
        let mut read = self.store.read().await.unwrap();
        let all = events::after(&mut read, 0, 1000, &Default::default()).await.unwrap();
        all.into_iter().filter(|event| event.kind == kind).map(|event| event.detail).collect()
    }

    async fn alarms(&self) -> Vec<(String, Option<KeyFault>)> {
        let raised = alarms::list(&mut self.store.read().await.unwrap()).await.unwrap();
        raised.into_iter().map(|alarm| (alarm.code, alarm.reason)).collect()
    }

    async fn eventually(&self, what: &str, test: impl AsyncFn(&Self) -> bool) {
        let begun = Instant::now();
        while !test(self).await {
            let alarms = self.alarms().await;
            assert!(begun.elapsed() < TIMEOUT, "not so after {TIMEOUT:?}: {what}; {alarms:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A certificate to set, for the existing key, with the passphrase of the tests.
fn new_certificate(pem: &str) -> NewCertificate {
    let (certificate, passphrase) = (pem.to_owned(), Some(secret(PASSPHRASE)));
    NewCertificate { certificate, key: None, passphrase, replace: false, force: false }
}

/// The name that all clients of the tests have.
fn new_name() -> NewName {
    let passphrase = Some(secret(PASSPHRASE));
    NewName { common_name: "vmseal".to_owned(), replace: false, passphrase, force: false }
}

fn reference(provider: &Provider, key_id: &str) -> KeyReference {
    let (provider, key_id) = (provider.id, key_id.to_owned());
    KeyReference { provider, key_id, check: "00".repeat(16) }
}

/// A client of the test's own, of the same identity.
fn client(server: &PyKmip, authority: &Authority, identity: &Issued) -> Client {
    Client::new(Settings::new(server.endpoint(), authority.trust(), identity.identity())).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_made_once_given_checked_and_destroyed() {
    let authority = Authority::new("kms");
    let server = PyKmip::start(&authority);
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    assert_eq!(here.providers.status(&provider), ProviderStatus::Normal);
    let tested = here.providers.test(&provider, true, "me").await.unwrap();
    let tested = tested.servers;
    assert!(
        tested[0].key == Some(KmipKeyTested::Made)
            && tested[0].seen.version.as_deref() == Some("1.4"),
        "{tested:?}"
    );

    let (vm, request) = (VmId::new(), Uuid::from_u128(7));
    let (key, kek) = kms.create_key(vm, request).await.unwrap();
    // The same request, as long as the key is not in the inventory.
    assert_eq!(kms.create_key(vm, request).await.unwrap().0, key);
    here.note(vm, &key).await;
    let given = kms.get_key(vm, &key).await.unwrap();
    assert!(given.kek == kek && given.fault.is_none());
    assert_eq!(kms.reference_of(vm, &key.key_id).await.unwrap(), key);
    let unknown = kms.reference_of(vm, "no-such-key").await.unwrap_err();
    assert_eq!(unknown.reason, Some(KeyFault::KeyMissing), "{unknown}");
    let (other, _) = kms.create_key(vm, Uuid::from_u128(8)).await.unwrap();
    assert_ne!(other.key_id, key.key_id);
    let mut scraped = String::new();
    crate::metrics::get().encode(&mut scraped).unwrap();
    for (operation, outcome, count) in
        // PyKMIP has no AddAttribute: its refusal changes nothing.
        [("Create", "done", 3), ("AddAttribute", "refused", 3), ("Activate", "done", 3)]
    {
        let id = provider.id;
        let sample = format!(
            "vmseal_server_kms_requests_total{{provider=\"{id}\",server=\"one\",operation=\"{operation}\",outcome=\"{outcome}\"}} {count}\n"
        );
        assert!(scraped.contains(&sample), "{sample} is not in {scraped}");
    }
    // The check value binds the key to its VM, too.
    let wrong = kms.get_key(VmId::new(), &key).await.unwrap_err();
    assert_eq!(wrong.reason, Some(KeyFault::KeyMismatch));

    let own = client(&server, &authority, &identity);
    let id = KeyId::new(key.key_id.clone()).unwrap();
    for (reason, fault) in [
        (RevocationReason::CessationOfOperation, KeyFault::KeyDeactivated),
        (RevocationReason::KeyCompromise, KeyFault::KeyCompromised),
    ] {
        own.revoke(&id, reason).await.unwrap();
        let given = kms.get_key(vm, &key).await.unwrap();
        assert!(given.kek == kek, "it opens what there is");
        assert_eq!(given.fault.unwrap().reason, Some(fault));
    }
    // A different key under a known id is not destroyed.
    let stranger = KeyReference { check: "00".repeat(16), ..other.clone() };
    kms.destroy_key(vm, "web", &stranger).await.unwrap();
    let pending = here.events("key.destruction-pending").await;
    assert!(pending.len() == 1 && pending[0].contains("other bytes"), "{pending:?}");
    assert_eq!(here.events("key.destroyed").await.len(), 0);
    own.key_state(&KeyId::new(other.key_id.clone()).unwrap()).await.unwrap();

    kms.destroy_key(vm, "web", &key).await.unwrap();
    assert_eq!(here.events("key.destroyed").await.len(), 1);
    let gone = own.key_state(&id).await.unwrap_err();
    assert_eq!(gone.refusal(), Some(ResultReason::ItemNotFound));
    let destroyed = kms.get_key(vm, &key).await.unwrap_err();
    assert_eq!(destroyed.reason, Some(KeyFault::KeyDestroyed));
    kms.destroy_key(vm, "web", &key).await.unwrap();
    assert_eq!(here.events("key.destroyed").await.len(), 1, "destroyed twice");

    // After a restart it is sealed, and its passphrase brings its key and its servers back.
    let again =
        Providers::open(Arc::clone(&here.store), here.directory.path(), None).await.unwrap();
    assert_eq!(again.status(&provider), ProviderStatus::Sealed);
    let sealed = again.get(provider.id).unwrap().get_key(vm, &other).await.unwrap_err();
    assert_eq!(sealed.reason, Some(KeyFault::ProviderSealed));
    let wrong = again.unlock(&provider, secret("wrong"), "me").await.unwrap_err();
    assert_eq!(wrong.code, ErrorCode::KeyMismatch);
    // A crash has left a file that is not in the inventory; the next start removes it.
    let files = here.directory.path().join("providers").join(provider.id.to_string());
    std::fs::write(files.join("client-left.key"), b"sealed").unwrap();
    let once_more = Providers::open(Arc::clone(&here.store), here.directory.path(), None).await;
    assert!(!files.join("client-left.key").exists(), "it is left forever");
    drop(once_more);
    // A server that was not asked is not reported as answering.
    again.open_up(&provider, secret(PASSPHRASE), "me").await.unwrap();
    let status = again.status(&provider);
    assert!(matches!(status, ProviderStatus::Untried | ProviderStatus::Normal), "{status:?}");
    again.unlock(&provider, secret(PASSPHRASE), "me").await.unwrap();
    assert_eq!(again.status(&provider), ProviderStatus::Normal);
    again.get(provider.id).unwrap().get_key(vm, &other).await.unwrap();
}

/// Every reason why a key is unavailable, with its name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_cause_of_an_unavailable_key_is_named() {
    use KeyFault as Fault;
    let (authority, stranger) = (Authority::new("kms"), Authority::new("stranger"));
    let names = &["127.0.0.1"];
    let server = PyKmip::start(&authority);
    let expired = PyKmip::start_with(&authority.server(names, Validity::Expired), &authority);
    let early = PyKmip::start_with(&authority.server(names, Validity::NotYet), &authority);
    let elsewhere =
        PyKmip::start_with(&authority.server(&["kms.example"], Validity::Now), &authority);
    let frozen = PyKmip::start(&authority);
    let mut dead = PyKmip::start(&authority);
    dead.kill();
    let certificate = authority.server(names, Validity::Now);
    let garbage =
        ScriptedServer::start(&certificate, None, |_| Reaction::SendAndHang(vec![0x17; 64]));
    let half = ScriptedServer::start(&certificate, None, |asked: &Asked| {
        let whole = asked.done(|payload| payload.text(Tag::UNIQUE_IDENTIFIER, "1"));
        Reaction::SendAndHang(whole[..whole.len() / 2].to_vec())
    });
    let closing = ScriptedServer::start(&certificate, None, |_| Reaction::SendAndClose(Vec::new()));
    let destroyed = ScriptedServer::start(&certificate, None, |asked: &Asked| {
        Reaction::Send(asked.done(|payload| state(payload, 5)))
    });
    let refusing = ScriptedServer::start(&certificate, None, |asked: &Asked| {
        asked.refused(ResultReason::GeneralFailure)
    });

    let later = ScriptedServer::start_on(0, &certificate, None, |asked: &Asked| {
        asked.versions(&[vmseal_kmip::ProtocolVersion { major: 2, minor: 0 }])
    });
    let short = ScriptedServer::start(&certificate, None, |asked: &Asked| match asked.operation {
        OperationCode::GetAttributes => Reaction::Send(asked.done(|payload| state(payload, 2))),
        OperationCode::Get => given(asked, &[7; 16]),
        _ => Reaction::Send(asked.done(|_| {})),
    });

    let good = authority.client("vmseal", Validity::Now);
    let owner = client(&server, &authority, &authority.client("owner", Validity::Now));
    let owned = owner.create(Create::default()).await.unwrap();
    let own = client(&server, &authority, &good);
    let not_active = own.create(Create::default()).await.unwrap();
    let other_bytes = own.create(Create::default()).await.unwrap();
    own.activate(&other_bytes).await.unwrap();

    let old = authority.client("vmseal", Validity::Expired);
    let young = authority.client("vmseal", Validity::NotYet);
    let foreign = stranger.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let live = server.endpoint();
    let cases: [(&str, &Endpoint, &Authority, &Issued, &str, Fault); 19] = [
        ("not running", &dead.endpoint(), &authority, &good, "1", Fault::KmsUnreachable),
        ("wrong authority", &live, &stranger, &good, "1", Fault::KmsUntrusted),
        ("another name", &elsewhere.endpoint(), &authority, &good, "1", Fault::KmsUntrusted),
        ("expired", &expired.endpoint(), &authority, &good, "1", Fault::KmsCertificateExpired),
        ("early", &early.endpoint(), &authority, &good, "1", Fault::KmsCertificateNotYetValid),
        ("foreign client", &live, &authority, &foreign, "1", Fault::ClientCertificateRefused),
        ("old client", &live, &authority, &old, "1", Fault::ClientCertificateExpired),
        ("young client", &live, &authority, &young, "1", Fault::ClientCertificateNotYetValid),
        ("another's key", &live, &authority, &good, owned.as_str(), Fault::KmsDenies),
        ("missing", &live, &authority, &good, "999999", Fault::KeyMissing),
        ("not active", &live, &authority, &good, not_active.as_str(), Fault::KeyNotActive),
        ("other bytes", &live, &authority, &good, other_bytes.as_str(), Fault::KeyMismatch),
        ("destroyed", &destroyed.endpoint(), &authority, &good, "1", Fault::KeyDestroyed),
        ("garbage", &garbage.endpoint(), &authority, &good, "1", Fault::KmsGarbage),
        ("hanging in the middle", &half.endpoint(), &authority, &good, "1", Fault::KmsTimeout),
        ("closing", &closing.endpoint(), &authority, &good, "1", Fault::KmsUnreachable),
        ("later KMIP", &later.endpoint(), &authority, &good, "1", Fault::KmsVersion),
        ("half a key", &short.endpoint(), &authority, &good, "1", Fault::KeyUnusable),
        ("refusing", &refusing.endpoint(), &authority, &good, "1", Fault::KmsRefuses),
    ];
    for (what, endpoint, trusted, identity, key_id, fault) in cases {
        let (provider, kms) = here.add(&[at("one", endpoint)], trusted, identity).await;
        let vm = VmId::new();
        let problem = kms.get_key(vm, &reference(&provider, key_id)).await.unwrap_err();
        assert_eq!(problem.reason, Some(fault), "{what}: {problem}");
        assert!(problem.detail.contains(&provider.name), "{what}: {problem}");
        // And as an alarm, where the KMS is at fault and not one key.
        if kms.known_fault().is_some() {
            assert_eq!(here.providers.status(&provider), ProviderStatus::Failing, "{what}");
            let wanted = ("provider-failing".to_owned(), Some(fault));
            here.eventually(what, async |here| here.alarms().await.contains(&wanted)).await;
        }
        here.providers.remove(&provider, "me").await.unwrap();
        assert_eq!(here.alarms().await, [], "{what}");
    }
    frozen.freeze();
    let (_, kms) = here.add(&[at("one", &frozen.endpoint())], &authority, &good).await;
    let begun = Instant::now();
    let key =
        KeyReference { provider: ProviderId::new(), key_id: "1".into(), check: String::new() };
    let problem = kms.get_key(VmId::new(), &key).await.unwrap_err();
    assert_eq!(problem.reason, Some(Fault::KmsTimeout), "{problem}");
    assert!(begun.elapsed() < Duration::from_secs(10), "it hung");
}

fn state(payload: &mut Encoder, number: u32) {
    payload.text(Tag::UNIQUE_IDENTIFIER, "1");
    payload.structure(Tag::ATTRIBUTE, |attribute| {
        attribute.text(Tag::ATTRIBUTE_NAME, "State");
        attribute.enumeration(Tag::ATTRIBUTE_VALUE, number);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_kms_is_an_alarm_and_pending_work_is_done_when_it_is_back() {
    let authority = Authority::new("kms");
    let mut server = PyKmip::start(&authority);
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let vm = VmId::new();
    let (key, _) = kms.create_key(vm, Uuid::from_u128(1)).await.unwrap();
    here.note(vm, &key).await;
    let (abandoned, _) = kms.create_key(vm, Uuid::from_u128(2)).await.unwrap();
    let in_use = here.providers.remove(&provider, "me").await.unwrap_err();
    assert_eq!(in_use.code, ErrorCode::InUse);

    server.kill();
    let mut usable = here.providers.unlocks();
    usable.mark_unchanged();
    assert!(kms.get_key(vm, &key).await.is_err());
    let failing = ("provider-failing".to_owned(), Some(KeyFault::KmsUnreachable));
    here.eventually("an alarm", async |here| here.alarms().await.contains(&failing)).await;
    // A VM can be deleted while its KMS is unreachable.
    kms.destroy_key(vm, "web", &key).await.unwrap();
    kms.abandon(Uuid::from_u128(2)).await.unwrap();
    assert_eq!(here.events("key.destruction-pending").await.len(), 1);
    assert_eq!(here.events("key.destroyed").await.len(), 0);

    server.restart();
    here.eventually("no alarm", async |here| here.alarms().await.is_empty()).await;
    assert!(usable.has_changed().unwrap(), "no change was reported");
    here.eventually("both are destroyed", async |here| {
        here.events("key.destroyed").await.len() == 2
    })
    .await;
    let own = client(&server, &authority, &identity);
    for id in [key.key_id, abandoned.key_id] {
        let gone = own.key_state(&KeyId::new(id).unwrap()).await.unwrap_err();
        assert_eq!(gone.refusal(), Some(ResultReason::ItemNotFound));
    }
    here.providers.remove(&provider, "me").await.unwrap();
}

/// A request with a mark that was sent to the server `one`, and not answered.
fn asked_of_one(vm: VmId, request: Uuid) -> KeyRequest {
    KeyRequest {
        request,
        mark: Uuid::from_u128(33),
        sent: Timestamp::now(),
        vm,
        server: "one".to_owned(),
        marked: true,
        key_id: None,
        abandoned: false,
        moved: false,
    }
}

async fn put(here: &Here, provider: ProviderId, noted: &KeyRequest) {
    let mut write = here.store.write().await.unwrap();
    key_requests::put(&mut write, provider, noted).await.unwrap();
    write.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_of_a_request_without_an_answer_is_found_again() {
    let authority = Authority::new("kms");
    let server = PyKmip::start(&authority);
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let own = client(&server, &authority, &identity);
    let (vm, request) = (VmId::new(), Uuid::from_u128(3));
    let noted = asked_of_one(vm, request);
    let put = async |noted: KeyRequest| put(&here, provider.id, &noted).await;
    // The process ended between the request and the record of its answer: the key exists.
    let (first, _) = kms.create_key(vm, request).await.unwrap();
    let mut known =
        key_requests::get(&mut here.store.read().await.unwrap(), provider.id, request).await;
    known.as_mut().unwrap().as_mut().unwrap().key_id = None;
    put(known.unwrap().unwrap()).await;
    assert_eq!(kms.create_key(vm, request).await.unwrap().0, first);
    assert_eq!(own.locate(Locate::default()).await.unwrap().len(), 1, "a second key was made");
    // The process ended before the key was activated.
    let text = |text: &str| Text::new(text).unwrap();
    let data = text(&Uuid::from_u128(4).to_string());
    let application = Some(ApplicationInformation { namespace: text("vmseal"), data });
    let made = own.create(Create { name: None, application }).await.unwrap();
    let (request, mark) = (Uuid::from_u128(4), Uuid::from_u128(4));
    put(KeyRequest { request, mark, ..noted.clone() }).await;
    let (found, _) = kms.create_key(vm, Uuid::from_u128(4)).await.unwrap();
    assert_eq!(found.key_id, made.as_str());
    assert_eq!(own.key_state(&made).await.unwrap(), State::Active);
    assert!(here.events("key.orphaned").await.is_empty());
}

/// A request that a slow server does after its client has given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_made_after_its_request_was_abandoned_is_found_and_destroyed() {
    let authority = Authority::new("kms");
    let server = PyKmip::start(&authority);
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let own = client(&server, &authority, &identity);
    let open = async || {
        let mut read = here.store.read().await.unwrap();
        key_requests::of_provider(&mut read, provider.id).await.unwrap()
    };
    let (vm, request) = (VmId::new(), Uuid::from_u128(3));
    let sent = asked_of_one(vm, request);
    let put = async |noted: &KeyRequest| put(&here, provider.id, noted).await;
    put(&sent).await;
    // The task is not kept waiting: it has another key.
    let (other, _) = kms.create_key(vm, request).await.unwrap();
    here.note(vm, &other).await;
    let left = open().await.into_iter().find(|noted| noted.abandoned).expect("it is on record");
    assert_eq!((left.mark, left.sent.as_second()), (sent.mark, sent.sent.as_second()));
    // The watch finds nothing either, and keeps the request.
    let kmip = here.providers.kmip(provider.id).unwrap();
    kmip.catch_up().await.unwrap();
    assert!(open().await.contains(&left), "it was forgotten too soon");
    // It is made now, late.
    let text = |text: &str| Text::new(text).unwrap();
    let data = text(&sent.mark.to_string());
    let application = Some(ApplicationInformation { namespace: text("vmseal"), data });
    let late = own.create(Create { name: None, application }).await.unwrap();
    kmip.catch_up().await.unwrap();
    let gone = own.key_state(&late).await.unwrap_err();
    assert_eq!(gone.refusal(), Some(ResultReason::ItemNotFound));
    own.key_state(&KeyId::new(other.key_id.clone()).unwrap()).await.unwrap();
    assert!(open().await.iter().all(|noted| !noted.abandoned));
    // A key that does not exist after a long time was never created.
    put(&KeyRequest { sent: Timestamp::UNIX_EPOCH, mark: Uuid::from_u128(44), ..left }).await;
    kmip.catch_up().await.unwrap();
    assert!(open().await.iter().all(|noted| !noted.abandoned), "it is kept forever");
    assert!(here.events("key.orphaned").await.is_empty());
}

/// The answer to Get.
fn given(asked: &Asked, kek: &[u8]) -> Reaction {
    Reaction::Send(asked.done(|payload| material(payload, &asked.objects[0], kek)))
}

/// The properties of a key in the answer to Get.
fn material(payload: &mut Encoder, id: &str, kek: &[u8]) {
    payload.enumeration(Tag::OBJECT_TYPE, 2);
    payload.text(Tag::UNIQUE_IDENTIFIER, id);
    payload.structure(Tag::SYMMETRIC_KEY, |key| {
        key.structure(Tag::KEY_BLOCK, |block| {
            block.enumeration(Tag::KEY_FORMAT_TYPE, 1);
            block.structure(Tag::KEY_VALUE, |value| {
                value.bytes(Tag::KEY_MATERIAL, kek);
            });
        });
    });
}

/// A KMS in memory whose behaviour a test chooses.
fn scripted(
    authority: &Authority,
    locate: impl Fn() -> Vec<&'static str> + Send + Sync + 'static,
    takes_marks: bool,
    loses_first_create: bool,
) -> (ScriptedServer, Arc<Mutex<Vec<OperationCode>>>) {
    let asked_for = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked_for);
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    let server = ScriptedServer::start(&certificate, None, move |asked: &Asked| {
        let mut log = log.lock().unwrap();
        log.push(asked.operation);
        let creates = log.iter().filter(|code| **code == OperationCode::Create).count();
        drop(log);
        let id = |payload: &mut Encoder| payload.text(Tag::UNIQUE_IDENTIFIER, "1");
        match asked.operation {
            OperationCode::Create if creates == 1 && !takes_marks => {
                asked.refused(ResultReason::InvalidField)
            }
            OperationCode::Create if creates == 1 && loses_first_create => {
                Reaction::SendAndClose(Vec::new())
            }
            OperationCode::Locate => Reaction::Send(asked.done(|payload| {
                for id in locate() {
                    payload.text(Tag::UNIQUE_IDENTIFIER, id);
                }
            })),
            OperationCode::GetAttributes => Reaction::Send(asked.done(|payload| state(payload, 2))),
            OperationCode::Get => given(asked, &[7; 32]),
            _ => Reaction::Send(asked.done(id)),
        }
    });
    (server, asked_for)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_a_kms_may_have_made_is_reported_and_never_guessed() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let count = |log: &Mutex<Vec<OperationCode>>, code| {
        log.lock().unwrap().iter().filter(|asked| **asked == code).count()
    };
    // It finds something for every id, like one that ignores unknown attributes.
    let (server, log) = scripted(&authority, || vec!["9"], true, true);
    let here = Here::new().await;
    let (_, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let (vm, request) = (VmId::new(), Uuid::from_u128(1));
    let lost = kms.create_key(vm, request).await.unwrap_err();
    assert_eq!(lost.code, ErrorCode::Unreachable, "a task tries it again: {lost}");
    let (key, _) = kms.create_key(vm, request).await.unwrap();
    assert_eq!(key.key_id, "1", "a foreign key was taken for its own");
    assert_eq!((count(&log, OperationCode::Create), count(&log, OperationCode::Locate)), (2, 2));
    let orphans = here.events("key.orphaned").await;
    assert!(orphans.len() == 1 && orphans[0].contains("may have been made"), "{orphans:?}");

    // It says that it does not have the attribute: nothing was made, and the key goes without.
    let (server, log) = scripted(&authority, Vec::new, false, false);
    let (_, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    kms.create_key(vm, Uuid::from_u128(2)).await.unwrap();
    assert_eq!((count(&log, OperationCode::Create), count(&log, OperationCode::Locate)), (2, 0));
    assert_eq!(here.events("key.orphaned").await.len(), 1);

    // It created nothing, and says so.
    let (server, log) = scripted(&authority, Vec::new, true, true);
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    assert!(kms.create_key(vm, Uuid::from_u128(3)).await.is_err());
    let (key, _) = kms.create_key(vm, Uuid::from_u128(3)).await.unwrap();
    assert_eq!(count(&log, OperationCode::Create), 2);
    // The provider's monitor may have looked for it, too: no task has the request.
    assert!(count(&log, OperationCode::Locate) >= 1);
    assert_eq!(here.events("key.orphaned").await.len(), 1);
    // The id of a key that the inventory has already: a server that does not replicate.
    here.note(vm, &key).await;
    let twice = kms.create_key(VmId::new(), Uuid::from_u128(4)).await.unwrap_err();
    assert_eq!(twice.reason, Some(KeyFault::KeyMismatch), "{}: {twice}", provider.name);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_server_that_answers_serves_and_one_that_does_not_replicate_is_noticed() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let (mut one, two) = (PyKmip::start(&authority), PyKmip::start(&authority));
    let here = Here::new().await;
    let servers = [at("one", &one.endpoint()), at("two", &two.endpoint())];
    let (provider, kms) = here.add(&servers, &authority, &identity).await;
    let vm = VmId::new();
    let (key, _) = kms.create_key(vm, Uuid::from_u128(1)).await.unwrap();
    kms.get_key(vm, &key).await.unwrap();
    // Both give their first key the same id.
    let own = client(&two, &authority, &identity);
    let same = own.create(Create::default()).await.unwrap();
    assert_eq!(same.as_str(), key.key_id);
    own.activate(&same).await.unwrap();
    one.kill();
    let wrong = kms.get_key(vm, &key).await.unwrap_err();
    assert_eq!(wrong.reason, Some(KeyFault::KeyMismatch), "{wrong}");
    assert!(wrong.detail.contains("server 'two'"), "{wrong}");
    let degraded = ("provider-degraded".to_owned(), Some(KeyFault::KmsUnreachable));
    here.eventually("an alarm", async |here| here.alarms().await.contains(&degraded)).await;
    assert_eq!(here.providers.status(&provider), ProviderStatus::Degraded);
}

/// A key that one server does not have is not missing while another may have it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_counts_as_destroyed_only_when_every_server_says_so() {
    let authority = Authority::new("kms");
    let (one, mut two) = (PyKmip::start(&authority), PyKmip::start(&authority));
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    // Created while the second server was the provider's only one.
    let (vm, servers) = (VmId::new(), [at("two", &two.endpoint()), at("one", &one.endpoint())]);
    let (provider, kms) = here.add(&servers, &authority, &identity).await;
    let (key, _) = kms.create_key(vm, Uuid::from_u128(7)).await.unwrap();
    here.note(vm, &key).await;
    let mut write = here.store.write().await.unwrap();
    sqlx::query("UPDATE kmip_servers SET position = CASE alias WHEN 'one' THEN 10 ELSE 11 END")
        .execute(&mut *write)
        .await
        .unwrap();
    write.commit().await.unwrap();
    here.providers.kmip(provider.id).unwrap().load(None).await.unwrap();

    two.kill();
    kms.destroy_key(vm, "web", &key).await.unwrap();
    assert_eq!(here.events("key.destruction-pending").await.len(), 1);
    assert_eq!(here.events("key.destroyed").await.len(), 0);
    two.restart();
    // On a busy machine it may yet be silent for a while, and that is not taken for an answer.
    here.eventually("it is destroyed", async |here| {
        kms.destroy_key(vm, "web", &key).await.unwrap();
        !here.events("key.destroyed").await.is_empty()
    })
    .await;
    let destroyed = here.events("key.destroyed").await;
    // After an answer that came too late, the key is gone when it is requested again.
    let lost = here.events("key.destruction-pending").await.len() > 1;
    let told = destroyed[0].contains("'two'") || lost && destroyed[0].contains("already");
    assert!(destroyed.len() == 1 && told, "{destroyed:?}");
    let id = KeyId::new(key.key_id.clone()).unwrap();
    let gone = client(&two, &authority, &identity).key_state(&id).await.unwrap_err();
    assert_eq!(gone.refusal(), Some(ResultReason::ItemNotFound));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trust_is_in_the_certificate_that_an_operator_saw() {
    let clients = Authority::new("clients");
    let certificate = self_signed(&["kms.example"], Validity::Now);
    let server = PyKmip::start_with(&certificate, &clients);
    let here = Here::new().await;
    let servers = [at("one", &server.endpoint())];
    let added = here.providers.add_kmip("kms", &servers, Some(secret(PASSPHRASE)), "me");
    let provider = added.await.unwrap();
    let keys = here.providers.get(provider.id).unwrap();
    let reason =
        async || keys.get_key(VmId::new(), &reference(&provider, "1")).await.unwrap_err().reason;
    assert_eq!(reason().await, Some(KeyFault::NotTrusted));
    let shown = here.providers.shown_certificate(&provider, "one").await.unwrap();
    assert!(!shown.trusted && shown.names == ["kms.example"], "{shown:?}");
    let fingerprint = shown.certificate.fingerprint;
    let other = fingerprint.replace(['0', '1', '2', '3'], "4");
    let refused =
        here.providers.trust_certificate(&provider, "one", &other, "me").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::KeyMismatch);
    assert_eq!(here.providers.status(&provider), ProviderStatus::NeedsTrust);
    let bare = fingerprint.replace(':', "").to_lowercase();
    here.providers.check_certificate_trust(&provider, "one", &bare).await.unwrap();
    assert_eq!(here.providers.status(&provider), ProviderStatus::NeedsTrust, "it was tried only");
    here.providers.trust_certificate(&provider, "one", &bare, "me").await.unwrap();
    assert!(here.providers.shown_certificate(&provider, "one").await.unwrap().trusted);
    assert_eq!(reason().await, Some(KeyFault::NoClientCertificate));
    // A certificate of our own making, which this server's authority has not signed.
    here.providers.check_self_sign(&provider, new_name()).await.unwrap();
    assert!(here.providers.kmip_details(&provider).unwrap().client.is_none(), "it was tried only");
    let pem = here.providers.self_sign(&provider, new_name(), "me").await.unwrap();
    let details = here.providers.kmip_details(&provider).unwrap();
    assert_eq!(details.client.unwrap().subject, "CN=vmseal");
    assert!(pem.contains("BEGIN CERTIFICATE"));
    assert_eq!(here.providers.status(&provider), ProviderStatus::Failing);
    // Another key's certificate is refused, and nothing is changed by it.
    let foreign = clients.client("vmseal", Validity::Now);
    let of_foreign = |key, passphrase| NewCertificate {
        key,
        passphrase: Some(secret(passphrase)),
        ..new_certificate(&foreign.certificate)
    };
    let set = |new| here.providers.set_certificate(&provider, new, "me");
    let refused = set(of_foreign(None, PASSPHRASE)).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("certificate"));
    let key = || Some(foreign.private_key());
    let wrong = set(of_foreign(key(), "x")).await.unwrap_err();
    assert_eq!(wrong.code, ErrorCode::KeyMismatch);
    assert_eq!(here.providers.status(&provider), ProviderStatus::Failing);
    let try_out = |pass| here.providers.check_certificate(&provider, of_foreign(key(), pass));
    assert_eq!(try_out("x").await.unwrap_err().code, ErrorCode::KeyMismatch);
    try_out(PASSPHRASE).await.unwrap();
    assert_eq!(here.providers.status(&provider), ProviderStatus::Failing, "it was tried only");
    set(of_foreign(key(), PASSPHRASE)).await.unwrap();
    assert_eq!(here.providers.status(&provider), ProviderStatus::Normal);
    let files =
        std::fs::read_dir(here.directory.path().join("providers").join(provider.id.to_string()));
    assert_eq!(files.unwrap().count(), 1, "the former key is left");
}
