//! A disk that is being copied to another image of its own, which takes its place (docs/formats/mirror-note.md).
//!
//! ```text
//!  begin: copy and map made ─► note written ─► a filter copies ─► it pivots: the map says so ─► names put right
//!                                  │                                                                │
//!                                  └─ give up: note, map, copy removed            former image, map, note removed
//! ```
//! The copy may be on another datastore than the disk: then a note beside each of both leads to the other. Where the disk has
//! layers, the copy gets layers of its own ([`tree`]); a filter copies and pivots only what the active one has. The memory that snapshots keep beside it,
//! that of a VM that is suspended, and core dumps are copied, too ([`beside`]), and what a TPM keeps with the disk that has its key ([`tpm`]). A replica
//! is not: the copy gets another one ([`replicas`]).
//! Every arrow may be the last thing that a process does: the next one finds in note and map where the disk's data is.
//! Only the filter pivots; everything else here belongs to the VM's owner.

mod beside;
mod copy_opens;
mod note;
pub(crate) mod pace;
mod pivot_mark;
mod replicas;
pub(crate) mod source;
pub(crate) mod tpm;
pub(crate) mod tree;

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use vmseal_api::atomic_file;
use vmseal_api::filter::Holes;
use vmseal_api::host::{DiskFacts, DiskRole, DiskSpec, DiskToMirror, VmSpec};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_luks::Identity;
use vmseal_secret::{DEK_LEN, SecretBytes, SecretFd};

pub use self::beside::is_suspended;
use self::note::Note;
use self::pivot_mark::PivotMark;
pub use self::replicas::{
    examine_replica, has_left_replica, leave_replica, make_replica, replica_for_writer,
};
use crate::filter::{self, CopyPlace};
use crate::keys;
use crate::rules;
use crate::storage::builder::{internal, is_preallocated};
use crate::storage::facts::{from_api, role_of, to_api};
use crate::storage::file_error::failed;
use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::image_notes::{Noted, is_encrypted};
use crate::storage::layers;
use crate::storage::locked::{Access, make_locked, open_locked};
use crate::storage::opening::{self, Open, data_offset, header_problem};
use crate::storage::preallocation;
use crate::storage::replica;

/// A copy that is to take a disk's place, or has taken it.
#[derive(Clone, Debug)]
pub struct Mirror {
    note: Note,
    /// The home in which the note was found.
    home: Home,
    disk: DiskId,
    /// Whether the disk's data is in the copy.
    pub pivoted: bool,
}

impl Mirror {
    /// The mirror of a disk; none when it is not mirrored. `home` is that of its image or that of its copy. Blocks.
    ///
    /// # Errors
    /// `damaged` when it cannot be told where the disk's data is.
    pub fn find(home: &Home, disk: DiskId) -> Result<Option<Self>, Problem> {
        let Some(note) = note::read(home, disk)? else { return Ok(None) };
        let mut found = Self { note, home: home.clone(), disk, pivoted: true };
        if found.note.from.is_some() {
            // The image's datastore may be away, and is not needed any more.
            if found.is_settled() {
                return Ok(Some(found));
            }
            let beside_image = note::read(&found.source()?, disk)?;
            if beside_image.is_none_or(|it| it.task != found.note.task) {
                // It was given up, or never begun.
                return Ok(None);
            }
        }
        let path = found.source()?.mirror_map(disk);
        let mark = match File::open(&path) {
            Ok(map) => pivot_mark::read(&map, disk).map_err(|error| failed(&path, "read", &error)),
            // The map goes after the former image, so what is left is the note.
            Err(error) if error.kind() == io::ErrorKind::NotFound && found.is_settled() => {
                Ok(PivotMark::Pivoted)
            }
            Err(error) => Err(failed(&path, "read", &error)),
        };
        found.pivoted = match mark? {
            PivotMark::NotPivoted => false,
            PivotMark::Pivoted => true,
            PivotMark::Unreadable => {
                let what = format!(
                    "{} is damaged, and says no more whether the disk's data is in {} or in the copy",
                    path.display(),
                    found.source()?.image(disk).display()
                );
                return Err(Problem::new(ErrorCode::Damaged, what));
            }
        };
        Ok(Some(found))
    }

