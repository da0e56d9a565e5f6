//! A disk as a host makes and opens it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::datastore::{DatastoreSpec, LIMIT_MAX};
use crate::hardware::Firmware;
use crate::id::DiskId;
use crate::replica::ReplicaPlace;
use crate::size::Size;
use crate::transfer::ImageFormat;

/// The room that the header of an encrypted disk takes before the guest's first byte, in bytes.
pub const HEADER_AREA: u64 = 16 << 20;

/// The room that a disk needs beside its data while it is converted in its file, in bytes: the part that moves, the journal, and
/// the header, which is sparse.
pub const IN_PLACE_ROOM: u64 = 28 << 20;

/// A disk as a host opens it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Which disk.
    pub disk: DiskId,
    /// Its name within the VM.
    pub name: String,
    /// Its datastore.
    pub datastore: DatastoreSpec,
    /// The size that the guest sees, in bytes; a multiple of 4096.
    pub size: u64,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// What it is for.
    #[serde(default, skip_serializing_if = "DiskRole::is_data")]
    pub role: DiskRole,
    /// Whether its room is allocated when it is made.
    #[serde(default)]
    pub allocation: Allocation,
    /// What its guest may use of it.
    #[serde(default)]
    pub limits: DiskLimits,
    /// The size of its filter's cache, in bytes ([`crate::filter::check_caches`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
    /// Where a second copy of it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<ReplicaPlace>,
    /// The facts that the inventory has of the finished disk; none until it is made.
    pub facts: Option<DiskFacts>,
}

/// What a disk is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DiskRole {
    /// It is the guest's: what it boots from, and its data.
    #[default]
    Data,
    /// It has the documents that cloud-init reads at the first boot. The guest can only read it, and is never
    /// started from it.
    CloudInit,
    /// It has the variables of the VM's firmware. The guest reaches them through its firmware alone.
    UefiVariables,
    /// It is empty. Its key encrypts the state of the VM's TPM, which is in a directory beside it.
    Tpm,
}

impl DiskRole {
    /// Whether it is the guest's.
    #[must_use]
    pub fn is_data(&self) -> bool {
        *self == Self::Data
    }

    /// How it is connected to the guest.
    #[must_use]
    pub fn attachment(self) -> Attachment {
        match self {
            Self::Data | Self::CloudInit => Attachment::Disk,
            Self::UefiVariables => Attachment::Firmware,
            Self::Tpm => Attachment::Tpm,
        }
    }
}

/// How a disk is connected to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// As a disk that it sees.
    Disk,
    /// As the memory in which its firmware keeps what it is told.
    Firmware,
    /// Not itself: its key opens the state of the TPM. No filter serves it.
    Tpm,
}

/// When a disk takes room on its datastore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Allocation {
    /// As it is written to; what the guest discards is given back.
    #[default]
    Thin,
    /// All of it when it is made; a discard gives nothing back.
    Preallocated,
}

/// The lowest bandwidth limit of a disk, in bytes a second: one request of 64 KiB each second. With less, a
/// booting guest seems to hang.
pub const BANDWIDTH_MIN: u64 = 64 * 1024;

/// The least time after which requests of a disk fail that storage does not answer, in seconds: a device that tries again, and a network
/// that is interrupted for a moment, take that long.
pub const STALL_TIMEOUT_MIN: u32 = 5;

/// The longest one, in seconds: a guest that waits for an hour may as well wait without end.
pub const STALL_TIMEOUT_MAX: u32 = 3600;

/// The usual one, in seconds: three times what a cluster of Ceph takes to find out that an OSD is dead (`osd_heartbeat_grace`).
pub const STALL_TIMEOUT: u32 = 60;

/// What a guest may use of a disk; none means that it is not limited. After a pause, a tenth of a second's
/// worth goes at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DiskLimits {
    /// Requests a second, from 1 to 2^40; flushes do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes read and written a second, from 64 KiB to 1 TiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// After how many seconds without an answer of storage requests of the disk fail, from 5 to 3600. They fail until storage has answered
    /// all that it was given. None: they wait without end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_timeout: Option<u32>,
}

