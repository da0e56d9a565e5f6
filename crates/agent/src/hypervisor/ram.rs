//! The file that a QEMU has its guest's memory in: nobody else has a name for it.

use std::fs::{self, File};
use std::io::{self, ErrorKind};

use crate::process::Process;

/// What the kernel calls it: QEMU gives it the name of its kind of object.
const FILE: &str = "/memfd:memory-backend-memfd";

/// Opens it.
///
/// # Errors
/// The agent may not, or the QEMU has none.
pub fn file(qemu: &Process) -> io::Result<File> {
    for entry in fs::read_dir(format!("/proc/{}/fd", qemu.pid()))? {
        let entry = entry?;
        // QEMU may have closed it meanwhile.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        if !target.to_string_lossy().starts_with(FILE) {
            continue;
        }
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(number) = number {
            return qemu.descriptor(number).map(File::from);
        }
    }
    Err(io::Error::new(ErrorKind::NotFound, "QEMU has no file of memory"))
}