    /// The home of the image that the disk had, and of the map.
    fn source(&self) -> Result<Home, Problem> {
        self.note.from.as_ref().map_or_else(|| Ok(self.home.clone()), |from| self.home.on(from))
    }

    /// The home of the copy.
    fn target(&self) -> Result<Home, Problem> {
        self.note.to.as_ref().map_or_else(|| Ok(self.home.clone()), |to| self.home.on(to))
    }

    /// Whether the copy is on another datastore.
    fn moves(&self) -> bool {
        self.note.to.is_some() || self.note.from.is_some()
    }

    /// The task that it is of.
    #[must_use]
    pub fn task(&self) -> TaskId {
        self.note.task
    }

    /// How fast it is copied.
    ///
    /// # Errors
    /// `wrong-state` when the datastore of the image is not there.
    pub fn pace(&self) -> Result<CopyPace, Problem> {
        Ok(pace::read(&self.source()?, self.disk))
    }

    /// The facts of the copy.
    #[must_use]
    pub fn facts(&self) -> DiskFacts {
        self.note.copy_facts.clone()
    }

    /// The disk as it is when it has pivoted.
    #[must_use]
    pub fn pivoted_disk(&self, disk: &DiskSpec) -> DiskSpec {
        DiskSpec {
            encrypted: self.note.encrypts(),
            facts: Some(self.note.copy_facts.clone()),
            datastore: self.note.to.clone().unwrap_or_else(|| disk.datastore.clone()),
            ..disk.clone()
        }
    }

    /// Whether the copy has the disk's name.
    fn is_settled(&self) -> bool {
        let image = self.target().and_then(|home| identity(&home.image(self.disk)));
        image.is_ok_and(|image| image.as_ref() == Some(&self.note.copy))
    }

    /// Puts the names right of a disk that has pivoted. Blocks.
    ///
    /// # Errors
    /// `damaged` when the copy is not there; those of the file system.
    pub fn settle(&self) -> Result<(), Problem> {
        match self.set_aside() {
            // The former image has a name of its own there, and its datastore may be away.
            Err(problem) if self.moves() => {
                tracing::warn!(disk = %self.disk, %problem, "its former image keeps its name for now");
            }
            result => result?,
        }
        if self.is_settled() {
            return Ok(());
        }
        let target = self.target()?;
        let (image, copy) = (target.image(self.disk), target.copy(self.disk));
        if identity(&copy)? != Some(self.note.copy.clone()) || identity(&image)?.is_some() {
            let what = format!(
                "the disk's data is in the copy that was {}, which is not there, or another file has taken its place",
                copy.display()
            );
            return Err(Problem::new(ErrorCode::Damaged, what));
        }
        beside::take_place(self)?;
        tpm::take_place(self)?;
        if self.note.layers {
            layers::take_place(&target, self.disk)?;
        }
        // Last: this says that all names are right.
        rename(&copy, &image)
    }

    /// Gives the former image its name, and the note of its layers.
    fn set_aside(&self) -> Result<(), Problem> {
        let source = self.source()?;
        let image = source.image(self.disk);
        if identity(&image)? == Some(self.note.source.clone()) {
            rename(&image, &source.source(self.disk))?;
        }
        if self.note.layers {
            layers::set_aside(&source, self.disk, self.moves())?;
        }
        beside::set_aside(self)
    }

