//! A connection to a Ceph cluster, and a pool of it with its objects.

mod blocklist;
mod change;
mod lockers;
mod messenger;
mod version;

use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vmseal_api::datastore::Messenger;
use vmseal_secret::cephx::CephxKey;

use self::messenger::MESSENGER_OPTIONS;
use crate::in_flight;
use crate::library::{
    COMPARE_EQUAL, CREATE_IDEMPOTENT, IoContext, LOCK_MAY_RENEW, LoadError, NO_FLAGS, Rados, load,
    loaded,
};

pub(crate) use self::change::Change;

/// How long connecting may take: more than an election of monitors.
const CONNECT_SECONDS: &str = "30";

/// How long monitors may take to answer a command, and so to put an address on the blocklist when a lock is broken: as for connecting. What
/// OSDs are asked has no such limit (`rados_osd_op_timeout` is not set): requests of guests wait, and do not fail.
pub(crate) const MONITORS_SECONDS: u64 = 30;

/// The most bytes of requests in flight, and the most requests: more wait in the library, whatever image they are of. So there is room
/// for all that filters may ask for by channels, whose images are to wait for nobody else's, and 128 MiB for what comes by FUSE.
const BYTES_IN_FLIGHT: u64 = in_flight::BYTES_IN_FLIGHT + (128 << 20);
const REQUESTS_IN_FLIGHT: u64 = in_flight::REQUESTS_IN_FLIGHT + 1024;

/// How many keys of a directory are read at a time.
const KEYS_AT_A_TIME: u64 = 512;

/// Room for a cluster's fsid: a UUID as text, and the byte that ends it.
const FSID_BYTES: usize = 37;

/// The most bytes of an attribute.
const ATTRIBUTE_MAX: usize = 4096;

/// Which cluster, and as whom.
#[derive(Debug)]
pub struct Access {
    /// The monitors' addresses, as in `mon_host`.
    pub monitors: String,
    /// The user, `client.NAME`.
    pub user: String,
    /// Its key.
    pub key: CephxKey,
    /// How data goes over the network.
    pub messenger: Messenger,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The libraries.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// An option that the library does not take.
    #[error("Ceph does not take {option}: {error}")]
    Option {
        /// Which one.
        option: &'static str,
        /// Why.
        error: io::Error,
    },
    /// The cluster.
    #[error(
        "no connection to the Ceph cluster at {monitors} as {user}: {error}. Check the addresses, the user and its key, and that the cluster allows the messenger's mode"
    )]
    Connect {
        /// Its monitors.
        monitors: String,
        /// As whom.
        user: String,
        /// Why.
        error: io::Error,
    },
    /// The pool.
    #[error("the pool '{pool}' cannot be opened: {error}")]
    Pool {
        /// Its name.
        pool: String,
        /// Why.
        error: io::Error,
    },
}

/// A result of the library: a number that is not negative, or an error.
pub(crate) fn checked(result: impl Into<i64>) -> io::Result<u64> {
    let result = result.into();
    if result == -i64::from(libc::ESHUTDOWN) {
        fenced();
    }
    u64::try_from(result)
        .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)))
}

/// The exit code of a process that was fenced: `EX_TEMPFAIL` (sysexits.h).
const FENCED: i32 = 75;

/// The cluster takes nothing from this process any more: another host has taken an image of this one over, or an administrator has put it on
/// the blocklist. That is for good, so it ends: a successor has the other images again.
fn fenced() -> ! {
    tracing::error!(
        "the cluster has put this process on its blocklist: another host has taken over an image of it; it ends"
    );
    // SAFETY: ends the process; the library's threads may be anywhere.
    unsafe { libc::_exit(FENCED) }
}

