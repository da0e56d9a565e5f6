//! A disk that is encrypted, decrypted or encrypted anew in the file that it has (docs/formats/in-place.md).
//!
//! ```text
//!  prepare: header and journal made ─► note written ─► commit: the image loses its name ─► a filter moves the data
//!                │                        │                                                        │
//!                └──────── give up: all of it removed                          sealing: header or end of the file
//!                                                                                                  │
//!            settle: the image gets its name, the note goes ◄─ the inventory has it ◄─ finished: it opens
//! ```
//! From the commit on the image has a name by which nobody opens it as a disk, of any version. It goes back only while no
//! data has moved. Every arrow may be the last thing that a process does: note and journal say how far it is. Only a filter
//! moves data; everything else here belongs to the VM's owner.

mod sealing;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use vmseal_api::atomic_file;
use vmseal_api::filter::{Holes, IN_PLACE_JOURNAL, IN_PLACE_SLOT, IN_PLACE_SLOT_HEADER};
use vmseal_api::host::{DiskFacts, DiskSpec, DiskToConvert, HEADER_AREA, IN_PLACE_ROOM, VmSpec};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_luks::Identity;
use vmseal_secret::{DEK_LEN, SecretBytes};

use crate::filter;
use crate::keys;
use crate::rules;
use crate::storage::builder::{internal, is_preallocated};
use crate::storage::conversion::{self, Note, Stage, is_there, refusal};
use crate::storage::facts::{from_api, role_of, to_api};
use crate::storage::file_error::failed;
use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::image_notes::{Noted, is_encrypted};
use crate::storage::layers;
use crate::storage::locked::{Access, open_locked};
use crate::storage::mirror::Mirror;
use crate::storage::opening::{check_length, data_offset, header_problem};
use crate::storage::sharing;

/// A disk to convert.
pub struct Wanted {
    /// The VM, with its key.
    pub spec: VmSpec,
    /// The disk.
    pub disk: DiskSpec,
    /// What it is now, as far as the inventory knows.
    pub facts: DiskFacts,
    /// The VM's KEK.
    pub kek: Option<SecretBytes>,
    /// What it is to be.
    pub wanted: DiskToConvert,
    /// The task.
    pub task: TaskId,
}

/// How far the conversion of a disk is, for the VM's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Position {
    /// Nothing has been changed.
    Prepared,
    /// The image has lost its name: it goes on.
    Begun,
    /// It is as it is to be.
    Finished(DiskFacts),
}

fn home_of(spec: &VmSpec, disk: &DiskSpec) -> Result<Home, Problem> {
    Home::of(&disk.datastore, spec.vm)
}

fn rename(from: &Path, to: &Path) -> Result<(), Problem> {
    std::fs::rename(from, to)
        .and_then(|()| atomic_file::flush_directory_of(to))
        .map_err(|error| failed(from, "renamed", &error))
}

fn gone(path: &Path) -> Problem {
    let what = format!("{} is not there, or is another file", path.display());
    Problem::new(ErrorCode::Damaged, what)
}

/// Opens one of the files of a conversion, locked.
fn open_known(path: &Path, known: &FileIdentity) -> Result<File, Problem> {
    let file = open_locked(path, Access::Write)?.ok_or_else(|| gone(path))?;
    match FileIdentity::of(&file) {
        Ok(found) if found == *known => Ok(file),
        Ok(_) => Err(gone(path)),
        Err(error) => Err(failed(path, "read", &error)),
    }
}

