//! `vmseal datastore`.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgGroup, Args, Subcommand};
use vmseal_api::adopt::Rename;
use vmseal_api::compression::Compression;
use vmseal_api::datastore::{DatastoreLocation, Messenger, RbdPool};
use vmseal_api::model;
use vmseal_api::new_pools::NewPools;
use vmseal_api::osd_encryption::StatedOsds;

use super::{DryRun, List, Name, Show, Wait};
use crate::size::parse_size;

/// Where pools are mounted, unless told otherwise.
const MOUNTS: &str = "/var/lib/vmseal/ceph";

/// Names are unique only on their host.
fn of_datastore(arg: Arg) -> Arg {
    arg.help("Name, `HOST:NAME` if several hosts have one of that name, or id")
}

/// A pool of a Ceph cluster.
#[derive(Debug, Args)]
#[command(next_help_heading = "A pool of a Ceph cluster")]
pub struct PoolOptions {
    /// The pool: of names and headers, and of data unless --data-pool is given; a replicated one
    #[arg(long, value_name = "POOL[/NAMESPACE]", requires = "monitors")]
    pub pool: Option<String>,
    /// The monitors' addresses, as mon_host in ceph.conf has them: v2:10.0.0.1:3300,v2:10.0.0.2:3300
    #[arg(long, value_name = "ADDRESSES", requires = "pool")]
    pub monitors: Option<String>,
    /// The Ceph user
    #[arg(long, value_name = "client.NAME", default_value = "client.vmseal")]
    pub user: String,
    /// The file with the user's key, on the host [default: /etc/ceph/ceph.USER.keyring]
    #[arg(long, value_name = "FILE", requires = "pool")]
    pub keyring: Option<PathBuf>,
    /// The user's key itself, which the server holds and gives to hosts, in place of a file there: here, a keyring, or a file with the
    /// key alone; - is standard input
    #[arg(long, value_name = "FILE", requires = "pool", conflicts_with = "keyring")]
    pub key_file: Option<PathBuf>,
    /// The pool of data; it may be erasure-coded
    #[arg(long, value_name = "POOL", requires = "pool")]
    pub data_pool: Option<String>,
    /// Make the pools, unless they are there, so that they outlive so many failures, such as 1 or 2,erasure-coding, which needs
    /// --data-pool. DOMAIN is what fails as one (osd, host, rack, room, datacenter), such as 1,rack; without it the cluster's default
    /// rule says it, which is usually host. The user must be allowed to
    #[arg(long, value_name = "NUMBER[,LAYOUT][,DOMAIN]", requires = "pool", group = "made")]
    pub create: Option<NewPools>,
    /// Make the pools, unless they are there, as this policy requires: with the failures that disks survive, the layout, the data chunks
    /// and the failure domain that it names. If it asks for erasure coding, that needs --data-pool. The user must be allowed to
    #[arg(long, value_name = "POLICY", requires = "pool", group = "made")]
    pub create_for_policy: Option<String>,
    /// How many data chunks (k) an erasure-coded pool has that --create makes, 2 to 32. Its coding chunks (m) are as many as the failures,
    /// and the cluster needs k+m of what fails as one [default: 2 for one failure, 4 for more]
    #[arg(long, value_name = "NUMBER", requires = "create", conflicts_with = "create_for_policy")]
    pub data_chunks: Option<u32>,
    /// How the cluster compresses the data of the pool that --create or --create-for-policy makes: none, passive, aggressive or force, as
    /// compression_mode of Ceph. It saves no room for encrypted disks, as ciphertext does not become smaller: it is for VMs in the clear
    /// [default: as the cluster has it]
    #[arg(long, value_name = "MODE", requires = "made")]
    pub compression: Option<Compression>,
    /// How data goes over the network: encrypted and authenticated (secure), or with checksums (crc)
    #[arg(long, value_name = "MODE", default_value = "secure")]
    pub messenger: Messenger,
    /// Whether the cluster's OSDs are encrypted: yes, no, or ask its monitors [default: ask]
    #[arg(long, value_name = "yes|no|ask", requires = "pool")]
    pub osd_encryption: Option<StatedOsds>,
}

