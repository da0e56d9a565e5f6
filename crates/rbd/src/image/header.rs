//! The header of an image: the object whose lock nobody writes to the image without. Taking the lock changes the object, and giving it up does,
//! so as long as its version is the same, and nobody has the lock, nobody has written.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::io;

use super::Image;
use crate::cluster::checked;
use crate::library::{FEATURE_EXCLUSIVE_LOCK, loaded};

/// The name of the lock, as librbd has it.
const LOCK: &CStr = c"rbd_lock";

/// Room for the id of an image, in bytes: librbd makes none half as long.
const ID_BYTES: usize = 128;

/// The header of an image at an instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The object.
    pub object: String,
    /// Its version.
    pub version: u64,
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.object, self.version)
    }
}

impl Image {
    /// Its header as it is now.
    pub(super) fn header(&self) -> io::Result<Header> {
        let mut id = [0_u8; ID_BYTES];
        let (start, get) = (id.as_mut_ptr().cast::<c_char>(), loaded().rbd.rbd_get_id);
        // SAFETY: the image is open, and the buffer outlives the call, which writes at most as many bytes as are said.
        checked(unsafe { get(self.handle, start, ID_BYTES) })?;
        let id = CStr::from_bytes_until_nul(&id).map_err(io::Error::other)?;
        let object = format!("rbd_header.{}", id.to_string_lossy());
        let version = self.pool.version(&object)?;
        Ok(Header { object, version })
    }

    /// Its header while nobody has the lock.
    ///
    /// # Errors
    /// `ResourceBusy` while somebody has it; `Unsupported` where the image is written without; the cluster's.
    pub fn header_at_rest(&self) -> io::Result<Header> {
        if self.features()? & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let header = self.header()?;
        // Nobody had it at the instant of the answer, and none has taken it from the first version to the second.
        if self.pool.has_lock(&header.object, LOCK)? || self.header()? != header {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_told_with_its_version() {
        let header = Header { object: "rbd_header.1048c8ed80ef".to_owned(), version: 15 };
        assert_eq!(header.to_string(), "rbd_header.1048c8ed80ef@15");
    }
}