impl DiskLimits {
    /// Checks the ranges.
    ///
    /// # Errors
    /// The field that is out of range, and what is allowed.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let outside =
            |value: Option<u64>, least| value.filter(|it| !(least..=LIMIT_MAX).contains(it));
        if let Some(iops) = outside(self.iops, 1) {
            let what = format!("is {iops}: it must be 1 to {LIMIT_MAX} requests a second");
            return Err(("limits.iops", what));
        }
        if let Some(bandwidth) = outside(self.bandwidth, BANDWIDTH_MIN) {
            let what = format!(
                "is {} a second: it must be {} to {}",
                Size(bandwidth),
                Size(BANDWIDTH_MIN),
                Size(LIMIT_MAX)
            );
            return Err(("limits.bandwidth", what));
        }
        let allowed = STALL_TIMEOUT_MIN..=STALL_TIMEOUT_MAX;
        if let Some(timeout) = self.stall_timeout.filter(|timeout| !allowed.contains(timeout)) {
            let what = format!(
                "is {timeout}: it must be {STALL_TIMEOUT_MIN} to {STALL_TIMEOUT_MAX} seconds"
            );
            return Err(("limits.stall_timeout", what));
        }
        Ok(())
    }
}

/// What the inventory pins of a disk: opening it compares the datastore with this.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "format", rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskFacts {
    /// A raw image in the clear.
    Raw,
    /// LUKS2 as docs/formats/disk.md has it.
    Luks2 {
        /// The version of the `vmseal` token.
        version: u32,
        /// dm-crypt's name of the cipher.
        cipher: String,
        /// Length of the volume key in bits.
        key_bits: u32,
        /// The encryption unit in bytes.
        sector_size: u32,
        /// Where the data segment begins, in bytes.
        data_offset: u64,
    },
}

/// An image on the host to fill a new disk from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSource {
    /// Its absolute path on the host; a regular file whose disk is not longer than the new one.
    pub path: PathBuf,
    /// What it is; never guessed.
    pub format: ImageFormat,
    /// Take a raw image as it is even if it begins as an image of another format does.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// A disk to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewDisk {
    /// The disk.
    pub disk: DiskSpec,
    /// The image to fill it from; of the disk of a TPM, the file with what the TPM keeps.
    pub source: Option<ImageSource>,
    /// The firmware of its VM, where it is to have variables from an image; none with any other disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Firmware>,
}

impl NewDisk {
    /// The file with the variables of firmware that the disk is to have, and the firmware; none of any other disk.
    #[must_use]
    pub fn taken_variables(&self) -> Option<(&Path, Firmware)> {
        let source = self.source.as_ref().filter(|_| self.disk.role == DiskRole::UefiVariables)?;
        Some((source.path.as_path(), self.firmware.unwrap_or_default()))
    }

    /// The file with what the TPM is to keep whose disk this is; none of any other disk.
    #[must_use]
    pub fn taken_tpm_state(&self) -> Option<&Path> {
        let source = self.source.as_ref().filter(|_| self.disk.role == DiskRole::Tpm)?;
        Some(source.path.as_path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_limit_is_said_as_it_was_understood() {
        let limits = |iops, bandwidth| DiskLimits { iops, bandwidth, stall_timeout: None }.check();
        for (seconds, good) in [(4, false), (5, true), (3600, true), (3601, false), (0, false)] {
            let limits = DiskLimits { stall_timeout: Some(seconds), ..DiskLimits::default() };
            let refused = limits.check().err().map(|(field, _)| field);
            assert_eq!(refused, (!good).then_some("limits.stall_timeout"), "{seconds}");
        }
        assert_eq!(limits(None, None), Ok(()));
        assert_eq!(limits(Some(LIMIT_MAX), Some(BANDWIDTH_MIN)), Ok(()));
        for (iops, bandwidth, field, said) in [
            (Some(0), None, "limits.iops", "is 0: it must be 1 to"),
            (None, Some(4096), "limits.bandwidth", "is 4 KiB a second: it must be 64 KiB to 1 TiB"),
            (None, Some(2 << 40), "limits.bandwidth", "is 2 TiB a second: "),
        ] {
            let (at, what) = limits(iops, bandwidth).unwrap_err();
            assert!(at == field && what.starts_with(said), "{at} {what}");
        }
    }
}
