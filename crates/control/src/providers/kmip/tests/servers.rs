//! Several servers: which of them is asked, and what a missing key on one of them means.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::{StreamExt, stream};

use super::*;

/// States of keys, by KMIP's numbers.
const ACTIVE: u32 = 2;
const DESTROYED: u32 = 5;

/// Writes the results for each item that a request has, by the object that it is about: its state and
/// what its bytes are; none where there is no such key.
fn held(asked: &Asked, key: impl Fn(&str) -> Option<(u32, u8)>) -> Reaction {
    if asked.objects.is_empty() {
        return Reaction::Send(asked.done(|_| {}));
    }
    Reaction::Send(asked.response(asked.ids.len(), |message| {
        for (item, object) in asked.ids.iter().zip(&asked.objects) {
            match key(object) {
                None => asked.refusal(message, item, ResultReason::ItemNotFound),
                Some((number, byte)) => asked.result(message, item, |payload| {
                    if asked.operation == OperationCode::Get {
                        material(payload, object, &[byte; 32]);
                    } else {
                        payload.text(Tag::UNIQUE_IDENTIFIER, object);
                        payload.structure(Tag::ATTRIBUTE, |attribute| {
                            attribute.text(Tag::ATTRIBUTE_NAME, "State");
                            attribute.enumeration(Tag::ATTRIBUTE_VALUE, number);
                        });
                    }
                }),
            }
        }
    }))
}

/// A KMS with these keys: id, state, bytes.
fn holding(authority: &Authority, keys: &'static [(&'static str, u32, u8)]) -> ScriptedServer {
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    ScriptedServer::start(&certificate, None, move |asked: &Asked| {
        held(asked, |object| {
            keys.iter().find(|(id, ..)| *id == object).map(|(_, state, byte)| (*state, *byte))
        })
    })
}

/// The reference of a key whose bytes are all seven.
fn seven(here: &Here, provider: &Provider, vm: VmId, key_id: &str) -> KeyReference {
    let kek = SecretBytes::from_wiped(&mut [7; 32]).unwrap();
    let kmip = here.providers.kmip(provider.id).unwrap();
    let check = kmip.check(vm, key_id, &kek).unwrap();
    KeyReference { provider: provider.id, key_id: key_id.to_owned(), check }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_looked_for_at_every_server() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let one = holding(
        &authority,
        &[("other bytes", ACTIVE, 9), ("destroyed", DESTROYED, 7), ("gone", DESTROYED, 7)],
    );
    let two = holding(
        &authority,
        &[("second", ACTIVE, 7), ("other bytes", ACTIVE, 7), ("destroyed", ACTIVE, 7)],
    );
    let here = Here::new().await;
    let servers = [at("one", &one.endpoint()), at("two", &two.endpoint())];
    let (provider, kms) = here.add(&servers, &authority, &identity).await;
    let vm = VmId::new();
    for key_id in ["second", "other bytes", "destroyed"] {
        let given = kms.get_key(vm, &seven(&here, &provider, vm, key_id)).await.unwrap();
        assert!(given.kek.expose() == [7; 32] && given.fault.is_none(), "{key_id}");
    }
    let why = async |key_id| {
        let key = seven(&here, &provider, vm, key_id);
        kms.get_key(vm, &key).await.unwrap_err()
    };
    let missing = why("nowhere").await;
    assert_eq!(missing.reason, Some(KeyFault::KeyMissing));
    assert!(missing.detail.contains("none of its servers: 'one', 'two'"), "{missing}");
    assert!(!missing.detail.contains("data is lost"), "{missing}");
    let destroyed = why("gone").await;
    assert_eq!(destroyed.reason, Some(KeyFault::KeyDestroyed));
    assert!(destroyed.detail.contains("'one' says that it is destroyed"), "{destroyed}");
    // The watch says the same, of keys that VMs have.
    let kmip = here.providers.kmip(provider.id).unwrap();
    let used = ["second", "destroyed", "gone", "nowhere"].map(|id| {
        let id = KeyId::new(id).unwrap();
        (id.clone(), format!("VM of {id}"))
    });
    let faults = kmip.faults_of(used.to_vec()).await.unwrap();
    let faults: Vec<_> = faults.iter().map(|(id, _, why)| (id.as_str(), why.reason)).collect();
    let wanted = [("gone", Some(KeyFault::KeyDestroyed)), ("nowhere", Some(KeyFault::KeyMissing))];
    assert_eq!(faults, wanted);
    // A server that has not answered may have it.
    drop(two);
    for key_id in ["second", "gone"] {
        let silent = why(key_id).await;
        assert_eq!(silent.reason, Some(KeyFault::KmsUnreachable), "{silent}");
        assert!(silent.detail.contains("'two' does not answer"), "{silent}");
    }
    assert!(why("second").await.detail.contains("'one' does not have it"));
}

