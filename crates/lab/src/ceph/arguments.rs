//! `vmseal lab ceph`: its arguments.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::error::CephError;
use super::redundancy::{Erasure, name};

/// The OSDs of a cluster of which nothing else is said: what a pool of size 3 needs.
pub const OSDS: usize = 3;
/// More than one machine has use for; each takes a memory target and four ports.
pub const OSDS_MAX: usize = 32;
/// Where the monitor listens by default: free of registered services and below Linux's ephemeral ports.
pub const LISTEN: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 17300);
/// The ports above the monitor's that managers and OSDs take: four an OSD, one the manager, and as many again, since
/// a restarted daemon may find its former ones not free yet.
pub const PORTS: u16 = 300;
/// The smallest `osd_memory_target` that Ceph takes, in MiB; it ignores a smaller one, and takes 4 GiB.
pub const OSD_MEMORY_MIB: u64 = 896;
/// The size of an OSD of which nothing else is said, in GiB.
pub const OSD_GIB: u64 = 10;

/// Where the cluster is.
#[derive(Args, Clone, Debug, Default)]
pub struct Place {
    /// The cluster's directory [default: vmseal/lab/ceph in $XDG_STATE_HOME, or else in ~/.local/state]
    #[arg(long, value_name = "DIR")]
    pub directory: Option<PathBuf>,
}

impl Place {
    /// The directory.
    ///
    /// # Errors
    /// None is given, and the user has none.
    pub fn directory(&self) -> Result<PathBuf, CephError> {
        if let Some(directory) = &self.directory {
            return Ok(directory.clone());
        }
        let absolute =
            |name| std::env::var_os(name).map(PathBuf::from).filter(|it| it.is_absolute());
        let state =
            absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
        Ok(state.ok_or(CephError::NoHome)?.join("vmseal/lab/ceph"))
    }
}

/// How Ceph's messenger protects what it sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Messenger {
    /// Checksums against accidents; the content in the clear
    #[default]
    Crc,
    /// Encrypted and authenticated (AES-128-GCM)
    Secure,
}

impl Messenger {
    /// Its name in `ceph.conf`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Crc => "crc",
            Self::Secure => "secure",
        }
    }
}

/// The choices of `vmseal lab ceph up`. What is not given is as the cluster has it, or as a new one has it by default.
#[derive(Args, Clone, Debug, Default)]
pub struct UpArguments {
    /// Where it is.
    #[command(flatten)]
    pub place: Place,
    /// How many OSDs; a cluster can get more later, not fewer [default: 3]
    #[arg(long, value_name = "NUMBER", value_parser = osds)]
    pub osds: Option<usize>,
    /// A loopback address for all daemons, and the monitor's port; the others take ports in the 300 above [default:
    /// 127.0.0.1:17300]
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = listen)]
    pub listen: Option<SocketAddrV4>,
    /// How all connections of the cluster are protected (the six ms_*_mode settings); changes only while no daemon
    /// runs [default: crc]
    #[arg(long, value_enum, value_name = "MODE")]
    pub messenger: Option<Messenger>,
    /// The size of each OSD, in GiB; its file grows as it is filled [default: 10]
    #[arg(long, value_name = "GIB", value_parser = clap::value_parser!(u64).range(2..=1024))]
    pub osd_gib: Option<u64>,
    /// The memory that each OSD tries to stay within (osd_memory_target), in MiB; changes only while no daemon runs
    /// [default: 896, the least that Ceph takes]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(OSD_MEMORY_MIB..=1 << 20))]
    pub osd_memory_mib: Option<u64>,
    /// Encrypts what each OSD stores, below the OSD as LUKS does: its block is served by qemu-storage-daemon over FUSE, which takes
    /// root or fusermount3; a cluster is made so, and stays so
    #[arg(long)]
    pub osd_encryption: bool,
    /// Runs Ceph's programs from a chroot, and not those of this machine, for another release of Ceph: scripts/build-ceph-chroot makes
    /// such a chroot. It takes root; a cluster is made so, and stays so; another chroot can be given while no daemon runs
    #[arg(long, value_name = "DIR", conflicts_with = "osd_encryption")]
    pub chroot: Option<PathBuf>,
}

/// The choices of `vmseal lab ceph pool add`.
#[derive(Args, Clone, Debug)]
pub struct PoolArguments {
    /// Where the cluster is.
    #[command(flatten)]
    pub place: Place,
    /// The name of the pool
    #[arg(value_name = "NAME", value_parser = name)]
    pub pool: String,
    /// How many copies it keeps [default: 3]
    #[arg(long, value_name = "NUMBER", conflicts_with = "erasure")]
    pub size: Option<u32>,
    /// How many copies or chunks must be there for I/O to go on [default: half of the copies, rounded up; K+1 chunks,
    /// or K where M is 1]
    #[arg(long, value_name = "NUMBER")]
    pub min_size: Option<u32>,
    /// Erasure-coded: K data chunks and M coding chunks, of which M may be lost. Images are made with `rbd create
    /// --data-pool NAME NAME-metadata/IMAGE`; the replicated pool NAME-metadata is made, too
    #[arg(long, value_name = "K+M")]
    pub erasure: Option<Erasure>,
}

/// A number of OSDs.
fn osds(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(osds) if (OSDS..=OSDS_MAX).contains(&osds) => Ok(osds),
        _ => Err(format!("a number from {OSDS} to {OSDS_MAX} is needed")),
    }
}

/// A place to listen that no other machine reaches.
fn listen(text: &str) -> Result<SocketAddrV4, String> {
    let address: SocketAddrV4 =
        text.parse().map_err(|_| "an IPv4 address and a port are needed".to_owned())?;
    if !address.ip().is_loopback() {
        return Err("the cluster is for this machine alone: a loopback address is needed".into());
    }
    if address.port() < 1024 || address.port() > u16::MAX - PORTS {
        return Err(format!("a port from 1024 to {} is needed", u16::MAX - PORTS));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        up: UpArguments,
    }

    fn parse(line: &str) -> Result<UpArguments, String> {
        let words = std::iter::once("up").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.up).map_err(|error| error.to_string())
    }

    #[test]
    fn only_what_ceph_takes_on_this_machine_is_taken() {
        let taken = parse("--osds 6 --listen 127.4.5.6:7000 --messenger secure").unwrap();
        assert_eq!((taken.osds, taken.messenger), (Some(6), Some(Messenger::Secure)));
        assert_eq!(parse("--chroot /srv/reef").unwrap().chroot, Some("/srv/reef".into()));
        assert!(!taken.osd_encryption && parse("--osd-encryption").unwrap().osd_encryption);
        for (line, why) in [
            ("--osds 2", "from 3 to 32"),
            ("--osds 33", "from 3 to 32"),
            ("--listen 192.0.2.1:7000", "loopback"),
            ("--listen 127.0.0.1:80", "from 1024"),
            ("--listen 127.0.0.1:65500", "from 1024"),
            ("--listen localhost", "IPv4 address and a port"),
            ("--osd-memory-mib 895", "895"),
            ("--osd-gib 1", "1"),
            ("--messenger none", "none"),
            ("--chroot /srv/reef --osd-encryption", "cannot be used with"),
        ] {
            let said = parse(line).expect_err(line);
            assert!(said.contains(why), "{line}: {said}");
        }
    }
}
