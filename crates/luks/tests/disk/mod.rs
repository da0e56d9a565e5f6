//! A disk in memory for tests, with constant keys, and ways to forge its header.

#![allow(dead_code, reason = "every test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test")]

use std::io;

use serde_json::Value;
use uuid::Uuid;
use vmseal_luks::{DATA_OFFSET, Facts, HeaderError, HeaderStore, Holes, Identity, Opened, Role};
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::KeyContext;

pub const COPY: usize = 16 * 1024;
pub const AREA: usize = 258_048;
/// Copies and both key slots' areas: all that may be written.
pub const HEAD: usize = 2 * COPY + 2 * AREA;
pub const SIZE: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Write(u64, Vec<u8>),
    Flush,
}

/// Only the head is stored; what is behind it reads as zeroes, and must not be written.
#[derive(Clone)]
pub struct MemoryStore {
    pub head: Vec<u8>,
    pub size: u64,
    pub journal: Vec<Event>,
}

impl MemoryStore {
    pub fn new() -> Self {
        Self { head: vec![0; HEAD], size: DATA_OFFSET + SIZE, journal: Vec::new() }
    }

    pub fn with_head(head: &[u8]) -> Self {
        let mut store = Self::new();
        store.head[..head.len()].copy_from_slice(head);
        store
    }
}

impl HeaderStore for MemoryStore {
    fn size(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if offset + buffer.len() as u64 > self.size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let start = (offset as usize).min(HEAD);
        let have = (HEAD - start).min(buffer.len());
        buffer.fill(0);
        buffer[..have].copy_from_slice(&self.head[start..start + have]);
        Ok(())
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let start = offset as usize;
        self.head[start..start + bytes.len()].copy_from_slice(bytes);
        self.journal.push(Event::Write(offset, bytes.to_vec()));
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.journal.push(Event::Flush);
        Ok(())
    }
}

pub fn secret(byte: u8, len: usize) -> SecretBytes {
    SecretBytes::from_wiped(&mut vec![byte; len]).unwrap()
}

pub fn dek() -> SecretBytes {
    // The halves must differ: XTS with equal keys is refused.
    let mut bytes: Vec<u8> = (0..64).collect();
    SecretBytes::from_wiped(&mut bytes).unwrap()
}

pub fn kek() -> SecretBytes {
    secret(0x4b, 32)
}

pub fn new_kek() -> SecretBytes {
    secret(0x4e, 32)
}

pub const CONTEXT: KeyContext<'static> =
    KeyContext { vm: [0x11; 16], provider: [0x22; 16], key_id: "key-1" };
pub const NEW_CONTEXT: KeyContext<'static> = KeyContext { key_id: "key-2", ..CONTEXT };

pub fn disk() -> Uuid {
    Uuid::from_bytes([0x33; 16])
}

pub fn identity() -> Identity {
    Identity { disk: disk(), holes: Holes::Zero, shared: false, role: Role::Data }
}

pub fn facts() -> Facts {
    Facts::new(disk(), SIZE).unwrap()
}

/// A fresh disk and its facts.
pub fn created() -> MemoryStore {
    let mut store = MemoryStore::new();
    let made = vmseal_luks::create(&mut store, SIZE, &dek(), &kek(), &CONTEXT, identity()).unwrap();
    assert_eq!(made, facts());
    store
}

pub fn open(store: &MemoryStore) -> Result<Opened, HeaderError> {
    vmseal_luks::open(store, &facts(), &kek(), &CONTEXT)
}

/// SHA-256 over a copy, its checksum field set to zero: written independently of the code under test.
pub fn seal_copy(copy: &mut [u8]) {
    copy[0x1c0..0x200].fill(0);
    let sum = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, copy);
    copy[0x1c0..0x1e0].copy_from_slice(sum.as_ref());
}

/// Makes the checksums of both copies valid again.
pub fn reseal(store: &mut MemoryStore) {
    for copy in store.head[..2 * COPY].chunks_exact_mut(COPY) {
        seal_copy(copy);
    }
}

pub fn json(store: &MemoryStore) -> Value {
    let area = &store.head[4096..COPY];
    let end = area.iter().position(|byte| *byte == 0).unwrap();
    serde_json::from_slice(&area[..end]).unwrap()
}

/// Replaces the JSON of both copies, with valid checksums.
pub fn set_json(store: &mut MemoryStore, text: &[u8]) {
    for start in [4096, COPY + 4096] {
        let area = &mut store.head[start..start + COPY - 4096];
        area.fill(0);
        area[..text.len()].copy_from_slice(text);
    }
    reseal(store);
}

/// A valid header with edited JSON and valid checksums.
pub fn forged(edit: impl FnOnce(&mut Value)) -> MemoryStore {
    let mut store = created();
    let mut value = json(&store);
    edit(&mut value);
    set_json(&mut store, value.to_string().as_bytes());
    store.journal.clear();
    store
}
