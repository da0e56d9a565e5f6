//! Who has a lock of an object.

use std::ffi::CStr;
use std::io;

use super::{Pool, checked, is_none, text};
use crate::library::loaded;

/// Room for a list of those who have locks: far more than hosts that read one file.
const LOCKERS_BYTES: usize = 16 * 1024;

/// A process that has a lock.
pub struct Locker {
    /// Its name in the cluster.
    pub client: String,
    /// What it calls its lock.
    pub cookie: String,
    /// Its address.
    pub address: String,
}

impl Pool {
    /// Who has a lock of this name of an object: nobody of one that is not there.
    ///
    /// # Errors
    /// The cluster's; `ERANGE` where more have it than one would expect.
    pub fn lockers(&self, object: &str, lock: &CStr) -> io::Result<Vec<Locker>> {
        let object = text(object)?;
        let mut lists = [const { [0_u8; LOCKERS_BYTES] }; 4];
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
        let count = match checked(count as i64) {
            Err(error) if is_none(&error) => return Ok(Vec::new()),
            count => count? as usize,
        };
        let texts = |list: &[u8]| -> Vec<String> {
            let texts = list.split(|byte| *byte == 0).take(count);
            texts.map(|text| String::from_utf8_lossy(text).into_owned()).collect()
        };
        let [_, clients, cookies, addresses] = &lists;
        let (clients, cookies, addresses) = (texts(clients), texts(cookies), texts(addresses));
        let lockers = clients.into_iter().zip(cookies).zip(addresses);
        let locker = |((client, cookie), address)| Locker { client, cookie, address };
        Ok(lockers.map(locker).collect())
    }
}
