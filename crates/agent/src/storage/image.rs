//! The image that a disk is filled from: opened read-only, checked to have no writers, and recognised later.
//!
//! Nothing proves that a file is not being changed; three things are checked:
//! - the kernel, whether a process has it open for writing (a read lease is given only then; on file
//!   systems that have leases);
//! - QEMU's locks, which QEMU and its tools set on images also where there are no leases (one byte for
//!   each permission, `block/file-posix.c`), and which this process then sets, too: a QEMU that would
//!   write finds the image in use;
//! - the file's length and time of change, which must be the same at the end as at the beginning.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use serde::{Deserialize, Serialize};
use vmseal_api::host::{DiskSpec, ImageSource};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::LockedFile;

use crate::storage::transfer::{TransferDirectories, TransferError};

/// Where QEMU locks the permissions that it uses, and those that it denies to others, in bytes.
const QEMU_USES: i64 = 100;
const QEMU_FORBIDS: i64 = 200;

/// QEMU's permissions: consistent read, write, resize.
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// `F_SETSIG` of asm-generic/fcntl.h: the signal that reports a broken lease.
const F_SETSIG: libc::c_int = 10;

/// Identifies the file and its last change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageIdentity {
    format: ImageFormat,
    /// A reboot may change the number of a file system, but not the paths and inodes of its files.
    path: PathBuf,
    inode: u64,
    length: u64,
    modified: i64,
    modified_nanoseconds: i64,
}

impl ImageIdentity {
    fn of(file: &File, path: &Path, format: ImageFormat) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            format,
            path: path.to_owned(),
            inode: metadata.ino(),
            length: metadata.len(),
            modified: metadata.mtime(),
            modified_nanoseconds: metadata.mtime_nsec(),
        })
    }
}

/// An image, open for reading.
#[derive(Debug)]
pub struct Image {
    /// The file; QEMU's locks live as long as its open file description.
    pub file: File,
    /// Its format.
    pub format: ImageFormat,
    /// Its identity.
    pub identity: ImageIdentity,
    /// Its length without holes, in bytes.
    pub allocated: u64,
    /// What wipes the content of one that is in memory.
    _memory: Option<LockedFile>,
}

impl Image {
    /// An image in memory, raw, that this process has made; `name` is for people.
    ///
    /// # Errors
    /// `internal`.
    pub fn in_memory(memory: LockedFile, name: &str) -> Result<Self, Problem> {
        let failed =
            |error: io::Error| Problem::new(ErrorCode::Internal, format!("{name}: {error}"));
        let (file, format) = (memory.reader().map_err(failed)?, ImageFormat::Raw);
        let identity = ImageIdentity::of(&file, Path::new(name), format).map_err(failed)?;
        let allocated = identity.length;
        Ok(Self { file, format, identity, allocated, _memory: Some(memory) })
    }

    /// Opens the image that a disk is filled from.
    ///
    /// # Errors
    /// `invalid-request`: it is outside of the directories for imports, not a regular file, not of the given
    /// format, or larger than the disk. `in-use`: a process may write to it.
    pub fn open(
        source: &ImageSource,
        disk: &DiskSpec,
        allowed: &TransferDirectories,
    ) -> Result<Self, Problem> {
        let invalid = |what: String| refused(&source.path, &what);
        let file = open_unused(&source.path, allowed)?;
        let metadata = file.metadata().map_err(|error| invalid(error.to_string()))?;
        let size = match source.format {
            ImageFormat::Raw => {
                let other = begins_as(&file).map_err(|error| invalid(error.to_string()))?;
                if let Some(other) = other.filter(|_| !source.force) {
                    return Err(Problem::invalid(
                        "image",
                        format!(
                            "{}: is {other}, and was said to be raw. Say its format, or convert it (qemu-img convert -O raw); --force takes it byte by byte, and the guest would not start from it",
                            source.path.display()
                        ),
                    ));
                }
                metadata.len()
            }
            ImageFormat::Qcow2 => {
                vmseal_qcow2::examine(&file).map_err(|refusal| invalid(refusal.to_string()))?.size
            }
        };
        if size > disk.size {
            return Err(invalid(format!(
                "holds a disk of {}, the disk '{}' has only {}; make the disk larger",
                Size(size),
                disk.name,
                Size(disk.size)
            )));
        }
        let identity = ImageIdentity::of(&file, &source.path, source.format)
            .map_err(|e| invalid(e.to_string()))?;
        let allocated = metadata.blocks().saturating_mul(512).min(metadata.len());
        Ok(Self { file, format: source.format, identity, allocated, _memory: None })
    }

