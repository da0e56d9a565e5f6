//! The room that clusters take on a file system while experiments are measured on them.
//!
//! BlueStore writes new data to unallocated space of its file, also where it overwrites other data (but for small writes), and gives
//! nothing of the file back to the file system: what is overwritten again and again may make an OSD's file grow until it has its
//! full size, however small the disks are. Only what is written once takes no more than its length.
//!
//! Nothing of it is given back, as BlueStore discards (`bdev_enable_discard`) by an ioctl of block devices, which files do not have.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::daemon::Daemon;
use super::error::CephError;
use super::layout::Layout;
use super::record::Record;

/// What of a file system a run leaves free: logs, stores of monitors and installations of experiments grow there, too, and a
/// monitor ends when it cannot write.
pub const KEPT_FREE: u64 = 4 << 30;
/// What an OSD's file takes for itself: labels, the log and the tables of its database.
const OSD_OWN: u64 = 1 << 30;
/// The unit of `st_blocks`, whatever the file system's blocks are.
const SECTOR: u64 = 512;

/// The files that the OSDs of a cluster store data in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OsdFiles {
    /// The cluster's directory, by its one name.
    pub directory: PathBuf,
    /// The file system.
    pub device: u64,
    /// What is free there, in bytes.
    pub free: u64,
    /// The bytes that each file may still grow by.
    pub grow: Vec<u64>,
}

/// What is done with the disks of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// They are written once: so many bytes, copies and coding chunks included.
    Filled(u64),
    /// They are written again and again.
    Overwritten,
}

/// What a cluster is used for in a run.
pub type Demand = (OsdFiles, Use);

/// A file system that has too little room for the clusters on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The directories of the clusters.
    pub directories: Vec<PathBuf>,
    /// What they may need, in bytes.
    pub needed: u64,
    /// What is free, in bytes.
    pub free: u64,
}

impl OsdFiles {
    /// Those of the cluster in a directory. Files that are not made yet may grow to their full size.
    ///
    /// # Errors
    /// There is no cluster, or its files cannot be looked at.
    pub fn find(directory: &Path) -> Result<Self, CephError> {
        let (layout, record) = Record::open(Layout::find(directory)?)?;
        Self::of(&layout, &record)
    }

    /// Those of a cluster.
    ///
    /// # Errors
    /// They cannot be looked at.
    pub fn of(layout: &Layout, record: &Record) -> Result<Self, CephError> {
        let root = layout.root();
        let failed = |source| CephError::File { path: root.to_owned(), source };
        let device = fs::metadata(root).map_err(failed)?.dev();
        let space = nix::sys::statvfs::statvfs(root).map_err(|errno| failed(errno.into()))?;
        let free = space.blocks_available() * space.fragment_size();
        let full = record.osd_gib << 30;
        let mut grow = Vec::new();
        for id in 0..record.osds.len() {
            let path = match record.osd_encryption {
                true => layout.store(Daemon::Block(id)),
                false => layout.store(Daemon::Osd(id)).join("block"),
            };
            let allocated = match fs::metadata(&path) {
                Ok(found) => found.blocks() * SECTOR,
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                Err(source) => return Err(CephError::File { path, source }),
            };
            grow.push(full.saturating_sub(allocated));
        }
        Ok(Self { directory: root.to_owned(), device, free, grow })
    }

    /// By how many bytes all of them may grow.
    #[must_use]
    pub fn growth(&self) -> u64 {
        self.grow.iter().sum()
    }

    /// By how many bytes they may grow when they are used so.
    #[must_use]
    pub fn needed(&self, of: Use) -> u64 {
        match of {
            Use::Filled(0) => 0,
            Use::Filled(bytes) => {
                bytes.saturating_add(OSD_OWN * self.grow.len() as u64).min(self.growth())
            }
            Use::Overwritten => self.growth(),
        }
    }
}

impl Use {
    /// Both, one after the other. What the first has left is not taken for reused: an OSD removes it when it has time.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Filled(one), Self::Filled(two)) => Self::Filled(one.saturating_add(two)),
            _ => Self::Overwritten,
        }
    }
}

