//! An empty overlay: an image that has nothing itself, so that what is below it shows.

use std::io::{self, Write};

/// The size of its clusters, as a power of two: 64 KiB, which is QEMU's usual.
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;

/// The length of the header of version 3, in bytes.
const HEADER: u32 = 104;

/// The width of a refcount, as a power of two of bits: 16.
const REFCOUNT_ORDER: u32 = 4;

/// What a cluster of refcounts of 2 bytes counts.
const COUNTED: u64 = CLUSTER / 2;

/// In an entry of a table: the cluster that it names has a refcount of 1.
const USED_ONCE: u64 = 1 << 63;

/// In an entry of a table of the second level: the cluster reads as zeroes, and what is below it does not show.
const READS_AS_ZEROES: u64 = 1;

/// The header extension that says what format the file below has.
const EXTENSION_FORMAT: u32 = 0xe279_2aca;

/// The file that an overlay names as the one below it. vmseal does not follow the name; QEMU's tools do.
#[derive(Clone, Copy, Debug)]
pub struct Below<'a> {
    /// Its name, relative to the overlay; at most 1023 bytes.
    pub name: &'a str,
    /// Its format, as QEMU calls it: `raw` or `qcow2`.
    pub format: &'a str,
}

/// Writes an overlay (version 3, clusters of 64 KiB) of `size` bytes over `below` to an empty file.
///
/// # Errors
/// Those of writing; `InvalidInput` for a name that is too long, or a size that needs larger clusters.
pub fn create_overlay(mut to: impl Write, size: u64, below: Below<'_>) -> io::Result<()> {
    let layout = Layout::of(size);
    let header = header(size, &layout, below)?;
    to.write_all(&header)?;
    // The refcount table, which names one block; then that block, which counts all clusters of the file.
    to.write_all(&cluster(&(2 * CLUSTER).to_be_bytes()))?;
    let counts: Vec<u8> = (0..layout.clusters).flat_map(|_| 1u16.to_be_bytes()).collect();
    to.write_all(&cluster(&counts))?;
    for _ in 0..layout.l1_clusters {
        to.write_all(&cluster(&[]))?;
    }
    to.flush()
}

/// The same to an empty file, with an overlay that begins with these bytes, in whole clusters of 64 KiB: at most half of what one
/// table of the second level maps (256 MiB), and not more than the disk.
///
/// # Errors
/// As [`create_overlay`].
pub fn create_overlay_beginning(
    mut to: impl Write,
    size: u64,
    below: Below<'_>,
    beginning: &[u8],
) -> io::Result<()> {
    let layout = Layout::of(size);
    let clusters: Vec<&[u8]> = beginning.chunks(CLUSTER as usize).collect();
    let is_data = |cluster: &&&[u8]| cluster.iter().any(|byte| *byte != 0);
    let data: Vec<&&[u8]> = clusters.iter().filter(is_data).collect();
    // The table of the second level follows that of the first, and the data follows it.
    let table = layout.clusters;
    let count = table + 1 + data.len() as u64;
    let whole = beginning.len() as u64;
    if whole > size
        || !whole.is_multiple_of(CLUSTER)
        || whole > CLUSTER * CLUSTER / 16
        || count > COUNTED
    {
        let what = "an overlay that begins with what is not in whole clusters, or with too much";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    to.write_all(&header(size, &layout, below)?)?;
    to.write_all(&cluster(&(2 * CLUSTER).to_be_bytes()))?;
    let counts: Vec<u8> = (0..count).flat_map(|_| 1u16.to_be_bytes()).collect();
    to.write_all(&cluster(&counts))?;
    to.write_all(&cluster(&(USED_ONCE | (table * CLUSTER)).to_be_bytes()))?;
    for _ in 1..layout.l1_clusters {
        to.write_all(&cluster(&[]))?;
    }
    let mut next = table + 1;
    let entries = clusters.iter().map(|cluster| {
        if !is_data(&cluster) {
            return READS_AS_ZEROES;
        }
        next += 1;
        USED_ONCE | ((next - 1) * CLUSTER)
    });
    let entries: Vec<u8> = entries.flat_map(u64::to_be_bytes).collect();
    to.write_all(&cluster(&entries))?;
    data.into_iter().try_for_each(|cluster| to.write_all(cluster))?;
    to.flush()
}

/// Where things are: header, refcount table, refcount block, L1 table; each from a whole cluster on.
struct Layout {
    l1_entries: u64,
    l1_clusters: u64,
    clusters: u64,
}

impl Layout {
    fn of(size: u64) -> Self {
        // A table of the second level has as many entries of 8 bytes as fit a cluster.
        let l1_entries = size.div_ceil(CLUSTER * (CLUSTER / 8));
        let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER).max(1);
        Self { l1_entries, l1_clusters, clusters: 3 + l1_clusters }
    }
}

