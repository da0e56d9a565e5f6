//! Has another `vmseal-rbd` serve a pool that is mounted, so that it is mounted with the key, or the keyring, of now.
//!
//! ```text
//!  mounted ──another one connects with the key, reads and writes──> it may ──the first one is killed──> not mounted ──> mounted
//!     ^                              │
//!     └────refused, or no answer─────┘
//! ```
//! The filters whose disks it serves end with the first one, and are started again, as when it dies by itself. So an agent that dies in
//! between leaves what the death of `vmseal-rbd` leaves: the next one mounts the pool when something of it is needed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use vmseal_api::datastore::{DatastoreLocation, RbdPool};
use vmseal_api::host::{PoolKey, Remount};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::rbd::Mounted;
use vmseal_secret::SecretBytes;

use crate::keys::KeyBox;
use crate::mounts::served_by_now;
use crate::storage::mount_files;
use crate::storage::pool::{self, MOUNT_TIMEOUT, PROGRAM_NAME};
use crate::timed::Silent;

/// How long a remount may take from the request on, the wait for the mount point's lock included, until it gives up mounting. What does not
/// mount the pool by then is killed, and looked at once more: five seconds. The server waits for 60.
const REMOUNT_TIMEOUT: Duration = Duration::from_secs(50);

/// What has to be left of that before a trial, and before the process that serves the pool is ended: five seconds for its end, and 20 to mount
/// the pool, twice as long as a trial may take, which connects as mounting does.
const LEFT_MIN: Duration = Duration::from_secs(25);

/// How long the cluster may take to answer somebody new: one that is well does within a second.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// One lock per mount point for trials, which have one log. It is apart from that of those who mount: where the way that is known leads nowhere,
/// they hold theirs for half a minute each, one after the other, and it is then that another way has to be tried.
static TRYING: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// How long a process that is killed may take to end, in milliseconds.
const DEATH_MILLISECONDS: u16 = pool::DEATH_TIMEOUT.as_millis() as u16;

/// Has another process serve a pool, once the cluster has taken what that is to connect with. With `only_try` nothing is changed. Returns
/// the fingerprint of the key that the mount uses, where that is said. Blocks, and no step longer than it may take.
///
/// # Errors
/// `unreachable` where the cluster refuses that or does not answer, `timed-out` where what serves the pool does not, or too little time is
/// left: it stays mounted as it is. `wrong-state` for a directory, or where it is not known which process serves the pool. Those of
/// [`pool::mount`] after that one has ended.
pub fn remount(location: &DatastoreLocation, only_try: bool) -> Result<Option<String>, Problem> {
    let DatastoreLocation::Rbd { path, pool } = location else {
        return Err(not_a_pool(location.path()));
    };
    let give_up = Instant::now() + REMOUNT_TIMEOUT;
    let pool = &pool::latest(path, pool);
    let program = pool::program_for(path, pool)?;
    let key = pool::key_for(path, pool)?;
    remount_by(program, path, pool, key.as_deref(), only_try, give_up)
}

/// The key that is to be tried in place of the one that the agent holds.
///
/// # Errors
/// `invalid-request` where it is to be used; those of [`KeyBox::open_pool_key`].
pub(crate) fn key_to_try(
    key_box: &KeyBox,
    remount: &Remount,
) -> Result<Option<SecretBytes>, Problem> {
    if remount.cluster.is_some() && !remount.only_try {
        let what = "is of a trial: a pool is mounted by the way that is kept";
        return Err(Problem::invalid("cluster", what));
    }
    let Some(sealed) = &remount.key else { return Ok(None) };
    if !remount.only_try {
        let what = "can only be tried: a pool is mounted with the key that the host holds";
        return Err(Problem::invalid("key", what));
    }
    let path = remount.datastore.location.path().to_owned();
    key_box.open_pool_key(&PoolKey { path, key: Some(sealed.clone()) })
}

