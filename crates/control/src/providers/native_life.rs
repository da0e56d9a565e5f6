//! Adds, restores, backs up and verifies native providers.

use std::sync::Arc;

use vmseal_api::id::ProviderId;
use vmseal_api::model::ProviderKind;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::provider_backup;
use vmseal_secret::SecretBytes;

use super::native::{self, NativeProvider};
use super::{Open, Providers, Restore, check_new_passphrase};
use crate::store::events::NewEvent;
use crate::store::providers::{self, Provider};

impl Providers {
    /// Adds a native provider of the inventory, sealed.
    pub(super) fn keep_native(&self, provider: &Provider) -> Arc<NativeProvider> {
        let native = Arc::new(NativeProvider::sealed(
            provider.id,
            provider.name.clone(),
            self.directory_of(provider.id).join("key"),
            Arc::clone(&self.store),
        ));
        self.insert(provider.id, Open::Native(Arc::clone(&native)));
        native
    }

    /// Whether [`Providers::add`] would succeed: opens a backup, writes nothing, makes no key.
    ///
    /// # Errors
    /// As [`Providers::add`].
    pub async fn check_new(
        &self,
        name: &str,
        passphrase: Option<SecretBytes>,
        restore: Option<Restore>,
    ) -> Result<(), Problem> {
        self.passphrase_of_new(name, passphrase).await?;
        let Some(restore) = restore else { return Ok(()) };
        if provider_backup::is_backup(&restore.backup) {
            return self.check_restore_kmip(restore).await;
        }
        let open = move || native::RootKey::from_backup(&restore.backup, &restore.passphrase);
        let id = self.derive(open).await?.provider();
        self.check_not_here(id).await
    }

    /// Refuses a backup of a provider that exists here.
    pub(super) async fn check_not_here(&self, id: ProviderId) -> Result<(), Problem> {
        let known = providers::find(&mut *self.store.read().await?, &id.to_string()).await?;
        match known {
            None => Ok(()),
            Some(known) => {
                let detail =
                    format!("this is a backup of provider '{}', which is here", known.name);
                Err(Problem::new(ErrorCode::AlreadyExists, detail))
            }
        }
    }

    /// Adds a native provider: with a new key, or with the one of a backup; or a KMIP provider, where the backup is
    /// of one. Its key file is on disk
    /// before the inventory knows of it; after a crash between the two the file is left, as key files
    /// are never removed on a guess.
    ///
    /// # Errors
    /// `already-exists`; `invalid-request` without a passphrase; `key-mismatch` or `damaged` for a
    /// backup that does not open.
    pub async fn add(
        &self,
        name: &str,
        passphrase: Option<SecretBytes>,
        restore: Option<Restore>,
        actor: &str,
    ) -> Result<Provider, Problem> {
        let passphrase = self.passphrase_of_new(name, passphrase).await?;
        let restore = match restore {
            Some(restore) if provider_backup::is_backup(&restore.backup) => {
                return self.restore_kmip(name, passphrase, restore, actor).await;
            }
            other => other,
        };
        let restored = restore.is_some();
        let root = self
            .derive(move || match restore {
                None => native::RootKey::generate(),
                Some(restore) => native::RootKey::from_backup(&restore.backup, &restore.passphrase),
            })
            .await?;
        let provider = Provider {
            id: root.provider(),
            name: name.to_owned(),
            kind: ProviderKind::Native,
            default: false,
            // A restored key has a backup.
            verified: restored,
        };
        self.check_not_here(provider.id).await?;
        let directory = self.directory_of(provider.id);
        let root = self
            .derive(move || {
                root.write(&directory, &passphrase)?;
                Ok(root)
            })
            .await?;
        let mut write = self.store.write().await?;
        providers::insert(&mut write, &provider).await?;
        let detail = if restored { "restored from a backup" } else { "with a new key" };
        write.event(NewEvent { kind: "provider.added", actor, target: name, detail }).await?;
        write.commit().await?;
        self.keep_native(&provider).set(root);
        self.unlocked.send_modify(|count| *count += 1);
        Ok(provider)
    }

    /// The key of a native provider, from its file.
    pub(super) async fn read_root(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
    ) -> Result<native::RootKey, Problem> {
        let native = self.native(provider.id)?;
        self.derive(move || native.read_root(&passphrase)).await
    }

    /// Whether [`Providers::backup`] would give one.
    ///
    /// # Errors
    /// Those of [`Providers::backup`].
    pub fn check_backup(
        &self,
        provider: &Provider,
        passphrase: &SecretBytes,
    ) -> Result<(), Problem> {
        check_new_passphrase(passphrase, "passphrase")?;
        match provider.kind {
            ProviderKind::Native => self.native(provider.id)?.root().map(drop),
            ProviderKind::Kmip => self.kmip_is_open(provider),
        }
    }

    /// A provider's backup, sealed under a separate passphrase.
    ///
    /// # Errors
    /// `wrong-state` while the provider is sealed.
    pub async fn backup(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
        actor: &str,
    ) -> Result<Vec<u8>, Problem> {
        self.check_backup(provider, &passphrase)?;
        let backup = match provider.kind {
            ProviderKind::Native => {
                let root = self.native(provider.id)?.root()?;
                self.derive(move || root.backup(&passphrase)).await?
            }
            ProviderKind::Kmip => self.backup_kmip(provider, passphrase).await?,
        };
        self.tell("provider.backed-up", provider, actor, "a backup was written").await?;
        Ok(backup)
    }

    /// Verifies a backup: it opens, and holds this provider's key.
    ///
    /// # Errors
    /// `key-mismatch` when it does not; `wrong-state` while the provider is sealed.
    pub async fn verify(
        &self,
        provider: &Provider,
        restore: Restore,
        actor: &str,
    ) -> Result<(), Problem> {
        self.check_verify(provider, restore).await?;
        let mut write = self.store.write().await?;
        providers::set_verified(&mut write, provider.id).await?;
        let (kind, target) = ("provider.verified", provider.name.as_str());
        let detail = "a backup opened and held its key";
        write.event(NewEvent { kind, actor, target, detail }).await?;
        Ok(write.commit().await?)
    }

    /// Whether a backup opens and holds this provider's key; changes nothing.
    ///
    /// # Errors
    /// Those of [`Providers::verify`].
    pub async fn check_verify(&self, provider: &Provider, restore: Restore) -> Result<(), Problem> {
        if provider.kind == ProviderKind::Kmip {
            return self.verify_kmip(provider, restore).await;
        }
        let root = self.native(provider.id)?.root()?;
        let backup = self
            .derive(move || native::RootKey::from_backup(&restore.backup, &restore.passphrase))
            .await?;
        if !backup.same(&root) {
            let detail = format!("the backup opens, but is not one of '{}'", provider.name);
            return Err(Problem::new(ErrorCode::KeyMismatch, detail));
        }
        Ok(())
    }
}
