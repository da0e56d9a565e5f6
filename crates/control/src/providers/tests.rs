//! The life cycle of providers: added, backed up, verified, restarted, restored, removed.

use vmseal_api::problem::ErrorCode;

use super::*;

struct Here {
    directory: tempfile::TempDir,
    store: Arc<Store>,
    providers: Providers,
}

/// A passphrase that is long enough.
fn secret(text: &str) -> SecretBytes {
    SecretBytes::from_wiped(&mut format!("{text}, as in the tests").into_bytes()).unwrap()
}

impl Here {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(crate::testing::new_store(directory.path()).await);
        let providers = Providers::open(Arc::clone(&store), directory.path(), None).await.unwrap();
        Self { directory, store, providers }
    }

    async fn restarted(&self, credentials: Option<PathBuf>) -> Providers {
        Providers::open(Arc::clone(&self.store), self.directory.path(), credentials).await.unwrap()
    }

    async fn shown(&self) -> Provider {
        let mut read = self.store.read().await.unwrap();
        providers::find(&mut read, "keys").await.unwrap().unwrap()
    }

    async fn add(&self) -> Provider {
        self.providers.add("keys", Some(secret("pass")), None, "me").await.unwrap()
    }
}

#[tokio::test]
async fn it_makes_keys_only_after_its_backup_opened_and_the_right_one() {
    let here = Here::new().await;
    let provider = here.add().await;
    assert_eq!(here.providers.status(&provider), ProviderStatus::NeedsBackup);
    let backup = here.providers.backup(&provider, secret("other"), "me").await.unwrap();
    assert_eq!(here.providers.status(&here.shown().await), ProviderStatus::NeedsBackup);

    let verify = async |backup: &[u8], passphrase| {
        let restore = Restore { backup: backup.to_vec(), passphrase: secret(passphrase) };
        here.providers.verify(&provider, restore, "me").await
    };
    assert_eq!(verify(&backup, "pass").await.unwrap_err().code, ErrorCode::KeyMismatch);
    assert_eq!(verify(&backup[1..], "other").await.unwrap_err().code, ErrorCode::Damaged);
    let other = here.providers.add("two", Some(secret("x")), None, "me").await.unwrap();
    let foreign = here.providers.backup(&other, secret("other"), "me").await.unwrap();
    assert_eq!(verify(&foreign, "other").await.unwrap_err().code, ErrorCode::KeyMismatch);
    assert_eq!(here.providers.status(&here.shown().await), ProviderStatus::NeedsBackup);
    verify(&backup, "other").await.unwrap();
    assert_eq!(here.providers.status(&here.shown().await), ProviderStatus::Normal);
}

#[tokio::test]
async fn after_a_restart_it_is_sealed_until_the_passphrase_is_given_or_a_credential_is_there() {
    let here = Here::new().await;
    let provider = here.add().await;
    let vm = VmId::new();
    let keys = here.providers.get(provider.id).unwrap();
    let (reference, kek) = keys.create_key(vm, Uuid::from_u128(7)).await.unwrap();
    assert_eq!(keys.reference_of(vm, &reference.key_id).await.unwrap(), reference);

    let restarted = here.restarted(None).await;
    assert_eq!(restarted.status(&provider), ProviderStatus::Sealed);
    let keys = restarted.get(provider.id).unwrap();
    let refused = keys.get_key(vm, &reference).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("vmseal provider unlock"), "{refused}");
    let wrong = restarted.unlock(&provider, secret("wrong"), "me").await.unwrap_err();
    assert_eq!(wrong.code, ErrorCode::KeyMismatch);
    restarted.unlock(&provider, secret("pass"), "me").await.unwrap();
    assert_eq!(keys.get_key(vm, &reference).await.unwrap().kek, kek);

    let credentials = here.directory.path().join("credentials");
    std::fs::create_dir(&credentials).unwrap();
    std::fs::write(credentials.join("vmseal-provider-keys"), "pass, as in the tests\n").unwrap();
    let restarted = here.restarted(Some(credentials)).await;
    let keys = restarted.get(provider.id).unwrap();
    assert_eq!(keys.get_key(vm, &reference).await.unwrap().kek, kek);
}

