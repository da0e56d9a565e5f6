//! The life cycle of a key at a real server (PyKMIP), and which client may do what with it.
#![allow(clippy::unwrap_used)] // in tests a panic is the report

mod server;

use vmseal_kmip::client::{Client, Error, NewKey};
use vmseal_kmip::message::Outcome;
use vmseal_kmip::operation::{ApplicationInformation, Create, KeyId, Locate, Text};
use vmseal_kmip::{OperationCode, ProtocolVersion, ResultReason, RevocationReason, State};

use server::{AUTHORITY, client, client_as, settings};

fn text(text: &str) -> Text {
    Text::new(text).unwrap()
}

fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> ResultReason {
    let error = result.unwrap_err();
    error.refusal().unwrap_or_else(|| panic!("not refused, but: {error}"))
}

#[tokio::test]
async fn a_key_is_made_used_and_destroyed() {
    let client = client();
    let new = NewKey {
        attributes: vec![
            (text("product"), text("vmseal")),
            (text("cluster"), text("test")),
            (text("version"), text("1")),
        ],
        ..NewKey::default()
    };
    let made = client.create_key(new).await.unwrap();
    // PyKMIP has no AddAttribute; the key is usable without it.
    for outcome in made.attributes.unwrap() {
        assert!(matches!(outcome, Outcome::Refused(_)), "{outcome:?}");
    }
    assert_eq!(client.key_state(&made.id).await.unwrap(), State::Active);
    let key = client.get_key(&made.id).await.unwrap();
    assert_eq!(key.len(), 32);
    assert!(key.expose().iter().any(|byte| *byte != 0));
    assert_eq!(client.get_key(&made.id).await.unwrap(), key);

    assert_eq!(refused(client.activate(&made.id).await), ResultReason::PermissionDenied);
    assert_eq!(refused(client.destroy(&made.id).await), ResultReason::PermissionDenied);
    client.revoke(&made.id, RevocationReason::CessationOfOperation).await.unwrap();
    assert_eq!(client.key_state(&made.id).await.unwrap(), State::Deactivated);
    assert_eq!(client.get_key(&made.id).await.unwrap(), key, "a running VM may still be opened");
    client.destroy(&made.id).await.unwrap();
    assert_eq!(refused(client.get_key(&made.id).await), ResultReason::ItemNotFound);
    assert_eq!(refused(client.key_state(&made.id).await), ResultReason::ItemNotFound);
}

#[tokio::test]
async fn a_compromised_key_says_so() {
    let client = client();
    let id = client.create_key(NewKey::default()).await.unwrap().id;
    client.revoke(&id, RevocationReason::KeyCompromise).await.unwrap();
    assert_eq!(client.key_state(&id).await.unwrap(), State::Compromised);
}

#[tokio::test]
async fn two_keys_differ_and_a_new_one_is_not_active() {
    let client = client();
    let (a, b) =
        (client.create(Create::default()).await.unwrap(), client.create(Create::default()));
    let b = b.await.unwrap();
    assert_ne!(a, b);
    assert_ne!(client.get_key(&a).await.unwrap(), client.get_key(&b).await.unwrap());
    assert_eq!(client.key_state(&a).await.unwrap(), State::PreActive);
    client.activate(&a).await.unwrap();
    assert_eq!(client.key_state(&a).await.unwrap(), State::Active);
    assert_eq!(client.key_state(&b).await.unwrap(), State::PreActive);
}

#[tokio::test]
async fn another_identity_is_denied_the_key() {
    let owner = client();
    let id = owner.create_key(NewKey::default()).await.unwrap().id;
    let stranger = client_as("stranger");
    assert_eq!(refused(stranger.get_key(&id).await), ResultReason::PermissionDenied);
    assert_eq!(refused(stranger.key_state(&id).await), ResultReason::PermissionDenied);
    assert_eq!(refused(stranger.destroy(&id).await), ResultReason::PermissionDenied);
    // A renewed certificate has the same name, and is the same client.
    let renewed = client();
    assert_eq!(renewed.get_key(&id).await.unwrap(), owner.get_key(&id).await.unwrap());
}

