//! The watch: one failure does not prevent its other work.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// The detail of the alarm of this kind.
async fn detail(here: &Here, code: &str) -> Option<String> {
    let raised = alarms::list(&mut here.store.read().await.unwrap()).await.unwrap();
    raised.into_iter().find(|alarm| alarm.code == code).map(|alarm| alarm.detail)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stuck_destruction_does_not_delay_others_and_is_an_alarm() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    let repaired = Arc::new(AtomicBool::new(false));
    let destroyed = Arc::new(Mutex::new(Vec::new()));
    let (is_repaired, gone) = (Arc::clone(&repaired), Arc::clone(&destroyed));
    // A role that may not Locate, and a key that was imported as something else.
    let server = ScriptedServer::start(&certificate, None, move |asked: &Asked| {
        let repaired = is_repaired.load(Ordering::SeqCst);
        match asked.operation {
            OperationCode::Locate if repaired => Reaction::Send(asked.done(|_| {})),
            OperationCode::Locate => asked.refused(ResultReason::PermissionDenied),
            OperationCode::GetAttributes => Reaction::Send(asked.done(|payload| {
                payload.structure(Tag::ATTRIBUTE, |attribute| {
                    attribute.text(Tag::ATTRIBUTE_NAME, "State");
                    attribute.enumeration(Tag::ATTRIBUTE_VALUE, 2);
                });
            })),
            OperationCode::Get if asked.objects == ["0 short"] && !repaired => {
                given(asked, &[7; 16])
            }
            OperationCode::Get => given(asked, &[7; 32]),
            code => {
                if code == OperationCode::Destroy {
                    gone.lock().unwrap().extend(asked.objects.iter().cloned());
                }
                Reaction::Send(asked.done(|_| {}))
            }
        }
    });
    let here = Here::new().await;
    let (provider, _) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let kmip = here.providers.kmip(provider.id).unwrap();
    let kek = SecretBytes::from_wiped(&mut [7; 32]).unwrap();
    let vm = VmId::new();
    let mut write = here.store.write().await.unwrap();
    for key_id in ["0 short", "1 whole"] {
        let (key_id, check) = (key_id.to_owned(), kmip.check(vm, key_id, &kek).unwrap());
        let key = KeyReference { provider: provider.id, key_id, check };
        keys::set_unwanted(&mut write, vm, &key).await.unwrap();
    }
    let stuck = KeyRequest {
        request: Uuid::from_u128(5),
        mark: Uuid::from_u128(55),
        sent: Timestamp::UNIX_EPOCH,
        vm,
        server: "one".to_owned(),
        marked: true,
        key_id: None,
        abandoned: true,
        moved: false,
    };
    key_requests::put(&mut write, provider.id, &stuck).await.unwrap();
    write.commit().await.unwrap();
    kmip.look_now();
    here.eventually("the other key is destroyed", async |here| {
        here.events("key.destroyed").await.len() == 1
    })
    .await;
    assert_eq!(*destroyed.lock().unwrap(), ["1 whole"]);
    let code = "keys-await-destruction";
    // A check may have begun before all of them existed.
    here.eventually("an alarm", async |here| {
        detail(here, code).await.is_some_and(|told| told.contains("still exist: 2"))
    })
    .await;
    let told = detail(&here, code).await.unwrap();
    for part in ["key '0 short'", &stuck.mark.to_string(), "refuses Locate"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let wanted = (code.to_owned(), Some(KeyFault::KmsDenies));
    assert_eq!(here.alarms().await, [wanted], "nothing else is wrong");
    repaired.store(true, Ordering::SeqCst);
    kmip.look_now();
    here.eventually("no alarm", async |here| here.alarms().await.is_empty()).await;
    assert_eq!(*destroyed.lock().unwrap(), ["1 whole", "0 short"]);
}

/// A server that destroys a key at once, but answers late.
struct Slow {
    server: ScriptedServer,
    gone: Arc<AtomicBool>,
    /// It was asked for the key after that.
    again: Arc<AtomicBool>,
}

impl Slow {
    fn start(certificate: &Issued) -> Self {
        let (gone, again) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (is_gone, asked_again) = (Arc::clone(&gone), Arc::clone(&again));
        let server = ScriptedServer::start(certificate, None, move |asked: &Asked| {
            let id = |payload: &mut Encoder| payload.text(Tag::UNIQUE_IDENTIFIER, "1");
            match asked.operation {
                OperationCode::GetAttributes | OperationCode::Get
                    if is_gone.load(Ordering::SeqCst) =>
                {
                    asked_again.store(true, Ordering::SeqCst);
                    asked.refused(ResultReason::ItemNotFound)
                }
                OperationCode::GetAttributes => {
                    Reaction::Send(asked.done(|payload| state(payload, 2)))
                }
                OperationCode::Get => given(asked, &[7; 32]),
                OperationCode::Destroy => {
                    is_gone.store(true, Ordering::SeqCst);
                    Reaction::SendLate(Duration::from_millis(500), asked.done(id))
                }
                _ => Reaction::Send(asked.done(id)),
            }
        });
        Self { server, gone, again }
    }

    async fn is_destroying(&self, here: &Here) {
        here.eventually("asked to destroy it", async |_| self.gone.load(Ordering::SeqCst)).await;
    }

    fn was_not_asked_again(&self) {
        let again = self.again.load(Ordering::SeqCst);
        assert!(!again, "the server was asked for a key that is destroyed");
    }
}

/// For example the watch and a task; the second one does not report that the key was already gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_two_destroy_at_once_is_destroyed_by_one() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let slow = Slow::start(&authority.server(&["127.0.0.1"], Validity::Now));
    let here = Here::new().await;
    let (provider, kms) =
        here.add(&[at("one", &slow.server.endpoint())], &authority, &identity).await;
    let kek = SecretBytes::from_wiped(&mut [7; 32]).unwrap();
    let (vm, key_id) = (VmId::new(), "1".to_owned());
    let check = here.providers.kmip(provider.id).unwrap().check(vm, &key_id, &kek).unwrap();
    let key = KeyReference { provider: provider.id, key_id, check };
    let second = async {
        slow.is_destroying(&here).await;
        kms.destroy_key(vm, "web", &key).await
    };
    let (first, second) = tokio::join!(kms.destroy_key(vm, "web", &key), second);
    assert_eq!((first, second), (Ok(()), Ok(())));
    let told = here.events("key.destroyed").await;
    assert!(told.len() == 1 && told[0].ends_with("destroyed at server 'one'"), "{told:?}");
    assert!(here.events("key.destruction-pending").await.is_empty());
    slow.was_not_asked_again();
}