    /// Removes the notes, the one first that others lead to.
    fn remove_notes(&self) -> Result<(), Problem> {
        let (source, target) = (self.source()?, self.target()?);
        source.remove_note(&source.mirror_note(self.disk))?;
        target.remove_note(&target.mirror_note(self.disk))
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), Problem> {
    std::fs::rename(from, to)
        .and_then(|()| atomic_file::flush_directory_of(to))
        .map_err(|error| failed(from, "renamed", &error))
}

/// Which file has a name; none when there is none.
fn identity(path: &Path) -> Result<Option<FileIdentity>, Problem> {
    match path.symlink_metadata() {
        Ok(metadata) => Ok(Some(FileIdentity::in_metadata(&metadata))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path, "looked at", &error)),
    }
}

/// A copy to begin.
pub struct NewMirror<'a> {
    /// The VM, with its key where the copy is encrypted.
    pub spec: &'a VmSpec,
    /// The disk.
    pub disk: &'a DiskSpec,
    /// Its facts.
    pub facts: &'a DiskFacts,
    /// The VM's KEK.
    pub kek: Option<&'a SecretBytes>,
    /// What is wanted.
    pub wanted: &'a DiskToMirror,
    /// The task.
    pub task: TaskId,
    /// How fast it is copied.
    pub pace: CopyPace,
    /// Whether the VM has no key afterwards.
    pub forgets_key: bool,
}

