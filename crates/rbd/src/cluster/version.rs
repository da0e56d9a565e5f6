//! The version of an object, and the number by which this process is named among those who watch one.

use std::io;
use std::ptr;

use super::{Pool, checked, text};
use crate::library::loaded;

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
}
