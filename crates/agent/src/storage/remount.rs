//! Has another `vmseal-rbd` serve a pool that is mounted, so that it is mounted with the key, or the keyring, of now.
//!
//! ```text
//!  mounted ──another one connects with the key, and reads──> it may ──the first one is killed──> not mounted ──> mounted
//!     ^                          │
//!     └──refused, or no answer───┘
//! ```
//! The filters whose disks it serves end with the first one, and are started again, as when it dies by itself. So an agent that dies in
//! between leaves what the death of `vmseal-rbd` leaves: the next one mounts the pool when something of it is needed.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Child;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use vmseal_api::datastore::{DatastoreLocation, RbdPool};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use crate::mounts::served_by;
use crate::storage::pool;

/// How long the cluster may take to answer somebody new: one that is well does within a second. With what mounting may take it stays
/// below what the server waits for.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause between looks at a trial.
const TRIAL_INTERVAL: Duration = Duration::from_millis(20);

/// How long a process that is killed may take to end, in milliseconds: the kernel frees its memory.
const DEATH_MILLISECONDS: u16 = 5000;

/// The name of the program, as the kernel has it of its processes (`comm`).
const PROGRAM: &str = "vmseal-rbd";

/// Has another process serve a pool, once the cluster has taken what that is to connect with. With `only_try` nothing is changed. Returns
/// the fingerprint of the key that the mount uses, where the server has given it. Blocks.
///
/// # Errors
/// `unreachable` where the cluster refuses that or does not answer: the pool stays mounted as it is. `wrong-state` for a directory, or
/// where it is not known which process serves the pool. Those of [`pool::mount`] after that one has ended.
pub fn remount(location: &DatastoreLocation, only_try: bool) -> Result<Option<String>, Problem> {
    let DatastoreLocation::Rbd { path, pool } = location else {
        return Err(not_a_pool(location.path()));
    };
    let (program, run_dir) = pool::program_for(path, pool)?;
    let key = pool::key_for(path, pool)?;
    // Filters that are started again meanwhile wait for the new mount.
    let mounting = pool::mounting(path);
    let _mounting = mounting.lock().unwrap_or_else(PoisonError::into_inner);
    try_to_connect((program, run_dir), path, pool, key.as_deref())?;
    if only_try {
        return Ok(pool::mounted_key(location));
    }
    if pool::is_mounted(path) {
        let told = served_by(path).ok_or_else(|| unknown(path))?;
        end(path, told.process, || served_by(path).as_ref() == Some(&told))?;
        tracing::info!(path = %path.display(), process = told.process, "what served a pool has ended");
    }
    pool::start_and_wait(program, run_dir, path, pool, key.as_deref())?;
    Ok(pool::mounted_key(location))
}

/// A directory has no process.
pub(crate) fn not_a_pool(path: &Path) -> Problem {
    let what = format!("{} is a directory: no vmseal-rbd serves it", path.display());
    Problem::new(ErrorCode::WrongState, what)
}

/// Nobody knows which process serves it.
fn unknown(path: &Path) -> Problem {
    let what = format!(
        "the vmseal-rbd that serves {} is of an earlier version, and does not say which process it is: kill it, and another one is started",
        path.display()
    );
    Problem::new(ErrorCode::WrongState, what)
}

