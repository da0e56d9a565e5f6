//! The descriptor of a VM on a datastore (`vm.json`, docs/formats/vm-descriptor.md): what an inventory needs of it that
//! the headers of its disks do not say. A server that has lost its inventory adopts VMs by it.
//!
//! Who writes to the datastore can write any of it. For a VM that has a key it is authenticated: its MAC is made with a
//! key that is derived from the VM's. The types of this module, and those of the API that they are made of, are the
//! stored format; a golden file pins them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::about::{AboutVm, check_description};
use super::disk::{Allocation, DiskFacts, DiskLimits, DiskRole};
use super::key::KeyReference;
use crate::filter::{CRYPT_SECTOR, DISKS_MAX};
use crate::hardware::Hardware;
use crate::id::{DatastoreId, DiskId, SnapshotId, VmId, check_name};
use crate::limits::{DISK_SIZE_MAX, MEMORY_MAX, MEMORY_MIN, SNAPSHOTS_MAX, VCPUS_MAX};
use crate::nic::{NicSpec, NicToCheck, check_nics};

/// The newest version, with how the VM is treated, and what was said of its snapshots. A descriptor without any of that is written as
/// [`WITHOUT_TREATMENT`].
pub const VERSION: u32 = 5;

/// The version before that, with what users say of the VM, which earlier versions of vmseal read. A descriptor of which they say nothing
/// is written as [`WITHOUT_ABOUT`].
pub const WITHOUT_TREATMENT: u32 = 4;

/// The version before that, with snapshots, which still earlier versions of vmseal read. A descriptor without any is written as
/// [`WITHOUT_SNAPSHOTS`].
pub const WITHOUT_ABOUT: u32 = 3;

/// The version before snapshots, which still earlier versions of vmseal read.
pub const WITHOUT_SNAPSHOTS: u32 = 2;

/// The oldest version that is read: without what a VM needs beside its disks, and without a MAC.
const OLDEST: u32 = 1;

/// The longest descriptor, in bytes: one of a VM with the most disks and cards, with the longest description of which each byte is
/// escaped, and with as much said of its snapshots as is written, fits well within.
pub const LENGTH_MAX: usize = 256 * 1024;

/// The most that hosts are told and write of what was said of a VM's snapshots, in bytes of JSON in all: some lines of each of the most
/// snapshots. All that can be said would be longer than a request to a host may be.
pub const SNAPSHOT_DESCRIPTIONS_MAX: usize = 64 * 1024;

/// The unit of a VM's memory, in bytes.
const MEMORY_UNIT: u64 = 1 << 20;

/// The longest key id, in bytes.
const KEY_ID_MAX: usize = 255;

/// The digits of a MAC, and of a check value.
const MAC_DIGITS: usize = 64;
const CHECK_DIGITS: usize = 32;

/// A VM on a datastore. The order of the fields is that in which they are authenticated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmDescriptor {
    /// The version of the format.
    pub version: u32,
    /// The VM.
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// Virtual processors; none in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// Memory, in bytes; none in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// The name of its policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Its key; none where nothing of it is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyReference>,
    /// What its machine is; left out where it is what every VM has.
    #[serde(default, skip_serializing_if = "Hardware::is_usual")]
    pub hardware: Hardware,
    /// Its disks, in boot order; in version 1 those on this datastore alone.
    pub disks: Vec<DescribedDisk>,
    /// Its network cards, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<NicSpec>,
    /// Its snapshots, in the order in which they were taken; none before version 3.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<DescribedSnapshot>,
    /// What its users say of it; nothing before version 4, and how it is treated since version 5.
    #[serde(default, skip_serializing_if = "AboutVm::is_empty")]
    pub about: AboutVm,
    /// HMAC-SHA256 of all other fields, in hexadecimal; none where the VM has no key, or where it was not at hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

/// A disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedDisk {
    /// The disk.
    pub disk: DiskId,
    /// Its name within the VM.
    pub name: String,
    /// Its size as the guest sees it, in bytes.
    pub size: u64,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// Its file beside the descriptor; none where it is on another datastore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Its datastore; none in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<DatastoreId>,
    /// What it is for.
    #[serde(default, skip_serializing_if = "DiskRole::is_data")]
    pub role: DiskRole,
    /// Whether its room was allocated when it was made.
    #[serde(default)]
    pub allocation: Allocation,
    /// What its guest may use of it.
    #[serde(default)]
    pub limits: DiskLimits,
    /// The size of its cache, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
    /// Where its second copy is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<DescribedReplica>,
    /// What was pinned of it when it was made; none while it is being made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<DiskFacts>,
}

