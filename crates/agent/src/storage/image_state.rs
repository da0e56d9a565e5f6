//! The state of an image in a pool of Ceph, by which it is known whether anybody may have written to it: what the time of the last change is to
//! a file in a directory. `vmseal-rbd` says it (docs/decisions/326).

use std::fs::File;
use std::io;

use rustix::io::Errno;
use vmseal_api::rbd::{STATE_ATTRIBUTE, STATE_MAX};

/// The state of a file that is open: where it is open to be written, the one in which it was found. None where nobody says it: of a file that is
/// too short to be an image, by a `vmseal-rbd` of an earlier version, on another file system. Blocks.
///
/// # Errors
/// `ResourceBusy` while the image is written; those of the file system.
pub fn of(file: &File) -> io::Result<Option<String>> {
    let mut value = [0_u8; STATE_MAX];
    let length = match rustix::fs::fgetxattr(file, STATE_ATTRIBUTE, &mut value[..]) {
        Ok(length) => length,
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let text = String::from_utf8_lossy(&value[..length]).into_owned();
    Ok(Some(text).filter(|text| !text.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_which_nobody_says_it_has_none() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(of(&file).unwrap(), None);
    }
}