/// Sees whether the cluster takes this key for a pool, and the way to it in `location`, whatever that is mounted with. Without a key it is
/// that in the pool's keyring, or the one that the agent holds. With `cluster` it must be that one, by its fsid. Nothing is mounted, and a
/// mount that hangs does not matter. Blocks.
///
/// # Errors
/// `unreachable` where the cluster refuses it, is another one or does not answer; `timed-out` where too little time is left; `wrong-state`
/// for a directory.
pub fn try_way(
    location: &DatastoreLocation,
    key: Option<&SecretBytes>,
    cluster: Option<&str>,
) -> Result<(), Problem> {
    let DatastoreLocation::Rbd { path, pool } = location else {
        return Err(not_a_pool(location.path()));
    };
    let give_up = Instant::now() + REMOUNT_TIMEOUT;
    let program = pool::program_for(path, pool)?;
    let held = match key {
        Some(_) => None,
        None => pool::key_for(path, pool)?,
    };
    try_way_by(program, path, pool, (key.or(held.as_deref()), cluster), give_up)
}

/// The same by this program, which keeps its records there, if it has the time for that.
fn try_way_by(
    program: (&Path, &Path),
    path: &Path,
    pool: &RbdPool,
    (key, cluster): (Option<&SecretBytes>, Option<&str>),
    give_up: Instant,
) -> Result<(), Problem> {
    // A key that is given counts, whatever file there is on the host.
    let keyring = pool.keyring.clone().filter(|_| key.is_none());
    let given = RbdPool { keyring, ..pool.clone() };
    let tried = {
        let trying = trying(path);
        let _trying = trying.lock().unwrap_or_else(PoisonError::into_inner);
        check_time(pool, give_up)?;
        try_to_connect(program, path, &given, (key, cluster))
    };
    tried.map_err(|what| {
        let pool = &pool.pool;
        let failed = match cluster {
            Some(_) => format!("the pool '{pool}' cannot be used in this way"),
            None => format!("the key was not taken for pool '{pool}'"),
        };
        let what = format!("{failed} (nothing was changed). {what}");
        Problem::new(ErrorCode::Unreachable, what)
    })
}

/// The lock of the trials of a pool.
fn trying(path: &Path) -> Arc<Mutex<()>> {
    let mut all = TRYING.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(all.entry(path.to_owned()).or_default())
}

/// Has another process serve a pool by this program, which keeps its records there, if it has the time for that.
fn remount_by(
    program: (&Path, &Path),
    path: &Path,
    pool: &RbdPool,
    key: Option<&SecretBytes>,
    only_try: bool,
    give_up: Instant,
) -> Result<Option<String>, Problem> {
    // Filters that are started again meanwhile wait for the new mount.
    let mounting = pool::mounting(path);
    let _mounting = mounting.lock().unwrap_or_else(PoisonError::into_inner);
    let tried = {
        let trying = trying(path);
        let _trying = trying.lock().unwrap_or_else(PoisonError::into_inner);
        check_time(pool, give_up)?;
        try_to_connect(program, path, pool, (key, None))
    };
    tried.map_err(|what| {
        let pool = &pool.pool;
        let what =
            format!("the pool '{pool}' stays mounted as it is: nobody else could mount it. {what}");
        Problem::new(ErrorCode::Unreachable, what)
    })?;
    let former = former(path)?;
    if only_try {
        return Ok(former.and_then(|it| it.key));
    }
    check_time(pool, give_up)?;
    let serving = || served_by_now(path).ok().flatten();
    if let Some(told) = former {
        end(path, told.process, || serving().as_ref() == Some(&told))?;
        tracing::info!(path = %path.display(), process = told.process, "what served a pool has ended");
    }
    let limit = MOUNT_TIMEOUT.min(give_up.saturating_duration_since(Instant::now()));
    pool::start_and_wait(program, path, pool, key, limit)?;
    Ok(serving().and_then(|it| it.key))
}

/// Refuses to begin what would not be done before the server stops waiting for it.
fn check_time(pool: &RbdPool, give_up: Instant) -> Result<(), Problem> {
    let left = give_up.saturating_duration_since(Instant::now());
    if left >= LEFT_MIN {
        return Ok(());
    }
    let what = format!(
        "pool '{}': nothing was changed, as {} s are left of the {} s that this may take. Others mounted it meanwhile, or the cluster is slow to answer: ask again",
        pool.pool,
        left.as_secs(),
        REMOUNT_TIMEOUT.as_secs()
    );
    Err(Problem::new(ErrorCode::TimedOut, what))
}

