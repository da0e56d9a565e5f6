//! Why something with a cluster failed.

use std::io;
use std::path::PathBuf;

use vmseal_secret::MemoryError;

/// Debian's packages with the programs.
pub const PACKAGES: &str = "ceph-mon ceph-mgr ceph-osd ceph-common";

/// Why something with a cluster failed.
#[derive(Debug, thiserror::Error)]
pub enum CephError {
    /// A program is not installed.
    #[error(
        "the program {program} is not in PATH; install Debian's packages: apt-get install --no-install-recommends {PACKAGES}"
    )]
    Missing {
        /// Which.
        program: &'static str,
    },
    /// A program cannot be run.
    #[error("{program} cannot be run")]
    Program {
        /// Which.
        program: String,
        /// The cause.
        source: io::Error,
    },
    /// A program failed.
    #[error("`{what}` failed: {said}")]
    Command {
        /// What was run.
        what: String,
        /// The end of what it said.
        said: String,
    },
    /// A program did not end in time.
    #[error(
        "`{what}` did not end within {seconds} s; `vmseal lab ceph status` shows whether the daemons live"
    )]
    NoAnswer {
        /// What was run.
        what: String,
        /// The time that it had.
        seconds: u64,
    },
    /// A program printed something else than is expected of it.
    #[error("`{what}` printed what vmseal does not understand; Ceph 16 and 18 are known to work")]
    Answer {
        /// What was run.
        what: String,
        /// The cause.
        source: serde_json::Error,
    },
    /// OSDs cannot be encrypted on this machine.
    #[error("OSDs cannot be encrypted here: {why}")]
    Encryption {
        /// What is missing.
        why: String,
    },
    /// A key cannot be made.
    #[error("the key {} cannot be made", path.display())]
    Secret {
        /// Its file.
        path: PathBuf,
        /// The cause.
        source: MemoryError,
    },
    /// A chroot cannot be used.
    #[error("{} cannot be used as a chroot: {why}", directory.display())]
    Chroot {
        /// Its directory.
        directory: PathBuf,
        /// Why.
        why: String,
    },
    /// A file cannot be made, read or written.
    #[error("{} cannot be used", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The directory cannot hold a cluster.
    #[error("{} cannot be the directory of a cluster: {why}", directory.display())]
    Directory {
        /// Which.
        directory: PathBuf,
        /// Why.
        why: String,
    },
    /// No directory was named, and the user has none.
    #[error("where is the cluster? HOME is not set: give --directory")]
    NoHome,
    /// There is no cluster.
    #[error("there is no cluster in {}; `vmseal lab ceph up` makes one", directory.display())]
    NoCluster {
        /// Where.
        directory: PathBuf,
    },
    /// Another process changes the cluster.
    #[error("another `vmseal lab ceph` or `vmseal lab run` works on the cluster in {}; wait for it", directory.display())]
    Busy {
        /// Where.
        directory: PathBuf,
    },
    /// The record of the cluster is not one.
    #[error(
        "{} is no record of a cluster that this version of vmseal knows",
        path.display()
    )]
    Record {
        /// Which.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// The removal of the cluster began and did not end.
    #[error("the cluster in {} is half removed; end it with: vmseal lab ceph down --destroy", directory.display())]
    Destroyed {
        /// Where.
        directory: PathBuf,
    },
    /// Something was asked for that cannot change.
    #[error(
        "{option}: the cluster has {has}, and that cannot change; remove it first: vmseal lab ceph down --destroy"
    )]
    Fixed {
        /// The option.
        option: &'static str,
        /// The value of the cluster.
        has: String,
    },
    /// Something was asked for that changes only while no daemon runs.
    #[error("{option}: the cluster's daemons run with {has}; end them first: vmseal lab ceph down")]
    Runs {
        /// The option.
        option: &'static str,
        /// The value of the cluster.
        has: String,
    },
    /// The monitor's address is in use.
    #[error("{address} is in use by another program; choose another with --listen")]
    InUse {
        /// Which.
        address: String,
    },
    /// What a pool is asked to be is not possible.
    #[error("pool '{pool}': {why}")]
    Pool {
        /// Its name.
        pool: String,
        /// Why.
        why: String,
    },
    /// There is another pool of the name.
    #[error(
        "pool '{pool}': there is one of this name already, with {has}; choose another name, or remove it with ceph osd pool rm"
    )]
    PoolExists {
        /// The name.
        pool: String,
        /// Its redundancy.
        has: String,
    },
    /// A pool is not mounted.
    #[error("the pool '{pool}' is not mounted: {why}")]
    Mount {
        /// Its name.
        pool: String,
        /// Why.
        why: String,
    },
    /// A daemon ended while it was waited for.
    #[error("{daemon} has ended; its log ({}) ends: {end}", log.display())]
    Ended {
        /// Which.
        daemon: String,
        /// Its log.
        log: PathBuf,
        /// The end of it.
        end: String,
    },
    /// A daemon does not end.
    #[error("process {pid} ({daemon}) does not end, not even killed")]
    Lives {
        /// Which.
        daemon: String,
        /// Its process id.
        pid: i32,
    },
    /// The cluster did not get there in time.
    #[error("after {seconds} s {state}; `vmseal lab ceph up` goes on waiting, the logs are in {}", logs.display())]
    Never {
        /// The time that it had.
        seconds: u64,
        /// How far it is.
        state: String,
        /// Where logs are.
        logs: PathBuf,
    },
}
