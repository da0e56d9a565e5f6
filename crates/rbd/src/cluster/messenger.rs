//! How data goes over the network: between this process and the cluster, and between its OSDs.

use std::ffi::{CStr, c_char};
use std::io;

use vmseal_api::datastore::{BetweenOsds, Messenger};

use super::{Cluster, checked, text};
use crate::library::loaded;

/// The options that say how data goes between a user of the cluster and it: to OSDs, and to monitors.
pub(super) const MESSENGER_OPTIONS: [&str; 2] = ["ms_client_mode", "ms_mon_client_mode"];

/// The option that says how copies of data go from one OSD to another. It is not this process's to set.
const BETWEEN_OSDS: &str = "ms_cluster_mode";

/// The most bytes of their values: both modes of Ceph, and more.
const MODE_MAX: usize = 64;

impl Cluster {
    /// How data goes over the network: the mode that the library has in force, which the cluster's own configuration could change. It is
    /// secure where connections to OSDs and to monitors can be nothing else.
    ///
    /// # Errors
    /// The library's.
    pub fn messenger(&self) -> io::Result<Messenger> {
        let [osds, monitors] = MESSENGER_OPTIONS.map(|option| self.option(option));
        let secure = Messenger::Secure.name();
        Ok(match osds? == secure && monitors? == secure {
            true => Messenger::Secure,
            false => Messenger::Crc,
        })
    }

    /// How copies of data go between OSDs, as the monitors told the library when it connected: what they keep for all that are part of
    /// the cluster or use it. What they keep for OSDs alone, or what is in files of the OSDs' hosts, no user learns without further rights.
    ///
    /// # Errors
    /// The library's.
    pub fn between_osds(&self) -> io::Result<BetweenOsds> {
        self.option(BETWEEN_OSDS).map(|modes| between(&modes))
    }

    /// The value of an option.
    fn option(&self, option: &str) -> io::Result<String> {
        let (name, mut value) = (text(option)?, vec![0_u8; MODE_MAX]);
        let start = value.as_mut_ptr().cast::<c_char>();
        // SAFETY: the handle is open; the library writes a text of at most so many bytes, with a zero at its end.
        checked(unsafe {
            (loaded().rados.rados_conf_get)(self.0, name.as_ptr(), start, MODE_MAX)
        })?;
        let value = CStr::from_bytes_until_nul(&value)
            .map_err(|_| io::Error::from_raw_os_error(libc::ENAMETOOLONG))?;
        Ok(value.to_string_lossy().into_owned())
    }
}

/// How copies go where these modes are allowed between OSDs; the first one is preferred.
fn between(modes: &str) -> BetweenOsds {
    match modes.trim() == Messenger::Secure.name() {
        true => BetweenOsds::Secure,
        false => BetweenOsds::MayBeClear,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_secure_where_no_other_mode_is_allowed() {
        assert_eq!(between("secure"), BetweenOsds::Secure);
        // The second one is what Ceph has where nothing is set.
        for modes in ["crc", "crc secure", "secure crc", ""] {
            assert_eq!(between(modes), BetweenOsds::MayBeClear, "{modes}");
        }
    }
}
