//! What is taken of a file that swtpm has written without a key, and what is refused.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use vmseal_api::id::DiskId;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::DERIVED_LEN;

use super::*;
use crate::hypervisor::tpm::{END_TIMEOUT, PROGRAM};
use crate::process::run_dir::RunDir;
use crate::storage::tpm_state;

/// The commands of swtpm's control socket that load what a TPM keeps, and end the program.
const INIT: &[u8] = &[0, 0, 0, 2, 0, 0, 0, 0];
const SHUTDOWN: &[u8] = &[0, 0, 0, 3];

/// Has a swtpm without a key make a TPM in this directory, as libvirt's does; its file.
pub(crate) fn plain(directory: &Path) -> PathBuf {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let mut swtpm = Command::new(PROGRAM);
    swtpm.args(["socket", "--tpm2", "--terminate", "--ctrl", "type=unixio,clientfd=0"]);
    swtpm.arg("--tpmstate").arg(format!("dir={}", directory.display()));
    let mut swtpm = swtpm.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().unwrap();
    for command in [INIT, SHUTDOWN] {
        ours.write_all(command).unwrap();
        let mut answer = [0xff; 4];
        ours.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [0; 4]);
    }
    drop(ours);
    swtpm.wait().unwrap();
    directory.join("tpm2-00.permall")
}

fn clear(kept: &Permanent) -> Vec<u8> {
    let mut written = Vec::new();
    kept.write_to(&mut written).unwrap();
    written
}

#[tokio::test]
async fn a_tpm_keeps_what_a_file_has_under_a_key_of_its_own() {
    let place = tempfile::tempdir().unwrap();
    let directory = RunDir::open(&place.path().join("run")).unwrap().import(DiskId::new());
    directory.renew().await.unwrap();
    let anywhere = TransferDirectories::anywhere();
    let file = plain(place.path());
    let of_file = std::fs::read(&file).unwrap();
    let taken = take(file.clone(), &anywhere).await.unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), of_file, "the file was changed");

    let (lock, swtpm) = (tempfile::tempfile().unwrap(), Swtpm::of(PROGRAM.into()));
    let key = SecretBytes::random(DERIVED_LEN).unwrap();
    let path = place.path().join("of-vm");
    let made = tpm_state::make(&path, None).unwrap();
    let state = State { directory: &made, lock: &lock, key: &key, user: None };
    let process = taken.give(&swtpm, &directory, &state).unwrap();
    process.end_within(END_TIMEOUT).await;
    tpm_state::flush(&path, &made).unwrap();
    let stored = tpm_state::read(&path).unwrap();
    assert!(of_file.len() > 600, "{}", of_file.len());
    let part = &of_file[500..564];
    assert!(of_file.windows(64).any(|it| it == part), "the search does not find what is there");
    assert!(!stored.windows(64).any(|it| it == part), "it is stored in the clear");
    let (kept, process) = swtpm.take(&directory, &state).unwrap();
    process.end_within(END_TIMEOUT).await;
    // But for the frame.
    assert!(clear(&kept).ends_with(&of_file[HEADER..]), "it keeps something else");

    // What swtpm has saved of a TPM whose file is encrypted is taken as it is.
    let saved = place.path().join("saved");
    std::fs::write(&saved, clear(&kept)).unwrap();
    let again = read(&saved, &anywhere).unwrap();
    assert!(clear(&again.permanent) == clear(&kept), "it was changed");
    // Its own file is not in the clear.
    let encrypted = read(&path.join("tpm2-00.permall"), &anywhere).unwrap_err();
    assert_eq!(encrypted.field.as_deref(), Some(FIELD), "{encrypted}");
    for told in ["is encrypted", "swtpm_ioctl --save permanent", "--reset-tpm"] {
        assert!(encrypted.detail.contains(told), "{encrypted}");
    }
    directory.sweep().await.unwrap();
}

