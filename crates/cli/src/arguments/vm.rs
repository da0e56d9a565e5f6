//! `vmseal vm`.

use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Args, Subcommand};
use vmseal_api::model;

use super::wait::duration;
use super::{Console, DryRun, List, Show, Wait};

#[derive(Subcommand)]
pub enum Vm {
    /// List the VMs
    #[command(visible_alias = "ls")]
    List(List<model::Vm>),
    /// Show one VM
    Show(ShowVm),
    /// Make a VM with new disks, empty or filled from images; it is off at first
    Create {
        /// The new VM's name
        name: String,
        /// The storage policy's name or id
        #[arg(long)]
        policy: String,
        /// How many virtual processors
        #[arg(long, default_value_t = 1)]
        vcpus: u32,
        /// How much memory, with a unit (512MiB, 2GiB)
        #[arg(long, default_value = "512MiB", value_name = "SIZE")]
        memory: ByteSize,
        /// A disk: `datastore=NAME,size=SIZE[,name=NAME][,image=FILE,format=raw|qcow2]`; may be repeated,
        /// in boot order. The datastore decides the host; it is `HOST:NAME` where hosts share a name. `size`
        /// has a unit (20GiB). `image` is an image on the host that the disk is filled
        /// from, `format` what it is; without `size` the disk is as large as the image's, where the image is
        /// on this machine too. Without `name` disks are called `disk0`, `disk1` and so on. A
        /// comma within a value is doubled (`image=/a,,b.raw`)
        #[arg(long = "disk", value_name = "OPTIONS", required = true)]
        disks: Vec<String>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Make a VM from images or from a libvirt domain, encrypting on the way in
    Import(Import),
    /// Power a VM on
    Start {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Ask a VM's guest to shut down, and wait until it has
    Stop {
        /// Name or id
        name: String,
        /// Cut the power instead; what the guest has not written is lost
        #[arg(long)]
        force: bool,
        /// How long the guest may take (90s, 5m) before the task fails and the guest runs on [default: 2m]
        #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "force")]
        grace_period: Option<Duration>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Give a VM that is off another key, of its provider or another one (shallow recrypt)
    ///
    /// The data of its disks stays as it is; the keys of the disks are wrapped anew. In the end the old
    /// key is destroyed: copies of the disks from before, backups among them, cannot be opened any more.
    Recrypt {
        /// Its name or id
        name: String,
        /// The provider of the new key [default: the one that its key is of]
        #[arg(long, value_name = "NAME")]
        provider: Option<String>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Open a VM's serial console, which one person has at a time
    Console(Console),
    /// Delete a VM that is off, and its disks
    #[command(visible_alias = "rm")]
    Delete {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
}

#[derive(Args)]
pub struct Import {
    /// The new VM's name; without, the libvirt domain's
    #[arg(required_unless_present = "libvirt")]
    pub name: Option<String>,
    /// The storage policy's name or id
    #[arg(long)]
    pub policy: String,
    /// How many virtual processors [default: 1, or the domain's]
    #[arg(long)]
    pub vcpus: Option<u32>,
    /// How much memory, with a unit (2GiB) [default: 512MiB, or the domain's]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// A disk, as for `vm create`: `datastore=NAME,image=FILE,format=raw|qcow2[,size=SIZE][,name=NAME]`;
    /// may be repeated, in boot order
    #[arg(
        long = "disk",
        value_name = "OPTIONS",
        required_unless_present = "libvirt",
        conflicts_with = "libvirt"
    )]
    pub disks: Vec<String>,
    /// The file with a libvirt domain, as `virsh dumpxml --inactive` prints it. Its images are on this
    /// machine, which is the host of the datastore. What of it is not taken over is said
    #[arg(long, value_name = "FILE", requires = "datastore")]
    pub libvirt: Option<PathBuf>,
    /// The datastore for the disks of the libvirt domain
    #[arg(long, value_name = "NAME", requires = "libvirt")]
    pub datastore: Option<String>,
    #[command(flatten)]
    pub dry_run: DryRun,
    #[command(flatten)]
    pub wait: Wait,
}

/// Which VM is shown, and how.
#[derive(Args)]
pub struct ShowVm {
    #[command(flatten)]
    pub of: Show,
    /// Print it as a libvirt domain (XML); it has to run
    #[arg(long, conflicts_with = "watch")]
    pub libvirt: bool,
}
