//! The sums of a disk's blocks, by which the next copy finds what has changed without a record that a crash could lose.
//!
//! ```text
//!  block ─► SHA-256 ─► written to the new sums
//!              │
//!              └─► as in the sums of the copy before? ─ yes ─► skipped
//!                                                     └ no ──► written to the target
//! ```

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};

use vmseal_api::filter::{EXTENTS_MAX, Extent, SUM_BLOCK, SUM_LEN};
use vmseal_secret::digest::sha256;

/// The bytes that have one sum.
pub const BLOCK: u64 = SUM_BLOCK as u64;

/// How much of a file of sums is in memory: those of 128 MiB of a disk.
const BUFFER: usize = 64 * 1024;

type Sum = [u8; SUM_LEN];

/// The sum of a block of zeroes, which costs nothing to find in a hole.
const ZEROES: Sum = [0; SUM_LEN];

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// All zeroes.
    Zeroes,
    /// Anything else.
    Data,
}

/// The files of sums of an export.
pub struct Sums {
    written: BufWriter<File>,
    /// Those of the copy before; none when they have ended, as the disk was shorter then.
    except: Option<BufReader<File>>,
    /// What may have changed since that copy, in order; none where all may have.
    changed: Option<Vec<Extent>>,
}

impl Sums {
    /// All files at their beginning.
    ///
    /// # Errors
    /// Those of reading `changed`; `InvalidData` where its extents are not in order.
    pub fn new(written: File, except: Option<File>, changed: Option<File>) -> io::Result<Self> {
        let changed = changed.map(|file| extents(&file)).transpose()?;
        Ok(Self {
            changed,
            written: BufWriter::with_capacity(BUFFER, written),
            except: except.map(|file| BufReader::with_capacity(BUFFER, file)),
        })
    }

    /// Notes the next block; returns what it is if it is another one than before.
    ///
    /// # Errors
    /// Those of the files.
    pub fn changed(&mut self, block: &[u8]) -> io::Result<Option<Content>> {
        let sum = sum_of(block);
        let content = if sum == ZEROES { Content::Zeroes } else { Content::Data };
        Ok(self.is_new(&sum)?.then_some(content))
    }

    /// Notes that the next block is as before, without reading it.
    ///
    /// # Errors
    /// Those of the files; `UnexpectedEof` where nothing was noted before.
    pub fn keep(&mut self) -> io::Result<()> {
        let except = self.except.as_mut().ok_or(io::ErrorKind::UnexpectedEof)?;
        let mut before = ZEROES;
        except.read_exact(&mut before)?;
        self.written.write_all(&before)
    }

    /// What need not be read, if that is known; asked for once, before the first block.
    ///
    /// # Errors
    /// Those of the files.
    pub fn unchanged(&mut self) -> io::Result<Option<Unchanged>> {
        let changed = self.changed.take();
        let (Some(changed), Some(except)) = (changed, &self.except) else { return Ok(None) };
        let blocks = except.get_ref().metadata()?.len() / SUM_LEN as u64;
        Ok(Some(Unchanged { changed, summed: blocks.saturating_mul(BLOCK) }))
    }

    /// Notes that the next block is all zeroes; returns whether it was not before.
    ///
    /// # Errors
    /// Those of the files.
    pub fn zeroed(&mut self) -> io::Result<bool> {
        self.is_new(&ZEROES)
    }

    /// Writes the sums of all blocks durably.
    ///
    /// # Errors
    /// Those of the file.
    pub fn finish(&mut self) -> io::Result<()> {
        self.written.flush()?;
        self.written.get_ref().sync_all()
    }