#[tokio::test]
async fn a_sealed_default_provider_is_an_alarm_until_it_is_unlocked_or_another_is() {
    let here = Here::new().await;
    let provider = here.add().await;
    let raised = async || {
        let alarms = alarms::list(&mut here.store.read().await.unwrap()).await.unwrap();
        alarms.into_iter().map(|alarm| (alarm.code, alarm.target)).collect::<Vec<_>>()
    };
    let sealed = [("provider-sealed".to_owned(), "keys".to_owned())];
    let make_default = async |providers: &Providers, id: ProviderId| {
        let mut write = here.store.write().await.unwrap();
        crate::store::providers::set_default(&mut write, id).await.unwrap();
        write.commit().await.unwrap();
        providers.default_changed().await.unwrap();
    };
    // One that is not the default one does not prevent the creation of VMs.
    drop(here.restarted(None).await);
    assert_eq!(raised().await, []);
    make_default(&here.providers, provider.id).await;
    assert_eq!(raised().await, [], "it is unlocked");
    let restarted = here.restarted(None).await;
    assert_eq!(raised().await, sealed);
    restarted.unlock(&provider, secret("pass"), "me").await.unwrap();
    assert_eq!(raised().await, []);
    let restarted = here.restarted(None).await;
    assert_eq!(raised().await, sealed);
    let other = restarted.add("two", Some(secret("two")), None, "me").await.unwrap();
    make_default(&restarted, other.id).await;
    assert_eq!(raised().await, []);
}

#[tokio::test]
async fn a_passphrase_change_needs_the_old_one_and_a_new_one_that_is_not_trivial() {
    let here = Here::new().await;
    let provider = here.add().await;
    let change = |old: &str, new: SecretBytes| {
        here.providers.change_passphrase(&provider, Some(secret(old)), new, "me")
    };
    assert_eq!(change("wrong", secret("new")).await.unwrap_err().code, ErrorCode::KeyMismatch);
    let trivial = SecretBytes::from_wiped(&mut b"passwordpassword".to_vec()).unwrap();
    assert_eq!(change("pass", trivial).await.unwrap_err().field.as_deref(), Some("new"));
    here.providers
        .check_change_passphrase(&provider, Some(secret("pass")), &secret("new"))
        .await
        .unwrap();
    change("pass", secret("new")).await.unwrap();
    let restarted = here.restarted(None).await;
    assert!(restarted.unlock(&provider, secret("pass"), "me").await.is_err());
    restarted.unlock(&provider, secret("new"), "me").await.unwrap();
}

#[tokio::test]
async fn a_backup_restored_elsewhere_gives_the_same_keys() {
    let (here, there) = (Here::new().await, Here::new().await);
    let provider = here.add().await;
    let vm = VmId::new();
    let keys = here.providers.get(provider.id).unwrap();
    let (reference, kek) = keys.create_key(vm, Uuid::from_u128(7)).await.unwrap();
    let backup = here.providers.backup(&provider, secret("other"), "me").await.unwrap();
    let restore = || Some(Restore { backup: backup.clone(), passphrase: secret("other") });

    let restored = there.providers.add("copy", Some(secret("new")), restore(), "me").await.unwrap();
    assert_eq!(there.providers.status(&restored), ProviderStatus::Normal);
    let keys = there.providers.get(restored.id).unwrap();
    assert_eq!(keys.get_key(vm, &reference).await.unwrap().kek, kek);
    let twice = here.providers.add("copy", Some(secret("new")), restore(), "me").await;
    assert_eq!(twice.unwrap_err().code, ErrorCode::AlreadyExists);
}