/// Accepts connections and never sends anything, like a hung machine; stopped when dropped.
struct Hung {
    port: u16,
    accepted: Arc<AtomicUsize>,
    stopped: Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Hung {
    fn on(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let accepted = Arc::new(AtomicUsize::new(0));
        let stopped = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (count, stop) = (Arc::clone(&accepted), Arc::clone(&stopped));
        let thread = std::thread::spawn(move || {
            let mut kept: Vec<TcpStream> = Vec::new();
            while let Ok((socket, _)) = listener.accept() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                count.fetch_add(1, Ordering::SeqCst);
                kept.push(socket);
            }
        });
        Self { port, accepted, stopped, thread: Some(thread) }
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        // This wakes the thread, which then ends.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Each key costs a timeout if the hung server is asked for it first. Counts requests instead of measuring time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_is_not_asked_for_every_key() {
    const KEYS: usize = 1000;
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    let all = |asked: &Asked| held(asked, |_| Some((ACTIVE, 7)));
    let (one, two) = (
        ScriptedServer::start(&certificate, None, all),
        ScriptedServer::start(&certificate, None, all),
    );
    let here = Here::new().await;
    let servers = [at("one", &one.endpoint()), at("two", &two.endpoint())];
    let (provider, kms) = here.add(&servers, &authority, &identity).await;
    let vm = VmId::new();
    assert_eq!(here.providers.status(&provider), ProviderStatus::Normal);
    let port = one.endpoint().port();
    drop(one);
    let hung = Hung::on(port);
    // As many at a time as are delivered to a host.
    let given = stream::iter(0..KEYS).map(|number| {
        let key = seven(&here, &provider, vm, &format!("key {number}"));
        let kms = Arc::clone(&kms);
        async move { kms.get_key(vm, &key).await.map(drop) }
    });
    let given: Vec<_> = given.buffer_unordered(4).collect().await;
    assert!(given.iter().all(Result::is_ok), "{given:?}");
    let asked = hung.accepted.load(Ordering::SeqCst);
    assert!(asked < KEYS / 5, "the server that hangs was asked {asked} times for {KEYS} keys");
    // It is known to fail, and is asked first again as soon as it answers.
    here.eventually("it is degraded", async |here| {
        here.providers.status(&provider) == ProviderStatus::Degraded
    })
    .await;
    drop(hung);
    let log = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&log);
    let _one = ScriptedServer::start_on(port, &certificate, None, move |asked: &Asked| {
        if asked.operation == OperationCode::Get {
            count.fetch_add(1, Ordering::SeqCst);
        }
        match asked.operation {
            OperationCode::DiscoverVersions => {
                asked.versions(&vmseal_kmip::ProtocolVersion::SPOKEN)
            }
            _ => all(asked),
        }
    });
    here.providers.kmip(provider.id).unwrap().look_now();
    here.eventually("it is well", async |here| {
        here.providers.status(&provider) == ProviderStatus::Normal
    })
    .await;
    here.eventually("it is asked first", async |here| {
        kms.get_key(vm, &seven(here, &provider, vm, "key 1")).await.unwrap();
        log.load(Ordering::SeqCst) > 0
    })
    .await;
}

/// A request whose server hangs after it was sent does not delay the answer of another server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_made_elsewhere_when_the_server_that_was_asked_hangs() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    let one = ScriptedServer::start(&certificate, None, |asked: &Asked| match asked.operation {
        OperationCode::Create | OperationCode::Locate => Reaction::SendAndHang(Vec::new()),
        _ => held(asked, |_| Some((ACTIVE, 7))),
    });
    let two = PyKmip::start(&authority);
    let here = Here::new().await;
    let servers = [at("one", &one.endpoint()), at("two", &two.endpoint())];
    let (provider, kms) = here.add(&servers, &authority, &identity).await;
    let (vm, request) = (VmId::new(), Uuid::from_u128(1));
    let lost = kms.create_key(vm, request).await.unwrap_err();
    assert_eq!(lost.reason, Some(KeyFault::KmsTimeout), "{lost}");
    let (key, _) = kms.create_key(vm, request).await.unwrap();
    let own = client(&two, &authority, &identity);
    own.key_state(&KeyId::new(key.key_id.clone()).unwrap()).await.unwrap();
    // The request to the first one, which may have created a key, stays recorded.
    let mut read = here.store.read().await.unwrap();
    let left = key_requests::abandoned(&mut read, provider.id).await.unwrap();
    assert_eq!(left.iter().map(|it| it.server.as_str()).collect::<Vec<_>>(), ["one"]);
}

