//! The memory of a guest that waits, as a file. It is written with pwritev(2): unlike a mapping of the agent's own, that needs no page
//! tables, no page is cleared before it is filled, and a run of pages is one call.

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice};
use std::os::unix::fs::{FileExt, MetadataExt};

use nix::errno::Errno;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::sys::uio::pwritev;

use super::page_stream::{PAGE, Write};

/// The most slices that the kernel takes in a call (UIO_MAXIOV).
const SLICES_MAX: usize = 1024;

/// Why a file cannot be written as guest memory.
#[derive(Debug, thiserror::Error)]
pub enum Unsuitable {
    /// It cannot be looked at.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is not of tmpfs: files of huge pages cannot be written.
    #[error("it is not of ordinary pages")]
    NotTmpfs,
    /// Its length.
    #[error("it has {length} bytes, and the guest has {size}")]
    Length {
        /// That of the file.
        length: u64,
        /// That of the guest's memory.
        size: u64,
    },
}

/// How much was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// Bytes that came and were written, also those that came again.
    pub bytes: u64,
    /// Pages of zeroes that are holes of the file, and were left so.
    pub holes: u64,
}

/// See the module.
#[derive(Debug)]
pub struct GuestMemory {
    file: File,
    size: u64,
    /// Whether nothing but this has written to it: then all else is zero.
    fresh: bool,
    /// A bit for each page that this has written to.
    written: Vec<u64>,
    placed: Placed,
}

impl GuestMemory {
    /// That of a guest with so much memory, in bytes. Nobody else writes to it from now on.
    ///
    /// # Errors
    /// [`Unsuitable`].
    pub fn new(file: File, size: u64) -> Result<Self, Unsuitable> {
        if fstatfs(&file).map_err(io::Error::from)?.filesystem_type() != TMPFS_MAGIC {
            return Err(Unsuitable::NotTmpfs);
        }
        let metadata = file.metadata()?;
        if metadata.len() != size || !size.is_multiple_of(PAGE) {
            return Err(Unsuitable::Length { length: metadata.len(), size });
        }
        let words = usize::try_from((size / PAGE).div_ceil(64)).map_err(io::Error::other)?;
        let (fresh, written) = (metadata.blocks() == 0, vec![0; words]);
        Ok(Self { file, size, fresh, written, placed: Placed::default() })
    }

    /// How much was written.
    #[must_use]
    pub fn placed(&self) -> Placed {
        self.placed
    }

