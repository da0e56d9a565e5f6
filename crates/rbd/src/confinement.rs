//! Confines the threads that talk to the cluster: no capabilities, no files but those that librados needs, no signals to others, and no
//! system calls by which a process reaches others. Connections are allowed, as they are the work. Call it in the thread that connects:
//! the library's threads descend from it.

mod system_calls;

use std::io;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

pub use system_calls::SystemCallsError;

/// The Landlock version whose restrictions are asked for: that of Linux 6.12. Earlier kernels have some of them.
const VERSION: ABI = ABI::V6;

/// What librados reads: random numbers, what it finds out about the machine, and code.
const READ: [&str; 6] =
    ["/dev/urandom", "/dev/random", "/proc", "/sys/devices/system", "/usr/lib", "/lib"];

/// What is read in /etc. Not all of it: the process is root, and secrets of root's are there (the passphrase of a key provider, keyrings
/// of other users, /etc/shadow). The user's own key is read before the confinement, and no `ceph.conf` is. Which of them were seen to be
/// read is in docs/decisions/306.
///
/// A link counts for what it leads to when the process is confined. A file that is put in the place of one later is refused: names are
/// looked up only to connect, which is right after the confinement.
const CONFIGURATION: [&str; 13] = [
    // Name resolution.
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
    // Where libraries are that are loaded late: those of name resolution, and plugins of Ceph and OpenSSL.
    "/etc/ld.so.cache",
    // The local time, for what librados logs.
    "/etc/localtime",
    // OpenSSL's, as Debian and as Fedora have them.
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/openssl.cnf",
    "/etc/crypto-policies/back-ends/opensslcnf.config",
    "/etc/crypto-policies/back-ends/openssl_fips.config",
];

/// What a thread of the file system opens for itself.
const WRITTEN: [&str; 2] = ["/dev/fuse", "/dev/null"];

/// The most private memory, in bytes: requests in flight (640 MiB, with copies of what filters write), the library's maps and threads, and images' headers.
const MEMORY_MAX: u64 = (2 << 30) + (256 << 20);

/// Why the process cannot be confined, and so must not serve.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// Its limits and capabilities.
    #[error("its memory cannot be limited, or its capabilities cannot be dropped: {0}")]
    Rights(#[from] io::Error),
    /// The filter of system calls.
    #[error(
        "its system calls cannot be filtered (seccomp): {0}; a kernel with CONFIG_SECCOMP_FILTER is needed"
    )]
    SystemCalls(#[from] SystemCallsError),
}

/// Confines the calling thread and those that it starts. A kernel without Landlock is no error: it is logged.
///
/// # Errors
/// [`ConfinementError`].
pub fn enter() -> Result<(), ConfinementError> {
    lower_rights()?;
    match confine_files() {
        Ok(RulesetStatus::FullyEnforced) => {}
        Ok(status) => tracing::warn!(?status, "Landlock does not keep the process from all files"),
        Err(error) => tracing::warn!(%error, "Landlock is refused"),
    }
    // The last one: it refuses what comes before.
    system_calls::confine()?;
    Ok(())
}

fn lower_rights() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_DATA)?;
    setrlimit(Resource::RLIMIT_DATA, MEMORY_MAX.min(hard), MEMORY_MAX.min(hard))?;
    // Each queue of a filter has a socket and shared memory, and librados a connection to each OSD: more than the usual 1024.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    nix::sys::prctl::set_no_new_privs()?;
    drop_capabilities()
}

fn confine_files() -> Result<RulesetStatus, RulesetError> {
    let read = READ.iter().chain(&CONFIGURATION).map(Path::new);
    let rules = read
        .map(|path| (path, AccessFs::from_read(VERSION)))
        .chain(WRITTEN.iter().map(|path| (Path::new(path), AccessFs::from_all(VERSION))));
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(VERSION))?
        .scope(Scope::from_all(VERSION))?
        .create()?;
    for (path, access) in rules {
        // What is not there is not allowed.
        let Ok(opened) = PathFd::new(path) else { continue };
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(VERSION) };
        ruleset = ruleset.add_rule(PathBeneath::new(opened, access))?;
    }
    Ok(ruleset.restrict_self()?.ruleset)
}

/// `_LINUX_CAPABILITY_VERSION_3` (linux/capability.h).
const CAPABILITY_VERSION: u32 = 0x2008_0522;

fn drop_capabilities() -> io::Result<()> {
    let mut header = [CAPABILITY_VERSION, 0];
    let sets = [[0_u32; 3]; 2];
    // SAFETY: the kernel reads both, which are laid out as it expects and outlive the call.
    let set = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, &raw const sets) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::ErrorKind;

    use super::*;

    /// Files of /etc that are not listed: one that everybody may read, also by another way, and one that root may read.
    const OTHERS: [&str; 3] = ["/etc/passwd", "/proc/self/root/etc/passwd", "/etc/shadow"];

    /// What a confined thread finds; none where the kernel has no Landlock. The confinement ends with the thread.
    fn confined<T: Send + 'static>(tried: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let thread = std::thread::spawn(move || {
            let status = confine_files().unwrap();
            (status != RulesetStatus::NotEnforced).then(tried)
        });
        let found = thread.join().unwrap();
        if found.is_none() {
            // Not by a macro, whose output the harness hides when a test passes.
            let message = b"skipped: this kernel has no Landlock\n";
            io::Write::write_all(&mut io::stderr(), message).unwrap();
        }
        found
    }

    fn open(path: impl AsRef<Path>) -> Result<(), ErrorKind> {
        File::open(path).map(drop).map_err(|error| error.kind())
    }

    /// Those of these files that can be opened.
    fn openable(paths: &[&'static str]) -> Vec<&'static str> {
        paths.iter().copied().filter(|path| open(path).is_ok()).collect()
    }

    #[test]
    fn a_confined_thread_opens_few_files() {
        let place = tempfile::tempdir().unwrap();
        let (there, made) = (place.path().join("there"), place.path().join("made"));
        std::fs::write(&there, "x").unwrap();
        let tried = confined(move || {
            let written = File::create(&made).map(drop).map_err(|error| error.kind());
            (open("/dev/urandom"), open(&there), written)
        });
        let Some((needed, other, written)) = tried else { return };
        assert_eq!(needed, Ok(()));
        assert_eq!(other, Err(ErrorKind::PermissionDenied));
        assert_eq!(written, Err(ErrorKind::PermissionDenied));
    }

    /// Not all of the list is on a host. What is there can be read though it is a link out of /etc, as /etc/localtime usually is.
    #[test]
    fn of_etc_a_confined_thread_reads_what_is_listed() {
        let (listed, others) = (openable(&CONFIGURATION), openable(&OTHERS));
        assert!(!listed.is_empty());
        assert!(others.contains(&OTHERS[0]) && others.contains(&OTHERS[1]), "{others:?}");
        let tried = confined(|| {
            let names = std::fs::read_dir("/etc").map(drop).map_err(|error| error.kind());
            (openable(&CONFIGURATION), openable(&OTHERS), names)
        });
        let Some((still, leaked, names)) = tried else { return };
        assert_eq!(still, listed);
        assert!(leaked.is_empty(), "{leaked:?}");
        assert_eq!(names, Err(ErrorKind::PermissionDenied));
    }
}
