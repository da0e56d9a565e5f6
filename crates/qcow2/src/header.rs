//! The header and its extensions, which are all in the image's first cluster.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The first bytes of every qcow2 image.
const MAGIC: &[u8; 4] = b"QFI\xfb";

/// The header of version 2, in bytes; that of version 3 begins with the same fields.
const V2_LEN: usize = 72;

/// The least header of version 3, in bytes.
const V3_LEN: usize = 104;

/// The largest cluster that QEMU makes, as a power of two: 2 MiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;

/// How many bytes of a file [`parse`] needs at most: the largest first cluster.
pub const EXAMINED_MAX: usize = 1 << 21;

/// The largest table of tables, in bytes: QEMU's limit.
const L1_BYTES_MAX: u64 = 32 << 20;

/// The largest refcount table, in bytes: QEMU's limit.
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;

/// The widest refcount, as a power of two of bits.
const REFCOUNT_ORDER_MAX: u32 = 6;

/// The longest name of a backing file, in bytes.
const BACKING_NAME_MAX: u32 = 1023;

/// The largest disk that a signed file offset can address, in bytes.
const SIZE_MAX: u64 = i64::MAX as u64;

/// The most header extensions that are looked at; QEMU writes at most six.
const EXTENSIONS_MAX: usize = 64;

/// The offset of the autoclear features of version 3, in bytes.
const AUTOCLEAR: usize = 88;

/// Incompatible features.
const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// Header extensions that say that the data is in another file, or is encrypted.
const EXTENSION_END: u32 = 0;
const EXTENSION_EXTERNAL_DATA: u32 = 0x4441_5441;
const EXTENSION_ENCRYPTION: u32 = 0x0537_be77;

/// The header extension that names dirty bitmaps.
const EXTENSION_BITMAPS: u32 = 0x2385_2875;

/// The properties of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The size that the guest sees, in bytes.
    pub size: u64,
    /// The unit of allocation, in bytes.
    pub cluster_size: u64,
}

/// How an image is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Read once; it must be complete in itself.
    Import,
    /// A disk, or a layer of one.
    Disk {
        /// Whether the file below it is given; the image must agree.
        backing: bool,
        /// Whether it is written.
        writable: bool,
    },
}

/// The tables of an image that is a disk, or a layer of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The image's properties.
    pub header: Header,
    /// The offset of the L1 table, in bytes.
    pub l1_offset: u64,
    /// How many entries of 8 bytes it has.
    pub l1_entries: u32,
    /// The offset of the refcount table, in bytes.
    pub refcount_offset: u64,
    /// Its length in clusters.
    pub refcount_clusters: u32,
    /// The width of a refcount, as a power of two of bits.
    pub refcount_order: u32,
}

