//! A header read from its store, and the copy in memory that libcryptsetup works on.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::error::{HeaderError, Refusal};
use crate::facts::{DATA_OFFSET, Facts};
use crate::layout::{self, AREA_LEN, COPY_LEN, Copy, HeaderNotice, SLOTS_OFFSET};
use crate::metadata::{self, Metadata};
use crate::store::HeaderStore;

/// The room that libcryptsetup expects behind the header for data.
const DATA_ROOM: u64 = 1 << 20;

/// The header area in memory. It holds no secret: key slots are ciphertext.
pub(crate) struct WorkingCopy(File);

impl WorkingCopy {
    /// All zero.
    pub(crate) fn empty() -> Result<Self, HeaderError> {
        let make = || {
            let file = File::from(memfd_create(c"vmseal-header", MFdFlags::MFD_CLOEXEC)?);
            file.set_len(DATA_OFFSET + DATA_ROOM)?;
            Ok(file)
        };
        make().map(Self).map_err(|source: io::Error| in_memory("memfd_create", source))
    }

    /// The path by which libcryptsetup opens it. A process may open its own descriptors like this, without
    /// root and without being dumpable.
    pub(crate) fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.0.as_raw_fd())
    }

    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> Result<(), HeaderError> {
        self.0.write_all_at(bytes, offset).map_err(|source| in_memory("pwrite", source))
    }

    pub(crate) fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, HeaderError> {
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, offset).map_err(|source| in_memory("pread", source))?;
        Ok(bytes)
    }

    /// One copy of the header, as it must be written.
    pub(crate) fn header(&self, copy: Copy) -> Result<Vec<u8>, HeaderError> {
        self.read(copy.offset(), COPY_LEN)
    }

    /// Gives a header that was made without room for key slots the room that all disks have, in both copies.
    pub(crate) fn widen(&self) -> Result<(), HeaderError> {
        for copy in [Copy::Primary, Copy::Secondary] {
            let mut copies = Copies::zeroed();
            let bytes = &mut copies.0[0];
            bytes.copy_from_slice(&self.header(copy)?);
            let json = metadata::widened(&bytes[layout::BINARY_LEN..])?;
            let wide = layout::with_json(bytes, &json);
            let wide = wide.ok_or_else(|| Refusal::Json("it is too long".to_owned()))?;
            self.write(&wide[..], copy.offset())?;
        }
        Ok(())
    }

    /// Checks what libcryptsetup has made by the rules for opening, so that nothing is written that would not
    /// open.
    pub(crate) fn check(&self, facts: &Facts) -> Result<Metadata, HeaderError> {
        let (primary, secondary) = (self.header(Copy::Primary)?, self.header(Copy::Secondary)?);
        let copies = Copies::from_halves(&primary, &secondary);
        let loaded = Loaded::choose(copies)?;
        if loaded.notice.is_some() {
            let text = "libcryptsetup left two copies that differ";
            return Err(Refusal::Json(text.to_owned()).into());
        }
        Ok(Metadata::parse(loaded.json(), facts)?)
    }
}

fn in_memory(call: &'static str, source: io::Error) -> HeaderError {
    HeaderError::Library { call, source, messages: String::new() }
}

/// Both copies as they were read.
pub(crate) struct Copies(Box<[[u8; COPY_LEN]; 2]>);

impl Copies {
    fn zeroed() -> Self {
        Self(Box::new([[0; COPY_LEN]; 2]))
    }

    fn from_halves(primary: &[u8], secondary: &[u8]) -> Self {
        let mut copies = Self::zeroed();
        copies.0[0].copy_from_slice(primary);
        copies.0[1].copy_from_slice(secondary);
        copies
    }

    pub(crate) fn read(store: &impl HeaderStore) -> Result<Self, HeaderError> {
        let found = store.size().map_err(HeaderError::Read)?;
        if found < DATA_OFFSET {
            return Err(HeaderError::Truncated { found, needed: DATA_OFFSET });
        }
        let mut copies = Self::zeroed();
        store.read_at(copies.0.as_flattened_mut(), 0).map_err(HeaderError::Read)?;
        Ok(copies)
    }

    pub(crate) fn get(&self, copy: Copy) -> &[u8; COPY_LEN] {
        match copy {
            Copy::Primary => &self.0[0],
            Copy::Secondary => &self.0[1],
        }
    }
}

/// A header with at least one intact copy.
pub(crate) struct Loaded {
    copies: Copies,
    serving: Copy,
    /// What is wrong with the other copy.
    pub(crate) notice: Option<HeaderNotice>,
}

impl Loaded {
    /// Reads the two copies only.
    pub(crate) fn read(store: &impl HeaderStore) -> Result<Self, HeaderError> {
        Self::choose(Copies::read(store)?)
    }

    /// Chooses the intact copy with the higher sequence number; the first of equals, as cryptsetup does.
    pub(crate) fn choose(copies: Copies) -> Result<Self, HeaderError> {
        let parse = |copy| layout::parse(copy, copies.get(copy)).map(|valid| valid.sequence);
        let damaged = |copy, fault| Some(HeaderNotice::Damaged { copy, fault });
        let stale = |copy| Some(HeaderNotice::Stale { copy });
        let (serving, notice) = match (parse(Copy::Primary), parse(Copy::Secondary)) {
            (Ok(first), Ok(second)) if first == second => (Copy::Primary, None),
            (Ok(first), Ok(second)) if first > second => (Copy::Primary, stale(Copy::Secondary)),
            (Ok(_), Ok(_)) => (Copy::Secondary, stale(Copy::Primary)),
            (Ok(_), Err(fault)) => (Copy::Primary, damaged(Copy::Secondary, fault)),
            (Err(fault), Ok(_)) => (Copy::Secondary, damaged(Copy::Primary, fault)),
            (Err(primary), Err(secondary)) => {
                return Err(HeaderError::BothCopies { primary, secondary });
            }
        };
        Ok(Self { copies, serving, notice })
    }

    /// The JSON part of the chosen copy.
    pub(crate) fn json(&self) -> &[u8] {
        &self.copies.get(self.serving)[layout::BINARY_LEN..]
    }

    /// The copy that needs repair, if there is one.
    pub(crate) fn to_repair(&self) -> Option<Copy> {
        self.notice.map(|_| self.serving.other())
    }

    /// Reads the chosen copy and the key slots' areas into memory. The other copy is made from the chosen
    /// one, whatever is in the store, so that libcryptsetup has no choice to make. (It restores copies itself
    /// only with lock files, which are of no use for a memfd.)
    pub(crate) fn working_copy(
        &self,
        store: &impl HeaderStore,
        metadata: &Metadata,
    ) -> Result<WorkingCopy, HeaderError> {
        let working = WorkingCopy::empty()?;
        let serving = self.copies.get(self.serving);
        working.write(serving, self.serving.offset())?;
        working.write(&layout::twin(self.serving, serving)?[..], self.serving.other().offset())?;
        let mut area = vec![0; AREA_LEN as usize];
        for offset in metadata.areas.values() {
            debug_assert!(*offset >= SLOTS_OFFSET);
            store.read_at(&mut area, *offset).map_err(HeaderError::Read)?;
            working.write(&area, *offset)?;
        }
        Ok(working)
    }
}
