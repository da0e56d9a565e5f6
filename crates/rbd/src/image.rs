//! An RBD image that is open. Reads and writes are asynchronous: librbd does them in its own few threads, which call back; no thread
//! waits for a request.

mod header;

use std::ffi::{c_int, c_void};
use std::io;
use std::ops::{ControlFlow, Range};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libc::{size_t, ssize_t};

use crate::buffers;
use crate::cluster::{Pool, checked, text};
use crate::library::{
    self, Completion, FEATURE_STRIPING, FEATURES, FEATURES_OF_MAP, FLAGS_OF_WRONG_MAP,
    IMAGE_OPTION_DATA_POOL, IMAGE_OPTION_FEATURES, IMAGE_OPTION_ORDER, IMAGE_OPTION_STRIPE_COUNT,
    IMAGE_OPTION_STRIPE_UNIT, LOCK_EXCLUSIVE, ZEROES_TAKE_ROOM, loaded,
};
use crate::parts::Parts;

pub use self::header::Header;

/// How many owners a lock may have: an exclusive one has one.
const OWNERS_MAX: usize = 8;

/// The largest object of an image, in bytes: librbd makes none of a higher order than 25.
const OBJECT_MAX: u64 = 1 << 25;

/// How a new image is stored.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// The pool of its data, where that is another one: erasure-coded pools hold no names and no headers.
    pub data_pool: Option<String>,
    /// The size of its objects, as a power of two; none: the cluster's.
    pub object_order: Option<u8>,
    /// How many bytes are in one object before the next one follows, and how many objects they go around; none: one object after another.
    pub striping: Option<(u64, u64)>,
}

/// An open image.
pub struct Image {
    handle: library::Image,
    size: AtomicU64,
    /// Whether its bytes go around several objects.
    striped: bool,
    /// How many bytes are in one object before the next one follows: all that an object has, unless it is striped.
    unit: u64,
    /// Its header just before it was locked here; none of one that is open for reading alone.
    found: Option<Header>,
    /// Whether anything of it was changed here.
    written: AtomicBool,
    /// The image is closed before its pool.
    pool: Arc<Pool>,
}

// SAFETY: librbd is made for use by several threads (rbd/librbd.h); the handle is an address.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

/// What is done when an operation has ended; it gets the buffer of a read back.
type Done = Box<dyn FnOnce(io::Result<u64>, Vec<u8>) + Send>;

/// An operation in flight.
struct InFlight {
    buffer: Vec<u8>,
    done: Done,
}

extern "C" fn when_done(completion: Completion, context: *mut c_void) {
    let rbd = &loaded().rbd;
    // SAFETY: librbd calls once, with the context that `Image::start` made and a completion that is open.
    let (result, in_flight) = unsafe {
        let result: ssize_t = (rbd.rbd_aio_get_return_value)(completion);
        (rbd.rbd_aio_release)(completion);
        (result, Box::from_raw(context.cast::<InFlight>()))
    };
    let InFlight { buffer, done } = *in_flight;
    done(checked(result as i64), buffer);
}

/// Makes an image.
///
/// # Errors
/// The cluster's.
pub fn make(pool: &Pool, name: &str, size: u64, layout: &Layout) -> io::Result<()> {
    let rbd = &loaded().rbd;
    let name = text(name)?;
    let data_pool = layout.data_pool.as_deref().map(text).transpose()?;
    let mut options = ptr::null_mut();
    // SAFETY: options are destroyed below, and the texts outlive the calls.
    unsafe {
        (rbd.rbd_image_options_create)(&raw mut options);
        let set = rbd.rbd_image_options_set_uint64;
        let striping = if layout.striping.is_some() { FEATURE_STRIPING } else { 0 };
        let mut result = set(options, IMAGE_OPTION_FEATURES, FEATURES | striping);
        if let (0.., Some(order)) = (result, layout.object_order) {
            result = set(options, IMAGE_OPTION_ORDER, order.into());
        }
        if let (0.., Some((unit, _))) = (result, layout.striping) {
            result = set(options, IMAGE_OPTION_STRIPE_UNIT, unit);
        }
        if let (0.., Some((_, count))) = (result, layout.striping) {
            result = set(options, IMAGE_OPTION_STRIPE_COUNT, count);
        }
        if let (0.., Some(pool)) = (result, &data_pool) {
            let set = rbd.rbd_image_options_set_string;
            result = set(options, IMAGE_OPTION_DATA_POOL, pool.as_ptr());
        }
        if result >= 0 {
            result = (rbd.rbd_create4)(pool.context(), name.as_ptr(), size, options);
        }
        (rbd.rbd_image_options_destroy)(options);
        checked(result).map(drop)
    }
}