    /// Notes the next block; returns whether the copy before has another one there, or none.
    fn is_new(&mut self, sum: &Sum) -> io::Result<bool> {
        self.written.write_all(sum)?;
        let Some(except) = &mut self.except else { return Ok(true) };
        let mut before = ZEROES;
        match except.read_exact(&mut before) {
            Ok(()) => Ok(before != *sum),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.except = None;
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }
}

/// What is as in the copy before.
pub struct Unchanged {
    /// The rest, in order.
    changed: Vec<Extent>,
    /// How much of the disk has sums of that copy, in bytes.
    summed: u64,
}

impl Unchanged {
    /// Whether the block that begins at `at` is unchanged, and up to where it is the same of those that follow; `total` at most.
    #[must_use]
    pub fn at(&self, at: u64, total: u64) -> (bool, u64) {
        let summed = self.summed.min(total);
        if at >= summed {
            return (false, total);
        }
        let next = self.changed.partition_point(|extent| extent.offset + extent.length <= at);
        let Some(next) = self.changed.get(next) else { return (true, summed) };
        let begins = next.offset / BLOCK * BLOCK;
        if begins > at {
            return (true, begins.min(summed));
        }
        let ends = (next.offset + next.length).min(total);
        (false, ends.next_multiple_of(BLOCK).min(total))
    }
}

/// The extents in a file.
fn extents(file: &File) -> io::Result<Vec<Extent>> {
    let mut bytes = Vec::new();
    file.take((EXTENTS_MAX * Extent::LEN) as u64).read_to_end(&mut bytes)?;
    let (parts, rest) = bytes.as_chunks::<{ Extent::LEN }>();
    let mut extents: Vec<Extent> = Vec::new();
    for part in parts {
        let extent = Extent::from_bytes(*part);
        let last = extents.last().map_or(0, |last| last.offset + last.length);
        let extent = extent.filter(|extent| extent.offset >= last);
        extents.push(extent.ok_or(io::ErrorKind::InvalidData)?);
    }
    if rest.is_empty() { Ok(extents) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn sum_of(block: &[u8]) -> Sum {
    if block.iter().all(|byte| *byte == 0) {
        return ZEROES;
    }
    sha256(block)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::process::Command;

    use vmseal_api::filter::Direct;
    use vmseal_qcow2::{Below, create_overlay};

    use super::super::export::{self, Target};
    use super::*;
    use crate::disk::status::DiskState;
    use crate::disk::{Disk, DiskStorage};
    use crate::stack::stop::Stop;
    use crate::storage::file::FileDisk;

    /// Two chunks and a half, and a rest that is no whole block.
    const SIZE: u64 = (5 << 19) + 4096;

    fn noise(seed: u64, length: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        std::iter::repeat_with(|| random.u8(..)).take(length).collect()
    }

    /// Copies the disk at `directory`/disk.
    fn copy(
        directory: &Path,
        mut target: Target,
        sums: &str,
        except: Option<&str>,
        changed: Option<&str>,
    ) {
        let open = |name: &str| File::open(directory.join(name)).unwrap();
        let file = FileDisk::open(open("disk").into(), 0, SIZE, Direct::Off, true).unwrap();
        let disk = Disk::new(SIZE, true, None, DiskStorage::File(file), 2);
        let mut chain = disk.chain().unwrap();
        let written = File::create(directory.join(sums)).unwrap();
        let mut sums_of = Sums::new(written, except.map(open), changed.map(open)).unwrap();
        let (state, stop) =
            (DiskState::new(vmseal_api::id::DiskId::new(), 1), Stop::new().unwrap());
        let allocation = disk.allocation();
        export::run(&mut chain, &allocation, &mut target, Some(&mut sums_of), &state, &stop)
            .unwrap();
        let length = directory.join(sums).metadata().unwrap().len();
        assert_eq!(length, SIZE.div_ceil(BLOCK) * SUM_LEN as u64);
    }

    fn converted(directory: &Path, name: &str) -> Vec<u8> {
        let arguments = ["convert", "-O", "raw", name, "converted"];
        let ran = Command::new("qemu-img").args(arguments).current_dir(directory).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        std::fs::read(directory.join("converted")).unwrap()
    }

    #[test]
    fn an_overlay_has_the_blocks_that_changed_and_no_others() {
        let scratch = tempfile::tempdir().unwrap();
        let at = scratch.path();
        let disk = File::options().create_new(true).read(true).write(true).open(at.join("disk"));
        let disk = disk.unwrap();
        disk.set_len(SIZE).unwrap();
        disk.write_all_at(&noise(1, 700_000), 0).unwrap();
        disk.write_all_at(&noise(2, 4096), SIZE - 4096).unwrap();
        let full = File::create(at.join("full")).unwrap();
        full.set_len(SIZE).unwrap();
        copy(at, Target::Raw(full), "sums.1", None, None);
        assert_eq!(
            std::fs::read(at.join("full")).unwrap(),
            std::fs::read(at.join("disk")).unwrap()
        );

        // Data over data, data in a hole, zeroes over data by writing and by a hole, and the short block at the end.
        disk.write_all_at(&[7], 65_536 * 2 + 5).unwrap();
        disk.write_all_at(&noise(3, 100), 2_000_000).unwrap();
        disk.write_all_at(&vec![0; SUM_BLOCK], 65_536 * 4).unwrap();
        let hole = nix::fcntl::FallocateFlags::FALLOC_FL_PUNCH_HOLE
            | nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
        nix::fcntl::fallocate(&disk, hole, 65_536 * 6, 65_536).unwrap();
        disk.write_all_at(&noise(4, 4096), SIZE - 4096).unwrap();
        let below = Below { name: "full", format: "raw" };
        create_overlay(File::create(at.join("overlay")).unwrap(), SIZE, below).unwrap();
        let overlay = File::options().read(true).write(true).open(at.join("overlay")).unwrap();
        copy(at, Target::overlay(overlay).unwrap(), "sums.2", Some("sums.1"), None);
        assert_eq!(converted(at, "overlay"), std::fs::read(at.join("disk")).unwrap());
        let room = at.join("overlay").metadata().unwrap().len();
        assert!(room < 65_536 * 12, "{room} bytes for three blocks of data");

        copy(at, Target::Nothing, "sums.3", None, None);
        let sums = |name: &str| std::fs::read(at.join(name)).unwrap();
        assert_eq!(sums("sums.2"), sums("sums.3"));
        let differ = sums("sums.1")
            .chunks(SUM_LEN)
            .zip(sums("sums.2").chunks(SUM_LEN))
            .map(|(one, other)| one != other)
            .collect::<Vec<_>>();
        let changed: Vec<_> = (0..differ.len()).filter(|block| differ[*block]).collect();
        assert_eq!(changed, [2, 4, 6, 30, 40]);
    }

    #[test]
    fn what_has_not_changed_is_not_read() {
        let scratch = tempfile::tempdir().unwrap();
        let at = scratch.path();
        let disk = File::options().create_new(true).read(true).write(true).open(at.join("disk"));
        let disk = disk.unwrap();
        disk.write_all_at(&noise(1, SIZE as usize), 0).unwrap();
        copy(at, Target::Nothing, "sums.1", None, None);
        // Blocks 3 and 38 are named, the second by a byte; 20 changes, and is not.
        for block in [3, 20, 38] {
            disk.write_all_at(&[7; 100], block * BLOCK + 5).unwrap();
        }
        let named = [(3 * BLOCK, 2 * BLOCK), (38 * BLOCK + 5, 1)];
        let named = named.map(|(offset, length)| Extent { offset, length }.to_bytes());
        std::fs::write(at.join("changed"), named.concat()).unwrap();
        let below = Below { name: "full", format: "raw" };
        create_overlay(File::create(at.join("overlay")).unwrap(), SIZE, below).unwrap();
        let overlay = File::options().read(true).write(true).open(at.join("overlay")).unwrap();
        let target = Target::overlay(overlay).unwrap();
        copy(at, target, "sums.2", Some("sums.1"), Some("changed"));
        let sums = |name: &str| std::fs::read(at.join(name)).unwrap();
        let (before, after) = (sums("sums.1"), sums("sums.2"));
        let differs = |block: &usize| {
            let part = block * SUM_LEN..(block + 1) * SUM_LEN;
            before[part.clone()] != after[part]
        };
        assert_eq!((0..41).filter(differs).collect::<Vec<_>>(), [3, 38]);
        for wrong in [&named.concat()[1..], &[named[1], named[0]].concat(), &[0; 16]] {
            std::fs::write(at.join("changed"), wrong).unwrap();
            let open = |name: &str| File::open(at.join(name)).unwrap();
            assert!(Sums::new(open("sums.1"), None, Some(open("changed"))).is_err());
        }
    }

    #[test]
    fn without_sums_of_before_every_block_is_new_also_beyond_a_shorter_disk() {
        let scratch = tempfile::tempdir().unwrap();
        let at = scratch.path();
        let file = |name: &str| {
            File::options()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true)
                .open(at.join(name))
                .unwrap()
        };
        file("sums.1").write_all(&[0; SUM_LEN]).unwrap();
        let mut sums = Sums::new(file("sums.2"), Some(file("sums.1")), None).unwrap();
        assert_eq!([(); 3].map(|()| sums.is_new(&ZEROES).unwrap()), [false, true, true]);
        let mut sums = Sums::new(file("sums.3"), None, None).unwrap();
        assert!(sums.is_new(&ZEROES).unwrap());
    }
}