fn header(size: u64, layout: &Layout, below: Below<'_>) -> io::Result<Vec<u8>> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
    if below.name.len() > 1023 || layout.clusters > COUNTED {
        return Err(invalid("the name of the file below is too long, or the disk too large"));
    }
    let l1_entries = u32::try_from(layout.l1_entries).map_err(|_| invalid("too large a disk"))?;
    let format = below.format.as_bytes();
    let mut extensions = Vec::new();
    extensions.extend(EXTENSION_FORMAT.to_be_bytes());
    extensions.extend((format.len() as u32).to_be_bytes());
    extensions.extend(format);
    extensions.resize(extensions.len().next_multiple_of(8), 0);
    // The end of the extensions.
    extensions.extend([0; 8]);
    let name_at = u64::from(HEADER) + extensions.len() as u64;
    let mut bytes = Vec::new();
    bytes.extend(b"QFI\xfb");
    bytes.extend(3u32.to_be_bytes());
    bytes.extend(name_at.to_be_bytes());
    bytes.extend((below.name.len() as u32).to_be_bytes());
    bytes.extend(CLUSTER_BITS.to_be_bytes());
    bytes.extend(size.to_be_bytes());
    // Not encrypted by itself.
    bytes.extend(0u32.to_be_bytes());
    bytes.extend(l1_entries.to_be_bytes());
    bytes.extend((3 * CLUSTER).to_be_bytes());
    bytes.extend(CLUSTER.to_be_bytes());
    bytes.extend(1u32.to_be_bytes());
    // No snapshots within, and no features.
    bytes.extend([0; 12 + 3 * 8]);
    bytes.extend(REFCOUNT_ORDER.to_be_bytes());
    bytes.extend(HEADER.to_be_bytes());
    bytes.extend(extensions);
    bytes.extend(below.name.as_bytes());
    Ok(cluster(&bytes))
}

/// The bytes, and zeroes up to a whole cluster.
fn cluster(bytes: &[u8]) -> Vec<u8> {
    let mut cluster = bytes.to_vec();
    cluster.resize(bytes.len().next_multiple_of(CLUSTER as usize).max(CLUSTER as usize), 0);
    cluster
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::Command;

    use super::*;

    fn qemu_img(arguments: &[&str], at: &std::path::Path) -> String {
        let ran = Command::new("qemu-img").args(arguments).current_dir(at).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8_lossy(&ran.stdout).into_owned()
    }

    #[test]
    fn qemu_s_tools_and_the_examination_take_an_overlay_of_any_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        for size in [4096, 1 << 20, (17 << 20) + 4096, 1 << 40, 60 << 40] {
            let base = File::create(path.join("base")).unwrap();
            // The file system of a test may not hold the largest.
            let length = if base.set_len(size).is_ok() { size } else { 1 << 20 };
            base.set_len(length).unwrap();
            let overlay = path.join("overlay");
            let below = Below { name: "base", format: "raw" };
            create_overlay(File::create(&overlay).unwrap(), size, below).unwrap();
            qemu_img(&["check", "-q", "overlay"], path);
            let info = qemu_img(&["info", "--output=json", "overlay"], path);
            for part in [
                format!("\"virtual-size\": {size}"),
                "\"backing-filename\": \"base\"".to_owned(),
                "\"backing-filename-format\": \"raw\"".to_owned(),
                "\"cluster-size\": 65536".to_owned(),
            ] {
                assert!(info.contains(&part), "{size}: no {part} in {info}");
            }
            let file = File::options().read(true).write(true).open(&overlay).unwrap();
            let layout = crate::examine_disk(&file, true, true).unwrap();
            assert_eq!(layout.header.size, size);
            crate::check_reach(&file, &layout, file.metadata().unwrap().len()).unwrap();
        }
    }

    #[test]
    fn an_overlay_begins_with_what_it_is_given_and_then_shows_what_is_below() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::write(path.join("base"), vec![7; 2 << 20]).unwrap();
        let mut beginning = vec![0; 4 << 16];
        beginning[5..9].fill(1);
        beginning[(3 << 16) + 100] = 2;
        let below = Below { name: "base", format: "raw" };
        let overlay = path.join("overlay");
        let make = |beginning: &[u8]| {
            let to = File::create(&overlay).unwrap();
            create_overlay_beginning(to, 2 << 20, below, beginning)
        };
        assert!(make(&beginning[1..]).is_err() && make(&vec![1; 3 << 20]).is_err());
        make(&beginning).unwrap();
        qemu_img(&["check", "-q", "overlay"], path);
        qemu_img(&["convert", "-O", "raw", "overlay", "raw"], path);
        let mut whole = beginning;
        whole.resize(2 << 20, 7);
        assert!(std::fs::read(path.join("raw")).unwrap() == whole);
        let file = File::options().read(true).write(true).open(&overlay).unwrap();
        let layout = crate::examine_disk(&file, true, true).unwrap();
        crate::check_reach(&file, &layout, file.metadata().unwrap().len()).unwrap();
    }

    #[test]
    fn what_is_below_shows_until_it_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::write(path.join("base"), vec![7; 1 << 20]).unwrap();
        let below = Below { name: "base", format: "raw" };
        create_overlay(File::create(path.join("overlay")).unwrap(), 1 << 20, below).unwrap();
        let io = |command: &str| {
            let ran = Command::new("qemu-io")
                .args(["-f", "qcow2", "-c", command, "overlay"])
                .current_dir(path)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&ran.stdout).into_owned();
            assert!(ran.status.success() && !said.contains("fail"), "{command}: {said}");
        };
        io("read -P 7 0 1M");
        io("write -P 9 64k 4k");
        io("read -P 9 64k 4k");
        io("read -P 7 68k 64k");
        assert!(std::fs::read(path.join("base")).unwrap().iter().all(|byte| *byte == 7));
        let long = "x".repeat(1024);
        let below = Below { name: &long, format: "raw" };
        assert!(create_overlay(Vec::new(), 4096, below).is_err());
    }
}
