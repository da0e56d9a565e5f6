//! A hostile LUKS2 header in an otherwise good disk, both copies with right checksums. The input is the
//! JSON of both; or, if it does not begin with `{`, a list of changes to the whole header area. It must
//! never be written, and never open with another DEK.

use std::io;

use aws_lc_rs::digest::{SHA256, digest};
use uuid::Uuid;
use vmseal_luks::{DATA_OFFSET, Facts, HeaderStore};
use vmseal_secret::derive::KeyContext;

use crate::secret;

const GOLDEN: &[u8] = include_bytes!("../../crates/luks/tests/golden/header-v1.bin");
/// The length of one copy, and of the binary header in front of its JSON.
const COPY: usize = 16 * 1024;
const BINARY: usize = 4096;
/// Where the checksum is, and its field's end.
const SUM: usize = 0x1c0;
const SUM_END: usize = 0x200;
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

fn with_json(image: &mut [u8], json: &[u8]) {
    let json = &json[..json.len().min(COPY - BINARY)];
    for copy in image[..2 * COPY].chunks_exact_mut(COPY) {
        copy[BINARY..].fill(0);
        copy[BINARY..BINARY + json.len()].copy_from_slice(json);
    }
}

/// Each change is three bytes of place and one of value.
fn with_changes(image: &mut [u8], changes: &[u8]) {
    for change in changes.as_chunks::<4>().0 {
        let place = u32::from_be_bytes([0, change[0], change[1], change[2]]) as usize;
        image[place % GOLDEN.len()] = change[3];
    }
}

/// See the module.
pub fn run(data: &[u8]) {
    let mut image = Image(GOLDEN.to_vec());
    if data.first() == Some(&b'{') {
        with_json(&mut image.0, data);
    } else {
        with_changes(&mut image.0, data);
    }
    for copy in image.0[..2 * COPY].chunks_exact_mut(COPY) {
        copy[SUM..SUM_END].fill(0);
        let sum = digest(&SHA256, copy);
        copy[SUM..SUM + sum.as_ref().len()].copy_from_slice(sum.as_ref());
    }
    let facts = Facts::new(Uuid::from_bytes([0x33; 16]), SIZE).unwrap();
    let context = KeyContext { vm: [0x11; 16], provider: [0x22; 16], key_id: "key-1" };
    if let Ok(opened) = vmseal_luks::open(&image, &facts, &secret(vec![0x4b; 32]), &context) {
        assert!(opened.dek == secret((0..64).collect()), "another DEK");
    }
    let _ = vmseal_luks::inspect(&image);
}
