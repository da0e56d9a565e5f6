//! Asks the scheduler for short slices, so that the disks of a process take turns quickly where processors are fewer
//! than busy disks (docs/decisions/153).

use std::io;

/// The slice, in nanoseconds: the shortest that Linux has, a few dozen requests.
const SLICE: u64 = 100_000;

/// `struct sched_attr` of linux/sched/types.h, as long as its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// The slice, of the usual policy (Linux 6.12); earlier kernels do not look.
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// The process's threads, those that come later among them, have short slices from now on. Where another policy than the usual one
/// was chosen for it, that stays as it is.
///
/// # Errors
/// The kernel's.
pub fn shorten() -> io::Result<()> {
    let mut attributes = Attributes::default();
    let size = size_of::<Attributes>() as u32;
    // SAFETY: the kernel writes at most `size` bytes into the structure, of which any content is valid.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    if attributes.policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    (attributes.size, attributes.runtime) = (size, SLICE);
    // SAFETY: the kernel reads the structure, which is as long as it says.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_takes_the_slice_and_keeps_the_rest() {
        let nice = || {
            let mut now = Attributes::default();
            let size = size_of::<Attributes>() as u32;
            // SAFETY: as above.
            let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut now, size, 0) };
            assert_eq!(got, 0);
            (now.policy, now.nice, now.flags)
        };
        let before = nice();
        shorten().unwrap();
        assert_eq!(nice(), before);
    }
}
