//! The client key: replaced when its passphrase is lost, sealed under another one, backed up and restored.

use vmseal_api::model::ProviderKind;

use super::*;
use crate::providers::Restore;

const OTHER: &str = "another passphrase, longer";

/// A KMS that accepts any client, and has every key.
fn any_client(authority: &Authority) -> ScriptedServer {
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    ScriptedServer::start(&certificate, None, |asked: &Asked| match asked.operation {
        OperationCode::GetAttributes => Reaction::Send(asked.done(|payload| state(payload, 2))),
        OperationCode::Get => given(asked, &[7; 32]),
        _ => Reaction::Send(asked.done(|payload| payload.text(Tag::UNIQUE_IDENTIFIER, "1"))),
    })
}

fn replaced(passphrase: &str) -> NewName {
    NewName { replace: true, passphrase: Some(secret(passphrase)), ..new_name() }
}

fn files(here: &Here, provider: &Provider) -> usize {
    let directory = here.directory.path().join("providers").join(provider.id.to_string());
    std::fs::read_dir(directory).unwrap().count()
}

async fn restarted(here: &Here) -> Providers {
    Providers::open(Arc::clone(&here.store), here.directory.path(), None).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_key_with_a_lost_passphrase_can_be_replaced() {
    let authority = Authority::new("kms");
    let server = any_client(&authority);
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let (provider, _) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    // The passphrase is lost: the key in use cannot be opened.
    let kms = restarted(&here).await;
    let trivial = kms.certificate_request(&provider, replaced("short"), "me").await.unwrap_err();
    assert_eq!(trivial.field.as_deref(), Some("passphrase"), "{trivial}");
    kms.check_certificate_request(&provider, replaced(OTHER)).unwrap();
    assert_eq!(files(&here, &provider), 1, "it was tried only");
    let request = kms.certificate_request(&provider, replaced(OTHER), "me").await.unwrap();
    assert_eq!(kms.status(&provider), ProviderStatus::Sealed, "there is no certificate yet");
    assert!(kms.kmip_details(&provider).unwrap().next_key);
    assert_eq!(files(&here, &provider), 2);
    // Who signed it gave it another name.
    let own = here.providers.certificate_request(&provider, new_name(), "me").await.unwrap();
    assert_ne!(own, request);
    let certificate = authority.sign(&request);
    let set = async |kms: &Providers, new: NewCertificate| {
        kms.set_certificate(&provider, new, "me").await
    };
    set(&kms, NewCertificate { passphrase: None, ..new_certificate(&certificate) }).await.unwrap();
    assert_eq!(kms.status(&provider), ProviderStatus::Normal);
    assert!(!kms.kmip_details(&provider).unwrap().next_key);
    assert_eq!(files(&here, &provider), 1, "the former key is left");

    // The next one waits over a restart, and the one in use stays in use.
    let request = kms.certificate_request(&provider, replaced(PASSPHRASE), "me").await.unwrap();
    assert_eq!(kms.status(&provider), ProviderStatus::Normal);
    let kms = restarted(&here).await;
    assert_eq!(files(&here, &provider), 2, "the key that waits was swept");
    let old = kms.unlock(&provider, secret(PASSPHRASE), "me").await.unwrap_err();
    assert_eq!(old.code, ErrorCode::KeyMismatch);
    kms.unlock(&provider, secret(OTHER), "me").await.unwrap();
    let certificate = authority.sign(&request);
    let needed = NewCertificate { passphrase: None, ..new_certificate(&certificate) };
    let needed = set(&kms, needed).await.unwrap_err();
    assert_eq!(needed.field.as_deref(), Some("passphrase"), "{needed}");
    set(&kms, new_certificate(&certificate)).await.unwrap();

    // Or with a key and a certificate that were made elsewhere.
    let kms = restarted(&here).await;
    let made = || NewCertificate {
        key: Some(identity.private_key()),
        passphrase: Some(secret(OTHER)),
        ..new_certificate(&identity.certificate)
    };
    assert!(set(&kms, made()).await.is_err(), "the key in use is sealed");
    let other = authority.client("other", Validity::Now);
    let named = NewCertificate {
        certificate: other.certificate.clone(),
        key: Some(other.private_key()),
        replace: true,
        ..made()
    };
    let named = set(&kms, named).await.unwrap_err();
    assert!(named.detail.contains("--force"), "{named}");
    set(&kms, NewCertificate { replace: true, ..made() }).await.unwrap();
    let kms = restarted(&here).await;
    kms.unlock(&provider, secret(OTHER), "me").await.unwrap();
    assert_eq!(kms.status(&provider), ProviderStatus::Normal);
    // At once, with a self-signed certificate.
    let kms = restarted(&here).await;
    kms.self_sign(&provider, replaced(PASSPHRASE), "me").await.unwrap();
    assert_eq!(kms.status(&provider), ProviderStatus::Normal);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_passphrase_is_changed_and_a_trivial_one_refused() {
    let authority = Authority::new("kms");
    let server = any_client(&authority);
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let servers = [at("one", &server.endpoint())];
    for trivial in ["short", "123456789012", "passwordpassword"] {
        let refused = here.providers.add_kmip("trivial", &servers, Some(secret(trivial)), "me");
        assert_eq!(refused.await.unwrap_err().field.as_deref(), Some("passphrase"), "{trivial}");
    }
    let (provider, _) = here.add(&servers, &authority, &identity).await;
    let request = here.providers.certificate_request(&provider, replaced(PASSPHRASE), "me");
    let request = request.await.unwrap();
    let change = |old: &str, new: &str| {
        let (old, new) = (Some(secret(old)), secret(new));
        here.providers.change_passphrase(&provider, old, new, "me")
    };
    assert_eq!(change("wrong", OTHER).await.unwrap_err().code, ErrorCode::KeyMismatch);
    assert_eq!(change(PASSPHRASE, "short").await.unwrap_err().field.as_deref(), Some("new"));
    change(PASSPHRASE, OTHER).await.unwrap();
    assert_eq!(files(&here, &provider), 2, "a file is left, or the key that waits is gone");
    let kms = restarted(&here).await;
    assert!(kms.unlock(&provider, secret(PASSPHRASE), "me").await.is_err());
    kms.unlock(&provider, secret(OTHER), "me").await.unwrap();
    // The key that waits is sealed under the new one, too.
    let certificate = authority.sign(&request);
    let new = NewCertificate { passphrase: Some(secret(OTHER)), ..new_certificate(&certificate) };
    kms.set_certificate(&provider, new, "me").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_brings_a_provider_back_with_its_keys() {
    let authority = Authority::new("kms");
    let server = any_client(&authority);
    let identity = authority.client("vmseal", Validity::Now);
    let here = Here::new().await;
    let (provider, kms) = here.add(&[at("one", &server.endpoint())], &authority, &identity).await;
    let vm = VmId::new();
    let (key, kek) = kms.create_key(vm, Uuid::from_u128(1)).await.unwrap();
    let refused = here.providers.backup(&provider, secret("short"), "me").await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("passphrase"));
    let sealed = restarted(&here).await.backup(&provider, secret(OTHER), "me").await.unwrap_err();
    assert_eq!(sealed.reason, Some(KeyFault::ProviderSealed));
    let backup = here.providers.backup(&provider, secret(OTHER), "me").await.unwrap();
    let private = identity.private_key();
    let clear = backup.windows(private.len()).any(|bytes| bytes == private.expose());
    assert!(!clear, "the client key is in the clear");
    let restore =
        |passphrase: &str| Restore { backup: backup.clone(), passphrase: secret(passphrase) };
    here.providers.verify(&provider, restore(OTHER), "me").await.unwrap();
    let wrong = here.providers.verify(&provider, restore(PASSPHRASE), "me").await.unwrap_err();
    assert_eq!(wrong.code, ErrorCode::KeyMismatch);
    let pass = || Some(secret(PASSPHRASE));
    let here_already = here.providers.add("copy", pass(), Some(restore(OTHER)), "me").await;
    assert_eq!(here_already.unwrap_err().code, ErrorCode::AlreadyExists);

    // On a server without this provider.
    let there = Here::new().await;
    there.providers.check_new("back", pass(), Some(restore(OTHER))).await.unwrap();
    let back = there.providers.add("back", pass(), Some(restore(OTHER)), "me").await.unwrap();
    assert_eq!((back.id, back.kind), (provider.id, ProviderKind::Kmip));
    assert_eq!(there.providers.status(&back), ProviderStatus::Normal);
    let kms = there.providers.get(back.id).unwrap();
    assert!(kms.get_key(vm, &key).await.unwrap().kek == kek);
    let details = there.providers.kmip_details(&back).unwrap();
    assert!(details.servers[0].trust.is_some() && details.client.is_some(), "{details:?}");
}