/// Who serves a pool, whose cluster has just answered; none where it is not mounted.
fn former(path: &Path) -> Result<Option<Mounted>, Problem> {
    let hung = |Silent| pool::hung_beside_others(path);
    if !pool::is_mounted_now(path).map_err(hung)? {
        return Ok(None);
    }
    let told = served_by_now(path).map_err(hung)?;
    told.map(Some).ok_or_else(|| unknown(path))
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

/// Has `vmseal-rbd` connect as for a mount, with this key, to this cluster where that is said, read and write. What it writes it removes, or
/// the next trial does. Fails with what went wrong, for people.
fn try_to_connect(
    (program, run_dir): (&Path, &Path),
    path: &Path,
    pool: &RbdPool,
    (key, cluster): (Option<&SecretBytes>, Option<&str>),
) -> Result<(), String> {
    let records = run_dir.join("rbd");
    let log_path = mount_files::trial_log(&records, path);
    let mut arguments: Vec<OsString> = vec!["--check".into()];
    if let Some(cluster) = cluster {
        arguments.extend(["--cluster".into(), cluster.into()]);
    }
    arguments.extend(pool::arguments(&records, path, pool));
    let started = vmseal_api::atomic_file::private_directory(&records)
        .and_then(|()| {
            OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(&log_path)
        })
        .and_then(|log| pool::start(program, &arguments, pool, key, &log));
    let mut child = started.map_err(|error| pool::not_started(program, &error))?;
    match pool::ended_within(&mut child, TRIAL_TIMEOUT) {
        Ok(Some(true)) => Ok(()),
        Ok(Some(false)) => Err(pool::last_lines(&log_path, 0)),
        Ok(None) => {
            pool::give_up_on(child);
            let seconds = TRIAL_TIMEOUT.as_secs();
            Err(format!("The cluster has not answered within {seconds} s"))
        }
        Err(error) => Err(error.to_string()),
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
    if name.trim_end() != PROGRAM_NAME || !still_serves() {
        return Err(failed("is another one by now: ask again".to_owned()));
    }
    pidfd_send_signal(&pidfd, Signal::KILL).map_err(|error| cannot(error.into()))?;
    loop {
        let mut ended = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ended, DEATH_MILLISECONDS) {
            Ok(0) => {
                let what = "was killed, and has not ended yet: what it waits for in the kernel hangs. The pool is mounted by another one after its end";
                return Err(failed(what.to_owned()));
            }
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(cannot(error.into())),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::Command;
    use std::sync::mpsc;

    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    use vmseal_api::host::{DatastoreSpec, SealedKey, pool_key_info};
    use vmseal_api::id::DatastoreId;
    use vmseal_secret::sealed_box;

    use super::*;
    use crate::skipped::{skipped, starts_by_systemd};
    use crate::storage::pool::tests::{pool, write_script};

    #[test]
    fn a_key_that_the_cluster_refuses_is_found_out_without_mounting() {
        if starts_by_systemd() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (program, place) =
            (directory.path().join(PROGRAM_NAME), directory.path().join("mount"));
        let try_it = |script: &str, key: Option<&SecretBytes>| {
            write_script(&program, script);
            let keyring = pool().keyring.filter(|_| key.is_none());
            let asked = RbdPool { keyring, ..pool() };
            let (by, in_time) = ((program.as_path(), directory.path()), in_time());
            match key {
                Some(key) => try_way_by(by, &place, &asked, (Some(key), None), in_time),
                None => remount_by(by, &place, &asked, None, true, in_time).map(drop),
            }
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
        let refused = try_it(takes, Some(&other)).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable);
        assert!(refused.detail.contains("not taken for pool 'vms'"), "{refused}");
        assert!(!refused.detail.contains("stays mounted"), "nobody has looked: {refused}");
        assert!(!place.exists());
    }

    #[test]
    fn another_way_is_tried_with_the_cluster_that_it_must_be_and_what_hangs_is_not_looked_at() {
        if starts_by_systemd() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join(PROGRAM_NAME);
        let hung = Hung::new();
        let place = hung.as_ref().map_or_else(|| directory.path().join("mount"), Hung::place);
        let try_it = |cluster: Option<&str>| {
            let by = (program.as_path(), directory.path());
            try_way_by(by, &place, &pool(), (None, cluster), in_time())
        };
        // With the keyring that the pool names.
        let takes = "#!/bin/sh\ncase \"$*\" in\n\
                     '--check --cluster fsid '*' --keyring /etc/ceph/keyring '*) exit 0 ;;\n\
                     esac\necho another cluster \"$3\" >&2\nexit 1\n";
        write_script(&program, takes);
        try_it(Some("fsid")).unwrap();
        let refused = try_it(Some("other")).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable);
        assert!(refused.detail.contains("cannot be used in this way"), "{refused}");
        assert!(refused.detail.contains("another cluster other"), "{refused}");
        try_it(None).unwrap_err();
        // A mount that waits for monitors that are gone has the mounts' lock for half a minute: a trial does not wait for it.
        let mounting = pool::mounting(&place);
        let _mounting = mounting.lock().unwrap();
        try_it(Some("fsid")).unwrap();
    }

    /// When a remount that begins now gives up.
    fn in_time() -> Instant {
        Instant::now() + REMOUNT_TIMEOUT
    }

    #[test]
    fn a_remount_that_would_not_be_done_in_time_ends_nothing() {
        if starts_by_systemd() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (program, place) =
            (directory.path().join(PROGRAM_NAME), directory.path().join("mount"));
        let asked = directory.path().join("asked");
        // A cluster that is slower than `spare`.
        let spare = Duration::from_secs(3);
        let script = format!("#!/bin/sh\necho $1 >> {}\nsleep 3.1\n", asked.display());
        write_script(&program, &script);
        let by = (program.as_path(), directory.path());
        let key = SecretBytes::from_wiped(&mut b"AQ-the-key".to_vec()).unwrap();
        let late = Instant::now();
        for refused in [
            remount_by(by, &place, &pool(), None, false, late).map(drop),
            try_way_by(by, &place, &pool(), (Some(&key), None), late),
        ] {
            assert_eq!(refused.unwrap_err().code, ErrorCode::TimedOut);
        }
        assert!(!asked.exists(), "a trial was begun");
        let give_up = Instant::now() + LEFT_MIN + spare;
        let refused = remount_by(by, &place, &pool(), None, false, give_up).unwrap_err();
        assert_eq!(refused.code, ErrorCode::TimedOut);
        assert!(refused.detail.contains("nothing was changed"), "{refused}");
        assert_eq!(std::fs::read_to_string(&asked).unwrap(), "--check\n");
    }

    /// A mount whose requests nobody reads.
    pub(crate) struct Hung {
        fuse: Option<File>,
        directory: tempfile::TempDir,
        name: String,
    }

    impl Hung {
        /// None where this user may not mount, or the kernel has no FUSE: the test which runs is skipped.
        pub(crate) fn new() -> Option<Self> {
            Self::called("pool")
        }

        /// The same, where the mount point has this name.
        pub(crate) fn called(name: &str) -> Option<Self> {
            let hung = Self::mounted(name);
            if hung.is_none() {
                skipped("it takes root, and FUSE");
            }
            hung
        }

        fn mounted(name: &str) -> Option<Self> {
            let directory = tempfile::tempdir().unwrap();
            let mut hung = Self { fuse: None, directory, name: name.to_owned() };
            let place = hung.place();
            std::fs::create_dir(&place).unwrap();
            let fuse = File::options().read(true).write(true).open("/dev/fuse").ok()?;
            let options = format!("fd={},rootmode=40700,user_id=0,group_id=0", fuse.as_raw_fd());
            let (kind, options) = (Some("fuse.vmseal-rbd"), Some(options.as_str()));
            mount(Some("vmseal-rbd"), &place, kind, MsFlags::empty(), options).ok()?;
            hung.fuse = Some(fuse);
            Some(hung)
        }

        pub(crate) fn place(&self) -> PathBuf {
            self.directory.path().join(&self.name)
        }

        /// Ends what would serve it. It stays mounted.
        pub(crate) fn end(&mut self) {
            self.fuse = None;
        }
    }

    impl Drop for Hung {
        fn drop(&mut self) {
            // Ends what waits for an answer.
            self.end();
            // Refused where it was never mounted.
            let _ = umount2(&self.place(), MntFlags::MNT_DETACH);
        }
    }

    #[test]
    fn a_mount_that_hangs_is_named_and_does_not_keep_others_waiting() {
        if starts_by_systemd() {
            return;
        }
        let Some(hung) = Hung::new() else { return };
        let (place, run_dir) = (hung.place(), hung.directory.path().join("run"));
        let program = hung.directory.path().join(PROGRAM_NAME);
        // The cluster takes the key.
        write_script(&program, "#!/bin/sh\nexit 0\n");
        let (answer, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for only_try in [true, false] {
                let by = (program.as_path(), run_dir.as_path());
                let refused = remount_by(by, &place, &pool(), None, only_try, in_time());
                let lock = pool::mounting(&place);
                let is_free = lock.try_lock().is_ok();
                let _ = answer.send((refused, is_free));
            }
        });
        for _ in 0..2 {
            // Far more than it takes.
            let (refused, is_free) = answers.recv_timeout(TRIAL_TIMEOUT * 3).unwrap();
            let refused = refused.unwrap_err();
            assert_eq!(refused.code, ErrorCode::TimedOut);
            assert!(refused.detail.contains("does not answer: it hangs"), "{refused}");
            assert!(refused.detail.contains("answers a new connection"), "{refused}");
            assert!(is_free, "starts of VMs would wait");
        }
    }

    #[test]
    fn only_the_process_that_serves_the_mount_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let sleep = |name: &str| {
            let program = directory.path().join(name);
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
            // It may be a program that is told by this name what to do.
            let child = Command::new(program).arg0("sleep").arg("1000").spawn().unwrap();
            // A spawn may return before the new program has its name.
            let comm = format!("/proc/{}/comm", child.id());
            let give_up = std::time::Instant::now() + TRIAL_TIMEOUT;
            while std::fs::read_to_string(&comm).unwrap().trim_end() != name {
                assert!(std::time::Instant::now() < give_up, "{name} is not called so");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            child
        };
        let place = Path::new("/srv/ceph");
        let mut other = sleep("other");
        let refused = end(place, other.id(), || true).unwrap_err();
        assert!(refused.detail.contains("another one by now"), "{refused}");
        assert_eq!(other.try_wait().unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();

        let mut serving = sleep(PROGRAM_NAME);
        end(place, serving.id(), || false).unwrap_err();
        assert_eq!(serving.try_wait().unwrap(), None);
        end(place, serving.id(), || true).unwrap();
        assert_eq!(serving.wait().unwrap().signal(), Some(9));
        end(place, serving.id(), || true).unwrap_err();
    }

    #[test]
    fn a_key_in_the_request_is_opened_to_be_tried_and_not_to_be_used() {
        let key_box = KeyBox::new().unwrap();
        let public: [u8; 32] = STANDARD.decode(key_box.public()).unwrap().try_into().unwrap();
        // A key of type 1, with a secret of 16 bytes.
        let binary = [&[1_u8, 0][..], &[0; 8], &[16, 0], &[7; 16]].concat();
        let key = SecretBytes::from_wiped(&mut STANDARD.encode(binary).into_bytes()).unwrap();
        let sealed = |path: &str| {
            let sealed = sealed_box::seal(&public, &pool_key_info(Path::new(path)), &key).unwrap();
            let sealed = STANDARD.encode(sealed.as_bytes());
            Some(SealedKey { key_box: key_box.public(), sealed })
        };
        let location = DatastoreLocation::Rbd { path: "/ceph".into(), pool: Box::new(pool()) };
        let datastore = DatastoreSpec { datastore: DatastoreId::new(), location };
        let remount =
            |only_try, key| Remount { datastore: datastore.clone(), only_try, key, cluster: None };
        let opened = key_to_try(&key_box, &remount(true, sealed("/ceph"))).unwrap();
        assert_eq!(opened.as_ref().map(SecretBytes::expose), Some(key.expose()));
        assert!(key_to_try(&key_box, &remount(false, None)).unwrap().is_none());
        for (only_try, key) in [(false, sealed("/ceph")), (true, sealed("/other"))] {
            let refused = key_to_try(&key_box, &remount(only_try, key)).unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest, "{refused}");
        }
        let with_cluster =
            |only_try| Remount { cluster: Some("fsid".to_owned()), ..remount(only_try, None) };
        assert!(key_to_try(&key_box, &with_cluster(true)).unwrap().is_none());
        let refused = key_to_try(&key_box, &with_cluster(false)).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("cluster"));
    }

    #[test]
    fn a_directory_is_not_remounted() {
        let location = DatastoreLocation::Dir { path: "/store".into() };
        let key = SecretBytes::from_wiped(&mut b"AQ-the-key".to_vec()).unwrap();
        let tried = try_way(&location, Some(&key), None).unwrap_err();
        assert_eq!(tried.code, ErrorCode::WrongState);
        assert_eq!(remount(&location, false).unwrap_err().code, ErrorCode::WrongState);
    }
}
