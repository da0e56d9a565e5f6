//! What connections need of the file system.

use std::sync::Arc;

use crate::channel::gate::Inside;
use crate::channel::tickets::Tickets;
use crate::open_file::Store;
use crate::open_files::OpenFiles;

/// The files that are open, and who may reach them.
pub struct Service {
    pub(crate) files: Arc<OpenFiles>,
    pub(crate) store: Arc<Store>,
    pub(crate) tickets: Tickets,
    /// Left last, after the images are closed.
    _inside: Option<Inside>,
}

impl Service {
    /// That of a store's open files; it stays inside of a gate until nobody uses it any more.
    #[must_use]
    pub fn new(files: Arc<OpenFiles>, store: Arc<Store>, inside: Option<Inside>) -> Self {
        Self { files, store, tickets: Tickets::default(), _inside: inside }
    }
}
