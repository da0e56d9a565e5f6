//! What is mounted where, and who serves it.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};
use vmseal_api::former_image::Discard;
use vmseal_api::rbd::{MOUNTED_ATTRIBUTE, MOUNTED_MAX, Mounted};

use crate::timed::{SHORT_TIMEOUT, Silent, answer_within};

/// The kind of the mounts of `vmseal-rbd`.
pub const POOL: &str = "fuse.vmseal-rbd";

/// The kernel's list, proc_pid_mountinfo(5).
const LIST: &str = "/proc/self/mountinfo";

/// The kind of file system that a directory is on; none where the kernel does not list its device.
///
/// # Errors
/// Those of the file system.
pub fn file_system(directory: &Path) -> io::Result<Option<String>> {
    let device = directory.metadata()?.dev();
    let mounts = std::fs::read_to_string(LIST)?;
    Ok(kind_of(&mounts, &format!("{}:{}", major(device), minor(device))))
}

/// Where the pool is mounted that an open file is on; none of a file elsewhere. It asks the kernel alone, and not `vmseal-rbd`.
///
/// # Errors
/// Those of the kernel's lists.
pub fn pool_of(file: &File) -> io::Result<Option<PathBuf>> {
    let Some(mount) = mount_of(file)? else { return Ok(None) };
    Ok(place_of(&std::fs::read_to_string(LIST)?, &mount, POOL))
}

/// Whether the device of the file system that an open file is on is told which blocks are free.
///
/// # Errors
/// Those of the kernel's lists.
pub fn discard(file: &File) -> io::Result<Discard> {
    let Some(mount) = mount_of(file)? else { return Ok(Discard::NotKnown) };
    Ok(discard_at(&std::fs::read_to_string(LIST)?, &mount).unwrap_or_default())
}

/// The number of the mount by which a file was opened, as the kernel's list has it.
fn mount_of(file: &File) -> io::Result<Option<String>> {
    let told = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let mount = told.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    Ok(mount.map(|mount| mount.trim().to_owned()))
}

/// Who serves a mount; none where that is a `vmseal-rbd` of an earlier version, or nobody. Blocks.
pub fn served_by(path: &Path) -> Option<Mounted> {
    let mut told = vec![0; MOUNTED_MAX];
    let length = rustix::fs::getxattr(path, MOUNTED_ATTRIBUTE, &mut told[..]).ok()?;
    serde_json::from_slice(&told[..length]).ok()
}

/// The same for those who cannot wait for a mount that hangs.
///
/// # Errors
/// [`Silent`]: nobody has answered in time.
pub fn served_by_now(path: &Path) -> Result<Option<Mounted>, Silent> {
    let asked = path.to_owned();
    answer_within(path, SHORT_TIMEOUT, move || served_by(&asked))
}

/// The kind of the file system with this device, in the kernel's list.
fn kind_of(mounts: &str, device: &str) -> Option<String> {
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(device))?;
    let (_, of_file_system) = line.split_once(" - ")?;
    of_file_system.split(' ').next().map(str::to_owned)
}

/// Where the mount with this number has the root of a file system of this kind.
fn place_of(mounts: &str, mount: &str, kind: &str) -> Option<PathBuf> {
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(mount))?;
    let (of_mount, of_file_system) = line.split_once(" - ")?;
    let mut of_mount = of_mount.split(' ').skip(3);
    let (root, place) = (of_mount.next()?, of_mount.next()?);
    let wanted = root == "/" && of_file_system.split(' ').next() == Some(kind);
    wanted.then(|| unescaped(place))
}

/// Whether the device of the mount with this number is told which blocks are free; none where its file system is on no device of this host.
fn discard_at(mounts: &str, mount: &str) -> Option<Discard> {
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(mount))?;
    let mut of_file_system = line.split_once(" - ")?.1.split(' ');
    let (kind, device, options) =
        (of_file_system.next()?, of_file_system.next()?, of_file_system.next()?);
    // Mounts of programs may be called by the device of FUSE.
    if !device.starts_with("/dev/") || kind == "fuse" || kind.starts_with("fuse.") {
        return None;
    }
    let discards = |option: &str| option == "discard" || option.starts_with("discard=");
    Some(match options.split(',').any(discards) {
        true => Discard::AtRemoval,
        false => Discard::ByFstrim,
    })
}

