//! Servers that are added, removed, moved and tested, and the alarms about providers.

use super::*;
use crate::providers::kmip::ServerChange;
use crate::setup::expiry;
use crate::store::providers as inventory;

async fn change(here: &Here, provider: &Provider, change: ServerChange) -> Result<(), Problem> {
    here.providers.change_servers(provider, &change, "me").await
}

fn order(here: &Here, provider: &Provider) -> Vec<String> {
    let details = here.providers.kmip_details(provider).unwrap();
    details.servers.into_iter().map(|server| server.alias).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_test_says_whether_the_servers_replicate() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let (one, other) = (PyKmip::start(&authority), PyKmip::start(&authority));
    let here = Here::new().await;
    // One server under two names is a pair that replicates at once.
    let servers = [at("one", &one.endpoint()), at("two", &one.endpoint())];
    let (provider, _) = here.add(&servers, &authority, &identity).await;
    let test = async || here.providers.test(&provider, true, "me").await.unwrap();
    let keys = |tested: &vmseal_api::kmip::ProviderTest| -> Vec<_> {
        tested.servers.iter().map(|server| server.key).collect()
    };
    let tested = test().await;
    assert_eq!(keys(&tested), [Some(KmipKeyTested::Made), Some(KmipKeyTested::Read)]);
    assert_eq!(tested.replicate, Some(true));
    let own = client(&one, &authority, &identity);
    assert!(own.locate(Locate::default()).await.unwrap().is_empty(), "a key is left");

    let elsewhere = ServerChange::Set(at("two", &other.endpoint()));
    change(&here, &provider, elsewhere).await.unwrap();
    let tested = test().await;
    assert_eq!(keys(&tested), [Some(KmipKeyTested::Made), Some(KmipKeyTested::Missing)]);
    assert_eq!(tested.replicate, Some(false));
    // Without a key there is no result about keys, and none about a single server.
    let plain = here.providers.test(&provider, false, "me").await.unwrap();
    assert_eq!((keys(&plain), plain.replicate), (vec![None, None], None));
    change(&here, &provider, ServerChange::Remove("two".to_owned())).await.unwrap();
    assert_eq!(test().await.replicate, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_of_a_provider_change_while_it_is_used() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let server = PyKmip::start(&authority);
    let here = Here::new().await;
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let vm = VmId::new();
    let (key, _) = kms.create_key(vm, Uuid::from_u128(1)).await.unwrap();
    here.note(vm, &key).await;
    let two = || at("two", &server.endpoint());
    let said = here.providers.check_change_of_servers(&provider, &ServerChange::Add(two())).await;
    assert!(said.unwrap().contains("one, two"));
    assert_eq!(order(&here, &provider), ["one"], "it was tried only");
    change(&here, &provider, ServerChange::Add(two())).await.unwrap();
    assert_eq!(here.providers.status(&provider), ProviderStatus::Degraded, "it is not trusted");
    let degraded = ("provider-degraded".to_owned(), Some(KeyFault::NotTrusted));
    here.eventually("an alarm", async |here| here.alarms().await.contains(&degraded)).await;
    let authorities = authority.certificate().to_owned();
    here.providers.trust_authorities(&provider, "two", authorities, "me").await.unwrap();
    assert_eq!(here.providers.status(&provider), ProviderStatus::Normal);
    change(&here, &provider, ServerChange::Move("two".to_owned(), 1)).await.unwrap();
    assert_eq!(order(&here, &provider), ["two", "one"]);
    // Requests to a removed server are not looked for at another one under its name.
    let abandoned = KeyRequest { abandoned: true, ..asked_of_one(vm, Uuid::from_u128(9)) };
    put(&here, provider.id, &abandoned).await;
    change(&here, &provider, ServerChange::Remove("one".to_owned())).await.unwrap();
    assert_eq!(order(&here, &provider), ["two"]);
    kms.get_key(vm, &key).await.unwrap();
    here.eventually("its request is reported", async |here| {
        let orphans = here.events("key.orphaned").await;
        orphans.iter().any(|detail| detail.contains("one at 127.0.0.1 port"))
    })
    .await;
    let last = change(&here, &provider, ServerChange::Remove("two".to_owned())).await;
    assert_eq!(last.unwrap_err().code, ErrorCode::WrongState);
}

/// The requests that are open.
async fn open(here: &Here, provider: &Provider) -> Vec<KeyRequest> {
    let mut read = here.store.read().await.unwrap();
    key_requests::of_provider(&mut read, provider.id).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_asked_of_a_server_follows_it_to_its_new_address() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let server = PyKmip::start(&authority);
    let here = Here::new().await;
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    // A key that nobody wants, and one that a task goes on with.
    let (vm, unwanted, wanted) = (VmId::new(), Uuid::from_u128(1), Uuid::from_u128(2));
    let (gone, _) = kms.create_key(vm, unwanted).await.unwrap();
    let (kept, _) = kms.create_key(vm, wanted).await.unwrap();
    let noted = open(&here, &provider).await.into_iter().find(|it| it.request == unwanted).unwrap();
    put(&here, provider.id, &KeyRequest { abandoned: true, ..noted }).await;
    let moved = AddKmipServer { host: "localhost".to_owned(), ..at("one", &server.endpoint()) };
    change(&here, &provider, ServerChange::Set(moved)).await.unwrap();
    assert_eq!(kms.create_key(vm, wanted).await.unwrap().0, kept, "another key was made");
    here.eventually("the first is settled", async |here| {
        open(here, &provider).await.iter().all(|it| it.request == wanted)
    })
    .await;
    let own = client(&server, &authority, &identity);
    let state = async |key: &KeyReference| {
        own.key_state(&KeyId::new(key.key_id.clone()).unwrap()).await.map_err(|it| it.refusal())
    };
    here.eventually("it is destroyed", async |_| {
        state(&gone).await == Err(Some(ResultReason::ItemNotFound))
    })
    .await;
    assert_eq!(state(&kept).await, Ok(State::Active));
    assert!(here.events("key.orphaned").await.is_empty());
}

/// Servers count up, so that another KMS has other keys under the same ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_another_kms_at_the_new_address_are_neither_used_nor_destroyed() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let (server, other) = (PyKmip::start(&authority), PyKmip::start(&authority));
    let here = Here::new().await;
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let (vm, unwanted, wanted) = (VmId::new(), Uuid::from_u128(1), Uuid::from_u128(2));
    let own = client(&other, &authority, &identity);
    for request in [unwanted, wanted] {
        let (key, _) = kms.create_key(vm, request).await.unwrap();
        let foreign = own.create(Create::default()).await.unwrap();
        assert_eq!(foreign.as_str(), key.key_id);
        own.activate(&foreign).await.unwrap();
    }
    let noted = open(&here, &provider).await.into_iter().find(|it| it.request == unwanted).unwrap();
    put(&here, provider.id, &KeyRequest { abandoned: true, ..noted }).await;
    let elsewhere = ServerChange::Set(at("one", &other.endpoint()));
    change(&here, &provider, elsewhere).await.unwrap();
    let (made, _) = kms.create_key(vm, wanted).await.unwrap();
    assert_eq!(made.key_id, "3", "a foreign key was taken for its own");
    here.eventually("both are told of", async |here| {
        let told = here.events("key.orphaned").await;
        ["key '1'", "key '2'"].iter().all(|key| told.iter().any(|it| it.contains(key)))
    })
    .await;
    for foreign in ["1", "2"] {
        assert_eq!(own.key_state(&KeyId::new(foreign).unwrap()).await.unwrap(), State::Active);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sealed_default_provider_is_an_alarm() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let server = PyKmip::start(&authority);
    let here = Here::new().await;
    let (provider, _) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let sealed = ("provider-sealed".to_owned(), Some(KeyFault::ProviderSealed));
    let Here { directory, store, providers } = here;
    drop(providers);
    let again = async || Providers::open(Arc::clone(&store), directory.path(), None).await.unwrap();
    let providers = again().await;
    let here =
        Here { directory: tempfile::tempdir().unwrap(), store: Arc::clone(&store), providers };
    let mut write = store.write().await.unwrap();
    inventory::set_default(&mut write, provider.id).await.unwrap();
    write.commit().await.unwrap();
    here.providers.default_changed().await.unwrap();
    here.eventually("an alarm", async |here| here.alarms().await.contains(&sealed)).await;
    here.providers.unlock(&provider, secret(PASSPHRASE), "me").await.unwrap();
    here.eventually("no alarm", async |here| here.alarms().await.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_that_end_soon_are_alarms() {
    let authority = Authority::new("kms");
    let identity = authority.client("vmseal", Validity::Now);
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    let server = PyKmip::start_with(&certificate, &authority);
    let here = Here::new().await;
    let servers = [at("one", &server.endpoint()), at("two", &server.endpoint())];
    let (provider, _) = here.add(&servers, &authority, &identity).await;
    let shown = here.providers.shown_certificate(&provider, "two").await.unwrap().certificate;
    let pinned = here.providers.trust_certificate(&provider, "two", &shown.fingerprint, "me");
    pinned.await.unwrap();
    let kmip = here.providers.kmip(provider.id).unwrap();
    let raised = |now| kmip.about_certificates(&kmip.servers(), now);
    assert!(raised(Timestamp::now()).is_none());
    let client = here.providers.kmip_details(&provider).unwrap().client.unwrap();
    let last = client.not_after.max(shown.not_after);
    // Each is in the alarm: the client's, one that an authority signed, and a pinned one.
    let alarm = raised(last).unwrap();
    assert_eq!(alarm.code, expiry::CODE);
    for what in ["the client certificate", "of server 'one'", "of server 'two'"] {
        assert!(alarm.detail.contains(what), "{what}: {}", alarm.detail);
    }
}
