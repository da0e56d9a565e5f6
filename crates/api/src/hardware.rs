//! What a VM's machine is, beside its processors, memory, disks and network cards.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::boot::{self, BootDevice, Cdrom};
use crate::dump::DumpFormat;

/// The name of the disk with the firmware's variables.
pub const VARIABLES_DISK: &str = "uefi-variables";

/// The size of that disk, in bytes: that of the variables of OVMF's "4M" build, which all distributions have.
pub const VARIABLES_SIZE: u64 = 528 * 1024;

/// The name of the disk whose key is that of the TPM's state.
pub const TPM_DISK: &str = "tpm";

/// The size of that disk, in bytes: the least that a disk has. It holds nothing but its header.
pub const TPM_DISK_SIZE: u64 = 4096;

/// The longest name of a processor model, in bytes; QEMU's longest has some 30.
pub const CPU_MODEL_MAX: usize = 64;

/// The size of a huge page, in bytes.
pub const HUGE_PAGE: u64 = 2 << 20;

/// What a VM's machine is. It is chosen when the VM is made, and a guest would not boot with another firmware; its
/// TPM, its CD-ROM drive and the order in which it boots may change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// The firmware that starts the guest.
    #[serde(default)]
    pub firmware: Firmware,
    /// The processor's model: `host`, or a name that QEMU knows. None is `host` under KVM, and all that QEMU
    /// emulates (`max`) without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// What the guest's memory is made of.
    #[serde(default)]
    pub memory_backing: MemoryBacking,
    /// Whether it has a TPM 2.0. What the TPM keeps is encrypted: the VM's policy must encrypt. Its key is that of a
    /// disk of the VM's own, named `tpm`, which the guest does not see.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tpm: bool,
    /// Its CD-ROM drive; none where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cdrom: Option<Cdrom>,
    /// What its firmware starts from, in this order, each at most once. Where nothing is said: its disks, then its CD-ROM
    /// drive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub boot: Vec<BootDevice>,
    /// What its host does when its guest panics.
    #[serde(default, skip_serializing_if = "OnCrash::is_usual")]
    pub on_crash: OnCrash,
    /// The format of the core dumps that its host writes then. None is kdump where the host's QEMU writes that, and else
    /// ELF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crash_dump_format: Option<DumpFormat>,
}

/// What a VM's host does when its guest panics and says so (pvpanic).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OnCrash {
    /// The VM is stopped.
    #[default]
    Destroy,
    /// A core dump is written, and the VM is stopped.
    CoredumpDestroy,
    /// A core dump is written, and the guest is reset: it boots again.
    CoredumpRestart,
    /// The guest is reset: it boots again.
    Restart,
    /// The guest is left as it is, paused.
    Preserve,
}

/// The firmware of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Firmware {
    /// A BIOS (SeaBIOS).
    #[default]
    Bios,
    /// UEFI (OVMF). Its variables are a disk of the VM's own, named `uefi-variables`.
    Uefi,
    /// UEFI that starts only what is signed with Microsoft's keys, as most machines are delivered.
    UefiSecureBoot,
}

/// What a guest's memory is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum MemoryBacking {
    /// Pages of the usual size, taken when the guest uses them.
    #[default]
    Pages,
    /// Huge pages of 2 MiB, which the host must have set aside; all are taken when the VM starts.
    Hugepages,
}

impl Hardware {
    /// Whether it is what a VM has that asks for nothing, and that agents of every version give.
    #[must_use]
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }

    /// Checks what can be checked without a host.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub fn check(&self, memory: u64) -> Result<(), (&'static str, String)> {
        if let Some(model) = &self.cpu_model {
            check_cpu_model(model).map_err(|what| ("cpu_model", what))?;
        }
        if self.memory_backing == MemoryBacking::Hugepages && !memory.is_multiple_of(HUGE_PAGE) {
            let what = format!(
                "is of huge pages: the VM's memory must be a multiple of {}",
                crate::size::Size(HUGE_PAGE)
            );
            return Err(("memory_backing", what));
        }
        if let Some(medium) = self.medium() {
            boot::check_medium(medium).map_err(|what| ("cdrom.medium", what))?;
        }
        boot::check_order(&self.boot, self.cdrom.as_ref()).map_err(|what| ("boot", what))
    }

    /// What is in its CD-ROM drive.
    #[must_use]
    pub fn medium(&self) -> Option<&Path> {
        self.cdrom.as_ref()?.medium.as_deref()
    }

    /// What its firmware starts from, in order.
    #[must_use]
    pub fn boot_order(&self) -> Vec<BootDevice> {
        if !self.boot.is_empty() {
            return self.boot.clone();
        }
        let drive = self.cdrom.iter().map(|_| BootDevice::Cdrom);
        std::iter::once(BootDevice::Disk).chain(drive).collect()
    }

    /// Without what its host does when its guest panics: what that says is no part of the machine that the guest sees.
    #[must_use]
    pub fn without_crash(self) -> Self {
        Self { on_crash: OnCrash::default(), crash_dump_format: None, ..self }
    }

    /// Without what is in its CD-ROM drive, which is of its host alone.
    #[must_use]
    pub fn without_medium(self) -> Self {
        Self { cdrom: self.cdrom.map(|_| Cdrom::default()), ..self }
    }
}

