//! A VM whose disks are RBD images of a real Ceph cluster: it does what VMs on a directory do, its images are ciphertext, and it loses
//! nothing when `vmseal-rbd` dies, or OSDs.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::{Path, PathBuf};
use std::process::Command;

use vmseal_tests::ceph::{Cluster, is_installed, said};
use vmseal_tests::counting_guest::{
    MARKER, count, read_marker_of_disk, stop_counting, write_marker,
};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::process::{kill_hard, using};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, image};

const VM: &str = "web";

/// A cluster, an installation that has its pool as datastore `ceph`, and where that is mounted.
struct Bench {
    here: Installation,
    cluster: Cluster,
    mounted: PathBuf,
}

impl Bench {
    fn new() -> Self {
        let cluster = Cluster::new();
        cluster.up();
        let here = Installation::new().unwrap();
        let mounted = here.path("ceph");
        let bench = Self { here, cluster, mounted };
        bench.add("here");
        bench
    }

    fn add(&self, host: &str) {
        let (monitors, keyring) = (self.cluster.monitors(), self.cluster.user());
        let path = |of: &Path| of.to_str().unwrap().to_owned();
        let (keyring, mounted) = (path(&keyring), path(&self.mounted));
        let pool = ["--pool", "vmseal", "--monitors", &monitors, "--messenger", "crc"];
        let user = ["--keyring", &keyring];
        let add = ["datastore", "add", "ceph", "--host", host, "--path", &mounted];
        self.here.vmseal(&[&add[..], &pool, &user].concat()).unwrap();
    }

    /// A running guest on the pool, with the marker on its disk.
    fn started(&self) -> Console {
        let disk =
            format!("datastore=ceph,format=raw,image={},size=64MiB", image().unwrap().display());
        let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &disk];
        let card = ["--nic", "user,mac=52:54:0a:00:02:0f", "--memory", "192MiB"];
        self.here.vmseal(&[&create[..], &card].concat()).unwrap();
        self.here.vmseal(&["vm", "start", VM]).unwrap();
        let mut console = booted(&self.here, VM).unwrap();
        write_marker(&mut console);
        console
    }

    fn images(&self) -> Vec<String> {
        let listed = self.cluster.rbd(&["ls", "vmseal"]);
        assert!(listed.status.success(), "{}", said(&listed));
        String::from_utf8(listed.stdout).unwrap().lines().map(|it| format!("vmseal/{it}")).collect()
    }

    /// Finds that the pool keeps no image: what is open is removed when it is closed.
    fn is_empty(&self) {
        let emptied =
            eventually("the pool has no image", || self.images().is_empty().then_some(()));
        emptied.unwrap_or_else(|error| panic!("{error}: {:?}: {}", self.images(), self.log()));
    }

    /// What `vmseal-rbd` has said.
    fn log(&self) -> String {
        let logs = std::fs::read_dir(self.here.path("run/rbd")).unwrap().flatten();
        let logs = logs.filter(|it| it.path().extension().is_some_and(|it| it == "log"));
        logs.map(|it| std::fs::read_to_string(it.path()).unwrap_or_default()).collect()
    }

    /// The process that serves the pool.
    fn server(&self) -> i32 {
        let mounted = self.mounted.to_str().unwrap();
        let is_it = |pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
            words.next().is_some_and(|name| name.ends_with(b"vmseal-rbd"))
                && words.any(|word| word == mounted.as_bytes())
        };
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.find(is_it).expect("no vmseal-rbd runs")
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Before its directory is removed: nothing of the pool is to be removed with it.
        let _ = Command::new("umount").arg("--lazy").arg(&self.mounted).status();
        using(self.here.path("").as_path()).into_iter().for_each(kill_hard);
    }
}

/// Finds that the pool's images are ciphertext: a LUKS2 header and what follows, or the layer of a snapshot above that.
fn is_ciphertext(bench: &Bench) {
    let images = bench.images();
    assert!(!images.is_empty(), "the pool has no image");
    for image in images {
        let content = bench.cluster.export(&image);
        let begins = [&b"LUKS\xba\xbe"[..], b"QFI\xfb"];
        assert!(begins.iter().any(|it| content.starts_with(it)), "{image}");
        assert!(!contains(&content, MARKER), "{image}");
    }
}

#[test]
fn a_vm_on_ceph_is_ciphertext_and_outlives_what_serves_it() {
    if !is_installed() {
        return;
    }
    let bench = Bench::new();
    let here = &bench.here;
    let shown = here.vmseal(&["datastore", "list"]).unwrap();
    assert!(shown.contains("rbd:vmseal"), "{shown}");
    let mut console = bench.started();
    is_ciphertext(&bench);

    // What serves the images dies under load: a filter ends with it, and others go on.
    for _ in 0..3 {
        count(&mut console);
        let server = bench.server();
        kill_hard(server);
        eventually("the pool is served again", || {
            let there = bench.mounted.join("vmseal-datastore.json").exists();
            (there && bench.server() != server).then_some(())
        })
        .unwrap();
        eventually("the guest goes on", || {
            let filters = here.processes_of(VM, "vmseal-filter").ok()?;
            (filters.len() == 1).then_some(())
        })
        .unwrap();
        stop_counting(&mut console);
        read_marker_of_disk(&mut console);
    }
    // An OSD dies and comes back.
    count(&mut console);
    let status = bench.cluster.json(&["status"]);
    let daemons = status["daemons"].as_array().unwrap();
    let osd = daemons.iter().find(|it| it["name"] == "osd.1").unwrap()["pid"].as_i64().unwrap();
    kill_hard(osd.try_into().unwrap());
    bench.cluster.up();
    stop_counting(&mut console);

    // What is done with VMs elsewhere.
    here.vmseal(&["snapshot", "create", VM, "one"]).unwrap();
    count(&mut console);
    here.vmseal(&["vm", "recrypt", VM]).unwrap();
    here.vmseal(&["vm", "recrypt", VM, "--deep"]).unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    is_ciphertext(&bench);
    here.vmseal(&["snapshot", "delete", VM, "one"]).unwrap();
    count(&mut console);
    here.vmseal(&["vm", "move", VM, "--datastore", "local"]).unwrap();
    bench.is_empty();
    here.vmseal(&["vm", "move", VM, "--datastore", "ceph"]).unwrap();
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    is_ciphertext(&bench);
    let proof = here.vmseal(&["vm", "prove", VM]).unwrap();
    assert!(proof.contains("header authentic") && proof.contains(" 0 in the clear"), "{proof}");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
    here.vmseal(&["vm", "start", VM]).unwrap();
    read_marker_of_disk(&mut booted(here, VM).unwrap());
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.is_empty();
}

/// What cannot be mounted says why, and nothing is added.
#[test]
fn a_pool_that_cannot_be_mounted_is_refused() {
    let here = Installation::new().unwrap();
    let add = |more: &[&str]| {
        here.refused(
            &[&["datastore", "add", "ceph", "--host", "here", "--pool", "p"], more].concat(),
        )
        .unwrap()
    };
    let monitors = ["--monitors", "v2:127.0.0.1:1/0"];
    let user = add(&[&monitors[..], &["--user", "admin"]].concat());
    assert!(user.contains("client."), "{user}");
    let keyring = add(&[&monitors[..], &["--keyring", "keyring"]].concat());
    assert!(keyring.contains("absolute"), "{keyring}");
    let listed = here.vmseal(&["datastore", "list"]).unwrap();
    assert!(!listed.contains("ceph"), "{listed}");
}