impl NewMirror<'_> {
    /// Makes an empty copy, and notes it; one that this task has begun gets its pace, and stays as it is otherwise. `check` sees the disk's image before
    /// anything is made. Blocks.
    ///
    /// # Errors
    /// `wrong-state` when another task has one; `no-space`, `not-found`; nothing is left then.
    pub fn begin(&self, check: impl FnOnce(&File) -> Result<(), Problem>) -> Result<(), Problem> {
        let Self { disk, task, .. } = *self;
        let home = Home::of(&disk.datastore, self.spec.vm)?;
        match Mirror::find(&home, disk.disk)? {
            Some(known) if known.task() == task => {
                pace::record(&known.source()?, disk.disk, self.pace);
                return Ok(());
            }
            Some(other) => return Err(rules::other_mirror(disk, other.task())),
            None => {}
        }
        let layers = layers::read(&home, disk.disk)?;
        let target = self.target(&home)?;
        remove_debris(&home, &target, disk.disk)?;
        let path = home.image(disk.disk);
        // Not locked: the filter of the guest may have it.
        let image = File::open(&path).map_err(|error| failed(&path, "opened", &error))?;
        check(&image)?;
        let metadata = image.metadata().map_err(internal)?;
        let source = (FileIdentity::in_metadata(&metadata), self.facts.clone());
        let allocated = metadata.blocks().saturating_mul(512);
        let following = beside::following(&home, self.spec, disk.disk, self.forgets_key)?;
        let beside = if following.is_some() { beside::room(&home)? } else { 0 };
        let room = allocated + layers::room_of_all(&home, disk.disk, &layers) + beside;
        let made = self.make(&target, room);
        // Before the note: from that on the filter of the guest may open the copy.
        pace::record(&home, disk.disk, self.pace);
        let noted = made.and_then(|copy| {
            let note = Note::new(task, source, copy);
            let note = if layers.is_empty() { note } else { note.of_layers() };
            let note = match following {
                Some(following) => note.with_beside(following),
                None => note,
            };
            let note = if disk.role == DiskRole::Tpm { note.of_tpm() } else { note };
            self.note(&home, &target, note)
        });
        noted.inspect_err(|_| {
            if let Err(problem) = remove_debris(&home, &target, disk.disk) {
                tracing::warn!(disk = %disk.disk, %problem, "the beginning of a copy is left");
            }
        })
    }

    /// The home of the copy.
    fn target(&self, home: &Home) -> Result<Home, Problem> {
        let Some(to) = &self.wanted.datastore else { return Ok(home.clone()) };
        let target = home.on(to)?;
        tpm::require_room(&target, self.disk)?;
        let image = target.image(self.disk.disk);
        match identity(&image)? {
            None => Ok(target),
            Some(_) => {
                let what = format!(
                    "{} is there already, and is not the image of disk '{}': remove it if it is not wanted",
                    image.display(),
                    self.disk.name
                );
                Err(Problem::new(ErrorCode::AlreadyExists, what))
            }
        }
    }

    /// Makes the map and the notes. That beside the image is the last, and the one that counts.
    fn note(&self, home: &Home, target: &Home, note: Note) -> Result<(), Problem> {
        let disk = self.disk.disk;
        let map = home.mirror_map(disk);
        drop(make_locked(&map)?);
        atomic_file::flush_directory_of(&map).map_err(|error| failed(&map, "made", &error))?;
        let Some(to) = &self.wanted.datastore else { return note::write(home, disk, &note) };
        let (beside_image, beside_copy) = note.of_move(self.disk.datastore.clone(), to.clone());
        note::write(target, disk, &beside_copy)?;
        note::write(home, disk, &beside_image)
    }

    /// The copy: it reads as zeroes.
    fn make(&self, home: &Home, allocated: u64) -> Result<(FileIdentity, DiskFacts), Problem> {
        let Self { spec, disk, .. } = *self;
        let header = if self.wanted.encrypted { vmseal_luks::DATA_OFFSET } else { 0 };
        let length = header + disk.size;
        home.check_room(if is_preallocated(disk) { length } else { header + allocated })?;
        let path = home.copy(disk.disk);
        let here = self.wanted.datastore.as_ref().unwrap_or(&disk.datastore);
        let mut file = home.open_or_make(spec, here, &path)?;
        file.set_len(length).map_err(|error| failed(&path, "made", &error))?;
        // Not all of it on a pool: meanwhile the VM's owner would do nothing else, not even start another filter for a guest whose filter
        // has died. Where the disk has layers, the room is the first part of the copying ([`tree::Room`]).
        let ahead = preallocation::ahead(&here.location, header, length);
        if is_preallocated(disk) && ahead > 0 {
            home.allocate(disk.disk, &file, 0..ahead)?;
        }
        let facts = match (self.wanted.encrypted, self.kek, &spec.key) {
            (false, ..) => DiskFacts::Raw,
            (true, Some(kek), Some(reference)) => {
                let dek = SecretBytes::random(DEK_LEN).map_err(internal)?;
                let context = keys::context(spec.vm, reference);
                let identity = Identity {
                    disk: disk.disk.0,
                    holes: vmseal_luks::Holes::Zero,
                    shared: false,
                    role: role_of(spec, disk),
                };
                let made = vmseal_luks::create(&mut file, disk.size, &dek, kek, &context, identity);
                to_api(&made.map_err(|error| header_problem(&disk.name, &error))?)
            }
            _ => return Err(internal("an encrypted copy was begun without its key")),
        };
        let encrypted = is_encrypted(&facts);
        Noted { here, vm: spec.vm, disk: disk.disk, encrypted }.note(&file);
        file.sync_all().map_err(|error| failed(&path, "flushed", &error))?;
        let identity = FileIdentity::of(&file).map_err(|error| failed(&path, "read", &error))?;
        Ok((identity, facts))
    }
}

/// Removes a copy with its layers, its map, and the note beside a copy that is elsewhere, where no note beside the image is
/// about them.
fn remove_debris(home: &Home, target: &Home, disk: DiskId) -> Result<(), Problem> {
    home.remove(&home.mirror_map(disk))?;
    home.remove_note(&home.mirror_pace(disk))?;
    target.remove(&target.copy(disk))?;
    layers::drop_copies(target, disk)?;
    beside::drop_copies(target, disk)?;
    tpm::drop_copies(target, disk)?;
    // Nothing is copied to layers any more.
    home.remove(&home.merge_lock(disk))?;
    if target.path() != home.path() {
        target.remove_note(&target.mirror_note(disk))?;
    }
    Ok(())
}

