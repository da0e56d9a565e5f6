//! The daemons of a cluster, by name.

use std::fmt;

/// The program that serves the block of an encrypted OSD.
pub const BLOCK_SERVER: &str = "qemu-storage-daemon";

/// A daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Daemon {
    /// `mon.a`: keeps the maps of the cluster.
    Monitor,
    /// `mgr.a`: figures, and what is commanded of placement groups.
    Manager,
    /// `osd.N`: keeps data.
    Osd(usize),
    /// `block.N`: serves an encrypted OSD what its file holds.
    Block(usize),
}

impl Daemon {
    /// Its program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Monitor => "ceph-mon",
            Self::Manager => "ceph-mgr",
            Self::Osd(_) => "ceph-osd",
            Self::Block(_) => BLOCK_SERVER,
        }
    }

    /// Its id, which with the kind makes its name.
    #[must_use]
    pub fn id(self) -> String {
        match self {
            Self::Monitor | Self::Manager => "a".to_owned(),
            Self::Osd(number) | Self::Block(number) => number.to_string(),
        }
    }

    /// What kind it is, as in its name.
    fn kind(self) -> &'static str {
        match self {
            Self::Monitor => "mon",
            Self::Manager => "mgr",
            Self::Osd(_) => "osd",
            Self::Block(_) => "block",
        }
    }

    /// The daemon of Ceph's that a program is with an id.
    #[must_use]
    pub fn of(program: &str, id: &str) -> Option<Self> {
        let number = || id.parse().ok();
        let daemon = match program {
            "ceph-mon" => Self::Monitor,
            "ceph-mgr" => Self::Manager,
            "ceph-osd" => Self::Osd(number()?),
            _ => return None,
        };
        (daemon.id() == id).then_some(daemon)
    }
}

impl fmt::Display for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.kind(), self.id())
    }
}
