//! Processes that outlive the agent: started with exactly the given descriptors, under their own user,
//! recorded before they run, and watched by pidfd.
//!
//! The record is a copy of `/proc/PID/stat`, which the child itself writes before it executes the program, so
//! no process runs without a record. Process id and start time together identify a process; a process id
//! alone may have been reused.

pub(crate) mod died;
pub(crate) mod interfaces;
pub mod live;
pub(crate) mod machine;
pub mod panics;
pub(crate) mod ports;
pub(crate) mod restarts;
pub(crate) mod run_dir;
pub mod run_record;
pub(crate) mod usage;
pub(crate) mod users;

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

/// The size limit of a core: the kernel takes 1 for "neither a file nor a pipe" (fs/coredump.c).
const CORE_LIMIT: libc::rlim_t = 1;

/// The limit of open descriptors of a child: some per disk and queue, with room.
const OPEN_FILES: libc::rlim_t = 4096;

/// The capability to lock memory beyond RLIMIT_MEMLOCK (linux/capability.h).
const CAP_IPC_LOCK: u32 = 14;

/// The capability to make and change network interfaces.
const CAP_NET_ADMIN: u32 = 12;

/// The layout of [`CapabilitySets`] (linux/capability.h, `_LINUX_CAPABILITY_VERSION_3`).
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// Bits 0 to 31 and 32 to 63 of the effective, permitted and inheritable sets.
type CapabilitySets = [[u32; 3]; 2];

/// The longest `/proc/PID/stat`; 52 numbers and a 16-byte name fit well within.
const STAT_MAX: usize = 1024;

/// The user that a process runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// User and group id.
    pub id: u32,
    /// One more group (the one that may open /dev/kvm).
    pub group: Option<u32>,
}

/// A program to start.
pub struct Launch<'a> {
    /// The program, open: its path need not be accessible to `user`.
    pub program: &'a File,
    /// The program's name in process listings.
    pub name: &'a str,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Descriptors that it inherits, under the numbers they have here; no others but 0, 1 and 2.
    pub keep: Vec<BorrowedFd<'a>>,
    /// Its standard input.
    pub input: Stdio,
    /// Where its output and errors go.
    pub log: File,
    /// The user that it runs as; none means the agent's.
    pub user: Option<User>,
    /// Whether it holds keys and must be able to lock all its memory, also under `user`.
    pub locks_memory: bool,
    /// The path of its record.
    pub record: &'a Path,
}

