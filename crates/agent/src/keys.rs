//! The KEKs of the VMs on this host, in locked memory only, and the key pair they are sealed to.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::cloud_init::cloud_init_info;
use vmseal_api::host::{
    KeyReference, MIGRATION_KEY_LEN, PoolKey, SealedKey, export_info, key_info, pool_key_info,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::cephx::CephxKey;
use vmseal_secret::derive::{KeyContext, check_value};
use vmseal_secret::sealed_box::{BoxError, Recipient, SealedBox};
use vmseal_secret::{KEK_LEN, SecretBytes};

/// The key pair that KEKs are sealed to. It lives as long as the agent.
pub struct KeyBox(Recipient);

impl KeyBox {
    /// A new key pair.
    ///
    /// # Errors
    /// [`BoxError`]: memory could not be locked.
    pub fn new() -> Result<Self, BoxError> {
        Recipient::generate().map(Self)
    }

    /// The public half, as [`vmseal_api::host::HostDescription::key_box`] has it.
    #[must_use]
    pub fn public(&self) -> String {
        STANDARD.encode(self.0.public_key())
    }

    /// Opens the passphrase of an export.
    ///
    /// # Errors
    /// `wrong-state` when it is sealed to an earlier run of the agent, `invalid-request` when it is not a
    /// sealed box or is for another disk.
    pub fn open_passphrase(
        &self,
        vm: VmId,
        disk: DiskId,
        offered: &SealedKey,
    ) -> Result<SecretBytes, Problem> {
        self.open_box(offered, &export_info(vm, disk), || {
            Problem::invalid("passphrase", "it is sealed for another disk")
        })
    }

    /// Opens the packed documents of a disk for cloud-init.
    ///
    /// # Errors
    /// `wrong-state` if they are sealed to an earlier agent process; `invalid-request` if they are no sealed box,
    /// or for another disk.
    pub fn open_cloud_init(
        &self,
        vm: VmId,
        disk: DiskId,
        offered: &SealedKey,
    ) -> Result<SecretBytes, Problem> {
        if offered.key_box != self.public() {
            let what = "the cloud-init data cannot be opened any more: the agent has restarted since it was sealed for it, and nobody else can. Create the VM again";
            return Err(Problem::new(ErrorCode::WrongState, what));
        }
        self.open_box(offered, &cloud_init_info(vm, disk), || {
            Problem::invalid("cloud_init", "it is sealed for another disk")
        })
    }

    /// Opens the key of a migration, which is sealed with this context.
    ///
    /// # Errors
    /// `wrong-state` when it is sealed to an earlier run of the agent; `invalid-request` when it is not a sealed box, or for
    /// another migration.
    pub fn open_migration(&self, info: &[u8], offered: &SealedKey) -> Result<SecretBytes, Problem> {
        let key = self.open_box(offered, info, || {
            Problem::invalid("begin.session.key", "it is sealed for another migration")
        })?;
        match key.len() {
            MIGRATION_KEY_LEN => Ok(key),
            _ => Err(Problem::invalid("begin.session.key", "its length is wrong")),
        }
    }

    /// Opens the key of a pool; none where it is to be forgotten.
    ///
    /// # Errors
    /// `wrong-state` when it is sealed to an earlier run of the agent; `invalid-request` when it is not a sealed box, for another
    /// mount, or not the key of a Ceph user.
    pub fn open_pool_key(&self, offered: &PoolKey) -> Result<Option<SecretBytes>, Problem> {
        let Some(sealed) = &offered.key else { return Ok(None) };
        let key = self.open_box(sealed, &pool_key_info(&offered.path), || {
            Problem::invalid("key", "it is sealed for another mount")
        })?;
        CephxKey::bare(key.expose()).map_err(|error| Problem::invalid("key", error.to_string()))?;
        Ok(Some(key))
    }

    fn open_box(
        &self,
        offered: &SealedKey,
        info: &[u8],
        other: impl FnOnce() -> Problem,
    ) -> Result<SecretBytes, Problem> {
        if offered.key_box != self.public() {
            return Err(Problem::new(
                ErrorCode::WrongState,
                "the secret is sealed to an earlier run of this agent; read its description and seal it again",
            ));
        }
        let sealed = STANDARD
            .decode(&offered.sealed)
            .map_err(|error| Problem::invalid("sealed", error.to_string()))?;
        let sealed = SealedBox::from_bytes(sealed)
            .map_err(|error| Problem::invalid("sealed", error.to_string()))?;
        self.0.open(&sealed, info).map_err(|error| match error {
            BoxError::Open => other(),
            error => Problem::new(ErrorCode::Internal, error.to_string()),
        })
    }

    /// Opens a delivery and checks that it is the key that `reference` means.
    ///
    /// # Errors
    /// `wrong-state` when it is sealed to an earlier run of the agent, `invalid-request` when it is not a
    /// sealed box, `key-mismatch` when it is another key or another VM's.
    pub fn open(
        &self,
        vm: VmId,
        reference: &KeyReference,
        offered: &SealedKey,
    ) -> Result<SecretBytes, Problem> {
        let kek = self.open_box(offered, &key_info(vm, reference), || {
            mismatch(vm, reference, "the sealed key is for another VM or key")
        })?;
        if kek.len() != KEK_LEN {
            return Err(mismatch(vm, reference, "its length is wrong"));
        }
        let check = check_value(&kek, &context(vm, reference))
            .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?;
        if check.to_string() != reference.check {
            return Err(mismatch(vm, reference, "its check value differs"));
        }
        Ok(kek)
    }
}

/// The VM and key of a KEK, as context for what is derived from it.
#[must_use]
pub fn context(vm: VmId, reference: &KeyReference) -> KeyContext<'_> {
    KeyContext {
        vm: *vm.0.as_bytes(),
        provider: *reference.provider.0.as_bytes(),
        key_id: &reference.key_id,
    }
}

