//! seccomp: which system calls the thread, and those that it starts, may no longer make.
//!
//! ```text
//!  refused: what the work never needs ──────────> EPERM
//!  sockets of other families ───────────────────> EAFNOSUPPORT
//!  what hides its arguments, or is newer ───────> ENOSYS: the C library does it as on an older kernel
//!  calls of another architecture ───────────────> the process is killed
//!  any other ───────────────────────────────────> done
//! ```
//! A list of what is refused, and not of what is allowed: the calls are those of librados, librbd and what they load, of any version,
//! and an error in place of a call that one of them needs would end the process under its guests. The reasons, and what the libraries
//! were seen to call, are in docs/decisions/249.
//!
//! One filter has a single answer for all calls that it matches, so there are several. Calls without conditions, which are all of the
//! data path, are in a bitmap in the kernel (since 5.11) and do not run through the lists.

use std::collections::BTreeMap;

use libc::c_int;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, sock_filter,
};

/// Why system calls cannot be filtered.
#[derive(Debug, thiserror::Error)]
pub enum SystemCallsError {
    /// The lists do not make a filter, or not on this processor.
    #[error("{0}")]
    Build(#[from] BackendError),
    /// The kernel refuses it.
    #[error("{0}")]
    Install(#[from] seccompiler::Error),
}

/// Refused with any arguments.
const REFUSED: &[i64] = &[
    // Other processes: their memory, descriptors and signals.
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_tkill,
    // Programs.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_personality,
    // Users and rights.
    libc::SYS_capset,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setuid,
    // Keys of the kernel's.
    libc::SYS_add_key,
    libc::SYS_keyctl,
    libc::SYS_request_key,
    // Names, modes and owners of files. Landlock knows nothing of modes and owners, and before Linux 6.2 nothing of `truncate`.
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_linkat,
    libc::SYS_lremovexattr,
    libc::SYS_lsetxattr,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_open_by_handle_at,
    libc::SYS_removexattr,
    libc::SYS_renameat2,
    libc::SYS_setxattr,
    libc::SYS_symlinkat,
    libc::SYS_truncate,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    // Namespaces and mounts.
    libc::SYS_chroot,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_pivot_root,
    libc::SYS_setns,
    libc::SYS_umount2,
    libc::SYS_unshare,
    // Rings pass by this filter: their operations are no system calls.
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    // Parts of the kernel that have had defects, and the machine as a whole.
    libc::SYS_acct,
    libc::SYS_adjtimex,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_lookup_dcookie,
    libc::SYS_perf_event_open,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_settimeofday,
    libc::SYS_shmat,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
];

/// The same, under names that only this architecture has.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[i64] = &[
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_creat,
    libc::SYS_fork,
    libc::SYS_futimesat,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_lchown,
    libc::SYS_link,
    libc::SYS_mkdir,
    libc::SYS_mknod,
    libc::SYS_modify_ldt,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_rmdir,
    libc::SYS_symlink,
    libc::SYS_unlink,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_vfork,
];
/// `renameat` (asm-generic/unistd.h), where the kernel has it.
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: &[i64] = &[38];

/// Fail with ENOSYS: what they are asked for is in memory, where a filter cannot look. The C library then takes `clone` and `openat`.
const HIDDEN: [i64; 2] = [libc::SYS_clone3, libc::SYS_openat2];

/// The last call of Linux 6.1. Later ones fail with ENOSYS, as there: nobody has looked whether they belong on the list. So do those of
/// x32, which are the same calls under greater numbers.
const LAST: u32 = libc::SYS_set_mempolicy_home_node as u32;

/// Flags of `clone` that make a namespace.
const NAMESPACES: [c_int; 7] = [
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWUTS,
];

/// What `prctl` may not set: that the process can be looked into, and where its parts are.
const PRCTL: [c_int; 3] = [libc::PR_SET_DUMPABLE, libc::PR_SET_MM, libc::PR_SET_PTRACER];

/// Where connections go, and what `getifaddrs` and `getaddrinfo` ask. Not AF_UNIX: services of the host take orders there from who has
/// this process's user.
const FAMILIES: [c_int; 3] = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// `NETLINK_ROUTE` (linux/netlink.h).
const NETLINK_ROUTE: u64 = 0;

/// The type in the second argument of `socketpair`, beside its flags (linux/net.h, `SOCK_TYPE_MASK`).
const SOCKET_TYPE: u64 = 0xf;

/// Filters the system calls of the calling thread, and of those that it starts, from now on. It cannot be undone.
///
/// # Errors
/// [`SystemCallsError`]
pub fn confine() -> Result<(), SystemCallsError> {
    let hidden: Rules = HIDDEN.iter().map(|call| (*call, Vec::new())).collect();
    for (rules, error) in
        [(refused()?, libc::EPERM), (families()?, libc::EAFNOSUPPORT), (hidden, libc::ENOSYS)]
    {
        seccompiler::apply_filter(&compile(rules, error)?)?;
    }
    seccompiler::apply_filter(&newer())?;
    Ok(())
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn compile(rules: Rules, error: c_int) -> Result<BpfProgram, BackendError> {
    let processor = TargetArch::try_from(std::env::consts::ARCH)?;
    let matching = SeccompAction::Errno(error as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, matching, processor)?.try_into()
}

/// Compares the argument of this number.
fn only(argument: u8, how: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![condition(argument, how, value)?])
}

fn condition(
    argument: u8,
    how: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, how, value)
}

