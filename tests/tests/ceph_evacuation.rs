//! A host hangs, or is cut off from the server, whose VM is on a pool of a real Ceph cluster, and the VM is evacuated to another host. Nothing of
//! the first one can write the VM's image, and its agent ends what it has of the VM, whether the server is there to tell it or not. The same
//! holds if the VM's disk was being moved.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_datastore::{CephInstallation, Options, server_at};
use vmseal_tests::counting_guest::{
    MARKER, count, read_marker_of_disk, stop_counting, write_marker,
};
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{booted, image};
use vmseal_tests::two_hosts::{self, FILTER, HERE, QEMU, THERE, only_host};

const VM: &str = "web";

/// Two hosts that have the pool.
struct Bench {
    ceph: CephInstallation,
    there: std::path::PathBuf,
}

impl Bench {
    fn new(pool: &str) -> Self {
        let options = Options { messenger: "secure", erasure_coded: false, key_at_server: true };
        let mut ceph = CephInstallation::shared(pool, options);
        let there = ceph.add_host(THERE);
        Self { ceph, there }
    }

    /// The processes of a host: the guest's, what serves its disks, and at last the agent.
    fn processes(&self, host: &str) -> Vec<i32> {
        let here = &self.ceph.here;
        let mounted = if host == HERE { &self.ceph.mounted } else { &self.there };
        let mut all = two_hosts::processes(here, host, QEMU);
        all.extend(two_hosts::processes(here, host, FILTER));
        assert_eq!(all.len(), 2, "the guest does not run on {host}");
        all.push(server_at(mounted).unwrap());
        all.push(here.agent_process(host).unwrap());
        all
    }

    /// The server hears nothing of a host any more, whose processes hang: these, the agent among them.
    fn hangs(&self, host: &str, all: &[i32]) {
        // The agent first: it would start another filter.
        all.iter().rev().for_each(|pid| signal(*pid, Signal::SIGSTOP));
        self.is_noticed(host);
    }

    /// The server has noticed that a host does not answer.
    fn is_noticed(&self, host: &str) {
        eventually("the server has noticed", || {
            let shown = self.ceph.here.json(&["host", "show", host]).ok()?;
            (shown["connection"] == "disconnected").then_some(())
        })
        .unwrap();
    }

    /// The VM may be evacuated, after a while and not before.
    fn waits_until_it_may_go(&self) {
        let here = &self.ceph.here;
        let refused = here.refused(&["vm", "evacuate", VM, "--dry-run"]).unwrap();
        assert!(refused.contains("an agent that restarts is back soon"), "{refused}");
        // Without a terminal nobody can be asked.
        let refused = here.refused(&["vm", "evacuate", VM]).unwrap();
        assert!(refused.contains("give --yes"), "{refused}");
        self.may_go();
    }

    /// Waits until the VM may be evacuated.
    fn may_go(&self) {
        eventually("its host has not answered for long enough", || {
            let planned = self.ceph.here.try_vmseal(&["vm", "evacuate", VM, "--dry-run"]);
            planned.unwrap().status.success().then_some(())
        })
        .unwrap();
    }

    /// The host has ended and forgotten the VM.
    fn has_forgotten(&self, host: &str) {
        let here = &self.ceph.here;
        eventually("the processes of the former host have ended", || {
            [QEMU, FILTER]
                .iter()
                .all(|it| two_hosts::processes(here, host, it).is_empty())
                .then_some(())
        })
        .unwrap();
        let told = format!("by host '{host}', which answers again");
        eventually("it is told", || {
            let events = here.vmseal(&["events", "-c", "kind,detail"]).ok()?;
            events
                .lines()
                .any(|it| it.starts_with("vm.forgotten") && it.contains(&told))
                .then_some(())
        })
        .unwrap();
    }

    /// The image of the VM's disk, as the cluster has it.
    fn content(&self) -> Vec<u8> {
        let mut images = self.ceph.images();
        images.retain(|image| {
            let told = self.ceph.cluster.rbd(&["image-meta", "get", image, "vmseal.path"]);
            String::from_utf8(told.stdout).unwrap().contains(".raw")
        });
        assert_eq!(images.len(), 1, "{images:?}");
        self.ceph.cluster.export(&images[0])
    }
}

fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// Starts a guest on the pool, which has its marker and counts.
fn start(here: &Installation) {
    let from = image().unwrap();
    let disk = format!("name=system,datastore=ceph,format=raw,image={},size=64MiB", from.display());
    let create = ["vm", "create", VM, "--policy", "encrypted", "--disk", &disk, "--host", HERE];
    let card = ["--nic", "user,mac=52:54:0a:00:02:0f", "--memory", "192MiB"];
    here.vmseal(&[&create[..], &card].concat()).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    write_marker(&mut console);
    count(&mut console);
}

#[test]
fn a_host_that_hangs_can_write_nothing_once_its_vm_is_evacuated() {
    if !is_installed() {
        return;
    }
    let mut bench = Bench::new("evacuation");
    let here = &bench.ceph.here;
    start(here);
    let refused = here.refused(&["vm", "evacuate", VM, "--dry-run"]).unwrap();
    assert!(refused.contains("vmseal vm migrate web"), "{refused}");

    let former = bench.processes(HERE);
    bench.hangs(HERE, &former);
    bench.waits_until_it_may_go();
    // The only VM of the host, by the command for all of them.
    let planned = here.vmseal(&["host", "evacuate", HERE, "--dry-run"]).unwrap();
    assert!(planned.contains("evacuate VM 'web': choose host 'there'"), "{planned}");
    here.vmseal(&["vm", "evacuate", VM, "--host", THERE, "--yes"]).unwrap();
    assert_eq!(here.vm(VM).unwrap()["host"], THERE);
    let mut console = booted(here, VM).unwrap();
    read_marker_of_disk(&mut console);
    count(&mut console);
    // What the former guest writes at the same place would be found by this one.
    former.iter().for_each(|pid| signal(*pid, Signal::SIGCONT));
    bench.has_forgotten(HERE);
    assert_eq!(only_host(here, VM).unwrap(), THERE);
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    count(&mut console);
    drop(console);
    // Hosts are silent for a minute before they are evacuated.
    if has_its_turn() {
        stays_off(&mut bench);
    }
}

