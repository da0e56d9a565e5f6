//! A chroot with Ceph's programs, such as `scripts/build-ceph-chroot` makes: another release than this machine's packages have.
//!
//! ```text
//!  chroot          the chroot's directory, read-only
//!  chroot/proc     the kernel's
//!  chroot/sys      the kernel's
//!  chroot/DIR      DIR, the cluster's directory: it has the same path inside as outside
//! ```
//! All of these are mounts within the cluster's directory, and the chroot's own directory has none. So several clusters can share one
//! chroot. `down` removes only the mounts of its own cluster, also after an `up` that was killed. The chroot is mounted read-only: a user
//! who deletes the directory of a running cluster does not delete the chroot's files.

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
/// Why daemons that run cannot get their chroot again: they would not see what is mounted anew.
const LOST: &str =
    "it is not mounted any more for daemons that run from it; end them first: vmseal lab ceph down";

/// The directory of a chroot, as records have it.
///
/// # Errors
/// There is none, or it would be removed with the cluster.
pub fn find(layout: &Layout, directory: &Path) -> Result<PathBuf, CephError> {
    let missing = |error| format!("{error}; scripts/build-ceph-chroot makes one");
    let found = directory.canonicalize().map_err(|error| refused(directory, missing(error)))?;
    if found.starts_with(layout.root()) {
        let why = "it is in the cluster's directory; choose another place for one of them";
        return Err(refused(directory, why.to_owned()));
    }
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

/// Mounts a chroot for a cluster. `runs` says whether daemons of the cluster run: they keep what is mounted.
///
/// # Errors
/// It cannot be mounted, or daemons run that have lost a mount.
pub fn mount(layout: &Layout, directory: &Path, runs: bool) -> Result<(), CephError> {
    let (place, inside) = (layout.chroot_place(), inside(layout));
    if runs {
        let mounted = mountinfo::below(&place)?;
        let mut all = inside.iter().map(|(_, place)| place).chain([&place]);
        return match all.all(|it| mounted.contains(it)) {
            true => Ok(()),
            false => Err(refused(directory, LOST.to_owned())),
        };
    }
    // What an `up` has left that died, maybe of another chroot.
    unmount(layout)?;
    make(directory, &place)?;
    bind(directory, &place).map_err(failed(&place))?;
    for (_, place) in &inside {
        make(directory, place)?;
    }
    protect(&place).map_err(failed(&place))?;
    for (what, place) in &inside {
        bind(what, place).map_err(failed(place))?;
    }
    Ok(())
}

/// Unmounts what is mounted so for a cluster, if anything is.
///
/// # Errors
/// It cannot be unmounted, or something has been mounted meanwhile.
pub fn unmount(layout: &Layout) -> Result<(), CephError> {
    let place = layout.chroot_place();
    for mounted in mountinfo::below(&place)?.into_iter().rev() {
        let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
        umount2(&mounted, flags).map_err(failed(&mounted))?;
    }
    match mountinfo::below(&place)?.first() {
        Some(left) => Err(failed(left)(Errno::EBUSY)),
        None => Ok(()),
    }
}

/// What is mounted in the chroot, and where, in this order.
fn inside(layout: &Layout) -> [(PathBuf, PathBuf); 3] {
    let (cluster, place) = (layout.root(), layout.chroot_place());
    let same = place.join(cluster.strip_prefix("/").unwrap_or(cluster));
    [
        (PathBuf::from("/proc"), place.join("proc")),
        (PathBuf::from("/sys"), place.join("sys")),
        (cluster.to_owned(), same),
    ]
}

/// Makes a directory that something is mounted on, unless it is there. A symbolic link in the chroot could lead out of it: nothing is made
/// or mounted beyond one.
fn make(chroot: &Path, place: &Path) -> Result<(), CephError> {
    let file = |source| CephError::File { path: place.to_owned(), source };
    let there = place.ancestors().find(|it| it.symlink_metadata().is_ok()).unwrap_or(place);
    let real = there.canonicalize().map_err(file)?;
    if real != there {
        let (from, to) = (there.display(), real.display());
        return Err(refused(chroot, format!("a symbolic link leads from {from} to {to}")));
    }
    DirBuilder::new().recursive(true).mode(0o700).create(place).map_err(file)
}

/// Shows a directory in another place, without what is mounted on it.
fn bind(what: &Path, place: &Path) -> nix::Result<()> {
    let none = None::<&str>;
    nix::mount::mount(Some(what), place, none, MsFlags::MS_BIND, none)?;
    // Else what is mounted here next would be mounted in the directory, too.
    nix::mount::mount(none, place, none, MsFlags::MS_PRIVATE, none)
}

/// Makes what is mounted at a place read-only there; what is mounted on it later is not.
fn protect(place: &Path) -> nix::Result<()> {
    let none = None::<&str>;
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    nix::mount::mount(none, place, none, flags, none)
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
        let expected = [
            ("/proc", "/srv/lab/chroot/proc"),
            ("/sys", "/srv/lab/chroot/sys"),
            ("/srv/lab", "/srv/lab/chroot/srv/lab"),
        ];
        let expected = expected.map(|(what, place)| (PathBuf::from(what), PathBuf::from(place)));
        assert_eq!(inside(&layout), expected);
    }

    #[test]
    fn what_is_no_chroot_is_told_with_what_makes_one() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::at(Path::new("/srv/lab"));
        let none = find(&layout, &place.path().join("none")).unwrap_err().to_string();
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
    fn a_chroot_that_would_be_removed_with_the_cluster_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(&place.path().join("cluster")).unwrap();
        let within = layout.root().join("run/reef");
        fs::create_dir_all(&within).unwrap();
        let refused = find(&layout, &within).unwrap_err().to_string();
        assert!(refused.contains("in the cluster's directory"), "{refused}");
        let beside = place.path().join("cluster-reef");
        fs::create_dir(&beside).unwrap();
        find(&layout, &beside).unwrap();
    }

    #[test]
    fn nothing_is_made_beyond_a_symbolic_link() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        let (chroot, outside) = (root.join("reef"), root.join("outside"));
        fs::create_dir(&chroot).unwrap();
        fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, chroot.join("srv")).unwrap();
        let refused = make(&chroot, &chroot.join("srv/lab")).unwrap_err().to_string();
        assert!(refused.contains("symbolic link leads from"), "{refused}");
        assert!(!outside.join("lab").exists());
        for _ in 0..2 {
            make(&chroot, &chroot.join("home/lab")).unwrap();
        }
        assert!(chroot.join("home/lab").is_dir());
    }

    #[test]
    fn daemons_that_have_lost_their_chroot_are_to_be_ended_first() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let refused = mount(&layout, Path::new("/srv/reef"), true).unwrap_err().to_string();
        assert!(refused.contains("end them first: vmseal lab ceph down"), "{refused}");
        assert!(!layout.chroot_place().exists());
    }

    #[test]
    fn a_chroot_is_named_by_its_real_path() {
        let place = tempfile::tempdir().unwrap();
        let (real, link) = (place.path().join("reef-1"), place.path().join("reef"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let layout = Layout::at(Path::new("/srv/lab"));
        assert_eq!(find(&layout, &link).unwrap(), real.canonicalize().unwrap());
    }

    #[test]
    fn where_nothing_is_mounted_nothing_is_unmounted() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        unmount(&layout).unwrap();
    }
}