/// Gives disks that were converted their names, when the inventory has them as they are. Where there are none, nothing is
/// done. Blocks.
///
/// # Errors
/// `wrong-state` where one is being converted, or the inventory has it as it was.
pub fn settle(spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    let home = home_of(spec, disk)?;
    let Some(note) = conversion::read(&home, disk.disk)? else { return Ok(()) };
    let (image, converting) = (home.image(disk.disk), home.converting(disk.disk));
    if is_there(&converting)? {
        let recorded = disk.facts.as_ref() == Some(&note.target_facts);
        if note.stage != Stage::Finished || !recorded {
            return refusal(&home, &spec.name, disk)?.map_or(Ok(()), Err);
        }
        let file = open_known(&converting, &note.image)?;
        if is_there(&image)? {
            let what = format!("{} is there, beside {}", image.display(), converting.display());
            return Err(Problem::new(ErrorCode::Damaged, what));
        }
        rename(&converting, &image)?;
        drop(file);
    }
    remove_rest(&home, disk.disk)
}

/// Removes the note, and what it is of.
fn remove_rest(home: &Home, disk: DiskId) -> Result<(), Problem> {
    home.remove_note(&home.in_place_note(disk))?;
    remove_header(home, disk)?;
    home.remove(&home.in_place_journal(disk))
}

/// Overwrites and removes the file with the header: of a disk that was decrypted, it holds the former key.
fn remove_header(home: &Home, disk: DiskId) -> Result<(), Problem> {
    let path = home.in_place_header(disk);
    let Some(file) = open_locked(&path, Access::Write)? else { return Ok(()) };
    sealing::overwrite(&file, HEADER_AREA, false)
        .map_err(|error| failed(&path, "overwritten", &error))?;
    home.remove_locked(&path)
}

impl Wanted {
    fn home(&self) -> Result<Home, Problem> {
        home_of(&self.spec, &self.disk)
    }

    fn id(&self) -> DiskId {
        self.disk.disk
    }

    /// The conversion that is under way, if it is this one.
    fn known(&self, home: &Home) -> Result<Option<Note>, Problem> {
        let Some(note) = conversion::read(home, self.id())? else { return Ok(None) };
        if !is_there(&home.converting(self.id()))? {
            return Ok(None);
        }
        let same = note.encrypts() == self.wanted.encrypted
            && (note.source_facts == self.facts || note.target_facts == self.facts)
            && note.size == self.disk.size;
        if !same {
            let refused = refusal(home, &self.spec.name, &self.disk)?;
            return Err(refused.unwrap_or_else(|| internal("the conversion has just ended")));
        }
        Ok(Some(note))
    }

    /// Checks that it can be done, and that there is room for it. Changes nothing. Blocks.
    ///
    /// # Errors
    /// `wrong-state`, `no-space`, `not-found`, `in-use`.
    pub fn examine(&self) -> Result<(), Problem> {
        let home = self.home()?;
        if self.known(&home)?.is_some() {
            return Ok(());
        }
        if self.facts == DiskFacts::Raw && !self.wanted.encrypted {
            let what = format!("disk '{}' is not encrypted already", self.disk.name);
            return Err(Problem::invalid("encrypted", what));
        }
        if Mirror::find(&home, self.id())?.is_some() {
            let what = format!(
                "disk '{}' has a copy, or its former image is there: finish that first (the same without --in-place)",
                self.disk.name
            );
            return Err(Problem::new(ErrorCode::WrongState, what));
        }
        if !layers::read(&home, self.id())?.is_empty() {
            return Err(rules::no_layers_in_place(&self.spec, &self.disk));
        }
        // It writes the file itself, which they read.
        sharing::check_alone(&home, &[home.image(self.id())])?;
        if !is_there(&home.image(self.id()))? {
            return Err(gone(&home.image(self.id())));
        }
        let keeps = if is_preallocated(&self.disk) && self.facts == DiskFacts::Raw {
            HEADER_AREA
        } else {
            0
        };
        home.check_room(IN_PLACE_ROOM + keeps)
    }