#[tokio::test]
async fn keys_are_found_by_name_and_by_vmseals_name() {
    let client = client_as("finder");
    let application =
        |data| Some(ApplicationInformation { namespace: text("vmseal"), data: text(data) });
    let create = |name, data| Create { name: Some(text(name)), application: application(data) };
    let a = client.create(create("locate-a", "vm-a")).await.unwrap();
    let b = client.create(create("locate-b", "vm-b")).await.unwrap();
    let by_name = Locate { name: Some(text("locate-a")), ..Locate::default() };
    assert_eq!(client.locate(by_name).await.unwrap(), vec![a.clone()]);
    let by_data = Locate { application: application("vm-b"), ..Locate::default() };
    assert_eq!(client.locate(by_data).await.unwrap(), vec![b.clone()]);
    let none = Locate { application: application("vm-c"), ..Locate::default() };
    assert_eq!(client.locate(none).await.unwrap(), []);
    let mut all = client.locate(Locate::default()).await.unwrap();
    all.sort();
    assert_eq!(all, [a, b]);
}

#[tokio::test]
async fn the_states_of_many_keys_come_in_batches_each_with_its_own_result() {
    let client = client();
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(client.create(Create::default()).await.unwrap());
    }
    client.activate(&ids[1]).await.unwrap();
    client.destroy(&ids[2]).await.unwrap();
    // More than fit one request.
    let many: Vec<KeyId> = ids.iter().cycle().take(70).cloned().collect();
    let states = client.key_states(&many).await.unwrap();
    assert_eq!(states.len(), 70);
    for (index, state) in states.into_iter().enumerate() {
        match index % 3 {
            0 => assert_eq!(state.unwrap(), State::PreActive),
            1 => assert_eq!(state.unwrap(), State::Active),
            _ => assert_eq!(refused(state), ResultReason::ItemNotFound),
        }
    }
}

#[tokio::test]
async fn every_version_is_spoken() {
    for version in ProtocolVersion::SPOKEN {
        let mut settings = settings("versions");
        settings.versions = vec![version];
        let client = Client::new(settings).unwrap();
        let versions = client.discover().await.unwrap();
        assert_eq!(versions.spoken, version);
        assert!(versions.offered.contains(&ProtocolVersion { major: 2, minor: 0 }));
        let id = client.create_key(NewKey::default()).await.unwrap().id;
        assert_eq!(client.get_key(&id).await.unwrap().len(), 32, "{version}");
        assert_eq!(client.key_states(&[id.clone(), id.clone()]).await.unwrap().len(), 2);
        client.revoke(&id, RevocationReason::Superseded).await.unwrap();
        client.destroy(&id).await.unwrap();
    }
}

#[tokio::test]
async fn the_latest_common_version_is_chosen() {
    let client = client();
    assert_eq!(client.discover().await.unwrap().spoken, ProtocolVersion::V1_4);
}

#[tokio::test]
async fn a_server_describes_itself() {
    let description = client().query().await.unwrap();
    assert!(description.vendor.unwrap().contains("PyKMIP 0.11.0"));
    for operation in [OperationCode::Create, OperationCode::Get, OperationCode::Locate] {
        assert!(description.operations.contains(&operation), "{operation}");
    }
    assert!(!description.operations.contains(&OperationCode::AddAttribute));
}

#[tokio::test]
async fn a_certificate_that_is_not_for_clients_is_refused_with_the_reason() {
    let mut settings = settings("x");
    settings.identity = AUTHORITY.client_without_usage("vmseal").identity();
    let client = Client::new(settings).unwrap();
    assert_eq!(refused(client.query().await), ResultReason::AuthenticationNotSuccessful);
}
