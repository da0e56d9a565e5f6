//! Key providers: where KEKs come from. Nothing above [`KeyProvider`] knows which kind it deals with.

mod measured;
pub mod native;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use sqlx::SqliteConnection;
use tokio::sync::{Semaphore, watch};
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::{ProviderId, VmId};
use vmseal_api::model::{ProviderKind, ProviderStatus};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use self::measured::Measured;
use self::native::NativeProvider;
use crate::store::events::NewEvent;
use crate::store::providers::Provider;
use crate::store::{Part, Store, StoreError, providers};

/// The longest passphrase that a credential file may hold, in bytes; the command line's limit.
const PASSPHRASE_MAX: usize = 512;

/// Argon2 takes 64 MiB and most of a core for a good part of a second: one at a time.
const KEY_DERIVATIONS: usize = 1;

/// What gives keys. Every call may be repeated.
#[async_trait]
pub trait KeyProvider: Send + Sync {
    /// Makes a VM's key. The same `request` gives the same key.
    ///
    /// # Errors
    /// `wrong-state` while the provider is sealed; `unreachable` and `timed-out` where it is elsewhere.
    async fn create_key(
        &self,
        vm: VmId,
        request: Uuid,
    ) -> Result<(KeyReference, SecretBytes), Problem>;

    /// Gives a VM's key, compared with its check value.
    ///
    /// # Errors
    /// As [`KeyProvider::create_key`]; `key-mismatch` when it is another key; `not-found` when it is destroyed.
    async fn get_key(&self, vm: VmId, key: &KeyReference) -> Result<SecretBytes, Problem>;

    /// Destroys a VM's key, and tells of it.
    ///
    /// # Errors
    /// `unreachable` and `timed-out` where the provider is elsewhere.
    async fn destroy_key(&self, vm: VmId, vm_name: &str, key: &KeyReference)
    -> Result<(), Problem>;
}

/// The providers of this server.
pub struct Providers {
    store: Arc<Store>,
    directory: PathBuf,
    credentials: Option<PathBuf>,
    open: RwLock<HashMap<ProviderId, Arc<NativeProvider>>>,
    derivations: Semaphore,
    unlocked: watch::Sender<u64>,
}

/// A provider's sealed backup, and the passphrase that opens it.
pub struct Restore {
    /// The file.
    pub backup: Vec<u8>,
    /// Its passphrase.
    pub passphrase: SecretBytes,
}

