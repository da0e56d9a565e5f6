//! What the sealed files of a VM (docs/formats/sealed-file.md) have in common: the key, and what is said of files that do not
//! open.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use vmseal_api::host::VmSpec;
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_seal::file::{FileError, Header, Kind, Wanted, open_wanted};
use vmseal_seal::frame::FrameError;
use vmseal_seal::slot::VmKey;
use vmseal_seal::stream::SealedReader;
use vmseal_secret::SecretBytes;

use crate::keys;
use crate::storage::file_error::failed;

/// The VM's key; none for a VM that has none. A VM with a key never has such a file in the clear.
///
/// # Errors
/// `locked`.
pub fn vm_key<'a>(
    spec: &'a VmSpec,
    kek: Option<&'a SecretBytes>,
) -> Result<Option<VmKey<'a>>, Problem> {
    let Some(reference) = &spec.key else { return Ok(None) };
    let Some(kek) = kek else {
        let what = format!("VM '{}' is locked: its key is not on this host", spec.name);
        return Err(Problem::new(ErrorCode::Locked, what));
    };
    Ok(Some(VmKey { kek, context: keys::context(spec.vm, reference) }))
}

/// Opens such a file to be read.
///
/// # Errors
/// Those of the file system.
pub fn open(path: &Path) -> Result<File, Problem> {
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
    opened.map_err(|error| failed(path, "opened", &error))
}

/// Opens the content of a file to copy it as the one that this header names, which was read from it: what has been put in its place meanwhile
/// is refused.
///
/// # Errors
/// `damaged`, `locked`; those of the file system.
pub fn open_as(
    path: &Path,
    header: &Header,
    (vm, kind): (VmId, Kind),
    key: Option<&VmKey<'_>>,
    remedy: &str,
) -> Result<SealedReader<File>, Problem> {
    let generation = Some(header.identity().generation);
    let opened = open_wanted(open(path)?, Wanted { vm: vm.0, kind, generation }, key);
    opened.map_err(|error| refused(path, &error, remedy))
}

/// A file whose header is refused, and what to do about it.
#[must_use]
pub fn refused(path: &Path, error: &FileError, remedy: &str) -> Problem {
    let code = match error {
        FileError::OtherKey(_) => ErrorCode::Locked,
        FileError::Io(error) if error.kind() == ErrorKind::StorageFull => ErrorCode::NoSpace,
        FileError::Io(_) => ErrorCode::Internal,
        _ => ErrorCode::Damaged,
    };
    Problem::new(code, format!("{}: {error}. {remedy}", path.display()))
}

/// A file that could not be read, or that is damaged, and what to do about that. `what` names it.
#[must_use]
pub fn unreadable(path: &Path, what: &str, error: &io::Error, remedy: &str) -> Problem {
    let frame = error.get_ref().is_some_and(|inner| inner.is::<FrameError>());
    let spoiled =
        frame || matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof);
    if !spoiled {
        return failed(path, "read", error);
    }
    let detail = format!("{what} {} is damaged: {error}. {remedy}", path.display());
    Problem::new(ErrorCode::Damaged, detail)
}

/// Removes a file that may be there.
///
/// # Errors
/// Those of the file system.
pub fn remove_if_there(path: &Path) -> Result<(), Problem> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(path, "removed", &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use vmseal_seal::file::{Identity, create};

    use super::*;

    #[test]
    fn a_file_that_is_put_in_the_place_of_another_is_not_copied_as_that_one() {
        let directory = tempfile::tempdir().unwrap();
        let (path, vm) = (directory.path().join("vm.memory"), VmId::new());
        let write = |generation: u64| {
            let identity = Identity { vm: vm.0, kind: Kind::Memory, generation };
            let mut to = create(File::create(&path).unwrap(), identity, None).unwrap();
            to.write_all(&[generation as u8; 4096]).unwrap();
            to.finish().unwrap();
        };
        write(7);
        let header = Header::read(&mut open(&path).unwrap()).unwrap();
        let opened = || open_as(&path, &header, (vm, Kind::Memory), None, "Begin again");
        let mut content = Vec::new();
        opened().unwrap().read_to_end(&mut content).unwrap();
        assert_eq!(content, [7_u8; 4096]);
        write(6);
        let refused = opened().err().unwrap();
        assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
        assert!(refused.detail.contains("generation 6, not 7"), "{refused}");
    }
}
