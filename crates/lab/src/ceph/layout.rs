//! Where the files of a cluster are, and writing them so that each is whole or not there.

use std::fs::{self, DirBuilder, File, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::daemon::Daemon;
use super::error::CephError;

/// The record of what the cluster is. A directory with it is a cluster's.
pub const RECORD: &str = "cluster.json";
const LOCK: &str = "lock";
const CONFIGURATION: &str = "ceph.conf";
/// Where the chroot is mounted that the cluster's programs run in.
const CHROOT: &str = "chroot";
/// What a directory of a cluster holds besides these, in the order in which it is removed.
const CONTENT: [&str; 11] =
    ["run", "osd", "block", "luks", "mgr", "mon", "mon.new", "keys", "crash", "log", CONFIGURATION];

/// The longest path of a directory: Linux takes 107 bytes as the name of a socket, such as `run/osd.31.asok` in it.
const PATH_MAX: usize = 90;

/// The files of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    root: PathBuf,
    /// Ceph's programs run in a chroot.
    in_chroot: bool,
}

/// The lock on a cluster, until it is dropped or the process ends.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, not used")] File);

/// An error of a file.
fn file(path: &Path) -> impl FnOnce(io::Error) -> CephError + use<> {
    let path = path.to_owned();
    move |source| CephError::File { path, source }
}

impl Layout {
    /// The files in a directory that is a cluster's.
    ///
    /// # Errors
    /// There is no cluster, or it cannot be read.
    pub fn find(directory: &Path) -> Result<Self, CephError> {
        let none = || CephError::NoCluster { directory: directory.to_owned() };
        let root = match directory.canonicalize() {
            Ok(root) => root,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(none()),
            Err(source) => return Err(file(directory)(source)),
        };
        let this = Self { root, in_chroot: false };
        match this.record().try_exists() {
            Ok(true) => Ok(this),
            Ok(false) => Err(none()),
            Err(source) => Err(file(&this.record())(source)),
        }
    }

    /// The files in a directory that is a cluster's or becomes one: it is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made, holds something else, or its path does not do.
    pub fn make(directory: &Path) -> Result<Self, CephError> {
        let private = || DirBuilder::new().recursive(true).mode(0o700).create(directory);
        private().map_err(file(directory))?;
        // Processes are known by this path: there must be one for each directory.
        let root = directory.canonicalize().map_err(file(directory))?;
        let refused = |why: String| CephError::Directory { directory: root.clone(), why };
        check_path(&root).map_err(refused)?;
        let this = Self { root: root.clone(), in_chroot: false };
        if !this.record().exists() {
            let ours = |name: &str| name == LOCK || name == format!("{RECORD}.new");
            for entry in fs::read_dir(&root).map_err(file(&root))? {
                let name = entry.map_err(file(&root))?.file_name();
                if !name.to_str().is_some_and(ours) {
                    let why = format!("it holds '{}' and no cluster", name.display());
                    return Err(CephError::Directory { directory: root, why });
                }
            }
        }
        fs::set_permissions(&root, Permissions::from_mode(0o700)).map_err(file(&root))?;
        Ok(this)
    }

