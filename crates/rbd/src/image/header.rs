//! The header of an image: the object whose lock nobody writes to the image without. Taking the lock changes the object, and giving it up does,
//! so as long as its version is the same, and nobody has the lock, nobody has written.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::io;
use std::ptr;
use std::time::{Duration, Instant};

use super::Image;
use crate::cluster::checked;
use crate::library::{FEATURE_EXCLUSIVE_LOCK, Watcher, loaded};

/// The name of the lock, as librbd has it.
const LOCK: &CStr = c"rbd_lock";

/// Room for the id of an image, in bytes: librbd makes none half as long.
const ID_BYTES: usize = 128;

/// How long after the look before it a lock may be had that says anything: it takes some milliseconds. In more time a program comes and goes, and
/// one that died with the lock is forgotten.
const LOCK_TIME_MAX: Duration = Duration::from_secs(1);

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

/// What was seen of an image just before its lock is asked for.
pub(super) struct Look {
    header: Header,
    at: Instant,
}

impl Image {
    /// Looks at its header, before its lock is asked for.
    ///
    /// # Errors
    /// `ResourceBusy` where others have it open to be written, too; the cluster's.
    pub(super) fn look(&self) -> io::Result<Look> {
        // First: who takes the lock after that has it open by the next answer, or opens it later.
        let (header, at) = (self.header()?, Instant::now());
        self.require_open_here_alone()?;
        Ok(Look { header, at })
    }

    /// The header that was seen, where its lock is had here now, and nobody can have had it since. Who has the image open may: it gives the lock
    /// away when this process asks for it, after what it has written.
    ///
    /// # Errors
    /// `ResourceBusy`, `TimedOut` where somebody can; the cluster's.
    pub(super) fn header_until_locked(&self, look: Look) -> io::Result<Header> {
        self.require_open_here_alone()?;
        if look.at.elapsed() > LOCK_TIME_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(look.header)
    }

    /// Its header as it is now.
    fn header(&self) -> io::Result<Header> {
        let mut id = [0_u8; ID_BYTES];
        let (start, get) = (id.as_mut_ptr().cast::<c_char>(), loaded().rbd.rbd_get_id);
        // SAFETY: the image is open, and the buffer outlives the call, which writes at most as many bytes as are said.
        checked(unsafe { get(self.handle, start, ID_BYTES) })?;
        let id = CStr::from_bytes_until_nul(&id).map_err(io::Error::other)?;
        let object = format!("rbd_header.{}", id.to_string_lossy());
        let version = self.pool.version(&object)?;
        Ok(Header { object, version })
    }

    /// Finds that this process alone has it open to be written, once. Who has, with whatever program, watches the header: nobody gets the lock
    /// without that. Who only reads does not.
    ///
    /// # Errors
    /// `ResourceBusy` where others have it open, too; the cluster's.
    fn require_open_here_alone(&self) -> io::Result<()> {
        let (mut one, mut count) = (Watcher { address: ptr::null_mut(), client: 0, cookie: 0 }, 1);
        let rbd = &loaded().rbd;
        let busy = || io::Error::from_raw_os_error(libc::EBUSY);
        // SAFETY: the image is open, and there is room for as many as the count says.
        let listed = unsafe { (rbd.rbd_watchers_list)(self.handle, &raw mut one, &raw mut count) };
        match checked(listed) {
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) => return Err(busy()),
            listed => listed?,
        };
        // SAFETY: librbd has filled as many as the count says now; their addresses are not used any more.
        unsafe { (rbd.rbd_watchers_list_cleanup)(&raw mut one, count) };
        let here = u64::try_from(one.client).is_ok_and(|client| client == self.pool.client());
        if count == 1 && here { Ok(()) } else { Err(busy()) }
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
        let is_locked = !self.pool.lockers(&header.object, LOCK)?.is_empty();
        if is_locked || self.header()? != header {
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
