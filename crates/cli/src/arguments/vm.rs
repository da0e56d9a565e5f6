//! `vmseal vm`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use vmseal_api::model;

use super::wait::duration;
use super::{Console, DryRun, List, Show, Wait};
use crate::size::parse_size;

#[derive(Subcommand)]
pub enum Vm {
    /// List the VMs
    #[command(visible_alias = "ls")]
    List(List<model::Vm>),
    /// Show one VM
    Show(ShowVm),
    /// Create a VM, with disks that are empty or filled from images; it is not started
    Create {
        /// The new VM's name
        name: String,
        /// The storage policy's name or id
        #[arg(long)]
        policy: String,
        /// Virtual processors
        #[arg(long, default_value_t = 1)]
        vcpus: u32,
        /// Memory, such as 512M or 2G (powers of 1024)
        #[arg(long, default_value = "512MiB", value_name = "SIZE", value_parser = parse_size)]
        memory: u64,
        /// A disk: `datastore=NAME,size=SIZE[,name=NAME][,image=FILE,format=raw|qcow2]`; may be repeated,
        /// in boot order. The datastore decides the host; write `HOST:NAME` if several hosts have one of that name.
        /// `image` is a file on the host that the disk is filled from, in `format`; `size` (20G) may be left
        /// out if the image is on this machine too. Disks are named `disk0`, `disk1`, ... unless `name` is
        /// given. Write a comma within a value twice (`image=/a,,b.raw`)
        #[arg(long = "disk", value_name = "OPTIONS", required = true)]
        disks: Vec<String>,
        /// A network card: `user[,forward=tcp:HOST-PORT:GUEST-PORT]`, `bridge=BRIDGE` or `tap=TAP`, each with
        /// `[,mac=ADDRESS][,model=virtio|e1000e][,name=NAME][,link=up|down]`; may be repeated. Without one the VM
        /// has no network. `user` needs nothing on the host: the guest reaches out through it, and is reached at
        /// forwarded ports alone (`forward=tcp:22` takes any free port of the host's loopback,
        /// `forward=tcp:0.0.0.0:8080:80` is one of all its addresses; may be repeated). Bridges and taps are
        /// those of the VM's host
        #[arg(long = "nic", value_name = "OPTIONS")]
        nics: Vec<String>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Create a VM from images or a libvirt domain, and encrypt it on the way
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
    /// Shut a VM down through its guest, and wait until it is off
    Stop {
        /// Name or id
        name: String,
        /// Turn the VM off at once; unwritten data of the guest is lost
        #[arg(long)]
        force: bool,
        /// How long to wait for the guest (90s, 5m); then the task fails and the guest keeps running [default: 2m]
        #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "force")]
        grace_period: Option<Duration>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Give a VM that is off a new key (shallow recrypt)
    ///
    /// The disks' keys are wrapped with the new key; their data is not rewritten. The old key is destroyed: older
    /// copies of the disks, such as backups, cannot be opened any more.
    Recrypt {
        /// Its name or id
        name: String,
        /// The provider of the new key [default: the provider of its present key]
        #[arg(long, value_name = "NAME")]
        provider: Option<String>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Open a VM's serial console; one user at a time
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
    /// The new VM's name [default: the libvirt domain's]
    #[arg(required_unless_present = "libvirt")]
    pub name: Option<String>,
    /// The storage policy's name or id
    #[arg(long)]
    pub policy: String,
    /// Virtual processors [default: 1, or the domain's]
    #[arg(long)]
    pub vcpus: Option<u32>,
    /// Memory, such as 2G [default: 512MiB, or the domain's]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// A disk, as for `vm create`: `datastore=NAME,image=FILE,format=raw|qcow2[,size=SIZE][,name=NAME]`;
    /// may be repeated, in boot order
    #[arg(
        long = "disk",
        value_name = "OPTIONS",
        required_unless_present = "libvirt",
        conflicts_with = "libvirt"
    )]
    pub disks: Vec<String>,
    /// A network card, as for `vm create`, beside those of the libvirt domain; may be repeated
    #[arg(long = "nic", value_name = "OPTIONS")]
    pub nics: Vec<String>,
    /// The file with a libvirt domain, as `virsh dumpxml --inactive` prints it. Its images are on this
    /// machine, which must be the host of the datastore. What is not imported is listed
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
    /// Print it as a libvirt domain (XML); it must be running
    #[arg(long, conflicts_with = "watch")]
    pub libvirt: bool,
}
