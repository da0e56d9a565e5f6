//! Reads the files of a VM on its datastores, and reports whether they are encrypted (docs/proof.md).
//!
//! Files are opened without their locks, as the filter of the guest may have them, and nothing is written.
//!
//! | module | subject |
//! |---|---|
//! | [`statistics`] | whether bytes look like ciphertext |
//! | [`sample`] | which parts of a file are read |
//! | [`data`] | the data of a file, sector by sector |
//! | [`names`] | what the files of a VM are by their names |
//! | [`files`] | one file: its header, its data, its verdict |

mod data;
mod files;
mod names;
mod sample;
mod statistics;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use vmseal_api::host::{DatastoreSpec, DiskFacts, DiskSpec, ProveJob, VmSpec};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::proof::{
    CHI_SQUARE, FILES_MAX, FINDINGS_MAX, FileKind, ImageKind, ProofReport, SAMPLE_BYTES, VERSION,
    Verdict,
};
use vmseal_secret::SecretBytes;

use self::data::Reading;
use self::files::{DiskKey, Examiner};
use self::names::{Named, name_of};
use crate::storage::file_error::failed;
use crate::storage::home::Home;

/// What is to be read.
pub struct Proving {
    /// The VM.
    pub spec: VmSpec,
    /// The facts of its disks that are made.
    pub facts: BTreeMap<DiskId, DiskFacts>,
    /// Its KEK, if it has one.
    pub kek: Option<SecretBytes>,
    /// The task.
    pub task: TaskId,
    /// How it is read.
    pub job: ProveJob,
}

/// A file of the VM's.
struct Found {
    datastore: DatastoreSpec,
    /// Its path within the datastore.
    place: String,
    path: PathBuf,
    named: Named,
    allocated: u64,
}

