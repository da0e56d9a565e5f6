//! Key providers: the sources of KEKs. Callers of [`KeyProvider`] do not depend on its kind.
//!
//! | module | what |
//! |---|---|
//! | this | opens, unlocks and removes the providers of a server |
//! | [`native`], `native_life` | the embedded one |
//! | [`kmip`] | key management systems |
//! | `sealed_file` | files that are sealed under a passphrase |

pub mod kmip;
mod measured;
pub mod native;
mod native_life;
pub(crate) mod sealed_file;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use sqlx::SqliteConnection;
use tokio::sync::{Semaphore, watch};
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::{ProviderId, VmId};
use vmseal_api::key_fault::KeyFault;
use vmseal_api::model::{ProviderKind, ProviderStatus};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::{SecretBytes, passphrase_rule};

use self::kmip::{KmipProvider, MonitoredProvider};
use self::measured::Measured;
use self::native::NativeProvider;
use crate::store::alarms::RaisedAlarm;
use crate::store::events::NewEvent;
use crate::store::providers::Provider;
use crate::store::{Part, Store, StoreError, alarms, key_requests, keys, providers, tasks};

/// The longest passphrase that a credential file may hold, in bytes; the command line's limit.
const PASSPHRASE_MAX: usize = 512;

/// The source of the alarms about native providers.
const NATIVE_ALARMS: &str = "native providers";

/// Argon2 takes 64 MiB and most of a core for a good part of a second: one at a time.
const KEY_DERIVATIONS: usize = 1;

/// A key that a provider gives.
#[derive(Debug)]
pub struct GivenKey {
    /// The key.
    pub kek: SecretBytes,
    /// Why nothing new may be encrypted with it, and the remedy; it still opens existing data.
    pub fault: Option<Problem>,
}

/// A source of keys. Every call may be repeated.
#[async_trait]
pub trait KeyProvider: Send + Sync {
    /// Makes a VM's key. The same `request` gives the same key.
    ///
    /// # Errors
    /// `wrong-state` while the provider is sealed; `unreachable` and `timed-out` if it is remote.
    async fn create_key(
        &self,
        vm: VmId,
        request: Uuid,
    ) -> Result<(KeyReference, SecretBytes), Problem>;

    /// Gives a VM's key, compared with its check value.
    ///
    /// # Errors
    /// As [`KeyProvider::create_key`]; `key-mismatch` when it is another key; `not-found` when it is destroyed.
    async fn get_key(&self, vm: VmId, key: &KeyReference) -> Result<GivenKey, Problem>;

    /// The reference of a key of which only the id is known, with the check value of the key that the provider has under it
    /// now. Whether it is the VM's shows when it opens the VM's disks.
    ///
    /// # Errors
    /// As [`KeyProvider::get_key`].
    async fn reference_of(&self, vm: VmId, key_id: &str) -> Result<KeyReference, Problem>;

    /// Destroys a VM's key, and writes an event; if the provider is remote and does not answer, as soon
    /// as it does.
    ///
    /// # Errors
    /// The inventory's.
    async fn destroy_key(&self, vm: VmId, vm_name: &str, key: &KeyReference)
    -> Result<(), Problem>;

    /// Abandons this request: its key, if it was created, is unwanted, and is not in the inventory.
    ///
    /// # Errors
    /// The inventory's.
    async fn abandon(&self, request: Uuid) -> Result<(), Problem>;

    /// Why it cannot give any key, as far as is known without a request to a server: a caller that can
    /// wait then sends none.
    fn known_fault(&self) -> Option<Problem>;

    /// Why nothing new may be encrypted with a key, or no provider has it any more, as far as is known without a request
    /// to a server.
    fn known_fault_of(&self, key_id: &str) -> Option<Problem>;
}

/// A provider by its kind.
enum Open {
    Native(Arc<NativeProvider>),
    Kmip(MonitoredProvider),
}