impl PoolOptions {
    /// Where a datastore of this name is that is a pool; none if no pool is given.
    #[must_use]
    pub fn location(self, name: &str, path: Option<PathBuf>) -> Option<DatastoreLocation> {
        let (pool, monitors) = self.pool.zip(self.monitors)?;
        let (pool, namespace) = match pool.split_once('/') {
            Some((pool, namespace)) => (pool.to_owned(), Some(namespace.to_owned())),
            None => (pool, None),
        };
        let keyring = || format!("/etc/ceph/ceph.{}.keyring", self.user).into();
        let keyring = match self.key_file {
            Some(_) => None,
            None => Some(self.keyring.unwrap_or_else(keyring)),
        };
        let path = path.unwrap_or_else(|| Path::new(MOUNTS).join(name));
        let Self { user, data_pool, messenger, create, data_chunks, compression, .. } = self;
        // With --create-for-policy the server fills in the rest from the policy.
        let made = create.or(compression.map(|_| NewPools::default()));
        let create = made.map(|made| NewPools { data_chunks, compression, ..made });
        let pool = RbdPool {
            monitors,
            user,
            keyring,
            pool,
            namespace,
            data_pool,
            messenger,
            create,
            changed: None,
        };
        Some(DatastoreLocation::Rbd { path, pool: Box::new(pool) })
    }
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
    /// After the server was restored from a backup, keep VMs as the inventory has them, and give up what is newer in their descriptors
    #[arg(long, requires = "vms")]
    pub discard_newer: bool,
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
    /// Add a directory of a host, or a pool of a Ceph cluster, as a datastore
    ///
    /// Of a pool, disks are RBD images, and descriptors and notes are objects beside them. The host mounts it (FUSE); it
    /// needs the packages librados2 and librbd1. Further hosts get it by `vmseal datastore share`.
    Add {
        /// The new datastore's name, unique on its host
        name: String,
        /// The host's name or id
        #[arg(long)]
        host: String,
        /// The directory's absolute path on the host; it must exist, unless a pool is mounted there [default for a pool:
        /// /var/lib/vmseal/ceph/NAME]
        #[arg(long, value_name = "DIR", required_unless_present = "pool")]
        path: Option<PathBuf>,
        /// The directory is a datastore of a server that is lost, with VMs on it: keep its id, to adopt them
        #[arg(long)]
        existing: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        pool: PoolOptions,
    },
    /// Change how hosts get to a pool of a Ceph cluster, the key of it that the server holds, or what is stated of the cluster's OSDs
    ///
    /// A key, and how hosts get to the pool, are tried first, a key alone by one of the hosts that have the datastore, and everything else by
    /// all of them, also a key in place of a keyring on each host: what the cluster refuses, whose user may not write to the pool, or what
    /// leads to another cluster, is not kept. The datastore keeps its disks. Where the pool is mounted it stays so as it is, until it is
    /// mounted anew (vmseal datastore remount): `vmseal datastore show` says which host uses what.
    #[command(group = ArgGroup::new("change").required(true).multiple(true))]
    Set {
        /// Name, `HOST:NAME` if several hosts have one of that name, or id
        name: String,
        /// The monitors' addresses, as mon_host in ceph.conf has them; of the same cluster
        #[arg(long, value_name = "ADDRESSES", group = "change")]
        monitors: Option<String>,
        /// The Ceph user
        #[arg(long, value_name = "client.NAME", group = "change")]
        user: Option<String>,
        /// How data goes over the network: encrypted and authenticated (secure), or with checksums (crc)
        #[arg(long, value_name = "MODE", group = "change")]
        messenger: Option<Messenger>,
        /// The file with the user's key, on each host; the server forgets the key if it holds it
        #[arg(long, value_name = "FILE", group = "change", conflicts_with = "key_file")]
        keyring: Option<PathBuf>,
        /// The user's key, which the server holds from then on and gives to hosts, also if it was in a file on each: here, a keyring, or
        /// a file with the key alone; - is standard input
        #[arg(long, value_name = "FILE", group = "change")]
        key_file: Option<PathBuf>,
        /// Keep the key untried: before the cluster knows it, or while no host is connected
        #[arg(
            long,
            requires = "key_file",
            conflicts_with_all = ["monitors", "user", "messenger", "keyring", "osd_encryption"]
        )]
        force: bool,
        /// Whether the cluster's OSDs are encrypted, where its monitors cannot tell or do not tell right: yes, no, or ask them
        #[arg(long, value_name = "yes|no|ask", group = "change")]
        osd_encryption: Option<StatedOsds>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Have hosts mount a pool of a Ceph cluster anew, with the key, or the keyring, and the monitors of now
    ///
    /// Each host tries the key first. If the cluster takes it, the vmseal-rbd that serves the pool is ended, and another one started:
    /// guests with disks there wait for a second or two, and lose nothing. One host follows the other. It is refused while a task works
    /// with disks there.
    Remount {
        /// Name, `HOST:NAME` if several hosts have one of that name, or id
        name: String,
        /// Only this host, whatever it uses [default: the hosts that do not use the key that the server holds, or get to the pool as they
        /// did before `datastore set`]
        #[arg(long)]
        host: Option<String>,
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        pool: PoolOptions,
    }

    /// Parses these options: how the pools are to be made, and for which policy.
    fn parse(line: &str) -> Result<(Option<NewPools>, Option<String>), String> {
        let words = ["add", "--pool", "vms", "--monitors", "m"].into_iter();
        let line = Line::try_parse_from(words.chain(line.split_whitespace()));
        let pool = line.map_err(|error| error.to_string())?.pool;
        let policy = pool.create_for_policy.clone();
        let location = pool.location("ceph", None).unwrap();
        Ok((location.pool().unwrap().create, policy))
    }

    #[test]
    fn pools_are_made_by_numbers_or_for_a_policy_and_compressed_either_way() {
        assert_eq!(parse("").unwrap(), (None, None));
        let numbers: NewPools = "2,erasure-coding".parse().unwrap();
        let chunks = NewPools { data_chunks: Some(8), ..numbers };
        assert_eq!(
            parse("--create 2,erasure-coding --data-chunks 8").unwrap(),
            (Some(chunks), None)
        );
        let policy = Some("gold".to_owned());
        assert_eq!(parse("--create-for-policy gold").unwrap(), (None, policy.clone()));
        let compression = Some(Compression::Force);
        assert_eq!(
            parse("--create 2,erasure-coding --compression force").unwrap(),
            (Some(NewPools { compression, ..numbers }), None)
        );
        // The rest is the policy's.
        let compressed = NewPools { compression, ..NewPools::default() };
        assert_eq!(
            parse("--create-for-policy gold --compression force").unwrap(),
            (Some(compressed), policy)
        );
    }

    #[test]
    fn what_says_twice_how_pools_are_made_is_refused() {
        for (line, why) in [
            ("--create 1 --create-for-policy gold", "cannot be used with"),
            ("--create-for-policy gold --data-chunks 4", "cannot be used with"),
            ("--data-chunks 4", "--create"),
            ("--compression force", "--create-for-policy"),
            ("--create 1 --compression lz4", "none, passive, aggressive, force"),
        ] {
            let said = parse(line).expect_err(line);
            assert!(said.contains(why), "{line}: {said}");
        }
    }
}
