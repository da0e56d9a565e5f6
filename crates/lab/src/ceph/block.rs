//! The blocks of encrypted OSDs: encryption below the OSD, as `ceph-volume --dmcrypt` has it, where the kernel has no
//! device-mapper.
//!
//! ```text
//!  osd.N ─► osd/N/block ─► block/N (FUSE) ─► qemu-storage-daemon ─► luks/N: LUKS1, AES-256-XTS
//!                                                   └─ keys/osd.N.luks
//! ```
//! The OSD finds at `block/N` a file in the clear, and what it writes there lies encrypted in `luks/N`. The daemon unmounts
//! the file when it ends in good order; one that was killed leaves a mount behind that nobody serves.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::mount::{MntFlags, umount2};
use nix::unistd::geteuid;
use vmseal_secret::{KEK_LEN, MemoryError, SecretBytes};

use super::daemon::{BLOCK_SERVER, Daemon};
use super::error::CephError;
use super::layout::{self, Layout};
use super::mountinfo;
use super::tools;
use crate::luks1::{FORMAT, FORMAT_ATTEMPTS};

/// The program that formats LUKS.
const IMAGE_TOOL: &str = "qemu-img";
/// The program that mounts and unmounts for users other than root.
const MOUNT_HELPER: &str = "fusermount3";
/// The kernel's side of FUSE.
const FUSE: &str = "/dev/fuse";

/// Finds that OSDs can be encrypted here.
///
/// # Errors
/// What is missing.
pub fn check() -> Result<(), CephError> {
    let refused = |why| Err(CephError::Encryption { why });
    let path = std::env::var_os("PATH").unwrap_or_default();
    if let Some((program, package)) = missing(&path, geteuid().is_root()) {
        return refused(format!(
            "the program {program} is not in PATH; install Debian's package {package}"
        ));
    }
    if let Err(error) = File::options().read(true).write(true).open(FUSE) {
        return refused(format!(
            "{FUSE} cannot be opened ({error}); the kernel needs FUSE, and the user the right to use it"
        ));
    }
    let mut help = Command::new(BLOCK_SERVER);
    help.arg("--help").stdin(Stdio::null());
    match String::from_utf8_lossy(&tools::run(help)?).contains("]fuse,") {
        true => Ok(()),
        false => refused(format!("{BLOCK_SERVER} was built without exports over FUSE")),
    }
}

/// The first program that is not in a search path, with Debian's package of it.
fn missing(path: &OsStr, root: bool) -> Option<(&'static str, &'static str)> {
    let all = [(IMAGE_TOOL, "qemu-utils"), (BLOCK_SERVER, "qemu-system-common")];
    let helper = (!root).then_some((MOUNT_HELPER, "fuse3"));
    all.into_iter().chain(helper).find(|(program, _)| !tools::is_in(path, program))
}

/// Makes the key of an OSD, unless it has one, and its encrypted file anew. Nothing of the OSD runs.
///
/// # Errors
/// The file system's, or QEMU's.
pub fn make(layout: &Layout, id: usize, gib: u64) -> Result<(), CephError> {
    unmount(&layout.block(id))?;
    make_key(layout, id)?;
    let new = layout.unfinished(Daemon::Block(id));
    let mut attempts = 1;
    loop {
        layout::remove(&new).map_err(file(&new))?;
        let mut format = Command::new(IMAGE_TOOL);
        format.args(["create", "-q", "-f", "luks", "--object", &secret(layout, id)]);
        format.args(FORMAT).arg(&new).arg(format!("{gib}G")).stdin(Stdio::null());
        match tools::run(format) {
            Ok(_) => break,
            Err(CephError::Command { .. }) if attempts < FORMAT_ATTEMPTS => attempts += 1,
            Err(error) => return Err(error),
        }
    }
    File::open(&new).and_then(|it| it.sync_all()).map_err(file(&new))?;
    layout.finish(&new, &layout.store(Daemon::Block(id)))
}

/// Makes the key of an OSD: text, as QEMU takes no other passphrases.
fn make_key(layout: &Layout, id: usize) -> Result<(), CephError> {
    let path = layout.block_key(id);
    if path.exists() {
        return Ok(());
    }
    let key = new_key().map_err(|source| CephError::Secret { path: path.clone(), source })?;
    layout.write_bytes(&path, key.expose())
}

fn new_key() -> Result<SecretBytes, MemoryError> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let key = SecretBytes::random(KEK_LEN)?;
    let mut text = SecretBytes::zeroed(2 * KEK_LEN)?;
    for (digits, &byte) in text.expose_mut().chunks_exact_mut(2).zip(key.expose()) {
        digits[0] = DIGITS[usize::from(byte >> 4)];
        digits[1] = DIGITS[usize::from(byte & 15)];
    }
    Ok(text)
}

/// Readies the place at which a block is served: an empty file on which nothing is mounted. No process serves it.
///
/// # Errors
/// The file system's, or it cannot be unmounted.
pub fn make_place(layout: &Layout, id: usize) -> Result<(), CephError> {
    let place = layout.block(id);
    unmount(&place)?;
    let mut options = File::options();
    let made = options.create(true).truncate(true).write(true).mode(0o600).open(&place);
    made.map(drop).map_err(file(&place))
}