/// It looks like a state, and swtpm does not load it: nothing of the file, nor of a new TPM, is stored.
#[tokio::test]
async fn what_swtpm_does_not_load_is_refused_with_its_file() {
    let place = tempfile::tempdir().unwrap();
    let directory = RunDir::open(&place.path().join("run")).unwrap().import(DiskId::new());
    directory.renew().await.unwrap();
    let file = plain(place.path());
    let mut damaged = std::fs::read(&file).unwrap();
    damaged[HEADER + TAG + 6..].fill(0);
    std::fs::write(&file, &damaged).unwrap();
    let taken = read(&file, &TransferDirectories::anywhere()).unwrap();
    let (lock, path) = (tempfile::tempfile().unwrap(), place.path().join("of-vm"));
    let key = SecretBytes::random(DERIVED_LEN).unwrap();
    let made = tpm_state::make(&path, None).unwrap();
    let state = State { directory: &made, lock: &lock, key: &key, user: None };
    let given = taken.give(&Swtpm::of(PROGRAM.into()), &directory, &state);
    let refused = given.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::InvalidRequest, "{refused}");
    assert_eq!(refused.field.as_deref(), Some(FIELD), "{refused}");
    assert!(refused.detail.contains(file.to_str().unwrap()), "{refused}");
    assert!(!path.join("tpm2-00.permall").exists(), "something was stored");
    directory.sweep().await.unwrap();
}

#[test]
fn a_file_that_is_no_state_of_a_tpm_2_is_refused_with_what_to_do() {
    let place = tempfile::tempdir().unwrap();
    let whole = std::fs::read(plain(place.path())).unwrap();
    let path = place.path().join("state");
    let allowed = TransferDirectories::new(vec![place.path().to_owned()]).unwrap();
    let refused = |content: &[u8]| {
        std::fs::write(&path, content).unwrap();
        read(&path, &allowed).map(drop).unwrap_err()
    };
    let with = |at: usize, byte: u8| {
        let mut content = whole.clone();
        content[at] = byte;
        content
    };
    for (content, told) in [
        (Vec::new(), "no state of a TPM 2.0"),
        (whole[..9].to_vec(), "no state of a TPM 2.0"),
        (whole[..whole.len() - 1].to_vec(), "no state of a TPM 2.0"),
        ([&whole[..], &[0]].concat(), "no state of a TPM 2.0"),
        (vec![b'x'; 4096], "no state of a TPM 2.0"),
        // Of a later version, with flags that nobody knows, and without the magic, as the state of a TPM 1.2.
        (with(1, 3), "no state of a TPM 2.0"),
        (with(4, 1), "no state of a TPM 2.0"),
        (with(HEADER + TAG + 2, 0), "no state of a TPM 2.0"),
        (with(5, 1), "is encrypted"),
        (with(5, 2), "is encrypted"),
        (vec![0; usize::try_from(TPM_STATE_MAX).unwrap() + 1], "has more than 1 MiB"),
    ] {
        let refused = refused(&content);
        assert_eq!(refused.code, ErrorCode::InvalidRequest, "{refused}");
        assert_eq!(refused.field.as_deref(), Some(FIELD), "{refused}");
        assert!(refused.detail.contains(told), "{told}: {refused}");
        assert!(refused.detail.contains("--reset-tpm"), "{refused}");
    }
    std::fs::write(&path, &whole).unwrap();
    read(&path, &allowed).unwrap();
    for (path, allowed, told) in [
        (place.path().join("none"), allowed.clone(), "No such file"),
        (place.path().to_owned(), allowed, "no regular file"),
        (path, TransferDirectories::new(Vec::new()).unwrap(), "--transfer-directory"),
    ] {
        let refused = read(&path, &allowed).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some(FIELD), "{refused}");
        assert!(refused.detail.contains(told), "{told}: {refused}");
        assert!(refused.detail.contains("--reset-tpm"), "{refused}");
    }
}

#[test]
fn a_file_that_something_uses_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let file = plain(place.path());
    let anywhere = TransferDirectories::anywhere();
    read(&file, &anywhere).unwrap();
    // As swtpm does while the domain runs.
    let lock = File::options().write(true).open(place.path().join(LOCK)).unwrap();
    fcntl(&lock, FcntlArg::F_OFD_SETLK(&byte_lock(0, libc::F_WRLCK))).unwrap();
    let used = read(&file, &anywhere).unwrap_err();
    assert_eq!(used.code, ErrorCode::InUse, "{used}");
    assert!(used.detail.contains("stop the domain"), "{used}");
    drop(lock);
    let writer = File::options().append(true).open(&file).unwrap();
    let used = read(&file, &anywhere).unwrap_err();
    assert_eq!(used.code, ErrorCode::InUse, "{used}");
    assert!(!used.detail.contains("empty TPM"), "what is only in use is given up: {used}");
    drop(writer);
    read(&file, &anywhere).unwrap();
}
