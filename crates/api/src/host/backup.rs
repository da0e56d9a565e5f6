//! Backups of VMs on a host: what a backup's manifest says (docs/formats/backup.md).
//!
//! Who writes to the directory of backups can write any of it. For a VM that has a key the manifest is authenticated: its MAC
//! is made with a key that is derived from the VM's.

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::filter::DISKS_MAX;
use crate::host::descriptor::{LENGTH_MAX as DESCRIPTOR_MAX, VmDescriptor};
use crate::host::{DiskFacts, DiskRole};
use crate::id::{BackupId, DiskId, VmId, check_name};
use crate::transfer::ImageFormat;

/// The newest version of manifests: of a VM that was suspended. What needs less is written as a version that earlier versions of vmseal
/// read.
pub const VERSION: u32 = 3;

/// The first version with what a TPM keeps.
pub const WITH_TPM: u32 = 2;

/// The first version of all.
pub const WITHOUT_TPM: u32 = 1;

/// What is said of the backup of a VM that is suspended, wherever one is made, shown or restored.
pub const WITHOUT_MEMORY: &str = "the saved memory of its guest is not in the backup, and what is restored from it starts as after a power cut";

/// The longest manifest, in bytes: a descriptor, and as much again for the files of the most disks.
pub const LENGTH_MAX: usize = 2 * DESCRIPTOR_MAX;

/// The most that a TPM keeps, as swtpm encrypts it, in bytes: several times as much as one with all of its memory in use.
pub const TPM_STATE_MAX: u64 = 1 << 20;

/// The digits of a MAC, and of a SHA-256.
const DIGITS: usize = 64;

/// What the names of dirty bitmaps begin with that note what has changed since a backup.
pub const TRACKING_PREFIX: &str = "vmseal-backup-";

/// The name of the dirty bitmap that notes what a guest changes of a disk since this backup.
#[must_use]
pub fn tracking_name(backup: BackupId) -> String {
    format!("{TRACKING_PREFIX}{}", backup.0.simple())
}

/// Where a backup is on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupPlace {
    /// The absolute path of the directory of backups.
    pub directory: PathBuf,
    /// The VM that it is of.
    pub vm: VmId,
    /// The backup.
    pub backup: BackupId,
}

/// A backup of a VM. The order of the fields is that in which they are authenticated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupManifest {
    /// The version of the format.
    pub version: u32,
    /// The backup.
    pub backup: BackupId,
    /// Its name.
    pub name: String,
    /// The instant that its disks are of.
    pub created: Timestamp,
    /// The backup that its overlays are above; none where all of its files are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<BackupId>,
    /// Whether the guest's file systems were frozen at that instant, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// Whether the VM was suspended: its disks are of the instant at which it was, and the memory of its guest is not in the backup.
    /// Left out before version 3.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
    /// The VM at that time.
    pub vm: VmDescriptor,
    /// The disks that are in it.
    pub disks: Vec<BackedUpDisk>,
    /// HMAC-SHA256 of all other fields, in hexadecimal; none where the VM has no key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

/// A disk in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackedUpDisk {
    /// The disk.
    pub disk: DiskId,
    /// Its name within the VM.
    pub name: String,
    /// Its file, beside the manifest.
    pub file: String,
    /// What the file is: raw is whole, qcow2 is above that of the parent.
    pub format: ImageFormat,
    /// The length of the image with its header, in bytes.
    pub length: u64,
    /// The room that the file took, in bytes.
    pub bytes: u64,
    /// What was pinned of the disk.
    pub facts: DiskFacts,
    /// The file with the sums of its blocks, beside the manifest.
    pub sums: String,
    /// The SHA-256 of that file, in hexadecimal.
    pub sums_sha256: String,
    /// What the VM's TPM kept, where this is the disk that has its key; none before version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<BackedUpTpm>,
}

impl BackedUpDisk {
    /// Whether what is in the backup of it is encrypted. What a TPM keeps is in any case.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.tpm.is_some() || self.facts != DiskFacts::Raw
    }
}

/// What a TPM kept, in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackedUpTpm {
    /// Its file, beside the manifest.
    pub file: String,
    /// The length of that, in bytes.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal.
    pub sha256: String,
    /// Whether it was read later than the disks were kept, while the guest ran on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub later: bool,
}