/// A text for the library.
pub(crate) fn text(of: &str) -> io::Result<CString> {
    CString::new(of).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// A connection to a cluster.
pub struct Cluster(Rados);

// SAFETY: librados is made for use by several threads (rados/librados.h); a handle is an address.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl Cluster {
    /// Connects.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(access: &Access) -> Result<Arc<Self>, ConnectError> {
        let rados = &load()?.rados;
        let failed = |error| ConnectError::Connect {
            monitors: access.monitors.clone(),
            user: access.user.clone(),
            error,
        };
        let user = text(&access.user).map_err(failed)?;
        let mut handle = ptr::null_mut();
        // SAFETY: texts outlive the call, and the handle is written.
        let made =
            unsafe { (rados.rados_create2)(&raw mut handle, c"ceph".as_ptr(), user.as_ptr(), 0) };
        checked(made).map_err(failed)?;
        let cluster = Self(handle);
        cluster.configure(access)?;
        // SAFETY: the handle is open.
        checked(unsafe { (rados.rados_connect)(cluster.0) }).map_err(failed)?;
        Ok(Arc::new(cluster))
    }

    fn configure(&self, access: &Access) -> Result<(), ConnectError> {
        let messenger = access.messenger.name();
        let (bytes, requests) = (BYTES_IN_FLIGHT.to_string(), REQUESTS_IN_FLIGHT.to_string());
        let monitors_seconds = MONITORS_SECONDS.to_string();
        self.set("key", access.key.expose_c())?;
        for (option, value) in [
            ("mon_host", access.monitors.as_str()),
            // None of this machine: the key that is given counts.
            ("keyring", ""),
            (MESSENGER_OPTIONS[0], messenger),
            (MESSENGER_OPTIONS[1], messenger),
            ("client_mount_timeout", CONNECT_SECONDS),
            ("rados_mon_op_timeout", monitors_seconds.as_str()),
            ("objecter_inflight_op_bytes", bytes.as_str()),
            ("objecter_inflight_ops", requests.as_str()),
            // What is answered is durable; what guests have not flushed is nowhere else.
            ("rbd_cache", "false"),
            // The buffer of a write is free again when the call returns.
            ("rbd_disable_zero_copy_writes", "true"),
            // What is freed reads as zeroes, to the byte.
            ("rbd_skip_partial_discard", "false"),
            // Who only reads changes nothing: an image's header tells whether anybody has had its lock (`image_state`).
            ("rbd_atime_update_interval", "0"),
            // Who is taken a lock from cannot write any more.
            ("rbd_blocklist_on_break_lock", "true"),
            ("log_file", ""),
            ("log_to_stderr", "false"),
            ("admin_socket", ""),
        ] {
            let value = text(value).map_err(|error| ConnectError::Option { option, error })?;
            self.set(option, &value)?;
        }
        Ok(())
    }

    fn set(&self, option: &'static str, value: &CStr) -> Result<(), ConnectError> {
        let failed = |error| ConnectError::Option { option, error };
        let name = text(option).map_err(failed)?;
        let rados = &loaded().rados;
        // SAFETY: the handle is open, the texts outlive the call.
        checked(unsafe { (rados.rados_conf_set)(self.0, name.as_ptr(), value.as_ptr()) })
            .map_err(failed)?;
        Ok(())
    }

    /// This connection's own address, as locks and blocklists name it: `127.0.0.1:0/1234`.
    ///
    /// # Errors
    /// The library's.
    pub fn address(&self) -> io::Result<String> {
        let rados = &loaded().rados;
        let mut address = ptr::null_mut();
        // SAFETY: the handle is open; the address is written if the call succeeds, and is the caller's then.
        unsafe {
            checked((rados.rados_getaddrs)(self.0, &raw mut address))?;
            let owned = CStr::from_ptr(address).to_string_lossy().into_owned();
            (rados.rados_buffer_free)(address);
            Ok(without_version(&owned).to_owned())
        }
    }

    /// Which cluster it is, by its fsid. The monitors have said it when the connection was made: nobody is asked.
    ///
    /// # Errors
    /// The library's.
    pub fn fsid(&self) -> io::Result<String> {
        let mut told = [0_u8; FSID_BYTES];
        let start = told.as_mut_ptr().cast::<c_char>();
        // SAFETY: the handle is open, and the buffer outlives the call, which writes at most as many bytes as are said.
        let length = unsafe { (loaded().rados.rados_cluster_fsid)(self.0, start, FSID_BYTES) };
        let length = usize::try_from(checked(length)?).unwrap_or(FSID_BYTES).min(FSID_BYTES);
        let text = String::from_utf8_lossy(&told[..length]);
        Ok(text.trim_end_matches('\0').to_owned())
    }

    /// Asks a monitor; returns its answer.
    ///
    /// # Errors
    /// The monitor's; `ETIMEDOUT` where there is none within [`MONITORS_SECONDS`].
    pub(crate) fn command(&self, command: &str) -> io::Result<Vec<u8>> {
        let rados = &loaded().rados;
        let command = text(command)?;
        let mut commands = [command.as_ptr()];
        let (mut output, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the texts outlive the call; the output is the library's until it is freed.
        unsafe {
            let (list, none) = (commands.as_mut_ptr(), ptr::null_mut());
            let done = (rados.rados_mon_command)(
                self.0,
                list,
                1,
                ptr::null(),
                0,
                &raw mut output,
                &raw mut length,
                none,
                ptr::null_mut(),
            );
            let answer = match (output.is_null(), length) {
                (false, 1..) => std::slice::from_raw_parts(output.cast::<u8>(), length).to_vec(),
                _ => Vec::new(),
            };
            if !output.is_null() {
                (rados.rados_buffer_free)(output);
            }
            checked(done).map(|_| answer)
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: nothing uses the handle any more: pools hold the cluster.
        unsafe { (loaded().rados.rados_shutdown)(self.0) }
    }
}

/// A pool, or a namespace of one.
pub struct Pool {
    io: IoContext,
    cluster: Arc<Cluster>,
}

// SAFETY: as for a cluster. The namespace is set before the pool is shared.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

/// How an object is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// With others.
    Shared,
    /// Alone.
    Exclusive,
}