    /// Checks that it has not been changed since it was opened.
    ///
    /// # Errors
    /// `in-use`: it has been changed.
    pub fn check_unchanged(&self) -> Result<(), Problem> {
        let now = ImageIdentity::of(&self.file, &self.identity.path, self.format)
            .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?;
        if now == self.identity {
            return Ok(());
        }
        let what = "the image was changed while it was imported: end the process that writes to it and import it again";
        Err(Problem::new(ErrorCode::InUse, what))
    }
}

fn refused(path: &Path, what: &str) -> Problem {
    Problem::invalid("image", format!("{}: {what}", path.display()))
}

/// Opens a file to import, to which nothing writes.
///
/// # Errors
/// `invalid-request`: it is outside of the directories for imports, or not a regular file. `in-use`: a process may write to it.
pub(super) fn open_unused(path: &Path, allowed: &TransferDirectories) -> Result<File, Problem> {
    if !path.is_absolute() {
        return Err(refused(path, "must be an absolute path"));
    }
    let file = allowed.image(path).map_err(|error| match error {
        TransferError::Outside(why) => Problem::invalid("image", why),
        TransferError::File(error) => refused(path, &error.to_string()),
    })?;
    let metadata = file.metadata().map_err(|error| refused(path, &error.to_string()))?;
    if !metadata.is_file() {
        return Err(refused(path, "is no regular file"));
    }
    check_unused(&file, path)?;
    Ok(file)
}

/// What images of other formats begin with: the place, the bytes, and what that is.
const MAGICS: [(u64, &[u8], &str); 7] = [
    (0, b"QFI\xfb", "a qcow2 image"),
    (0, b"KDMV", "a VMDK image"),
    (0, b"COWD", "a VMDK image"),
    (0, b"# Disk DescriptorFile", "the description of a VMDK image"),
    (0, b"vhdxfile", "a VHDX image"),
    (0, b"conectix", "a VHD image"),
    (64, &[0x7f, 0x10, 0xda, 0xbe], "a VDI image"),
];

/// What an image that is not raw begins as. A raw one could, too: nothing is ever opened by this.
pub(super) fn begins_as(file: &File) -> io::Result<Option<&'static str>> {
    for (place, magic, name) in MAGICS {
        let mut there = vec![0; magic.len()];
        if file.read_at(&mut there, place)? == magic.len() && there == magic {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

fn check_unused(file: &File, path: &Path) -> Result<(), Problem> {
    let used = |by: &str| {
        let what = format!(
            "{} is in use: {by}. End it first; an image that is written to cannot be imported",
            path.display()
        );
        Err(Problem::new(ErrorCode::InUse, what))
    };
    if has_writers(file) {
        return used("a process has it open for writing");
    }
    match qemu_locks(file) {
        Ok(true) => Ok(()),
        Ok(false) => used("a QEMU or one of its tools has locked it for writing"),
        // A file system without locks.
        Err(error) => {
            tracing::debug!(path = %path.display(), %error, "QEMU's locks cannot be checked");
            Ok(())
        }
    }
}

/// Whether a process has the file open for writing, as far as the kernel tells.
fn has_writers(file: &File) -> bool {
    // When another process opens it for writing while the lease is held, we get a signal. This one is ignored
    // by default; the usual one would kill the process.
    // SAFETY: plain numbers, on a descriptor that is open.
    let asked = unsafe {
        let fd = file.as_raw_fd();
        if libc::fcntl(fd, F_SETSIG, libc::SIGURG) < 0 {
            return false;
        }
        let leased = libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK);
        let answer = if leased < 0 { Err(Errno::last()) } else { Ok(()) };
        if leased >= 0 {
            libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK);
        }
        answer
    };
    // Other errors: the file is another user's, or its file system has no leases.
    asked == Err(Errno::EAGAIN)
}

