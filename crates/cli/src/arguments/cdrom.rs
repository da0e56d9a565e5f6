//! `vmseal vm cdrom`, and the devices that a VM is started from.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum, builder::PossibleValue};
use vmseal_api::boot;

use super::DryRun;

#[derive(Subcommand)]
pub enum Cdrom {
    /// Put a file into a VM's CD-ROM drive, in place of what is in it. A guest that runs sees it at once; a VM that is
    /// off gets a drive if it has none
    Insert {
        /// Name or id
        name: String,
        /// The file's absolute path on the VM's host, in one of the directories that the host imports from. It is read
        /// as it is, and is not encrypted
        #[arg(id = "cdrom", value_name = "ISO")]
        iso: PathBuf,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Empty a VM's CD-ROM drive. A guest that has locked it is given some seconds to let go
    Eject {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}

/// A kind of device that a VM is started from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootDevice(pub boot::BootDevice);

impl ValueEnum for BootDevice {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [BootDevice; 3] = [
            BootDevice(boot::BootDevice::Disk),
            BootDevice(boot::BootDevice::Cdrom),
            BootDevice(boot::BootDevice::Network),
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}
