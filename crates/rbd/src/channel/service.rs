//! What connections need of the file system.

use std::sync::Arc;

use crate::channel::budget::Budget;
use crate::channel::tickets::Tickets;
use crate::open_file::Store;
use crate::open_files::OpenFiles;

/// The files that are open, and who may reach them.
pub struct Service {
    pub(crate) files: Arc<OpenFiles>,
    pub(crate) store: Arc<Store>,
    pub(crate) tickets: Tickets,
    pub(crate) budget: Arc<Budget>,
}

impl Service {
    /// That of a store's open files.
    #[must_use]
    pub fn new(files: Arc<OpenFiles>, store: Arc<Store>) -> Self {
        Self { files, store, tickets: Tickets::default(), budget: Arc::default() }
    }
}