    /// The files in a directory that need not be there.
    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.to_owned(), in_chroot: false }
    }

    /// The same files, of a cluster whose programs run in a chroot, or not in one.
    #[must_use]
    pub fn with_chroot(self, in_chroot: bool) -> Self {
        Self { in_chroot, ..self }
    }

    /// Makes the directories in it.
    ///
    /// # Errors
    /// The file system's.
    pub fn make_directories(&self) -> Result<(), CephError> {
        for name in ["keys", "osd", "block", "luks", "run", "log", "crash", "mgr"] {
            let path = self.root.join(name);
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.map_err(file(&path))?;
        }
        Ok(())
    }

    /// Has no other process change the cluster.
    ///
    /// # Errors
    /// One does.
    pub fn lock(&self) -> Result<Lock, CephError> {
        let path = self.root.join(LOCK);
        let mut options = File::options();
        let opened = options.create(true).truncate(false).write(true).mode(0o600).open(&path);
        let lock = opened.map_err(file(&path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Lock(lock)),
            Err(TryLockError::WouldBlock) => Err(CephError::Busy { directory: self.root.clone() }),
            Err(TryLockError::Error(source)) => Err(file(&path)(source)),
        }
    }

    /// The directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where a chroot is mounted for the cluster.
    #[must_use]
    pub fn chroot_place(&self) -> PathBuf {
        self.root.join(CHROOT)
    }

    /// The chroot that the cluster's programs run in, as it is mounted; none if they run in none.
    #[must_use]
    pub fn chroot(&self) -> Option<PathBuf> {
        self.in_chroot.then(|| self.chroot_place())
    }

    /// The record of what the cluster is.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.root.join(RECORD)
    }

    /// `ceph.conf`.
    #[must_use]
    pub fn configuration(&self) -> PathBuf {
        self.root.join(CONFIGURATION)
    }

    /// The keyring of an entity such as `client.admin`.
    #[must_use]
    pub fn keyring(&self, entity: &str) -> PathBuf {
        self.root.join(format!("keys/{entity}.keyring"))
    }

    /// The store of a daemon.
    #[must_use]
    pub fn store(&self, daemon: Daemon) -> PathBuf {
        match daemon {
            Daemon::Monitor => self.root.join("mon"),
            Daemon::Manager => self.root.join("mgr"),
            Daemon::Osd(id) => self.root.join(format!("osd/{id}")),
            Daemon::Block(id) => self.root.join(format!("luks/{id}")),
        }
    }

    /// Where the blocks of encrypted OSDs are served.
    #[must_use]
    pub fn blocks(&self) -> PathBuf {
        self.root.join("block")
    }

    /// Where the block of an encrypted OSD is served.
    #[must_use]
    pub fn block(&self, id: usize) -> PathBuf {
        self.blocks().join(id.to_string())
    }

    /// The file with the key of an encrypted OSD.
    #[must_use]
    pub fn block_key(&self, id: usize) -> PathBuf {
        self.root.join(format!("keys/osd.{id}.luks"))
    }

    /// The store of a daemon while it is made.
    #[must_use]
    pub fn unfinished(&self, daemon: Daemon) -> PathBuf {
        self.store(daemon).with_extension("new")
    }

    /// The logs.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.root.join("log")
    }

    /// The log of a daemon.
    #[must_use]
    pub fn log(&self, daemon: Daemon) -> PathBuf {
        match daemon {
            // It says nothing once it serves.
            Daemon::Block(_) => self.start_log(daemon),
            Daemon::Monitor | Daemon::Manager | Daemon::Osd(_) => {
                self.logs().join(format!("{daemon}.log"))
            }
        }
    }

    /// What a daemon says until it runs.
    #[must_use]
    pub fn start_log(&self, daemon: Daemon) -> PathBuf {
        self.logs().join(format!("{daemon}.start.log"))
    }

    /// Writes a file of this user's alone: after a crash it has the former content or this.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, path: &Path, content: &str) -> Result<(), CephError> {
        self.write_bytes(path, content.as_bytes())
    }

    /// The same with bytes.
    ///
    /// # Errors
    /// The file system's.
    pub fn write_bytes(&self, path: &Path, content: &[u8]) -> Result<(), CephError> {
        let new = PathBuf::from(format!("{}.new", path.display()));
        let written = || {
            let mut options = File::options();
            let mut to = options.create(true).truncate(true).write(true).mode(0o600).open(&new)?;
            to.write_all(content)?;
            to.sync_all()
        };
        written().map_err(file(&new))?;
        self.finish(&new, path)
    }

    /// Gives a file or a directory that is whole its final name.
    ///
    /// # Errors
    /// The file system's.
    pub fn finish(&self, new: &Path, path: &Path) -> Result<(), CephError> {
        fs::rename(new, path).map_err(file(path))?;
        let parent = path.parent().unwrap_or(&self.root);
        File::open(parent).and_then(|it| it.sync_all()).map_err(file(parent))
    }

    /// Removes the cluster's files, and the directory unless something else is in it. The record goes last: what is left
    /// after a crash is a cluster that can be removed.
    ///
    /// # Errors
    /// The file system's.
    pub fn remove(&self) -> Result<(), CephError> {
        use io::ErrorKind::{DirectoryNotEmpty, NotADirectory, NotFound};
        let chroot = self.chroot_place();
        match fs::remove_dir(&chroot) {
            // What is not the cluster's stays.
            Err(error) if matches!(error.kind(), NotFound | NotADirectory | DirectoryNotEmpty) => {}
            // Something is mounted there still: nothing is removed.
            removed => removed.map_err(file(&chroot))?,
        }
        for name in CONTENT.into_iter().chain([RECORD, LOCK]) {
            let path = self.root.join(name);
            remove(&path).map_err(file(&path))?;
        }
        match fs::remove_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed.map_err(file(&self.root)),
        }
    }
}

