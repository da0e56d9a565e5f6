//! Takes the files of a directory from other hosts, whether these are dead or not.
//!
//! ```text
//!  an image that another process has the lock of ──> its address is on the cluster's blocklist ──> its lock is broken
//!                                                     └── nothing of it lands any more, whatever file it is of
//!  the locks of files that these processes have ──> broken, so that nobody waits until they run out
//! ```
//! Who is on the blocklist ends ([`crate::cluster`]), and its successor gets no image that somebody else has the lock of. What keeps it
//! from those that nobody has open is for its agent to know (`vm.lease`).

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use vmseal_api::fencing::Fencing;

use super::FileSystem;
use crate::cluster::Cluster;
use crate::image::Image;
use crate::inode::Inode;
use crate::monitors::{Good, Question};
use crate::open_file::noted_size;

/// How long it is known whether the user may fence. A connection keeps its rights, so another answer is rare; and each question is in the
/// monitors' audit log.
const KNOWN: Good = Good { answer: Duration::from_secs(600), error: Duration::from_secs(60) };

/// Whether the user may take files from other hosts.
pub(super) fn rights(cluster: &Arc<Cluster>) -> Question<Fencing> {
    let cluster = Arc::clone(cluster);
    Question::new("whether hosts may be fenced", KNOWN, move || {
        match cluster.may_put_on_blocklist() {
            Fencing::Unknown => Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
            told => Ok(told),
        }
    })
}

impl FileSystem {
    /// Whether the user may take files from other hosts.
    pub(super) fn may_fence(&self) -> Fencing {
        self.fencing.ask().unwrap_or(Fencing::Unknown)
    }

    /// Takes all that is below a directory. It may be done again.
    pub(super) fn take_from_others(&self, directory: Inode) -> io::Result<()> {
        if !directory.is_directory() {
            return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
        }
        let own = self.cluster.address()?;
        let pool = &self.store.pool;
        let files = self.files_below(directory)?;
        let mut others = BTreeSet::new();
        for file in &files {
            if noted_size(pool, *file)?.is_some() {
                others.extend(Image::take_from_others(pool, &file.image(), &own)?);
            }
        }
        let others: Vec<String> = others.into_iter().collect();
        files.iter().try_for_each(|file| pool.break_locks_of(&file.object(), &others))
    }

    /// The files of a directory, and of those in it.
    fn files_below(&self, directory: Inode) -> io::Result<Vec<Inode>> {
        let (mut files, mut directories) = (Vec::new(), vec![directory]);
        while let Some(next) = directories.pop() {
            let entries = self.directories.list(next)?.into_iter().map(|entry| entry.inode);
            let (below, here): (Vec<_>, Vec<_>) = entries.partition(|it| it.is_directory());
            directories.extend(below);
            files.extend(here);
        }
        Ok(files)
    }
}
