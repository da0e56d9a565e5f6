//! Where files have data, and where holes.

use std::io;

use super::FileSystem;
use crate::holes::{first_data, first_hole};
use crate::inode::Inode;

impl FileSystem {
    /// Where data or a hole begins from `from` on.
    pub(super) fn seek(&self, handle: u64, inode: Inode, from: u64, data: bool) -> io::Result<u64> {
        let no_more = || io::Error::from_raw_os_error(libc::ENXIO);
        let Some(image) = self.open.of_handle(handle)?.image() else {
            let (size, _) = self.store.pool.stat(&inode.object())?;
            let found = if data { from } else { size };
            return if from < size { Ok(found) } else { Err(no_more()) };
        };
        let size = image.size();
        if from >= size {
            return Err(no_more());
        }
        if data {
            return first_data(&image, from..size)?.ok_or_else(no_more);
        }
        first_hole(&image, from..size)
    }
}