/// The name of the locks, and the cookie: a process has one lock of an object.
const LOCK: &CStr = c"vmseal.lock";

/// What is to be changed in the keys of an object, as one.
#[derive(Debug, Default)]
pub struct KeyChange<'a> {
    /// Keys that must not be there.
    pub absent: &'a [&'a str],
    /// Keys to set.
    pub set: &'a [(&'a str, &'a str)],
    /// Keys to remove.
    pub remove: &'a [&'a str],
}

impl Pool {
    /// Opens a pool of a cluster.
    ///
    /// # Errors
    /// [`ConnectError::Pool`].
    pub fn open(cluster: &Arc<Cluster>, pool: &str, namespace: &str) -> Result<Self, ConnectError> {
        let failed = |error| ConnectError::Pool { pool: pool.to_owned(), error };
        let (name, namespace) = (text(pool).map_err(failed)?, text(namespace).map_err(failed)?);
        let rados = &loaded().rados;
        let mut io = ptr::null_mut();
        // SAFETY: the cluster is connected; the texts outlive the calls.
        unsafe {
            checked((rados.rados_ioctx_create)(cluster.0, name.as_ptr(), &raw mut io))
                .map_err(failed)?;
            (rados.rados_ioctx_set_namespace)(io, namespace.as_ptr());
        }
        Ok(Self { io, cluster: Arc::clone(cluster) })
    }

    pub(crate) fn context(&self) -> IoContext {
        self.io
    }

    /// Reads from an object; returns how many bytes there were.
    ///
    /// # Errors
    /// `NotFound`; the cluster's.
    pub fn read(&self, object: &str, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let object = text(object)?;
        let (start, length) = (into.as_mut_ptr().cast::<c_char>(), into.len());
        // SAFETY: the pool is open, and the slice outlives the call.
        let read =
            unsafe { (loaded().rados.rados_read)(self.io, object.as_ptr(), start, length, offset) };
        checked(read).map(|count| count as usize)
    }

    /// Writes to an object, durably.
    ///
    /// # Errors
    /// The cluster's.
    pub fn write(&self, object: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let object = text(object)?;
        let (start, length) = (bytes.as_ptr().cast::<c_char>(), bytes.len());
        // SAFETY: as above.
        let written = unsafe {
            (loaded().rados.rados_write)(self.io, object.as_ptr(), start, length, offset)
        };
        checked(written).map(drop)
    }

    /// Makes an object this long; what it gets is zeroes.
    ///
    /// # Errors
    /// The cluster's.
    pub fn truncate(&self, object: &str, size: u64) -> io::Result<()> {
        let object = text(object)?;
        // SAFETY: the pool is open.
        checked(unsafe { (loaded().rados.rados_trunc)(self.io, object.as_ptr(), size) }).map(drop)
    }

