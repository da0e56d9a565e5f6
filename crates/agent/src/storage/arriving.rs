//! Copies of the disks of a VM that comes from another host, which has none of the datastores that they are on.
//!
//! ```text
//!  begun: half-made disks ─► filled by the other host ─► noted ─► named ─► the lease taken ─► note removed
//!             └── given up: the half-made disks are removed, and those that the note says were named, unless the lease was taken
//! ```
//! A disk that has snapshots is filled file by file, those below first ([`ArrivingLayers`]); the memory that they keep comes with the
//! first disk ([`sent_memory`]).
//! The guest runs here from the lease on ([`crate::storage::lease`]). An agent that dies before leaves half-made disks, which the
//! next one sweeps, or a note.

use std::collections::BTreeMap;
use std::fs::File;

use serde::{Deserialize, Serialize};
use vmseal_api::host::{
    ArrivingCopies, ArrivingCopy, Attachment, DatastoreSpec, DiskFacts, DiskSpec, VmSpec,
};
use vmseal_api::id::{DiskId, SnapshotId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use crate::rules::find_disk;
use crate::storage::disk;
use crate::storage::home::{Beside, Home};
use crate::storage::json_file;
use crate::storage::layers::{ArrivingLayers, Tree};
use crate::storage::lease;
use crate::storage::sent_memory;
use crate::storage::tpm_state;

/// The version of the note.
const VERSION: u32 = 1;

/// The longest note, in bytes: [`vmseal_api::filter::DISKS_MAX`] disks fit, and as many snapshots as are told in one message.
const NOTE_MAX: u64 = 128 * 1024;

/// What is noted before disks get their names.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    version: u32,
    /// The generation of the placement that they are for.
    generation: u64,
    /// Where the VM's lease is.
    lease: DatastoreSpec,
    disks: Vec<DiskId>,
    /// What was received of snapshots' memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    memories: Vec<SnapshotId>,
    /// Whether the memory of a VM that is suspended was received.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    own_memory: bool,
}

impl Note {
    /// Adds a memory that was received.
    fn add(&mut self, which: Beside) {
        match which {
            Beside::SnapshotMemory(snapshot) => self.memories.push(snapshot),
            Beside::Memory => self.own_memory = true,
            // None is received.
            Beside::Core(_) => {}
        }
    }

    /// The memories that it names.
    fn named(&self) -> impl Iterator<Item = Beside> + use<'_> {
        let of_snapshots = self.memories.iter().copied().map(Beside::SnapshotMemory);
        of_snapshots.chain(self.own_memory.then_some(Beside::Memory))
    }
}

/// A disk that is being filled.
pub struct ArrivingDisk {
    /// The disk.
    pub disk: DiskSpec,
    /// What is pinned of it.
    pub facts: DiskFacts,
    /// Its DEK; none for a plain one.
    pub dek: Option<SecretBytes>,
    /// Its image, with its lock.
    pub file: File,
    /// Its layers; none where it has none.
    pub layers: Option<ArrivingLayers>,
    /// The files of those that are made, from the last one downwards; the first has its lock.
    pub above: Vec<File>,
}

/// Makes the images of these disks of a VM, which read as zeroes. Blocks.
///
/// # Errors
/// `already-exists`, `no-space`, `wrong-state`; half-made disks are left, see [`give_up`].
pub fn begin(
    spec: &VmSpec,
    disks: Vec<(DiskId, Option<Tree>)>,
    kek: Option<&SecretBytes>,
) -> Result<Vec<ArrivingDisk>, Problem> {
    let one = |(id, tree): (DiskId, Option<Tree>)| {
        let id = &id;
        let disk = find_disk(spec, *id)?.clone();
        let home = Home::of(&disk.datastore, spec.vm)?;
        let image = home.image(disk.disk);
        if image.symlink_metadata().is_ok() {
            let what = format!(
                "{} is there already, and is not a disk of a VM of this host: remove it if it is not wanted",
                image.display()
            );
            return Err(Problem::new(ErrorCode::AlreadyExists, what));
        }
        let (file, facts, dek) = disk::begin_empty(spec, &disk, kek, &home)?;
        let layers = tree.map(|tree| ArrivingLayers::new(home, disk.disk, tree)).transpose()?;
        Ok(ArrivingDisk { disk, facts, dek, file, layers, above: Vec::new() })
    };
    disks.into_iter().map(one).collect()
}