    /// Makes what a conversion needs, and notes it; one that is under way stays as it is. Blocks.
    ///
    /// # Errors
    /// As [`Wanted::examine`]; `locked`, `key-mismatch`, `damaged`; nothing is left then.
    pub fn prepare(&self) -> Result<Position, Problem> {
        self.examine()?;
        let home = self.home()?;
        if let Some(mut note) = self.known(&home)? {
            if note.task != self.task {
                note.task = self.task;
                conversion::write(&home, self.id(), &note)?;
            }
            return Ok(match note.stage {
                Stage::Finished => Position::Finished(note.target_facts),
                Stage::Moving | Stage::Sealing => Position::Begun,
            });
        }
        // The image has its name: what is there is of an attempt that was given up, or has ended.
        remove_rest(&home, self.id())?;
        let made = self.make(&home);
        made.map(|()| Position::Prepared).inspect_err(|_| {
            if let Err(problem) = remove_rest(&home, self.id()) {
                tracing::warn!(disk = %self.id(), %problem, "the beginning of a conversion is left");
            }
        })
    }

    fn make(&self, home: &Home) -> Result<(), Problem> {
        let path = home.image(self.id());
        let image = open_locked(&path, Access::Write)?.ok_or_else(|| gone(&path))?;
        check_length(&image, &self.disk, data_offset(&self.facts))?;
        let (header, target) = self.make_header(home, &image)?;
        let path = home.in_place_journal(self.id());
        let journal = home.open_or_make(&self.spec, &self.disk.datastore, &path)?;
        journal
            .set_len(IN_PLACE_JOURNAL)
            .and_then(|()| journal.sync_all())
            .map_err(|error| failed(&path, "made", &error))?;
        let identity = |file: &File| FileIdentity::of(file).map_err(internal);
        let files = [identity(&image)?, identity(&header)?, identity(&journal)?];
        let facts = (self.facts.clone(), target);
        conversion::write(home, self.id(), &Note::new(self.task, files, self.disk.size, facts))
    }

    /// The header of the disk as it is to be, or of one that is decrypted as it was: it opens.
    fn make_header(&self, home: &Home, image: &File) -> Result<(File, DiskFacts), Problem> {
        let path = home.in_place_header(self.id());
        let mut file = home.open_or_make(&self.spec, &self.disk.datastore, &path)?;
        let size = self.disk.size;
        let made = |error: &io::Error| failed(&path, "made", error);
        file.set_len(HEADER_AREA + size).map_err(|error| made(&error))?;
        let (kek, reference) = self.key()?;
        let context = keys::context(self.spec.vm, reference);
        if !self.wanted.encrypted {
            let end = data_offset(&self.facts);
            sealing::copy_beginning(image, &file, end).map_err(|error| made(&error))?;
            self.open_header(&file, &self.facts)?;
            return Ok((file, DiskFacts::Raw));
        }
        if self.facts != DiskFacts::Raw {
            // Before anything changes: its data could not be read.
            self.open_header(image, &self.facts)?;
        }
        let dek = SecretBytes::random(DEK_LEN).map_err(internal)?;
        let identity = Identity {
            disk: self.id().0,
            holes: vmseal_luks::Holes::Zero,
            shared: false,
            role: role_of(&self.spec, &self.disk),
        };
        let facts = vmseal_luks::create(&mut file, size, &dek, kek, &context, identity);
        let facts = to_api(&facts.map_err(|error| header_problem(&self.disk.name, &error))?);
        file.sync_all().map_err(|error| made(&error))?;
        self.open_header(&file, &facts)?;
        Ok((file, facts))
    }

    fn key(&self) -> Result<(&SecretBytes, &vmseal_api::host::KeyReference), Problem> {
        match (&self.kek, &self.spec.key) {
            (Some(kek), Some(reference)) => Ok((kek, reference)),
            _ => Err(rules::locked(&self.spec)),
        }
    }

