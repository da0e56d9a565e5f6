//! `vmseal datastore`.

use std::path::PathBuf;

use clap::{Arg, Args, Subcommand};
use vmseal_api::adopt::Rename;
use vmseal_api::model;

use super::{DryRun, List, Name, Show, Wait};
use crate::size::parse_size;

/// Names are unique only on their host.
fn of_datastore(arg: Arg) -> Arg {
    arg.help("Name, `HOST:NAME` if several hosts have one of that name, or id")
}

/// `vmseal datastore adopt`.
#[derive(Args)]
pub struct Adopt {
    /// Name, `HOST:NAME` if several hosts have one of that name, or id
    pub name: String,
    /// Only this VM, by its former name or its id; may be repeated
    #[arg(long = "vm", id = "vms", value_name = "VM")]
    pub vms: Vec<String>,
    /// Give a VM another name, where its own is taken; may be repeated
    #[arg(long, value_name = "VM=NAME", value_parser = rename)]
    pub rename: Vec<Rename>,
    /// The policy that the VMs get [default: the one of the name that each had]
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// Virtual processors of VMs whose descriptors, of an earlier vmseal, do not say how many
    #[arg(long, value_name = "NUMBER")]
    pub vcpus: Option<u32>,
    /// Memory of VMs whose descriptors do not say how much
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Take encrypted VMs also where their descriptors are not authenticated: as somebody wrote them to the datastore
    #[arg(long)]
    pub unauthenticated: bool,
    #[command(flatten)]
    pub wait: Wait,
    #[command(flatten)]
    pub dry_run: DryRun,
}

fn rename(text: &str) -> Result<Rename, String> {
    let (vm, name) = text.split_once('=').ok_or("it must have the form VM=NAME")?;
    Ok(Rename { vm: vm.to_owned(), name: name.to_owned() })
}

#[derive(Subcommand)]
pub enum Datastore {
    /// List the datastores
    #[command(visible_alias = "ls")]
    List(List<model::Datastore>),
    /// Show one datastore
    #[command(mut_arg("name", of_datastore))]
    Show(Show),
    /// Add a directory of a host as a datastore
    Add {
        /// The new datastore's name, unique on its host
        name: String,
        /// The host's name or id
        #[arg(long)]
        host: String,
        /// The directory's absolute path on the host; it must exist
        #[arg(long, value_name = "DIR")]
        path: PathBuf,
        /// The directory is a datastore of a server that is lost, with VMs on it: keep its id, to adopt them
        #[arg(long)]
        existing: bool,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Take the VMs on a datastore into the inventory that it does not have
    ///
    /// After the loss of a server, or of what its inventory had since its last backup. Each VM is taken from its
    /// descriptor on the datastore, with the key that its disks name; nothing on the datastore is changed. The host must
    /// have opened every disk of an encrypted VM with its key before the VM is in the inventory.
    Adopt(Box<Adopt>),
    /// List the images on a datastore: of VMs, orphaned, missing, incomplete; changes nothing
    #[command(mut_arg("name", of_datastore))]
    Scan(Name),
    /// Share a datastore with another host, which must see the same files and the locks of the other hosts
    ///
    /// VMs of either host may then have their disks on it. It must be on a file system that the hosts share, with locks that
    /// reach from one to the other: NFSv4, or a cluster file system.
    Share {
        /// Name, `HOST:NAME` if several hosts have one of that name, or id
        name: String,
        /// The other host's name or id
        #[arg(long)]
        host: String,
        /// The directory's absolute path on that host [default: the same]
        #[arg(long, value_name = "DIR")]
        path: Option<PathBuf>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Take a host from a datastore that others have, too; no VM of that host may use it
    Unshare {
        /// Name, `HOST:NAME` if several hosts have one of that name, or id
        name: String,
        /// The host's name or id
        #[arg(long)]
        host: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a datastore that no VM uses; the files in its directory stay
    #[command(visible_alias = "rm")]
    Remove {
        /// Name, `HOST:NAME` if several hosts have one of that name, or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