/// A snapshot of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedSnapshot {
    /// Which.
    pub snapshot: SnapshotId,
    /// Its name within the VM.
    pub name: String,
    /// The one that it was taken after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<SnapshotId>,
    /// When it was asked for.
    pub created: Timestamp,
    /// Whether the guest's file systems were frozen, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// Whether what the disks hold began with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub current: bool,
    /// The disks that it keeps, by their places among the VM's disks, from 0.
    pub disks: Vec<u8>,
    /// What its user said of it; nothing before version 5.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
}

/// The second copy of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DescribedReplica {
    /// Its datastore.
    pub datastore: DatastoreId,
    /// How fast it is copied.
    pub bytes_per_second: u64,
}

/// Why a descriptor cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    /// It is too long.
    #[error("it has more than {LENGTH_MAX} bytes")]
    TooLong,
    /// It is no descriptor.
    #[error("it cannot be parsed: {0}")]
    Json(#[from] serde_json::Error),
    /// A later vmseal wrote it.
    #[error("it has version {0}, and this vmseal reads versions {OLDEST} to {VERSION}")]
    Version(u64),
    /// A value that no VM has.
    #[error("{0}")]
    Value(String),
}

/// The beginning of descriptors of all versions, also future ones.
#[derive(Deserialize)]
struct Head {
    version: u64,
}

/// Parses a descriptor, and checks each value as a user's would be.
///
/// # Errors
/// [`DescriptorError`].
pub fn parse(json: &[u8]) -> Result<VmDescriptor, DescriptorError> {
    if json.len() > LENGTH_MAX {
        return Err(DescriptorError::TooLong);
    }
    let Head { version } = serde_json::from_slice(json)?;
    if !(u64::from(OLDEST)..=u64::from(VERSION)).contains(&version) {
        return Err(DescriptorError::Version(version));
    }
    let descriptor: VmDescriptor = serde_json::from_slice(json)?;
    descriptor.check().map_err(DescriptorError::Value)?;
    Ok(descriptor)
}

/// Leaves out what is too long in all of what was said of a VM's snapshots, of the later ones first.
pub fn bound_descriptions<'a>(descriptions: impl Iterator<Item = &'a mut String>) {
    let mut left = SNAPSHOT_DESCRIPTIONS_MAX;
    for description in descriptions {
        // A string can always be written.
        let length = serde_json::to_string(&*description).map_or(0, |json| json.len());
        match left.checked_sub(length) {
            Some(rest) => left = rest,
            None => description.clear(),
        }
    }
}

