//! The version of an object, whether anybody has it locked, and who this process is to those who ask who watches one.

use std::ffi::CStr;
use std::io;
use std::ptr;

use super::{Pool, checked, is_none, text};
use crate::library::loaded;

/// Room for a list of those who have a lock that one has at a time.
const LOCKERS_BYTES: usize = 2048;

impl Pool {
    /// The number that the cluster has given this process, by which those are named who watch an object.
    #[must_use]
    pub fn client(&self) -> u64 {
        // SAFETY: the cluster is connected.
        unsafe { (loaded().rados.rados_get_instance_id)(self.cluster.0) }
    }

    /// The version of an object: each change of it makes it another one, and none comes back. How many changes are between two of them it does
    /// not say: what other objects of the placement group have had counts, too.
    ///
    /// # Errors
    /// `NotFound`; the cluster's.
    pub fn version(&self, object: &str) -> io::Result<u64> {
        let object = text(object)?;
        let rados = &loaded().rados;
        let (mut completion, mut size, mut changed) = (ptr::null_mut(), 0, 0);
        // SAFETY: the pool is open; the completion is made, waited for and then released; the numbers outlive the wait.
        unsafe {
            let create = rados.rados_aio_create_completion2;
            checked(create(ptr::null_mut(), None, &raw mut completion))?;
            let (size, changed) = (&raw mut size, &raw mut changed);
            let begun = (rados.rados_aio_stat)(self.io, object.as_ptr(), completion, size, changed);
            let told = match begun {
                0.. => {
                    (rados.rados_aio_wait_for_complete)(completion);
                    (rados.rados_aio_get_return_value)(completion)
                }
                failed => failed,
            };
            let version = (rados.rados_aio_get_version)(completion);
            (rados.rados_aio_release)(completion);
            checked(told).map(|_| version)
        }
    }

    /// Whether anybody has a lock of this name of an object.
    ///
    /// # Errors
    /// The cluster's; `ERANGE` where more have it than one would expect.
    pub fn has_lock(&self, object: &str, lock: &CStr) -> io::Result<bool> {
        let object = text(object)?;
        let mut lists = [[0_u8; LOCKERS_BYTES]; 4];
        let mut lengths = [LOCKERS_BYTES; 4];
        let mut exclusive = 0;
        let [tag, clients, cookies, addresses] =
            lists.each_mut().map(|list| list.as_mut_ptr().cast());
        let [tag_length, clients_length, cookies_length, addresses_length] =
            lengths.each_mut().map(|length| &raw mut *length);
        // SAFETY: the pool is open; the lists have room for as many bytes as their lengths say, and outlive the call.
        let count = unsafe {
            (loaded().rados.rados_list_lockers)(
                self.io,
                object.as_ptr(),
                lock.as_ptr(),
                &raw mut exclusive,
                tag,
                tag_length,
                clients,
                clients_length,
                cookies,
                cookies_length,
                addresses,
                addresses_length,
            )
        };
        match checked(count as i64) {
            Ok(count) => Ok(count > 0),
            Err(error) if is_none(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