fn mismatch(vm: VmId, reference: &KeyReference, why: &str) -> Problem {
    Problem::new(
        ErrorCode::KeyMismatch,
        format!(
            "key '{}' offered for VM {vm} is not the VM's key: {why}. Are the provider's servers replicated?",
            reference.key_id
        ),
    )
}

/// Seals a KEK as the server does. For tests.
#[cfg(any(test, feature = "contract-suite"))]
pub fn seal_for(key_box: &str, vm: VmId, reference: &KeyReference, kek: &SecretBytes) -> SealedKey {
    let public = STANDARD.decode(key_box).ok().and_then(|bytes| bytes.try_into().ok());
    let public: [u8; 32] = public.expect("a key box is 32 bytes in base64");
    let info = key_info(vm, reference);
    let sealed = vmseal_secret::sealed_box::seal(&public, &info, kek).expect("sealing");
    SealedKey { key_box: key_box.to_owned(), sealed: STANDARD.encode(sealed.as_bytes()) }
}

/// Seals documents as the server does. For tests.
#[cfg(any(test, feature = "contract-suite"))]
pub fn seal_documents_for(
    key_box: &str,
    vm: VmId,
    disk: DiskId,
    documents: &vmseal_api::cloud_init::Documents,
) -> SealedKey {
    let public = STANDARD.decode(key_box).ok().and_then(|bytes| bytes.try_into().ok());
    let public: [u8; 32] = public.expect("a key box is 32 bytes in base64");
    let packed = SecretBytes::from_wiped(&mut documents.packed()).expect("locked memory");
    let info = cloud_init_info(vm, disk);
    let sealed = vmseal_secret::sealed_box::seal(&public, &info, &packed).expect("sealing");
    SealedKey { key_box: key_box.to_owned(), sealed: STANDARD.encode(sealed.as_bytes()) }
}

/// The reference of a KEK, with its real check value. For tests.
#[cfg(any(test, feature = "contract-suite"))]
pub fn reference_of(kek: &SecretBytes, vm: VmId, key_id: &str) -> KeyReference {
    let mut reference = KeyReference {
        provider: vmseal_api::id::ProviderId::new(),
        key_id: key_id.to_owned(),
        check: String::new(),
    };
    let check = check_value(kek, &context(vm, &reference)).expect("deriving").to_string();
    reference.check = check;
    reference
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_key_for_the_right_vm_and_agent_is_accepted() {
        let key_box = KeyBox::new().unwrap();
        let (vm, kek) = (VmId::new(), SecretBytes::random(KEK_LEN).unwrap());
        let reference = reference_of(&kek, vm, "k1");
        let good = seal_for(&key_box.public(), vm, &reference, &kek);
        assert_eq!(key_box.open(vm, &reference, &good).unwrap(), kek);

        let code = |vm, reference: &KeyReference, sealed: &SealedKey| {
            key_box.open(vm, reference, sealed).unwrap_err().code
        };
        assert_eq!(code(VmId::new(), &reference, &good), ErrorCode::KeyMismatch);
        let other = SecretBytes::random(KEK_LEN).unwrap();
        let wrong = seal_for(&key_box.public(), vm, &reference, &other);
        assert_eq!(code(vm, &reference, &wrong), ErrorCode::KeyMismatch);
        let short = SecretBytes::random(16).unwrap();
        let short = seal_for(&key_box.public(), vm, &reference, &short);
        assert_eq!(code(vm, &reference, &short), ErrorCode::KeyMismatch);
        let earlier = KeyBox::new().unwrap();
        let stale = seal_for(&earlier.public(), vm, &reference, &kek);
        assert_eq!(code(vm, &reference, &stale), ErrorCode::WrongState);
        for sealed in ["", "%", "AAAA"] {
            let garbage = SealedKey { sealed: sealed.to_owned(), ..good.clone() };
            assert_eq!(code(vm, &reference, &garbage), ErrorCode::InvalidRequest, "{sealed:?}");
        }
    }
}