/// What is in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BackupContents {
    /// The disks; with that of a TPM, what the TPM kept.
    pub disks: Vec<BackupPart>,
    /// What the VM had beside them: it is not restored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<BackupPart>,
    /// Whether what the TPM kept is of a later instant than the disks, as the agent has restarted between the two.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tpm_later: bool,
    /// Whether the VM was suspended: the saved memory of its guest is not in the backup, and what is restored from it starts as after a
    /// power cut.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
}

/// A disk of a VM, in a backup or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BackupPart {
    /// Its name within the VM.
    pub name: String,
    /// What it is for.
    #[serde(default, skip_serializing_if = "DiskRole::is_data")]
    pub role: DiskRole,
    /// Whether what is in the backup of it is encrypted; none of what is not in it, and where that was not noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
}

/// Why a manifest cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is too long.
    #[error("it has more than {LENGTH_MAX} bytes")]
    TooLong,
    /// It is no manifest.
    #[error("it cannot be parsed: {0}")]
    Json(#[from] serde_json::Error),
    /// A later vmseal wrote it.
    #[error("it has version {0}, and this vmseal reads versions {WITHOUT_TPM} to {VERSION}")]
    Version(u64),
    /// A value that no backup has.
    #[error("{0}")]
    Value(String),
}

/// The beginning of manifests of all versions, also future ones.
#[derive(Deserialize)]
struct Head {
    version: u64,
}

/// Parses a manifest, and checks each value.
///
/// # Errors
/// [`ManifestError`].
pub fn parse(json: &[u8]) -> Result<BackupManifest, ManifestError> {
    if json.len() > LENGTH_MAX {
        return Err(ManifestError::TooLong);
    }
    let Head { version } = serde_json::from_slice(json)?;
    if !(u64::from(WITHOUT_TPM)..=u64::from(VERSION)).contains(&version) {
        return Err(ManifestError::Version(version));
    }
    let manifest: BackupManifest = serde_json::from_slice(json)?;
    manifest.check().map_err(ManifestError::Value)?;
    Ok(manifest)
}

/// Whether it is the name of a file beside the manifest, and of no other.
fn is_file_name(name: &str) -> bool {
    let known = ["luks", "raw", "qcow2", "sums", "tpm"];
    name.rsplit_once('.')
        .is_some_and(|(disk, kind)| known.contains(&kind) && check_name(disk).is_ok())
}