    /// The length of an object and when it was last changed.
    ///
    /// # Errors
    /// `NotFound`; the cluster's.
    pub fn stat(&self, object: &str) -> io::Result<(u64, SystemTime)> {
        let object = text(object)?;
        let (mut size, mut changed) = (0, 0);
        let (size_to, changed_to) = (&raw mut size, &raw mut changed);
        // SAFETY: the pool is open, and both numbers are written.
        let told =
            unsafe { (loaded().rados.rados_stat)(self.io, object.as_ptr(), size_to, changed_to) };
        checked(told)?;
        Ok((size, UNIX_EPOCH + Duration::from_secs(u64::try_from(changed).unwrap_or(0))))
    }

    /// Removes an object; one that is not there is removed.
    ///
    /// # Errors
    /// The cluster's.
    pub fn remove(&self, object: &str) -> io::Result<()> {
        let object = text(object)?;
        // SAFETY: the pool is open.
        let removed = unsafe { (loaded().rados.rados_remove)(self.io, object.as_ptr()) };
        match checked(removed) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// An attribute of an object; none where there is no object, or it has none of that name.
    ///
    /// # Errors
    /// The cluster's.
    pub fn attribute(&self, object: &str, name: &str) -> io::Result<Option<String>> {
        let (object, name) = (text(object)?, text(name)?);
        let mut value = vec![0; ATTRIBUTE_MAX];
        let start = value.as_mut_ptr().cast::<c_char>();
        // SAFETY: the pool is open, and the buffer outlives the call.
        let got = unsafe {
            let get = loaded().rados.rados_getxattr;
            get(self.io, object.as_ptr(), name.as_ptr(), start, ATTRIBUTE_MAX)
        };
        match checked(got) {
            Ok(length) => {
                value.truncate(length as usize);
                Ok(Some(String::from_utf8_lossy(&value).into_owned()))
            }
            Err(error) if is_none(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets an attribute; the object is made if it is not there.
    ///
    /// # Errors
    /// The cluster's.
    pub fn set_attribute(&self, object: &str, name: &str, value: &str) -> io::Result<()> {
        self.set_attribute_with(object, (name, value), NO_FLAGS)
    }

    /// The same with flags of the library (`LIBRADOS_OPERATION_...`).
    pub(crate) fn set_attribute_with(
        &self,
        object: &str,
        (name, value): (&str, &str),
        flags: c_int,
    ) -> io::Result<()> {
        let (object, name, value) = (text(object)?, text(name)?, text(value)?);
        let rados = &loaded().rados;
        let change = Change::new();
        let bytes = value.as_bytes();
        // SAFETY: the operation is open, the texts outlive the calls.
        unsafe {
            (rados.rados_write_op_create)(change.operation(), CREATE_IDEMPOTENT, ptr::null());
            let start = bytes.as_ptr().cast::<c_char>();
            (rados.rados_write_op_setxattr)(change.operation(), name.as_ptr(), start, bytes.len());
        }
        change.carry_out_with(self, &object, flags)
    }

    /// Makes an object, if it is not there.
    ///
    /// # Errors
    /// The cluster's.
    pub fn make(&self, object: &str) -> io::Result<()> {
        let object = text(object)?;
        let change = Change::new();
        // SAFETY: the operation is open.
        unsafe {
            let create = loaded().rados.rados_write_op_create;
            create(change.operation(), CREATE_IDEMPOTENT, ptr::null());
        }
        change.carry_out(self, &object)
    }

    /// Changes the keys of an object, all or none; the object is made if it is not there.
    ///
    /// # Errors
    /// `AlreadyExists` where a key is there that must not be; the cluster's.
    pub fn change_keys(&self, object: &str, what: &KeyChange<'_>) -> io::Result<()> {
        let object = text(object)?;
        let texts = |of: &[&str]| of.iter().map(|one| text(one)).collect::<io::Result<Vec<_>>>();
        let (absent, remove) = (texts(what.absent)?, texts(what.remove)?);
        let keys = what.set.iter().map(|(key, _)| text(key)).collect::<io::Result<Vec<_>>>()?;
        let key_starts: Vec<_> = keys.iter().map(|key| key.as_ptr()).collect();
        let values: Vec<_> =
            what.set.iter().map(|(_, value)| value.as_ptr().cast::<c_char>()).collect();
        let lengths: Vec<_> = what.set.iter().map(|(_, value)| value.len()).collect();
        let removed: Vec<_> = remove.iter().map(|key| key.as_ptr()).collect();
        let mut compared = vec![0; absent.len()];
        let rados = &loaded().rados;
        let change = Change::new();
        // SAFETY: the operation is open; all texts and numbers outlive its end.
        unsafe {
            (rados.rados_write_op_create)(change.operation(), CREATE_IDEMPOTENT, ptr::null());
            for (key, result) in absent.iter().zip(&mut compared) {
                // A key that is not there compares as an empty value; none of ours is empty.
                let (nothing, to) = (c"".as_ptr(), &raw mut *result);
                let compare = rados.rados_write_op_omap_cmp;
                compare(change.operation(), key.as_ptr(), COMPARE_EQUAL, nothing, 0, to);
            }
            if !removed.is_empty() {
                (rados.rados_write_op_omap_rm_keys)(
                    change.operation(),
                    removed.as_ptr(),
                    removed.len(),
                );
            }
            if !key_starts.is_empty() {
                let (keys, values, lengths) =
                    (key_starts.as_ptr(), values.as_ptr(), lengths.as_ptr());
                (rados.rados_write_op_omap_set)(
                    change.operation(),
                    keys,
                    values,
                    lengths,
                    what.set.len(),
                );
            }
        }
        let done = change.carry_out(self, &object);
        drop((keys, remove, compared));
        match done {
            Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => {
                Err(io::ErrorKind::AlreadyExists.into())
            }
            done => done,
        }
    }

    /// The value of a key of an object; none where there is no object, or it has no such key.
    ///
    /// # Errors
    /// The cluster's.
    pub fn key(&self, object: &str, key: &str) -> io::Result<Option<String>> {
        let key = text(key)?;
        let keys = [key.as_ptr()];
        let found = self.read_keys(object, |rados, read, list, result| {
            // SAFETY: the operation is open; the keys outlive its end.
            unsafe {
                let get = rados.rados_read_op_omap_get_vals_by_keys;
                get(read, keys.as_ptr(), keys.len(), list, result);
            }
        })?;
        Ok(found.into_iter().next().map(|(_, value)| value))
    }

    /// All keys of an object with their values; none where there is no object.
    ///
    /// # Errors
    /// The cluster's.
    pub fn keys(&self, object: &str) -> io::Result<Vec<(String, String)>> {
        let mut all: Vec<(String, String)> = Vec::new();
        loop {
            let after = text(all.last().map_or("", |(key, _)| key))?;
            let mut more = 0;
            let (after, more_to) = (&after, &raw mut more);
            let page = self.read_keys(object, |rados, read, list, result| {
                // SAFETY: the operation is open; what it reads and writes outlives its end.
                unsafe {
                    let get = rados.rados_read_op_omap_get_vals2;
                    let (from, prefix) = (after.as_ptr(), c"".as_ptr());
                    get(read, from, prefix, KEYS_AT_A_TIME, list, more_to, result);
                }
            })?;
            let ended = page.is_empty() || more == 0;
            all.extend(page);
            if ended {
                return Ok(all);
            }
        }
    }

    /// Locks an object, or renews the lock that this process has of it; false while another one has a lock that is in the way.
    ///
    /// # Errors
    /// The cluster's.
    pub fn lock(&self, object: &str, kind: Held, lease: Duration) -> io::Result<bool> {
        let object = text(object)?;
        let (name, cookie, none) = (LOCK.as_ptr(), LOCK.as_ptr(), c"".as_ptr());
        let seconds = i64::try_from(lease.as_secs()).unwrap_or(i64::MAX);
        let mut lease = libc::timeval { tv_sec: seconds, tv_usec: 0 };
        let (rados, lease) = (&loaded().rados, &raw mut lease);
        // SAFETY: the pool is open, the texts and the time outlive the call.
        let locked = unsafe {
            match kind {
                Held::Exclusive => {
                    let lock = rados.rados_lock_exclusive;
                    lock(self.io, object.as_ptr(), name, cookie, none, lease, LOCK_MAY_RENEW)
                }
                Held::Shared => {
                    let lock = rados.rados_lock_shared;
                    lock(self.io, object.as_ptr(), name, cookie, none, none, lease, LOCK_MAY_RENEW)
                }
            }
        };
        match checked(locked) {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives a lock up; one that has run out is given up.
    ///
    /// # Errors
    /// The cluster's.
    pub fn unlock(&self, object: &str) -> io::Result<()> {
        let object = text(object)?;
        let unlock = loaded().rados.rados_unlock;
        // SAFETY: the pool is open, the texts outlive the call.
        match checked(unsafe { unlock(self.io, object.as_ptr(), LOCK.as_ptr(), LOCK.as_ptr()) }) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Breaks the locks of an object that processes of these addresses have, which are dead.
    ///
    /// # Errors
    /// The cluster's.
    pub fn break_locks_of(&self, object: &str, addresses: &[String]) -> io::Result<()> {
        if addresses.is_empty() {
            return Ok(());
        }
        for locker in self.lockers(object, LOCK)? {
            if !addresses.contains(&without_version(&locker.address).to_owned()) {
                continue;
            }
            let (object, client, cookie) =
                (text(object)?, text(&locker.client)?, text(&locker.cookie)?);
            let (client, cookie) = (client.as_ptr(), cookie.as_ptr());
            let break_lock = loaded().rados.rados_break_lock;
            // SAFETY: the pool is open, the texts outlive the call.
            let broken =
                unsafe { break_lock(self.io, object.as_ptr(), LOCK.as_ptr(), client, cookie) };
            checked(broken)?;
        }
        Ok(())
    }

    fn read_keys(
        &self,
        object: &str,
        ask: impl FnOnce(
            &crate::library::Librados,
            crate::library::ReadOperation,
            *mut crate::library::KeyIterator,
            *mut i32,
        ),
    ) -> io::Result<Vec<(String, String)>> {
        let object = text(object)?;
        let rados = &loaded().rados;
        let (mut list, mut result) = (ptr::null_mut(), 0);
        // SAFETY: the operation is released at the end; what it writes to outlives it.
        let done = unsafe {
            let read = (rados.rados_create_read_op)();
            ask(rados, read, &raw mut list, &raw mut result);
            let done = (rados.rados_read_op_operate)(read, self.io, object.as_ptr(), 0);
            (rados.rados_release_read_op)(read);
            done
        };
        let mut found = Vec::new();
        let mut reading = checked(done).and_then(|_| checked(result)).map(drop);
        while reading.is_ok() && !list.is_null() {
            let (mut key, mut value, mut length) = (ptr::null_mut(), ptr::null_mut(), 0);
            // SAFETY: the list is open; keys and values live as long as it.
            unsafe {
                let next = rados.rados_omap_get_next;
                reading =
                    checked(next(list, &raw mut key, &raw mut value, &raw mut length)).map(drop);
                if key.is_null() {
                    break;
                }
                let bytes = match value.is_null() {
                    true => &[],
                    false => std::slice::from_raw_parts(value.cast::<u8>(), length),
                };
                let key = CStr::from_ptr(key).to_string_lossy().into_owned();
                found.push((key, String::from_utf8_lossy(bytes).into_owned()));
            }
        }
        if !list.is_null() {
            // SAFETY: nothing of the list is used any more.
            unsafe { (rados.rados_omap_get_end)(list) };
        }
        match reading {
            Ok(()) => Ok(found),
            Err(error) if is_none(&error) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

/// An address without the protocol's version in front: `v2:127.0.0.1:0/1234`.
fn without_version(address: &str) -> &str {
    match address.split_once(':') {
        Some((version, rest)) if version.starts_with('v') => rest,
        _ => address,
    }
}

/// Whether there is no such object, or no such attribute.
fn is_none(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODATA))
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more.
        unsafe { (loaded().rados.rados_ioctx_destroy)(self.io) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_results_are_error_numbers() {
        assert_eq!(checked(7).unwrap(), 7);
        assert_eq!(checked(-libc::ENOENT).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(checked(i64::MIN + 1).unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(without_version("v2:127.0.0.1:0/12"), "127.0.0.1:0/12");
        assert_eq!(without_version("127.0.0.1:0/12"), "127.0.0.1:0/12");
        assert_eq!(text("a\0b").unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