/// The VM is evacuated once more, and stays off: nobody has its image open. This time the agent alone hangs: its guest writes until the cluster
/// takes nothing of it any more. The agent goes on while no server is there that could tell it: what serves the guest's disks has ended, and is not
/// started again for a guest that has been given away.
fn stays_off(bench: &mut Bench) {
    let former = bench.ceph.here.agent_process(THERE).unwrap();
    bench.processes(THERE);
    bench.hangs(THERE, &[former]);
    bench.waits_until_it_may_go();
    bench.processes(THERE);
    let here = &bench.ceph.here;
    here.vmseal(&["host", "evacuate", THERE, "--no-start", "--yes"]).unwrap();
    let shown = here.vm(VM).unwrap();
    assert_eq!(shown["host"], HERE, "{shown}");
    assert_eq!(shown["power"], "off", "{shown}");
    eventually("the filter that was kept from its disks has ended", || {
        two_hosts::processes(here, THERE, FILTER).is_empty().then_some(())
    })
    .unwrap();
    let content = bench.content();
    bench.ceph.here.kill_server();
    signal(former, Signal::SIGCONT);
    eventually("the guest is ended", || {
        two_hosts::processes(&bench.ceph.here, THERE, QEMU).is_empty().then_some(())
    })
    .unwrap();
    assert!(bench.content() == content, "the former host has written the image");
    bench.ceph.here.start_server().unwrap();
    bench.has_forgotten(THERE);
    let here = &bench.ceph.here;
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = booted(here, VM).unwrap();
    read_marker_of_disk(&mut console);
    count(&mut console);
    stop_counting(&mut console);
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
    bench.ceph.is_empty();
}

/// The agent of the VM's host dies while its disk is on its way to a datastore that this host has alone, and the guest and the copy of its disk go on.
/// The task cannot be undone without the host, and says so; then the VM is evacuated, and the disk moves to a datastore of its new host.
#[test]
fn a_vm_is_evacuated_whose_disk_was_on_its_way_elsewhere() {
    if !is_installed() || !has_its_turn() {
        return;
    }
    let mut bench = Bench::new("evacuation-moved");
    let here = &bench.ceph.here;
    let far = here.path("far");
    std::fs::create_dir(&far).unwrap();
    let place = ["--host", THERE, "--path", text(&far).unwrap()];
    here.vmseal(&[&["datastore", "add", "far"][..], &place].concat()).unwrap();
    start(here);
    let moves = ["vm", "move", VM, "--datastore", "local", "--rate", "1M", "--no-wait"];
    let task = here.json(&moves).unwrap();
    let task = task["id"].as_str().unwrap();
    eventually("it copies", || {
        let shown = here.json(&["task", "show", task]).ok()?;
        (shown["progress"]["done"].as_u64()? > 0).then_some(())
    })
    .unwrap();
    bench.processes(HERE);
    bench.ceph.here.kill_agent();
    bench.is_noticed(HERE);

    let here = &bench.ceph.here;
    here.vmseal(&["task", "cancel", task]).unwrap();
    assert!(!here.try_vmseal(&["task", "wait", task]).unwrap().status.success());
    let ended = here.json(&["task", "show", task]).unwrap();
    assert_eq!(ended["state"], "unknown", "{ended}");
    let problem = ended["problem"]["detail"].as_str().unwrap();
    let undone = "undoing 'copy the disks' failed";
    assert!(problem.contains("was cancelled") && problem.contains(undone), "{problem}");
    // Another machine does not have the directories of this one.
    let (local, away) = (here.path("datastore"), here.path("away"));
    std::fs::rename(&local, &away).unwrap();
    bench.may_go();
    here.vmseal(&["vm", "evacuate", VM, "--host", THERE, "--yes"]).unwrap();
    assert_eq!(here.vm(VM).unwrap()["host"], THERE);
    let mut console = booted(here, VM).unwrap();
    read_marker_of_disk(&mut console);
    count(&mut console);
    here.vmseal(&["vm", "move", VM, "--datastore", "far"]).unwrap();
    let vm = here.vm(VM).unwrap();
    assert_eq!(vm["disks"][0]["datastore"], "far", "{vm}");

    std::fs::rename(&away, &local).unwrap();
    bench.ceph.here.start_agent().unwrap();
    bench.has_forgotten(HERE);
    let here = &bench.ceph.here;
    assert_eq!(only_host(here, VM).unwrap(), THERE);
    stop_counting(&mut console);
    read_marker_of_disk(&mut console);
    drop(console);
    bench.ceph.is_empty();
    // What the first move has left is ciphertext.
    let copies = here.datastore_entries(&local).unwrap();
    let copies: Vec<_> =
        copies.iter().filter(|it| it.extension().is_some_and(|it| it == "copy")).collect();
    assert_eq!(copies.len(), 1, "{copies:?}");
    let content = std::fs::read(copies[0]).unwrap();
    assert!(content.starts_with(b"LUKS\xba\xbe") && !contains(&content, MARKER));
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "delete", VM]).unwrap();
}
