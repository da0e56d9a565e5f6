//! A sealed file: who it belongs to, which key opens it, and its content as a sealed stream. docs/formats/sealed-file.md
//!
//! ```text
//! 0     magic "VMSEALED" (8) ‖ version (2) ‖ kind (1): 1 memory, 2 core, 3 tpm ‖ zero (5) ‖ VM (16) ‖ salt (32) ‖
//!       generation (8) ‖ zero to 512
//! 512   key slot    1024  key slot    zero to 4096
//! 4096  frames
//! ```
//! The frames' key = HKDF(file key, salt, label ‖ VM ‖ kind ‖ generation). A new key of the VM is written to the slot that is free; no frame changes.

use std::io::{self, Read, Write};

use uuid::Uuid;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{DERIVED_LEN, DeriveError, SEALED_FILE_SALT_LEN, sealed_file_key};

use crate::frame::FrameError;
use crate::slot::{self, SLOT_LEN, Slot, SlotError, SlotKey, VmKey};
use crate::stream::{SealedReader, SealedWriter};

/// The version of the format.
pub const VERSION: u16 = 1;

/// What is before the frames, in bytes.
pub const HEADER_LEN: usize = 4096;

/// How many key slots there are: one, and a second one while the key is being changed.
pub const SLOTS: usize = 2;

const MAGIC: &[u8; 8] = b"VMSEALED";

/// Where the salt ends, in bytes.
const SALT_END: usize = 32 + SEALED_FILE_SALT_LEN;

/// The part before the slots, in bytes.
const FIXED_LEN: usize = 512;

/// What the file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The memory of a suspended VM.
    Memory,
    /// A core of a VM.
    Core,
    /// What the TPM of a VM keeps. On its way to another host only: no datastore has such a file.
    Tpm,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Memory => 1,
            Self::Core => 2,
            Self::Tpm => 3,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Core => "core",
            Self::Tpm => "tpm",
        }
    }
}

/// Why a sealed file was not made or opened.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Another kind of file.
    #[error("it is no sealed file")]
    NotSealed,
    /// A later version of the format.
    #[error("it is a sealed file of version {0}; this program knows version {VERSION}")]
    Version(u16),
    /// Bytes of the header that must be zero are not, or the kind is unknown.
    #[error("its header is damaged")]
    Damaged,
    /// Another VM's.
    #[error("it belongs to VM {0}")]
    OtherVm(Uuid),
    /// Another kind than the one that was asked for.
    #[error("it holds a VM's {}, not its {}", found.name(), expected.name())]
    OtherKind {
        /// What it holds.
        found: Kind,
        /// What was asked for.
        expected: Kind,
    },
    /// Another one of the files that are counted.
    #[error("it is of generation {found}, not {expected}")]
    OtherGeneration {
        /// Which it is.
        found: u64,
        /// Which was asked for.
        expected: u64,
    },
    /// No slot is for the key in hand.
    #[error("no key slot of it is for this key{}", needs(.0))]
    OtherKey(Vec<SlotKey>),
    /// The file key did not come out of its slot.
    #[error("its key slot does not open: {0}")]
    Slot(#[from] SlotError),
    /// The frames' key could not be derived.
    #[error(transparent)]
    Derive(#[from] DeriveError),
    /// A frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The header could not be read or written.
    #[error("it could not be read or written: {0}")]
    Io(#[from] io::Error),
}

fn needs(keys: &[SlotKey]) -> String {
    let named: Vec<String> = keys
        .iter()
        .map(|key| format!("key '{}' of provider {}", key.key_id, key.provider))
        .collect();
    if named.is_empty() { String::new() } else { format!("; it needs {}", named.join(" or ")) }
}

/// The header of a sealed file.
#[derive(Clone)]
pub struct Header {
    vm: Uuid,
    kind: Kind,
    salt: [u8; SEALED_FILE_SALT_LEN],
    generation: u64,
    slots: [[u8; SLOT_LEN]; SLOTS],
}

/// Which file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Whose it is.
    pub vm: Uuid,
    /// What it holds.
    pub kind: Kind,
    /// Which of the files of this VM and kind, for who keeps count of them; else 0.
    pub generation: u64,
}

/// Which file is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Whose it must be.
    pub vm: Uuid,
    /// What it must hold.
    pub kind: Kind,
    /// Which one it must be; none takes any.
    pub generation: Option<u64>,
}