/// A KMS that counts up the ids of its keys, and records what it does with them.
struct Making {
    server: ScriptedServer,
    made: Arc<AtomicUsize>,
    done: Arc<Mutex<Vec<(OperationCode, String)>>>,
}

impl Making {
    /// `odd` answers the requests that this server handles differently from a good one.
    fn start(
        authority: &Authority,
        odd: impl Fn(&Asked) -> Option<Reaction> + Send + Sync + 'static,
    ) -> Self {
        let made = Arc::new(AtomicUsize::new(0));
        let done = Arc::new(Mutex::new(Vec::new()));
        let (count, log) = (Arc::clone(&made), Arc::clone(&done));
        let certificate = authority.server(&["127.0.0.1"], Validity::Now);
        let server = ScriptedServer::start(&certificate, None, move |asked: &Asked| {
            if let Some(reaction) = odd(asked) {
                return reaction;
            }
            let object = asked.objects.first().cloned().unwrap_or_default();
            let destroyed = log.lock().unwrap().contains(&(OperationCode::Destroy, object.clone()));
            match asked.operation {
                OperationCode::Create => {
                    let id = (count.fetch_add(1, Ordering::SeqCst) + 1).to_string();
                    Reaction::Send(asked.done(|payload| payload.text(Tag::UNIQUE_IDENTIFIER, &id)))
                }
                OperationCode::GetAttributes | OperationCode::Get if !destroyed => {
                    held(asked, |_| Some((ACTIVE, 7)))
                }
                OperationCode::GetAttributes | OperationCode::Get => held(asked, |_| None),
                operation => {
                    log.lock().unwrap().push((operation, object));
                    Reaction::Send(asked.done(|_| {}))
                }
            }
        });
        Self { server, made, done }
    }

    /// The keys that were made and not revoked and then destroyed.
    fn left(&self) -> Vec<String> {
        let done = self.done.lock().unwrap();
        let at = |operation, id: &String| {
            done.iter().position(|(what, of)| *what == operation && of == id)
        };
        let made = (1..=self.made.load(Ordering::SeqCst)).map(|number| number.to_string());
        made.filter(|id| match (at(OperationCode::Revoke, id), at(OperationCode::Destroy, id)) {
            (Some(revoked), Some(destroyed)) => revoked > destroyed,
            _ => true,
        })
        .collect()
    }
}

/// The answer to Get of a server that releases keys only wrapped.
fn wrapped(asked: &Asked) -> Reaction {
    Reaction::Send(asked.done(|payload| {
        payload.enumeration(Tag::OBJECT_TYPE, 2);
        payload.text(Tag::UNIQUE_IDENTIFIER, &asked.objects[0]);
        payload.structure(Tag::SYMMETRIC_KEY, |key| {
            key.structure(Tag::KEY_BLOCK, |block| {
                block.enumeration(Tag::KEY_FORMAT_TYPE, 1);
                block.bytes(Tag::KEY_VALUE, &[1; 40]);
            });
        });
    }))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_cannot_be_used_is_not_left_at_the_server() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let gives_wrapped = Making::start(&authority, |asked| {
        (asked.operation == OperationCode::Get).then(|| wrapped(asked))
    });
    let without_states = Making::start(&authority, |asked| {
        (asked.operation == OperationCode::GetAttributes)
            .then(|| asked.refused(ResultReason::OperationNotSupported))
    });
    for (making, fault) in
        [(&gives_wrapped, KeyFault::KeyUnusable), (&without_states, KeyFault::KmsRefuses)]
    {
        let servers = [at("one", &making.server.endpoint())];
        let (provider, kms) = here.add(&servers, &authority, &identity).await;
        // A task tries again, and gives up.
        for _ in 0..3 {
            let refused = kms.create_key(VmId::new(), Uuid::from_u128(1)).await.unwrap_err();
            assert_eq!(refused.reason, Some(fault), "{refused}");
            assert_eq!(making.left(), [""; 0], "{fault:?}");
        }
        assert_eq!(making.made.load(Ordering::SeqCst), 3);
        kms.abandon(Uuid::from_u128(1)).await.unwrap();
        // A test creates one, too.
        let tested = here.providers.test(&provider, true, "me").await.unwrap();
        let tested = tested.servers;
        assert!(tested[0].seen.problem.is_some(), "{tested:?}");
        assert_eq!(making.made.load(Ordering::SeqCst), 4);
        here.eventually("the key of the test is gone", async |here| {
            let mut read = here.store.read().await.unwrap();
            let open = key_requests::of_provider(&mut read, provider.id).await.unwrap();
            open.is_empty() && making.left().is_empty()
        })
        .await;
        here.providers.remove(&provider, "me").await.unwrap();
    }
    assert!(here.events("key.orphaned").await.is_empty());
}
