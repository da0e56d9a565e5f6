//! Damage and forgery of a LUKS2 header in an image file. Written apart from the code under test, after
//! the "LUKS2 On-Disk Format Specification" 1.1.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, ensure};
use aws_lc_rs::digest::{SHA256, digest};
use serde_json::Value;

/// The length of one of the two copies of a header, in bytes.
pub const COPY: usize = 16 * 1024;

/// The length of all that is before the data, in bytes.
pub const HEAD: usize = 16 << 20;

/// Where the JSON begins in a copy.
const JSON: usize = 4096;

/// Where the checksum is in a copy: its field, of which SHA-256 fills the half.
const CHECKSUM: usize = 0x1c0;
const CHECKSUM_END: usize = 0x200;

/// What is before an image's data: header copies and key slots.
pub fn read(image: &Path) -> anyhow::Result<Vec<u8>> {
    let mut head = vec![0; HEAD];
    File::open(image)?.read_exact_at(&mut head, 0)?;
    Ok(head)
}

/// Puts it back, or another's in its place.
pub fn write(image: &Path, head: &[u8]) -> anyhow::Result<()> {
    Ok(File::options().write(true).open(image)?.write_all_at(head, 0)?)
}

/// Overwrites a part of a copy (0 or 1) of the header, so that its checksum is wrong.
pub fn damage(image: &Path, copy: usize) -> anyhow::Result<()> {
    let file = File::options().write(true).open(image)?;
    Ok(file.write_all_at(&[0x5a; 64], (copy * COPY + JSON + 100) as u64)?)
}

/// Edits the JSON of both copies and makes their checksums right again.
pub fn forge(image: &Path, edit: impl FnOnce(&mut Value)) -> anyhow::Result<()> {
    let mut head = read(image)?;
    let area = &head[JSON..COPY];
    let end = area.iter().position(|byte| *byte == 0).context("the JSON has no end")?;
    let mut json: Value = serde_json::from_slice(&area[..end])?;
    edit(&mut json);
    let text = json.to_string();
    ensure!(text.len() < COPY - JSON, "the forged JSON is too long");
    for copy in head[..2 * COPY].chunks_exact_mut(COPY) {
        copy[JSON..].fill(0);
        copy[JSON..JSON + text.len()].copy_from_slice(text.as_bytes());
        copy[CHECKSUM..CHECKSUM_END].fill(0);
        let sum = digest(&SHA256, copy);
        copy[CHECKSUM..CHECKSUM + sum.as_ref().len()].copy_from_slice(sum.as_ref());
    }
    write(image, &head)
}

/// SHA-256 of a file, to see that it was not written.
pub fn hash(file: &Path) -> anyhow::Result<Vec<u8>> {
    Ok(digest(&SHA256, &std::fs::read(file)?).as_ref().to_vec())
}
