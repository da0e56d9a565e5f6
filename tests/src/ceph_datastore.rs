//! An installation that has a pool of a real Ceph cluster as its datastore `ceph`.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::ceph::Cluster;
use crate::ceph_pool::Pool;
use crate::eventually;
use crate::installation::{Installation, text};
use crate::process::{kill_hard, using};

/// The least memory for data that a filter shares with what serves a pool, in bytes. What it has for requests is less.
const DATA_MIN: u64 = 1 << 20;

/// How connections to the cluster are, and where the pool has its data.
#[derive(Clone, Copy)]
pub struct Options {
    /// The messenger's mode, as `--messenger` has it.
    pub messenger: &'static str,
    /// Whether data is in an erasure-coded pool of two and one.
    pub erasure_coded: bool,
    /// Whether the server holds the key of the pool, and not each host.
    pub key_at_server: bool,
}

/// A cluster, an installation that has its pool as datastore `ceph`, and where that is mounted.
pub struct CephInstallation {
    /// Server and agent.
    pub here: Installation,
    /// The cluster.
    pub cluster: Arc<Cluster>,
    /// Its pool, which may be removed with this: what serves it has ended by then.
    pub pool: Pool,
    /// Where the agent mounts the pool.
    pub mounted: PathBuf,
}

impl CephInstallation {
    /// A cluster that has just come up, whose daemons the test may kill and configure, and an installation.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self::on(Pool::of_own_cluster(options.messenger, options.erasure_coded), options)
    }

    /// A pool of this name, which no other test has, in the cluster of this messenger that tests share, and an installation.
    #[must_use]
    pub fn shared(pool: &str, options: Options) -> Self {
        assert!(!options.erasure_coded, "no shared cluster has a coded pool");
        Self::on(Pool::of_shared_cluster(pool, options.messenger), options)
    }

    /// An installation that has this pool, which is as the options say.
    #[must_use]
    pub fn on(pool: Pool, options: Options) -> Self {
        let here = Installation::new().unwrap();
        let mounted = here.path("ceph");
        let installation = Self { here, cluster: Arc::clone(&pool.cluster), pool, mounted };
        installation.add(options);
        installation
    }

    fn add(&self, options: Options) {
        let add = self.adding(options);
        let add: Vec<_> = add.iter().map(String::as_str).collect();
        self.here.vmseal(&add).unwrap();
    }

    /// The command that adds the pool, for an inventory that does not have it.
    #[must_use]
    pub fn adding(&self, options: Options) -> Vec<String> {
        let (monitors, keyring) = (self.cluster.monitors(), self.pool.keyring());
        let path = text(&self.mounted).unwrap();
        let mut add = vec!["datastore", "add", "ceph", "--host", "here", "--path", path];
        add.extend(["--pool", &self.pool.name, "--user", &self.pool.user]);
        let key = if options.key_at_server { "--key-file" } else { "--keyring" };
        add.extend(["--monitors", &monitors, key, text(&keyring).unwrap()]);
        add.extend(["--messenger", options.messenger]);
        if let Some(data_pool) = self.pool.data_pool {
            add.extend(["--data-pool", data_pool]);
        }
        add.into_iter().map(str::to_owned).collect()
    }

    /// Adds a host, which gets the pool from the server; where it mounts it.
    pub fn add_host(&mut self, host: &str) -> PathBuf {
        self.here.add_host(host).unwrap();
        let mounted = self.here.path(&format!("ceph-{host}"));
        let place = ["--host", host, "--path", text(&mounted).unwrap()];
        self.here.vmseal(&[&["datastore", "share", "ceph"][..], &place].concat()).unwrap();
        mounted
    }

    /// The images of the pool of names and headers.
    #[must_use]
    pub fn images(&self) -> Vec<String> {
        self.pool.images()
    }

    /// Finds that the pool keeps no image: what is open is removed when it is closed.
    pub fn is_empty(&self) {
        let emptied =
            eventually("the pool has no image", || self.images().is_empty().then_some(()));
        emptied.unwrap_or_else(|error| panic!("{error}: {:?}: {}", self.images(), self.log()));
    }

    /// What `vmseal-rbd` has said.
    #[must_use]
    pub fn log(&self) -> String {
        let logs = std::fs::read_dir(self.here.path("run/rbd")).unwrap().flatten();
        let logs = logs.filter(|it| it.path().extension().is_some_and(|it| it == "log"));
        logs.map(|it| std::fs::read_to_string(it.path()).unwrap_or_default()).collect()
    }

    /// The process that serves the pool, if one does.
    #[must_use]
    pub fn server(&self) -> Option<i32> {
        server_at(&self.mounted)
    }

    /// Kills the process that serves the pool.
    pub fn kill_server_of_pool(&self) {
        kill_hard(self.server().expect("no vmseal-rbd runs"));
    }

    /// Waits until the pool is served, by another process than this, and the guest's disks with it.
    pub fn is_served_again(&self, vm: &str, former: Option<i32>) {
        eventually("the pool is served again", || {
            let there = self.mounted.join("vmseal-datastore.json").exists();
            (there && self.server()? != former.unwrap_or(-1)).then_some(())
        })
        .unwrap();
        eventually("the guest goes on", || {
            (self.here.processes_of(vm, "vmseal-filter").ok()?.len() == 1).then_some(())
        })
        .unwrap();
    }

    /// Kills the filter of a VM, and waits for another one.
    pub fn kill_filter(&self, vm: &str) {
        let filters = || self.here.processes_of(vm, "vmseal-filter").unwrap_or_default();
        let former = filters();
        assert_eq!(former.len(), 1, "{vm} is not served by one filter");
        former.iter().copied().for_each(kill_hard);
        eventually("another filter serves", || {
            let now = filters();
            (now.len() == 1 && now != former).then_some(())
        })
        .unwrap();
    }

    /// Finds that data of a disk goes through memory which a filter shares with the process that serves the pool. It is shared when the
    /// first data go, and not before.
    pub fn shares_data(&self) {
        eventually("data go through shared memory", || self.is_sharing().then_some(()))
            .unwrap_or_else(|error| panic!("{error}: {}", self.log()));
    }

    /// Finds that no data does.
    pub fn shares_no_data(&self) {
        eventually("no memory is shared for data", || (!self.is_sharing()).then_some(()))
            .unwrap_or_else(|error| panic!("{error}: {}", self.log()));
    }

    /// Whether the process that serves the pool has memory of a filter.
    fn is_sharing(&self) -> bool {
        let Some(server) = self.server() else { return false };
        let maps = std::fs::read_to_string(format!("/proc/{server}/maps")).unwrap_or_default();
        maps.lines().any(|line| {
            let address = |text: &str| u64::from_str_radix(text, 16).ok();
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let ends = range.and_then(|(from, to)| address(to)?.checked_sub(address(from)?));
            line.contains("/memfd:channel") && ends.is_some_and(|length| length >= DATA_MIN)
        })
    }

    /// Takes the sockets away at which filters get to images without their files.
    pub fn remove_channels(&self) {
        let entries = std::fs::read_dir(self.here.path("run/rbd")).unwrap().flatten();
        let sockets = entries.map(|it| it.path());
        let sockets: Vec<_> =
            sockets.filter(|it| it.extension().is_some_and(|it| it == "sock")).collect();
        assert!(!sockets.is_empty(), "no pool has a socket");
        sockets.iter().for_each(|it| std::fs::remove_file(it).unwrap());
    }
}

/// The process that serves the pool which is mounted there, if one does.
#[must_use]
pub fn server_at(mounted: &Path) -> Option<i32> {
    let mounted = mounted.to_str().unwrap();
    let is_it = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        words.next().is_some_and(|name| name.ends_with(b"vmseal-rbd"))
            && words.any(|word| word == mounted.as_bytes())
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(is_it)
}

impl Drop for CephInstallation {
    fn drop(&mut self) {
        // Before its directory is removed: nothing of the pool is to be removed with it.
        let here = self.here.path("");
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        for place in places.filter(|place| Path::new(place).starts_with(&here)) {
            let _ = Command::new("umount").arg("--lazy").arg(place).status();
        }
        using(self.here.path("").as_path()).into_iter().for_each(kill_hard);
    }
}