impl Proving {
    /// Reads the files. `progress` receives the bytes read and an estimate of all. Blocks.
    ///
    /// # Errors
    /// `cancelled`; those of a datastore that cannot be listed.
    pub fn run(
        &self,
        mut progress: impl FnMut(u64, u64),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<ProofReport, Problem> {
        let begun = Timestamp::now();
        let (found, mut reasons) = self.find()?;
        let most = |file: &Found| match (self.job.all, &file.named) {
            // Its bytes are looked at, and then it is opened.
            (true, Named::Other(FileKind::Sealed)) => file.allocated.saturating_mul(2),
            (true, _) => file.allocated,
            (false, _) => file.allocated.min(SAMPLE_BYTES),
        };
        let total: u64 = found.iter().map(most).sum();
        let mut done = 0;
        let mut tell = |more: u64| {
            done += more;
            progress(done, total.max(done));
        };
        let reading =
            Reading { all: self.job.all, seed: self.job.seed, progress: &mut tell, cancelled };
        let mut examiner = Examiner { spec: &self.spec, kek: self.kek.as_ref(), reading };
        let (mut images, mut files) = (Vec::new(), Vec::new());
        let mut keys: BTreeMap<PathBuf, DiskKey> = BTreeMap::new();
        for file in &found {
            match &file.named {
                Named::Image(kind, disk) => {
                    let facts = self.facts.get(disk);
                    // Sorted by name, an image comes before the layers above it, which have its key.
                    let image = file.path.with_file_name(format!("{disk}.raw"));
                    let below = keys.get(&image);
                    let Some((image, key)) =
                        examiner.image(&file.path, (*kind, *disk, facts), below)?
                    else {
                        continue;
                    };
                    keys.extend(key.map(|key| (file.path.clone(), key)));
                    let (datastore, path) = (file.datastore.datastore, file.place.clone());
                    images.push(vmseal_api::proof::ProvenImage { datastore, path, ..image });
                }
                Named::Other(kind) => {
                    let Some(proven) = examiner.other(&file.path, *kind)? else { continue };
                    let (datastore, path) = (file.datastore.datastore, file.place.clone());
                    files.push(vmseal_api::proof::ProvenFile { datastore, path, ..proven });
                }
            }
        }
        let mut verdict = if reasons.is_empty() { Verdict::Encrypted } else { Verdict::NotProved };
        for (path, one, reason) in images
            .iter()
            .map(|image| (&image.path, image.verdict, &image.reason))
            .chain(files.iter().map(|file| (&file.path, file.verdict, &file.reason)))
        {
            verdict = verdict.and(one);
            if one != Verdict::Encrypted && reasons.len() < FINDINGS_MAX {
                let why = reason.as_deref().unwrap_or("it could not be examined");
                reasons.push(format!("{path}: {why}"));
            }
        }
        for disk in self.spec.disks().filter(|disk| self.job.disks.contains(&disk.disk)) {
            let is_it =
                |kind| matches!(kind, ImageKind::Image | ImageKind::Copy | ImageKind::Former);
            if !images.iter().any(|image| image.disk == disk.disk && is_it(image.kind)) {
                verdict = verdict.and(Verdict::NotProved);
                reasons.push(format!("disk '{}': its image is not on its datastore", disk.name));
            }
        }
        Ok(ProofReport {
            version: VERSION,
            task: self.task,
            vm: self.spec.vm,
            name: self.spec.name.clone(),
            host: None,
            begun,
            ended: Timestamp::now(),
            all: self.job.all,
            seed: self.job.seed,
            verdict,
            reasons,
            key: self.spec.key.clone(),
            images,
            files,
            chi_square_bounds: [*CHI_SQUARE.start(), *CHI_SQUARE.end()],
        })
    }

    /// The files of the VM, by datastore and name; and why some may be missing.
    fn find(&self) -> Result<(Vec<Found>, Vec<String>), Problem> {
        let (mut found, mut reasons) = (Vec::new(), Vec::new());
        for datastore in places(self.spec.disks()) {
            let home = Home::of(&datastore, self.spec.vm)?;
            let entries = match std::fs::read_dir(home.path()) {
                Ok(entries) => entries,
                // No disk of the VM has been made there.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed(home.path(), "read", &error)),
            };
            let mut here = Vec::new();
            for entry in entries {
                let entry = entry.map_err(|error| failed(home.path(), "read", &error))?;
                let name = entry.file_name().to_string_lossy().into_owned();
                let place = format!("{}/{name}", self.spec.vm);
                if names::is_tpm_directory(&name) && entry.path().is_dir() {
                    here.extend(in_tpm(&datastore, &place, &entry.path())?);
                } else {
                    here.push(found_at(&datastore, place, &entry.path(), name_of(&name)));
                }
                if here.len() > FILES_MAX {
                    reasons.push(format!(
                        "{} has more than {FILES_MAX} files, and the others were not read",
                        home.path().display()
                    ));
                    break;
                }
            }
            here.sort_by_key(|file: &Found| {
                let is_layer = matches!(file.named, Named::Image(ImageKind::Layer, _));
                (is_layer, file.place.clone())
            });
            found.extend(here);
        }
        Ok((found, reasons))
    }
}

/// The datastores that have files of these disks, each once.
fn places<'a>(disks: impl Iterator<Item = &'a DiskSpec>) -> Vec<DatastoreSpec> {
    let mut places: Vec<DatastoreSpec> = Vec::new();
    for disk in disks {
        let replica = disk.replica.as_ref().map(|replica| replica.datastore.clone());
        for place in std::iter::once(disk.datastore.clone()).chain(replica) {
            if places.iter().all(|known| known.datastore != place.datastore) {
                places.push(place);
            }
        }
    }
    places
}

fn found_at(datastore: &DatastoreSpec, place: String, path: &Path, named: Named) -> Found {
    let blocks = path.symlink_metadata().map_or(0, |metadata| metadata.blocks());
    let (datastore, path) = (datastore.clone(), path.to_owned());
    Found { datastore, place, path, named, allocated: blocks.saturating_mul(512) }
}

/// What a TPM keeps.
fn in_tpm(datastore: &DatastoreSpec, place: &str, path: &Path) -> Result<Vec<Found>, Problem> {
    let entries = std::fs::read_dir(path).map_err(|error| failed(path, "read", &error))?;
    let found = entries.flatten().take(FILES_MAX).map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let named = Named::Other(names::in_tpm_directory(&name));
        found_at(datastore, format!("{place}/{name}"), &entry.path(), named)
    });
    Ok(found.collect())
}

/// Opens a regular file to read it beside others; none when it is gone.
fn open(path: &Path) -> Result<Option<File>, Problem> {
    use std::os::unix::fs::OpenOptionsExt;
    let opened = std::fs::OpenOptions::new()
        .read(true)
        // Do not follow a link, and do not block on a pipe.
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(path, "opened", &error)),
    };
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(Some(file)),
        Ok(_) => {
            let what = format!("{} is not a regular file", path.display());
            Err(Problem::new(ErrorCode::Damaged, what))
        }
        Err(error) => Err(failed(path, "read", &error)),
    }
}

fn cancelled() -> Problem {
    Problem::new(ErrorCode::Cancelled, "the proof was cancelled")
}
