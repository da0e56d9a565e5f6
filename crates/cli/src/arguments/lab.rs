//! `vmseal lab`.

use clap::{Args, Subcommand};
use vmseal_lab::catalogue::Listed;
use vmseal_lab::ceph::{Place, PoolArguments, UpArguments};

use super::Columns;

#[derive(Subcommand)]
pub enum Lab {
    /// A Ceph cluster on this machine, for tests and experiments
    #[command(subcommand)]
    Ceph(Ceph),
    /// Compare disks: vmseal encrypted and plain, QEMU's storage daemon, and nbdkit
    Disk(Box<vmseal_lab::BenchArguments>),
    /// List the experiments that `vmseal lab run` has
    #[command(visible_alias = "ls")]
    List(Columns<Listed>),
    /// Run experiments: encrypted beside plain, with what is claimed beside what is found
    Run(vmseal_lab::run::RunArguments),
}

#[derive(Subcommand)]
pub enum Ceph {
    /// Make a cluster, or start what of it does not run, and wait until it can be used
    ///
    /// One monitor, one manager and some OSDs run as processes of this user on a loopback address, with all of their
    /// files in one directory. The cluster has cephx, a replicated pool `vmseal` of size 3, no RBD cache, and no scrubs,
    /// autoscaler or balancer. It may be run again at any time, and after it was interrupted: what is there stays, and
    /// what has died is started. The programs are those of Debian's packages ceph-mon, ceph-mgr, ceph-osd and
    /// ceph-common
    Up(UpArguments),
    /// Show the daemons, the health, the pools and the space of a cluster
    Status(Place),
    /// End the daemons of a cluster; its data stay, and `up` starts it again
    Down(CephDown),
    /// Pools of a cluster
    #[command(subcommand)]
    Pool(CephPool),
}

#[derive(Args)]
pub struct CephDown {
    #[command(flatten)]
    pub place: Place,
    /// Remove the cluster, too, with all that is stored in it
    #[arg(long)]
    pub destroy: bool,
    /// Do not ask before it is removed
    #[arg(long, requires = "destroy")]
    pub yes: bool,
}

#[derive(Subcommand)]
pub enum CephPool {
    /// Make a pool for images, and wait until it can be used
    ///
    /// It may be run again: a pool that is as asked for stays, one that is half made is finished
    Add(PoolArguments),
}
