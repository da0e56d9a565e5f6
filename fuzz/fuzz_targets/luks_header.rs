//! A hostile header: the input is the JSON of both copies, with right checksums, in an otherwise good
//! disk. It must never panic, never take long, never be written, and never open with another DEK.
//!
//! `cargo +nightly fuzz run luks_header`
#![no_main]

use std::io;

use libfuzzer_sys::fuzz_target;
use uuid::Uuid;
use vmseal_luks::{DATA_OFFSET, Facts, HeaderStore};
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::KeyContext;

const GOLDEN: &[u8] = include_bytes!("../../crates/luks/tests/golden/header-v1.bin");
const COPY: usize = 16 * 1024;
const BINARY: usize = 4096;
const SIZE: u64 = 1 << 20;

struct Image(Vec<u8>);

impl HeaderStore for Image {
    fn size(&self) -> io::Result<u64> {
        Ok(DATA_OFFSET + SIZE)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        buffer.fill(0);
        let rest = self.0.get(offset as usize..).unwrap_or_default();
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        Ok(())
    }

    fn write_at(&mut self, _: &[u8], _: u64) -> io::Result<()> {
        unreachable!("opening writes nothing")
    }

    fn flush(&mut self) -> io::Result<()> {
        unreachable!("opening writes nothing")
    }
}

fn secret(mut bytes: Vec<u8>) -> SecretBytes {
    SecretBytes::from_wiped(&mut bytes).expect("memory for a secret")
}

fuzz_target!(|json: &[u8]| {
    let mut image = Image(GOLDEN.to_vec());
    let json = &json[..json.len().min(COPY - BINARY)];
    for copy in image.0[..2 * COPY].chunks_exact_mut(COPY) {
        copy[BINARY..].fill(0);
        copy[BINARY..BINARY + json.len()].copy_from_slice(json);
        copy[0x1c0..0x200].fill(0);
        let sum = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, copy);
        copy[0x1c0..0x1e0].copy_from_slice(sum.as_ref());
    }
    let facts = Facts::new(Uuid::from_bytes([0x33; 16]), SIZE).expect("good facts");
    let context = KeyContext { vm: [0x11; 16], provider: [0x22; 16], key_id: "key-1" };
    if let Ok(opened) = vmseal_luks::open(&image, &facts, &secret(vec![0x4b; 32]), &context) {
        assert!(opened.dek == secret((0..64).collect()));
    }
    let _ = vmseal_luks::inspect(&image);
});
