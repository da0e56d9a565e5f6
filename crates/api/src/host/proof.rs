//! What a host found when it read the bytes of a VM on its datastores (docs/proof.md).
//!
//! A report is made and signed by the agent of the VM's host, and passed on unchanged: the signature is of its text.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::key::KeyReference;
use crate::id::{DatastoreId, DiskId, HostId, TaskId, VmId};

/// The version of reports.
pub const VERSION: u32 = 1;

/// How much of a file is read unless all of it is, in bytes.
pub const SAMPLE_BYTES: u64 = 64 << 20;

/// The unit that is examined, in bytes: that of encryption.
pub const SECTOR_BYTES: u64 = 4096;

/// The regions of a file whose entropy is reported.
pub const REGIONS: usize = 16;

/// The most sectors of a file that are named, and files of a VM.
pub const FINDINGS_MAX: usize = 16;

/// The most files of a VM that are read.
pub const FILES_MAX: usize = 1024;

/// The chi-square statistic of the 256 byte values of a sector that is ciphertext is within these bounds. It is
/// distributed around 255 with a standard deviation of 23: outside of the bounds is one sector of ciphertext in 10^15.
pub const CHI_SQUARE: std::ops::RangeInclusive<u32> = 100..=512;

/// Whether what was read is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All that was read is encrypted, and opens with the VM's key.
    Encrypted,
    /// It could not be shown.
    NotProved,
    /// Something is in the clear.
    NotEncrypted,
}

impl Verdict {
    /// The worse one of two.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let badness = |verdict| match verdict {
            Self::Encrypted => 0,
            Self::NotProved => 1,
            Self::NotEncrypted => 2,
        };
        if badness(other) > badness(self) { other } else { self }
    }

    /// In words.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Encrypted => "encrypted",
            Self::NotProved => "not proved",
            Self::NotEncrypted => "not encrypted",
        }
    }
}

/// A report on a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProofReport {
    /// The version of the report.
    pub version: u32,
    /// The task that asked for it.
    pub task: TaskId,
    /// The VM.
    pub vm: VmId,
    /// The VM's name.
    pub name: String,
    /// The host that read the files; none where it has no identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostId>,
    /// When the host began to read.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub begun: Timestamp,
    /// When it had read all.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub ended: Timestamp,
    /// Whether every byte was read; else a sample of each file.
    pub all: bool,
    /// What decides which parts of a file are in the sample.
    pub seed: u64,
    /// The outcome: the worst one of all files.
    pub verdict: Verdict,
    /// Why it is not `encrypted`; a sentence for each reason.
    pub reasons: Vec<String>,
    /// The VM's key, which the headers were opened with; none where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyReference>,
    /// The files that hold data of disks.
    pub images: Vec<ProvenImage>,
    /// The other files.
    pub files: Vec<ProvenFile>,
    /// The bounds of the statistic of a sector that is ciphertext.
    pub chi_square_bounds: [u32; 2],
}

/// What an image is to its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ImageKind {
    /// The disk's image.
    Image,
    /// A layer above it: what was written after a snapshot.
    Layer,
    /// Its replica on another datastore.
    Replica,
    /// A copy that is to take its place.
    Copy,
    /// What it was before a copy took its place.
    Former,
    /// A disk that is being made, or was not finished.
    HalfMade,
}

/// A file that holds data of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProvenImage {
    /// The datastore.
    pub datastore: DatastoreId,
    /// The file's path within it.
    pub path: String,
    /// What it is.
    pub kind: ImageKind,
    /// The disk.
    pub disk: DiskId,
    /// The disk's name; none where the VM does not have it any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The outcome.
    pub verdict: Verdict,
    /// Why it is not `encrypted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What its header says; none for one without a header. A layer has that of its disk's image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<ProvenHeader>,
    /// What was read of its data.
    pub data: ProvenData,
}

/// The header of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProvenHeader {
    /// Whether it opened with the VM's key, and its authentication code is that key's.
    pub authentic: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The keys that open it, as it says.
    pub keys: Vec<KeyReference>,
    /// The cipher.
    pub cipher: String,
    /// The length of the data key, in bits.
    pub key_bits: u32,
    /// The unit of encryption, in bytes.
    pub sector_size: u32,
}