/// The providers of this server.
pub struct Providers {
    store: Arc<Store>,
    directory: PathBuf,
    credentials: Option<PathBuf>,
    open: RwLock<HashMap<ProviderId, Open>>,
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
            this.keep(&provider).await?;
            match this.credential(&provider.name) {
                Ok(None) => {}
                Ok(Some(passphrase)) => {
                    // Do not wait for a KMS here: its watch tries it.
                    if let Err(problem) = this.open_up(&provider, passphrase, crate::SELF).await {
                        tracing::warn!(provider = provider.name, %problem, "it stays sealed");
                    }
                }
                Err(problem) => {
                    tracing::warn!(provider = provider.name, %problem, "it stays sealed");
                }
            }
            // Only now, so that one that is just being unlocked raises no alarm.
            if let Ok(kmip) = this.kmip(provider.id) {
                kmip.look_now();
            }
        }
        if let Err(problem) = this.raise_sealed().await {
            tracing::error!(%problem, "the alarms about providers could not be written");
        }
        Ok(this)
    }

    /// Adds a provider of the inventory, sealed.
    async fn keep(&self, provider: &Provider) -> Result<(), StoreError> {
        match provider.kind {
            ProviderKind::Native => drop(self.keep_native(provider)),
            ProviderKind::Kmip => {
                self.keep_kmip(provider).load(None).await?;
                self.sweep_client_keys(provider).await?;
            }
        }
        Ok(())
    }

    fn insert(&self, id: ProviderId, provider: Open) {
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(id, provider);
    }

    /// The server's data directory, which has the providers' files.
    pub(crate) fn data_dir(&self) -> &Path {
        self.directory.parent().unwrap_or(&self.directory)
    }

    /// The directory of a provider's sealed files.
    fn directory_of(&self, id: ProviderId) -> PathBuf {
        self.directory.join(id.to_string())
    }

    fn native(&self, id: ProviderId) -> Result<Arc<NativeProvider>, Problem> {
        match self.open.read().unwrap_or_else(PoisonError::into_inner).get(&id) {
            Some(Open::Native(native)) => Ok(Arc::clone(native)),
            Some(Open::Kmip(_)) => {
                let detail = "its keys are kept by a KMS: back up the KMS";
                Err(Problem::new(ErrorCode::Unsupported, detail))
            }
            None => Err(Problem::not_found("provider", id)),
        }
    }

    fn kmip(&self, id: ProviderId) -> Result<Arc<KmipProvider>, Problem> {
        match self.open.read().unwrap_or_else(PoisonError::into_inner).get(&id) {
            Some(Open::Kmip(watched)) => Ok(Arc::clone(&watched.provider)),
            Some(Open::Native(_)) => {
                let detail = "it is a native provider, which has no servers and no certificate";
                Err(Problem::new(ErrorCode::Unsupported, detail))
            }
            None => Err(Problem::not_found("provider", id)),
        }
    }

    /// A provider by its id.
    ///
    /// # Errors
    /// `not-found`.
    pub fn get(&self, id: ProviderId) -> Result<Arc<dyn KeyProvider>, Problem> {
        let inner: Arc<dyn KeyProvider> =
            match self.open.read().unwrap_or_else(PoisonError::into_inner).get(&id) {
                Some(Open::Native(native)) => Arc::clone(native) as _,
                Some(Open::Kmip(watched)) => Arc::clone(&watched.provider) as _,
                None => return Err(Problem::not_found("provider", id)),
            };
        Ok(Arc::new(Measured { provider: id.to_string(), inner }))
    }

    /// Changes whenever a provider was unlocked or answers again: then locked VMs can get their keys.
    #[must_use]
    pub fn unlocks(&self) -> watch::Receiver<u64> {
        self.unlocked.subscribe()
    }

    /// Whether a provider can be used.
    #[must_use]
    pub fn status(&self, provider: &Provider) -> ProviderStatus {
        match self.open.read().unwrap_or_else(PoisonError::into_inner).get(&provider.id) {
            Some(Open::Native(native)) if native.is_sealed() => ProviderStatus::Sealed,
            Some(Open::Native(_)) if provider.verified => ProviderStatus::Normal,
            Some(Open::Native(_)) => ProviderStatus::NeedsBackup,
            Some(Open::Kmip(watched)) => watched.provider.status(),
            None => ProviderStatus::Sealed,
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

    /// The passphrase that seals a provider's files: the one that was given, or the credential.
    fn passphrase_for(
        &self,
        name: &str,
        given: Option<SecretBytes>,
    ) -> Result<SecretBytes, Problem> {
        if let Some(given) = given {
            return Ok(given);
        }
        self.credential(name)?.ok_or_else(|| {
            let detail = format!(
                "a passphrase is needed, or the server's credential vmseal-provider-{name}"
            );
            Problem::invalid("passphrase", detail)
        })
    }

    /// The passphrase of a new provider whose name must be free.
    async fn passphrase_of_new(
        &self,
        name: &str,
        given: Option<SecretBytes>,
    ) -> Result<SecretBytes, Problem> {
        let passphrase = self.passphrase_for(name, given)?;
        check_new_passphrase(&passphrase, "passphrase")?;
        let known = providers::find(&mut *self.store.read().await?, name).await?;
        match known {
            Some(_) => Err(StoreError::Taken(format!("a provider '{name}'")).into()),
            None => Ok(passphrase),
        }
    }

    /// Runs a key derivation from a passphrase, outside the threads that serve requests.
    async fn derive<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let _turn = self.derivations.acquire().await.map_err(|error| crate::internal(&error))?;
        tokio::task::spawn_blocking(work).await.map_err(|error| crate::internal(&error))?
    }

    /// Unlocks a provider, and tries its servers, if it has some.
    ///
    /// # Errors
    /// `key-mismatch` for a wrong passphrase; `damaged` when its key file is missing or no key file.
    pub async fn unlock(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
        actor: &str,
    ) -> Result<(), Problem> {
        self.open_up(provider, passphrase, actor).await?;
        if let Ok(kmip) = self.kmip(provider.id) {
            kmip.try_all().await;
        }
        Ok(())
    }

    async fn open_up(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
        actor: &str,
    ) -> Result<(), Problem> {
        match provider.kind {
            ProviderKind::Native => {
                let root = self.read_root(provider, passphrase).await?;
                self.native(provider.id)?.set(root);
            }
            ProviderKind::Kmip => self.unlock_kmip(provider, passphrase).await?,
        }
        self.tell("provider.unlocked", provider, actor, "its passphrase was given").await?;
        self.raise_sealed().await?;
        self.unlocked.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Whether [`Providers::unlock`] would succeed; changes nothing.
    ///
    /// # Errors
    /// Those of [`Providers::unlock`].
    pub async fn check_unlock(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
    ) -> Result<(), Problem> {
        match provider.kind {
            ProviderKind::Native => self.read_root(provider, passphrase).await.map(drop),
            ProviderKind::Kmip => self.read_client_key(provider, passphrase).await.map(drop),
        }
    }

    /// Seals a provider's files under another passphrase; the provider stays unlocked, or sealed.
    ///
    /// # Errors
    /// `key-mismatch` for a wrong old one; `invalid-request` for a new one that is trivial.
    pub async fn change_passphrase(
        &self,
        provider: &Provider,
        old: Option<SecretBytes>,
        new: SecretBytes,
        actor: &str,
    ) -> Result<(), Problem> {
        check_new_passphrase(&new, "new")?;
        let old = self.passphrase_for(&provider.name, old)?;
        match provider.kind {
            ProviderKind::Native => {
                let root = self.read_root(provider, old).await?;
                let directory = self.directory_of(provider.id);
                self.derive(move || root.write(&directory, &new)).await?;
                let detail = "its key is sealed under another one";
                self.tell("provider.passphrase-changed", provider, actor, detail).await
            }
            ProviderKind::Kmip => self.reseal_client_key(provider, old, new, actor).await,
        }
    }

    /// Whether [`Providers::change_passphrase`] would change it.
    ///
    /// # Errors
    /// Those of [`Providers::change_passphrase`].
    pub async fn check_change_passphrase(
        &self,
        provider: &Provider,
        old: Option<SecretBytes>,
        new: &SecretBytes,
    ) -> Result<(), Problem> {
        check_new_passphrase(new, "new")?;
        let old = self.passphrase_for(&provider.name, old)?;
        self.check_unlock(provider, old).await
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
                "provider '{}' has {keys} keys in use, and {policies} policies name it: give VMs keys of another provider (vmseal vm recrypt VM --provider NAME), and policies another provider (vmseal policy set POLICY --provider NAME) first",
                provider.name
            );
            return Err(Problem::new(ErrorCode::InUse, detail));
        }
        for task in tasks::open(from).await? {
            if task.operation.provider_of_new_key() == Some(provider.id) {
                let detail = format!(
                    "task {} gives VM '{}' a key of provider '{}': wait for it, or cancel it (vmseal task cancel)",
                    task.id, task.target, provider.name
                );
                return Err(Problem::new(ErrorCode::InUse, detail));
            }
        }
        Ok(())
    }

    /// Removes a provider that is not in use, with its key.
    ///
    /// # Errors
    /// `in-use`.
    pub async fn remove(&self, provider: &Provider, actor: &str) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        Self::check_unused(&mut write, provider).await?;
        // It will not be requested any more.
        for key in keys::living(&mut write, provider.id).await? {
            let detail = format!(
                "key '{}' of VM {} was pending destruction at provider '{}', which is removed: destroy it there",
                key.key_id, key.vm, provider.name
            );
            let (kind, target) = ("key.orphaned", provider.name.as_str());
            write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        }
        for noted in key_requests::of_provider(&mut write, provider.id).await? {
            let why = format!("and provider '{}' is removed", provider.name);
            let (kind, target) = ("key.orphaned", provider.name.as_str());
            let detail = kmip::orphan(&noted, &why);
            write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
            key_requests::delete(&mut write, provider.id, noted.request).await?;
        }
        providers::delete(&mut write, provider.id).await?;
        let (kind, target) = ("provider.removed", provider.name.as_str());
        write.event(NewEvent { kind, actor, target, detail: "with its key" }).await?;
        write.commit().await?;
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&provider.id);
        self.raise_sealed().await?;
        // Its watch has ended: nobody else would clear its alarms.
        let mut write = self.store.write().await?;
        alarms::replace(&mut write, &provider.id.to_string(), &[]).await?;
        write.commit().await?;
        let directory = self.directory_of(provider.id);
        if let Err(error) = std::fs::remove_dir_all(&directory) {
            // It is sealed, and no longer referenced.
            tracing::warn!(directory = %directory.display(), %error, "a removed provider's file is left");
        }
        Ok(())
    }

    /// Updates the alarms after another provider has become the default one.
    ///
    /// # Errors
    /// The inventory's.
    pub async fn default_changed(&self) -> Result<(), Problem> {
        for open in self.open.read().unwrap_or_else(PoisonError::into_inner).values() {
            if let Open::Kmip(watched) = open {
                watched.provider.look_now();
            }
        }
        self.raise_sealed().await
    }

    /// The alarm about a native default provider that is sealed; a KMIP one has a watch, which raises it.
    async fn raise_sealed(&self) -> Result<(), Problem> {
        let default = providers::default(&mut *self.store.read().await?).await?;
        let sealed = default
            .filter(|provider| self.native(provider.id).is_ok_and(|native| native.is_sealed()));
        let raised: Vec<_> = sealed
            .into_iter()
            .map(|provider| RaisedAlarm {
                code: "provider-sealed",
                detail: format!(
                    "the default key provider '{0}' is sealed: no VM can be made or unlocked with its keys. Unlock it (vmseal provider unlock {0})",
                    provider.name
                ),
                target: provider.name,
                reason: Some(KeyFault::ProviderSealed),
            })
            .collect();
        if alarms::differ(&mut *self.store.read().await?, NATIVE_ALARMS, &raised).await? {
            let mut write = self.store.write().await?;
            alarms::replace(&mut write, NATIVE_ALARMS, &raised).await?;
            write.commit().await?;
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

/// Refuses a new passphrase that is trivial.
pub(crate) fn check_new_passphrase(passphrase: &SecretBytes, field: &str) -> Result<(), Problem> {
    passphrase_rule::check_new(passphrase)
        .map_err(|trivial| Problem::invalid(field, trivial.to_string()))
}

#[cfg(test)]
mod tests;
