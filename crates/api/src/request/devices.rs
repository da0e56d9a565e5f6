//! Requests about disks and network cards of VMs.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::host::SealedKey;
use crate::nic::{MacAddress, NicBackend, NicLink, NicModel};
use crate::transfer::{ExportFormat, ImageFormat};

/// Makes a disk longer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ResizeDisk {
    /// Its size in bytes, a multiple of 4096; not less than it has.
    pub size: u64,
}

/// Changes a network card, of a VM that runs or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetNic {
    /// Whether it is plugged in.
    pub link: NicLink,
}

/// A network card of a VM that is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateNic {
    /// Its name within the VM; none for `nic0`, `nic1`, ... by its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its address; none for one that no other card of this control plane has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
    /// What it is to the guest.
    #[serde(default)]
    pub model: NicModel,
    /// What it is connected to.
    pub backend: NicBackend,
    /// Whether it is plugged in.
    #[serde(default)]
    pub link: NicLink,
}

/// A disk of a VM that is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateDisk {
    /// Its name within the VM.
    pub name: String,
    /// The datastore, by name or id.
    pub datastore: String,
    /// Size in bytes, a multiple of 4096.
    pub size: u64,
    /// An image on the datastore's host, by absolute path, to fill the disk from.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// What the image is: given with one, and never guessed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// Take a raw image byte by byte even if it begins as an image of another format does; without this it is refused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Whether it is encrypted; none is as the VM's policy says. Only a VM whose policy encrypts has encrypted disks, and it may have
    /// others in the clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
}

/// Adds a disk to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddDisk {
    /// Its name within the VM.
    pub name: String,
    /// The datastore, by name or id; none is that of the VM's first disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Size in bytes, a multiple of 4096.
    pub size: u64,
    /// An image on the datastore's host, by absolute path, to fill the disk from.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// What the image is: given with one, and never guessed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// Take a raw image byte by byte even if it begins as an image of another format does; without this it is refused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Whether it is encrypted; none is as the VM's policy says. Only a VM whose policy encrypts has encrypted disks, and it may have
    /// others in the clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
}

impl AddDisk {
    /// The disk, on this datastore.
    #[must_use]
    pub fn on(self, datastore: String) -> CreateDisk {
        let Self { name, datastore: _, size, image, format, force, encrypted } = self;
        CreateDisk { name, datastore, size, image, format, force, encrypted }
    }
}

/// Writes a disk of a VM that is off, or what a snapshot keeps of one, to a file of its host. In place of the disk of a TPM, which
/// holds nothing, what the TPM keeps is written as swtpm's file `tpm2-00.permall`, and that as `raw` alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ExportDisk {
    /// The file's absolute path on the host; nothing is there yet.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub to: PathBuf,
    /// What is written.
    pub format: ExportFormat,
    /// Confirms that the file will hold plaintext, which everybody who may read the file can read: required for every format but `luks2`.
    #[serde(default)]
    pub plaintext: bool,
    /// The passphrase of a `luks2` file, sealed to the key box of the host (its `description`). The info string is
    /// `vmseal export passphrase v1`, and the VM's id and the disk's id, each after a zero byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SealedKey>,
    /// A snapshot of the VM, by its name: what the disk held then is written, also while the VM runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The highest rate at which each disk is read, in bytes a second; 0, as none, is no limit. At least 1 MiB
    /// otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
}

/// Starts a dirty bitmap of a disk whose VM runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddBitmap {
    /// Its name: 1 to 64 ASCII letters, digits, dots, dashes and underscores. NBD clients know it as
    /// `qemu:dirty-bitmap:NAME`.
    pub name: String,
}