#[tokio::test]
async fn the_same_request_gives_the_same_key_and_a_destroyed_one_is_not_given() {
    let here = Here::new().await;
    let provider = here.add().await;
    let keys = here.providers.get(provider.id).unwrap();
    let vm = VmId::new();
    let (reference, kek) = keys.create_key(vm, Uuid::from_u128(1)).await.unwrap();
    assert_eq!(keys.create_key(vm, Uuid::from_u128(1)).await.unwrap(), (reference.clone(), kek));
    let (second, _) = keys.create_key(vm, Uuid::from_u128(2)).await.unwrap();
    assert_ne!(second.check, reference.check);
    // The check value binds the key to its VM, too.
    let other = keys.get_key(VmId::new(), &reference).await.unwrap_err();
    assert_eq!(other.code, ErrorCode::KeyMismatch);

    let mut newest = here.store.newest_event();
    newest.mark_unchanged();
    for _ in 0..2 {
        keys.destroy_key(vm, "web", &reference).await.unwrap();
    }
    let mut read = here.store.read().await.unwrap();
    let events = crate::store::events::after(&mut read, 0, 100, &Default::default()).await.unwrap();
    assert_eq!(events.iter().filter(|event| event.kind == "key.destroyed").count(), 1);
    drop(read);
    let gone = keys.get_key(vm, &reference).await.unwrap_err();
    assert_eq!(gone.code, ErrorCode::NotFound);
    assert_eq!(
        keys.create_key(vm, Uuid::from_u128(1)).await.unwrap_err().code,
        ErrorCode::NotFound
    );
}

#[tokio::test]
async fn one_with_keys_in_use_stays_and_its_file_goes_with_it() {
    let here = Here::new().await;
    let provider = here.add().await;
    let file = here.directory.path().join("providers").join(provider.id.to_string()).join("key");
    assert!(file.exists());
    let keys = here.providers.get(provider.id).unwrap();
    let vm = VmId::new();
    let (reference, _) = keys.create_key(vm, Uuid::from_u128(1)).await.unwrap();
    let mut write = here.store.write().await.unwrap();
    crate::store::keys::insert(&mut write, vm, &reference).await.unwrap();
    write.commit().await.unwrap();
    let refused = here.providers.remove(&provider, "me").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::InUse);
    keys.destroy_key(vm, "web", &reference).await.unwrap();
    here.providers.remove(&provider, "me").await.unwrap();
    assert!(!file.exists());
}

#[tokio::test]
async fn the_key_file_of_another_provider_is_refused() {
    let here = Here::new().await;
    let provider = here.add().await;
    let other = here.providers.add("two", Some(secret("pass")), None, "me").await.unwrap();
    let file =
        |id: ProviderId| here.directory.path().join("providers").join(id.to_string()).join("key");
    std::fs::copy(file(other.id), file(provider.id)).unwrap();
    let refused = here.providers.unlock(&provider, secret("pass"), "me").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::KeyMismatch);
}

#[tokio::test]
async fn keys_that_are_still_to_be_destroyed_are_named_when_their_provider_goes() {
    let here = Here::new().await;
    let provider = here.add().await;
    let vm = VmId::new();
    let key = |id: &str| KeyReference {
        provider: provider.id,
        key_id: id.to_owned(),
        check: "00".repeat(16),
    };
    let mut write = here.store.write().await.unwrap();
    keys::set_unwanted(&mut write, vm, &key("pending")).await.unwrap();
    keys::destroy(&mut write, vm, &key("gone")).await.unwrap();
    write.commit().await.unwrap();
    here.providers.remove(&provider, "me").await.unwrap();
    let mut read = here.store.read().await.unwrap();
    let mut events =
        crate::store::events::after(&mut read, 0, u32::MAX, &Default::default()).await.unwrap();
    events.retain(|event| event.kind == "key.orphaned");
    let [event] = events.as_slice() else { panic!("{events:?}") };
    assert!(event.detail.contains("'pending'") && event.detail.contains(&vm.to_string()));
}
