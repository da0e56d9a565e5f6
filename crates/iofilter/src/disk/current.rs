//! The disk as it is now, for those who make chains of it while it may get another stack.
//!
//! ```text
//!   readers: 0  ──reader──>  1, 2 ...      while there are readers, the disk is not exchanged
//!        ├── exchange ──> another disk
//!        ├── take ──> none for a moment: nobody becomes a reader ── put ──> the same or another one
//!        └── end ──> none: its image is closed when all chains are gone
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::disk::Disk;

/// See the module.
#[derive(Debug)]
pub struct CurrentDisk(Mutex<Now>);

#[derive(Debug)]
struct Now {
    /// None once it has ended.
    disk: Option<Arc<Disk>>,
    readers: usize,
}

/// A reader of the disk; the disk is not exchanged before it is dropped.
#[derive(Debug)]
pub struct Reader {
    current: Arc<CurrentDisk>,
    /// The disk.
    pub disk: Arc<Disk>,
}

/// Somebody reads the disk beside its front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("somebody reads it beside the guest")]
pub struct IsRead;

impl CurrentDisk {
    /// This disk.
    #[must_use]
    pub fn new(disk: Disk) -> Self {
        Self(Mutex::new(Now { disk: Some(Arc::new(disk)), readers: 0 }))
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk of now; none once it has ended.
    #[must_use]
    pub fn disk(&self) -> Option<Arc<Disk>> {
        self.now().disk.clone()
    }

    /// The disk of now, for a reader of some time.
    #[must_use]
    pub fn reader(self: &Arc<Self>) -> Option<Reader> {
        let mut now = self.now();
        let disk = now.disk.clone()?;
        now.readers += 1;
        Some(Reader { current: Arc::clone(self), disk })
    }

    /// Nobody makes chains of it any more.
    pub fn end(&self) {
        self.now().disk = None;
    }

    /// Whether it may be exchanged.
    ///
    /// # Errors
    /// [`IsRead`].
    pub fn is_free(&self) -> Result<(), IsRead> {
        if self.now().readers > 0 { Err(IsRead) } else { Ok(()) }
    }

    /// Takes the disk, so that nobody becomes a reader until one is put there.
    ///
    /// # Errors
    /// [`IsRead`].
    pub fn take(&self) -> Result<Option<Arc<Disk>>, IsRead> {
        let mut now = self.now();
        if now.readers > 0 { Err(IsRead) } else { Ok(now.disk.take()) }
    }

    /// Exchanges the disk; returns the former. A reader that has come since it was free goes on with that one.
    #[must_use]
    pub fn exchange(&self, disk: Arc<Disk>) -> Option<Arc<Disk>> {
        self.now().disk.replace(disk)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.current.now().readers -= 1;
    }
}