/// The first file system that has too little room for all clusters on it together.
#[must_use]
pub fn shortage(demands: &[Demand]) -> Option<Shortage> {
    let mut by_device: BTreeMap<u64, Shortage> = BTreeMap::new();
    for (files, of) in demands {
        let none = Shortage { directories: Vec::new(), needed: 0, free: files.free };
        let all = by_device.entry(files.device).or_insert(none);
        all.directories.push(files.directory.clone());
        all.needed = all.needed.saturating_add(files.needed(*of));
    }
    let too_much = |it: &Shortage| it.needed > 0 && it.needed.saturating_add(KEPT_FREE) > it.free;
    by_device.into_values().find(too_much)
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.directories.iter().map(|it| it.display().to_string());
        let (needed, free) = (self.needed.div_ceil(1 << 30), self.free >> 30);
        write!(
            f,
            "nothing is measured: files of OSDs in {} may grow by {needed} GiB, and their file system has {free} GiB free, of which \
             {} GiB are to stay free. Free room, measure on fewer clusters at a time, or make the clusters anew with smaller OSDs \
             (--osd-gib of `vmseal lab ceph up`) or on another file system (--directory); what does not write takes no more than its disks, \
             so fewer or smaller of such experiments need less",
            names.collect::<Vec<_>>().join(", "),
            KEPT_FREE >> 30,
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::ceph::arguments::UpArguments;

    const GIB: u64 = 1 << 30;

    /// Three OSDs of a cluster of which each may grow by 10 GiB.
    fn files(name: &str, device: u64, free: u64) -> OsdFiles {
        let grow = vec![10 * GIB; 3];
        OsdFiles { directory: name.into(), device, free, grow }
    }

    #[test]
    fn what_is_overwritten_takes_files_at_full_size_and_what_is_filled_its_bytes() {
        let files = files("/a", 1, 0);
        assert_eq!(files.needed(Use::Overwritten), 30 * GIB);
        assert_eq!(files.needed(Use::Filled(5 * GIB)), 8 * GIB);
        // Never more than the files can become.
        assert_eq!(files.needed(Use::Filled(u64::MAX)), 30 * GIB);
        assert_eq!(files.needed(Use::Filled(0)), 0);
    }

    #[test]
    fn experiments_after_each_other_add_up() {
        assert_eq!(Use::Filled(1).and(Use::Filled(2)), Use::Filled(3));
        assert_eq!(Use::Filled(1).and(Use::Overwritten), Use::Overwritten);
        assert_eq!(Use::Overwritten.and(Use::Filled(1)), Use::Overwritten);
    }

    #[test]
    fn clusters_of_a_file_system_are_counted_together() {
        let free = 60 * GIB + KEPT_FREE;
        let two =
            [(files("/a", 1, free), Use::Overwritten), (files("/b", 1, free), Use::Overwritten)];
        assert_eq!(shortage(&two), None);
        let third = (files("/c", 1, free), Use::Filled(1));
        let found = shortage(&[&two[..], &[third]].concat()).unwrap();
        assert_eq!((found.needed, found.free), (63 * GIB + 1, free));
        let text = found.to_string();
        for part in ["/a, /b, /c may grow by 64 GiB", "has 64 GiB free", "--osd-gib", "--directory"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        // On another file system it has room of its own.
        let apart = (files("/c", 2, free), Use::Overwritten);
        assert_eq!(shortage(&[&two[..], &[apart]].concat()), None);
    }

    #[test]
    fn the_margin_stays_free() {
        let of = |free| shortage(&[(files("/a", 1, free), Use::Overwritten)]);
        assert_eq!(of(30 * GIB + KEPT_FREE), None);
        assert!(of(30 * GIB + KEPT_FREE - 1).is_some());
        // What takes nothing is not refused on a full one.
        assert_eq!(shortage(&[(files("/a", 1, 0), Use::Filled(0))]), None);
    }

    #[test]
    fn what_files_have_on_disk_is_taken_off_and_holes_are_not() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        for osd_encryption in [false, true] {
            let asked = UpArguments { osd_gib: Some(2), osd_encryption, ..UpArguments::default() };
            let record = Record::new(&asked).unwrap();
            record.write(&layout).unwrap();
            let path = match osd_encryption {
                true => layout.store(Daemon::Block(1)),
                false => layout.store(Daemon::Osd(1)).join("block"),
            };
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let file = File::create(&path).unwrap();
            file.set_len(2 * GIB).unwrap();
            file.write_all_at(&[1; 1 << 20], GIB).unwrap();
            file.sync_all().unwrap();
            let found = OsdFiles::find(place.path()).unwrap();
            assert_eq!((found.grow[0], found.grow[2]), (2 * GIB, 2 * GIB));
            // A file system may take a little more for the file than its data.
            let taken = 2 * GIB - found.grow[1];
            assert!((1 << 20..64 << 20).contains(&taken), "{taken}");
        }
    }
}
