//! The disks of a VM that is off are encrypted, encrypted anew and decrypted in their own files, on a datastore that has no room
//! for a copy: nothing is lost, whatever dies meanwhile, and nothing is left in the clear.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use vmseal_tests::counting_guest::{MARKER, read_marker_of_disk, started_with_one_disk};
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::booted;

const VM: &str = "web";
const FILTER: &str = "vmseal-filter";

/// The disk on the small datastore, and the datastore, in bytes: a copy has no room.
const DISK: usize = 48 << 20;
const ROOM: u64 = 80 << 20;

const ENCRYPT: &[&str] = &["vm", "encrypt", VM, "--policy", "encrypted", "--in-place"];
const RECRYPT: &[&str] = &["vm", "recrypt", VM, "--deep", "--in-place"];
const DECRYPT: &[&str] = &["vm", "decrypt", VM, "--policy", "plain", "--yes", "--in-place"];

/// A small file system in memory; unmounted when dropped.
struct Small(PathBuf);

impl Small {
    fn add(here: &Installation) -> Self {
        let path = here.path("small");
        std::fs::create_dir(&path).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={ROOM},mode=0755"), "tmpfs"])
            .arg(&path)
            .status();
        assert!(mounted.unwrap().success());
        let path = text(&path).unwrap();
        here.vmseal(&["datastore", "add", "small", "--host", "here", "--path", path]).unwrap();
        Self(path.into())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily: a filter that the installation has yet to kill may hold a file open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A VM that is off: a guest on a sparse disk with a marker, and a disk of data on the small datastore, with a hole.
struct Rig {
    here: Installation,
    small: Small,
    content: Vec<u8>,
    random: Random,
}

/// Numbers that follow from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

impl Rig {
    fn new() -> Self {
        let seed = std::env::var("VMSEAL_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| RandomState::new().hash_one(()));
        println!("VMSEAL_SEED={seed}");
        let mut random = Random(seed);
        let (here, console) = started_with_one_disk(VM, "plain");
        here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
        drop(console);
        let small = Small::add(&here);
        let mut content = vec![0; DISK];
        for part in content.chunks_mut(8) {
            part.copy_from_slice(&random.next().to_le_bytes());
        }
        content[10 << 20..20 << 20].fill(0);
        for place in [0, 17 << 20, DISK - 4096] {
            content[place..place + MARKER.len()].copy_from_slice(MARKER.as_bytes());
        }
        std::fs::write(here.path("data.raw"), &content).unwrap();
        let disk = format!(
            "name=data,datastore=small,format=raw,image={}",
            here.path("data.raw").display()
        );
        here.vmseal(&["disk", "add", VM, "--disk", &disk]).unwrap();
        Self { here, small, content, random }
    }

    /// The files of the VM on both datastores.
    fn files(&self) -> Vec<PathBuf> {
        let vm = self.here.vm(VM).unwrap();
        let id = vm["id"].as_str().unwrap();
        let homes = [self.here.path("datastore").join(id), self.small.0.join(id)];
        let entries = homes.iter().flat_map(|home| std::fs::read_dir(home).unwrap());
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    fn images(&self) -> Vec<PathBuf> {
        let mut files = self.files();
        files.retain(|file| file.extension().is_some_and(|it| it == "raw"));
        files
    }

    /// What the VM is, in the inventory and on the datastores, and that its data disk holds what it held.
    fn is(&self, encrypted: bool) {
        let vm = self.here.vm(VM).unwrap();
        assert_eq!(vm["policy"], if encrypted { "encrypted" } else { "plain" });
        for disk in vm["disks"].as_array().unwrap() {
            assert_eq!(disk["encrypted"], encrypted, "{vm}");
        }
        let names = |file: &PathBuf| {
            let known = [Some("raw"), Some("json")];
            known.contains(&file.extension().and_then(|it| it.to_str()))
        };
        assert!(self.files().iter().all(names), "something is left: {:?}", self.files());
        assert_eq!(self.images().len(), 2);
        let clear = self.images().iter().filter(|image| has_marker(image)).count();
        assert_eq!(clear, if encrypted { 0 } else { 2 }, "the marker in the clear");
        for image in self.images().iter().filter(|_| encrypted) {
            let checked = Command::new("cryptsetup").arg("luksDump").arg(image).output().unwrap();
            let dump = String::from_utf8_lossy(&checked.stdout).into_owned();
            assert!(checked.status.success() && dump.contains("aes-xts-plain64"), "{dump}");
        }
        let to = self.here.path("exported.raw");
        let _ = std::fs::remove_file(&to);
        let place = text(&to).unwrap();
        let export =
            ["disk", "export", VM, "data", "--format", "raw", "--plaintext", "--to", place];
        self.here.vmseal(&export).unwrap();
        assert!(std::fs::read(&to).unwrap() == self.content, "the disk holds something else");
        let sparse = |image: &PathBuf| {
            use std::os::unix::fs::MetadataExt;
            let found = std::fs::metadata(image).unwrap();
            found.blocks() * 512 + (4 << 20) < found.len()
        };
        assert!(self.images().iter().all(sparse), "a disk is sparse no more");
    }

    /// The guest boots, and reads its marker.
    fn boots(&self) {
        self.here.vmseal(&["vm", "start", VM]).unwrap();
        read_marker_of_disk(&mut booted(&self.here, VM).unwrap());
        self.here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    }

    /// Begins a task, and kills one process after the other until it has ended.
    fn amid_kills(&mut self, change: &[&str]) {
        let begun = [change, &["--rate", "6M", "--no-wait"]].concat();
        let task = self.here.json(&begun).unwrap();
        let id = task["id"].as_str().unwrap().to_owned();
        let (mut kills, give_up) = (0, Instant::now() + Duration::from_secs(240));
        loop {
            sleep(Duration::from_millis(20 + self.random.next() % 880));
            let shown = self.here.json(&["task", "show", &id]).unwrap();
            let state = shown["state"].as_str().unwrap().to_owned();
            if !["queued", "running", "waiting"].contains(&state.as_str()) {
                assert_eq!(state, "done", "{shown}");
                break;
            }
            assert!(Instant::now() < give_up, "it does not end: {shown}");
            match self.random.next() % 4 {
                0 | 1 => {
                    let filters = self.here.guest_processes(FILTER);
                    kills += filters.len();
                    filters.into_iter().for_each(kill_hard);
                }
                2 => {
                    self.here.kill_agent();
                    self.here.start_agent().unwrap();
                    kills += 1;
                }
                _ => {
                    self.here.kill_server();
                    self.here.start_server().unwrap();
                    kills += 1;
                }
            }
        }
        println!("{change:?}: {kills} kills");
    }
}

fn has_marker(file: &Path) -> bool {
    let bytes = std::fs::read(file).unwrap();
    contains(&bytes, MARKER)
}

#[test]
fn disks_are_converted_where_there_is_no_room_for_a_copy() {
    let rig = Rig::new();
    let here = &rig.here;
    rig.is(false);
    // The usual way fails, and says which other there is.
    let planned = |change: &[&str]| {
        let planned = here.try_vmseal(&[change, &["--dry-run"]].concat()).unwrap();
        assert!(planned.status.success(), "{planned:?}");
        String::from_utf8([planned.stdout, planned.stderr].concat()).unwrap()
    };
    let plan = planned(&["vm", "encrypt", VM, "--policy", "encrypted"]);
    assert!(plan.contains("--in-place"), "{plan}");
    here.refused(&["vm", "encrypt", VM, "--policy", "encrypted"]).unwrap();
    rig.is(false);
    let plan = planned(ENCRYPT);
    assert!(plan.contains("in its own file") && plan.contains("goes forward only"), "{plan}");
    rig.is(false);
    let said = here.try_vmseal(ENCRYPT).unwrap();
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(said.contains("older copies of it may remain"), "{said}");
    rig.is(true);
    rig.boots();
    let head = |rig: &Rig| {
        let mut images = rig.images();
        images.sort();
        images
            .iter()
            .map(|image| std::fs::read(image).unwrap()[..1 << 20].to_vec())
            .collect::<Vec<_>>()
    };
    let before = head(&rig);
    here.vmseal(RECRYPT).unwrap();
    rig.is(true);
    assert!(head(&rig).iter().zip(before).all(|(now, before)| *now != before), "the same key");
    here.vmseal(DECRYPT).unwrap();
    rig.is(false);
    rig.boots();
}

#[test]
fn nothing_is_lost_whatever_dies_meanwhile() {
    if !has_its_turn() {
        return;
    }
    let mut rig = Rig::new();
    for (change, encrypted) in [(ENCRYPT, true), (RECRYPT, true), (DECRYPT, false)] {
        rig.amid_kills(change);
        rig.is(encrypted);
    }
    rig.boots();
}

#[test]
fn a_disk_that_is_being_converted_is_used_for_nothing_and_a_vm_that_runs_is_refused() {
    let rig = Rig::new();
    let here = &rig.here;
    here.vmseal(&["vm", "start", VM]).unwrap();
    let refused = here.refused(ENCRYPT).unwrap();
    assert!(refused.contains("is not off") && refused.contains("--in-place"), "{refused}");
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    let task = here.json(&[ENCRYPT, &["--rate", "1M", "--no-wait"]].concat()).unwrap();
    let id = task["id"].as_str().unwrap().to_owned();
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let shown = here.json(&["task", "show", &id]).unwrap();
        if shown["bytes_per_second"].is_u64() || shown["progress"]["done"].as_u64() > Some(0) {
            break;
        }
        assert!(Instant::now() < give_up, "{shown}");
        sleep(Duration::from_millis(50));
    }
    let images = rig.files();
    assert!(images.iter().any(|file| file.extension().is_some_and(|it| it == "converting")));
    here.refused(&["vm", "start", VM]).unwrap();
    here.refused(&["task", "cancel", &id]).unwrap();
}
