//! Checks that everything that an image refers to is in its file. A truncated image must not be written: the
//! first new cluster makes the file longer again, and the lost part would read as zeroes.
//!
//! Every cluster in use has a refcount. So it is enough to find refcounts of clusters beyond the end of the
//! file, and usually there are none. Clusters that are counted but not referred to are no loss: a killed
//! writer leaves some. Only if there are any, the tables that lead to data are read.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::{Layout, Refusal};

/// The bits of a table entry that are the offset, without the flags.
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// An entry of an L2 table: a compressed cluster; all zeroes, wherever it points (version 3).
pub(crate) const COMPRESSED: u64 = 1 << 62;
pub(crate) const ZERO: u64 = 1;

/// Checks that nothing that the image refers to is beyond the end of its file of `length` bytes. Only the
/// tail of the last cluster may be missing: writers omit it.
///
/// # Errors
/// [`Refusal::Truncated`] if something does; [`Refusal::Read`].
pub fn check_reach(file: &File, layout: &Layout, length: u64) -> Result<(), Refusal> {
    let cluster = layout.header.cluster_size;
    let entries = u64::from(layout.refcount_clusters).saturating_mul(cluster) / 8;
    let blocks = table(file, layout.refcount_offset, entries)?;
    let per_block = (cluster * 8) >> layout.refcount_order;
    let mut counted_beyond = false;
    for (block, covered) in blocks.zip(0..) {
        let (offset, first) = (block & OFFSET_MASK, per_block.saturating_mul(covered));
        if offset == 0 {
            continue;
        }
        if offset >= length {
            return Err(Refusal::Truncated("a refcount block"));
        }
        // The first cluster that is not in the file, within this block.
        let beyond = length.div_ceil(cluster).saturating_sub(first);
        if beyond < per_block && !counted_beyond {
            let block = read(file, offset, cluster)?;
            let bit = usize::try_from(beyond << layout.refcount_order).unwrap_or(usize::MAX);
            counted_beyond = has_bits_from(&block, bit, layout.refcount_order);
        }
    }
    if counted_beyond { check_data(file, layout, length) } else { Ok(()) }
}

/// Checks everything that leads to data.
fn check_data(file: &File, layout: &Layout, length: u64) -> Result<(), Refusal> {
    let cluster = layout.header.cluster_size;
    // For a compressed cluster the offset is in the lower bits; how many depends on the cluster size.
    let compressed_mask = (1u64 << (70 - cluster.ilog2())) - 1;
    for map in table(file, layout.l1_offset, u64::from(layout.l1_entries))? {
        let map = map & OFFSET_MASK;
        if map == 0 {
            continue;
        }
        if map >= length {
            return Err(Refusal::Truncated("an L2 table"));
        }
        for entry in table(file, map, cluster / 8)? {
            let place = match entry {
                _ if entry & COMPRESSED != 0 => entry & compressed_mask,
                _ if layout.header.version >= 3 && entry & ZERO != 0 => 0,
                _ => entry & OFFSET_MASK,
            };
            if place >= length && place != 0 {
                return Err(Refusal::Truncated("data of its disk"));
            }
        }
    }
    Ok(())
}

/// A table of 8-byte entries.
pub(crate) fn table(
    file: &File,
    at: u64,
    entries: u64,
) -> Result<impl Iterator<Item = u64>, Refusal> {
    let bytes = read(file, at, entries.saturating_mul(8))?;
    let entry = move |index: usize| {
        bytes[index * 8..].first_chunk().map_or(0, |entry| u64::from_be_bytes(*entry))
    };
    Ok((0..usize::try_from(entries).unwrap_or(0)).map(entry))
}