/// Gives up a copy of this task, or of any; nothing is left of it. Where there is none, nothing is done. Blocks.
///
/// # Errors
/// `already-exists` when the disk has pivoted; `in-use` while a filter works on it: it is given up nevertheless.
pub fn give_up(
    spec: &VmSpec,
    disk: &DiskSpec,
    wanted: &DiskToMirror,
    task: Option<TaskId>,
) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    match Mirror::find(&home, disk.disk)? {
        Some(mirror) if task.is_some_and(|task| mirror.task() != task) => return Ok(()),
        Some(mirror) if mirror.pivoted => return Err(rules::is_mirrored(spec)),
        Some(_) => home.remove_note(&home.mirror_note(disk.disk))?,
        None => {}
    }
    let target = wanted.datastore.as_ref().filter(|to| **to != disk.datastore);
    let target = target.map_or_else(|| Ok(home.clone()), |to| home.on(to))?;
    remove_debris(&home, &target, disk.disk)
}

/// Puts on record how fast a disk is copied, while it is. Blocks.
///
/// # Errors
/// As [`Mirror::find`]; `wrong-state` when the datastore is not there.
pub fn record_pace(vm: VmId, disk: &DiskSpec, pace: CopyPace) -> Result<(), Problem> {
    if let Some(mirror) = of_disk(vm, disk)?.filter(|mirror| !mirror.pivoted) {
        pace::record(&mirror.source()?, disk.disk, pace);
    }
    Ok(())
}

/// Removes what is on another datastore of a disk that is being deleted: its copy, or its former image. Blocks.
///
/// # Errors
/// `in-use`; `wrong-state` when that datastore is not there.
pub fn delete_elsewhere(vm: VmId, disk: &DiskSpec) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, vm)?;
    let Some(note) = note::read(&home, disk.disk)? else { return Ok(()) };
    if let Some(mirror) = Mirror::find(&home, disk.disk)?.filter(|mirror| mirror.pivoted) {
        // What was beside the former image goes with it.
        beside::set_aside(&mirror)?;
    }
    match note.to.as_ref().or(note.from.as_ref()) {
        Some(other) => {
            let other = home.on(other)?;
            replica::remove_beside(&other, disk.disk)?;
            other.delete(disk.disk)
        }
        None => Ok(()),
    }
}

/// A disk that is opened for its guest.
pub struct GuestDisk {
    /// The image, which may have been the copy.
    pub open: Open,
    /// The copy that its filter is to keep.
    pub mirror: Option<filter::Mirror>,
    /// Whether a copy has taken the place of the image.
    pub has_pivoted: bool,
}

/// Opens a disk for its guest. Blocks.
///
/// # Errors
/// As [`opening::open`].
pub fn open_for_guest(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<GuestDisk, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let mirror = Mirror::find(&home, disk.disk)?;
    let Some(mirror) = mirror.as_ref().filter(|mirror| !mirror.pivoted) else {
        let (disk, facts) = as_it_is(spec, disk, facts, Access::Write)?;
        let open = opening::open(spec, &disk, &facts, kek, Access::Write)?;
        return Ok(GuestDisk { open, mirror: None, has_pivoted: mirror.is_some() });
    };
    let open = opening::open(spec, disk, facts, kek, Access::Write)?;
    let copy = match tree::is_incomplete(mirror) {
        // A filter keeps a copy when that is copied which nobody writes.
        Ok(true) => return Ok(GuestDisk { open, mirror: None, has_pivoted: false }),
        Ok(false) => open_copy(mirror, spec, disk, kek),
        Err(problem) => Err(problem),
    };
    let mirror = match copy {
        Ok(copy) => Some(copy),
        Err(problem) if problem.code == ErrorCode::Locked => return Err(problem),
        Err(problem) => {
            // What the guest writes from now on would be missing there. A note beside a copy elsewhere says nothing alone.
            home.remove_note(&home.mirror_note(disk.disk))?;
            tracing::error!(vm = %spec.vm, disk = %disk.disk, %problem, "the copy of a disk is given up");
            None
        }
    };
    Ok(GuestDisk { open, mirror, has_pivoted: false })
}