/// Removes an image; one that is not there is removed.
///
/// # Errors
/// `ResourceBusy` while somebody has it open; the cluster's.
pub fn remove(pool: &Pool, name: &str) -> io::Result<()> {
    let name = text(name)?;
    // SAFETY: the pool is open.
    match checked(unsafe { (loaded().rbd.rbd_remove)(pool.context(), name.as_ptr()) }) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Image {
    /// Opens an image for reading alone.
    ///
    /// # Errors
    /// The cluster's.
    pub fn open(pool: &Arc<Pool>, name: &str) -> io::Result<Self> {
        Self::open_as(pool, name, loaded().rbd.rbd_open_read_only)
    }

    /// Opens an image for writing, with its exclusive lock. `predecessors` are the addresses of processes that are known to be
    /// dead: a lock of theirs is broken, and nothing that they have under way can land any more.
    ///
    /// # Errors
    /// `ResourceBusy` while another process has the lock; the cluster's.
    pub fn open_to_write(
        pool: &Arc<Pool>,
        name: &str,
        predecessors: &[String],
    ) -> io::Result<Self> {
        let mut image = Self::open_as(pool, name, loaded().rbd.rbd_open)?;
        let rbd = &loaded().rbd;
        let owners = if predecessors.is_empty() { Vec::new() } else { image.lock_owners()? };
        for owner in owners.iter().filter(|owner| predecessors.contains(owner)) {
            tracing::warn!(image = name, %owner, "breaking the lock of a process that is dead");
            image.break_lock(owner)?;
        }
        let found = image.look();
        // SAFETY: the image is open.
        let locked = checked(unsafe { (rbd.rbd_lock_acquire)(image.handle, LOCK_EXCLUSIVE) });
        match locked {
            // The owner does not give it away.
            Err(error) if error.raw_os_error() == Some(libc::EROFS) => {
                Err(io::Error::from_raw_os_error(libc::EBUSY))
            }
            Err(error) => Err(error),
            Ok(_) => {
                // Who had the lock until now may have made it longer since it was opened here.
                image.learn_size()?;
                image.found = found
                    .and_then(|look| image.header_until_locked(look))
                    .inspect_err(|error| tracing::info!(image = name, %error, "whether anybody has written to an image is not known"))
                    .ok();
                Ok(image)
            }
        }
    }

    /// Its header just before it was locked here, where nothing of it was changed here since, and others did not have it open, too; none of one
    /// that is open for reading alone.
    #[must_use]
    pub fn found(&self) -> Option<&Header> {
        self.found.as_ref().filter(|_| !self.is_written())
    }

    /// Whether anything of it was changed here.
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.written.load(Ordering::Acquire)
    }

    /// Something of it is about to be changed.
    fn writes(&self) {
        // Looked at first: the threads of busy queues share what they only read.
        if !self.written.load(Ordering::Relaxed) {
            self.written.store(true, Ordering::Release);
        }
    }

    /// Takes an image from all other processes that have its lock, dead or not: the cluster takes nothing from them any more, what they have
    /// under way included. `own` is the address of this process, which keeps what it has. Returns the addresses of the others.
    ///
    /// # Errors
    /// The cluster's.
    pub fn take_from_others(pool: &Arc<Pool>, name: &str, own: &str) -> io::Result<Vec<String>> {
        // Open to be written, and nothing is written: it gets no lock by that. Of one that is open for reading alone no lock can be broken.
        let image = match Self::open_as(pool, name, loaded().rbd.rbd_open) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            opened => opened?,
        };
        let mut others = image.lock_owners()?;
        others.retain(|owner| owner != own);
        for owner in &others {
            tracing::warn!(image = name, %owner, "taking an image from another host");
            image.break_lock(owner)?;
        }
        Ok(others)
    }

    /// Breaks the lock of another process, whose address is on the cluster's blocklist before that. One that it has given up is broken.
    fn break_lock(&self, owner: &str) -> io::Result<()> {
        self.pool.put_on_blocklist(owner)?;
        let owner = text(owner)?;
        let break_lock = loaded().rbd.rbd_lock_break;
        // SAFETY: the image is open, the text outlives the call.
        match checked(unsafe { break_lock(self.handle, LOCK_EXCLUSIVE, owner.as_ptr()) }) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn open_as(
        pool: &Arc<Pool>,
        name: &str,
        open: unsafe extern "C" fn(
            library::IoContext,
            *const std::ffi::c_char,
            *mut library::Image,
            *const std::ffi::c_char,
        ) -> c_int,
    ) -> io::Result<Self> {
        let name = text(name)?;
        let (mut handle, mut around, mut unit) = (ptr::null_mut(), 1, 1);
        // SAFETY: the pool is open; the handle is written if the call succeeds.
        checked(unsafe { open(pool.context(), name.as_ptr(), &raw mut handle, ptr::null()) })?;
        let size = AtomicU64::new(0);
        let (pool, written) = (Arc::clone(pool), AtomicBool::new(false));
        let mut image = Self { handle, size, striped: false, unit, found: None, written, pool };
        image.learn_size()?;
        // SAFETY: the image is open; the count is written.
        checked(unsafe { (loaded().rbd.rbd_get_stripe_count)(handle, &raw mut around) })?;
        image.striped = around > 1;
        // SAFETY: as above.
        checked(unsafe { (loaded().rbd.rbd_get_stripe_unit)(image.handle, &raw mut unit) })?;
        image.unit = unit.max(1);
        Ok(image)
    }

    /// Whether its bytes go around several objects. Where its data is, each object must be asked then: the map of objects says it of whole
    /// ones alone.
    #[must_use]
    pub fn is_striped(&self) -> bool {
        self.striped
    }

    /// Asks how long it is.
    fn learn_size(&self) -> io::Result<()> {
        let mut size = 0;
        // SAFETY: the image is open; the size is written.
        checked(unsafe { (loaded().rbd.rbd_get_size)(self.handle, &raw mut size) })?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    /// The addresses of those that have its lock.
    fn lock_owners(&self) -> io::Result<Vec<String>> {
        let rbd = &loaded().rbd;
        let (mut mode, mut count) = (LOCK_EXCLUSIVE, OWNERS_MAX);
        let mut owners = [ptr::null_mut(); OWNERS_MAX];
        let list = owners.as_mut_ptr();
        // SAFETY: the image is open, and the list has room for as many as it says.
        let asked =
            unsafe { (rbd.rbd_lock_get_owners)(self.handle, &raw mut mode, list, &raw mut count) };
        match checked(asked) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        let told = owners[..count.min(OWNERS_MAX)].iter();
        // SAFETY: librbd has filled as many as it says; they are texts until they are given back.
        let told = told.map(|owner| unsafe {
            std::ffi::CStr::from_ptr(*owner).to_string_lossy().into_owned()
        });
        let told = told.collect();
        // SAFETY: they are not used any more.
        unsafe { (rbd.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(told)
    }

    /// Its size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Makes it this long; what it gets is zeroes.
    ///
    /// # Errors
    /// The cluster's.
    pub fn resize(&self, size: u64) -> io::Result<()> {
        self.writes();
        // SAFETY: the image is open.
        checked(unsafe { (loaded().rbd.rbd_resize)(self.handle, size) })?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }

    /// Notes something beside it, for `rbd image-meta list`. It must be open to be written.
    ///
    /// # Errors
    /// The cluster's.
    pub fn set_metadata(&self, key: &str, value: &str) -> io::Result<()> {
        let (key, value) = (text(key)?, text(value)?);
        let set = loaded().rbd.rbd_metadata_set;
        // SAFETY: the image is open, the texts outlive the call.
        checked(unsafe { set(self.handle, key.as_ptr(), value.as_ptr()) }).map(drop)
    }

    /// What is noted beside it under a key; none where nothing is.
    ///
    /// # Errors
    /// The cluster's; `ERANGE` where it is longer than `length_max` bytes.
    pub fn metadata(&self, key: &str, length_max: usize) -> io::Result<Option<String>> {
        let key = text(key)?;
        // With the zero byte behind it.
        let mut value = vec![0_u8; length_max + 1];
        let mut length = value.len();
        let (start, get) = (value.as_mut_ptr().cast(), loaded().rbd.rbd_metadata_get);
        // SAFETY: the image is open; the buffer has room for as many bytes as the length says, and both outlive the call.
        match checked(unsafe { get(self.handle, key.as_ptr(), start, &raw mut length) }) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            got => got?,
        };
        value.truncate(value.iter().position(|byte| *byte == 0).unwrap_or(length_max));
        Ok(Some(String::from_utf8_lossy(&value).into_owned()))
    }

    /// Removes what is noted beside it under a key.
    ///
    /// # Errors
    /// `NotFound` where nothing is; the cluster's.
    pub fn remove_metadata(&self, key: &str) -> io::Result<()> {
        let (key, remove) = (text(key)?, loaded().rbd.rbd_metadata_remove);
        // SAFETY: the image is open, the text outlives the call.
        checked(unsafe { remove(self.handle, key.as_ptr()) }).map(drop)
    }

    /// Writes at once.
    ///
    /// # Errors
    /// The cluster's.
    pub fn write_all(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.writes();
        let (start, length) = (bytes.as_ptr().cast(), bytes.len());
        // SAFETY: the image is open, and the slice outlives the call.
        let written = unsafe { (loaded().rbd.rbd_write)(self.handle, offset, length, start) };
        checked(written as i64).map(drop)
    }

    /// Flushes at once.
    ///
    /// # Errors
    /// The cluster's.
    pub fn flush_now(&self) -> io::Result<()> {
        // SAFETY: the image is open.
        checked(unsafe { (loaded().rbd.rbd_flush)(self.handle) }).map(drop)
    }

    /// Reads `length` bytes.
    pub fn read(
        &self,
        offset: u64,
        length: usize,
        done: impl FnOnce(io::Result<&[u8]>) + Send + 'static,
    ) {
        let done = move |result: io::Result<u64>, buffer: Vec<u8>| match result {
            Ok(count) => {
                done(Ok(&buffer[..buffer.len().min(count as usize)]));
                buffers::give(buffer);
            }
            Err(error) => done(Err(error)),
        };
        let handle = self.handle;
        self.start(buffers::take(length), Box::new(done), |buffer, completion| {
            let (start, length) = (buffer.as_mut_ptr().cast(), buffer.len());
            // SAFETY: the buffer is the operation's until it is done.
            unsafe { (loaded().rbd.rbd_aio_read)(handle, offset, length, start, completion) }
        });
    }

    /// Writes; the bytes are not needed any more when this returns.
    pub fn write(
        &self,
        offset: u64,
        bytes: &[u8],
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) {
        self.writes();
        let (handle, start, length) = (self.handle, bytes.as_ptr().cast(), bytes.len());
        let done = |result: io::Result<u64>, _| done(result.map(drop));
        self.start(Vec::new(), Box::new(done), |_, completion| {
            // SAFETY: librbd copies the bytes before it returns (`rbd_disable_zero_copy_writes`).
            unsafe { (loaded().rbd.rbd_aio_write)(handle, offset, length, start, completion) }
        });
    }

    /// Reads into memory of others, as much as its parts have; `done` gets how much was read.
    pub fn read_into(
        &self,
        offset: u64,
        parts: Parts,
        done: impl FnOnce(io::Result<u64>) + Send + 'static,
    ) {
        let (handle, (vectors, count)) = (self.handle, parts.vectors());
        let done = move |result: io::Result<u64>, _| {
            drop(parts);
            done(result);
        };
        self.start(Vec::new(), Box::new(done), |_, completion| {
            // SAFETY: librbd uses the vectors, and the memory that they name, until the operation is done; the parts live as long.
            unsafe { (loaded().rbd.rbd_aio_readv)(handle, vectors, count, offset, completion) }
        });
    }

    /// Writes what is in memory of others.
    pub fn write_from(
        &self,
        offset: u64,
        parts: Parts,
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) {
        self.writes();
        let (handle, (vectors, count)) = (self.handle, parts.vectors());
        let done = move |result: io::Result<u64>, _| {
            drop(parts);
            done(result.map(drop));
        };
        self.start(Vec::new(), Box::new(done), |_, completion| {
            // SAFETY: librbd uses the vectors, and the memory that they name, at most until the operation is done; the parts live as
            // long. It copies the bytes before it returns (`rbd_disable_zero_copy_writes`), unless the pool or the image is configured
            // otherwise (`rbd config image set`), which goes before what the process says.
            unsafe { (loaded().rbd.rbd_aio_writev)(handle, vectors, count, offset, completion) }
        });
    }

    /// In how many objects a part is, at most.
    #[must_use]
    pub fn objects(&self, part: &Range<u64>) -> u64 {
        touched(part, self.unit)
    }

    /// Makes what has been answered durable.
    pub fn flush(&self, done: impl FnOnce(io::Result<()>) + Send + 'static) {
        let handle = self.handle;
        let done = |result: io::Result<u64>, _| done(result.map(drop));
        self.start(Vec::new(), Box::new(done), |_, completion| {
            // SAFETY: the image is open.
            unsafe { (loaded().rbd.rbd_aio_flush)(handle, completion) }
        });
    }

    /// Makes a part zeroes, and holes where it can, unless they are to take room.
    pub fn write_zeroes(
        &self,
        part: Range<u64>,
        take_room: bool,
        done: impl FnOnce(io::Result<()>) + Send + 'static,
    ) {
        self.writes();
        let (handle, length) = (self.handle, part.end.saturating_sub(part.start) as size_t);
        let flags = if take_room { ZEROES_TAKE_ROOM } else { 0 };
        let done = |result: io::Result<u64>, _| done(result.map(drop));
        self.start(Vec::new(), Box::new(done), |_, completion| {
            let write_zeroes = loaded().rbd.rbd_aio_write_zeroes;
            // SAFETY: the image is open.
            unsafe { write_zeroes(handle, part.start, length, completion, flags, 0) }
        });
    }

    /// Starts an operation; `done` is called once, also where it cannot be started.
    fn start(
        &self,
        buffer: Vec<u8>,
        done: Done,
        submit: impl FnOnce(&mut Vec<u8>, Completion) -> c_int,
    ) {
        let rbd = &loaded().rbd;
        let in_flight = Box::into_raw(Box::new(InFlight { buffer, done }));
        let mut completion = ptr::null_mut();
        // SAFETY: the context is given up to the callback if the operation starts, and taken back here if not. Its buffer
        // does not move: only the callback takes the box.
        unsafe {
            let create = rbd.rbd_aio_create_completion;
            let mut started = create(in_flight.cast(), when_done, &raw mut completion);
            if started >= 0 {
                started = submit(&mut (*in_flight).buffer, completion);
                if started >= 0 {
                    return;
                }
                (rbd.rbd_aio_release)(completion);
            }
            let InFlight { buffer, done } = *Box::from_raw(in_flight);
            done(checked(started), buffer);
        }
    }

    /// The parts of `within` that have data, in order; holes within an object do not show where one object follows another.
    ///
    /// # Errors
    /// The cluster's.
    pub fn extents(&self, within: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        // Of a striped one each object is asked, and librbd says the right places.
        let asked = if self.striped { within.clone() } else { from_an_object(&within) };
        self.each_extent(asked, |part| {
            let part = part.start.max(within.start)..part.end;
            if part.is_empty() {
                return ControlFlow::Continue(());
            }
            match found.last_mut().filter(|last| last.end == part.start) {
                Some(last) => last.end = part.end,
                None => found.push(part),
            }
            ControlFlow::Continue(())
        })?;
        Ok(in_order(found))
    }

    /// How much is in objects that exist, in bytes; each of them counts whole. None where the image has no map of them that is right: each
    /// object would be asked for, which takes minutes.
    ///
    /// # Errors
    /// The cluster's.
    pub fn room(&self) -> io::Result<Option<u64>> {
        let (features, mut flags) = (self.features()?, 0);
        // SAFETY: the image is open; the flags are written.
        checked(unsafe { (loaded().rbd.rbd_get_flags)(self.handle, &raw mut flags) })?;
        if !has_map(features, flags) {
            return Ok(None);
        }
        let mut room = 0;
        self.each_extent(0..self.size(), |part| {
            room += part.end - part.start;
            ControlFlow::Continue(())
        })?;
        Ok(Some(room))
    }

    fn features(&self) -> io::Result<u64> {
        let mut features = 0;
        // SAFETY: the image is open; the features are written.
        checked(unsafe { (loaded().rbd.rbd_get_features)(self.handle, &raw mut features) })?;
        Ok(features)
    }

    fn each_extent(
        &self,
        within: Range<u64>,
        mut each: impl FnMut(Range<u64>) -> ControlFlow<()>,
    ) -> io::Result<()> {
        let end = within.end.min(self.size());
        if within.start >= end {
            return Ok(());
        }
        let mut each: &mut dyn FnMut(Range<u64>) -> ControlFlow<()> = &mut each;
        let context = (&raw mut each).cast::<c_void>();
        let iterate = loaded().rbd.rbd_diff_iterate2;
        let (start, length) = (within.start, end - within.start);
        // Asked for whole objects, librbd says where they are by their own offsets, which are not those of the image where it is striped.
        let whole = u8::from(!self.striped);
        // SAFETY: the image is open; the context outlives the call, which alone uses it.
        let done =
            unsafe { iterate(self.handle, ptr::null(), start, length, 1, whole, extent, context) };
        match checked(done) {
            Err(error) if error.raw_os_error() == Some(libc::ECANCELED) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Ok(()),
        }
    }
}

/// The same range from where an object begins, whatever the size of objects. Asked from within an object, librbd before Ceph 16.2.8 says that
/// its data is further behind (tracker.ceph.com/issues/53784): a hole would be told where data is.
fn from_an_object(within: &Range<u64>) -> Range<u64> {
    within.start / OBJECT_MAX * OBJECT_MAX..within.end
}

/// Parts in the order of the image: objects that bytes go around are told one after the other.
fn in_order(mut parts: Vec<Range<u64>>) -> Vec<Range<u64>> {
    parts.sort_unstable_by_key(|part| part.start);
    let mut ordered: Vec<Range<u64>> = Vec::with_capacity(parts.len());
    for part in parts {
        match ordered.last_mut().filter(|last| last.end >= part.start) {
            Some(last) => last.end = last.end.max(part.end),
            None => ordered.push(part),
        }
    }
    ordered
}

/// How many pieces of `unit` bytes a part touches.
fn touched(part: &Range<u64>, unit: u64) -> u64 {
    part.end.div_ceil(unit).saturating_sub(part.start / unit)
}

/// Whether an image has a map of its objects that is right.
fn has_map(features: u64, flags: u64) -> bool {
    features & FEATURES_OF_MAP == FEATURES_OF_MAP && flags & FLAGS_OF_WRONG_MAP == 0
}

extern "C" fn extent(offset: u64, length: size_t, exists: c_int, context: *mut c_void) -> c_int {
    // SAFETY: the context is what `each_extent` passed, which waits for the end of the iteration.
    let each = unsafe { &mut *context.cast::<&mut dyn FnMut(Range<u64>) -> ControlFlow<()>>() };
    if exists == 0 {
        return 0;
    }
    match each(offset..offset + length as u64) {
        ControlFlow::Continue(()) => 0,
        ControlFlow::Break(()) => -libc::ECANCELED,
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more; librbd waits for what is in flight.
        let closed = unsafe { (loaded().rbd.rbd_close)(self.handle) };
        if let Err(error) = checked(closed) {
            tracing::warn!(%error, "an image was not closed cleanly");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_striped_images_are_put_in_order() {
        let told = vec![0..4, 8..12, 4..8, 20..24, 12..14];
        assert_eq!(in_order(told), [0..14, 20..24]);
        assert_eq!(in_order(Vec::new()), Vec::<Range<u64>>::new());
    }

    #[test]
    fn extents_are_asked_for_from_the_beginning_of_an_object_of_any_size() {
        for (within, expected) in [
            (0..5, 0..5),
            (7..OBJECT_MAX, 0..OBJECT_MAX),
            (OBJECT_MAX..OBJECT_MAX + 1, OBJECT_MAX..OBJECT_MAX + 1),
            (3 * OBJECT_MAX - 1..4 * OBJECT_MAX, 2 * OBJECT_MAX..4 * OBJECT_MAX),
        ] {
            assert_eq!(from_an_object(&within), expected, "{within:?}");
        }
    }

    #[test]
    fn objects_count_that_a_part_is_in_with_one_byte() {
        for (part, expected) in [(0..4, 1), (0..5, 2), (3..5, 2), (4..8, 1), (7..17, 4)] {
            assert_eq!(touched(&part, 4), expected, "{part:?}");
        }
    }

    #[test]
    fn a_map_counts_where_it_is_there_and_right() {
        assert!(has_map(FEATURES, 0));
        assert!(has_map(FEATURES, 1 << 2), "another flag");
        for flag in [1 << 0, 1 << 1] {
            assert!(!has_map(FEATURES, flag));
        }
        for feature in [1 << 3, 1 << 4] {
            assert!(!has_map(FEATURES & !feature, 0));
        }
    }
}