impl Header {
    /// The header of a new file with the given file key and salt.
    fn new(
        Identity { vm, kind, generation }: Identity,
        salt: [u8; SEALED_FILE_SALT_LEN],
        file_key: &SecretBytes,
        key: Option<&VmKey<'_>>,
    ) -> Result<Self, FileError> {
        let slots = [slot::make(file_key, key)?, [0; SLOT_LEN]];
        Ok(Self { vm, kind, salt, generation, slots })
    }

    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_be_bytes());
        bytes[10] = self.kind.code();
        bytes[16..32].copy_from_slice(self.vm.as_bytes());
        bytes[32..SALT_END].copy_from_slice(&self.salt);
        bytes[SALT_END..SALT_END + 8].copy_from_slice(&self.generation.to_be_bytes());
        for (slot, place) in self.slots.iter().zip(bytes[FIXED_LEN..].chunks_exact_mut(SLOT_LEN)) {
            place.copy_from_slice(slot);
        }
        bytes
    }

    /// The header that these bytes are. Who made it is only known once a frame has opened.
    ///
    /// # Errors
    /// [`FileError::NotSealed`], [`FileError::Version`], [`FileError::Damaged`].
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, FileError> {
        if &bytes[..8] != MAGIC {
            return Err(FileError::NotSealed);
        }
        let version = u16::from_be_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(FileError::Version(version));
        }
        let kind = match bytes[10] {
            1 => Kind::Memory,
            2 => Kind::Core,
            3 => Kind::Tpm,
            _ => return Err(FileError::Damaged),
        };
        let unused = [
            &bytes[11..16],
            &bytes[SALT_END + 8..FIXED_LEN],
            &bytes[FIXED_LEN + SLOTS * SLOT_LEN..],
        ];
        if unused.into_iter().flatten().any(|byte| *byte != 0) {
            return Err(FileError::Damaged);
        }
        let (mut vm, mut salt) = ([0; 16], [0; SEALED_FILE_SALT_LEN]);
        vm.copy_from_slice(&bytes[16..32]);
        salt.copy_from_slice(&bytes[32..SALT_END]);
        let mut generation = [0; 8];
        generation.copy_from_slice(&bytes[SALT_END..SALT_END + 8]);
        let generation = u64::from_be_bytes(generation);
        let mut slots = [[0; SLOT_LEN]; SLOTS];
        for (slot, place) in slots.iter_mut().zip(bytes[FIXED_LEN..].chunks_exact(SLOT_LEN)) {
            slot.copy_from_slice(place);
        }
        Ok(Self { vm: Uuid::from_bytes(vm), kind, salt, generation, slots })
    }

    /// Reads the header of a file.
    ///
    /// # Errors
    /// As [`Header::decode`]; a file that is shorter is none of ours.
    pub fn read(from: &mut impl Read) -> Result<Self, FileError> {
        let mut bytes = [0; HEADER_LEN];
        from.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => FileError::NotSealed,
            _ => error.into(),
        })?;
        Self::decode(&bytes)
    }

    /// Which file it says that it is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        Identity { vm: self.vm, kind: self.kind, generation: self.generation }
    }

    /// The keys that open it, as its slots say.
    #[must_use]
    pub fn keys(&self) -> Vec<SlotKey> {
        let named = self.slots.iter().filter_map(|bytes| match slot::read(bytes) {
            Slot::Wrapped(key) => Some(key),
            Slot::Empty | Slot::Clear | Slot::Damaged => None,
        });
        named.collect()
    }

    /// Whether its key is in it, in the clear, as in the file of a VM without a key.
    #[must_use]
    pub fn is_in_the_clear(&self) -> bool {
        self.slots.iter().any(|bytes| slot::read(bytes) == Slot::Clear)
    }

    /// The file's key. A slot that is damaged does not matter when the other one opens.
    fn file_key(&self, key: Option<&VmKey<'_>>) -> Result<SecretBytes, FileError> {
        let mut failed = None;
        for bytes in &self.slots {
            match slot::open(bytes, key) {
                Ok(Some(file_key)) => return Ok(file_key),
                Ok(None) => {}
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.map_or_else(|| FileError::OtherKey(self.keys()), FileError::Slot))
    }

    fn frames_key(&self, file_key: &SecretBytes) -> Result<SecretBytes, FileError> {
        let (vm, kind) = (*self.vm.as_bytes(), self.kind.name());
        Ok(sealed_file_key(file_key, &self.salt, vm, kind, self.generation)?)
    }

    /// The change that lets a new key of the VM open the file, too: where these bytes go in the file. None when it does so
    /// already. The caller writes and flushes them before it drops the old key.
    ///
    /// # Errors
    /// [`FileError::OtherKey`]: `old` does not open it.
    pub fn add_key(
        &mut self,
        old: &VmKey<'_>,
        new: &VmKey<'_>,
    ) -> Result<Option<SlotChange>, FileError> {
        if self.file_key(Some(new)).is_ok() {
            return Ok(None);
        }
        let file_key = self.file_key(Some(old))?;
        // The old key opens the file: what is in the other slot is left from a change that was called off, or torn.
        let holds =
            |slot: &[u8; SLOT_LEN]| slot::open(slot, Some(old)).is_ok_and(|key| key.is_some());
        let index = self.slots.iter().position(|slot| !holds(slot)).unwrap_or(SLOTS - 1);
        self.slots[index] = slot::make(&file_key, Some(new))?;
        Ok(Some(self.change(index)))
    }

    /// The changes after which this key alone opens the file.
    ///
    /// # Errors
    /// [`FileError::OtherKey`]: it does not open it, and nothing may be dropped.
    pub fn keep_only(&mut self, key: &VmKey<'_>) -> Result<Vec<SlotChange>, FileError> {
        self.file_key(Some(key))?;
        let mut changes = Vec::new();
        let mut kept = false;
        for index in 0..SLOTS {
            let opens =
                slot::open(&self.slots[index], Some(key)).is_ok_and(|opened| opened.is_some());
            if opens && !kept {
                kept = true;
            } else if slot::read(&self.slots[index]) != Slot::Empty {
                self.slots[index] = [0; SLOT_LEN];
                changes.push(self.change(index));
            }
        }
        Ok(changes)
    }

    fn change(&self, index: usize) -> SlotChange {
        let at = (FIXED_LEN + index * SLOT_LEN) as u64;
        SlotChange { at, bytes: self.slots[index] }
    }
}