fn is_hexadecimal(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl VmDescriptor {
    pub(crate) fn check(&self) -> Result<(), String> {
        check_name(&self.name).map_err(|error| format!("the VM's name: {error}"))?;
        if let Some(policy) = &self.policy {
            check_name(policy).map_err(|error| format!("the policy's name: {error}"))?;
        }
        if self.vcpus.is_some_and(|vcpus| !(1..=VCPUS_MAX).contains(&vcpus)) {
            return Err(format!("the number of processors is not 1 to {VCPUS_MAX}"));
        }
        let fits = |memory: u64| {
            (MEMORY_MIN..=MEMORY_MAX).contains(&memory) && memory.is_multiple_of(MEMORY_UNIT)
        };
        if self.memory.is_some_and(|memory| !fits(memory)) {
            return Err("the size of the memory is none that a VM has".to_owned());
        }
        if let Some(memory) = self.memory {
            let hardware = self.hardware.check(memory);
            hardware.map_err(|(field, what)| format!("the {field} of its hardware {what}"))?;
        }
        if self.version > OLDEST && (self.vcpus.is_none() || self.memory.is_none()) {
            return Err("it lacks the number of processors, or the size of the memory".to_owned());
        }
        if let Some(key) = &self.key
            && (key.key_id.is_empty()
                || key.key_id.len() > KEY_ID_MAX
                || !is_hexadecimal(&key.check, CHECK_DIGITS))
        {
            return Err("its key is none that vmseal writes".to_owned());
        }
        if self.mac.as_ref().is_some_and(|mac| !is_hexadecimal(mac, MAC_DIGITS)) {
            return Err("its authentication code has another form".to_owned());
        }
        if self.version <= WITHOUT_ABOUT && !self.about.is_empty() {
            return Err("it says of the VM what its version does not".to_owned());
        }
        if self.version <= WITHOUT_TREATMENT && self.about.has_treatment() {
            return Err("it says how the VM is treated, which its version does not".to_owned());
        }
        self.about.check()?;
        self.check_devices()
    }

    fn check_devices(&self) -> Result<(), String> {
        if self.disks.len() > DISKS_MAX {
            return Err(format!("it has more than {DISKS_MAX} disks"));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let of = |what: String| format!("disk {}: {what}", index + 1);
            check_name(&disk.name).map_err(|error| of(error.to_string()))?;
            let before = &self.disks[..index];
            if before.iter().any(|it| it.disk == disk.disk || it.name == disk.name) {
                return Err(of("another disk has its id or name".to_owned()));
            }
            let sector = u64::from(CRYPT_SECTOR);
            if disk.size == 0 || disk.size > DISK_SIZE_MAX || !disk.size.is_multiple_of(sector) {
                return Err(of("its size is none that a disk has".to_owned()));
            }
            disk.limits.check().map_err(|(_, what)| of(what))?;
            if disk.encrypted && self.key.is_none() {
                return Err(of("it is encrypted, and the VM has no key".to_owned()));
            }
            if self.version > OLDEST && disk.datastore.is_none() {
                return Err(of("it does not say on which datastore it is".to_owned()));
            }
        }
        self.check_snapshots()?;
        let nics = self.nics.iter();
        let nics =
            nics.map(|it| NicToCheck { name: &it.name, mac: Some(it.mac), backend: &it.backend });
        check_nics(&nics.collect::<Vec<_>>()).map_err(|(field, what)| format!("{field}: {what}"))
    }

    fn check_snapshots(&self) -> Result<(), String> {
        if self.version <= WITHOUT_SNAPSHOTS && !self.snapshots.is_empty() {
            return Err("it has snapshots, which its version does not".to_owned());
        }
        if self.snapshots.len() > SNAPSHOTS_MAX {
            return Err(format!("it has more than {SNAPSHOTS_MAX} snapshots"));
        }
        for (index, snapshot) in self.snapshots.iter().enumerate() {
            let of = |what: &str| format!("snapshot {}: {what}", index + 1);
            check_name(&snapshot.name).map_err(|error| of(&error.to_string()))?;
            check_description(&snapshot.description)
                .map_err(|what| of(&format!("its description {what}")))?;
            if self.version <= WITHOUT_TREATMENT && !snapshot.description.is_empty() {
                return Err(of("it has a description, which its version does not"));
            }
            let before = &self.snapshots[..index];
            let same = |it: &DescribedSnapshot| {
                it.snapshot == snapshot.snapshot || it.name == snapshot.name
            };
            if before.iter().any(same) {
                return Err(of("another one has its id or name"));
            }
            if snapshot.disks.iter().any(|at| usize::from(*at) >= self.disks.len()) {
                return Err(of("it keeps a disk that the VM does not have"));
            }
        }
        Ok(())
    }

    /// The bytes that are authenticated: compact JSON of all fields but the MAC.
    ///
    /// # Errors
    /// None that a descriptor of ours causes.
    pub fn authenticated(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Self { mac: None, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::OnDrain;
    use crate::migration_encryption::MigrationEncryption;

    /// The example in docs/formats/vm-descriptor.md. Later versions have to read it too.
    const GOLDEN: &str = include_str!("../../tests/golden/vm-descriptor-2.json");
    const GOLDEN_5: &str = include_str!("../../tests/golden/vm-descriptor-5.json");
    const GOLDEN_4: &str = include_str!("../../tests/golden/vm-descriptor-4.json");
    const GOLDEN_3: &str = include_str!("../../tests/golden/vm-descriptor-3.json");
    const GOLDEN_1: &str = include_str!("../../tests/golden/vm-descriptor-1.json");

    #[test]
    fn the_golden_descriptors_are_read_and_newer_ones_are_written_the_same() {
        let newest = parse(GOLDEN_5.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string_pretty(&newest).unwrap(), GOLDEN_5.trim_end());
        let about = &newest.about;
        assert_eq!((about.on_drain, about.template), (OnDrain::Leave, true));
        assert_eq!(about.migration_encryption, MigrationEncryption::Required);
        assert_eq!(newest.snapshots[0].description, "before 2.0\nask Ann");
        let with_about = parse(GOLDEN_4.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string_pretty(&with_about).unwrap(), GOLDEN_4.trim_end());
        let about = &with_about.about;
        assert_eq!((about.labels["tier"].as_str(), about.autostart), ("gold", true));
        assert!(!about.has_treatment());
        let with_snapshots = parse(GOLDEN_3.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string_pretty(&with_snapshots).unwrap(), GOLDEN_3.trim_end());
        let snapshots = &with_snapshots.snapshots;
        assert_eq!((snapshots.len(), snapshots[1].current), (2, true));
        assert!(with_snapshots.about.is_empty());
        let descriptor = parse(GOLDEN.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string_pretty(&descriptor).unwrap(), GOLDEN.trim_end());
        assert_eq!((descriptor.vcpus, descriptor.memory), (Some(2), Some(1 << 30)));
        assert_eq!((descriptor.disks.len(), descriptor.nics.len()), (2, 1));
        let text = String::from_utf8(descriptor.authenticated().unwrap()).unwrap();
        assert!(
            text.starts_with(r#"{"version":2,"vm":""#) && !text.contains("mac\":\"8"),
            "{text}"
        );
        let older = parse(GOLDEN_1.as_bytes()).unwrap();
        assert_eq!((older.vcpus, older.disks[0].datastore), (None, None));
    }

    /// The longest that users can say fits, with the most disks, cards and snapshots.
    #[test]
    fn the_longest_descriptor_that_is_written_is_read() {
        let mut long = parse(GOLDEN_5.as_bytes()).unwrap();
        let name = |index: usize| format!("{index:063}");
        let disk = long.disks[0].clone();
        let disks = (0..DISKS_MAX).map(|index| DescribedDisk {
            disk: DiskId::new(),
            name: name(index),
            ..disk.clone()
        });
        long.disks = disks.collect();
        let snapshot = long.snapshots[0].clone();
        let snapshots = (0..SNAPSHOTS_MAX).map(|index| DescribedSnapshot {
            snapshot: SnapshotId::new(),
            name: name(index),
            disks: (0..long.disks.len() as u8).collect(),
            // Six bytes of JSON each.
            description: "\u{1}".repeat(SNAPSHOT_DESCRIPTIONS_MAX / SNAPSHOTS_MAX / 6),
            ..snapshot.clone()
        });
        long.snapshots = snapshots.collect();
        long.about.description = "\u{1}".repeat(crate::request::DESCRIPTION_MAX);
        let label = |index| (name(index), "\"".repeat(crate::request::LABEL_MAX));
        long.about.labels = (0..crate::request::LABELS_MAX).map(label).collect();
        let written = serde_json::to_vec_pretty(&long).unwrap();
        assert_eq!(parse(&written).unwrap(), long, "{} bytes", written.len());
    }

    #[test]
    fn values_that_no_vm_has_are_refused() {
        for (from, to) in [
            ("\"version\": 2", "\"version\": 6"),
            ("\"vcpus\": 2", "\"vcpus\": 0"),
            ("\"vcpus\": 2,", ""),
            ("\"memory\": 1073741824", "\"memory\": 1"),
            ("\"name\": \"web\"", "\"name\": \"../web\""),
            ("\"policy\": \"encrypted\"", "\"policy\": \"a b\""),
            ("\"size\": 1048576", "\"size\": 7"),
            ("\"name\": \"data\"", "\"name\": \"root\""),
            ("\"version\": 2", "\"version\": 2, \"more\": 1"),
            ("52:54:00:12:34:56", "53:54:00:12:34:56"),
            ("\"mac\": \"8", "\"mac\": \"x"),
        ] {
            let changed = GOLDEN.replacen(from, to, 1);
            assert_ne!(changed, GOLDEN, "{from}");
            assert!(parse(changed.as_bytes()).is_err(), "{from} -> {to}");
        }
        for (from, to) in [
            ("\"version\": 3", "\"version\": 2"),
            ("\"after\"", "\"before-upgrade\""),
            ("\"after\"", "\"../after\""),
            ("        0\n", "        2\n"),
        ] {
            let changed = GOLDEN_3.replacen(from, to, 1);
            assert!(changed != GOLDEN_3 && parse(changed.as_bytes()).is_err(), "{from} -> {to}");
        }
        for (from, to) in [
            ("\"version\": 4", "\"version\": 3"),
            ("\"tier\"", "\"a tier\""),
            ("\"gold\"", "\"a,b\""),
            ("\"autostart\": true", "\"autostart\": true, \"more\": 1"),
        ] {
            let changed = GOLDEN_4.replacen(from, to, 1);
            assert!(changed != GOLDEN_4 && parse(changed.as_bytes()).is_err(), "{from} -> {to}");
        }
        for (from, to) in [
            ("\"version\": 5", "\"version\": 4"),
            ("\"required\"", "\"sometimes\""),
            ("\"leave\"", "\"burn\""),
        ] {
            let changed = GOLDEN_5.replacen(from, to, 1);
            assert!(changed != GOLDEN_5 && parse(changed.as_bytes()).is_err(), "{from} -> {to}");
        }
        // Each of the two alone needs the newest version.
        let mut described = parse(GOLDEN_5.as_bytes()).unwrap();
        described.version = WITHOUT_TREATMENT;
        described.about = described.about.clone().without_treatment();
        assert!(described.check().is_err());
        described.snapshots[0].description.clear();
        described.check().unwrap();
        described.about.template = true;
        assert!(described.check().is_err());
        described.version = VERSION;
        described.snapshots[0].description = "x".repeat(crate::request::DESCRIPTION_MAX + 1);
        assert!(described.check().is_err());
        assert!(matches!(parse(&[b' '; LENGTH_MAX + 1]), Err(DescriptorError::TooLong)));
    }
}
