//! The options for what a VM's machine is.

use std::path::PathBuf;

use clap::{Args, ValueEnum, builder::PossibleValue};
use vmseal_api::boot::Cdrom;
use vmseal_api::hardware::{self, MemoryBacking};

use super::cdrom::BootDevice;

/// What a new VM's machine is.
#[derive(Args, Default)]
pub struct HardwareOptions {
    /// The firmware. UEFI keeps its variables on a small disk of the VM's, encrypted as its others; with secure boot
    /// it starts only what is signed with Microsoft's keys. A guest is installed for one of BIOS and UEFI [default: bios]
    #[arg(long, value_enum)]
    pub firmware: Option<Firmware>,
    /// The processor's model: `host`, or a name that QEMU on the host knows [default: host under KVM,
    /// max without it]
    #[arg(long, value_name = "MODEL")]
    pub cpu_model: Option<String>,
    /// What the guest's memory is made of: `hugepages` are pages of 2 MiB that the host has set aside, and all are
    /// taken when the VM starts [default: pages]
    #[arg(long, value_enum)]
    pub memory_backing: Option<Backing>,
    /// Give it a TPM 2.0. What the TPM keeps is encrypted, so the VM needs a policy that encrypts
    #[arg(long)]
    pub tpm: bool,
    /// A CD-ROM drive with this file in it: an absolute path on the host, in one of the directories that the host imports
    /// from. It is read as it is, and is not encrypted
    #[arg(long, value_name = "ISO")]
    pub cdrom: Option<PathBuf>,
    /// What the firmware starts from, in this order: `disk`, `cdrom` and `network`, separated by commas [default: the
    /// disks, then the CD-ROM drive]
    #[arg(long, value_name = "ORDER", value_delimiter = ',')]
    pub boot: Vec<BootDevice>,
    /// What its host does when its guest panics: stop it, reset it, or leave it as it is, paused; `coredump-` writes an
    /// encrypted core dump first [default: destroy]
    #[arg(long, value_enum)]
    pub on_crash: Option<OnCrash>,
    /// The format of the core dumps that are written then [default: kdump where the host's QEMU writes that, else elf]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub crash_dump_format: Option<super::DumpFormat>,
}

/// What is done when a guest panics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnCrash(pub hardware::OnCrash);

impl ValueEnum for OnCrash {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [OnCrash; 5] = [
            OnCrash(hardware::OnCrash::Destroy),
            OnCrash(hardware::OnCrash::CoredumpDestroy),
            OnCrash(hardware::OnCrash::CoredumpRestart),
            OnCrash(hardware::OnCrash::Restart),
            OnCrash(hardware::OnCrash::Preserve),
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

/// A firmware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Firmware(hardware::Firmware);

impl ValueEnum for Firmware {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [Firmware; 3] = [
            Firmware(hardware::Firmware::Bios),
            Firmware(hardware::Firmware::Uefi),
            Firmware(hardware::Firmware::UefiSecureBoot),
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let mut names = hardware::Firmware::NAMES.into_iter();
        names.find(|(_, known)| *known == self.0).map(|(name, _)| PossibleValue::new(name))
    }
}

/// What memory is made of.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Backing {
    #[default]
    Pages,
    Hugepages,
}

impl From<HardwareOptions> for hardware::Hardware {
    fn from(options: HardwareOptions) -> Self {
        Self {
            firmware: options.firmware.unwrap_or_default().0,
            cpu_model: options.cpu_model,
            memory_backing: match options.memory_backing.unwrap_or_default() {
                Backing::Pages => MemoryBacking::Pages,
                Backing::Hugepages => MemoryBacking::Hugepages,
            },
            tpm: options.tpm,
            cdrom: options.cdrom.map(|medium| Cdrom { medium: Some(medium) }),
            boot: options.boot.into_iter().map(|device| device.0).collect(),
            on_crash: options.on_crash.unwrap_or_default().0,
            crash_dump_format: options.crash_dump_format.map(Into::into),
        }
    }
}