/// A key slot to be written to a file.
pub struct SlotChange {
    /// Where, in bytes from the file's begin.
    pub at: u64,
    /// What.
    pub bytes: [u8; SLOT_LEN],
}

/// Begins a file: writes its header with a key of its own, wrapped under the VM's key, or in the clear when the VM has none.
/// What is written to the result is its content.
///
/// # Errors
/// [`FileError`]: a length is wrong, there is no memory, or it cannot be written.
pub fn create<W: Write>(
    to: W,
    identity: Identity,
    key: Option<&VmKey<'_>>,
) -> Result<SealedWriter<W>, FileError> {
    let no_memory = |error| FileError::Slot(SlotError::Wrap(error));
    let file_key = SecretBytes::random(DERIVED_LEN).map_err(|error| no_memory(error.into()))?;
    let random =
        SecretBytes::random(SEALED_FILE_SALT_LEN).map_err(|error| no_memory(error.into()))?;
    let mut salt = [0; SEALED_FILE_SALT_LEN];
    salt.copy_from_slice(random.expose());
    create_with(to, identity, key, &file_key, salt)
}

fn create_with<W: Write>(
    mut to: W,
    identity: Identity,
    key: Option<&VmKey<'_>>,
    file_key: &SecretBytes,
    salt: [u8; SEALED_FILE_SALT_LEN],
) -> Result<SealedWriter<W>, FileError> {
    let header = Header::new(identity, salt, file_key, key)?;
    to.write_all(&header.encode())?;
    Ok(SealedWriter::new(to, &header.frames_key(file_key)?)?)
}

/// Opens a file of this VM and kind. What is read from the result is its content; damage and a missing end are errors of that reading.
///
/// # Errors
/// [`FileError`].
pub fn open<R: Read>(
    from: R,
    vm: Uuid,
    kind: Kind,
    key: Option<&VmKey<'_>>,
) -> Result<SealedReader<R>, FileError> {
    open_wanted(from, Wanted { vm, kind, generation: None }, key)
}

/// Like [`open`], for who counts the files. A header that says another generation than the file was made with opens no frame: it is part of
/// their key.
///
/// # Errors
/// [`FileError`].
pub fn open_wanted<R: Read>(
    mut from: R,
    Wanted { vm, kind, generation }: Wanted,
    key: Option<&VmKey<'_>>,
) -> Result<SealedReader<R>, FileError> {
    let header = Header::read(&mut from)?;
    if header.vm != vm {
        return Err(FileError::OtherVm(header.vm));
    }
    if header.kind != kind {
        return Err(FileError::OtherKind { found: header.kind, expected: kind });
    }
    if let Some(expected) = generation
        && header.generation != expected
    {
        return Err(FileError::OtherGeneration { found: header.generation, expected });
    }
    let file_key = header.file_key(key)?;
    Ok(SealedReader::new(from, &header.frames_key(&file_key)?)?)
}

#[cfg(test)]
mod tests;