/// The processor model that is the host's own, which needs KVM.
pub const CPU_MODEL_HOST: &str = "host";

/// Whether this may be the name of a processor model.
///
/// # Errors
/// What is wrong with it.
pub fn check_cpu_model(model: &str) -> Result<(), String> {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
    let fits = (1..=CPU_MODEL_MAX).contains(&model.len());
    if fits && model.bytes().all(allowed) {
        return Ok(());
    }
    Err(format!(
        "is no name of a processor model: it has 1 to {CPU_MODEL_MAX} letters, digits, dashes, dots and underscores"
    ))
}

impl OnCrash {
    /// All, as people write them.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("destroy", Self::Destroy),
        ("coredump-destroy", Self::CoredumpDestroy),
        ("coredump-restart", Self::CoredumpRestart),
        ("restart", Self::Restart),
        ("preserve", Self::Preserve),
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        let mut names = Self::NAMES.into_iter();
        names.find(|(_, known)| *known == self).map_or("destroy", |(name, _)| name)
    }

    /// Whether it is what hosts of every version do.
    #[must_use]
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a core dump is written.
    #[must_use]
    pub fn dumps(self) -> bool {
        matches!(self, Self::CoredumpDestroy | Self::CoredumpRestart)
    }

    /// Whether the guest boots again.
    #[must_use]
    pub fn restarts(self) -> bool {
        matches!(self, Self::CoredumpRestart | Self::Restart)
    }
}

impl Firmware {
    /// All, as people write them.
    pub const NAMES: [(&'static str, Self); 3] =
        [("bios", Self::Bios), ("uefi", Self::Uefi), ("uefi-secure-boot", Self::UefiSecureBoot)];

    /// Whether it has variables that it keeps.
    #[must_use]
    pub fn has_variables(self) -> bool {
        match self {
            Self::Bios => false,
            Self::Uefi | Self::UefiSecureBoot => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_and_whole_huge_pages_are_accepted() {
        let model =
            |name: &str| Hardware { cpu_model: Some(name.to_owned()), ..Hardware::default() };
        for good in ["host", "max", "EPYC-Milan-v2", "Skylake-Server"] {
            assert_eq!(model(good).check(1 << 20), Ok(()), "{good}");
        }
        for bad in ["", "a,b", "host,+vmx", "x y", &"x".repeat(65)] {
            assert_eq!(model(bad).check(1 << 20).unwrap_err().0, "cpu_model", "{bad}");
        }
        let huge = Hardware { memory_backing: MemoryBacking::Hugepages, ..Hardware::default() };
        assert_eq!(huge.check(256 << 20), Ok(()));
        assert_eq!(huge.check(257 << 20).unwrap_err().0, "memory_backing");
    }

    #[test]
    fn what_says_nothing_is_usual() {
        let read: Hardware = serde_json::from_str("{}").unwrap();
        assert!(read.is_usual());
        assert!(serde_json::from_str::<Hardware>(r#"{"tmp": true}"#).is_err());
        assert!(!Hardware { tpm: true, ..Hardware::default() }.is_usual());
        let cdrom = Some(Cdrom { medium: Some("/a.iso".into()) });
        let with_drive = Hardware { cdrom, ..Hardware::default() };
        assert!(!with_drive.is_usual() && with_drive.medium().is_some());
        assert_eq!(with_drive.boot_order(), [BootDevice::Disk, BootDevice::Cdrom]);
        assert_eq!(with_drive.without_medium().cdrom, Some(Cdrom::default()));
        let from_network = Hardware { boot: vec![BootDevice::Network], ..Hardware::default() };
        assert!(!from_network.is_usual());
        assert_eq!(from_network.boot_order(), [BootDevice::Network]);
        for (name, on_crash) in OnCrash::NAMES {
            let hardware = Hardware { on_crash, ..Hardware::default() };
            assert_eq!(hardware.is_usual(), name == "destroy");
            assert_eq!((on_crash.name(), hardware.without_crash()), (name, Hardware::default()));
            assert_eq!(serde_json::to_value(on_crash).unwrap(), name);
        }
        for (_, firmware) in Firmware::NAMES {
            let hardware = Hardware { firmware, ..Hardware::default() };
            assert_eq!(hardware.is_usual(), !firmware.has_variables());
        }
    }
}
