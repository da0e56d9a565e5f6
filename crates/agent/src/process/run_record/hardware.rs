//! What a VM's machine is, as the record of a running VM has it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmseal_api::boot::{BootDevice, Cdrom};
use vmseal_api::dump::DumpFormat;
use vmseal_api::hardware::{Firmware, Hardware, MemoryBacking, OnCrash};

/// What is not there is what every VM has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredHardware {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    firmware: Option<StoredFirmware>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpu_model: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    hugepages: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tpm: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cdrom: Option<StoredCdrom>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    boot: Vec<StoredBootDevice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    on_crash: Option<StoredOnCrash>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    crash_dump_format: Option<StoredDumpFormat>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredOnCrash {
    CoredumpDestroy,
    CoredumpRestart,
    Restart,
    Preserve,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredDumpFormat {
    Elf,
    Kdump,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredCdrom {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    medium: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredBootDevice {
    Disk,
    Cdrom,
    Network,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredFirmware {
    Uefi,
    UefiSecureBoot,
}

impl StoredHardware {
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

impl From<&Hardware> for StoredHardware {
    fn from(of: &Hardware) -> Self {
        let Hardware { firmware, cpu_model, memory_backing, tpm, cdrom, boot, .. } = of;
        let Hardware { on_crash, crash_dump_format, .. } = of;
        Self {
            firmware: match firmware {
                Firmware::Bios => None,
                Firmware::Uefi => Some(StoredFirmware::Uefi),
                Firmware::UefiSecureBoot => Some(StoredFirmware::UefiSecureBoot),
            },
            cpu_model: cpu_model.clone(),
            hugepages: match memory_backing {
                MemoryBacking::Pages => false,
                MemoryBacking::Hugepages => true,
            },
            tpm: *tpm,
            cdrom: cdrom.as_ref().map(|Cdrom { medium }| StoredCdrom { medium: medium.clone() }),
            boot: boot.iter().map(|device| (*device).into()).collect(),
            on_crash: match on_crash {
                OnCrash::Destroy => None,
                OnCrash::CoredumpDestroy => Some(StoredOnCrash::CoredumpDestroy),
                OnCrash::CoredumpRestart => Some(StoredOnCrash::CoredumpRestart),
                OnCrash::Restart => Some(StoredOnCrash::Restart),
                OnCrash::Preserve => Some(StoredOnCrash::Preserve),
            },
            crash_dump_format: crash_dump_format.map(|format| match format {
                DumpFormat::Elf => StoredDumpFormat::Elf,
                DumpFormat::Kdump => StoredDumpFormat::Kdump,
            }),
        }
    }
}

impl From<StoredHardware> for Hardware {
    fn from(stored: StoredHardware) -> Self {
        let StoredHardware { firmware, cpu_model, hugepages, tpm, cdrom, boot, .. } = stored;
        let StoredHardware { on_crash, crash_dump_format, .. } = stored;
        Self {
            firmware: match firmware {
                None => Firmware::Bios,
                Some(StoredFirmware::Uefi) => Firmware::Uefi,
                Some(StoredFirmware::UefiSecureBoot) => Firmware::UefiSecureBoot,
            },
            cpu_model,
            memory_backing: if hugepages { MemoryBacking::Hugepages } else { MemoryBacking::Pages },
            tpm,
            cdrom: cdrom.map(|StoredCdrom { medium }| Cdrom { medium }),
            boot: boot.into_iter().map(Into::into).collect(),
            on_crash: match on_crash {
                None => OnCrash::Destroy,
                Some(StoredOnCrash::CoredumpDestroy) => OnCrash::CoredumpDestroy,
                Some(StoredOnCrash::CoredumpRestart) => OnCrash::CoredumpRestart,
                Some(StoredOnCrash::Restart) => OnCrash::Restart,
                Some(StoredOnCrash::Preserve) => OnCrash::Preserve,
            },
            crash_dump_format: crash_dump_format.map(|format| match format {
                StoredDumpFormat::Elf => DumpFormat::Elf,
                StoredDumpFormat::Kdump => DumpFormat::Kdump,
            }),
        }
    }
}

impl From<BootDevice> for StoredBootDevice {
    fn from(device: BootDevice) -> Self {
        match device {
            BootDevice::Disk => Self::Disk,
            BootDevice::Cdrom => Self::Cdrom,
            BootDevice::Network => Self::Network,
        }
    }
}

impl From<StoredBootDevice> for BootDevice {
    fn from(device: StoredBootDevice) -> Self {
        match device {
            StoredBootDevice::Disk => Self::Disk,
            StoredBootDevice::Cdrom => Self::Cdrom,
            StoredBootDevice::Network => Self::Network,
        }
    }
}