/// Gives disks that are filled their names; those that have them keep them. Blocks.
///
/// # Errors
/// Those of the file system; it can be tried again.
pub fn name(spec: &VmSpec, disks: &[ArrivingDisk], generation: u64) -> Result<(), Problem> {
    let Some(first) = spec.disks().next() else { return Ok(()) };
    let mut homes: BTreeMap<_, (Home, Vec<DiskId>)> = BTreeMap::new();
    for arriving in disks {
        let home = Home::of(&arriving.disk.datastore, spec.vm)?;
        let of_home = homes.entry(home.path().to_owned()).or_insert((home, Vec::new()));
        of_home.1.push(arriving.disk.disk);
    }
    for (home, disks) in homes.values() {
        let (lease, disks) = (first.datastore.clone(), disks.clone());
        // Those that have their places already, too.
        let known = read(home)?.filter(|note| note.generation == generation);
        let (memories, own_memory) =
            known.map_or_else(Default::default, |note| (note.memories, note.own_memory));
        let mut received = Vec::new();
        for disk in &disks {
            received.extend(sent_memory::received(home, *disk)?);
        }
        let mut note = Note { version: VERSION, generation, lease, disks, memories, own_memory };
        received.into_iter().for_each(|which| note.add(which));
        json_file::write(&home.arriving(), &note)?;
    }
    for arriving in disks {
        let home = Home::of(&arriving.disk.datastore, spec.vm)?;
        sent_memory::take_place(&home, arriving.disk.disk)?;
        if home.image(arriving.disk.disk).symlink_metadata().is_err() {
            if let Some(layers) = &arriving.layers {
                layers.note()?;
            }
            if arriving.disk.role.attachment() == Attachment::Tpm {
                tpm_state::flush_beside(&home.tpm_state(arriving.disk.disk))?;
            }
            home.finish(arriving.disk.disk, &arriving.file)?;
        }
    }
    Ok(())
}

/// The VM's lease is taken: its disks are as any others. Blocks.
///
/// # Errors
/// Those of the file system. A note that is left says nothing any more.
pub fn settle(spec: &VmSpec, copies: &ArrivingCopies) -> Result<(), Problem> {
    copies.disks.iter().try_for_each(|copy| {
        let home = Home::of(&copy.datastore, spec.vm)?;
        home.remove_note(&home.arriving())
    })
}

/// Removes the copies, unless the guest has run here. Where there are none, nothing is done. Blocks.
///
/// # Errors
/// `wrong-state`: it has; `unsupported`: that cannot be seen; `in-use`; `damaged`; those of the file system.
pub fn give_up(vm: VmId, copies: &ArrivingCopies) -> Result<(), Problem> {
    for ArrivingCopy { datastore, .. } in &copies.disks {
        let home = seen(datastore, vm)?;
        if is_here(vm, &home, copies)? {
            let what = format!(
                "VM {vm} is on this host with its copied disks ({}), or has run here: its migration cannot be cancelled any more",
                home.path().display()
            );
            return Err(Problem::new(ErrorCode::WrongState, what));
        }
    }
    for ArrivingCopy { disk, datastore } in &copies.disks {
        let home = Home::of(datastore, vm)?;
        let named = read(&home)?.filter(|note| note.generation == copies.generation);
        match named.filter(|note| note.disks.contains(disk)) {
            Some(_) => home.delete(*disk)?,
            None => home.discard(*disk)?,
        }
    }
    // Last: it says which images may be removed.
    for ArrivingCopy { datastore, .. } in &copies.disks {
        let home = Home::of(datastore, vm)?;
        if let Some(note) = read(&home)?.filter(|note| note.generation == copies.generation) {
            for which in note.named() {
                home.remove_note(&home.beside(&which))?;
            }
            home.remove_note(&home.arriving())?;
        }
    }
    Ok(())
}