/// What was read of a file's data. Numbers are of sectors of 4096 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProvenData {
    /// The bytes of the file that the file system has allocated, without its header.
    pub allocated: u64,
    /// The bytes that were read.
    pub read: u64,
    /// Sectors that were read.
    pub sectors: u64,
    /// Those of zeroes alone: nothing was written there, or it was discarded.
    pub holes: u64,
    /// Those that look like ciphertext, and decrypt with the disk's key to bytes that do not: that key encrypted them.
    pub opened: u64,
    /// Those that look like ciphertext, and still do when decrypted: the guest wrote compressed or encrypted data, or they are
    /// left from before and belong to no place of the disk.
    pub undecided: u64,
    /// Those that do not look like ciphertext.
    pub clear: u64,
    /// Those that are the same before and after decryption.
    pub equal: u64,
    /// The first of those that do not look like ciphertext, or are equal.
    pub findings: Vec<Finding>,
    /// The entropy of what was read of each of 16 equal parts of the file, in thousandths of bits for each byte (8000 at
    /// most), holes left out; none for a part without data.
    pub entropy: Vec<Option<u32>>,
    /// The least of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy_min: Option<u32>,
    /// The chi-square statistic that is farthest from 255, of the sectors that look like ciphertext.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chi_square_extreme: Option<u32>,
}

/// A sector that is not as ciphertext is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Finding {
    /// Where it is in the file, in bytes.
    pub offset: u64,
    /// Which sector of the disk it is; none where it belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sector: Option<u64>,
    /// Its chi-square statistic.
    pub chi_square: u32,
}

/// What another file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// The VM's descriptor: in the clear by design.
    Descriptor,
    /// A note or map of vmseal's about its files: in the clear by design, and holds nothing of the guest's.
    Note,
    /// What a TPM keeps, encrypted by the program that emulates it.
    Tpm,
    /// Memory of the VM, or another sealed file.
    Sealed,
    /// Not vmseal's.
    Unknown,
}

/// Another file of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProvenFile {
    /// The datastore.
    pub datastore: DatastoreId,
    /// The file's path within it.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// The outcome.
    pub verdict: Verdict,
    /// Why it is not `encrypted`, or need not be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of a sealed file: whether its header is authentic and opens with the VM's key, and so does what was read of its content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opened: Option<bool>,
    /// What was read of it; none where it is in the clear by design.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<ProvenData>,
}

/// A report as its host made it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SignedReport {
    /// The report as JSON (docs/proof.md): the text that is signed.
    pub report: String,
    /// The signature; none where the host has no identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signature: Option<ReportSignature>,
}

/// The signature of a report's text: ECDSA over P-256 with SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReportSignature {
    /// The certificate of the host's key, in PEM.
    pub certificate: String,
    /// The signature in ASN.1, in base64.
    pub value: String,
}

impl SignedReport {
    /// What the report says.
    ///
    /// # Errors
    /// Its text is not a report of this version of vmseal's.
    pub fn read(&self) -> serde_json::Result<ProofReport> {
        serde_json::from_str(&self.report)
    }
}

impl ProofReport {
    /// The outcome in a line, for people.
    #[must_use]
    pub fn summary(&self) -> String {
        let data = || {
            let of_files = self.files.iter().filter_map(|file| file.data.as_ref());
            self.images.iter().map(|image| &image.data).chain(of_files)
        };
        let sum = |of: fn(&ProvenData) -> u64| data().map(of).sum::<u64>();
        let read = if self.all { "all" } else { "a sample" };
        let mut line = format!(
            "{}: {} files with data, {read} of them read ({} sectors, {} of zeroes, {} in the clear)",
            self.verdict.word(),
            data().count(),
            sum(|data| data.sectors),
            sum(|data| data.holes),
            sum(|data| data.clear + data.equal)
        );
        if let Some(first) = self.reasons.first() {
            line = format!("{line}. {first}");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worse_verdict_counts() {
        use Verdict::{Encrypted, NotEncrypted, NotProved};
        for (one, other, both) in [
            (Encrypted, Encrypted, Encrypted),
            (Encrypted, NotProved, NotProved),
            (NotProved, NotEncrypted, NotEncrypted),
            (NotEncrypted, Encrypted, NotEncrypted),
        ] {
            assert_eq!((one.and(other), other.and(one)), (both, both));
        }
    }
}
