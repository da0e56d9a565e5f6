//! The file that keeps a disk's dirty bitmaps, so that they outlive this process, even if it is killed: it is mapped, and a mark is in
//! it as soon as it is set (`vmseal_api::bitmap::file` says what is where).
//!
//! Who has started this process may keep the file for another one. The host's memory has the marks: a file that outlives the
//! host's crash says nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use jiff::Timestamp;
use nix::fcntl::{FallocateFlags, fallocate};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};
use vmseal_api::bitmap::check_name;
use vmseal_api::bitmap::file::{
    HEADER, IN_USE_AT, MAGIC, NAME_AT, NAME_LENGTH_AT, SHIFT_AT, SINCE_AT, SIZE_AT, slot_at, stride,
};
use vmseal_api::filter::{BITMAP_NAME_MAX, BITMAPS_MAX};

use super::{longer, marks};

/// See the module.
#[derive(Debug)]
pub struct Kept {
    file: File,
    memory: Arc<MmapRegion>,
    /// The size of one bitmap's words, in bytes.
    bytes: usize,
}

impl Kept {
    /// Maps a file, for a disk of `size` bytes whose bitmaps have granules of 2 to the power `shift` bytes and take `bytes`. That of the
    /// disk when it was shorter is made one of it as it is now; another one is emptied.
    ///
    /// # Errors
    /// Those of the file.
    pub fn open(file: File, size: u64, shift: u32, bytes: usize) -> io::Result<Self> {
        let length = HEADER + BITMAPS_MAX * stride(bytes);
        let mut header = [0; HEADER];
        header[..MAGIC.len()].copy_from_slice(&MAGIC);
        header[SIZE_AT..][..8].copy_from_slice(&size.to_ne_bytes());
        header[SHIFT_AT..][..8].copy_from_slice(&u64::from(shift).to_ne_bytes());
        let mut found = [0; slot_at(0)];
        let is_there = file.metadata()?.len() == length as u64;
        if !is_there
            || file.read_exact_at(&mut found, 0).is_err()
            || found[..] != header[..slot_at(0)]
        {
            let slots = longer::slots(&file, size, shift, bytes)?;
            // Who is killed from here on leaves a file of no disk, until the header is there.
            file.set_len(0)?;
            file.set_len(length as u64)?;
            for longer::Slot { number, about, bits } in &slots {
                header[slot_at(*number)..slot_at(*number + 1)].copy_from_slice(about);
                file.write_all_at(bits, (HEADER + number * stride(bytes)) as u64)?;
            }
            // Written, so that no page of it is missing when a slot is noted.
            file.write_all_at(&header, 0)?;
        }
        let of = FileOffset::new(file.try_clone()?, 0);
        let memory = MmapRegion::from_file(of, length).map_err(io::Error::other)?;
        Ok(Self { file, memory: Arc::new(memory), bytes })
    }

    /// Has room for the words of a slot in the file: a page that finds none when it is marked would end the process.
    ///
    /// # Errors
    /// Those of the file.
    pub fn reserve(&self, slot: usize) -> io::Result<()> {
        let (at, length) = (self.words_at(slot) as i64, stride(self.bytes) as i64);
        Ok(fallocate(&self.file, FallocateFlags::empty(), at, length)?)
    }

    /// The words of a slot.
    pub fn words(&self, slot: usize) -> Box<dyn marks::Words> {
        let (memory, at) = (Arc::clone(&self.memory), self.words_at(slot));
        Box::new(WordsInFile { memory, at, count: self.bytes / 8 })
    }

    /// The name of the bitmap that a slot has, and since when it counts; none where it has none.
    pub fn noted(&self, slot: usize) -> Option<(String, Timestamp)> {
        let field = |at| self.field(slot, at).map(|field| field.load(SeqCst));
        if field(IN_USE_AT)? != 1 {
            return None;
        }
        let length = usize::try_from(field(NAME_LENGTH_AT)?).ok();
        let mut name = vec![0; length.filter(|length| *length <= BITMAP_NAME_MAX)?];
        self.memory.as_volatile_slice().read_slice(&mut name, slot_at(slot) + NAME_AT).ok()?;
        let name = String::from_utf8(name).ok().filter(|name| check_name(name).is_ok())?;
        let since = Timestamp::from_nanosecond(field(SINCE_AT)?.into()).ok()?;
        Some((name, since))
    }

    /// Notes that a slot, whose words are marked, has this bitmap.
    pub fn note(&self, slot: usize, name: &str, since: Timestamp) {
        let put = |at, value| {
            if let Some(field) = self.field(slot, at) {
                field.store(value, SeqCst);
            }
        };
        let written =
            self.memory.as_volatile_slice().write_slice(name.as_bytes(), slot_at(slot) + NAME_AT);
        if written.is_err() {
            return;
        }
        put(NAME_LENGTH_AT, name.len() as u64);
        // A clock that is before 1970 or after 2554 gives 1970.
        put(SINCE_AT, u64::try_from(since.as_nanosecond()).unwrap_or(0));
        // Last: who finds this finds the rest.
        put(IN_USE_AT, 1);
    }

    /// Notes that a slot has no bitmap.
    pub fn forget(&self, slot: usize) {
        if let Some(field) = self.field(slot, IN_USE_AT) {
            field.store(0, SeqCst);
        }
    }

    /// The file, for the bitmaps of the disk when it is longer: they are mapped anew, and nobody touches these any more.
    ///
    /// # Errors
    /// No descriptor.
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    fn words_at(&self, slot: usize) -> usize {
        HEADER + slot * stride(self.bytes)
    }

    fn field(&self, slot: usize, at: usize) -> Option<&AtomicU64> {
        self.memory.get_atomic_ref(slot_at(slot) + at).ok()
    }
}

/// The words of a slot, in the file.
#[derive(Debug)]
struct WordsInFile {
    memory: Arc<MmapRegion>,
    at: usize,
    count: usize,
}

impl marks::Words for WordsInFile {
    fn word(&self, index: usize) -> Option<&AtomicU64> {
        (index < self.count).then(|| self.memory.get_atomic_ref(self.at + index * 8).ok())?
    }
}
