//! A file that is open, by one or more handles.
//!
//! ```text
//!   Object ──is to be longer than SMALL_MAX──> Image ──somebody opens it to write──> Image, with its lock
//! ```
//! A file that has become an image stays one. Its length is noted when it is flushed or closed: the image itself grows in steps, as each
//! step is a change of its header.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use crate::cluster::Pool;
use crate::image::{self, Image, Layout};
use crate::image_layout;
use crate::image_state;
use crate::inode::{Inode, PATH, SIZE, SMALL_MAX};

/// How much longer an image gets when a file grows beyond it, in bytes, at least. It takes no room before it is written.
const GROWTH_MIN: u64 = 64 << 20;

/// The longest file, in bytes: that of a file in Linux.
const LENGTH_MAX: u64 = i64::MAX as u64;

/// Where files are stored.
pub struct Store {
    /// The pool.
    pub pool: Arc<Pool>,
    /// How new images are stored.
    pub layout: Layout,
    /// The addresses of processes that served this mount before, and are dead.
    pub predecessors: Vec<String>,
}

/// A file that is open.
pub struct OpenFile {
    inode: Inode,
    content: RwLock<Content>,
}

enum Content {
    Object,
    Image(Arc<FileImage>),
}

/// The image of a file.
pub struct FileImage {
    image: Image,
    writable: bool,
    /// The state in which it was found when it was opened to be written.
    found: Option<String>,
    /// The file's length.
    size: AtomicU64,
    /// The length that is noted.
    noted: AtomicU64,
}

impl FileImage {
    /// Opens the image of a file that was this long when somebody looked.
    fn open(store: &Store, inode: Inode, seen: u64, writable: bool) -> io::Result<Arc<Self>> {
        let name = inode.image();
        let (image, size, found) = if writable {
            let image = Image::open_to_write(&store.pool, &name, &store.predecessors)?;
            // Another host may have had the lock until now: it notes the length before it gives the lock up. An image that is being
            // made has none noted.
            let size = noted_size(&store.pool, inode)?.unwrap_or(seen);
            let found = image_state::begin(&store.pool, inode, &image)?;
            (image, size, found)
        } else {
            (Image::open(&store.pool, &name)?, seen, None)
        };
        let (size, noted) = (AtomicU64::new(size), AtomicU64::new(size));
        Ok(Arc::new(Self { image, writable, found, size, noted }))
    }

    /// The state of the image ([`image_state`]): as it is, where nobody has it open to be written; where it is open here to be written, as it
    /// was found, if nothing was written since.
    ///
    /// # Errors
    /// `ResourceBusy`, where neither is known: it is being written; as [`image_state::at_rest`].
    pub fn state(&self, store: &Store, inode: Inode) -> io::Result<String> {
        if !self.writable {
            return image_state::at_rest(&store.pool, inode, &self.image);
        }
        let found = self.found.clone().filter(|_| !self.image.is_written());
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// The image itself.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Whether it is open to be written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The file's length.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The part of a range that is within the file.
    #[must_use]
    pub fn within(&self, range: Range<u64>) -> Range<u64> {
        let end = range.end.min(self.size()).min(self.image.size());
        range.start.min(end)..end
    }

    /// It has been written up to here.
    pub fn reaches(&self, end: u64) {
        self.size.fetch_max(end, Ordering::AcqRel);
    }

    /// Whether its length is not noted.
    #[must_use]
    pub fn has_grown(&self) -> bool {
        self.size() != self.noted.load(Ordering::Acquire)
    }

    /// Notes its length, if it has changed.
    fn note(&self, store: &Store, inode: Inode) -> io::Result<()> {
        let size = self.size();
        if size == self.noted.load(Ordering::Acquire) {
            return Ok(());
        }
        store.pool.set_attribute(&inode.object(), SIZE, &size.to_string())?;
        self.noted.store(size, Ordering::Release);
        Ok(())
    }
}

/// What a request is to be done with.
pub enum Part {
    /// The object, done already.
    Done,
    /// The image.
    Image(Arc<FileImage>),
}

impl OpenFile {
    /// Opens a file.
    ///
    /// # Errors
    /// `ResourceBusy` where another process writes its image; the cluster's.
    pub fn open(store: &Store, inode: Inode, writable: bool) -> io::Result<Self> {
        let content = match noted_size(&store.pool, inode)? {
            Some(size) => Content::Image(FileImage::open(store, inode, size, writable)?),
            None => Content::Object,
        };
        Ok(Self { inode, content: RwLock::new(content) })
    }

    /// Somebody opens it once more. What was open for reading alone is opened again with its lock.
    ///
    /// # Errors
    /// As [`OpenFile::open`].
    pub fn open_again(&self, store: &Store, writable: bool) -> io::Result<()> {
        let mut content = self.change();
        let next = match &*content {
            Content::Image(image) if writable && !image.writable => {
                Content::Image(FileImage::open(store, self.inode, image.size(), true)?)
            }
            Content::Image(_) => return Ok(()),
            // Another process may have made it an image.
            Content::Object => match noted_size(&store.pool, self.inode)? {
                Some(size) => Content::Image(FileImage::open(store, self.inode, size, writable)?),
                None => return Ok(()),
            },
        };
        *content = next;
        Ok(())
    }

    /// Its image, if it is one.
    #[must_use]
    pub fn image(&self) -> Option<Arc<FileImage>> {
        match &*self.look() {
            Content::Image(image) => Some(Arc::clone(image)),
            Content::Object => None,
        }
    }

