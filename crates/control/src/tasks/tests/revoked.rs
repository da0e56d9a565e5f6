//! Keys that their KMS has deactivated or marked as compromised: a running VM runs on, one that is off is locked, and
//! another key unlocks it.

use std::time::Duration;

use vmseal_api::host::KeyState;
use vmseal_api::id::ProviderId;
use vmseal_api::key_fault::KeyFault;
use vmseal_api::kmip::AddKmipServer;
use vmseal_api::request::{RecryptVm, StartVm};
use vmseal_kmip::RevocationReason;
use vmseal_kmip::client::{Client, Settings};
use vmseal_kmip::operation::KeyId;
use vmseal_kmip::testing::{Authority, PyKmip, Validity};
use vmseal_secret::SecretBytes;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::providers::kmip::NewCertificate;
use crate::services::{self, Caller};
use crate::store::policies;

/// A fixture whose VMs have their keys from a real KMS, and a client of the same identity.
pub struct WithKms {
    pub fixture: Fixture,
    pub client: Arc<Client>,
    pub provider: ProviderId,
    pub kms: Arc<Mutex<PyKmip>>,
}

impl WithKms {
    pub async fn new() -> Self {
        let secret = |text: &str| SecretBytes::from_wiped(&mut text.as_bytes().to_vec()).unwrap();
        let authority = Authority::new("kms");
        let kms = PyKmip::start(&authority);
        let identity = authority.client("vmseal", Validity::Now);
        let mut fixture = Fixture::new().await;
        let (host, port) = (kms.endpoint().host().to_owned(), kms.port());
        let servers = [AddKmipServer { alias: "one".to_owned(), host, port }];
        let added = fixture.providers.add_kmip(
            "kms",
            &servers,
            Some(secret("pass, as in the tests")),
            "me",
        );
        let provider = added.await.unwrap();
        let authorities = authority.certificate().to_owned();
        fixture.providers.trust_authorities(&provider, "one", authorities, "me").await.unwrap();
        let (certificate, key) = (identity.certificate.clone(), Some(identity.private_key()));
        let passphrase = Some(secret("pass, as in the tests"));
        let (replace, force) = (false, false);
        let new = NewCertificate { certificate, key, passphrase, replace, force };
        fixture.providers.set_certificate(&provider, new, "me").await.unwrap();
        fixture.use_provider(provider.id);
        let settings = Settings::new(kms.endpoint(), authority.trust(), identity.identity());
        let client = Arc::new(Client::new(settings).unwrap());
        Self { fixture, client, provider: provider.id, kms: Arc::new(Mutex::new(kms)) }
    }

    /// Takes a VM's key out of use, and waits until the server notices.
    async fn revoke(&self, vm: VmId, reason: RevocationReason) {
        let key = self.fixture.vm(vm).await.unwrap().key.unwrap();
        self.client.revoke(&KeyId::new(key.key_id.clone()).unwrap(), reason).await.unwrap();
        // This reads the key's state, and wakes the watch.
        self.fixture.providers.get(key.provider).unwrap().get_key(vm, &key).await.unwrap();
    }