/// Whether the VM has come to this host with the copies in this home.
fn is_here(vm: VmId, home: &Home, copies: &ArrivingCopies) -> Result<bool, Problem> {
    // Where the first disk is copied, the lease is beside it, and outlives the note. It alone says so of a VM that is off, and of a guest
    // that has run here and ended with its host. Nobody takes it before the server has asked for the commit.
    if lease::generation_at(home)? >= copies.generation {
        return Ok(true);
    }
    // A first disk that is not copied is on a datastore that the other host has, too: it sees a lease that was taken, and stops.
    let noted = read(home)?.filter(|note| note.generation == copies.generation);
    let Some(note) = noted else { return Ok(false) };
    Ok(lease::generation_at(&seen(&note.lease, vm)?)? >= copies.generation)
}

/// The home that says whether a VM has come. A datastore that is not mounted is another error than that it has: who asks would go by that.
fn seen(datastore: &DatastoreSpec, vm: VmId) -> Result<Home, Problem> {
    Home::of(datastore, vm).map_err(|problem| match problem.code {
        ErrorCode::WrongState => {
            let what = format!(
                "this host cannot tell whether VM {vm} has come to it, until its datastore is there: {}",
                problem.detail
            );
            Problem::new(ErrorCode::Unsupported, what)
        }
        _ => problem,
    })
}