/// Removes a file or a directory; one that is not there is no error.
///
/// # Errors
/// The file system's.
pub fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Why a path cannot be that of a cluster.
fn check_path(path: &Path) -> Result<(), String> {
    let text = path.to_str().ok_or("its path is not UTF-8")?;
    if text.len() > PATH_MAX {
        let length = text.len();
        return Err(format!(
            "its path has {length} bytes, and with more than {PATH_MAX} Linux has no room for the names of sockets in it"
        ));
    }
    // Blanks, quotes, `$`, `#` and `;` have meanings in ceph.conf.
    let plain = |it: char| it.is_alphanumeric() || "/._-+@,=:~".contains(it);
    match text.chars().find(|it| !plain(*it)) {
        Some(odd) => {
            Err(format!("its path has the character {odd:?}, which ceph.conf cannot hold"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_with_something_else_is_refused_and_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("home");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("letter"), "dear").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
        let refused = Layout::make(&directory).unwrap_err().to_string();
        assert!(refused.contains("'letter' and no cluster"), "{refused}");
        assert_eq!(mode(&directory), 0o755);
        assert!(matches!(Layout::find(&directory), Err(CephError::NoCluster { .. })));
        assert!(matches!(
            Layout::find(&place.path().join("none")),
            Err(CephError::NoCluster { .. })
        ));
        let new = place.path().join("a/b");
        let layout = Layout::make(&new).unwrap();
        assert_eq!(mode(&new), 0o700);
        // What a process leaves that dies before it has written the record.
        drop(layout.lock().unwrap());
        fs::write(new.join("cluster.json.new"), "{").unwrap();
        Layout::make(&new).unwrap();
    }

    #[test]
    fn paths_that_ceph_cannot_use_are_refused() {
        check_path(Path::new("/home/a.b/.local/state/vmseal/lab/ceph")).unwrap();
        for (path, why) in [
            ("/srv/my cluster", "' '"),
            ("/srv/$name", "'$'"),
            ("/srv/a#b", "'#'"),
            (&*format!("/{}", "a".repeat(90)), "91 bytes"),
        ] {
            let refused = check_path(Path::new(path)).expect_err(path);
            assert!(refused.contains(why), "{path}: {refused}");
        }
    }

    #[test]
    fn one_process_at_a_time_changes_a_cluster() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let lock = layout.lock().unwrap();
        assert!(matches!(layout.lock(), Err(CephError::Busy { .. })));
        drop(lock);
        layout.lock().unwrap();
    }

    #[test]
    fn files_are_of_the_user_alone_and_are_removed_with_the_cluster_but_nothing_else_is() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("cluster");
        let layout = Layout::make(&directory).unwrap();
        layout.make_directories().unwrap();
        for path in [layout.record(), layout.configuration(), layout.keyring("client.admin")] {
            layout.write(&path, "text").unwrap();
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", path.display());
        }
        fs::write(directory.join("notes"), "of the user").unwrap();
        layout.remove().unwrap();
        let left: Vec<_> =
            fs::read_dir(&directory).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(left, ["notes"]);
        fs::remove_file(directory.join("notes")).unwrap();
        Layout::make(&directory).unwrap();
        layout.remove().unwrap();
        assert!(!directory.exists());
    }

    #[test]
    fn what_is_where_a_chroot_is_mounted_is_not_removed_with_the_cluster() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("cluster");
        let layout = Layout::make(&directory).unwrap();
        layout.write(&layout.record(), "{}").unwrap();
        let program = layout.chroot_place().join("ceph-mon");
        fs::create_dir(layout.chroot_place()).unwrap();
        fs::write(&program, "").unwrap();
        layout.remove().unwrap();
        assert!(program.exists() && !layout.record().exists());
        fs::remove_file(&program).unwrap();
        layout.remove().unwrap();
        assert!(!directory.exists());
    }

    #[test]
    fn only_a_cluster_that_is_said_to_be_in_a_chroot_has_one() {
        let layout = Layout::at(Path::new("/lab"));
        assert_eq!(layout.chroot(), None);
        assert_eq!(layout.with_chroot(true).chroot(), Some("/lab/chroot".into()));
    }
}