/// Opens a program for [`Launch`].
///
/// # Errors
/// Those of opening the file.
pub fn open_program(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// The path of a program that is named without a directory, as `execvp` would find it.
#[must_use]
pub fn find_program(name: &Path) -> PathBuf {
    if name.components().count() > 1 {
        return name.to_path_buf();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
        .unwrap_or_else(|| name.to_path_buf())
}

/// Starts a program in a new session, so that signals to the agent's session do not reach it.
///
/// # Errors
/// Those of `fork`, `execve` and the set-up in between.
pub fn launch(launch: Launch<'_>) -> io::Result<Process> {
    let record = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(launch.record)?;
    let mut command = Command::new(format!("/proc/self/fd/{}", launch.program.as_raw_fd()));
    command
        .arg0(launch.name)
        .args(&launch.arguments)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .current_dir("/")
        .stdin(launch.input)
        .stdout(launch.log.try_clone()?)
        .stderr(launch.log);
    let keep: Vec<RawFd> = launch.keep.iter().map(AsRawFd::as_raw_fd).collect();
    let (user, record_fd) = (launch.user, record.as_raw_fd());
    let grant = launch.locks_memory && !limit_lets_lock() && can_grant_lock();
    // SAFETY: between fork and exec the closure makes only system calls, on values made before the
    // fork; it neither allocates nor locks.
    unsafe { command.pre_exec(move || prepare(&keep, user, grant, record_fd)) };
    let child = command.spawn()?;
    // Child has no Drop: the process is waited for by its pidfd.
    let pid = child.id();
    Process::with_identity(identity(launch.record)?.filter(|identity| identity.pid == pid))
}

/// Runs in the child before it executes the program. `grant_lock` leaves it CAP_IPC_LOCK under its user.
fn prepare(keep: &[RawFd], user: Option<User>, grant_lock: bool, record: RawFd) -> io::Result<()> {
    // SAFETY: plain system calls; pointers refer to locals that outlive the calls.
    unsafe {
        check(libc::setsid())?;
        check(libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int))?;
        for fd in keep {
            check(libc::fcntl(*fd, libc::F_SETFD, 0))?;
        }
        limit(libc::RLIMIT_CORE, CORE_LIMIT)?;
        limit(libc::RLIMIT_NOFILE, OPEN_FILES)?;
        put_on_record(record)?;
        if let Some(user) = user {
            if grant_lock {
                // Until exec: otherwise the change of user drops all capabilities.
                check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
            }
            let groups = [user.group.unwrap_or(user.id)];
            check(libc::setgroups(1, groups.as_ptr()))?;
            check(libc::setresgid(user.id, user.id, user.id))?;
            check(libc::setresuid(user.id, user.id, user.id))?;
            if grant_lock {
                keep_only_lock()?;
            }
        }
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Lowers a limit; the agent's own may be lower already.
unsafe fn limit(resource: libc::__rlimit_resource_t, most: libc::rlim_t) -> io::Result<()> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `now` and `new` outlive the calls.
    unsafe {
        check(libc::getrlimit(resource, &mut now))?;
        let most = most.min(now.rlim_max);
        check(libc::setrlimit(resource, &libc::rlimit { rlim_cur: most, rlim_max: most }))
    }
}

/// Whether a child under another user can lock all its memory: the inherited limit allows it, or it can be
/// given CAP_IPC_LOCK. Root without CAP_SYS_RESOURCE cannot raise the limit for it.
#[must_use]
pub fn child_can_lock() -> bool {
    limit_lets_lock() || can_grant_lock()
}

fn limit_lets_lock() -> bool {
    use nix::sys::resource::{Resource, getrlimit};
    getrlimit(Resource::RLIMIT_MEMLOCK).is_ok_and(|(_, hard)| hard == libc::RLIM_INFINITY)
}

fn can_grant_lock() -> bool {
    // SAFETY: no pointers are passed.
    let bits = unsafe { libc::prctl(libc::PR_GET_SECUREBITS) };
    capabilities().is_some_and(|[_, permitted, _]| permitted & (1 << CAP_IPC_LOCK) != 0)
        && bits >= 0
        && bits & libc::SECBIT_NO_CAP_AMBIENT_RAISE == 0
}

/// Whether this process may make network interfaces, as far as that is known.
#[must_use]
pub fn can_make_interfaces() -> bool {
    capabilities().is_none_or(|[effective, ..]| effective & (1 << CAP_NET_ADMIN) != 0)
}

/// The first 32 of this thread's capabilities: those that are effective, permitted and inheritable.
fn capabilities() -> Option<[u32; 3]> {
    let mut header = [CAPABILITY_VERSION, 0];
    let mut sets: CapabilitySets = [[0; 3]; 2];
    // SAFETY: the kernel writes into header and sets, which are laid out as it expects and outlive the call.
    let got = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, &raw mut sets) } == 0;
    got.then_some(sets[0])
}

/// Drops all capabilities but CAP_IPC_LOCK, and keeps that one across exec: as an ambient capability, because
/// neither the user nor the program's file grants it.
unsafe fn keep_only_lock() -> io::Result<()> {
    let (header, lock) = ([CAPABILITY_VERSION, 0], 1 << CAP_IPC_LOCK);
    let sets: CapabilitySets = [[0, lock, lock], [0; 3]];
    // SAFETY: header and sets are laid out as the kernel expects and outlive the call.
    unsafe {
        if libc::syscall(libc::SYS_capset, &raw const header, &raw const sets) != 0 {
            return Err(io::Error::last_os_error());
        }
        let raise = libc::PR_CAP_AMBIENT_RAISE as libc::c_ulong;
        let (lock, none): (libc::c_ulong, libc::c_ulong) = (CAP_IPC_LOCK.into(), 0);
        check(libc::prctl(libc::PR_CAP_AMBIENT, raise, lock, none, none))
    }
}