fn read(home: &Home) -> Result<Option<Note>, Problem> {
    let path = home.arriving();
    let Some(text) = json_file::read(&path, NOTE_MAX)? else { return Ok(None) };
    match serde_json::from_slice::<Note>(&text) {
        Ok(note) if note.version == VERSION => Ok(Some(note)),
        _ => {
            let what = format!(
                "{}, which names disks that came from another host, cannot be read: a newer vmseal may have written it",
                path.display()
            );
            Err(Problem::new(ErrorCode::Damaged, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{Device, DiskRole};

    use super::*;
    use crate::storage::datastore::tests::unmarked;

    /// A VM with two plain disks on a datastore, and the copies that it is to have there.
    fn setup() -> (tempfile::TempDir, VmSpec, ArrivingCopies) {
        let (directory, place) = unmarked();
        crate::storage::datastore::probe(&place).unwrap();
        let mut spec = crate::process::run_dir::tests::spec();
        for name in ["system", "data"] {
            let mut disk = crate::rules::tests::disk(name);
            (disk.datastore, disk.encrypted, disk.facts) = (place.clone(), false, None);
            spec.devices.push(Device::Disk(disk));
        }
        let copies = spec.disks().map(|disk| disk.disk);
        let disks = copies.map(|disk| ArrivingCopy { disk, datastore: place.clone() }).collect();
        (directory, spec, ArrivingCopies { generation: 7, disks, at_rest: false, suspended: false })
    }

    fn files(directory: &tempfile::TempDir) -> Vec<String> {
        let homes = std::fs::read_dir(directory.path()).unwrap().map(|it| it.unwrap().path());
        let homes = homes.filter(|path| path.is_dir());
        let files = homes.flat_map(|home| std::fs::read_dir(home).unwrap());
        files.map(|it| it.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn ids(copies: &ArrivingCopies) -> Vec<(DiskId, Option<Tree>)> {
        copies.disks.iter().map(|copy| (copy.disk, None)).collect()
    }

    #[test]
    fn nothing_is_left_of_copies_that_are_given_up_before_the_lease_is_taken() {
        let (directory, spec, copies) = setup();
        give_up(spec.vm, &copies).unwrap();
        for named in [false, true] {
            let begun = begin(&spec, ids(&copies), None).unwrap();
            assert!(!begun.is_empty());
            if named {
                name(&spec, &begun, 7).unwrap();
                // Again, after an error that came later.
                name(&spec, &begun, 7).unwrap();
            }
            drop(begun);
            give_up(spec.vm, &copies).unwrap();
            assert_eq!(files(&directory), Vec::<String>::new(), "named: {named}");
        }
    }

    #[test]
    fn the_disk_of_a_tpm_gets_its_name_with_what_the_tpm_keeps_and_is_removed_with_it() {
        let (directory, mut spec, _) = setup();
        let Some(disk) = spec.disks_mut().next() else { unreachable!("it has disks") };
        disk.role = DiskRole::Tpm;
        let (id, datastore) = (disk.disk, disk.datastore.clone());
        let home = Home::of(&datastore, spec.vm).unwrap();
        let copies = ArrivingCopies {
            generation: 7,
            disks: vec![ArrivingCopy { disk: id, datastore }],
            at_rest: false,
            suspended: false,
        };
        let state = home.tpm_state(id);
        for kept in [false, true] {
            let begun = begin(&spec, vec![(id, None)], None).unwrap();
            tpm_state::make(&state, None).unwrap();
            if kept {
                drop(tpm_state::make_of(&state, b"state", None).unwrap());
            }
            match name(&spec, &begun, 7) {
                Err(problem) => assert!(!kept && problem.code == ErrorCode::Damaged, "{problem}"),
                Ok(()) => assert!(kept && home.image(id).exists()),
            }
            drop(begun);
            give_up(spec.vm, &copies).unwrap();
            assert_eq!(files(&directory), Vec::<String>::new(), "kept: {kept}");
        }
        // Named, and its guest has run.
        let begun = begin(&spec, vec![(id, None)], None).unwrap();
        drop(tpm_state::make_of(&state, b"state", None).unwrap());
        name(&spec, &begun, 7).unwrap();
        lease::take(&spec, 7).unwrap();
        drop(begun);
        assert_eq!(give_up(spec.vm, &copies).unwrap_err().code, ErrorCode::WrongState);
        assert_eq!(tpm_state::read(&state).unwrap(), b"state");
    }

    /// Two snapshots, the second one above the first, and what was written since.
    fn tree(snapshots: [SnapshotId; 2]) -> Tree {
        let [one, two] = snapshots;
        let attempt = uuid::Uuid::now_v7();
        let tree = serde_json::json!({
            "frozen": [null, 0],
            "active": 1,
            "snapshots": [
                { "snapshot": one, "attempt": attempt, "layer": 0 },
                { "snapshot": two, "attempt": attempt, "layer": 1 }
            ]
        });
        serde_json::from_value(tree).unwrap()
    }

    #[test]
    fn layers_and_memories_are_named_with_their_disk_and_go_with_it_at_any_stage() {
        let (directory, spec, copies) = setup();
        let snapshots = [SnapshotId::new(), SnapshotId::new()];
        let disk = copies.disks[0].disk;
        let home = Home::of(&copies.disks[0].datastore, spec.vm).unwrap();
        let length = spec.disks().next().unwrap().size;
        for stage in 0..=6 {
            let mut disks = ids(&copies);
            disks[0].1 = Some(tree(snapshots));
            let mut begun = begin(&spec, disks, None).unwrap();
            let layers = begun[0].layers.as_mut().unwrap();
            assert_eq!(layers.parts(), 3);
            let made: Vec<_> =
                (0..stage.min(3)).map(|_| layers.make_next(length).unwrap()).collect();
            let chain: Vec<_> = made.iter().map(Vec::len).collect();
            assert_eq!(chain, [1, 2, 3][..stage.min(3)]);
            if stage > 3 {
                let receive = |which: &Beside, content: &[u8]| {
                    sent_memory::receive(&home, disk, which, content).unwrap();
                };
                receive(&Beside::SnapshotMemory(snapshots[1]), b"memory");
                receive(&Beside::Memory, b"own");
            } else {
                for which in [Beside::SnapshotMemory(snapshots[1]), Beside::Memory] {
                    let whole = home.copy_beside(disk, &which);
                    std::fs::write(whole.with_added_extension("new"), "m").unwrap();
                }
            }
            if stage > 4 {
                name(&spec, &begun, 7).unwrap();
                // Again, after an error that came later.
                name(&spec, &begun, 7).unwrap();
                assert_eq!(std::fs::read(home.snapshot_memory(snapshots[1])).unwrap(), b"memory");
                assert_eq!(std::fs::read(home.memory()).unwrap(), b"own", "it is suspended");
                let noted = crate::storage::layers::read(&home, disk).unwrap();
                assert_eq!((noted.count(), noted.chain(noted.active()).len()), (3, 3));
                let kept =
                    |it| noted.layer_of(it).unwrap().map(|layer| noted.chain(Some(layer)).len());
                assert_eq!(snapshots.map(kept), [Some(1), Some(2)]);
            }
            drop((begun, made));
            if stage == 5 {
                // An agent that starts finds all of it named; the control plane says what becomes of it.
                crate::storage::home::sweep(directory.path(), &|_| true);
            } else if stage < 5 {
                crate::storage::home::sweep_until(directory.path(), &|| {
                    files(&directory).is_empty()
                });
                assert_eq!(files(&directory), Vec::<String>::new(), "swept at stage {stage}");
            }
            give_up(spec.vm, &copies).unwrap();
            assert_eq!(files(&directory), Vec::<String>::new(), "stage {stage}");
        }
    }

    #[test]
    fn a_tree_that_makes_no_sense_is_refused() {
        let (_directory, spec, copies) = setup();
        for (field, wrong) in [
            ("frozen", serde_json::json!([0])),
            ("frozen", serde_json::json!([null, 2])),
            ("frozen", serde_json::json!(vec![Option::<usize>::None; 64])),
            ("active", serde_json::json!(2)),
            (
                "snapshots",
                serde_json::json!([{
                    "snapshot": SnapshotId::new(), "attempt": uuid::Uuid::now_v7(), "layer": 2
                }]),
            ),
        ] {
            let mut told =
                serde_json::to_value(tree([SnapshotId::new(), SnapshotId::new()])).unwrap();
            told[field] = wrong;
            let mut disks = ids(&copies);
            disks[0].1 = Some(serde_json::from_value(told).unwrap());
            let refused = begin(&spec, disks, None).map(drop).unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest, "{field}");
            give_up(spec.vm, &copies).unwrap();
        }
    }

    #[test]
    fn copies_whose_guest_has_run_are_not_removed() {
        let (directory, spec, copies) = setup();
        let begun = begin(&spec, ids(&copies), None).unwrap();
        name(&spec, &begun, 7).unwrap();
        lease::take(&spec, 7).unwrap();
        drop(begun);
        assert_eq!(give_up(spec.vm, &copies).unwrap_err().code, ErrorCode::WrongState);
        settle(&spec, &copies).unwrap();
        let left = files(&directory);
        assert!(!left.iter().any(|name| name.contains("arriving")), "{left:?}");
        // Whether it is off, or has run until its host rebooted: nobody else says that it is here.
        for at_rest in [true, false] {
            let copies = ArrivingCopies { at_rest, ..copies.clone() };
            let refused = give_up(spec.vm, &copies).unwrap_err();
            assert_eq!(refused.code, ErrorCode::WrongState, "at rest: {at_rest}");
            assert_eq!(files(&directory).len(), left.len());
        }
        // For a later placement, and without a note, images are those of somebody else.
        give_up(spec.vm, &ArrivingCopies { generation: 8, ..copies.clone() }).unwrap();
        assert_eq!(files(&directory).len(), left.len());
        let refused = begin(&spec, ids(&copies), None).map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::AlreadyExists);
    }

    #[test]
    fn a_host_without_the_datastore_of_the_copies_does_not_say_that_the_vm_has_come() {
        let (_directory, spec, copies) = setup();
        drop(begin(&spec, ids(&copies), None).unwrap());
        for at_rest in [false, true] {
            let mut elsewhere = ArrivingCopies { at_rest, ..copies.clone() };
            for copy in &mut elsewhere.disks {
                copy.datastore.datastore = vmseal_api::id::DatastoreId::new();
            }
            let refused = give_up(spec.vm, &elsewhere).unwrap_err();
            assert_eq!(refused.code, ErrorCode::Unsupported, "at rest: {at_rest}, {refused}");
        }
        give_up(spec.vm, &copies).unwrap();
    }
}