fn is_hexadecimal(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl BackupManifest {
    fn check(&self) -> Result<(), String> {
        self.vm.check()?;
        check_name(&self.name).map_err(|error| format!("the backup's name: {error}"))?;
        if self.disks.len() > DISKS_MAX {
            return Err(format!("it has more than {DISKS_MAX} disks"));
        }
        if self.suspended && self.version < VERSION {
            let version = self.version;
            return Err(format!(
                "it says that the VM was suspended, which version {version} does not"
            ));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let of = |what: &str| format!("disk {}: {what}", index + 1);
            if !is_file_name(&disk.file) || !is_file_name(&disk.sums) {
                return Err(of("its files have names that vmseal does not give"));
            }
            if self.disks[..index].iter().any(|it| it.disk == disk.disk) {
                return Err(of("another one has its id"));
            }
            let known = self.vm.disks.iter().find(|it| it.disk == disk.disk);
            let Some(known) = known.filter(|it| it.name == disk.name) else {
                return Err(of("the VM has none of its id and name"));
            };
            let header = match &disk.facts {
                DiskFacts::Raw => 0,
                DiskFacts::Luks2 { data_offset, .. } => *data_offset,
            };
            if header > DISK_HEADER_MAX || disk.length != header + known.size {
                return Err(of("its image has not the length of the disk"));
            }
            if !is_hexadecimal(&disk.sums_sha256) {
                return Err(of("the SHA-256 of its sums has another form"));
            }
            if disk.format == ImageFormat::Qcow2 && self.parent.is_none() {
                return Err(of("it is above another backup, which is not named"));
            }
            self.check_tpm(disk, known.role).map_err(of)?;
        }
        match &self.mac {
            Some(mac) if !is_hexadecimal(mac) => {
                Err("its authentication code has another form".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// The disk of a TPM comes with what the TPM kept, and no other one does.
    fn check_tpm(&self, disk: &BackedUpDisk, role: DiskRole) -> Result<(), &'static str> {
        match &disk.tpm {
            None if role == DiskRole::Tpm => Err("it lacks what the TPM kept"),
            None => Ok(()),
            Some(_) if role != DiskRole::Tpm || self.version < WITH_TPM => {
                Err("it has what a TPM kept, and is not the disk of one")
            }
            Some(tpm) if !is_file_name(&tpm.file) => {
                Err("what the TPM kept has a name that vmseal does not give")
            }
            Some(tpm) if tpm.bytes > TPM_STATE_MAX => Err("it has more than a TPM keeps"),
            Some(tpm) if !is_hexadecimal(&tpm.sha256) => {
                Err("the SHA-256 of what the TPM kept has another form")
            }
            Some(_) => Ok(()),
        }
    }

    /// What is in it, and what the VM had that is not.
    #[must_use]
    pub fn contents(&self) -> BackupContents {
        let (mut disks, mut lacks, mut tpm_later) = (Vec::new(), Vec::new(), false);
        for disk in &self.vm.disks {
            let entry = self.disks.iter().find(|it| it.disk == disk.disk);
            let encrypted = entry.map(BackedUpDisk::is_encrypted);
            let part = BackupPart { name: disk.name.clone(), role: disk.role, encrypted };
            match entry {
                Some(entry) => {
                    tpm_later |= entry.tpm.as_ref().is_some_and(|tpm| tpm.later);
                    disks.push(part);
                }
                None => lacks.push(part),
            }
        }
        BackupContents { disks, lacks, tpm_later, suspended: self.suspended }
    }

    /// The bytes that are authenticated: compact JSON of all fields but the MAC.
    ///
    /// # Errors
    /// None that a manifest of ours causes.
    pub fn authenticated(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Self { mac: None, ..self.clone() })
    }

    /// The room that its files took, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let of_tpm = |disk: &BackedUpDisk| disk.tpm.as_ref().map_or(0, |tpm| tpm.bytes);
        self.disks.iter().map(|disk| disk.bytes.saturating_add(of_tpm(disk))).sum()
    }

    /// Whether each of its files is whole in itself.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.parent.is_none()
    }
}

/// The longest header of an image, in bytes: several times as long as vmseal's.
const DISK_HEADER_MAX: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// The manifest of a VM without disks, of this version.
    fn manifest(version: u32, suspended: &str) -> String {
        let id = "01980000-0000-7000-8000-000000000001";
        format!(
            r#"{{"version":{version},"backup":"{id}","name":"one","created":"2026-01-02T03:04:05Z"{suspended},"vm":{{"version":2,"vm":"{id}","name":"web","vcpus":1,"memory":1073741824,"policy":"plain","disks":[]}},"disks":[]}}"#
        )
    }

    #[test]
    fn a_backup_says_that_its_vm_was_suspended_and_only_in_a_version_that_says_it() {
        let suspended = r#","suspended":true"#;
        for version in [WITHOUT_TPM, WITH_TPM, VERSION] {
            let running = parse(manifest(version, "").as_bytes()).unwrap();
            assert!(!running.suspended && !running.contents().suspended);
            let text = String::from_utf8(running.authenticated().unwrap()).unwrap();
            assert!(!text.contains("suspended"), "its code is another one than before: {text}");
        }
        let read = parse(manifest(VERSION, suspended).as_bytes()).unwrap();
        assert!(read.suspended && read.contents().suspended);
        let text = String::from_utf8(read.authenticated().unwrap()).unwrap();
        assert!(text.contains(suspended), "it is not authenticated: {text}");
        for earlier in [WITHOUT_TPM, WITH_TPM] {
            let refused = parse(manifest(earlier, suspended).as_bytes()).unwrap_err().to_string();
            assert!(refused.contains("was suspended"), "{refused}");
        }
        let newer = parse(manifest(VERSION + 1, "").as_bytes()).unwrap_err();
        assert!(matches!(newer, ManifestError::Version(_)), "{newer}");
    }
}