/// The program that serves a block. It goes to the background once it does.
#[must_use]
pub fn server(layout: &Layout, id: usize) -> Command {
    let stored = option(&layout.store(Daemon::Block(id)));
    let mut command = Command::new(BLOCK_SERVER);
    command
        .args(["--object", &secret(layout, id)])
        // As the other systems that are measured have it, and as BlueStore opens a file of its own.
        .arg("--blockdev")
        .arg(format!("driver=file,node-name=stored,cache.direct=on,aio=io_uring,filename={stored}"))
        .args(["--blockdev", "driver=luks,node-name=clear,file=stored,key-secret=s0"])
        .args(["--export", &export(layout, id), "--daemonize"])
        .stdin(Stdio::null());
    command
}

/// What the program is told to serve, and where; the process is known by it.
#[must_use]
pub fn export(layout: &Layout, id: usize) -> String {
    let place = option(&layout.block(id));
    format!("type=fuse,id=block{id},node-name=clear,writable=on,mountpoint={place}")
}

/// The OSD whose block a process serves that was told to export this.
#[must_use]
pub fn osd_of(layout: &Layout, exported: &str) -> Option<usize> {
    let (number, _) = exported.strip_prefix("type=fuse,id=block")?.split_once(',')?;
    let id = number.parse().ok()?;
    (export(layout, id) == exported).then_some(id)
}

/// Where QEMU's programs read a key: it is not in their arguments.
fn secret(layout: &Layout, id: usize) -> String {
    format!("secret,id=s0,file={}", option(&layout.block_key(id)))
}

/// A path within an option of QEMU's programs, where a comma is written twice.
fn option(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// Whether something is mounted at the place of a block.
///
/// # Errors
/// The kernel does not tell.
pub fn is_mounted(layout: &Layout, id: usize) -> Result<bool, CephError> {
    Ok(!mountinfo::below(&layout.block(id))?.is_empty())
}

/// Unmounts all that is mounted at a place, or below it.
///
/// # Errors
/// It cannot be unmounted.
pub fn unmount(place: &Path) -> Result<(), CephError> {
    // One on top of another is there twice.
    for place in mountinfo::below(place)? {
        if geteuid().is_root() {
            umount2(&place, MntFlags::MNT_DETACH).map_err(|errno| file(&place)(errno.into()))?;
        } else {
            let mut helper = Command::new(MOUNT_HELPER);
            helper.args(["-u", "-z"]).arg(&place).stdin(Stdio::null());
            tools::run(helper)?;
        }
    }
    Ok(())
}

/// An error of a file.
fn file(path: &Path) -> impl FnOnce(std::io::Error) -> CephError + use<> {
    let path = path.to_owned();
    move |source| CephError::File { path, source }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_server_is_told_where_the_key_is_and_not_the_key() {
        let layout = Layout::at(Path::new("/lab,1"));
        let command = server(&layout, 3);
        let words: Vec<_> =
            command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(command.get_program(), BLOCK_SERVER);
        assert_eq!(
            words,
            [
                "--object",
                "secret,id=s0,file=/lab,,1/keys/osd.3.luks",
                "--blockdev",
                "driver=file,node-name=stored,cache.direct=on,aio=io_uring,filename=/lab,,1/luks/3",
                "--blockdev",
                "driver=luks,node-name=clear,file=stored,key-secret=s0",
                "--export",
                "type=fuse,id=block3,node-name=clear,writable=on,mountpoint=/lab,,1/block/3",
                "--daemonize",
            ]
        );
    }

    #[test]
    fn a_server_is_known_by_what_it_exports() {
        let layout = Layout::at(Path::new("/lab"));
        for id in [0, 3, 31] {
            assert_eq!(osd_of(&layout, &export(&layout, id)), Some(id));
        }
        let another = export(&Layout::at(Path::new("/lab2")), 3);
        let other_place = export(&layout, 3).replace("block/3", "block/4");
        let zero = export(&layout, 3).replace("block3", "block03");
        for exported in [&*another, &other_place, &zero, "type=fuse,id=block3", "type=nbd", ""] {
            assert_eq!(osd_of(&layout, exported), None, "{exported}");
        }
    }

    #[test]
    fn a_key_is_made_once_and_is_the_users_alone() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        layout.make_directories().unwrap();
        make_key(&layout, 0).unwrap();
        let path = layout.block_key(0);
        let key = fs::read_to_string(&path).unwrap();
        assert_eq!(key.len(), 2 * KEK_LEN);
        assert!(key.bytes().all(|it| b"0123456789abcdef".contains(&it)), "no hexadecimal digits");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        make_key(&layout, 0).unwrap();
        assert!(fs::read_to_string(&path).unwrap() == key, "there is another key");
        make_key(&layout, 1).unwrap();
        assert!(fs::read_to_string(layout.block_key(1)).unwrap() != key, "two OSDs have one key");
    }

    #[test]
    fn a_place_that_was_left_is_empty_again() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        layout.make_directories().unwrap();
        fs::write(layout.block(2), "left").unwrap();
        make_place(&layout, 2).unwrap();
        assert_eq!(fs::metadata(layout.block(2)).unwrap().len(), 0);
        assert!(!is_mounted(&layout, 2).unwrap());
    }

    #[test]
    fn what_is_missing_is_told_with_its_package() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().as_os_str();
        assert_eq!(missing(path, true), Some((IMAGE_TOOL, "qemu-utils")));
        fs::write(place.path().join(IMAGE_TOOL), "").unwrap();
        assert_eq!(missing(path, true), Some((BLOCK_SERVER, "qemu-system-common")));
        fs::write(place.path().join(BLOCK_SERVER), "").unwrap();
        assert_eq!(missing(path, true), None);
        assert_eq!(missing(path, false), Some((MOUNT_HELPER, "fuse3")));
    }
}
