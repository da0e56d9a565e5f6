//! Confines the threads that talk to the cluster: no capabilities, no files but those that librados needs, no signals to others.
//! Connections are allowed, as they are the work. Call it in the thread that connects: the library's threads descend from it.

use std::io;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The Landlock version whose restrictions are asked for: that of Linux 6.12. Earlier kernels have some of them.
const VERSION: ABI = ABI::V6;

/// What librados reads: random numbers, its key, the settings of name resolution and TLS, and what it finds out about the machine.
const READ: [&str; 7] =
    ["/dev/urandom", "/dev/random", "/etc", "/proc", "/sys/devices/system", "/usr/lib", "/lib"];

/// What a thread of the file system opens for itself.
const WRITTEN: [&str; 2] = ["/dev/fuse", "/dev/null"];

/// The most private memory, in bytes: requests in flight (128 MiB), the library's maps and threads, and images' headers.
const MEMORY_MAX: u64 = 2 << 30;

/// Confines the calling thread and those that it starts. A kernel without Landlock is no error: it is logged.
///
/// # Errors
/// The limits and capabilities, which every kernel has.
pub fn enter(keyring: &Path) -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_DATA)?;
    setrlimit(Resource::RLIMIT_DATA, MEMORY_MAX.min(hard), MEMORY_MAX.min(hard))?;
    nix::sys::prctl::set_no_new_privs()?;
    drop_capabilities()?;
    match confine_files(keyring) {
        Ok(RulesetStatus::FullyEnforced) => {}
        Ok(status) => tracing::warn!(?status, "Landlock does not keep the process from all files"),
        Err(error) => tracing::warn!(%error, "Landlock is refused"),
    }
    Ok(())
}

fn confine_files(keyring: &Path) -> Result<RulesetStatus, RulesetError> {
    let read = READ.iter().map(Path::new).chain([keyring]);
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