/// All of these bits are set in an argument.
fn has(argument: u8, bits: c_int) -> Result<SeccompRule, BackendError> {
    only(argument, SeccompCmpOp::MaskedEq(bits as u64), bits as u64)
}

fn refused() -> Result<Rules, BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let always = REFUSED.iter().chain(REFUSED_HERE);
    let mut rules: Rules = always.map(|call| (*call, Vec::new())).collect();
    // Signals, and limits, of the process itself alone.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_kill, vec![only(0, Ne, own)?]);
    rules.insert(libc::SYS_tgkill, vec![only(0, Ne, own)?]);
    rules.insert(libc::SYS_prlimit64, vec![only(0, Ne, 0)?]);
    // Threads, and no processes.
    let mut clone = vec![only(0, MaskedEq(libc::CLONE_THREAD as u64), 0)?];
    for namespace in NAMESPACES {
        clone.push(has(0, namespace)?);
    }
    rules.insert(libc::SYS_clone, clone);
    let prctl = PRCTL.map(|option| only(0, Eq, option as u64));
    rules.insert(libc::SYS_prctl, prctl.into_iter().collect::<Result<_, _>>()?);
    // Input for a terminal from which the process was started.
    rules.insert(libc::SYS_ioctl, vec![only(1, Eq, libc::TIOCSTI)?, only(1, Eq, libc::TIOCLINUX)?]);
    // Code comes from files: libraries of name resolution are loaded late. Nothing that was written becomes code.
    rules.insert(libc::SYS_mmap, vec![has(2, libc::PROT_WRITE | libc::PROT_EXEC)?]);
    rules.insert(libc::SYS_mprotect, vec![has(2, libc::PROT_EXEC)?]);
    rules.insert(libc::SYS_pkey_mprotect, vec![has(2, libc::PROT_EXEC)?]);
    // No file is made or emptied. Landlock before Linux 6.2 lets one be emptied that may be read.
    rules.insert(libc::SYS_openat, vec![has(2, libc::O_CREAT)?, has(2, libc::O_TRUNC)?]);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_open, vec![has(1, libc::O_CREAT)?, has(1, libc::O_TRUNC)?]);
    // A pair of datagrams, or of what becomes that, can be connected to a service of the host afterwards.
    let kind = |kind: c_int| only(1, MaskedEq(SOCKET_TYPE), kind as u64);
    rules.insert(libc::SYS_socketpair, vec![kind(libc::SOCK_DGRAM)?, kind(libc::SOCK_RAW)?]);
    Ok(rules)
}

