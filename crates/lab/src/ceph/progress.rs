//! How far something with a cluster is.

use std::fmt;

/// The next step, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The store of a daemon was made.
    Made(String),
    /// A daemon was started.
    Started(String),
    /// So many of all OSDs are up and in.
    Up(u64, u64),
    /// A pool was made.
    Pool(String),
    /// So many of all placement groups are active and clean.
    Clean(u64, u64),
    /// A daemon was ended.
    Ended(String),
    /// The OSDs' files may grow by more (bytes) than what is free (bytes), but for a margin.
    Room(u64, u64),
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Made(daemon) => write!(f, "{daemon}: made"),
            Self::Started(daemon) => write!(f, "{daemon}: started"),
            Self::Up(some, all) => write!(f, "{some} of {all} OSDs are up and in"),
            Self::Pool(pool) => write!(f, "pool '{pool}': made"),
            Self::Clean(some, all) => {
                write!(f, "{some} of {all} placement groups are active and clean")
            }
            Self::Ended(daemon) => write!(f, "{daemon}: ended"),
            Self::Room(needed, free) => write!(
                f,
                "warning: the OSDs' files may grow by {} GiB here, and {} GiB are free: a file system that becomes full ends the \
                 daemons, and experiments that write are refused; a cluster that is made anew may have smaller OSDs (--osd-gib)",
                needed >> 30,
                free >> 30
            ),
        }
    }
}

/// Prints the progress on standard error.
pub fn narrate(progress: &Progress) {
    eprintln!("{progress}");
}
