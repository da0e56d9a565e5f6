//! What a VM's TPM keeps, as the file in which swtpm has it for libvirt: **in the clear**.
//!
//! ```text
//! what swtpm gives   header, flags 4   tag 4, length ─── tag 1, length, what the TPM keeps
//! tpm2-00.permall    header, flags 0                     tag 1, length, what the TPM keeps
//! ```
//! The frames are those of [`super::tpm_import`], which takes the file again. It is what lets a VM leave: libvirt has no other way to be
//! given what a TPM keeps.

use std::io::{self, Write};

use super::tpm_import::{Beginning, HEADER, TAG, VERSION, u32_at};
use crate::hypervisor::tpm::Permanent;

/// The length of the frame in place of which the file has a header, in bytes.
const FRAME: usize = HEADER + TAG;

/// The flags of a file that is not encrypted.
const IN_THE_CLEAR: u16 = 0;

/// The length of the file, in bytes.
pub fn length(kept: &Permanent) -> u64 {
    (kept.length().saturating_sub(FRAME) + HEADER) as u64
}

/// Writes the content of the file.
///
/// # Errors
/// Those of what it writes to; swtpm gives it in another frame.
pub fn write(kept: &Permanent, to: &mut impl Write) -> io::Result<()> {
    let (begin, length_of_file) = (kept.beginning(), length(kept));
    let content = length_of_file - HEADER as u64;
    let known = matches!(Beginning::of(begin, kept.length() as u64), Some(Beginning::Moved));
    // Nothing may follow that the file would have, too.
    if !known || u32_at(begin, HEADER + 2).map(u64::from) != Some(content) {
        return Err(io::Error::other(
            "this host's swtpm gives what the VM's TPM keeps in a frame that this version of vmseal does not know: upgrade vmseal",
        ));
    }
    let all = u32::try_from(length_of_file).map_err(io::Error::other)?;
    let mut header = vec![VERSION, 1];
    header.extend((HEADER as u16).to_be_bytes());
    header.extend(IN_THE_CLEAR.to_be_bytes());
    header.extend(all.to_be_bytes());
    to.write_all(&header)?;
    kept.write_from(FRAME, to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::tpm_import::{self, tests::plain};
    use crate::storage::transfer::TransferDirectories;

    fn written(kept: &Permanent) -> Vec<u8> {
        let mut file = Vec::new();
        write(kept, &mut file).unwrap();
        assert_eq!(file.len() as u64, length(kept));
        file
    }

    #[test]
    fn the_file_is_the_one_that_swtpm_has() {
        let place = tempfile::tempdir().unwrap();
        let file = plain(place.path());
        let taken = tpm_import::read(&file, &TransferDirectories::anywhere()).unwrap();
        assert!(written(taken.permanent()) == std::fs::read(&file).unwrap(), "it is another one");
    }

    #[test]
    fn what_has_another_frame_is_not_written() {
        let place = tempfile::tempdir().unwrap();
        let file = plain(place.path());
        let taken = tpm_import::read(&file, &TransferDirectories::anywhere()).unwrap();
        let mut framed = Vec::new();
        taken.permanent().write_to(&mut framed).unwrap();
        let with = |at: usize, byte: u8| {
            let mut other = framed.clone();
            other[at] ^= byte;
            other
        };
        // Of another version, with other flags, with more than one part, and hardly anything.
        for other in [with(0, 1), with(5, 1), with(HEADER + 5, 1), framed[..4].to_vec()] {
            let kept = Permanent::read_from(&mut &other[..]).unwrap();
            let mut file = Vec::new();
            write(&kept, &mut file).unwrap_err();
            assert!(file.is_empty(), "something was written");
        }
    }
}
