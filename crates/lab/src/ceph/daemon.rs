//! The daemons of a cluster, by name.

use std::fmt;

/// A daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Daemon {
    /// `mon.a`: keeps the maps of the cluster.
    Monitor,
    /// `mgr.a`: figures, and what is commanded of placement groups.
    Manager,
    /// `osd.N`: keeps data.
    Osd(usize),
}

impl Daemon {
    /// Its program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Monitor => "ceph-mon",
            Self::Manager => "ceph-mgr",
            Self::Osd(_) => "ceph-osd",
        }
    }

    /// Its id, which with the kind makes its name.
    #[must_use]
    pub fn id(self) -> String {
        match self {
            Self::Monitor | Self::Manager => "a".to_owned(),
            Self::Osd(number) => number.to_string(),
        }
    }

    /// The daemon that a program is with an id.
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

    /// All of a cluster with so many OSDs, in the order in which they are started.
    pub fn all(osds: usize) -> impl Iterator<Item = Self> {
        [Self::Monitor, Self::Manager].into_iter().chain((0..osds).map(Self::Osd))
    }
}

impl fmt::Display for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.program().trim_start_matches("ceph-");
        write!(f, "{kind}.{}", self.id())
    }
}