    /// Its length in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Writes, in this order. All of it is within the memory.
    ///
    /// # Errors
    /// Those of the file: the host has no memory left.
    pub fn apply(&mut self, writes: &[Write<'_>]) -> io::Result<()> {
        let mut run: Vec<IoSlice<'_>> = Vec::with_capacity(writes.len().min(SLICES_MAX));
        let (mut begin, mut end) = (0, 0);
        for write in writes {
            match *write {
                Write::Bytes { at, bytes } => {
                    if at != end || run.len() == SLICES_MAX {
                        self.write_run(begin, &mut run)?;
                        begin = at;
                    }
                    run.push(IoSlice::new(bytes));
                    end = at + bytes.len() as u64;
                    self.note(at);
                    self.placed.bytes += bytes.len() as u64;
                }
                Write::Fill { at, byte: 0 } if self.is_hole(at) => self.placed.holes += 1,
                Write::Fill { at, byte } => {
                    self.write_run(begin, &mut run)?;
                    (begin, end) = (0, 0);
                    self.file.write_all_at(&[byte; PAGE as usize], at)?;
                    self.note(at);
                    self.placed.bytes += PAGE;
                }
            }
        }
        self.write_run(begin, &mut run)
    }

    /// Writes what is in a row, and empties it.
    fn write_run(&self, mut at: u64, run: &mut Vec<IoSlice<'_>>) -> io::Result<()> {
        let mut left = &mut run[..];
        while !left.is_empty() {
            let offset = i64::try_from(at).map_err(io::Error::other)?;
            match pwritev(&self.file, left, offset) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => {
                    at += written as u64;
                    IoSlice::advance_slices(&mut left, written);
                }
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        run.clear();
        Ok(())
    }

    /// The word and the bit of the page that this byte is in.
    fn bit(at: u64) -> (usize, u64) {
        let page = at / PAGE;
        ((page / 64) as usize, 1 << (page % 64))
    }

    fn note(&mut self, at: u64) {
        let (word, bit) = Self::bit(at);
        self.written[word] |= bit;
    }

    fn is_hole(&self, at: u64) -> bool {
        let (word, bit) = Self::bit(at);
        self.fresh && self.written[word] & bit == 0
    }
}

#[cfg(test)]
pub(super) mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    const SIZE: u64 = 200 * PAGE;

    /// A file as QEMU has its guest's memory.
    pub fn file(size: u64) -> File {
        let file = File::from(memfd_create("memory", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(size).unwrap();
        file
    }

    fn page(of: &File, number: u64) -> Vec<u8> {
        let mut page = vec![0xee; PAGE as usize];
        of.read_exact_at(&mut page, number * PAGE).unwrap();
        page
    }

    fn bytes(number: u64, page: &[u8]) -> Write<'_> {
        Write::Bytes { at: number * PAGE, bytes: page }
    }

    fn zero(number: u64) -> Write<'static> {
        Write::Fill { at: number * PAGE, byte: 0 }
    }

    #[test]
    fn what_comes_last_is_there_and_pages_that_were_never_written_stay_holes() {
        let file = file(SIZE);
        let mut memory = GuestMemory::new(file.try_clone().unwrap(), SIZE).unwrap();
        let [one, two, three] = [[1; PAGE as usize], [2; PAGE as usize], [3; PAGE as usize]];
        let (half, other) = three.split_at(1000);
        memory
            .apply(&[
                bytes(7, &one),
                bytes(8, &two),
                Write::Bytes { at: 100 * PAGE, bytes: half },
                Write::Bytes { at: 100 * PAGE + 1000, bytes: other },
                zero(9),
                bytes(9, &one),
                zero(7),
                bytes(199, &two),
                zero(3),
                bytes(8, &three),
                Write::Fill { at: 5 * PAGE, byte: 0xab },
            ])
            .unwrap();
        for (number, byte) in [(7, 0), (8, 3), (9, 1), (100, 3), (199, 2), (5, 0xab), (3, 0)] {
            assert_eq!(page(&file, number), [byte; PAGE as usize], "page {number}");
        }
        assert_eq!(memory.placed(), Placed { bytes: 8 * PAGE, holes: 2 });
        assert_eq!(file.metadata().unwrap().blocks(), 6 * PAGE / 512, "page 3 is a hole");
    }

    #[test]
    fn pages_of_a_file_that_somebody_has_written_to_are_cleared() {
        let file = file(SIZE);
        file.write_all_at(b"before", 3 * PAGE).unwrap();
        let mut memory = GuestMemory::new(file.try_clone().unwrap(), SIZE).unwrap();
        memory.apply(&[zero(3)]).unwrap();
        assert_eq!(page(&file, 3), [0; PAGE as usize]);
    }

    #[test]
    fn more_pages_in_a_row_than_a_call_takes_are_written() {
        let size = 3000 * PAGE;
        let (file, content) = (file(size), [5; PAGE as usize]);
        let mut memory = GuestMemory::new(file.try_clone().unwrap(), size).unwrap();
        let writes: Vec<_> = (0..3000).map(|number| bytes(number, &content)).collect();
        memory.apply(&writes).unwrap();
        assert!((0..3000).all(|number| page(&file, number) == content));
    }

    #[test]
    fn a_file_of_another_length_or_kind_is_refused() {
        let refused = |file, size| GuestMemory::new(file, size).unwrap_err().to_string();
        let length = refused(file(SIZE), SIZE + PAGE);
        assert_eq!(length, "it has 819200 bytes, and the guest has 823296");
        assert!(matches!(
            GuestMemory::new(file(100), 100),
            Err(Unsuitable::Length { length: 100, size: 100 })
        ));
        let proc = File::open("/proc/self/stat").unwrap();
        assert_eq!(refused(proc, 0), "it is not of ordinary pages");
    }
}