/// Has `vmseal-rbd` connect as for a mount, and read.
fn try_to_connect(
    (program, run_dir): (&Path, &Path),
    path: &Path,
    pool: &RbdPool,
    key: Option<&SecretBytes>,
) -> Result<(), Problem> {
    let failed = |what: String| {
        let pool = &pool.pool;
        let what =
            format!("the pool '{pool}' stays mounted as it is: nobody else could mount it. {what}");
        Problem::new(ErrorCode::Unreachable, what)
    };
    let records = run_dir.join("rbd");
    let log_path = records.join(format!("{}.trial.log", pool::name(path)));
    let mut arguments: Vec<OsString> = vec!["--check".into()];
    arguments.extend(pool::arguments(&records, path, pool));
    let started = vmseal_api::atomic_file::private_directory(&records)
        .and_then(|()| {
            OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&log_path)
        })
        .and_then(|log| pool::start(program, &arguments, pool, key, &log));
    let mut child = started.map_err(|error| failed(pool::not_started(program, &error)))?;
    match ended_within(&mut child, TRIAL_TIMEOUT) {
        Ok(Some(true)) => Ok(()),
        Ok(Some(false)) => Err(failed(pool::last_lines(&log_path, 0))),
        Ok(None) => {
            let _ = child.kill();
            let _ = child.wait();
            let seconds = TRIAL_TIMEOUT.as_secs();
            Err(failed(format!("The cluster has not answered within {seconds} s")))
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Whether a process has ended well within this time; none where it has not ended.
fn ended_within(child: &mut Child, limit: Duration) -> io::Result<Option<bool>> {
    let give_up = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        if Instant::now() >= give_up {
            return Ok(None);
        }
        std::thread::sleep(TRIAL_INTERVAL);
    }
}

/// Kills the process that serves a mount, and waits until it has ended: its successor then knows that it is dead.
fn end(path: &Path, process: u32, still_serves: impl FnOnce() -> bool) -> Result<(), Problem> {
    let failed = |what: String| {
        let what = format!("process {process}, which serves {}, {what}", path.display());
        Problem::new(ErrorCode::WrongState, what)
    };
    let cannot = |error: io::Error| failed(format!("cannot be ended: {error}"));
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| failed("is no process".to_owned()))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| cannot(error.into()))?;
    // Who has answered with this number now is who the descriptor is of, unless it was mounted by hand among other numbers of processes.
    let name = std::fs::read_to_string(format!("/proc/{process}/comm")).map_err(cannot)?;
    if name.trim_end() != PROGRAM || !still_serves() {
        return Err(failed("is another one by now: ask again".to_owned()));
    }
    pidfd_send_signal(&pidfd, Signal::KILL).map_err(|error| cannot(error.into()))?;
    loop {
        let mut ended = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ended, DEATH_MILLISECONDS) {
            Ok(0) => return Err(failed("was killed, and has not ended yet".to_owned())),
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(cannot(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;
    use crate::storage::pool::tests::pool;

    #[test]
    fn a_key_that_the_cluster_refuses_is_found_out_without_mounting() {
        if Path::new("/run/systemd/system").is_dir() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (program, place) = (directory.path().join(PROGRAM), directory.path().join("mount"));
        let try_it = |script: &str, key: Option<&SecretBytes>| {
            std::fs::write(&program, script).unwrap();
            std::fs::set_permissions(&program, PermissionsExt::from_mode(0o700)).unwrap();
            let keyring = pool().keyring.filter(|_| key.is_none());
            let asked = RbdPool { keyring, ..pool() };
            try_to_connect((program.as_path(), directory.path()), &place, &asked, key)
        };
        let refused = try_it("#!/bin/sh\necho $1 no permission >&2\nexit 1\n", None).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable);
        assert!(refused.detail.contains("stays mounted"), "{refused}");
        assert!(refused.detail.contains("--check no permission"), "{refused}");
        // The key is what it would be mounted with.
        let key = SecretBytes::from_wiped(&mut b"AQ-the-key".to_vec()).unwrap();
        let takes = "#!/bin/sh\n[ \"$(cat)\" = AQ-the-key ]\n";
        try_it(takes, Some(&key)).unwrap();
        let other = SecretBytes::from_wiped(&mut b"AQ-another".to_vec()).unwrap();
        try_it(takes, Some(&other)).unwrap_err();
        assert!(!place.exists());
    }

    #[test]
    fn only_the_process_that_serves_the_mount_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let sleep = |name: &str| {
            let program = directory.path().join(name);
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
            Command::new(program).arg("1000").spawn().unwrap()
        };
        let place = Path::new("/srv/ceph");
        let mut other = sleep("other");
        let refused = end(place, other.id(), || true).unwrap_err();
        assert!(refused.detail.contains("another one by now"), "{refused}");
        assert_eq!(other.try_wait().unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();

        let mut serving = sleep(PROGRAM);
        end(place, serving.id(), || false).unwrap_err();
        assert_eq!(serving.try_wait().unwrap(), None);
        end(place, serving.id(), || true).unwrap();
        assert_eq!(serving.wait().unwrap().signal(), Some(9));
        end(place, serving.id(), || true).unwrap_err();
    }

    #[test]
    fn a_directory_is_not_remounted() {
        let location = DatastoreLocation::Dir { path: "/store".into() };
        assert_eq!(remount(&location, false).unwrap_err().code, ErrorCode::WrongState);
    }
}
