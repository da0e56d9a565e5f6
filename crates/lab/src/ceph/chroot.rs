//! A chroot with Ceph's programs, such as `scripts/build-ceph-chroot` makes: another release than this machine's packages have.
//!
//! ```text
//!  chroot          the chroot's directory
//!  chroot/proc     the kernel's
//!  chroot/sys      the kernel's
//!  chroot/DIR      DIR, the cluster's directory: it has the same path inside as outside
//! ```
//! All of these are mounts within the cluster's directory, and the chroot's own directory has none. So several clusters may have one
//! chroot, and each `down` removes the mounts of its cluster alone, however `up` ended.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, umount2};
use nix::unistd::geteuid;

use super::error::CephError;
use super::layout::Layout;
use super::mountinfo;

/// What daemons open before anything else.
const DEVICE: &str = "dev/null";

/// The directory of a chroot, as records have it.
///
/// # Errors
/// There is none.
pub fn find(directory: &Path) -> Result<PathBuf, CephError> {
    let missing = |error| format!("{error}; scripts/build-ceph-chroot makes one");
    let found = directory.canonicalize().map_err(|error| refused(directory, missing(error)))?;
    match found.to_str() {
        Some(_) => Ok(found),
        None => Err(refused(directory, "its path is not UTF-8".to_owned())),
    }
}

/// Finds that programs can run in a chroot.
///
/// # Errors
/// They cannot.
pub fn check(directory: &Path) -> Result<(), CephError> {
    let device = fs::metadata(directory.join(DEVICE));
    if !device.is_ok_and(|it| it.file_type().is_char_device()) {
        let why =
            format!("it has no device {DEVICE}; scripts/build-ceph-chroot makes one that has");
        return Err(refused(directory, why));
    }
    match geteuid().is_root() {
        true => Ok(()),
        false => Err(refused(directory, "programs run there only as root".to_owned())),
    }
}

/// Mounts a chroot for a cluster. `runs` says whether daemons of the cluster run, in this chroot.
///
/// # Errors
/// It cannot be mounted.
pub fn mount(layout: &Layout, directory: &Path, runs: bool) -> Result<(), CephError> {
    let mounts = mounts(layout, directory);
    let mounted = mountinfo::below(&layout.chroot_place())?;
    if runs && mounts.iter().all(|(_, place)| mounted.contains(place)) {
        return Ok(());
    }
    // Where no daemon runs, what is mounted may be another chroot.
    unmount(layout)?;
    for (what, place) in &mounts {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(place);
        let real = made.and_then(|()| place.canonicalize());
        let real = real.map_err(|source| CephError::File { path: place.clone(), source })?;
        if real != *place {
            let why = format!(
                "a symbolic link in it leads from {} to {}",
                place.display(),
                real.display()
            );
            return Err(refused(directory, why));
        }
        bind(what, place).map_err(failed(place))?;
    }
    Ok(())
}

/// Unmounts what is mounted so for a cluster, if anything is.
///
/// # Errors
/// It cannot be unmounted.
pub fn unmount(layout: &Layout) -> Result<(), CephError> {
    for place in mountinfo::below(&layout.chroot_place())?.into_iter().rev() {
        umount2(&place, MntFlags::MNT_DETACH).map_err(failed(&place))?;
    }
    Ok(())
}

/// What is mounted, and where, in this order.
fn mounts(layout: &Layout, directory: &Path) -> [(PathBuf, PathBuf); 4] {
    let (cluster, place) = (layout.root(), layout.chroot_place());
    let inside = place.join(cluster.strip_prefix("/").unwrap_or(cluster));
    [
        (directory.to_owned(), place.clone()),
        (PathBuf::from("/proc"), place.join("proc")),
        (PathBuf::from("/sys"), place.join("sys")),
        (cluster.to_owned(), inside),
    ]
}

/// Shows a directory in another place, without what is mounted on it.
fn bind(what: &Path, place: &Path) -> nix::Result<()> {
    let none = None::<&str>;
    nix::mount::mount(Some(what), place, none, MsFlags::MS_BIND, none)?;
    // Else what is mounted here next would be mounted in the directory, too.
    nix::mount::mount(none, place, none, MsFlags::MS_PRIVATE, none)
}

fn refused(directory: &Path, why: String) -> CephError {
    CephError::Chroot { directory: directory.to_owned(), why }
}

fn failed(place: &Path) -> impl FnOnce(Errno) -> CephError + use<> {
    let path = place.to_owned();
    move |errno| CephError::File { path, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cluster_s_directory_has_the_same_path_in_the_chroot() {
        let layout = Layout::at(Path::new("/srv/lab"));
        let mounts = mounts(&layout, Path::new("/srv/trixie"));
        let expected = [
            ("/srv/trixie", "/srv/lab/chroot"),
            ("/proc", "/srv/lab/chroot/proc"),
            ("/sys", "/srv/lab/chroot/sys"),
            ("/srv/lab", "/srv/lab/chroot/srv/lab"),
        ];
        assert_eq!(
            mounts,
            expected.map(|(what, place)| (PathBuf::from(what), PathBuf::from(place)))
        );
        // Unmounting finds all of them.
        assert!(mounts.iter().all(|(_, place)| place.starts_with(layout.chroot_place())));
    }

    #[test]
    fn what_is_no_chroot_is_told_with_what_makes_one() {
        let place = tempfile::tempdir().unwrap();
        let none = find(&place.path().join("none")).unwrap_err().to_string();
        for part in ["/none cannot be used as a chroot: No such file", "scripts/build-ceph-chroot"]
        {
            assert!(none.contains(part), "{none}");
        }
        fs::create_dir(place.path().join("dev")).unwrap();
        fs::write(place.path().join(DEVICE), "").unwrap();
        let file = check(place.path()).unwrap_err().to_string();
        assert!(file.contains("no device dev/null; scripts/build-ceph-chroot"), "{file}");
    }

    #[test]
    fn a_chroot_is_named_by_its_real_path() {
        let place = tempfile::tempdir().unwrap();
        let (real, link) = (place.path().join("reef-1"), place.path().join("reef"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert_eq!(find(&link).unwrap(), real.canonicalize().unwrap());
    }

    #[test]
    fn where_nothing_is_mounted_nothing_is_unmounted() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        unmount(&layout).unwrap();
    }
}