impl Providers {
    /// The providers of the inventory; those for which there is a credential are unlocked.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn open(
        store: Arc<Store>,
        data_dir: &Path,
        credentials: Option<PathBuf>,
    ) -> Result<Self, StoreError> {
        let known = providers::list(&mut *store.read().await?, &Part::all()).await?;
        let this = Self {
            store,
            directory: data_dir.join("providers"),
            credentials,
            open: RwLock::default(),
            derivations: Semaphore::new(KEY_DERIVATIONS),
            unlocked: watch::Sender::new(0),
        };
        for provider in known {
            this.keep(&provider);
            match this.credential(&provider.name) {
                Ok(None) => {}
                Ok(Some(passphrase)) => {
                    if let Err(problem) = this.unlock(&provider, passphrase, crate::SELF).await {
                        tracing::warn!(provider = provider.name, %problem, "it stays sealed");
                    }
                }
                Err(problem) => {
                    tracing::warn!(provider = provider.name, %problem, "it stays sealed");
                }
            }
        }
        Ok(this)
    }

    fn keep(&self, provider: &Provider) -> Arc<NativeProvider> {
        let file = self.directory.join(provider.id.to_string()).join("key");
        let native = NativeProvider::sealed(
            provider.id,
            provider.name.clone(),
            file,
            Arc::clone(&self.store),
        );
        let native = Arc::new(native);
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        open.insert(provider.id, Arc::clone(&native));
        native
    }

    fn native(&self, id: ProviderId) -> Result<Arc<NativeProvider>, Problem> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.get(&id).cloned().ok_or_else(|| Problem::not_found("provider", id))
    }

    /// A provider by its id.
    ///
    /// # Errors
    /// `not-found`.
    pub fn get(&self, id: ProviderId) -> Result<Arc<dyn KeyProvider>, Problem> {
        let inner = self.native(id)?;
        Ok(Arc::new(Measured { provider: id.to_string(), inner }))
    }

    /// Changes whenever a provider was unlocked: then locked VMs can have their keys.
    #[must_use]
    pub fn unlocks(&self) -> watch::Receiver<u64> {
        self.unlocked.subscribe()
    }

    /// Whether a provider can be used.
    #[must_use]
    pub fn status(&self, provider: &Provider) -> ProviderStatus {
        match self.native(provider.id) {
            Ok(native) if !native.is_sealed() && provider.verified => ProviderStatus::Normal,
            Ok(native) if !native.is_sealed() => ProviderStatus::NeedsBackup,
            _ => ProviderStatus::Sealed,
        }
    }

    /// The passphrase that the server was given for a provider as a credential.
    fn credential(&self, name: &str) -> Result<Option<SecretBytes>, Problem> {
        let Some(directory) = &self.credentials else { return Ok(None) };
        let path = directory.join(format!("vmseal-provider-{name}"));
        let mut content = match std::fs::read(&path) {
            Ok(content) => zeroize::Zeroizing::new(content),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let detail = format!("cannot read the credential {}: {error}", path.display());
                return Err(Problem::new(ErrorCode::WrongState, detail));
            }
        };
        if content.last() == Some(&b'\n') {
            content.pop();
        }
        if content.is_empty() || content.len() > PASSPHRASE_MAX {
            let detail = format!(
                "the credential {} does not hold a passphrase of 1 to {PASSPHRASE_MAX} bytes",
                path.display()
            );
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
        SecretBytes::from_wiped(&mut content).map(Some).map_err(|error| crate::internal(&error))
    }

    /// Runs what derives a key from a passphrase, outside the threads that serve requests.
    async fn derive<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let _turn = self.derivations.acquire().await.map_err(|error| crate::internal(&error))?;
        tokio::task::spawn_blocking(work).await.map_err(|error| crate::internal(&error))?
    }

    /// The passphrase of a provider that is to be added under a name that is free.
    async fn passphrase_of_new(
        &self,
        name: &str,
        given: Option<SecretBytes>,
    ) -> Result<SecretBytes, Problem> {
        let passphrase = match given {
            Some(passphrase) => passphrase,
            None => self.credential(name)?.ok_or_else(|| {
                let detail = format!(
                    "a passphrase is needed, or the server's credential vmseal-provider-{name}"
                );
                Problem::invalid("passphrase", detail)
            })?,
        };
        let mut read = self.store.read().await?;
        if providers::find(&mut read, name).await?.is_some() {
            return Err(StoreError::Taken(format!("a provider '{name}'")).into());
        }
        Ok(passphrase)
    }

    /// Whether [`Providers::add`] would add it: a backup is opened, nothing is written, no key is made.
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
        let open = move || native::RootKey::from_backup(&restore.backup, &restore.passphrase);
        let id = self.derive(open).await?.provider();
        self.check_not_here(id).await
    }

    /// A backup of a provider that is here is not to be restored beside it.
    async fn check_not_here(&self, id: ProviderId) -> Result<(), Problem> {
        match providers::find(&mut *self.store.read().await?, &id.to_string()).await? {
            None => Ok(()),
            Some(known) => {
                let detail =
                    format!("this is a backup of provider '{}', which is here", known.name);
                Err(Problem::new(ErrorCode::AlreadyExists, detail))
            }
        }
    }

    /// Adds a native provider: with a new key, or with the one of a backup. Its key file is on disk
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
            // What came from a backup has one.
            verified: restored,
        };
        self.check_not_here(provider.id).await?;
        let directory = self.directory.join(provider.id.to_string());
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
        self.keep(&provider).set(root);
        self.unlocked.send_modify(|count| *count += 1);
        Ok(provider)
    }

    /// Unlocks a provider.
    ///
    /// # Errors
    /// `key-mismatch` for a wrong passphrase; `damaged` when its key file is missing or no key file.
    pub async fn unlock(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
        actor: &str,
    ) -> Result<(), Problem> {
        let native = self.native(provider.id)?;
        let opened = {
            let native = Arc::clone(&native);
            self.derive(move || native.read_root(&passphrase)).await?
        };
        native.set(opened);
        self.tell("provider.unlocked", provider, actor, "its passphrase was given").await?;
        self.unlocked.send_modify(|count| *count += 1);
        Ok(())
    }

    /// A provider's backup, sealed under a passphrase of its own.
    ///
    /// # Errors
    /// `wrong-state` while the provider is sealed.
    pub async fn backup(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
        actor: &str,
    ) -> Result<Vec<u8>, Problem> {
        let root = self.native(provider.id)?.root()?;
        let backup = self.derive(move || root.backup(&passphrase)).await?;
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
        let root = self.native(provider.id)?.root()?;
        let backup = self
            .derive(move || native::RootKey::from_backup(&restore.backup, &restore.passphrase))
            .await?;
        if !backup.same(&root) {
            let detail = format!("the backup opens, but is not one of '{}'", provider.name);
            return Err(Problem::new(ErrorCode::KeyMismatch, detail));
        }
        let mut write = self.store.write().await?;
        providers::set_verified(&mut write, provider.id).await?;
        let (kind, target) = ("provider.verified", provider.name.as_str());
        let detail = "a backup opened and held its key";
        write.event(NewEvent { kind, actor, target, detail }).await?;
        Ok(write.commit().await?)
    }

    /// Whether a provider may be removed.
    ///
    /// # Errors
    /// `in-use`.
    pub async fn check_unused(
        from: &mut SqliteConnection,
        provider: &Provider,
    ) -> Result<(), Problem> {
        let (keys, policies) = providers::uses(from, provider.id).await?;
        if keys + policies > 0 {
            let detail = format!(
                "provider '{}' has {keys} keys in use and {policies} policies name it",
                provider.name
            );
            return Err(Problem::new(ErrorCode::InUse, detail));
        }
        Ok(())
    }

    /// Removes a provider that nothing uses, with its key.
    ///
    /// # Errors
    /// `in-use`.
    pub async fn remove(&self, provider: &Provider, actor: &str) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        Self::check_unused(&mut write, provider).await?;
        providers::delete(&mut write, provider.id).await?;
        let (kind, target) = ("provider.removed", provider.name.as_str());
        write.event(NewEvent { kind, actor, target, detail: "with its key" }).await?;
        write.commit().await?;
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&provider.id);
        let directory = self.directory.join(provider.id.to_string());
        if let Err(error) = std::fs::remove_dir_all(&directory) {
            // It is sealed, and nothing refers to it any more.
            tracing::warn!(directory = %directory.display(), %error, "a removed provider's file is left");
        }
        Ok(())
    }

    async fn tell(
        &self,
        kind: &str,
        provider: &Provider,
        actor: &str,
        detail: &str,
    ) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        write.event(NewEvent { kind, actor, target: &provider.name, detail }).await?;
        Ok(write.commit().await?)
    }
}

#[cfg(test)]
mod tests;
