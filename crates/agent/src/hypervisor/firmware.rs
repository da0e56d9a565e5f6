//! The firmware of guests that start by UEFI: OVMF, of the host's package, and its variables.
//!
//! QEMU maps both as flash memory. The code is a file that QEMU inherits. The variables are a disk of the VM's,
//! which the filter serves over NBD: QEMU connects to a socket in a directory that it inherits, again and again
//! when the filter has died, as its vhost-user disks do.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use serde_json::json;
use vmseal_api::hardware::{Firmware, VARIABLES_SIZE};
use vmseal_api::host::{Attachment, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::LockedFile;

/// Where Debian's package has it.
pub const DIRECTORY: &str = "/usr/share/OVMF";

/// The package.
const PACKAGE: &str = "ovmf";

/// The name of the variables' socket.
pub const SOCKET: &str = "fw";

/// How long QEMU waits for another filter before a request of the firmware fails, in seconds: longer than the agent tries
/// to start one. Where none comes, as the key or the agent is away, QEMU's log alone tells of the failed write.
const RECONNECT_SECONDS: u32 = 600;

/// The set of descriptors by which QEMU opens the code. The log of the console has the first, a medium of the CD-ROM drive the second.
const CODE_SET: u32 = 3;

/// The firmware of this host.
#[derive(Clone, Debug)]
pub struct FirmwareFiles {
    directory: PathBuf,
}

/// The firmware of a VM, opened for its QEMU.
#[derive(Debug)]
pub struct OpenFirmware {
    /// The code, which is the same for all VMs.
    pub code: File,
    /// The directory with the socket of the variables, to be found from it alone.
    pub sockets: File,
    /// Whether only what is signed is started.
    pub secure_boot: bool,
}

/// The names of a firmware's files: the code, and what variables begin with.
fn names(firmware: Firmware) -> Option<[&'static str; 2]> {
    match firmware {
        Firmware::Bios => None,
        Firmware::Uefi => Some(["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"]),
        Firmware::UefiSecureBoot => Some(["OVMF_CODE_4M.secboot.fd", "OVMF_VARS_4M.ms.fd"]),
    }
}

impl FirmwareFiles {
    /// The firmware of this directory.
    #[must_use]
    pub fn of(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Checks that a firmware is there.
    ///
    /// # Errors
    /// `unsupported`, with the package that has it.
    pub fn examine(&self, firmware: Firmware) -> Result<(), Problem> {
        for name in names(firmware).into_iter().flatten() {
            self.open(name)?;
        }
        Ok(())
    }

    fn open(&self, name: &str) -> Result<File, Problem> {
        let path = self.directory.join(name);
        File::open(&path).map_err(|error| missing(&path, &error))
    }

    /// The code of a firmware; none where QEMU has it of its own.
    ///
    /// # Errors
    /// `unsupported`, with the package that has it.
    pub fn code(&self, firmware: Firmware) -> Result<Option<File>, Problem> {
        names(firmware).map(|[code, _]| self.open(code)).transpose()
    }

    /// What the variables of a new VM begin with. Blocks.
    ///
    /// # Errors
    /// `unsupported`, with the package that has it.
    pub fn variables(&self, firmware: Firmware) -> Result<Option<LockedFile>, Problem> {
        let Some([_, name]) = names(firmware) else { return Ok(None) };
        let path = self.directory.join(name);
        let unread = |error| missing(&path, &error);
        let file = self.open(name)?;
        let length = file.metadata().map_err(unread)?.len();
        if length != VARIABLES_SIZE {
            let what = format!(
                "{} has {length} bytes in place of {VARIABLES_SIZE}: it is of no build of OVMF that vmseal knows. Install Debian's package {PACKAGE}",
                path.display()
            );
            return Err(Problem::new(ErrorCode::Unsupported, what));
        }
        let mut content = Vec::new();
        file.take(VARIABLES_SIZE).read_to_end(&mut content).map_err(unread)?;
        let failed = |error: String| {
            Problem::new(ErrorCode::Internal, format!("the firmware's variables: {error}"))
        };
        let mut memory =
            LockedFile::zeroed(content.len()).map_err(|error| failed(error.to_string()))?;
        memory.expose_mut().copy_from_slice(&content);
        Ok(Some(memory))
    }
}

fn missing(path: &Path, error: &std::io::Error) -> Problem {
    let what = format!(
        "{}: {error}. This host has no such firmware: install Debian's package {PACKAGE} there",
        path.display()
    );
    Problem::new(ErrorCode::Unsupported, what)
}

impl OpenFirmware {
    /// The descriptors that QEMU inherits.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        use std::os::fd::AsFd;
        [self.code.as_fd(), self.sockets.as_fd()].into_iter()
    }

    /// What is said of it to QEMU's option for the machine.
    #[must_use]
    pub fn machine(&self) -> &'static str {
        // Only code in system management mode may change what secure boot goes by.
        if self.secure_boot {
            ",smm=on,pflash0=firmware,pflash1=variables"
        } else {
            ",pflash0=firmware,pflash1=variables"
        }
    }

    /// QEMU's options for it, as names and values.
    #[must_use]
    pub fn options(&self, spec: &VmSpec) -> Vec<[String; 2]> {
        let option = |name: &str, value: String| [name.to_owned(), value];
        // By the directory, which the user of QEMU could not get to by its path.
        let path = format!("/proc/self/fd/{}/{SOCKET}.sock", self.sockets.as_raw_fd());
        let variables = spec.disks().find(|it| it.role.attachment() == Attachment::Firmware);
        let export = variables.map(|disk| disk.disk.to_string()).unwrap_or_default();
        let file = json!({
            "driver": "file", "node-name": "firmware-file", "read-only": true,
            "filename": format!("/dev/fdset/{CODE_SET}"),
        });
        let code = json!({
            "driver": "raw", "node-name": "firmware", "read-only": true, "file": "firmware-file",
        });
        let variables = json!({
            "driver": "nbd", "node-name": "variables", "export": export,
            "server": {"type": "unix", "path": path}, "reconnect-delay": RECONNECT_SECONDS,
        });
        let code_fd = format!("fd={},set={CODE_SET}", self.code.as_raw_fd());
        let mut options = vec![option("-add-fd", code_fd)];
        options.extend([file, code, variables].map(|it| option("-blockdev", it.to_string())));
        if self.secure_boot {
            let only_there = "driver=cfi.pflash01,property=secure,value=on";
            options.push(option("-global", only_there.to_owned()));
            // OVMF with system management mode cannot resume from it.
            options.push(option("-global", "ICH9-LPC.disable_s3=1".to_owned()));
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_firmware_that_is_not_there_is_refused_with_its_package() {
        let directory = tempfile::tempdir().unwrap();
        let files = FirmwareFiles::of(directory.path().to_owned());
        files.examine(Firmware::Bios).unwrap();
        assert!(files.variables(Firmware::Bios).unwrap().is_none());
        for firmware in [Firmware::Uefi, Firmware::UefiSecureBoot] {
            let refused = files.examine(firmware).unwrap_err();
            assert_eq!(refused.code, ErrorCode::Unsupported);
            assert!(refused.detail.contains("package ovmf"), "{refused}");
            assert_eq!(files.code(firmware).unwrap_err().code, ErrorCode::Unsupported);
            let [_, variables] = names(firmware).unwrap();
            std::fs::write(directory.path().join(variables), "short").unwrap();
            let refused = files.variables(firmware).unwrap_err();
            assert!(refused.detail.contains("5 bytes"), "{refused}");
        }
    }

    #[test]
    fn the_package_of_this_machine_is_known() {
        let files = FirmwareFiles::of(DIRECTORY.into());
        for firmware in [Firmware::Uefi, Firmware::UefiSecureBoot] {
            files.examine(firmware).unwrap();
            let memory = files.variables(firmware).unwrap().unwrap();
            assert_eq!(memory.reader().unwrap().metadata().unwrap().len(), VARIABLES_SIZE);
        }
    }
}
