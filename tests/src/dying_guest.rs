//! A guest that moves while a process of it dies: QEMU or a filter, at the end that it comes from or at the one that it goes to.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use crate::counting_guest::has_lost_nothing;
use crate::eventually;
use crate::installation::Installation;
use crate::process::kill_hard;
use crate::two_hosts::{FILTER, KNOWN_LIMIT, QEMU, processes};

/// One end of its way.
#[derive(Clone, Copy)]
pub struct End<'a> {
    /// The installation.
    pub here: &'a Installation,
    /// The host of it.
    pub host: &'a str,
}

impl End<'_> {
    /// Waits until no process of a guest is left there.
    pub fn wait_free(self) {
        for program in [QEMU, FILTER] {
            let is_gone = || processes(self.here, self.host, program).is_empty().then_some(());
            eventually(&format!("no {program} is left at the other end"), is_gone).unwrap();
        }
    }

    /// Whether the guest of a VM runs there, as soon as that is known: its death, or that of its filter, is reported later than it happens.
    fn runs(self, vm: &str) -> bool {
        let known = || {
            let power = self.here.vm(vm).ok()?["power"].as_str()?.to_owned();
            let guests = processes(self.here, self.host, QEMU).len();
            let is_served = !processes(self.here, self.host, FILTER).is_empty()
                && self.here.alarms(vm).ok()?.iter().all(|alarm| alarm["code"] != "disks-down");
            match (&*power, guests) {
                ("running", 1) if is_served => Some(true),
                ("off", 0) => Some(false),
                _ => None,
            }
        };
        eventually("it is known whether the guest runs", known)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.here.vm(vm)))
    }
}

/// What dies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GuestProcess {
    /// The QEMU that the guest runs in until it is between both ends.
    SourceQemu,
    /// The one that it goes on in.
    DestinationQemu,
    /// The filter of its disks where it comes from.
    SourceFilter,
    /// That where it goes to.
    DestinationFilter,
}

impl GuestProcess {
    /// Each of them.
    pub const ALL: [Self; 4] =
        [Self::SourceQemu, Self::DestinationQemu, Self::SourceFilter, Self::DestinationFilter];

    /// Those that there are before anything is sent.
    pub const OF_SOURCE: [Self; 2] = [Self::SourceQemu, Self::SourceFilter];

    /// Kills all of them while a guest goes from one end to the other; how many there were.
    #[must_use]
    pub fn kill(self, source: End<'_>, destination: End<'_>) -> usize {
        let (end, program) = match self {
            Self::SourceQemu => (source, QEMU),
            Self::DestinationQemu => (destination, QEMU),
            Self::SourceFilter => (source, FILTER),
            Self::DestinationFilter => (destination, FILTER),
        };
        let found = processes(end.here, end.host, program);
        found.iter().copied().for_each(kill_hard);
        found.len()
    }

    /// Whether the guest has ended with so many of them: one that was not sent as a whole, or has arrived.
    #[must_use]
    pub fn ends_guest(self, killed: usize, arrived: bool) -> bool {
        match self {
            Self::SourceQemu => killed > 0 && !arrived,
            Self::DestinationQemu => killed > 0 && arrived,
            Self::SourceFilter | Self::DestinationFilter => false,
        }
    }
}

/// Whether the guest of a VM runs at this end, which alone has the VM; then it lacks nothing. One that does not run has ended with what
/// died: as it `has_ended`, or as QEMU before 9.0 has lost it with its filter ([`KNOWN_LIMIT`]).
#[must_use]
pub fn goes_on(at: End<'_>, vm: &str, has_ended: bool, died: Option<GuestProcess>) -> bool {
    if at.runs(vm) {
        assert!(!has_ended, "its QEMU was killed, and it runs");
        has_lost_nothing(at.here, vm);
        return true;
    }
    let shown = at.here.vm(vm).unwrap();
    let why = shown["stopped"]["detail"].as_str().unwrap_or_default();
    let filters = [GuestProcess::SourceFilter, GuestProcess::DestinationFilter];
    let is_lost = died.is_some_and(|it| filters.contains(&it)) && why.contains(KNOWN_LIMIT);
    assert!(has_ended || is_lost, "the guest has ended: {shown}");
    false
}
