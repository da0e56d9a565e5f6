//! QEMU's format, by the crate imago.
//!
//! ```text
//!  queues ──> worker (one thread) ──> image: where is it? ──> imago: tables ──> storage: held back, ordered
//!     │ ^                                └── data of new clusters ──────────────────────> file
//!     │ └── places ─────────────────────────┘
//!     └── data at places that the worker has told, now or before ([`known`]) ──> file or one below, by the queue's own ring
//! ```
//! Nothing is opened by name: every file of the chain is given, with its format, and an image whose header
//! differs from that is refused. Files are used past the page cache where the file system allows it.

mod check;
mod commit;
mod exchange;
mod image;
mod known;
mod refcounts;
mod storage;
#[cfg(test)]
mod tests;
mod together;
mod worker;

use std::collections::{BTreeMap, HashSet};
use std::fmt::{self, Debug, Formatter};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};
use vmseal_api::transfer::ImageFormat;
use vmseal_qcow2::{Layout, Refusal};

use self::image::Qcow2Image;
use self::storage::{DIRECT_BLOCK, ImageFile};
pub use self::worker::Extents;
use self::worker::{DataFiles, ImageWorker};
use crate::stack::chain::Storage;
use crate::stack::memory::Segments;
use crate::stack::request::{IoError, LOGICAL_BLOCK};
use crate::storage::file::{OpenError, check_mode, through_page_cache};
use crate::storage::target::FileTarget;
use crate::storage::uring::UringFile;

/// The largest L1 table, in bytes: it is held in memory. With clusters of 64 KiB it maps 64 TiB.
const L1_BYTES_MAX: u64 = 1 << 20;

/// The largest refcount table, likewise.
const REFCOUNT_TABLE_BYTES_MAX: u64 = 1 << 20;

/// Why an image cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum Qcow2Error {
    /// Its header.
    #[error("{which} cannot be used: {refusal}")]
    Refused {
        /// Which file of the chain.
        which: ChainFile,
        /// Why.
        refusal: Refusal,
    },
    /// Its tables, or the file.
    #[error("{which} cannot be opened: {error}; if it is damaged, look at it with qemu-img check")]
    Open {
        /// Which file of the chain.
        which: ChainFile,
        /// Why.
        error: io::Error,
    },
    /// A device, a pipe.
    #[error("{0} is not a regular file")]
    Kind(ChainFile),
    /// Given twice.
    #[error("{0} is a file that is in the chain already")]
    Twice(ChainFile),
    /// Its tables would take too much memory.
    #[error(
        "{which} has tables of {0} bytes, more than are held in memory: convert it to larger clusters (qemu-img convert -O qcow2 -o cluster_size=64k)",
        which = .1
    )]
    Tables(u64, ChainFile),
    /// Shorter than the disk.
    #[error("the image's disk has {has} bytes where {needs} are needed")]
    Short {
        /// Its size.
        has: u64,
        /// Offset and size of the disk.
        needs: u64,
    },
    /// Opened without the right to write.
    #[error(transparent)]
    Mode(#[from] OpenError),
    /// A raw image in the place of a layer.
    #[error("what is in memory cannot be merged")]
    NotALayer,
    /// No thread.
    #[error("the system refuses what the image needs: {0}")]
    System(#[source] io::Error),
    /// The reader of images has panicked.
    #[error(
        "the image trips a defect in the reader of qcow2 images: look at it with qemu-img check"
    )]
    Defect,
}

/// Which file of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainFile {
    /// The image itself.
    Top,
    /// The one so many below it.
    Below(usize),
}

impl fmt::Display for ChainFile {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Top => f.write_str("the image"),
            Self::Below(depth) => write!(f, "file {depth} below the image"),
        }
    }
}

/// An open disk, from which each queue gets its backend.
#[derive(Clone)]
pub struct Qcow2Disk {
    worker: ImageWorker,
    /// The image itself, and the files below it.
    files: Arc<[ImageFile]>,
    /// A file that the rings of its queues have open for its lock.
    held: Option<Arc<FileTarget>>,
}

impl Debug for Qcow2Disk {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("Qcow2Disk")
    }
}