fn families() -> Result<Rules, BackendError> {
    use SeccompCmpOp::{Eq, Ne};
    let other = FAMILIES.map(|family| condition(0, Ne, family as u64));
    let other = SeccompRule::new(other.into_iter().collect::<Result<_, _>>()?)?;
    let netlink = condition(0, Eq, libc::AF_NETLINK as u64)?;
    let netlink = SeccompRule::new(vec![netlink, condition(2, Ne, NETLINK_ROUTE)?])?;
    Ok(Rules::from([(libc::SYS_socket, vec![other, netlink])]))
}

/// The number of a call is compared as a number, for which the library has no rule. The other filters look at the architecture.
fn newer() -> BpfProgram {
    let step = |code: u32, jf, k| sock_filter { code: code as u16, jt: 0, jf, k };
    let fail = SeccompAction::Errno(libc::ENOSYS as u32).into();
    vec![
        // The number comes first in what a filter sees (`struct seccomp_data`).
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, LAST),
        step(libc::BPF_RET | libc::BPF_K, 0, fail),
        step(libc::BPF_RET | libc::BPF_K, 0, SeccompAction::Allow.into()),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    use vmseal_channel::{SharedMemory, ToServer, receive, send};

    use super::*;

    /// Makes a system call; the error number, or 0.
    fn call(number: i64, arguments: [i64; 5]) -> i32 {
        let [a, b, c, d, e] = arguments;
        // SAFETY: only numbers and null pointers are passed.
        let result = unsafe { libc::syscall(number, a, b, c, d, e, 0_i64) };
        if result < 0 { nix::errno::Errno::last_raw() } else { 0 }
    }

    fn parent() -> i64 {
        std::os::unix::process::parent_id().into()
    }

    /// Each has another answer without the filter, and does no harm then.
    fn probes() -> Vec<(&'static str, i32, i64, [i64; 5])> {
        use libc::{EAFNOSUPPORT, ENOSYS, EPERM};
        let (code, written) = (i64::from(libc::PROT_EXEC), i64::from(libc::PROT_WRITE));
        let private = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let (unix, netlink) = (i64::from(libc::AF_UNIX), i64::from(libc::AF_NETLINK));
        let in_network = i64::from(libc::CLONE_THREAD | libc::CLONE_NEWNET);
        vec![
            ("execve", EPERM, libc::SYS_execve, [0; 5]),
            ("process", EPERM, libc::SYS_clone, [libc::CLONE_SIGHAND.into(), 0, 0, 0, 0]),
            ("namespace", EPERM, libc::SYS_clone, [in_network, 0, 0, 0, 0]),
            ("unshare", EPERM, libc::SYS_unshare, [0; 5]),
            ("ptrace", EPERM, libc::SYS_ptrace, [libc::PTRACE_ATTACH.into(), -1, 0, 0, 0]),
            ("read-other", EPERM, libc::SYS_process_vm_readv, [-1, 0, 0, 0, 0]),
            ("kill", EPERM, libc::SYS_kill, [parent(), 0, 0, 0, 0]),
            ("tgkill", EPERM, libc::SYS_tgkill, [parent(), parent(), 0, 0, 0]),
            ("limits-of-others", EPERM, libc::SYS_prlimit64, [parent(), 0, 0, 0, 0]),
            ("same-user", EPERM, libc::SYS_setresuid, [-1, -1, -1, 0, 0]),
            ("open-tree", EPERM, libc::SYS_open_tree, [-1, 0, 0, 0, 0]),
            ("keyctl", EPERM, libc::SYS_keyctl, [-1, 0, 0, 0, 0]),
            ("fchmod", EPERM, libc::SYS_fchmod, [-1, 0, 0, 0, 0]),
            ("unlink", EPERM, libc::SYS_unlinkat, [-1, 0, 0, 0, 0]),
            ("make", EPERM, libc::SYS_openat, [-1, 0, libc::O_CREAT.into(), 0, 0]),
            ("empty", EPERM, libc::SYS_openat, [-1, 0, libc::O_TRUNC.into(), 0, 0]),
            ("ring", EPERM, libc::SYS_io_uring_setup, [0; 5]),
            ("code", EPERM, libc::SYS_mmap, [0, 4096, written | code, private, -1]),
            ("code-later", EPERM, libc::SYS_mprotect, [0, 4096, code, 0, 0]),
            ("dumpable", EPERM, libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 7, 0, 0, 0]),
            ("type-ahead", EPERM, libc::SYS_ioctl, [-1, libc::TIOCSTI as i64, 0, 0, 0]),
            ("datagrams", EPERM, libc::SYS_socketpair, [unix, libc::SOCK_DGRAM.into(), 0, 0, 0]),
            ("unix", EAFNOSUPPORT, libc::SYS_socket, [unix, libc::SOCK_STREAM.into(), 0, 0, 0]),
            // 9 is the audit of the kernel.
            ("audit", EAFNOSUPPORT, libc::SYS_socket, [netlink, libc::SOCK_RAW.into(), 9, 0, 0]),
            ("clone3", ENOSYS, libc::SYS_clone3, [0; 5]),
            ("openat2", ENOSYS, libc::SYS_openat2, [-1, 0, 0, 0, 0]),
            ("newer", ENOSYS, i64::from(LAST) + 1, [-1, 0, 0, 0, 0]),
        ]
    }

    /// What the library and the program do all day.
    fn everyday() -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name("worker".into());
        let joined = thread.spawn(|| vec![1_u8; 8 << 20].len())?.join();
        assert_eq!(joined.unwrap(), 8 << 20);
        File::open("/proc/self/stat")?.read_exact(&mut [0; 8])?;
        File::options().read(true).write(true).open("/dev/null")?.write_all(b"x")?;
        UdpSocket::bind("127.0.0.1:0")?;
        UnixStream::pair()?;
        let (netlink, raw) = (i64::from(libc::AF_NETLINK), i64::from(libc::SOCK_RAW));
        let own = i64::from(std::process::id());
        let private = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let (written, code) = (i64::from(libc::PROT_WRITE), i64::from(libc::PROT_EXEC));
        for (number, arguments) in [
            (libc::SYS_socket, [netlink, raw, 0, 0, 0]),
            (libc::SYS_epoll_create1, [0; 5]),
            (libc::SYS_eventfd2, [0; 5]),
            (libc::SYS_kill, [own, 0, 0, 0, 0]),
            (libc::SYS_tgkill, [own, own, 0, 0, 0]),
            (libc::SYS_mmap, [0, 4096, written, private, -1]),
            (libc::SYS_mmap, [0, 4096, code, private, -1]),
            (libc::SYS_sched_yield, [0; 5]),
        ] {
            assert_eq!(call(number, arguments), 0, "system call {number}");
        }
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)?;
        channel()
    }

    /// What serves filters: connections, messages with descriptors, and memory that others have made.
    fn channel() -> std::io::Result<()> {
        let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let (one, other) = socketpair(AddressFamily::Unix, kind, None, flags)?;
        let memory = SharedMemory::create(4096)?;
        send(one.as_fd(), &ToServer::Doorbell, &[memory.fd()])?;
        let (_, fds) = receive::<ToServer>(other.as_fd(), true)?.expect("the other end is there");
        for fd in fds {
            SharedMemory::map(fd, 4096)?;
        }
        let refused = call(libc::SYS_accept4, [-1, 0, 0, 0, 0]);
        assert_eq!(refused, libc::EBADF, "connections are not taken");
        Ok(())
    }

    #[test]
    fn a_confined_thread_is_refused_what_is_dangerous_and_does_its_work() {
        // The filter ends with the thread.
        let tried = std::thread::spawn(|| {
            confine().unwrap();
            let tried = probes().into_iter().map(|(name, expected, number, arguments)| {
                (name, call(number, arguments), expected)
            });
            let tried: Vec<_> = tried.collect();
            everyday().unwrap();
            tried
        });
        for (name, got, expected) in tried.join().unwrap() {
            assert_eq!(got, expected, "{name}");
        }
    }
}