    /// Its image, if it is one and nobody is changing which it is, which asks the cluster. It never waits.
    #[must_use]
    pub fn image_now(&self) -> Option<Arc<FileImage>> {
        let content = match self.content.try_read() {
            Ok(content) => content,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        match &*content {
            Content::Image(image) => Some(Arc::clone(image)),
            Content::Object => None,
        }
    }

    /// Writes to the object, or says that it is an image that is as long as the part needs.
    ///
    /// # Errors
    /// The cluster's; `FileTooLarge`.
    pub fn write(&self, store: &Store, offset: u64, bytes: &[u8]) -> io::Result<Part> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= LENGTH_MAX);
        let end = end.ok_or(io::ErrorKind::FileTooLarge)?;
        loop {
            if let Some(image) = self.image() {
                if end <= image.image.size() {
                    return Ok(Part::Image(image));
                }
                drop(image);
                self.make_longer(store, end)?;
                continue;
            }
            if end > SMALL_MAX {
                self.make_image(store, end)?;
                continue;
            }
            // Held, so that it does not become an image meanwhile.
            let content = self.look();
            if matches!(*content, Content::Object) {
                store.pool.write(&self.inode.object(), offset, bytes)?;
                return Ok(Part::Done);
            }
        }
    }

    /// Makes it this long.
    ///
    /// # Errors
    /// The cluster's.
    pub fn set_size(&self, store: &Store, size: u64) -> io::Result<()> {
        if size > LENGTH_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if size > SMALL_MAX {
            self.make_image(store, size)?;
        }
        let content = self.change();
        match &*content {
            Content::Object => store.pool.truncate(&self.inode.object(), size),
            Content::Image(image) => {
                // Cut, too, so that it reads as zeroes when it gets longer again.
                if size > image.image.size() || size < image.size() {
                    image.image.resize(size)?;
                }
                image.size.store(size, Ordering::Release);
                image.note(store, self.inode)
            }
        }
    }

    /// Flushes its image, and notes how long it is.
    ///
    /// # Errors
    /// The cluster's.
    pub fn flush(&self, store: &Store) -> io::Result<()> {
        let Some(image) = self.image() else { return Ok(()) };
        image.image.flush_now()?;
        image.note(store, self.inode)
    }

    /// Notes how long it is.
    ///
    /// # Errors
    /// The cluster's.
    pub fn note_length(&self, store: &Store) -> io::Result<()> {
        self.image().map_or(Ok(()), |image| image.note(store, self.inode))
    }

    /// Makes the image as long as a write needs, and some longer.
    fn make_longer(&self, store: &Store, end: u64) -> io::Result<()> {
        let content = self.change();
        let Content::Image(image) = &*content else { return Ok(()) };
        let now = image.image.size();
        if end > now {
            // What a file was cut to, the image was cut to as well: beyond it are zeroes.
            let next = end.max(now + (now / 4).max(GROWTH_MIN)).min(LENGTH_MAX);
            image.image.resize(next)?;
        }
        image.note(store, self.inode)
    }

    /// Makes it an image of this size, with what the object holds.
    fn make_image(&self, store: &Store, size: u64) -> io::Result<()> {
        let mut content = self.change();
        if matches!(*content, Content::Image(_)) {
            return Ok(());
        }
        let (pool, object, name) = (&store.pool, self.inode.object(), self.inode.image());
        let held = read_object(pool, &object)?;
        // One that is there was begun by a process that died before the length was noted.
        let layout = image_layout::of_file(pool, self.inode, &store.layout)?;
        match image::make(pool, &name, size, &layout) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let length = held.len() as u64;
        let image = FileImage::open(store, self.inode, length, true)?;
        if image.image.size() < size {
            image.image.resize(size)?;
        }
        image.image.write_all(0, &held)?;
        image.image.flush_now()?;
        // From here on it is an image, also for a process that comes after this one. What the object holds is never read again.
        store.pool.set_attribute(&object, SIZE, &length.to_string())?;
        *content = Content::Image(image);
        Ok(())
    }

    /// Notes which file the image is.
    pub fn name_image(&self, path: &str) {
        let Some(image) = self.image().filter(|image| image.writable) else { return };
        if let Err(error) = image.image.set_metadata(PATH, path) {
            tracing::warn!(path, %error, "an image does not say which file it is");
        }
    }

    fn look(&self) -> RwLockReadGuard<'_, Content> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> RwLockWriteGuard<'_, Content> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The noted length of a file that is an image.
///
/// # Errors
/// The cluster's; `InvalidData` where it is no number.
pub fn noted_size(pool: &Pool, inode: Inode) -> io::Result<Option<u64>> {
    let noted = pool.attribute(&inode.object(), SIZE)?;
    let wrong = |_| {
        let what = format!("the length that {} has is no number", inode.object());
        io::Error::new(io::ErrorKind::InvalidData, what)
    };
    noted.map(|size| size.parse().map_err(wrong)).transpose()
}

/// All that an object holds; nothing where there is none.
fn read_object(pool: &Pool, object: &str) -> io::Result<Vec<u8>> {
    let mut held = vec![0; SMALL_MAX as usize];
    match pool.read(object, 0, &mut held) {
        Ok(count) => held.truncate(count),
        Err(error) if error.kind() == io::ErrorKind::NotFound => held.clear(),
        Err(error) => return Err(error),
    }
    Ok(held)
}