    /// A VM that is off with a key that opens existing data alone: the plan of a start is refused as the start is, and that of a
    /// recryption is not.
    async fn plans_but_a_start(&self, vm: VmId, name: &str, fault: KeyFault) {
        let fixture = &self.fixture;
        let is_locked = async || {
            let view = fixture.hosts.view(fixture.host);
            view.vm(vm).is_some_and(|seen| seen.key == KeyState::Missing).then_some(())
        };
        fixture.eventually("its host is shown without the key", is_locked).await;
        let (services, me) =
            (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
        let start = services::vms::start(&services, &me, name, StartVm::default(), true).await;
        let refused = start.unwrap_err();
        assert_eq!((refused.code, refused.reason), (ErrorCode::Locked, Some(fault)), "{refused}");
        let recrypt = RecryptVm::default();
        let planned = services::recrypt::recrypt(&services, &me, name, recrypt, true).await;
        assert!(matches!(planned, Ok(services::Outcome::Planned(_))), "{planned:?}");
    }

    pub async fn until(&self, code: &str, vm: &str, reason: Option<KeyFault>) {
        let what = format!("{code} {vm} {reason:?}");
        self.fixture
            .eventually(&what, async || {
                (self.fixture.reason(code, vm).await.flatten() == reason).then_some(())
            })
            .await;
    }

    pub async fn done(&self, operation: Operation, vm: &str) {
        let what = format!("{operation:?}");
        let ended = self.fixture.ended(self.fixture.begin(operation, vm).await).await;
        assert_eq!(ended.state, TaskState::Done, "{what}: {:?}", ended.problem);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_with_a_revoked_key_goes_on_while_it_runs_and_is_locked_until_it_has_another() {
    let here = WithKms::new().await;
    let fixture = &here.fixture;
    for (reason, fault, name) in [
        (RevocationReason::CessationOfOperation, KeyFault::KeyDeactivated, "old"),
        (RevocationReason::KeyCompromise, KeyFault::KeyCompromised, "known"),
    ] {
        let (on, off) = (format!("{name}-on"), format!("{name}-off"));
        let (running, stopped) =
            (fixture.running(&on).await, fixture.made(&off, "encrypted").await);
        here.revoke(running, reason).await;
        here.revoke(stopped, reason).await;
        here.until("key-state", &on, Some(fault)).await;
        here.until("key-state", &off, Some(fault)).await;
        // Its host had the key.
        here.until("vm-locked", &off, Some(fault)).await;
        fixture
            .eventually("its host has the key no more", async || {
                (!fixture.agent.keys_held().contains(&stopped)).then_some(())
            })
            .await;
        // After any restart, the running VM has its key.
        fixture.agent.restart();
        fixture.assert_whole(running, Power::Running, &on).await;
        here.until("vm-locked", &off, Some(fault)).await;
        assert_eq!(fixture.reason("vm-locked", &on).await, None, "{on}");

        let refused =
            fixture.begin(Operation::StartVm { vm: stopped, boot_once: None }, &off).await;
        let problem = fixture.ended(refused).await.problem.unwrap();
        assert_eq!((problem.code, problem.reason), (ErrorCode::Locked, Some(fault)), "{problem}");
        assert!(problem.detail.contains("vmseal vm recrypt"), "{problem}");
        assert!(!fixture.agent.running().contains(&stopped), "{off} was started");
        here.plans_but_a_start(stopped, &off, fault).await;

        // Work that replaces the key is done.
        let disk = fixture.disks(stopped).await[0].id;
        let (to, format) = (format!("/exports/{name}.raw").into(), ExportFormat::Raw);
        let export = Operation::ExportDisk {
            vm: stopped,
            disk,
            to,
            format,
            passphrase: None,
            snapshot: None,
        };
        here.done(export, &off).await;
        let old = fixture.vm(stopped).await.unwrap().key.unwrap();
        let recrypt = Operation::RecryptVm { vm: stopped, old, provider: here.provider };
        here.done(recrypt, &off).await;
        here.until("vm-locked", &off, None).await;
        here.done(Operation::StartVm { vm: stopped, boot_once: None }, &off).await;
        // One that stops needs another key, too.
        let stop = Operation::StopVm { vm: running, force: true, timeout_seconds: 5 };
        here.done(stop, &on).await;
        here.until("vm-locked", &on, Some(fault)).await;
        // New data keys are not put under it, and what it has encrypted is decrypted.
        let deep = fixture
            .begin(Operation::DeepRecryptVm { vm: running, in_place: false, disks: vec![] }, &on)
            .await;
        let problem = fixture.ended(deep).await.problem.unwrap();
        assert_eq!((problem.code, problem.reason), (ErrorCode::Locked, Some(fault)), "{problem}");
        let plain = policies::find(&mut fixture.store.read().await.unwrap(), "plain").await;
        let policy = plain.unwrap().unwrap().id;
        let decrypt = Operation::DecryptVm { vm: running, policy, in_place: false, disks: vec![] };
        here.done(decrypt, &on).await;
        assert_eq!(fixture.vm(running).await.unwrap().key, None);
        here.until("vm-locked", &on, None).await;
        // Longer than the watch's interval, so that it does not see by chance that they are gone.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for vm in [running, stopped] {
            if vm == stopped {
                let stop = Operation::StopVm { vm, force: true, timeout_seconds: 5 };
                here.done(stop, &off).await;
            }
            here.done(Operation::DeleteVm { vm, was: Lifecycle::Ready }, name).await;
        }
        fixture
            .eventually("no alarms", async || fixture.alarms().await.is_empty().then_some(()))
            .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_made_with_a_key_that_was_revoked_meanwhile() {
    let mut here = WithKms::new().await;
    let (client, seen) = (Arc::clone(&here.client), Arc::new(AtomicU32::new(0)));
    let count = Arc::clone(&seen);
    let faults: Faults = Arc::new(move |step, state, point| {
        let here = (step, state, point) == ("deliver-key", TaskState::Running, FaultPoint::Before);
        if here && count.fetch_add(1, Ordering::SeqCst) == 0 {
            tokio::task::block_in_place(|| {
                tokio::runtime::Handle::current().block_on(async {
                    let keys = client.locate(Default::default()).await.unwrap();
                    let reason = RevocationReason::CessationOfOperation;
                    client.revoke(&keys[0], reason).await.unwrap();
                });
            });
        }
        Fault::None
    });
    here.fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    let (vm, task) = here.fixture.create("new", "encrypted").await;
    let ended = here.fixture.ended(task).await;
    assert_eq!(seen.load(Ordering::SeqCst), 1, "it was not revoked in time");
    let problem = ended.problem.unwrap();
    assert_eq!(ended.state, TaskState::Failed, "{problem}");
    assert_eq!(problem.reason, Some(KeyFault::KeyDeactivated), "{problem}");
    here.fixture.assert_nothing_left(vm, "new").await;
}