/// Reads this many bytes of the file; zeroes behind its end, as the last table may lack its tail. The header
/// was checked: no table is longer than its limit.
fn read(file: &File, at: u64, length: u64) -> Result<Vec<u8>, Refusal> {
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

/// Whether any of the packed numbers from `bit` on is not 0. Numbers smaller than a byte begin at its least
/// significant bit; the others begin at a byte.
fn has_bits_from(block: &[u8], bit: usize, order: u32) -> bool {
    let first = bit / 8;
    let Some((&first, rest)) = block.get(first..).and_then(<[u8]>::split_first) else {
        return false;
    };
    let first = if order < 3 { first >> (bit % 8) } else { first };
    first != 0 || rest.iter().any(|&byte| byte != 0)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;
    use crate::examine_disk;

    const CLUSTER: u64 = 65536;

    fn run(program: &str, arguments: &[&str], at: &Path) {
        let ran = Command::new(program).args(arguments).arg(at).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    }

    fn image(at: &Path, options: &str, size: &str) -> File {
        let create = ["create", "-q", "-f", "qcow2", "-o", options];
        let mut made = Command::new("qemu-img");
        assert!(made.args(create).arg(at).arg(size).status().unwrap().success());
        File::options().read(true).write(true).open(at).unwrap()
    }

    fn check(file: &File) -> Result<(), Refusal> {
        let layout = examine_disk(file, false, true).unwrap();
        check_reach(file, &layout, file.metadata().unwrap().len())
    }

    #[test]
    fn an_image_that_lost_clusters_is_known_whatever_its_tables_look_like() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        for options in ["cluster_size=64k", "cluster_size=4k,refcount_bits=1", "compat=0.10"] {
            let file = image(&path, options, "64M");
            check(&file).unwrap();
            run("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 3M"], &path);
            check(&file).unwrap();
            let length = file.metadata().unwrap().len();
            if options == "cluster_size=64k" {
                file.set_len(length - 4096).unwrap();
                check(&file).expect("less than a cluster may be what a writer has left out");
            }
            for lost in [CLUSTER, 2 << 20] {
                file.set_len(length - lost).unwrap();
                let checked = check(&file);
                let named = matches!(checked, Err(Refusal::Truncated(_)));
                assert!(named, "{options}, {lost} bytes less: {checked:?}");
            }
        }
    }

    #[test]
    fn compressed_clusters_are_counted_in_and_prepared_ones_are_there() {
        let directory = tempfile::tempdir().unwrap();
        let (raw, path) = (directory.path().join("raw"), directory.path().join("image"));
        // Data that compresses to no less than some clusters.
        let mut noise = 1u32;
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (noise >> 24) as u8 & 0x0f
        })
        .take(1 << 20)
        .collect();
        std::fs::write(&raw, bytes).unwrap();
        let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", raw.to_str().unwrap()];
        run("qemu-img", &convert, &path);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        check(&file).unwrap();
        file.set_len(file.metadata().unwrap().len() - 2 * CLUSTER).unwrap();
        assert!(matches!(check(&file), Err(Refusal::Truncated(_))));
        for prepared in ["preallocation=metadata", "preallocation=falloc", "preallocation=full"] {
            check(&image(&path, prepared, "4M")).unwrap();
        }
    }

    #[test]
    fn clusters_that_are_counted_and_lead_nowhere_are_no_loss() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let file = image(&path, "cluster_size=64k", "64M");
        run("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 256k"], &path);
        let blocks = 2 * CLUSTER;
        // As left by a writer that counts clusters in advance and is killed: 16 bits a cluster.
        file.write_all_at(&1u16.to_be_bytes(), blocks + 2 * 500).unwrap();
        check(&file).unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(length - CLUSTER).unwrap();
        assert!(matches!(check(&file), Err(Refusal::Truncated(_))));
    }

    proptest! {
        /// Any tables get an answer.
        #[test]
        fn any_tables_are_judged(
            changes in prop::collection::vec((0usize..6 * 4096, any::<u8>()), 0..40),
            length in 4096u64..6 * 4096,
            order in 0u32..=6,
        ) {
            let file = tempfile::tempfile().unwrap();
            let mut bytes = vec![0; 6 * 4096];
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            file.write_all_at(&bytes[..length as usize], 0).unwrap();
            let header = crate::Header { version: 3, size: 1 << 20, cluster_size: 4096 };
            let layout = Layout {
                header,
                l1_offset: 3 * 4096,
                l1_entries: 1,
                refcount_offset: 4096,
                refcount_clusters: 1,
                refcount_order: order,
            };
            let judged = check_reach(&file, &layout, length);
            prop_assert!(matches!(judged, Ok(()) | Err(Refusal::Truncated(_))));
        }
    }
}
