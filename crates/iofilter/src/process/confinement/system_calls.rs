//! seccomp: which system calls the process may still make.
//!
//! ```text
//!  allowed  ──> done
//!  refused  ──> fails with ENOSYS: calls that the C library tries and can do without
//!  any other, or with other arguments ──> SIGSYS: the number is written to standard error, and the process ends
//! ```
//! The lists hold the calls that the program makes (strace, on every test), and those that the C library may
//! make instead on another kernel or in another version: a filter that is killed without need stops its VM.
//! Two filters are installed, because one has a single answer for all calls that it matches; of two answers
//! the kernel takes the stricter. Calls without conditions, which are all of the data path, are in a bitmap
//! in the kernel (since 5.11) and do not run through the lists.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;

use libc::c_int;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use vmseal_api::rbd::{ASK_TICKET, ASK_WHOLE};

use crate::storage::rings::FILES_UPDATE;

/// Why system calls cannot be filtered.
#[derive(Debug, thiserror::Error)]
pub enum SystemCallsError {
    /// The lists do not make a filter, or not on this processor.
    #[error("{0}")]
    Build(#[from] seccompiler::BackendError),
    /// The kernel refuses it.
    #[error("{0}")]
    Install(#[from] seccompiler::Error),
    /// The SIGSYS handler cannot be installed.
    #[error("SIGSYS cannot be handled: {0}")]
    Handler(#[source] std::io::Error),
}

/// Allowed with any arguments.
const ALLOWED: &[i64] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_mlock,
    libc::SYS_munlock,
    // Open files: the image, guest memory, events, the log.
    libc::SYS_close,
    libc::SYS_eventfd2,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_io_uring_enter,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    // Keys of a stack that comes later. It takes no more memory than `memfd_create` and `mlock`.
    libc::SYS_memfd_secret,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    // Connections that a peer opened.
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // Threads.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    // Signals.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    // Clocks, where the vDSO does not have them; other facts about the process and the machine.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_nanosleep,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

/// Fail with ENOSYS: the C library tries them, for the number of processors, a time zone or a message, and
/// has another way. Threads are then made by `clone`, whose flags a filter can check.
const REFUSED: &[i64] = &[
    libc::SYS_clone3,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    libc::SYS_statfs,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
];

/// `fcntl` on open files: flags, duplicates, seals of a memfd. Not the owner of their signals.
const FCNTL: &[c_int] = &[
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// `clone` for a thread, never for a process, and without new namespaces.
const THREAD: c_int = libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
const NAMESPACES: c_int = libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWUTS;

/// Filters the system calls of the whole process from now on. It cannot be undone.
///
/// # Errors
/// [`SystemCallsError`]
pub fn confine() -> Result<(), SystemCallsError> {
    say_what_was_refused().map_err(SystemCallsError::Handler)?;
    let refused =
        compile(refused()?, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?;
    let allowed = compile(allowed()?, SeccompAction::Trap, SeccompAction::Allow)?;
    seccompiler::apply_filter_all_threads(&refused)?;
    seccompiler::apply_filter_all_threads(&allowed)?;
    Ok(())
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn compile(
    rules: Rules,
    otherwise: SeccompAction,
    matching: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let processor = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, otherwise, matching, processor)?.try_into()
}

/// Compares the argument of this number.
fn only(
    argument: u8,
    how: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![condition(argument, how, value)?])
}

fn condition(
    argument: u8,
    how: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, how, value)
}

fn allowed() -> Result<Rules, seccompiler::BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq};
    let mut rules: Rules = ALLOWED.iter().chain(REFUSED).map(|call| (*call, Vec::new())).collect();
    // No memory becomes executable.
    let data = || only(2, MaskedEq(libc::PROT_EXEC as u64), 0);
    rules.insert(libc::SYS_mmap, vec![data()?]);
    rules.insert(libc::SYS_mprotect, vec![data()?]);
    let thread = (THREAD | NAMESPACES) as u64;
    rules.insert(libc::SYS_clone, vec![only(0, MaskedEq(thread), THREAD as u64)?]);
    let fcntl = FCNTL.iter().map(|command| only(1, Eq, *command as u64));
    rules.insert(libc::SYS_fcntl, fcntl.collect::<Result<_, _>>()?);
    // The last two ask a file that comes later whether `vmseal-rbd` serves it, and for a ticket of its channel.
    let ioctl = [libc::FIONBIO, libc::TCGETS, ASK_WHOLE.into(), ASK_TICKET.into()];
    let ioctl = ioctl.map(|request| only(1, Eq, request));
    rules.insert(libc::SYS_ioctl, ioctl.into_iter().collect::<Result<_, _>>()?);
    // A queue to `vmseal-rbd` has a pair of its own; nobody else is reached by it.
    rules.insert(libc::SYS_socketpair, vec![only(0, Eq, libc::AF_UNIX as u64)?]);
    // Of a descriptor. The kernel's filter cannot check that the path is empty, so file metadata can be read by name.
    let open =
        |flags| only(flags, MaskedEq(libc::AT_EMPTY_PATH as u64), libc::AT_EMPTY_PATH as u64);
    rules.insert(libc::SYS_newfstatat, vec![open(3)?]);
    rules.insert(libc::SYS_statx, vec![open(2)?]);
    // A spare ring gets the file of storage that comes later; what it may do with it is fixed (`storage::rings`).
    rules.insert(libc::SYS_io_uring_register, vec![only(1, Eq, FILES_UPDATE.into())?]);
    // Signals only to the process itself: `abort` needs it.
    let own = std::process::id().into();
    rules.insert(libc::SYS_tgkill, vec![only(0, Eq, own)?]);
    // Reads the process's own limits.
    let own_limits = SeccompRule::new(vec![
        condition(0, Eq, 0)?,
        SeccompCondition::new(2, SeccompCmpArgLen::Qword, Eq, 0)?,
    ])?;
    rules.insert(libc::SYS_prlimit64, vec![own_limits]);
    rules.insert(libc::SYS_prctl, Vec::new());
    Ok(rules)
}

fn refused() -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    // Allowed: naming a thread, and the no-new-privileges flag, which installing the second filter sets again. Newer C
    // try to name memory as well.
    let kept = [libc::PR_SET_NAME, libc::PR_SET_NO_NEW_PRIVS];
    let other = kept.map(|option| condition(0, SeccompCmpOp::Ne, option as u64));
    let other = SeccompRule::new(other.into_iter().collect::<Result<_, _>>()?)?;
    rules.insert(libc::SYS_prctl, vec![other]);
    Ok(rules)
}

