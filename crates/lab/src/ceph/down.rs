//! `vmseal lab ceph down`: ending a cluster, and removing it.

use std::path::Path;

use super::daemon::Daemon;
use super::error::CephError;
use super::layout::Layout;
use super::processes;
use super::progress::Progress;
use super::record::Record;

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
    // The monitor last: OSDs tell it that they go.
    let is_osd = |daemon| matches!(daemon, Daemon::Osd(_));
    processes::end(&layout, |process| is_osd(process.daemon), &mut ended)?;
    processes::end(&layout, |process| process.daemon == Daemon::Manager, &mut ended)?;
    processes::end(&layout, |_| true, &mut ended)?;
    match destroy {
        true => layout.remove(),
        false => Ok(()),
    }
}
