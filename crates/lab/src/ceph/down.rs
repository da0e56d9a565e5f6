//! `vmseal lab ceph down`: ending a cluster, and removing it.

use std::path::Path;

use super::block;
use super::chroot;
use super::daemon::Daemon;
use super::error::CephError;
use super::layout::Layout;
use super::processes;
use super::progress::Progress;
use super::record::Record;

/// How many turns there are.
const TURNS: u8 = 4;

/// In which turn a daemon ends. An OSD writes to its block until it has ended, and tells the monitor that it goes.
fn turn(daemon: Daemon) -> u8 {
    match daemon {
        Daemon::Osd(_) => 0,
        Daemon::Block(_) => 1,
        Daemon::Manager => 2,
        Daemon::Monitor => 3,
    }
}

/// Ends the daemons of the cluster in a directory; one without daemons stays as it is. With `destroy` its files are
/// removed, too.
///
/// # Errors
/// [`CephError`].
pub fn down(
    directory: &Path,
    destroy: bool,
    observe: &mut dyn FnMut(&Progress),
) -> Result<(), CephError> {
    let layout = Layout::find(directory)?;
    let _lock = layout.lock()?;
    if destroy && let Some(record) = Record::read(&layout)? {
        // From here on it is no cluster that `up` could go on with.
        Record { destroyed: true, ..record }.write(&layout)?;
    }
    let mut ended = |daemon: Daemon| observe(&Progress::Ended(daemon.to_string()));
    for now in 0..TURNS {
        processes::end(&layout, |process| turn(process.daemon) == now, &mut ended)?;
    }
    // One that was killed has left its mount behind.
    block::unmount(&layout.blocks())?;
    // Whatever the record says: an `up` may have mounted it, and died.
    chroot::unmount(&layout)?;
    match destroy {
        true => layout.remove(),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn osds_end_before_what_they_need() {
        let osd = turn(Daemon::Osd(1));
        for needed in [Daemon::Block(1), Daemon::Manager, Daemon::Monitor] {
            assert!(osd < turn(needed) && turn(needed) < TURNS, "{needed}");
        }
        assert!(turn(Daemon::Manager) < turn(Daemon::Monitor));
    }
}
