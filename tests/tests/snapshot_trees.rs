//! VMs with snapshots are encrypted, decrypted, rekeyed and moved while their guests run and while they are off, and their trees
//! of snapshots follow: what each keeps comes back, nothing is in the clear that should not be, and what dies meanwhile loses
//! nothing.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use vmseal_tests::counting_guest::{count, stop_counting};
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{Victim, console_again, during, has_its_turn, some_of};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};

const VM: &str = "web";

/// Places of the guest's disk that its system does not use, in MiB from the beginning.
const TEXT_AT: u32 = 60;
const KEPT_AT: u32 = 59;

/// What the snapshots of [`tree`] keep, and what the disks hold beside.
const KEPT: [(&str, &str); 3] =
    [("one", "TEXT-OF-ONE"), ("two", "TEXT-OF-TWO"), ("branch", "TEXT-OF-BRANCH")];
const NOW: &str = "TEXT-OF-NOW";
/// In the image alone: all snapshots show it.
const LOWEST: &str = "TEXT-BELOW-ALL";

fn put(console: &mut Console, text: &str, at: [u32; 2]) {
    let to = |disk: &str, at: u32| {
        format!("echo {text} | dd of=/dev/{disk} bs=1M seek={at} conv=notrunc,fsync 2>/dev/null")
    };
    let both = format!("{}; {}", to("vda", at[0]), to("vdb", at[1]));
    run(console, &format!("{both}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

/// The guest writes a text to both of its disks.
fn write(console: &mut Console, text: &str) {
    put(console, text, [TEXT_AT, 5]);
}

fn finds(console: &mut Console, text: &str, at: [u32; 2]) {
    run(console, "echo 3 >/proc/sys/vm/drop_caches; echo DROPPED-$((6 * 7))", "DROPPED-42")
        .unwrap();
    for (disk, at) in [("vda", at[0]), ("vdb", at[1])] {
        let read = format!("dd if=/dev/{disk} bs=1M skip={at} count=1 2>/dev/null | head -n 1");
        run(console, &read, text).unwrap();
    }
}

/// The guest reads this text from both of its disks, and what is below all snapshots.
fn reads(console: &mut Console, text: &str) {
    finds(console, text, [TEXT_AT, 5]);
    finds(console, LOWEST, [KEPT_AT, 6]);
}

fn restarted(here: &Installation) -> Console {
    here.vmseal(&["vm", "start", VM]).unwrap();
    booted(here, VM).unwrap()
}

fn stop(here: &Installation, console: Console) {
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
}

/// A VM that runs, with snapshots of which two are branches of the first.
fn tree(policy: &str) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    let more = ["--disk", "name=data,datastore=local,size=32MiB"];
    shell_guest::start(&here, VM, policy, &more).unwrap();
    let mut console = booted(&here, VM).unwrap();
    put(&mut console, LOWEST, [KEPT_AT, 6]);
    for (name, text) in &KEPT[..2] {
        write(&mut console, text);
        here.vmseal(&["snapshot", "create", VM, name]).unwrap();
    }
    stop(&here, console);
    here.vmseal(&["snapshot", "revert", VM, "one"]).unwrap();
    let mut console = restarted(&here);
    write(&mut console, KEPT[2].1);
    here.vmseal(&["snapshot", "create", VM, "branch"]).unwrap();
    write(&mut console, NOW);
    (here, console)
}

/// The texts that can be read in the VM's files.
fn in_the_clear(here: &Installation) -> Vec<&'static str> {
    let files = here.home_files(VM).unwrap();
    let contents: Vec<_> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    let all = KEPT.iter().map(|(_, text)| *text).chain([NOW, LOWEST]);
    let is_there = |text: &&str| contents.iter().any(|it| contains(it, text));
    all.filter(is_there).collect()
}

/// Two disks with their images, notes and layers, and nothing of a copy or of what was before.
fn is_whole(here: &Installation, encrypted: bool) {
    let files = here.home_files(VM).unwrap();
    let kind = |file: &PathBuf| {
        let kind = file.extension().unwrap_or_default().to_string_lossy().into_owned();
        kind.split('-').next().unwrap_or_default().to_owned()
    };
    let mut kinds: Vec<_> = files.iter().map(kind).collect();
    kinds.sort();
    // Of each disk: layers of two, branch and now, and one for what follows two.
    let layers = kinds.iter().filter(|kind| *kind == "layer").count();
    assert!((4..=10).contains(&layers), "{kinds:?}");
    kinds.retain(|kind| kind != "layer");
    assert_eq!(kinds, ["json", "layers", "layers", "raw", "raw"]);
    let vm = here.vm(VM).unwrap();
    for disk in vm["disks"].as_array().unwrap() {
        assert_eq!(disk["encrypted"], encrypted, "{vm}");
    }
    assert_eq!(in_the_clear(here).is_empty(), encrypted, "{:?}", in_the_clear(here));
    if encrypted {
        here.vmseal(&["vm", "prove", VM, "--all"]).unwrap();
    }
}

/// The text that a file holds at a place, in MiB.
fn text_at(file: &[u8], at: u32) -> String {
    let part = &file[(at as usize) << 20..][..64];
    let end = part.iter().position(|byte| *byte == b'\n').unwrap_or(0);
    String::from_utf8_lossy(&part[..end]).into_owned()
}

/// What the disks of a VM that is off hold, and what each of its snapshots keeps of them: as a filter reads it.
fn all_is_kept(here: &Installation, now: &str) {
    let kept = KEPT.map(|(name, text)| (Some(name), text));
    for (snapshot, text) in kept.into_iter().chain([(None, now)]) {
        for (disk, places) in [("disk0", [TEXT_AT, KEPT_AT]), ("data", [5, 6])] {
            let to = here.path("exported");
            let to = to.to_str().unwrap();
            let export = ["disk", "export", VM, disk, "--format", "raw", "--to", to, "--plaintext"];
            let of = snapshot.map(|name| ["--snapshot", name]);
            here.vmseal(&[&export[..], of.as_ref().map_or(&[][..], |of| of)].concat()).unwrap();
            let file = std::fs::read(to).unwrap();
            std::fs::remove_file(to).unwrap();
            let found = places.map(|at| text_at(&file, at));
            assert_eq!(found, [text, LOWEST], "{disk} of {snapshot:?}");
        }
    }
}

/// A guest boots from what a snapshot keeps.
fn comes_back(here: &Installation, (name, text): (&str, &str)) {
    here.vmseal(&["snapshot", "revert", VM, name]).unwrap();
    let mut console = restarted(here);
    reads(&mut console, text);
    stop(here, console);
}

/// The room that all layers take, in bytes.
fn room(here: &Installation) -> u64 {
    let files = here.home_files(VM).unwrap().into_iter();
    let layers = files.filter(|file| {
        file.extension().is_some_and(|it| it.to_string_lossy().starts_with("layer-"))
    });
    layers.map(|file| file.metadata().unwrap().blocks() * 512).sum()
}

/// All ciphertext of the first disk's image.
fn ciphertext(here: &Installation) -> Vec<u8> {
    std::fs::read(&here.images(VM).unwrap()[0]).unwrap()[16 << 20..].to_vec()
}

#[test]
fn the_tree_of_a_vm_that_is_off_follows() {
    let (here, console) = tree("plain");
    stop(&here, console);
    assert_eq!(in_the_clear(&here).len(), 5, "the texts are not searched for well");
    is_whole(&here, false);
    let encrypt = ["vm", "encrypt", VM, "--policy", "encrypted"];
    let planned = here.try_vmseal(&[&encrypt[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8(planned.stderr).unwrap();
    assert!(warned.contains("3 snapshots"), "{warned}");
    let before = room(&here);
    here.vmseal(&encrypt).unwrap();
    is_whole(&here, true);
    // As sparse as it was: what a layer does not have is not copied to its copy.
    let after = room(&here);
    assert!(after <= before + before / 2, "{after} bytes in place of {before}");
    all_is_kept(&here, NOW);
    let before = ciphertext(&here);
    here.vmseal(&["vm", "recrypt", VM, "--deep"]).unwrap();
    is_whole(&here, true);
    // With the data key that it had, nothing of the image would read as before.
    let after = ciphertext(&here);
    let sectors = before.chunks(4096).zip(after.chunks(4096));
    let same = sectors.filter(|(one, other)| one == other && one.iter().any(|byte| *byte != 0));
    assert_eq!(same.count(), 0, "sectors have the same ciphertext");
    all_is_kept(&here, NOW);
    comes_back(&here, KEPT[1]);
    here.vmseal(&["vm", "decrypt", VM, "--policy", "plain", "--yes"]).unwrap();
    is_whole(&here, false);
    all_is_kept(&here, KEPT[1].1);
    for (name, _) in KEPT {
        here.vmseal(&["snapshot", "delete", VM, name]).unwrap();
    }
    let mut console = restarted(&here);
    reads(&mut console, KEPT[1].1);
    stop(&here, console);
}

#[test]
fn the_tree_of_a_vm_that_runs_follows_while_its_guest_writes() {
    let (here, mut console) = tree("encrypted");
    let second = here.path("second");
    std::fs::create_dir(&second).unwrap();
    let place = ["datastore", "add", "second", "--host", "here", "--path", text(&second).unwrap()];
    here.vmseal(&place).unwrap();
    let former = here.home(VM).unwrap();
    let filter = here.processes_of(VM, "vmseal-filter").unwrap();
    for (operation, encrypted) in [
        (&["vm", "recrypt", VM, "--deep"][..], true),
        (&["vm", "move", VM, "--datastore", "second"], true),
        (&["vm", "decrypt", VM, "--policy", "plain", "--yes"], false),
        (&["vm", "encrypt", VM, "--policy", "encrypted"], true),
    ] {
        count(&mut console);
        here.vmseal(operation).unwrap();
        stop_counting(&mut console);
        is_whole(&here, encrypted);
        reads(&mut console, NOW);
        assert_eq!(here.processes_of(VM, "vmseal-filter").unwrap(), filter, "it was restarted");
    }
    assert!(!former.exists(), "something is left where the VM was");
    // More of the tree, while it is as it is now.
    here.vmseal(&["snapshot", "create", VM, "last"]).unwrap();
    write(&mut console, "TEXT-OF-LATER");
    reads(&mut console, "TEXT-OF-LATER");
    stop(&here, console);
    all_is_kept(&here, "TEXT-OF-LATER");
    comes_back(&here, KEPT[0]);
    here.vmseal(&["snapshot", "revert", VM, "last"]).unwrap();
    let mut console = restarted(&here);
    reads(&mut console, NOW);
    for name in ["one", "two", "branch", "last"] {
        here.vmseal(&["snapshot", "delete", VM, name]).unwrap();
    }
    reads(&mut console, NOW);
    stop(&here, console);
}

/// Whatever dies while a tree is copied, the task goes on or is undone, and nothing is lost.
#[test]
fn what_dies_while_a_tree_is_copied_loses_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut console) = tree("plain");
    let mut encrypted = false;
    for (round, milliseconds) in some_of(&[100, 250, 400, 600, 900, 1300]).into_iter().enumerate() {
        count(&mut console);
        let operation = match encrypted {
            false => &["vm", "encrypt", VM, "--policy", "encrypted"][..],
            true => &["vm", "decrypt", VM, "--policy", "plain", "--yes"],
        };
        let ended = during(&mut here, VM, operation, Victim::of_round(round), milliseconds);
        encrypted ^= ended.status.success();
        console = console_again(&here, VM, console);
        stop_counting(&mut console);
        is_whole(&here, encrypted);
        reads(&mut console, NOW);
    }
    stop(&here, console);
    all_is_kept(&here, NOW);
    comes_back(&here, KEPT[2]);
}