    fn open_header(
        &self,
        file: &File,
        facts: &DiskFacts,
    ) -> Result<Option<vmseal_luks::Opened>, Problem> {
        let Some(pinned) = from_api(&self.disk, facts) else { return Ok(None) };
        let (kek, reference) = self.key()?;
        vmseal_luks::open(file, &pinned, kek, &keys::context(self.spec.vm, reference))
            .map(Some)
            .map_err(|error| header_problem(&self.disk.name, &error))
    }

    /// Takes its name from the image: from then on nobody opens it as a disk. Blocks.
    ///
    /// # Errors
    /// `not-found` when nothing was prepared for this task; those of the file system.
    pub fn commit(&self) -> Result<(), Problem> {
        let home = self.home()?;
        let note = conversion::read(&home, self.id())?.filter(|note| note.task == self.task);
        let note = note.ok_or_else(|| rules::nothing_to_commit(self.task))?;
        let (image, converting) = (home.image(self.id()), home.converting(self.id()));
        if is_there(&converting)? {
            return Ok(());
        }
        let _locked = open_known(&image, &note.image)?;
        rename(&image, &converting)
    }

    /// Undoes what was prepared, and a commit as long as no data has moved. Where there is nothing, nothing is done. Blocks.
    ///
    /// # Errors
    /// `already-exists` when data has moved: it goes on only.
    pub fn give_up(&self) -> Result<(), Problem> {
        let home = self.home()?;
        let Some(note) = conversion::read(&home, self.id())? else { return Ok(()) };
        if note.task != self.task {
            return Ok(());
        }
        let converting = home.converting(self.id());
        if is_there(&converting)? {
            let journal = open_known(&home.in_place_journal(self.id()), &note.journal);
            let untouched = note.stage == Stage::Moving && journal.is_ok_and(|it| is_empty(&it));
            if !untouched {
                return Err(rules::is_converted(&self.spec));
            }
            let image = open_known(&converting, &note.image)?;
            if note.source_facts == DiskFacts::Raw {
                image
                    .set_len(note.size)
                    .and_then(|()| image.sync_all())
                    .map_err(|error| failed(&converting, "shortened", &error))?;
            }
            rename(&converting, &home.image(self.id()))?;
        }
        remove_rest(&home, self.id())
    }

    /// Opens what a filter needs to move the data; none where all of it has moved. Blocks.
    ///
    /// # Errors
    /// `in-use`, `damaged`, `locked`, `no-space`.
    pub fn open(&self, rate: Option<u64>) -> Result<Option<filter::Disk>, Problem> {
        let (home, id) = (self.home()?, self.id());
        let note = self.known(&home)?.ok_or_else(|| rules::nothing_to_commit(self.task))?;
        if note.stage != Stage::Moving {
            return Ok(None);
        }
        let path = home.converting(id);
        let file = open_known(&path, &note.image)?;
        let header = open_known(&home.in_place_header(id), &note.header)?;
        let journal = open_known(&home.in_place_journal(id), &note.journal)?;
        let offset = data_offset(&note.target_facts);
        if note.source_facts == DiskFacts::Raw {
            self.make_longer(&home, &path, &file, offset)?;
        }
        let decrypts = note.target_facts == DiskFacts::Raw;
        let source = if decrypts { &header } else { &file };
        let from = self.open_header(source, &note.source_facts)?;
        let to = match decrypts {
            true => None,
            false => self.open_header(&header, &note.target_facts)?,
        };
        let key = from.map(|opened| {
            let holes = match opened.holes {
                vmseal_luks::Holes::Zero => Holes::Zero,
                vmseal_luks::Holes::Ciphertext => Holes::Ciphertext,
            };
            opened.dek.to_memfd().map(|key| (key, holes)).map_err(internal)
        });
        let to = to.map(|opened| opened.dek.to_memfd().map_err(internal)).transpose()?;
        Ok(Some(filter::Disk {
            disk: id,
            size: note.size,
            file: file.try_clone().map_err(internal)?,
            layers: Vec::new(),
            offset: data_offset(&note.source_facts),
            key: key.transpose()?,
            shared: filter::Shared::default(),
            keeps_room: is_preallocated(&self.disk),
            work: filter::Work::Convert(Box::new(filter::Conversion {
                file,
                offset,
                key: to,
                journal,
                bytes_per_second: rate,
            })),
            beside: None,
            replica: None,
            mirror: None,
        }))
    }