/// The key of a test is unwanted from the beginning: the watch may find it while the test destroys it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_of_a_test_is_left_to_the_test_while_that_destroys_it() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let slow = Slow::start(&authority.server(&["127.0.0.1"], Validity::Now));
    let here = Here::new().await;
    let (provider, _) =
        here.add(&[at("one", &slow.server.endpoint())], &authority, &identity).await;
    let kmip = here.providers.kmip(provider.id).unwrap();
    let watch = async {
        slow.is_destroying(&here).await;
        kmip.catch_up().await
    };
    let (tested, undone) = tokio::join!(here.providers.test(&provider, true, "me"), watch);
    let tested = tested.unwrap();
    let tested = tested.servers;
    let made = tested[0].key == Some(KmipKeyTested::Made);
    assert!(made && tested[0].seen.problem.is_none(), "{tested:?}");
    assert!(undone.unwrap().is_empty());
    let told = here.events("provider.key-tested").await;
    assert!(told.len() == 1 && told[0].starts_with("key '1' was made, read and destroyed"));
    let destroyed = here.events("key.destroyed").await;
    assert!(destroyed.is_empty(), "reported as if it had been gone before: {destroyed:?}");
    slow.was_not_asked_again();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removing_a_provider_reports_every_key_that_may_be_left() {
    use crate::operation::Operation;
    use crate::tasks::Engine;
    let authority = Authority::new("kms");
    let mut server = PyKmip::start(&authority);
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let (provider, _) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    server.kill();
    let mut write = here.store.write().await.unwrap();
    for (number, key_id, abandoned) in [(1, Some("17"), true), (2, None, false)] {
        let request = KeyRequest {
            request: Uuid::from_u128(number),
            mark: Uuid::from_u128(10 * number),
            sent: Timestamp::now(),
            vm: VmId::new(),
            server: "one".to_owned(),
            marked: true,
            key_id: key_id.map(str::to_owned),
            abandoned,
            moved: false,
        };
        key_requests::put(&mut write, provider.id, &request).await.unwrap();
    }
    let old = reference(&provider, "1");
    let old = KeyReference { provider: vmseal_api::id::ProviderId::new(), ..old };
    let recrypt = Operation::RecryptVm { vm: VmId::new(), old, provider: provider.id };
    let mut task = Engine::record(&mut write, recrypt, "web", "me").await.unwrap();
    write.commit().await.unwrap();
    let refused = here.providers.remove(&provider, "me").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::InUse);
    assert!(refused.detail.contains(&task.id.to_string()), "{refused}");
    assert!(here.events("key.orphaned").await.is_empty());
    let mut write = here.store.write().await.unwrap();
    task.state = vmseal_api::model::TaskState::Failed;
    task.ended = Some(Timestamp::now());
    crate::store::tasks::update(&mut write, &task).await.unwrap();
    write.commit().await.unwrap();
    here.providers.remove(&provider, "me").await.unwrap();
    let told = here.events("key.orphaned").await;
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].contains("key '17'") && told[1].contains(&Uuid::from_u128(20).to_string()));
    let mut read = here.store.read().await.unwrap();
    assert_eq!(key_requests::of_provider(&mut read, provider.id).await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_of_a_test_is_destroyed_despite_failures_and_disconnects() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    let repaired = Arc::new(AtomicBool::new(false));
    let destroyed = Arc::new(Mutex::new(Vec::new()));
    let (is_repaired, gone) = (Arc::clone(&repaired), Arc::clone(&destroyed));
    let server = ScriptedServer::start(&certificate, None, move |asked: &Asked| {
        let id = |payload: &mut Encoder| payload.text(Tag::UNIQUE_IDENTIFIER, "1");
        match asked.operation {
            OperationCode::GetAttributes => Reaction::Send(asked.done(|payload| state(payload, 2))),
            OperationCode::Get => given(asked, &[7; 32]),
            OperationCode::Revoke if !is_repaired.load(Ordering::SeqCst) => {
                asked.refused(ResultReason::PermissionDenied)
            }
            OperationCode::Create => Reaction::SendLate(Duration::from_millis(300), asked.done(id)),
            OperationCode::Destroy => {
                gone.lock().unwrap().extend(asked.objects.iter().cloned());
                Reaction::Send(asked.done(id))
            }
            _ => Reaction::Send(asked.done(id)),
        }
    });
    let here = Here::new().await;
    let (provider, _) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let tested = here.providers.test(&provider, true, "me").await.unwrap();
    let tested = tested.servers;
    let problem = tested[0].seen.problem.clone().unwrap();
    assert!(tested[0].key.is_none() && problem.reason == Some(KeyFault::KmsDenies), "{problem}");
    assert!(problem.detail.contains("key '1'"), "{problem}");
    here.eventually("an alarm", async |here| {
        detail(here, "keys-await-destruction").await.is_some()
    })
    .await;
    repaired.store(true, Ordering::SeqCst);
    here.providers.kmip(provider.id).unwrap().look_now();
    here.eventually("no alarm", async |here| here.alarms().await.is_empty()).await;
    assert_eq!(*destroyed.lock().unwrap(), ["1"]);

    // The next id is the same at this server: another inventory.
    let here = Here::new().await;
    let (provider, _) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let caller = here.providers.test(&provider, true, "me");
    assert!(tokio::time::timeout(Duration::from_millis(150), caller).await.is_err());
    here.eventually("it is brought to its end", async |here| {
        here.events("provider.key-tested").await.len() == 1
    })
    .await;
    assert_eq!(*destroyed.lock().unwrap(), ["1", "1"]);
}