impl Qcow2Disk {
    /// Opens an image and the files below it, from the next one downwards. The disk is `size` bytes from
    /// `offset` on of the image's content.
    ///
    /// # Errors
    /// [`Qcow2Error`].
    pub fn open(
        file: OwnedFd,
        backing: Vec<(OwnedFd, ImageFormat)>,
        offset: u64,
        size: u64,
        read_only: bool,
    ) -> Result<Self, Qcow2Error> {
        check_mode(&file, read_only)?;
        let opened = crate::stack::contained::run(|| open(file, backing, offset, size, read_only));
        let image = opened.ok_or(Qcow2Error::Defect)??;
        let files = image.files().into();
        Ok(Self { worker: ImageWorker::new(image), files, held: None })
    }

    /// See [`DiskStorage::holding`](super::DiskStorage::holding).
    pub(super) fn holding(self, lock: OwnedFd) -> Self {
        Self { held: Some(Arc::new(FileTarget::whole(lock))), ..self }
    }

    /// The smallest unit that its files take, in bytes.
    #[must_use]
    pub fn block(&self) -> u32 {
        let blocks = self.files.iter().map(|file| file.alignment().1);
        blocks.fold(LOGICAL_BLOCK as u32, u32::max)
    }

    /// The alignment of addresses and lengths of memory.
    #[must_use]
    pub fn memory_alignment(&self) -> u32 {
        self.files.iter().map(|file| file.alignment().0).fold(1, u32::max)
    }

    /// Whether its queues have rings, so that requests are in flight while others are handed over.
    #[must_use]
    pub fn has_rings(&self) -> bool {
        self.file().takes_rings()
    }

    /// The image itself.
    fn file(&self) -> &ImageFile {
        &self.files[0]
    }

    /// For callers that ask where the disk's zeroes are.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn extents(&self) -> io::Result<Extents> {
        self.worker.extents(self.files.last().filter(|file| file.is_raw()).cloned())
    }

    /// Makes the data durable that is in the file, beside the queues.
    ///
    /// # Errors
    /// As a queue's flush.
    pub fn flush_beside(&self) -> Result<(), IoError> {
        self.file().sync_file()
    }

    /// Leaves the image in its file as if it were closed; it can be used on.
    ///
    /// # Errors
    /// As [`Extents::extent`].
    pub fn settle(&self) -> io::Result<()> {
        self.extents()?.settle()
    }

    /// A backend for one queue.
    #[must_use]
    pub fn queue(&self) -> Box<dyn Storage> {
        let files = self.files.iter().map(|file| Arc::clone(file.target()));
        // Last: places of data are numbered as the files are.
        let targets: Vec<_> = files.chain(self.held.clone()).collect();
        // Rings must not move data of FUSE files (docs/decisions/052), and are slower where pages are in memory.
        if self.has_rings() {
            match UringFile::of_files(Arc::clone(&targets[0]), &targets[1..]) {
                Ok(ring) => {
                    return self.worker.queue(&self.files, DataFiles::Ring(Box::new(ring)));
                }
                Err(error) => tracing::warn!(%error, "no io_uring; each request blocks its queue"),
            }
        }
        self.blocking_queue()
    }

    /// The same without a ring.
    #[must_use]
    pub fn blocking_queue(&self) -> Box<dyn Storage> {
        self.worker.queue(&self.files, DataFiles::Calls(Segments::default()))
    }
}

fn open(
    file: OwnedFd,
    backing: Vec<(OwnedFd, ImageFormat)>,
    offset: u64,
    size: u64,
    read_only: bool,
) -> Result<Qcow2Image, Qcow2Error> {
    check_apart(&file, &backing)?;
    let direct = offset.is_multiple_of(DIRECT_BLOCK);
    let mut layers = Vec::new();
    let mut below: Option<FormatAccess<ImageFile>> = None;
    for (index, (fd, format)) in backing.into_iter().enumerate().rev() {
        let which = ChainFile::Below(index + 1);
        let opened = match format {
            ImageFormat::Raw => open_raw(fd, direct, which)?,
            ImageFormat::Qcow2 => {
                let (file, opened, _) = open_layer(fd, below.take(), (false, direct), which)?;
                (file, opened)
            }
        };
        layers.insert(0, opened.0);
        below = Some(opened.1);
    }
    let (file, format, layout) = open_layer(file, below, (!read_only, direct), ChainFile::Top)?;
    layers.insert(0, file);
    let needs = offset.saturating_add(size);
    if format.size() < needs {
        return Err(Qcow2Error::Short { has: format.size(), needs });
    }
    let (cluster, marks) = (layout.header.cluster_size, layout.header.version >= 3);
    let image = Qcow2Image::new(format, layers, offset, cluster, marks);
    image.ok_or_else(|| Qcow2Error::System(io::ErrorKind::NotFound.into()))
}

