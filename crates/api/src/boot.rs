//! A VM's CD-ROM drive, and what its firmware starts from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The longest path of a medium, in bytes: the most that Linux takes at once.
pub const MEDIUM_PATH_MAX: usize = 4096;

/// A CD-ROM drive. What is in it is a plain file of the host: it is not encrypted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Cdrom {
    /// What is in it: the absolute path, on the host, of a file in one of the directories that the host imports from.
    /// None where it is empty.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub medium: Option<PathBuf>,
}

/// A kind of device that firmware starts a guest from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum BootDevice {
    /// The disks, in their order.
    Disk,
    /// The medium in the CD-ROM drive.
    Cdrom,
    /// What the network offers (PXE), by the network cards in their order.
    Network,
}

impl BootDevice {
    /// All, as people write them.
    pub const NAMES: [(&'static str, Self); 3] =
        [("disk", Self::Disk), ("cdrom", Self::Cdrom), ("network", Self::Network)];

    /// As people write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Cdrom => "cdrom",
            Self::Network => "network",
        }
    }
}

/// Whether this may be the path of a medium.
///
/// # Errors
/// What is wrong with it.
pub fn check_medium(medium: &Path) -> Result<(), String> {
    let length = medium.as_os_str().len();
    let Some(text) = medium.to_str().filter(|text| !text.chars().any(char::is_control)) else {
        return Err("is no path in UTF-8 without control characters".to_owned());
    };
    if !medium.is_absolute() {
        return Err(format!(
            "is '{text}', which is not absolute: give the whole path of the file on the host"
        ));
    }
    if length > MEDIUM_PATH_MAX {
        return Err(format!("is a path of {length} bytes, and may have {MEDIUM_PATH_MAX}"));
    }
    Ok(())
}

/// Whether this may be the order of a VM with such a drive. An empty order is the usual one.
///
/// # Errors
/// What is wrong with it.
pub fn check_order(order: &[BootDevice], cdrom: Option<&Cdrom>) -> Result<(), String> {
    for (index, device) in order.iter().enumerate() {
        if order[..index].contains(device) {
            return Err(format!("has '{}' twice", device.name()));
        }
        if *device == BootDevice::Cdrom && cdrom.is_none() {
            return Err(NO_DRIVE.to_owned());
        }
    }
    Ok(())
}

/// Why a VM does not start from its CD-ROM drive.
pub const NO_DRIVE: &str = "has 'cdrom', and the VM has no CD-ROM drive: give it one while it is off (vmseal vm cdrom insert, or --cdrom when it is made)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_absolute_paths_in_plain_text_are_media() {
        check_medium(Path::new("/srv/iso/debian 13, netinst.iso")).unwrap();
        let long = format!("/{}", "x".repeat(MEDIUM_PATH_MAX));
        for (bad, word) in
            [("", "absolute"), ("a.iso", "absolute"), ("/a\nb", "control"), (&long, "4097 bytes")]
        {
            let told = check_medium(Path::new(bad)).unwrap_err();
            assert!(told.contains(word), "{told}");
        }
    }

    #[test]
    fn an_order_has_each_device_once_and_a_drive_that_is_there() {
        use BootDevice::{Cdrom as Drive, Disk, Network};
        let drive = Cdrom::default();
        check_order(&[], None).unwrap();
        check_order(&[Network, Disk], None).unwrap();
        check_order(&[Drive, Disk], Some(&drive)).unwrap();
        assert!(check_order(&[Disk, Drive], None).unwrap_err().contains("no CD-ROM drive"));
        assert!(check_order(&[Disk, Disk], Some(&drive)).unwrap_err().contains("twice"));
        for (name, device) in BootDevice::NAMES {
            assert_eq!(name, device.name());
            assert_eq!(serde_json::to_value(device).unwrap(), name);
        }
    }
}