/// Where `siginfo_t` has the number of the system call (`si_syscall`), in bytes, where pointers have 64
/// bits (asm-generic/siginfo.h).
const NUMBER_AT: usize = 24;

fn say_what_was_refused() -> std::io::Result<()> {
    let handler: extern "C" fn(c_int, *const libc::siginfo_t, *const libc::c_void) = on_sigsys;
    // SAFETY: all-zero is a valid sigaction; the handler makes only async-signal-safe calls, and the
    // structure outlives the call.
    let set = unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = handler as usize;
        // The second SIGSYS, raised by the handler, ends the process.
        action.sa_flags =
            libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESETHAND | libc::SA_NODEFER;
        libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut())
    };
    if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

extern "C" fn on_sigsys(_: c_int, info: *const libc::siginfo_t, _: *const libc::c_void) {
    // SAFETY: the kernel passes a siginfo_t of 128 bytes, with the number at this place.
    let number = unsafe { info.cast::<u8>().add(NUMBER_AT).cast::<c_int>().read_unaligned() };
    let mut text = *b"vmseal-filter: system call ..... is not allowed to it; the process ends (a defect, or an attack)\n";
    let (mut left, place) = (number.unsigned_abs(), 27..32);
    for digit in text[place].iter_mut().rev() {
        *digit = if left == 0 { b' ' } else { b'0' + (left % 10) as u8 };
        left /= 10;
    }
    // SAFETY: both calls are async-signal-safe; the text outlives the first.
    unsafe {
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        libc::raise(libc::SIGSYS);
    }
}
