//! Makes manifests, and checks who made one.

use vmseal_api::host::backup::{self, BackedUpDisk, BackupManifest};
use vmseal_api::host::{BackupJob, KeyReference, VmSpec};
use vmseal_api::id::DatastoreId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{Purpose, derive};
use vmseal_secret::mac::mac;

use crate::keys;
use crate::storage::descriptor;

fn internal(error: impl std::fmt::Display) -> Problem {
    Problem::new(ErrorCode::Internal, format!("a backup's manifest cannot be made: {error}"))
}

/// A key and its reference.
#[derive(Clone, Copy)]
pub struct Key<'a> {
    pub reference: &'a KeyReference,
    pub kek: &'a SecretBytes,
}

/// The MAC of a manifest.
///
/// # Errors
/// `internal`: no memory for its key.
pub fn code_of(manifest: &BackupManifest, key: Key<'_>) -> Result<String, Problem> {
    let context = keys::context(manifest.vm.vm, key.reference);
    let derived = derive(key.kek, &context, Purpose::Backup).map_err(internal)?;
    let code = mac(&derived, &[&manifest.authenticated().map_err(internal)?]);
    Ok(code.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The manifest of a backup, authenticated where the VM has a key; `suspended` says that the VM is.
///
/// # Errors
/// `internal`: no memory for the key of the MAC.
pub fn manifest_of(
    spec: &VmSpec,
    job: &BackupJob,
    disks: Vec<BackedUpDisk>,
    kek: Option<&SecretBytes>,
    suspended: bool,
) -> Result<BackupManifest, Problem> {
    // Of no datastore: where its disks are is in the descriptor. Nor are its snapshots in the backup, and what users say of the VM is
    // not of the time of the backup.
    let vm = VmSpec { snapshots: Vec::new(), about: None, ..spec.clone() };
    let overlays = disks.iter().any(|disk| disk.format == ImageFormat::Qcow2);
    // Earlier versions of vmseal restore what has neither of these as they always did.
    let has_tpm = disks.iter().any(|disk| disk.tpm.is_some());
    let version = match (suspended, has_tpm) {
        (true, _) => backup::VERSION,
        (false, true) => backup::WITH_TPM,
        (false, false) => backup::WITHOUT_TPM,
    };
    let mut manifest = BackupManifest {
        version,
        backup: job.backup,
        name: job.name.clone(),
        created: job.created,
        parent: job.parent.filter(|_| overlays),
        quiesced: job.quiesced,
        suspended,
        vm: descriptor::of(&vm, DatastoreId::default(), None, None)?,
        disks,
        mac: None,
    };
    if let (Some(reference), Some(kek)) = (&spec.key, kek) {
        manifest.mac = Some(code_of(&manifest, Key { reference, kek })?);
    }
    Ok(manifest)
}

/// Checks that a manifest names the key that its backup opens with, and was made with it.
///
/// # Errors
/// `locked` without that key; `damaged` when it was not.
pub fn check(
    manifest: &BackupManifest,
    opens_with: Option<&KeyReference>,
    key: Option<Key<'_>>,
) -> Result<(), Problem> {
    let changed = || {
        let what = format!(
            "the manifest of backup '{}' is not as vmseal has written it: it was changed, or is damaged",
            manifest.name
        );
        Problem::new(ErrorCode::Damaged, what)
    };
    // Who writes to the directory can leave out key and code, but not what the server knows.
    if manifest.vm.key.as_ref() != opens_with {
        return Err(changed());
    }
    let Some(named) = opens_with else { return Ok(()) };
    let Some(key) = key.filter(|key| key.reference == named) else {
        let what = format!(
            "backup '{}' needs key '{}' of provider {}, which is not on this host",
            manifest.name, named.key_id, named.provider
        );
        return Err(Problem::new(ErrorCode::Locked, what));
    };
    match manifest.mac.as_ref() == Some(&code_of(manifest, key)?) {
        true => Ok(()),
        false => Err(changed()),
    }
}