/// Why an image cannot be used, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Read(#[from] io::Error),
    /// Not qcow2 at all.
    #[error("it is not a qcow2 image: name the format that it has")]
    Magic,
    /// Version 1, or a future one.
    #[error("it is of qcow2 version {0}; versions 2 and 3 are known")]
    Version(u32),
    /// It contains only the differences from another file.
    #[error(
        "it has a backing file ({0}), without which it is not whole: make a whole image of both first (qemu-img convert -O qcow2)"
    )]
    BackingFile(String),
    /// Its data is in another file.
    #[error(
        "its data lies in another file: make one image of both first (qemu-img convert -O qcow2)"
    )]
    ExternalData,
    /// It is encrypted by itself.
    #[error("it is encrypted by {0}: decrypt it first (qemu-img convert -O qcow2)")]
    Encrypted(&'static str),
    /// An overlay without the file below it.
    #[error(
        "it is an overlay of another file ({0}), and none is given: name the whole chain of files; the name in the image is not followed"
    )]
    BackingNotGiven(String),
    /// A file below an image that has no backing file.
    #[error("it has no backing file, but one is given: leave that out, or give the right image")]
    BackingNotNamed,
    /// Dirty bitmaps, which writing would invalidate.
    #[error(
        "it has dirty bitmaps, which writing would make wrong: remove them first (qemu-img bitmap --remove)"
    )]
    Bitmaps,
    /// Autoclear features, which writing would invalidate.
    #[error(
        "it has features ({0:#x}) that writing would make void: convert it first (qemu-img convert -O qcow2)"
    )]
    Autoclear(u64),
    /// Internal snapshots, which an import would lose.
    #[error(
        "it holds {0} internal snapshots, which would be lost: delete them (qemu-img snapshot -d) or make an image of the state that is wanted (qemu-img convert -O qcow2)"
    )]
    Snapshots(u32),
    /// Its last writer has not closed it.
    #[error(
        "it was not closed properly (dirty bit): is it in use? If not, repair it first (qemu-img check -r all)"
    )]
    Dirty,
    /// QEMU has marked it as damaged.
    #[error("it is marked as corrupt: repair it first (qemu-img check -r all)")]
    Corrupt,
    /// Compressed by another method than deflate.
    #[error(
        "its clusters are compressed by {0}, which is not supported: convert it first (qemu-img convert -O qcow2)"
    )]
    Compression(&'static str),
    /// Subclusters.
    #[error(
        "it has extended L2 entries, which are not supported: convert it first (qemu-img convert -O qcow2 -o extended_l2=off)"
    )]
    ExtendedL2,
    /// Features that are unknown to this version.
    #[error("it has unknown incompatible features ({0:#x}): use a newer vmseal")]
    UnknownFeatures(u64),
    /// Values that no writer writes.
    #[error("its header is damaged: {0}")]
    Damaged(&'static str),
    /// Shorter than its tables need.
    #[error("it is truncated: {0} lies beyond its end; restore it from a copy")]
    Truncated(&'static str),
}

/// Reads and checks the header of a `file` for an import.
///
/// # Errors
/// [`Refusal`].
pub fn examine(file: &File) -> Result<Header, Refusal> {
    let (bytes, length) = first_cluster(file)?;
    parse(&bytes, length)
}

/// Reads and checks the header of a `file` that is a disk or a layer of one.
///
/// # Errors
/// [`Refusal`].
pub fn examine_disk(file: &File, backing: bool, writable: bool) -> Result<Layout, Refusal> {
    let (bytes, length) = first_cluster(file)?;
    parse_for(&bytes, length, Use::Disk { backing, writable })
}

fn first_cluster(file: &File) -> Result<(Vec<u8>, u64), Refusal> {
    let length = file.metadata()?.len();
    let mut bytes = vec![0; EXAMINED_MAX.min(usize::try_from(length).unwrap_or(EXAMINED_MAX))];
    file.read_exact_at(&mut bytes, 0)?;
    Ok((bytes, length))
}

/// Checks the header in `bytes`, the first [`EXAMINED_MAX`] bytes of an image of `length` bytes (or all
/// of them).
///
/// # Errors
/// [`Refusal`].
pub fn parse(bytes: &[u8], length: u64) -> Result<Header, Refusal> {
    parse_for(bytes, length, Use::Import).map(|layout| layout.header)
}

/// As [`parse`], for any use.
///
/// # Errors
/// [`Refusal`].
pub fn parse_for(bytes: &[u8], length: u64, usage: Use) -> Result<Layout, Refusal> {
    let fields = Fields(bytes);
    if bytes.get(..4) != Some(MAGIC) {
        return Err(Refusal::Magic);
    }
    let version = fields.u32(4)?;
    if !(2..=3).contains(&version) {
        return Err(Refusal::Version(version));
    }
    let features = if version == 3 { fields.u64(72)? } else { 0 };
    check_features(&fields, features)?;
    let bits = fields.u32(20)?;
    if !CLUSTER_BITS.contains(&bits) {
        return Err(Refusal::Damaged("its cluster size is not between 512 bytes and 2 MiB"));
    }
    let cluster = 1u64 << bits;
    check_backing(&fields, usage)?;
    check_whole(&fields, usage)?;
    check_extensions(&fields, version, cluster, usage)?;
    let size = fields.u64(24)?;
    if size == 0 || size > SIZE_MAX {
        return Err(Refusal::Damaged("its disk has no size, or one beyond all limits"));
    }
    check_tables(&fields, size, cluster, length)?;
    Ok(Layout {
        header: Header { version, size, cluster_size: cluster },
        l1_offset: fields.u64(40)?,
        l1_entries: fields.u32(36)?,
        refcount_offset: fields.u64(48)?,
        refcount_clusters: fields.u32(56)?,
        // Those of version 2 are always 16 bits wide.
        refcount_order: if version == 3 { fields.u32(96)? } else { 4 },
    })
}

/// The features that change the meaning of the rest come first.
fn check_features(fields: &Fields<'_>, features: u64) -> Result<(), Refusal> {
    let known = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2;
    let has = |feature| features & feature != 0;
    if features & !known != 0 {
        return Err(Refusal::UnknownFeatures(features & !known));
    }
    if has(CORRUPT) {
        return Err(Refusal::Corrupt);
    }
    if has(DIRTY) {
        return Err(Refusal::Dirty);
    }
    if has(EXTERNAL_DATA) {
        return Err(Refusal::ExternalData);
    }
    if has(EXTENDED_L2) {
        return Err(Refusal::ExtendedL2);
    }
    if has(COMPRESSION_TYPE) {
        return Err(Refusal::Compression(match fields.u8(104)? {
            0 => return Err(Refusal::Damaged("a compression type is announced and not given")),
            1 => "zstd",
            _ => "an unknown method",
        }));
    }
    Ok(())
}

/// Checks that the given backing file agrees with the image.
fn check_backing(fields: &Fields<'_>, usage: Use) -> Result<(), Refusal> {
    let backing = fields.u64(8)?;
    let name_len = fields.u32(16)?.min(BACKING_NAME_MAX);
    let name = || fields.text(backing, name_len);
    match (usage, backing != 0) {
        (Use::Import, true) => Err(Refusal::BackingFile(name())),
        (Use::Disk { backing: false, .. }, true) => Err(Refusal::BackingNotGiven(name())),
        (Use::Disk { backing: true, .. }, false) => Err(Refusal::BackingNotNamed),
        _ => Ok(()),
    }
}

/// Checks that all data is in this file, and can be read, and written if needed.
fn check_whole(fields: &Fields<'_>, usage: Use) -> Result<(), Refusal> {
    match fields.u32(32)? {
        0 => {}
        1 => return Err(Refusal::Encrypted("qcow2's own AES")),
        2 => return Err(Refusal::Encrypted("LUKS inside of qcow2")),
        _ => return Err(Refusal::Encrypted("an unknown method")),
    }
    // A layer of a disk that is only read may have internal snapshots.
    let read_only_layer = matches!(usage, Use::Disk { writable: false, .. });
    match fields.u32(60)? {
        0 => Ok(()),
        _ if read_only_layer => Ok(()),
        count => Err(Refusal::Snapshots(count)),
    }
}

fn check_extensions(
    fields: &Fields<'_>,
    version: u32,
    cluster: u64,
    usage: Use,
) -> Result<(), Refusal> {
    let written = matches!(usage, Use::Disk { writable: true, .. });
    let mut at = V2_LEN as u64;
    if version == 3 {
        if fields.u32(96)? > REFCOUNT_ORDER_MAX {
            return Err(Refusal::Damaged("its refcounts are too wide"));
        }
        at = u64::from(fields.u32(100)?);
        if at < V3_LEN as u64 || at > cluster || !at.is_multiple_of(8) {
            return Err(Refusal::Damaged("the length of its header is not possible"));
        }
    }
    let autoclear = if version == 3 { fields.u64(AUTOCLEAR)? } else { 0 };
    for _ in 0..EXTENSIONS_MAX {
        // The list ends where the first cluster does, if not before.
        if at + 8 > cluster {
            return check_autoclear(autoclear, written);
        }
        let (kind, len) = (fields.u32(at as usize)?, fields.u32(at as usize + 4)?);
        match kind {
            EXTENSION_END => return check_autoclear(autoclear, written),
            EXTENSION_EXTERNAL_DATA => return Err(Refusal::ExternalData),
            EXTENSION_ENCRYPTION => return Err(Refusal::Encrypted("LUKS inside of qcow2")),
            EXTENSION_BITMAPS if written => return Err(Refusal::Bitmaps),
            // Names for messages, dirty bitmaps of backup programs: the data does not need them.
            _ => {}
        }
        at += 8 + u64::from(len).next_multiple_of(8);
        if at > cluster {
            return Err(Refusal::Damaged("a header extension goes beyond the first cluster"));
        }
    }
    Err(Refusal::Damaged("it has too many header extensions"))
}

/// Checks for features that a writer that does not know them must clear.
fn check_autoclear(features: u64, written: bool) -> Result<(), Refusal> {
    if written && features != 0 {
        return Err(Refusal::Autoclear(features));
    }
    Ok(())
}

/// Checks that the tables are inside the file and large enough for the disk.
fn check_tables(fields: &Fields<'_>, size: u64, cluster: u64, length: u64) -> Result<(), Refusal> {
    // An L1 entry stands for a cluster full of 8-byte L2 entries.
    let (entries, covered) =
        (u64::from(fields.u32(36)?), u128::from(cluster) * u128::from(cluster / 8));
    if entries * 8 > L1_BYTES_MAX {
        return Err(Refusal::Damaged("its L1 table is too large"));
    }
    if u128::from(entries) * covered < u128::from(size) {
        return Err(Refusal::Damaged("its L1 table is too small for its disk"));
    }
    let table = |offset: u64, len: u64, name| {
        if offset == 0 || !offset.is_multiple_of(cluster) {
            return Err(Refusal::Damaged("a table does not begin at a cluster"));
        }
        match offset.checked_add(len) {
            Some(end) if end <= length => Ok(()),
            _ => Err(Refusal::Truncated(name)),
        }
    };
    table(fields.u64(40)?, entries * 8, "its L1 table")?;
    let refcounts = u64::from(fields.u32(56)?) * cluster;
    if refcounts > REFCOUNT_TABLE_BYTES_MAX {
        return Err(Refusal::Damaged("its refcount table is too large"));
    }
    table(fields.u64(48)?, refcounts, "its refcount table")
}

/// Big-endian fields.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&self, at: usize) -> Result<[u8; N], Refusal> {
        let field = self.0.get(at..).and_then(|rest| rest.first_chunk::<N>());
        field.copied().ok_or(Refusal::Truncated("its header"))
    }

    fn u8(&self, at: usize) -> Result<u8, Refusal> {
        self.take::<1>(at).map(|[byte]| byte)
    }

    fn u32(&self, at: usize) -> Result<u32, Refusal> {
        self.take(at).map(u32::from_be_bytes)
    }

    fn u64(&self, at: usize) -> Result<u64, Refusal> {
        self.take(at).map(u64::from_be_bytes)
    }

    /// A text for a message: its printable characters.
    fn text(&self, at: u64, len: u32) -> String {
        let start = usize::try_from(at).unwrap_or(usize::MAX);
        let bytes = self.0.get(start..).unwrap_or_default();
        let bytes = &bytes[..bytes.len().min(len as usize)];
        String::from_utf8_lossy(bytes).chars().filter(|c| !c.is_control()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    /// The header that `qemu-img create -f qcow2` writes for a disk of 1 MiB, with the fields that are read.
    fn good() -> Vec<u8> {
        let mut image = vec![0; 4 * 65536];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, MAGIC);
        put(4, &3u32.to_be_bytes());
        put(20, &16u32.to_be_bytes());
        put(24, &(1u64 << 20).to_be_bytes());
        put(36, &1u32.to_be_bytes());
        put(40, &(3u64 * 65536).to_be_bytes());
        put(48, &65536u64.to_be_bytes());
        put(56, &1u32.to_be_bytes());
        put(96, &4u32.to_be_bytes());
        put(100, &112u32.to_be_bytes());
        image
    }

    fn changed(at: usize, bytes: &[u8]) -> String {
        let mut image = good();
        image[at..at + bytes.len()].copy_from_slice(bytes);
        parse(&image, image.len() as u64).unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_imported_is_refused_with_the_reason() {
        let image = good();
        let header = parse(&image, image.len() as u64).unwrap();
        assert_eq!(header, Header { version: 3, size: 1 << 20, cluster_size: 65536 });
        for (at, bytes, reason) in [
            (0, &b"QFI\xfa"[..], "not a qcow2 image"),
            (4, &[0, 0, 0, 1], "version 1"),
            (4, &[0, 0, 0, 4], "version 4"),
            (14, &[1, 0], "backing file"),
            (20, &[0, 0, 0, 8], "cluster size"),
            (20, &[0, 0, 0, 22], "cluster size"),
            (24, &[0; 8], "no size"),
            (24, &[0xff; 8], "no size"),
            (28, &[0x40, 0, 0, 0], "too small"),
            (32, &[0, 0, 0, 1], "AES"),
            (32, &[0, 0, 0, 2], "LUKS"),
            (32, &[0, 0, 0, 3], "unknown method"),
            (36, &[0x7f, 0, 0, 0], "too large"),
            (40, &[0; 8], "begin at a cluster"),
            (47, &[1], "begin at a cluster"),
            (43, &[1], "truncated"),
            (50, &[1], "truncated"),
            (56, &[1, 0, 0, 0], "refcount table is too large"),
            (60, &[0, 0, 0, 7], "7 internal snapshots"),
            (79, &[1], "dirty"),
            (79, &[2], "corrupt"),
            (79, &[4], "another file"),
            (79, &[8], "not given"),
            (79, &[16], "extended L2"),
            (79, &[32], "unknown incompatible features (0x20)"),
            (72, &[1], "unknown incompatible features"),
            (96, &[0, 0, 0, 7], "too wide"),
            (100, &[0, 0, 0, 72], "length of its header"),
            (100, &[0, 1, 0, 8], "length of its header"),
            (112, b"DATA\0\0\0\x01x", "another file"),
            (112, b"\x05\x37\xbe\x77\0\0\0\x10", "LUKS"),
            (112, b"abcd\0\x02\0\0", "beyond the first cluster"),
        ] {
            let refusal = changed(at, bytes);
            assert!(refusal.contains(reason), "byte {at}: {refusal}");
        }
        let mut zstd = good();
        zstd[79] = 8;
        zstd[104] = 1;
        assert!(parse(&zstd, zstd.len() as u64).unwrap_err().to_string().contains("zstd"));
        assert!(matches!(parse(&image[..60], 60), Err(Refusal::Truncated(_))));
        let cut = parse(&image[..3 * 65536], 3 * 65536).unwrap_err();
        assert!(cut.to_string().contains("truncated"), "{cut}");
    }

    #[test]
    fn a_disk_is_what_is_given_and_is_written_only_if_nothing_else_relies_on_it() {
        let disk = |image: &[u8], backing, writable| {
            parse_for(image, image.len() as u64, Use::Disk { backing, writable })
        };
        let whole = good();
        let layout = disk(&whole, false, true).unwrap();
        assert_eq!((layout.l1_offset, layout.l1_entries), (3 * 65536, 1));
        let refcounts = (layout.refcount_offset, layout.refcount_clusters, layout.refcount_order);
        assert_eq!(refcounts, (65536, 1, 4));
        assert!(matches!(disk(&whole, true, true), Err(Refusal::BackingNotNamed)));
        let mut overlay = good();
        (overlay[15], overlay[19]) = (200, 8);
        assert!(disk(&overlay, true, true).is_ok());
        assert!(matches!(disk(&overlay, false, false), Err(Refusal::BackingNotGiven(_))));
        let mut snapshots = good();
        snapshots[63] = 1;
        assert!(disk(&snapshots, false, false).is_ok());
        assert!(matches!(disk(&snapshots, false, true), Err(Refusal::Snapshots(1))));
        let mut bitmaps = good();
        bitmaps[112..116].copy_from_slice(&EXTENSION_BITMAPS.to_be_bytes());
        assert!(disk(&bitmaps, false, false).is_ok());
        assert!(matches!(disk(&bitmaps, false, true), Err(Refusal::Bitmaps)));
        let mut autoclear = good();
        autoclear[AUTOCLEAR] = 1;
        assert!(disk(&autoclear, false, false).is_ok());
        assert!(matches!(disk(&autoclear, false, true), Err(Refusal::Autoclear(_))));
    }

    #[test]
    fn a_backing_file_is_named() {
        let mut image = good();
        image[15] = 200;
        image[19] = 8;
        image[200..208].copy_from_slice(b"base\n.q2");
        let refusal = parse(&image, image.len() as u64).unwrap_err();
        assert!(refusal.to_string().contains("(base.q2)"), "{refusal}");
    }

    /// Images of QEMU's own tool are accepted or refused according to their options.
    #[test]
    fn images_of_qemu_img_are_judged_by_what_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let create = |name: &str, options: &[&str]| {
            let made = || {
                let made = Command::new("qemu-img")
                    .args(["create", "-q", "-f", "qcow2"])
                    .args(options)
                    .arg(path(name))
                    .args(if options.contains(&"-b") { None } else { Some("3M") })
                    .output()
                    .unwrap();
                (made.status.success(), String::from_utf8_lossy(&made.stderr).into_owned())
            };
            // On a busy machine qemu-img cannot always measure how long a key derivation takes.
            let tries = std::iter::repeat_with(made).take(20);
            let unmeasured = |said: &str| said.contains("Unable to get accurate CPU usage");
            let (made, said) =
                tries.into_iter().find(|(made, said)| *made || !unmeasured(said)).unwrap();
            assert!(made, "{said}");
            examine(&File::open(path(name)).unwrap())
        };
        let plain = create("plain", &[]).unwrap();
        assert_eq!((plain.version, plain.size, plain.cluster_size), (3, 3 << 20, 65536));
        let old = create("old", &["-o", "compat=0.10,cluster_size=4096"]).unwrap();
        assert_eq!((old.version, old.cluster_size), (2, 4096));
        let base = path("plain");
        let base = base.to_str().unwrap();
        let refused = create("overlay", &["-b", base, "-F", "qcow2"]).unwrap_err();
        assert!(matches!(&refused, Refusal::BackingFile(name) if name == base), "{refused}");
        let data = format!("data_file={}", path("data").display());
        let refused = create("external", &["-o", &data]).unwrap_err();
        assert!(matches!(refused, Refusal::ExternalData), "{refused}");
        let refused = create("extended", &["-o", "extended_l2=on"]).unwrap_err();
        assert!(matches!(refused, Refusal::ExtendedL2), "{refused}");
        let refused = create("zstd", &["-o", "compression_type=zstd"]).unwrap_err();
        assert!(matches!(refused, Refusal::Compression("zstd")), "{refused}");
        let secret = ["--object", "secret,id=s0,data=abc"];
        let encrypted = ["-o", "encrypt.format=luks,encrypt.key-secret=s0,encrypt.iter-time=1000"];
        let refused = create("luks", &[secret, encrypted].concat()).unwrap_err();
        assert!(matches!(refused, Refusal::Encrypted(_)), "{refused}");
        let snapshot = Command::new("qemu-img")
            .args(["snapshot", "-c", "before"])
            .arg(path("plain"))
            .status()
            .unwrap();
        assert!(snapshot.success());
        let refused = examine(&File::open(path("plain")).unwrap()).unwrap_err();
        assert!(matches!(refused, Refusal::Snapshots(1)), "{refused}");
    }

    proptest! {
        /// Any bytes get an answer, and an accepted header is consistent.
        #[test]
        fn any_header_is_judged(
            changes in prop::collection::vec((0usize..200, any::<u8>()), 0..6),
            length in 0usize..5 * 65536,
        ) {
            let mut image = good();
            for (at, byte) in changes {
                image[at] = byte;
            }
            image.resize(length, 0);
            if let Ok(header) = parse(&image, length as u64) {
                prop_assert!(header.size > 0 && header.size <= SIZE_MAX);
                prop_assert!(header.cluster_size.is_power_of_two());
            }
        }
    }
}