/// Sets the locks of a QEMU that reads and denies writing; false if another process writes.
fn qemu_locks(file: &File) -> io::Result<bool> {
    for byte in [QEMU_USES + READ, QEMU_FORBIDS + WRITE, QEMU_FORBIDS + RESIZE] {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&byte_lock(byte, libc::F_RDLCK))) {
            Ok(_) => {}
            Err(Errno::EAGAIN | Errno::EACCES) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    for byte in [QEMU_USES + WRITE, QEMU_USES + RESIZE, QEMU_FORBIDS + READ] {
        let mut lock = byte_lock(byte, libc::F_WRLCK);
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
        if lock.l_type != libc::F_UNLCK as libc::c_short {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(super) fn byte_lock(byte: i64, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        // Must be 0 for locks of open file descriptions.
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::process::{Command, Stdio};

    use vmseal_api::host::{DatastoreLocation, DatastoreSpec};
    use vmseal_api::id::{DatastoreId, DiskId};

    use super::*;

    fn disk() -> DiskSpec {
        let location = DatastoreLocation::Dir { path: "/nowhere".into() };
        DiskSpec {
            disk: DiskId::new(),
            name: "d".to_owned(),
            datastore: DatastoreSpec { datastore: DatastoreId::new(), location },
            size: 1 << 20,
            encrypted: false,
            allocation: vmseal_api::host::Allocation::Thin,
            role: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            facts: None,
        }
    }

    fn source(path: &Path, format: ImageFormat) -> ImageSource {
        ImageSource { path: path.to_owned(), format, force: false }
    }

    #[test]
    fn an_image_that_somebody_writes_to_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [1; 8192]).unwrap();
        let raw = source(&path, ImageFormat::Raw);
        let reader = File::open(&path).unwrap();
        Image::open(&raw, &disk(), &TransferDirectories::anywhere()).unwrap();
        let writer = File::options().append(true).open(&path).unwrap();
        let problem = Image::open(&raw, &disk(), &TransferDirectories::anywhere()).unwrap_err();
        assert_eq!(problem.code, ErrorCode::InUse, "{problem}");
        assert!(problem.detail.contains("open for writing"), "{problem}");
        drop((reader, writer));
        Image::open(&raw, &disk(), &TransferDirectories::anywhere()).unwrap();
    }

    #[test]
    fn qemu_s_locks_are_checked_and_set() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [1; 8192]).unwrap();
        // The locks of a QEMU that writes, where there are no leases.
        let writer = File::open(&path).unwrap();
        let lock = byte_lock(QEMU_USES + WRITE, libc::F_RDLCK);
        fcntl(&writer, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
        let raw = source(&path, ImageFormat::Raw);
        let problem = Image::open(&raw, &disk(), &TransferDirectories::anywhere()).unwrap_err();
        assert!(problem.detail.contains("QEMU"), "{problem}");
        drop(writer);
        let image = Image::open(&raw, &disk(), &TransferDirectories::anywhere()).unwrap();
        let write = || {
            let mut qemu_io = Command::new("qemu-io");
            qemu_io.args(["-f", "raw", "-c", "write 0 512"]).arg(&path).stdout(Stdio::null());
            qemu_io.output().unwrap()
        };
        let refused = write();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("lock"), "{said}");
        drop(image);
        assert!(write().status.success());
    }

    #[test]
    fn a_change_is_noticed_and_another_file_is_not_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("image"), directory.path().join("other"));
        std::fs::write(&path, [1; 8192]).unwrap();
        std::fs::write(&other, [1; 8192]).unwrap();
        let image = Image::open(
            &source(&path, ImageFormat::Raw),
            &disk(),
            &TransferDirectories::anywhere(),
        )
        .unwrap();
        let second = Image::open(
            &source(&other, ImageFormat::Raw),
            &disk(),
            &TransferDirectories::anywhere(),
        )
        .unwrap();
        assert_ne!(image.identity, second.identity);
        image.check_unchanged().unwrap();
        // Longer than the resolution of the clock for times of change.
        std::thread::sleep(std::time::Duration::from_millis(20));
        File::options().write(true).open(&path).unwrap().write_all_at(&[2], 5).unwrap();
        let problem = image.check_unchanged().unwrap_err();
        assert_eq!(problem.code, ErrorCode::InUse);
    }

    #[test]
    fn the_format_is_what_was_named_and_the_disk_must_hold_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2"])
            .arg(&path)
            .arg("2M")
            .status()
            .unwrap();
        assert!(made.success());
        let problem = Image::open(
            &source(&path, ImageFormat::Qcow2),
            &disk(),
            &TransferDirectories::anywhere(),
        )
        .unwrap_err();
        assert!(problem.detail.contains("disk of 2 MiB"), "{problem}");
        let large = DiskSpec { size: 2 << 20, ..disk() };
        Image::open(&source(&path, ImageFormat::Qcow2), &large, &TransferDirectories::anywhere())
            .unwrap();
        // One that is declared raw is refused, unless somebody says that it may be.
        let mut raw = source(&path, ImageFormat::Raw);
        for (begins, name) in
            [(&b"QFI\xfb"[..], "qcow2"), (b"KDMV", "VMDK"), (b"# Disk DescriptorFile", "VMDK")]
        {
            std::fs::write(&path, [begins, &[0; 8192]].concat()).unwrap();
            raw.force = false;
            let refused = Image::open(&raw, &large, &TransferDirectories::anywhere()).unwrap_err();
            assert!(
                refused.detail.contains(name) && refused.detail.contains("--force"),
                "{refused}"
            );
            raw.force = true;
            Image::open(&raw, &large, &TransferDirectories::anywhere()).unwrap();
        }
        std::fs::write(&path, [1; 8192]).unwrap();
        let problem = Image::open(
            &source(&path, ImageFormat::Qcow2),
            &large,
            &TransferDirectories::anywhere(),
        )
        .unwrap_err();
        assert!(problem.detail.contains("not a qcow2 image"), "{problem}");
    }
}
