//! Images of LUKS1, which QEMU and nbdkit read (AES-256-XTS as vmseal), made by qemu-img.

use std::fs;
use std::path::PathBuf;

use super::{Place, Program, SystemError};
use crate::luks1::{FORMAT, FORMAT_ATTEMPTS};
use crate::stop;

/// The file with the test's passphrase: it protects nothing, but a passphrase must not be in argv.
pub(super) fn passphrase(place: &Place) -> PathBuf {
    place.directory.join("passphrase")
}

/// Writes that file.
pub(super) fn write_passphrase(place: &Place) -> Result<(), SystemError> {
    let path = passphrase(place);
    fs::write(&path, "benchmark").map_err(|source| SystemError::File { path, source })
}

/// The passphrase in the form that QEMU's programs accept.
pub(super) fn secret(place: &Place) -> String {
    format!("secret,id=s0,file={}", passphrase(place).display())
}

/// Makes an empty image.
pub(super) fn make(
    system: &'static str,
    image_tool: &Program,
    place: &Place,
) -> Result<(), SystemError> {
    write_passphrase(place)?;
    for _ in 1..FORMAT_ATTEMPTS {
        if format(system, image_tool, place).is_ok() {
            return Ok(());
        }
    }
    format(system, image_tool, place)
}

fn format(system: &'static str, image_tool: &Program, place: &Place) -> Result<(), SystemError> {
    let mut command = image_tool.command();
    command
        .args(["create", "-q", "-f", "luks", "--object", &secret(place)])
        .args(FORMAT)
        .arg(place.disk())
        .arg(place.size.to_string());
    let output = stop::output(&mut command).map_err(|e| image_tool.failed(e))?;
    if output.status.success() {
        return Ok(());
    }
    Err(SystemError::NotServing {
        system,
        what: format!("qemu-img ended with {}", output.status),
        log: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
