//! The contract between `vmseal-rbd`, which serves the files of a pool of Ceph over FUSE, and those who use its files.

/// An extended attribute of the root directory: how the cluster keeps what is stored there, a JSON list of
/// [`crate::redundancy::PoolFacts`], that of names and headers first, and that of data after it where it is another one.
pub const POOLS_ATTRIBUTE: &str = "user.vmseal.pools";

/// The longest value of [`POOLS_ATTRIBUTE`], in bytes.
pub const POOLS_MAX: usize = 4096;

/// An extended attribute of directories: how images that are made there from now on are cut into objects, a
/// [`crate::image_layout::ImageLayout`] in JSON.
pub const IMAGE_LAYOUT_ATTRIBUTE: &str = "user.vmseal.image-layout";

/// An `ioctl(2)` of its files: answers [`WHOLE`], four bytes. `_IOR('v', 0x52, u32)` (linux/ioctl.h).
pub const ASK_WHOLE: u32 = 2 << 30 | 4 << 16 | (b'v' as u32) << 8 | 0x52;

/// Reads and writes are answered whole or with an error, never in part. And when the process that serves the file dies, nothing that it
/// had under way is done any more once a successor serves it: the requests can be made again.
pub const WHOLE: u32 = 1;
