//! The systems under test: how each gets disks in files and serves them.

mod beside;
pub(crate) mod luks_image;
mod nbdkit;
mod server;
mod storage_daemon;
mod vmseal;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use self::beside::Beside;
pub use self::nbdkit::Nbdkit;
pub use self::server::{Program, Server, Transport};
pub use self::storage_daemon::StorageDaemon;
pub use self::vmseal::{SEVERAL, Vmseal};
use crate::pattern::Pattern;

/// The systems under test, by name.
pub const SYSTEMS: [&str; 7] = [
    "vmseal-encrypted",
    "vmseal-plain",
    "storage-daemon-plain",
    "storage-daemon-luks",
    "vmseal-encrypted-8-disks",
    "nbdkit-plain",
    "nbdkit-luks",
];

/// Those that only `vmseal lab run` has.
pub const MORE_SYSTEMS: [&str; 3] =
    ["vmseal-encrypted-snapshot", "vmseal-plain-encrypting", "vmseal-encrypted-snapshots"];

/// Why a system could not be prepared or started.
#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    /// A program is missing or cannot be run.
    #[error("{} cannot be run; {advice}", program.display())]
    Program {
        /// The program.
        program: PathBuf,
        /// How to get it.
        advice: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The server ended, or made no socket in time.
    #[error("{system} does not serve: {what}; its log ends: {log}")]
    NotServing {
        /// Which system.
        system: &'static str,
        /// What happened instead.
        what: String,
        /// The end of its log.
        log: String,
    },
    /// A file of the test cannot be made, read or written.
    #[error("{} cannot be used", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Plaintext where ciphertext is expected, or the reverse.
    #[error(
        "{system} left {found} of {sectors} sectors in plaintext in its file, where {expected} are expected"
    )]
    AtRest {
        /// Which system.
        system: &'static str,
        /// Sectors of the file that contain the test's pattern.
        found: u64,
        /// All sectors of the disk.
        sectors: u64,
        /// The expected number.
        expected: u64,
    },
}

/// The offset of an encrypted disk's data: LUKS2's default, so that alignment is as in real disks.
const DATA_OFFSET: u64 = 16 << 20;

/// The directory of a disk, or of a system with all its disks.
#[derive(Clone, Debug)]
pub struct Place {
    /// The directory.
    pub directory: PathBuf,
    /// The directory of the file that the disk is in, where it is another one: storage that has no sockets.
    pub storage: Option<PathBuf>,
    /// The size of the disk, in bytes; of several disks, their total size.
    pub size: u64,
}

impl Place {
    /// The file that the disk is in.
    #[must_use]
    pub fn disk(&self) -> PathBuf {
        self.storage.as_ref().unwrap_or(&self.directory).join("disk")
    }

    /// The file of its key, of a disk of vmseal.
    fn key(&self) -> PathBuf {
        self.directory.join("key")
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    fn make_disk(&self, length: u64) -> Result<(), SystemError> {
        let path = self.disk();
        let made = File::create_new(&path).and_then(|file| file.set_len(length));
        made.map_err(|source| SystemError::File { path, source })
    }
}

/// From when to when something was done with a disk.
pub type Acted = (Instant, Instant);

/// A server of disks under test.
pub trait System: Sync {
    /// Its name in goals and results.
    fn id(&self) -> &'static str;

    /// Whether the file holds ciphertext.
    fn encrypts(&self) -> bool;

    /// The places of its disks: the place itself, unless there are several.
    fn places(&self, place: &Place) -> Vec<Place> {
        vec![place.clone()]
    }

    /// Makes its empty disks.
    ///
    /// # Errors
    /// [`SystemError`].
    fn prepare(&self, place: &Place) -> Result<(), SystemError>;

    /// Starts a server on its disks; it is stopped when the [`Server`] is dropped.
    ///
    /// # Errors
    /// [`SystemError`].
    fn start(&self, place: &Place, core: Option<usize>) -> Result<Server, SystemError>;

    /// Whether each cell has a server of its own: what is done with the disk ends with it.
    fn starts_for_each_cell(&self) -> bool {
        false
    }

    /// Does with its disks what is done once in each cell, `after` this time; from when to when, if anything is done.
    ///
    /// # Errors
    /// [`SystemError`].
    fn act(&self, _place: &Place, _after: Duration) -> Result<Option<Acted>, SystemError> {
        Ok(None)
    }
}

/// The granularity of [`check_at_rest`].
const SECTOR: u64 = 4096;

/// How much of a file it reads at once: where a file is far away, each read is a request.
const PIECE: u64 = 1 << 20;

/// How much of a sector is compared.
const BEGINNING: usize = 16;

/// Checks the file of a disk that was filled with `pattern`: with encryption none of the pattern may be in
/// it, without encryption all of it must be, so that neither is mistaken for the other.
///
/// # Errors
/// [`SystemError::AtRest`], or the file cannot be read.
pub fn check_at_rest(
    system: &dyn System,
    place: &Place,
    pattern: Pattern,
) -> Result<(), SystemError> {
    let sectors = place.size / SECTOR;
    let expected = if system.encrypts() { 0 } else { sectors };
    let path = place.disk();
    let found = plain_sectors(&path, pattern, sectors)
        .map_err(|source| SystemError::File { path: path.clone(), source })?;
    if found == expected {
        return Ok(());
    }
    Err(SystemError::AtRest { system: system.id(), found, sectors, expected })
}

/// How many sectors anywhere in the file begin like a sector of the filled disk.
fn plain_sectors(path: &Path, pattern: Pattern, sectors: u64) -> io::Result<u64> {
    let beginning = |sector: u64| {
        let mut bytes = [0; BEGINNING];
        pattern.fill(sector * SECTOR, &mut bytes);
        bytes
    };
    let beginnings: std::collections::HashSet<[u8; BEGINNING]> =
        (0..sectors).map(beginning).collect();
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut found = 0;
    let mut piece = vec![0; PIECE as usize];
    for at in (0..length.div_ceil(PIECE)).map(|number| number * PIECE) {
        let piece = &mut piece[..PIECE.min(length - at) as usize];
        file.read_exact_at(piece, at)?;
        let sectors = piece.chunks_exact(SECTOR as usize);
        found += sectors.filter(|sector| beginnings.contains(&sector[..BEGINNING])).count() as u64;
    }
    Ok(found)
}
