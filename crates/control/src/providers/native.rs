//! The native provider: KEKs derived from one key-derivation key, which rests in a file sealed under
//! a passphrase.
//!
//! ```text
//! root key        provider id (16) ‖ key-derivation key (32), random
//! key file        root key, sealed with associated data "vmseal native provider key v1"
//! backup          root key, sealed with associated data "vmseal native provider backup v1"
//! KEK             HKDF-SHA256(key-derivation key, no salt,
//!                   "vmseal native provider KEK v1\0" ‖ provider id (16) ‖ key id)
//! ```
//!
//! The id is sealed with the key, so that a backup restored on another server gives the same KEKs under the
//! same references. Destroying a derived key is a tombstone in the inventory: anyone with the root key
//! can derive it again; only a KMS can really erase one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::{ProviderId, VmId};
use vmseal_api::key_fault::KeyFault;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::derive::{KeyContext, check_value};
use vmseal_secret::passphrase::ENVELOPE_OVERHEAD;
use vmseal_secret::{KEK_LEN, SecretBytes};

use super::{GivenKey, KeyProvider, sealed_file};
use crate::store::events::NewEvent;
use crate::store::{Store, keys};

const KEY_FILE: &[u8] = b"vmseal native provider key v1";
const BACKUP: &[u8] = b"vmseal native provider backup v1";
const KEK_LABEL: &[u8] = b"vmseal native provider KEK v1\0";

const ID_LEN: usize = 16;
const ROOT_LEN: usize = ID_LEN + 32;

/// The length of a key file and of a backup, in bytes.
pub const SEALED_LEN: usize = ROOT_LEN + ENVELOPE_OVERHEAD;

/// The key from which all keys of a provider are derived.
pub struct RootKey(SecretBytes);

impl RootKey {
    /// A new provider's.
    pub(super) fn generate() -> Result<Self, Problem> {
        let mut root = SecretBytes::random(ROOT_LEN).map_err(|error| crate::internal(&error))?;
        root.expose_mut()[..ID_LEN].copy_from_slice(ProviderId::new().0.as_bytes());
        Ok(Self(root))
    }

    fn open(
        sealed: &[u8],
        passphrase: &SecretBytes,
        associated: &[u8],
        what: &str,
    ) -> Result<Self, Problem> {
        if sealed.len() != SEALED_LEN {
            let detail = format!(
                "{what} has {} bytes where {SEALED_LEN} are expected: it is damaged, or another file",
                sealed.len()
            );
            return Err(Problem::new(ErrorCode::Damaged, detail));
        }
        sealed_file::open(sealed, passphrase, associated, what).map(Self)
    }

    /// The one in a backup.
    pub(super) fn from_backup(backup: &[u8], passphrase: &SecretBytes) -> Result<Self, Problem> {
        Self::open(backup, passphrase, BACKUP, "the backup")
    }

    /// A backup of it.
    pub(super) fn backup(&self, passphrase: &SecretBytes) -> Result<Vec<u8>, Problem> {
        sealed_file::seal(&self.0, passphrase, BACKUP)
    }

    /// Writes the key file into the provider's directory.
    pub(super) fn write(&self, directory: &Path, passphrase: &SecretBytes) -> Result<(), Problem> {
        let sealed = sealed_file::seal(&self.0, passphrase, KEY_FILE)?;
        sealed_file::write(directory, "key", &sealed)
    }

    /// The provider that it belongs to.
    pub(super) fn provider(&self) -> ProviderId {
        let mut id = [0; ID_LEN];
        id.copy_from_slice(&self.0.expose()[..ID_LEN]);
        ProviderId(Uuid::from_bytes(id))
    }

    /// Whether it is the same; in constant time.
    pub(super) fn same(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    fn kek(&self, key_id: &str) -> Result<SecretBytes, Problem> {
        struct Kek;
        impl KeyType for Kek {
            fn len(&self) -> usize {
                KEK_LEN
            }
        }
        let (id, derivation_key) = self.0.expose().split_at(ID_LEN);
        let mut kek = SecretBytes::zeroed(KEK_LEN).map_err(|error| crate::internal(&error))?;
        Salt::new(HKDF_SHA256, &[])
            .extract(derivation_key)
            .expand(&[KEK_LABEL, id, key_id.as_bytes()], Kek)
            .and_then(|derived| derived.fill(kek.expose_mut()))
            .map_err(|_| Problem::new(ErrorCode::Internal, "HKDF-SHA256 failed in AWS-LC"))?;
        Ok(kek)
    }
}

/// A native provider; sealed until its passphrase is given.
pub struct NativeProvider {
    id: ProviderId,
    name: String,
    file: PathBuf,
    store: Arc<Store>,
    root: RwLock<Option<Arc<RootKey>>>,
}

impl NativeProvider {
    pub(super) fn sealed(id: ProviderId, name: String, file: PathBuf, store: Arc<Store>) -> Self {
        Self { id, name, file, store, root: RwLock::new(None) }
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.root.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    pub(super) fn set(&self, root: RootKey) {
        *self.root.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(root));
    }

    /// The root key of an unlocked provider.
    pub(super) fn root(&self) -> Result<Arc<RootKey>, Problem> {
        let root = self.root.read().unwrap_or_else(PoisonError::into_inner);
        root.clone().ok_or_else(|| {
            let detail = format!(
                "provider '{}' is sealed: unlock it (vmseal provider unlock {})",
                self.name, self.name
            );
            Problem::new(ErrorCode::WrongState, detail).because(KeyFault::ProviderSealed)
        })
    }

