//! Hardening of a process that holds keys. Cipher contexts and TLS buffers hold key material too, in ordinary
//! memory: so all memory is locked, and nobody gets a dump of it.

use nix::errno::Errno;
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::prctl::set_dumpable;
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};

/// The core size limit of a hardened process, in bytes. 0 forbids a core file, but not the pipe to a
/// crash handler that `core_pattern` may name; 1 is the value that the kernel takes for "no pipe either"
/// (fs/coredump.c), and no core file is as small.
const CORE_LIMIT: rlim_t = 1;

/// The result of locking memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLock {
    /// All memory is locked as it comes into use: nothing of it goes to swap. A process that needed
    /// CAP_IPC_LOCK for this must keep it: without it, every later mapping beyond the limit fails with
    /// EAGAIN.
    Locked,
    /// The limit on locked memory (`RLIMIT_MEMLOCK`, in bytes) is finite and the process may not
    /// exceed it. Locking everything would make a later allocation fail and end the process, so only
    /// the secrets themselves are locked. Remedy: `LimitMEMLOCK=infinity`, or encrypted swap.
    LimitTooLow(u64),
    /// The kernel refused for another reason.
    Refused(Errno),
}

/// What [`harden`] achieved. The caller logs what is missing, and decides whether to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hardening {
    /// Whether all memory is locked.
    pub memory: MemoryLock,
    /// Whether the process is "not dumpable": no core, no ptrace and no `/proc/PID/mem` for other
    /// processes of its user.
    pub not_dumpable: bool,
    /// Whether the limit forbids cores to files and to pipes. Children inherit it.
    pub no_core: bool,
}

/// Locks all memory, forbids dumps. Call it first in `main`, before there are threads or keys.
///
/// A process that is not dumpable finds its own `/proc/PID` owned by root: without root it can no
/// longer read `/proc/self/environ`, `maps` and the like, nor write its own `uid_map`. `execve` makes a
/// process dumpable again: every process hardens itself.
pub fn harden() -> Hardening {
    Hardening {
        not_dumpable: set_dumpable(false).is_ok(),
        no_core: forbid_cores(),
        memory: lock_memory(),
    }
}

fn forbid_cores() -> bool {
    // A hard limit of 0, which cannot be raised, forbids files; pipes are then prevented by "not dumpable".
    setrlimit(Resource::RLIMIT_CORE, CORE_LIMIT, CORE_LIMIT).is_ok()
}

fn lock_memory() -> MemoryLock {
    let (soft, hard) = match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok(limits) => limits,
        Err(errno) => return MemoryLock::Refused(errno),
    };
    // Everyone may raise the soft limit to the hard one.
    let limit = match setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard) {
        Ok(()) => hard,
        Err(_) => soft,
    };
    if limit != nix::libc::RLIM_INFINITY && !may_exceed_limit(limit, hard) {
        return MemoryLock::LimitTooLow(limit);
    }
    // ONFAULT: locks memory in use, instead of making every reserved page resident.
    let on_fault = MlockAllFlags::from_bits_retain(nix::libc::MCL_ONFAULT);
    match mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE | on_fault) {
        Ok(()) => MemoryLock::Locked,
        Err(errno) => MemoryLock::Refused(errno),
    }
}

/// Whether the process has CAP_IPC_LOCK: with a limit of 0, only then can anything be locked (mlock(2)).
fn may_exceed_limit(soft: rlim_t, hard: rlim_t) -> bool {
    if setrlimit(Resource::RLIMIT_MEMLOCK, 0, hard).is_err() {
        return false;
    }
    let may = crate::memory::can_lock();
    setrlimit(Resource::RLIMIT_MEMLOCK, soft, hard).is_ok() && may
}
