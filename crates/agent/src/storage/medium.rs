//! The files of this host that are media in CD-ROM drives of VMs. They are open for reading alone.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use tokio::task::spawn_blocking;
use vmseal_api::hardware::Hardware;
use vmseal_api::host::MediumFacts;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::digest::Sha256;

use super::transfer::{TransferDirectories, TransferError};
use crate::process::usage::has_open;

/// The field of a machine that a refusal of a medium is about.
const FIELD: &str = "cdrom.medium";

/// The size of a sector of a drive, in bytes: what is smaller than one has no content.
const SECTOR: u64 = 2048;

/// How much of both ends of a file is compared, in bytes. In the first of it are the descriptors of ISO 9660 and UDF, with the name, date
/// and size of what is on the medium; all of a large file would take as long as it takes to read.
const END: usize = 1 << 20;

/// Opens what is in the drive of a machine; none where there is nothing.
///
/// # Errors
/// `invalid-request`: it is outside of the directories that this host imports from, not there, no regular file, or too
/// short.
pub async fn open(
    hardware: &Hardware,
    allowed: &TransferDirectories,
) -> Result<Option<File>, Problem> {
    let Some(path) = hardware.medium() else { return Ok(None) };
    let (path, allowed) = (path.to_owned(), allowed.clone());
    spawn_blocking(move || open_file(&path, &allowed))
        .await
        .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?
        .map(Some)
}

/// Opens a file. Blocks.
///
/// # Errors
/// Those of [`open`].
pub fn open_file(path: &Path, allowed: &TransferDirectories) -> Result<File, Problem> {
    let refused = |what: String| Problem::invalid(FIELD, format!("{}: {what}", path.display()));
    let file = allowed.image(path).map_err(|error| match error {
        TransferError::Outside(why) => Problem::invalid(FIELD, why),
        TransferError::File(error) => refused(error.to_string()),
    })?;
    let metadata = file.metadata().map_err(|error| refused(error.to_string()))?;
    if !metadata.is_file() {
        return Err(refused("is no regular file".to_owned()));
    }
    if metadata.len() < SECTOR {
        let what = format!("has {} bytes, and a medium has {SECTOR} at least", metadata.len());
        return Err(refused(what));
    }
    Ok(file)
}

/// Measures a file that was opened as a medium. Blocks.
///
/// # Errors
/// `invalid-request`: it cannot be read.
pub fn measure(path: &Path, file: &File) -> Result<MediumFacts, Problem> {
    let failed = |error: io::Error| Problem::invalid(FIELD, format!("{}: {error}", path.display()));
    let bytes = file.metadata().map_err(failed)?.len();
    let mut part = vec![0; usize::try_from(bytes).unwrap_or(END).min(END)];
    let mut digest = Sha256::new();
    for at in [0, bytes.saturating_sub(END as u64)] {
        file.read_exact_at(&mut part, at).map_err(failed)?;
        digest.update(&part);
    }
    let ends = digest.finish().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(MediumFacts { bytes, ends })
}

/// Checks that a guest which runs has this file in its drive, and not another one that had its path before. `qemu` is the record of its
/// QEMU; where none runs, any file will do. Blocks.
///
/// # Errors
/// `wrong-state`.
pub fn require_in_use(path: &Path, file: &File, qemu: &Path) -> Result<(), Problem> {
    let what = match file.metadata().and_then(|found| has_open(qemu, &found)) {
        Ok(Some(true) | None) => return Ok(()),
        Ok(Some(false)) => {
            "the guest has another file open in its CD-ROM drive, in whose place this one is now"
                .to_owned()
        }
        Err(error) => {
            format!("whether the guest has this file in its CD-ROM drive cannot be seen: {error}")
        }
    };
    let detail = format!("{}: {what}", path.display());
    Err(Problem::new(ErrorCode::WrongState, detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_that_differ_in_size_or_at_an_end_are_told_apart() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("some.iso");
        let measured = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            measure(&path, &File::open(&path).unwrap()).unwrap()
        };
        let large = vec![7; 3 * END];
        let facts = measured(&large);
        assert_eq!((facts.bytes, facts.ends.len()), (3 << 20, 64));
        assert_eq!(measured(&large), facts);
        for at in [0, END - 1, 2 * END, 3 * END - 1] {
            let mut other = large.clone();
            other[at] = 8;
            assert_ne!(measured(&other), facts, "{at}");
        }
        assert_ne!(measured(&large[1..]), facts, "a byte less");
        assert_ne!(measured(&[1; 4096]), measured(&[2; 4096]), "small ones");
    }

    #[test]
    fn only_regular_files_in_the_directories_are_media() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir(at("iso")).unwrap();
        let allowed = TransferDirectories::new(vec![at("iso")]).unwrap();
        std::fs::write(at("iso/good.iso"), [0; 4096]).unwrap();
        std::fs::write(at("iso/short.iso"), [0; 2047]).unwrap();
        std::fs::write(at("outside.iso"), [0; 4096]).unwrap();
        std::os::unix::fs::symlink("../outside.iso", at("iso/link.iso")).unwrap();
        nix::unistd::mkfifo(&at("iso/pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        open_file(&at("iso/good.iso"), &allowed).unwrap();
        for (name, said) in [
            ("iso/short.iso", "2047 bytes"),
            ("iso/none.iso", "No such file"),
            ("iso", "no regular file"),
            ("iso/pipe", "no regular file"),
            ("outside.iso", "--transfer-directory"),
            ("iso/link.iso", "--transfer-directory"),
        ] {
            let told = open_file(&at(name), &allowed).unwrap_err();
            assert_eq!(told.field.as_deref(), Some(FIELD), "{name}");
            assert!(told.detail.contains(said), "{name}: {told}");
        }
    }
}