/// Opens a disk and its copy for a filter that does nothing but copy; none if it is not mirrored or has pivoted. Blocks.
///
/// # Errors
/// As [`opening::open`]; `timed-out` while its layers are not copied.
pub fn open_to_copy(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<Option<(Open, filter::Mirror)>, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let Some(mirror) = Mirror::find(&home, disk.disk)?.filter(|mirror| !mirror.pivoted) else {
        return Ok(None);
    };
    let open = opening::open(spec, disk, facts, kek, Access::Write)?;
    // Nobody reads through this filter.
    let copy = filter::Mirror { cache: None, ..open_copy(&mirror, spec, disk, kek)? };
    Ok(Some((open, copy)))
}

/// Opens the copy alone of a disk that is served and has not pivoted; none if it is not mirrored or has. Blocks.
///
/// # Errors
/// As [`opening::open`].
pub fn open_beside_guest(
    spec: &VmSpec,
    disk: &DiskSpec,
    kek: Option<&SecretBytes>,
) -> Result<Option<filter::Mirror>, Problem> {
    let mirror = of_disk(spec.vm, disk)?.filter(|mirror| !mirror.pivoted);
    mirror.map(|mirror| open_copy(&mirror, spec, disk, kek)).transpose()
}

/// The disk and its facts as they are: those of its copy, if it has pivoted, whose names are put right. Blocks.
///
/// # Errors
/// `in-use` for a writer while a copy follows the disk, as it would not see what is written.
pub fn as_it_is(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    access: Access,
) -> Result<(DiskSpec, DiskFacts), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let Some(mirror) = Mirror::find(&home, disk.disk)? else {
        return Ok((disk.clone(), facts.clone()));
    };
    match (mirror.pivoted, access) {
        (true, _) => {
            mirror.settle()?;
            Ok((mirror.pivoted_disk(disk), mirror.facts()))
        }
        (false, Access::Read | Access::ReadBesideGuest) => Ok((disk.clone(), facts.clone())),
        (false, Access::Write | Access::BesideGuest) => {
            let what = format!(
                "task {} copies disk '{}' to another image: wait for it, or cancel it",
                mirror.task(),
                disk.name
            );
            Err(Problem::new(ErrorCode::InUse, what))
        }
    }
}

/// Whether the files of a disk have their names: not yet where its copy has pivoted a moment ago, which its VM's owner puts right. Who only
/// asks, or reads beside that owner, renames nothing. Blocks.
///
/// # Errors
/// Those of the notes.
pub fn has_its_names(spec: &VmSpec, disk: &DiskSpec) -> Result<bool, Problem> {
    let mirror = Mirror::find(&Home::of(&disk.datastore, spec.vm)?, disk.disk)?;
    Ok(mirror.is_none_or(|mirror| !mirror.pivoted || mirror.is_settled()))
}

fn gone(path: &Path) -> Problem {
    let what = format!("{} is not there, or is another file", path.display());
    Problem::new(ErrorCode::Damaged, what)
}

/// Opens the image of a copy, with its lock.
fn image_of_copy(mirror: &Mirror, disk: &DiskSpec) -> Result<File, Problem> {
    let path = mirror.target()?.copy(disk.disk);
    let file = open_locked(&path, Access::Write)?.ok_or_else(|| gone(&path))?;
    match FileIdentity::of(&file) {
        Ok(found) if found == mirror.note.copy => Ok(file),
        _ => Err(gone(&path)),
    }
}

