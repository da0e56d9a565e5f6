//! What is mounted where.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::stat::{major, minor};

/// The kind of file system that a directory is on; none where the kernel does not list its device.
///
/// # Errors
/// Those of the file system.
pub fn file_system(directory: &Path) -> io::Result<Option<String>> {
    let device = directory.metadata()?.dev();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(kind_of(&mounts, &format!("{}:{}", major(device), minor(device))))
}

/// The kind of the file system with this device, in the lines of proc_pid_mountinfo(5).
fn kind_of(mounts: &str, device: &str) -> Option<String> {
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(device))?;
    let (_, of_file_system) = line.split_once(" - ")?;
    of_file_system.split(' ').next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_file_system_is_read_from_the_kernels_list() {
        let mounts = "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
                      40 21 0:45 / /srv/a\\040b rw shared:2 master:1 - nfs nas:/a rw,vers=3,nolock\n\
                      41 21 0:46 / /srv/b rw - nfs4 nas:/b rw,vers=4.2\n";
        assert_eq!(kind_of(mounts, "0:45").as_deref(), Some("nfs"));
        assert_eq!(kind_of(mounts, "0:46").as_deref(), Some("nfs4"));
        assert_eq!(kind_of(mounts, "8:1").as_deref(), Some("ext4"));
        assert_eq!(kind_of(mounts, "8:2"), None);
        assert!(file_system(Path::new("/proc")).unwrap().is_some_and(|kind| kind == "proc"));
    }
}
