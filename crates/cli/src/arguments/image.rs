//! `vmseal image`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::Columns;
use crate::images;

#[derive(Subcommand)]
pub enum Image {
    /// Build an image of a system, to fill disks from
    ///
    /// `debian` is Debian 12 with cloud-init, an SSH server and QEMU's guest agent, from Debian's packages. It has no
    /// password: who logs in is said when a VM is created (`vmseal vm create --ssh-key`). Its root file system grows
    /// to the size of the disk. It takes some minutes; what is built already is not built again.
    Build(BuildImage),
    /// List the images on this machine that have a name
    #[command(visible_alias = "ls")]
    List(ListImages),
}

#[derive(Args)]
pub struct BuildImage {
    /// Which system
    #[arg(value_name = "SYSTEM")]
    pub system: System,
    /// The file to write [default: `SYSTEM.raw` in /var/lib/vmseal/images, or in ~/.cache/vmseal/images where this
    /// is not root]
    #[arg(long = "to", value_name = "FILE")]
    pub to: Option<PathBuf>,
    /// Build it again though it is there
    #[arg(long)]
    pub force: bool,
}

/// A system that an image can be built of.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum System {
    Debian,
}

#[derive(Args)]
pub struct ListImages {
    /// The directory of the images [default: as for `vmseal image build`, and /var/lib/vmseal/images]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    #[command(flatten)]
    pub columns: Columns<images::Image>,
}
