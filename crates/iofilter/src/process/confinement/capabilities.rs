//! Capabilities: none but CAP_IPC_LOCK, which locked memory needs whenever something is mapped
//! (docs/decisions/024). A filter that root starts by hand has all of them before this.

use std::io;

/// `_LINUX_CAPABILITY_VERSION_3`, and the number of the capability that stays (linux/capability.h).
const VERSION: u32 = 0x2008_0522;
const IPC_LOCK: u32 = 14;

/// Effective, permitted, inheritable; for the capabilities 0 to 31 and 32 to 63.
type Sets = [[u32; 3]; 2];

/// Drops them, and so the ambient set.
pub(super) fn drop_all_but_lock() -> io::Result<()> {
    let mut header = [VERSION, 0];
    let mut sets: Sets = [[0; 3]; 2];
    // SAFETY: the kernel writes into header and sets, which are laid out as it expects and outlive the call.
    if unsafe { libc::syscall(libc::SYS_capget, &raw mut header, &raw mut sets) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let [effective, permitted, _] = sets[0].map(|set| set & (1 << IPC_LOCK));
    let sets: Sets = [[effective, permitted, 0], [0; 3]];
    // SAFETY: as above; the kernel reads them.
    if unsafe { libc::syscall(libc::SYS_capset, &raw const header, &raw const sets) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
