//! The files of this host that are media in CD-ROM drives of VMs. They are open for reading alone.

use std::fs::File;
use std::path::Path;

use tokio::task::spawn_blocking;
use vmseal_api::hardware::Hardware;
use vmseal_api::problem::{ErrorCode, Problem};

use super::transfer::{TransferDirectories, TransferError};

/// The field of a machine that a refusal of a medium is about.
const FIELD: &str = "cdrom.medium";

/// The size of a sector of a drive, in bytes: what is smaller than one has no content.
const SECTOR: u64 = 2048;

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

#[cfg(test)]
mod tests {
    use super::*;

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
