//! The systems under test: how each gets disks in files and serves them.

mod beside;
mod fio;
mod librbd;
mod luks_image;
mod nbdkit;
mod one_process;
mod server;
mod storage_daemon;
mod vmseal;

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

pub use self::beside::Beside;
pub use self::fio::{FioRbd, obstacle as fio_obstacle};
pub use self::librbd::{Librbd, obstacle as librbd_obstacle};
pub use self::nbdkit::Nbdkit;
pub use self::one_process::{OneProcess, OneProcessDisk};
pub use self::server::{Program, Server, Transport};
pub use self::storage_daemon::StorageDaemon;
pub use self::vmseal::{SEVERAL, Vmseal};
use crate::load::Workload;
use crate::pattern::Pattern;
use crate::stop;
pub use crate::system_error::SystemError;

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
pub const MORE_SYSTEMS: [&str; 9] = [
    "vmseal-encrypted-snapshot",
    "vmseal-plain-encrypting",
    "vmseal-encrypted-snapshots",
    "vmseal-encrypted-files",
    "vmseal-plain-files",
    "librbd-plain",
    "librbd-luks2",
    FIO,
    ONE_PROCESS,
];

/// Those of them whose disks are files of a mounted pool and nothing else: there, others have a channel beside them.
pub const FILES_SYSTEMS: [&str; 2] = ["vmseal-encrypted-files", "vmseal-plain-files"];

/// The one that fio measures.
pub const FIO: &str = "fio-rbd";

/// The one that has vmseal's layers and Ceph's own library in one process.
pub const ONE_PROCESS: &str = "vmseal-encrypted-one-process";

/// Those of them whose disks are images of a pool that Ceph's own library gets to.
pub const LIBRBD_SYSTEMS: [&str; 4] = ["librbd-plain", "librbd-luks2", FIO, ONE_PROCESS];

/// The offset of an encrypted disk's data: LUKS2's default, so that alignment is as in real disks.
const DATA_OFFSET: u64 = 16 << 20;

/// The directory of a disk, or of a system with all its disks.
#[derive(Clone, Debug)]
pub struct Place {
    /// The directory.
    pub directory: PathBuf,
    /// The directory of the file that the disk is in, where it is another one: storage that has no sockets.
    pub storage: Option<PathBuf>,
    /// The socket of what serves that storage, to get to the file without the file system.
    pub channel: Option<PathBuf>,
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

    /// Whether its disks are files of the place; else it gets to its storage by itself.
    fn has_files(&self) -> bool {
        true
    }

    /// What the storage has of a disk, from its beginning to its end.
    ///
    /// # Errors
    /// [`SystemError`].
    fn kept(&self, place: &Place) -> Result<Box<dyn Read>, SystemError> {
        let path = place.disk();
        match File::open(&path) {
            Ok(file) => Ok(Box::new(file)),
            Err(source) => Err(SystemError::File { path, source }),
        }
    }

    /// The system's own load generator, where that measures it; its server then only serves to fill the disk and to read it
    /// back.
    fn own_load(&self) -> Option<&dyn OwnLoad> {
        None
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

/// A load generator that has its way to a disk within it.
pub trait OwnLoad {
    /// Puts a load on the disk: a warm-up, then the time that is measured.
    ///
    /// # Errors
    /// [`SystemError`].
    fn measure(
        &self,
        place: &Place,
        workload: &Workload,
        times: (Duration, Duration),
        seed: u64,
    ) -> Result<OwnResult, SystemError>;
}

/// What a load generator has measured.
#[derive(Clone, Debug)]
pub struct OwnResult {
    /// Requests that ended within the measured time.
    pub requests: u64,
    /// The measured time.
    pub elapsed: Duration,
    /// The CPU time of its process within it.
    pub cpu: Duration,
    /// The CPU time of everything else on the machine within it.
    pub others: Duration,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

/// The granularity of [`check_at_rest`].
const SECTOR: u64 = 4096;

/// How much of a disk it reads at once: where a file is far away, each read is a request.
const PIECE: u64 = 1 << 20;

/// How much of a sector is compared.
const BEGINNING: usize = 16;

/// Checks what the storage has of a disk that was filled with `pattern`: with encryption none of the pattern may be in
/// it, without encryption all of it must be, so that neither is mistaken for the other.
///
/// # Errors
/// [`SystemError::AtRest`], or it cannot be read.
pub fn check_at_rest(
    system: &dyn System,
    place: &Place,
    pattern: Pattern,
) -> Result<(), SystemError> {
    let sectors = place.size / SECTOR;
    let expected = if system.encrypts() { 0 } else { sectors };
    let found = plain_sectors(system.kept(place)?, pattern, sectors)
        .map_err(|source| SystemError::Kept { system: system.id(), source })?;
    if found == expected {
        return Ok(());
    }
    Err(SystemError::AtRest { system: system.id(), found, sectors, expected })
}

/// How many sectors anywhere in what is kept begin like a sector of the filled disk.
fn plain_sectors(mut kept: impl Read, pattern: Pattern, sectors: u64) -> io::Result<u64> {
    let beginning = |sector: u64| {
        let mut bytes = [0; BEGINNING];
        pattern.fill(sector * SECTOR, &mut bytes);
        bytes
    };
    let beginnings: std::collections::HashSet<[u8; BEGINNING]> =
        (0..sectors).map(beginning).collect();
    let mut found = 0;
    let mut piece = vec![0; PIECE as usize];
    loop {
        stop::check().map_err(io::Error::other)?;
        let length = fill(&mut kept, &mut piece)?;
        if length == 0 {
            return Ok(found);
        }
        let sectors = piece[..length].chunks_exact(SECTOR as usize);
        found += sectors.filter(|sector| beginnings.contains(&sector[..BEGINNING])).count() as u64;
    }
}

/// Reads a whole piece, or what is left; how much that is.
fn fill(from: &mut impl Read, piece: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < piece.len() {
        match from.read(&mut piece[length..]) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_in_small_parts_is_compared_by_whole_sectors() {
        /// A pipe gives what is in it, however much is asked for.
        struct Pipe<'a>(&'a [u8]);
        impl Read for Pipe<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let length = buffer.len().min(1000);
                self.0.read(&mut buffer[..length])
            }
        }
        let pattern = Pattern::new(7);
        // More than a piece, after a header.
        let (sectors, header) = (300, 16 * SECTOR as usize);
        let mut kept = vec![0; header + (sectors * SECTOR) as usize];
        pattern.fill(0, &mut kept[header..]);
        let found = |kept: &[u8]| plain_sectors(Pipe(kept), pattern, sectors).unwrap();
        assert_eq!(found(&kept), sectors);
        kept[header + SECTOR as usize] ^= 1;
        assert_eq!(found(&kept), sectors - 1);
        assert_eq!(found(&kept[..header]), 0);
    }

    #[test]
    fn systems_of_ceph_are_among_those_that_experiments_have() {
        assert!(LIBRBD_SYSTEMS.iter().chain(&FILES_SYSTEMS).all(|id| MORE_SYSTEMS.contains(id)));
    }
}