    /// Makes room for the header behind the data.
    fn make_longer(
        &self,
        home: &Home,
        path: &Path,
        file: &File,
        offset: u64,
    ) -> Result<(), Problem> {
        let (size, needed) = (self.disk.size, self.disk.size + offset);
        let length = file.metadata().map_err(internal)?.len();
        if length == needed {
            return Ok(());
        }
        // What is behind the disk is nobody's, and would be left in the clear.
        file.set_len(size).map_err(|error| failed(path, "shortened", &error))?;
        if is_preallocated(&self.disk) {
            home.allocate(self.id(), file, size..needed)?;
        }
        file.set_len(needed)
            .and_then(|()| file.sync_all())
            .map_err(|error| failed(path, "made longer", &error))
    }

    /// Notes that all data has moved. Blocks.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn moved(&self) -> Result<(), Problem> {
        self.note_stage(Stage::Sealing)
    }

    fn note_stage(&self, stage: Stage) -> Result<(), Problem> {
        let home = self.home()?;
        let mut note = self.known(&home)?.ok_or_else(|| rules::nothing_to_commit(self.task))?;
        note.stage = stage;
        conversion::write(&home, self.id(), &note)
    }

    /// Puts the header or the end of the file right, and opens the disk with its key; what it is then. Blocks.
    ///
    /// # Errors
    /// Those of the file system; `damaged`, `key-mismatch` where it does not open.
    pub fn seal(&self) -> Result<DiskFacts, Problem> {
        let (home, id) = (self.home()?, self.id());
        let note = self.known(&home)?.ok_or_else(|| rules::nothing_to_commit(self.task))?;
        let target = note.target_facts.clone();
        match note.stage {
            Stage::Finished => return Ok(target),
            Stage::Moving => return Err(internal("the data of a disk has not moved yet")),
            Stage::Sealing => {}
        }
        let path = home.converting(id);
        let mut file = open_known(&path, &note.image)?;
        let sealed = if target == DiskFacts::Raw {
            file.set_len(note.size).and_then(|()| file.sync_all())
        } else {
            let header = open_known(&home.in_place_header(id), &note.header)?;
            let end = data_offset(&target);
            let overwritten = sealing::overwrite(&file, end, is_preallocated(&self.disk));
            overwritten.map_err(|error| failed(&path, "overwritten", &error))?;
            // That was past the page cache, perhaps.
            drop(file);
            file = open_known(&path, &note.image)?;
            sealing::copy_beginning(&header, &file, end)
        };
        sealed.map_err(|error| failed(&path, "finished", &error))?;
        // As it will be opened from now on: by nothing that is in memory here.
        drop(file);
        let file = open_known(&path, &note.image)?;
        check_length(&file, &self.disk, data_offset(&target))?;
        self.open_header(&file, &target)?;
        let (here, encrypted) = (&self.disk.datastore, is_encrypted(&target));
        Noted { here, vm: self.spec.vm, disk: id, encrypted }.note(&file);
        self.note_stage(Stage::Finished)?;
        remove_header(&home, id)?;
        home.remove(&home.in_place_journal(id))?;
        Ok(target)
    }
}

/// Whether a journal says nothing yet: no data has moved.
fn is_empty(journal: &File) -> bool {
    let mut header = vec![0; IN_PLACE_SLOT_HEADER as usize];
    [0, IN_PLACE_SLOT].into_iter().all(|at| {
        journal.read_exact_at(&mut header, at).is_ok() && header.iter().all(|byte| *byte == 0)
    })
}

#[cfg(test)]
mod tests;
