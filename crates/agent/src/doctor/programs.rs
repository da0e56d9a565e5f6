//! The programs that VMs need: QEMU, and the filter.

use std::path::Path;
use std::process::{Command, Stdio};

use super::Finding;
use crate::qemu::Qemu;

/// The device by which a guest sees an encrypted disk.
const DEVICE: &str = "\"vhost-user-blk-pci\"";

/// QEMU, and what it can.
pub fn qemu(program: &Path) -> Vec<Finding> {
    const CHECK: &str = "qemu";
    const INSTALL: &str = "install Debian's qemu-system-x86, or give --qemu";
    let qemu = match Qemu::find(program) {
        Ok(qemu) => qemu,
        Err(error) => return vec![Finding::failed(CHECK, error.to_string(), INSTALL)],
    };
    let found = format!("{} is version {}", qemu.path().display(), qemu.version());
    let devices = said(qemu.path(), &["-device", "help"]);
    let device = match devices {
        Some(devices) if devices.contains(DEVICE) => {
            Finding::ok("vhost-user-blk", "QEMU has the device of encrypted disks")
        }
        _ => Finding::failed(
            "vhost-user-blk",
            "QEMU has no vhost-user-blk-pci: no VM can have a disk",
            INSTALL,
        ),
    };
    vec![Finding::ok(CHECK, found), device]
}

/// The filter: it must be there, and of this version.
pub fn filter(program: &Path) -> Finding {
    const CHECK: &str = "filter";
    const INSTALL: &str = "install vmseal-filter beside vmseal, of the same version";
    let own = env!("CARGO_PKG_VERSION");
    let Some(answer) = said(program, &["--version"]) else {
        let found = format!("{} does not run: no VM can start", program.display());
        return Finding::failed(CHECK, found, INSTALL);
    };
    let answer = answer.trim();
    if answer.rsplit(' ').next() == Some(own) {
        return Finding::ok(CHECK, format!("{} is of this version, {own}", program.display()));
    }
    let found = format!("{} is '{answer}', and this is {own}", program.display());
    Finding::failed(CHECK, found, INSTALL)
}

fn said(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::Verdict;
    use super::*;

    fn script(directory: &Path, body: &str) -> std::path::PathBuf {
        let path = directory.join("program");
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        path
    }

    #[test]
    fn programs_that_are_missing_old_or_lack_a_device_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let run = |body: &str| script(directory.path(), body);
        let same = format!("echo vmseal-filter {}", env!("CARGO_PKG_VERSION"));
        assert_eq!(filter(&run(&same)).result, Verdict::Ok);
        assert_eq!(filter(&run("echo vmseal-filter 0.0.9")).result, Verdict::Failed);
        assert_eq!(filter(&run("exit 1")).result, Verdict::Failed);
        assert_eq!(filter(Path::new("/nowhere")).result, Verdict::Failed);
        let verdicts =
            |body: &str| qemu(&run(body)).iter().map(|finding| finding.result).collect::<Vec<_>>();
        assert_eq!(
            verdicts("echo 'name \"vhost-user-blk-pci\", bus PCI'"),
            [Verdict::Ok, Verdict::Ok]
        );
        assert_eq!(verdicts("echo 'name \"virtio-blk-pci\"'"), [Verdict::Ok, Verdict::Failed]);
        assert_eq!(qemu(Path::new("/nowhere"))[0].result, Verdict::Failed);
    }
}