/// Checks that no file is in a chain twice: a write to it would change the data below.
fn check_apart(file: &OwnedFd, backing: &[(OwnedFd, ImageFormat)]) -> Result<(), Qcow2Error> {
    let below = backing.iter().zip(1..).map(|((fd, _), depth)| (fd, ChainFile::Below(depth)));
    let mut seen = HashSet::new();
    for (fd, which) in std::iter::once((file, ChainFile::Top)).chain(below) {
        let failed = |error: nix::Error| Qcow2Error::Open { which, error: error.into() };
        let stat = nix::sys::stat::fstat(fd).map_err(failed)?;
        if !seen.insert((stat.st_dev, stat.st_ino)) {
            return Err(Qcow2Error::Twice(which));
        }
    }
    Ok(())
}

fn open_raw(
    fd: OwnedFd,
    direct: bool,
    which: ChainFile,
) -> Result<(ImageFile, FormatAccess<ImageFile>), Qcow2Error> {
    let failed = |error| Qcow2Error::Open { which, error };
    let file = ImageFile::raw(fd, direct).map_err(failed)?;
    let raw = Raw::open_image(file.clone(), false).map_err(failed)?;
    Ok((file, FormatAccess::new(raw)))
}

fn open_layer(
    fd: OwnedFd,
    below: Option<FormatAccess<ImageFile>>,
    (writable, direct): (bool, bool),
    which: ChainFile,
) -> Result<(ImageFile, FormatAccess<ImageFile>, Layout), Qcow2Error> {
    let failed = |error| Qcow2Error::Open { which, error };
    // The header is not read in aligned blocks, and a former holder of this open file may have set O_DIRECT.
    through_page_cache(&fd).map_err(failed)?;
    let file = File::from(fd);
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(Qcow2Error::Kind(which));
    }
    let layout = vmseal_qcow2::examine_disk(&file, below.is_some(), writable)
        .map_err(|refusal| Qcow2Error::Refused { which, refusal })?;
    let l1 = u64::from(layout.l1_entries) * 8;
    let refcounts = u64::from(layout.refcount_clusters) * layout.header.cluster_size;
    // One cluster of any size is enough.
    let most = REFCOUNT_TABLE_BYTES_MAX.max(layout.header.cluster_size);
    if l1 > L1_BYTES_MAX || refcounts > most {
        return Err(Qcow2Error::Tables(l1.max(refcounts), which));
    }
    let length = file.metadata().map_err(failed)?.len();
    let look = file.try_clone().map_err(failed)?;
    let counted = if writable {
        let clone = look.try_clone().map_err(failed)?;
        let storage = ImageFile::qcow2(clone.into(), &layout, false).map_err(failed)?;
        storage.check(&layout).map_err(failed)?
    } else {
        BTreeMap::new()
    };
    vmseal_qcow2::check_reach(&look, &layout, length)
        .map_err(|refusal| Qcow2Error::Refused { which, refusal })?;
    drop(look);
    // From here on nothing reads it but what is aligned for that.
    let end = length.next_multiple_of(layout.header.cluster_size);
    if writable && end > length {
        // The last cluster is whole from now on: direct I/O does not end within a block.
        file.set_len(end).map_err(failed)?;
    }
    let storage = ImageFile::qcow2(file.into(), &layout, direct).map_err(failed)?;
    storage.tables().reachable = counted;
    let image = Qcow2::<ImageFile>::builder(storage.clone())
        .backing(below)
        .data_file(None)
        .write(writable)
        // Nothing that an image names is opened.
        .open(DenyImplicitOpenGate::default())
        .map_err(failed)?;
    Ok((storage, FormatAccess::new(image), layout))
}