    /// Opens the key file.
    pub(super) fn read_root(&self, passphrase: &SecretBytes) -> Result<RootKey, Problem> {
        let what = format!("the key file of provider '{}'", self.name);
        let sealed = std::fs::read(&self.file).map_err(|error| {
            let detail = format!(
                "{what}, {}, cannot be read: {error}. Restore it from the provider's backup",
                self.file.display()
            );
            Problem::new(ErrorCode::Damaged, detail)
        })?;
        let root = RootKey::open(&sealed, passphrase, KEY_FILE, &what)?;
        if root.provider() != self.id {
            let detail = format!("{what} is that of another provider, {}", root.provider());
            return Err(Problem::new(ErrorCode::KeyMismatch, detail));
        }
        Ok(root)
    }

    fn check(&self, vm: VmId, key_id: &str, kek: &SecretBytes) -> Result<String, Problem> {
        let context =
            KeyContext { vm: vm.0.into_bytes(), provider: self.id.0.into_bytes(), key_id };
        let check = check_value(kek, &context).map_err(|error| crate::internal(&error))?;
        Ok(check.to_string())
    }

    async fn refuse_destroyed(&self, key_id: &str) -> Result<(), Problem> {
        if keys::is_destroyed(&mut *self.store.read().await?, self.id, key_id).await? {
            let detail = format!("key '{key_id}' of provider '{}' is destroyed", self.name);
            return Err(Problem::new(ErrorCode::NotFound, detail).because(KeyFault::KeyDestroyed));
        }
        Ok(())
    }
}

#[async_trait]
impl KeyProvider for NativeProvider {
    async fn create_key(
        &self,
        vm: VmId,
        request: Uuid,
    ) -> Result<(KeyReference, SecretBytes), Problem> {
        let key_id = request.hyphenated().to_string();
        self.refuse_destroyed(&key_id).await?;
        let kek = self.root()?.kek(&key_id)?;
        let check = self.check(vm, &key_id, &kek)?;
        Ok((KeyReference { provider: self.id, key_id, check }, kek))
    }

    async fn get_key(&self, vm: VmId, key: &KeyReference) -> Result<GivenKey, Problem> {
        self.refuse_destroyed(&key.key_id).await?;
        let kek = self.root()?.kek(&key.key_id)?;
        if self.check(vm, &key.key_id, &kek)? != key.check {
            let detail = format!(
                "key '{}' of provider '{}' is not the one that the VM was made with: is its key file from another backup? Restore the right one",
                key.key_id, self.name
            );
            return Err(Problem::new(ErrorCode::KeyMismatch, detail).because(KeyFault::KeyMismatch));
        }
        Ok(GivenKey { kek, fault: None })
    }

    async fn reference_of(&self, vm: VmId, key_id: &str) -> Result<KeyReference, Problem> {
        self.refuse_destroyed(key_id).await?;
        let kek = self.root()?.kek(key_id)?;
        let check = self.check(vm, key_id, &kek)?;
        Ok(KeyReference { provider: self.id, key_id: key_id.to_owned(), check })
    }

    async fn destroy_key(
        &self,
        vm: VmId,
        vm_name: &str,
        key: &KeyReference,
    ) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        if keys::destroy(&mut write, vm, key).await? {
            let detail = format!(
                "key '{}' of provider '{}': it is not given out any more (a derived key cannot be erased)",
                key.key_id, self.name
            );
            let (kind, actor) = ("key.destroyed", crate::SELF);
            write.event(NewEvent { kind, actor, target: vm_name, detail: &detail }).await?;
        }
        Ok(write.commit().await?)
    }

    /// The same request gives the same key: there is nothing that could have been made.
    async fn abandon(&self, _: Uuid) -> Result<(), Problem> {
        Ok(())
    }

    /// A fault is known without a request to a server.
    fn known_fault(&self) -> Option<Problem> {
        self.root().err()
    }

    fn known_fault_of(&self, _: &str) -> Option<Problem> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value comes from another implementation (Python's hmac), fed with the description above.
    #[test]
    fn a_kek_is_that_of_the_written_derivation() {
        let mut bytes: Vec<u8> = (0..ROOT_LEN as u8).collect();
        let root = RootKey(SecretBytes::from_wiped(&mut bytes).unwrap());
        let kek = root.kek("key-7").unwrap();
        let hex: String = kek.expose().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "f4fbd15162929d247dc58f2939c3a792a7257dc197e31ff12cc5b04e4e82e47a");
        assert_ne!(root.kek("key-8").unwrap(), kek);
        golden_backup_holds(&root);
    }

    /// Made from the written format by another implementation (argon2-cffi and pyca/cryptography): it has to
    /// open forever.
    fn golden_backup_holds(root: &RootKey) {
        let backup = include_bytes!("../../tests/golden/native-backup-v1.bin");
        let passphrase = SecretBytes::from_wiped(&mut b"correct horse".to_vec()).unwrap();
        assert!(RootKey::from_backup(backup, &passphrase).unwrap().same(root));
        // A backup in place of a key file is refused.
        let refused = RootKey::open(backup, &passphrase, KEY_FILE, "it").err().unwrap();
        assert_eq!(refused.code, ErrorCode::KeyMismatch);
    }
}