unsafe fn put_on_record(record: RawFd) -> io::Result<()> {
    let mut stat = [0u8; STAT_MAX];
    // SAFETY: the path is a C string, `stat` outlives the calls, and the descriptor is ours.
    unsafe {
        let file = libc::open(c"/proc/self/stat".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        check(file)?;
        let length = libc::read(file, stat.as_mut_ptr().cast(), STAT_MAX);
        libc::close(file);
        if length <= 0 || libc::write(record, stat.as_ptr().cast(), length as usize) != length {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Identifies a process until the machine restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// The process id.
    pub pid: u32,
    /// When it started, in clock ticks since boot (proc(5), field 22).
    pub started: u64,
}

/// Process id and start time out of `/proc/PID/stat`.
fn parse_stat(stat: &str) -> Option<ProcessIdentity> {
    // The name (field 2) is in parentheses and may hold anything, parentheses and spaces included.
    let (head, tail) = (stat.split_once(" (")?.0, stat.rsplit_once(") ")?.1);
    let started = tail.split(' ').nth(22 - 3)?;
    Some(ProcessIdentity { pid: head.parse().ok()?, started: started.trim().parse().ok()? })
}

/// The process on record; none without a record, or with an empty one.
///
/// # Errors
/// Those of reading the file.
pub fn identity(record: &Path) -> io::Result<Option<ProcessIdentity>> {
    match std::fs::read_to_string(record) {
        Ok(stat) => Ok(parse_stat(&stat)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this status.
    Status(i32),
    /// A signal ended it.
    Signal(i32),
    /// Unknown: an earlier agent started it.
    Unknown,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Status(status) => write!(f, "exited with status {status}"),
            Self::Signal(signal) => match nix::sys::signal::Signal::try_from(*signal) {
                Ok(name) => write!(f, "was ended by {name}"),
                Err(_) => write!(f, "was ended by signal {signal}"),
            },
            Self::Unknown => f.write_str("ended"),
        }
    }
}

/// A process, started by this agent or by an earlier one.
#[derive(Debug)]
pub struct Process {
    identity: ProcessIdentity,
    pidfd: AsyncFd<OwnedFd>,
}

impl Process {
    /// The process on record, if it still lives.
    ///
    /// # Errors
    /// Those of reading the record and `pidfd_open`.
    pub fn adopt(record: &Path) -> io::Result<Option<Self>> {
        let Some(identity) = identity(record)? else { return Ok(None) };
        match Self::with_identity(Some(identity)) {
            Ok(process) if process.has_ended() => Ok(None),
            Ok(process) => Ok(Some(process)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn with_identity(identity: Option<ProcessIdentity>) -> io::Result<Self> {
        let gone = || io::Error::new(io::ErrorKind::NotFound, "the process is gone");
        let identity = identity.ok_or_else(gone)?;
        let pidfd = match pidfd_open(identity.pid) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(gone()),
            other => other?,
        };
        // Only now: from here on the pidfd cannot refer to another process.
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", identity.pid)).map_err(|_| gone())?;
        if parse_stat(&stat) != Some(identity) {
            return Err(gone());
        }
        // SAFETY: `OwnedFd` gives the same open descriptor for as long as it lives.
        let pidfd = unsafe { AsyncFd::register(pidfd)? };
        Ok(Self { identity, pidfd })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.identity.pid
    }

    /// The user that it runs as; none when it has just ended.
    #[must_use]
    pub fn user(&self) -> Option<u32> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).ok()?;
        let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        // Real, effective, saved, of the file system (proc(5)).
        let user = users.split_whitespace().next()?.parse().ok()?;
        (!self.has_ended()).then_some(user)
    }

    /// A copy of one of its descriptors, for what may be done to an open socket from outside.
    ///
    /// # Errors
    /// Those of `pidfd_getfd`, such as that this process may not.
    pub fn descriptor(&self, number: RawFd) -> io::Result<OwnedFd> {
        // SAFETY: no pointers are passed; the descriptor is a pidfd that we own.
        let copy =
            unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.pidfd.as_raw_fd(), number, 0) };
        if copy < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has just made the descriptor; nobody else owns it. It is close-on-exec.
        Ok(unsafe { OwnedFd::from_raw_fd(copy as RawFd) })
    }

    /// Kills it (SIGKILL); does nothing when it has ended.
    pub fn kill(&self) {
        // SAFETY: the descriptor is a pidfd that we own; no siginfo is passed.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                libc::SIGKILL,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        if result != 0 && Errno::last() != Errno::ESRCH {
            tracing::warn!(pid = self.pid(), error = %Errno::last(), "cannot kill a process");
        }
    }

    /// Whether it has ended, waited for or not.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        has_ended(self.pidfd.get_ref())
    }

    /// A handle by which another task sees whether it has ended.
    ///
    /// # Errors
    /// The process may have no more descriptors.
    pub fn observe(&self) -> io::Result<Observed> {
        self.pidfd.get_ref().try_clone().map(Observed)
    }

    /// Waits until it has ended; returns how.
    pub async fn ended(&self) -> Exit {
        while !self.has_ended() {
            match self.pidfd.readable().await {
                Ok(mut guard) if !self.has_ended() => guard.clear_ready(),
                Ok(_) => break,
                // The reactor is gone: the program is ending anyway.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
        self.reap()
    }

    fn reap(&self) -> Exit {
        use std::os::fd::AsFd;
        match waitid(
            Id::PIDFd(self.pidfd.get_ref().as_fd()),
            WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG,
        ) {
            Ok(WaitStatus::Exited(_, status)) => Exit::Status(status),
            Ok(WaitStatus::Signaled(_, signal, _)) => Exit::Signal(signal as i32),
            _ => Exit::Unknown,
        }
    }

    /// Waits until it has ended; kills it after `limit`.
    pub async fn end_within(&self, limit: Duration) -> Exit {
        if let Ok(exit) = timeout(limit, self.ended()).await {
            return exit;
        }
        tracing::warn!(pid = self.pid(), "a process does not exit by itself and is killed");
        self.kill();
        self.ended().await
    }
}

/// A process that somebody else waits for.
pub struct Observed(OwnedFd);

impl Observed {
    /// Whether it has ended, waited for or not.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        has_ended(&self.0)
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, which outlives the call.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made the descriptor; nobody else owns it. It is close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn shell<'a>(
        program: &'a File,
        script: &str,
        directory: &Path,
        record: &'a Path,
        keep: Vec<BorrowedFd<'a>>,
    ) -> Launch<'a> {
        Launch {
            program,
            name: "shell",
            arguments: vec!["-c".into(), script.into()],
            keep,
            input: Stdio::null(),
            log: File::create(directory.join("log")).unwrap(),
            user: None,
            locks_memory: false,
            record,
        }
    }

    #[tokio::test]
    async fn a_process_has_only_the_descriptors_given_and_is_on_record() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let program = open_program(Path::new("/bin/sh")).unwrap();
        let given = File::open("/dev/null").unwrap();
        let other = File::open("/dev/zero").unwrap();
        nix::fcntl::fcntl(&other, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty()))
            .unwrap();
        let script = "readlink /proc/$$/fd/* ; ulimit -c; exit 7";
        let process =
            launch(shell(&program, script, directory.path(), &record, vec![given.as_fd()]))
                .unwrap();
        assert_eq!(identity(&record).unwrap().unwrap().pid, process.pid());
        assert_eq!(process.ended().await, Exit::Status(7));
        let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
        assert!(log.contains("/dev/null") && !log.contains("/dev/zero"), "{log}");
        assert!(log.ends_with("0\n") || log.ends_with("1\n"), "{log}");
        assert!(Process::adopt(&record).unwrap().is_none(), "a dead process was adopted");
    }

    #[tokio::test]
    async fn a_living_process_is_adopted_by_its_record_and_a_recycled_id_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let program = open_program(Path::new("/bin/sh")).unwrap();
        let process =
            launch(shell(&program, "sleep 60", directory.path(), &record, vec![])).unwrap();
        let adopted = Process::adopt(&record).unwrap().unwrap();
        assert_eq!(adopted.pid(), process.pid());
        let stat = std::fs::read_to_string(&record).unwrap();
        let started = identity(&record).unwrap().unwrap().started;
        let forged = directory.path().join("forged");
        std::fs::write(&forged, stat.replace(&started.to_string(), &(started + 1).to_string()))
            .unwrap();
        assert!(Process::adopt(&forged).unwrap().is_none(), "another start time was accepted");
        adopted.kill();
        assert_eq!(process.end_within(Duration::from_secs(5)).await, Exit::Signal(libc::SIGKILL));
    }

    #[tokio::test]
    async fn a_program_that_cannot_be_executed_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let path = directory.path().join("not-a-program");
        std::fs::write(&path, "nothing").unwrap();
        let program = open_program(&path).unwrap();
        assert!(launch(shell(&program, "", directory.path(), &record, vec![])).is_err());
        assert!(Process::adopt(&record).unwrap().is_none());
    }

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "42 (a) b) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1";
        assert_eq!(parse_stat(stat), Some(ProcessIdentity { pid: 42, started: 987_654 }));
        assert_eq!(parse_stat("42 (a"), None);
        assert_eq!(parse_stat(""), None);
    }
}