fn open_copy(
    mirror: &Mirror,
    spec: &VmSpec,
    disk: &DiskSpec,
    kek: Option<&SecretBytes>,
) -> Result<filter::Mirror, Problem> {
    let note = &mirror.note;
    let file = image_of_copy(mirror, disk)?;
    let layers = tree::open(mirror)?;
    let map = mirror.source()?.mirror_map(disk.disk);
    let map = open_locked(&map, Access::Write)?.ok_or_else(|| gone(&map))?;
    let key = copy_key(note, spec, disk, kek, &file)?.map(|key| (key, Holes::Zero));
    let offset = data_offset(&note.copy_facts);
    let (keeps_room, pace) = (is_preallocated(disk), mirror.pace()?);
    let to = CopyPlace::Image { file, layers, offset, keeps_room };
    Ok(filter::Mirror { to, key, map, pace, cache: disk.cache })
}

/// The DEK of a copy, whose image is open; none of one that is plain.
fn copy_key(
    note: &Note,
    spec: &VmSpec,
    disk: &DiskSpec,
    kek: Option<&SecretBytes>,
    file: &File,
) -> Result<Option<SecretFd>, Problem> {
    let dek = copy_dek(note, spec, disk, kek, file)?;
    dek.map(|dek| dek.to_memfd()).transpose().map_err(internal)
}

/// The same, for the agent itself.
fn copy_dek(
    note: &Note,
    spec: &VmSpec,
    disk: &DiskSpec,
    kek: Option<&SecretBytes>,
    file: &File,
) -> Result<Option<SecretBytes>, Problem> {
    let facts = &note.copy_facts;
    let copy = DiskSpec { encrypted: note.encrypts(), facts: Some(facts.clone()), ..disk.clone() };
    let Some(pinned) = from_api(&copy, facts) else { return Ok(None) };
    let (Some(kek), Some(reference)) = (kek, &spec.key) else {
        return Err(rules::locked(spec));
    };
    let opened = vmseal_luks::open(file, &pinned, kek, &keys::context(spec.vm, reference))
        .map_err(|error| header_problem(&disk.name, &error))?;
    Ok(Some(opened.dek))
}

/// Puts the names right of a disk that has pivoted; the disk as it is then, and its image. None if it has not. Blocks.
///
/// # Errors
/// As [`Mirror::settle`].
pub fn take_place(vm: VmId, disk: &DiskSpec) -> Result<Option<(DiskSpec, File)>, Problem> {
    let home = Home::of(&disk.datastore, vm)?;
    let Some(mirror) = Mirror::find(&home, disk.disk)?.filter(|mirror| mirror.pivoted) else {
        return Ok(None);
    };
    mirror.settle()?;
    let path = mirror.target()?.image(disk.disk);
    let image = File::open(&path).map_err(|error| failed(&path, "opened", &error))?;
    Ok(Some((mirror.pivoted_disk(disk), image)))
}

/// A VM with its first disk as that is: the copy, with its names put right, where the disk has pivoted. What is saved of the VM is beside it.
/// Only for its owner. Blocks.
///
/// # Errors
/// As [`Mirror::find`] and [`Mirror::settle`]; `wrong-state` when the datastore is not there.
pub fn with_first_disk_as_it_is(spec: &VmSpec) -> Result<VmSpec, Problem> {
    let (vm, mut spec) = (spec.vm, spec.clone());
    if let Some(first) = spec.disks_mut().next()
        && let Some(mirror) = of_disk(vm, first)?.filter(|mirror| mirror.pivoted)
    {
        mirror.settle()?;
        *first = mirror.pivoted_disk(first);
    }
    Ok(spec)
}

/// The mirror of a VM's disk; none when it is not mirrored. Blocks.
///
/// # Errors
/// As [`Mirror::find`]; `wrong-state` when the datastore is not there.
pub fn of_disk(vm: VmId, disk: &DiskSpec) -> Result<Option<Mirror>, Problem> {
    Mirror::find(&Home::of(&disk.datastore, vm)?, disk.disk)
}

#[cfg(test)]
mod tests;