/// A path of the list, which has spaces and others as a backslash and three octal digits.
fn unescaped(word: &str) -> PathBuf {
    let mut parts = word.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let byte = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(b'\\'));
        bytes.extend_from_slice(&part.as_bytes()[if byte.is_some() { 3 } else { 0 }..]);
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
                          40 21 0:45 / /srv/a\\040b rw shared:2 master:1 - nfs nas:/a rw,vers=3,nolock\n\
                          41 21 0:46 / /srv/b rw - nfs4 nas:/b rw,vers=4.2\n\
                          42 21 0:47 / /srv/c\\040\\134d rw,nosuid - fuse.vmseal-rbd vmseal-rbd rw,user_id=0\n\
                          43 21 0:47 /vm /srv/e rw,nosuid - fuse.vmseal-rbd vmseal-rbd rw,user_id=0\n";

    #[test]
    fn the_kind_of_a_file_system_is_read_from_the_kernels_list() {
        assert_eq!(kind_of(MOUNTS, "0:45").as_deref(), Some("nfs"));
        assert_eq!(kind_of(MOUNTS, "0:46").as_deref(), Some("nfs4"));
        assert_eq!(kind_of(MOUNTS, "8:1").as_deref(), Some("ext4"));
        assert_eq!(kind_of(MOUNTS, "8:2"), None);
        assert!(file_system(Path::new("/proc")).unwrap().is_some_and(|kind| kind == "proc"));
    }

    #[test]
    fn the_place_of_a_pool_is_that_of_the_mount_that_its_file_was_opened_by() {
        assert_eq!(place_of(MOUNTS, "42", POOL), Some("/srv/c \\d".into()));
        for (mount, why) in [("43", "no root is there"), ("41", "another kind"), ("4", "no mount")]
        {
            assert_eq!(place_of(MOUNTS, mount, POOL), None, "{why}");
        }
        let file = tempfile::tempfile().unwrap();
        assert_eq!(pool_of(&file).unwrap(), None);
        // The number that the kernel tells of an open file is one of its list.
        let proc = File::open("/proc/self/stat").unwrap();
        let mount = mount_of(&proc).unwrap().unwrap();
        let mounts = std::fs::read_to_string(LIST).unwrap();
        assert_eq!(place_of(&mounts, &mount, "proc"), Some("/proc".into()));
        assert_eq!(discard(&proc).unwrap(), Discard::NotKnown, "it is on no device");
    }

    #[test]
    fn a_file_system_on_a_device_tells_it_of_free_blocks_where_it_is_mounted_so() {
        let of = |file_system: &str| {
            discard_at(&format!("{MOUNTS}50 21 8:2 / /srv/f rw - {file_system}\n"), "50")
        };
        for options in ["rw,discard", "rw,discard=async,space_cache=v2", "discard"] {
            let told = of(&format!("ext4 /dev/sdb1 {options}"));
            assert_eq!(told, Some(Discard::AtRemoval), "{options}");
        }
        for options in ["rw", "rw,nodiscard", "rw,discard_unit=block"] {
            let told = of(&format!("xfs /dev/mapper/vms {options}"));
            assert_eq!(told, Some(Discard::ByFstrim), "{options}");
        }
        for elsewhere in ["nfs4 nas:/a rw", "fuse.sshfs /dev/fuse rw,discard", "tmpfs tmpfs rw"] {
            assert_eq!(of(elsewhere), None, "{elsewhere}");
        }
        assert_eq!(discard_at(MOUNTS, "21"), Some(Discard::ByFstrim));
        assert_eq!(discard_at(MOUNTS, "4"), None, "no such mount");
    }
}
