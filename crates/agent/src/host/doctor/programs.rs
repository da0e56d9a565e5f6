//! The programs that VMs need: QEMU, the filter, swtpm, and the firmware of VMs that start by UEFI.

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use vmseal_api::hardware::Firmware;

use super::Finding;
use crate::hypervisor::firmware::FirmwareFiles;
use crate::hypervisor::qemu::Qemu;
use crate::process;

/// QEMU's device for an encrypted disk.
const DEVICE: &str = "\"vhost-user-blk-pci\"";

/// How long a program may take to print its version; a slow disk reads QEMU in a second or two.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long it may take to exit after that.
const ENDING: Duration = Duration::from_secs(1);

/// The most that is read of a program's output, in bytes; QEMU's list of devices has some 20 000.
const SAID_MAX: u64 = 1024 * 1024;

/// QEMU: its version and devices.
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
            Finding::ok("vhost-user-blk", "QEMU has the device for encrypted disks")
        }
        _ => Finding::failed(
            "vhost-user-blk",
            "QEMU has no vhost-user-blk-pci: no VM can have a disk",
            INSTALL,
        ),
    };
    vec![Finding::ok(CHECK, found), device]
}

/// The filter: whether it is there, and of this version.
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
        return Finding::ok(
            CHECK,
            format!("{} has version {own}, as this program", program.display()),
        );
    }
    let found = format!("{} is '{answer}', and this program is {own}", program.display());
    Finding::failed(CHECK, found, INSTALL)
}

/// swtpm, which only VMs with a TPM need.
pub fn swtpm(program: &Path) -> Finding {
    const CHECK: &str = "swtpm";
    let path = process::find_program(program);
    match said(&path, &["--version"]) {
        Some(answer) => {
            let version = answer.lines().next().unwrap_or_default();
            Finding::ok(CHECK, format!("{} is '{}'", path.display(), version.trim()))
        }
        None => {
            let what = missing(&path, &std::env::var_os("PATH").unwrap_or_default());
            Finding::warning(
                CHECK,
                format!("{what}: no VM can have a TPM"),
                "install Debian's swtpm; if it is elsewhere, give --swtpm to vmseal doctor and to the agent",
            )
        }
    }
}

/// OVMF, which only VMs that start by UEFI need.
pub fn ovmf(directory: &Path) -> Finding {
    const CHECK: &str = "ovmf";
    let files = FirmwareFiles::of(directory.to_owned());
    let kinds = [Firmware::Uefi, Firmware::UefiSecureBoot];
    let directory = directory.display();
    match kinds.into_iter().try_for_each(|kind| files.examine(kind)) {
        Ok(()) => Finding::ok(CHECK, format!("OVMF is in {directory}")),
        Err(_) => {
            let found = format!("{directory} lacks files of OVMF: VMs cannot start by UEFI");
            Finding::warning(
                CHECK,
                found,
                "install Debian's ovmf; if it is elsewhere, give --firmware-directory to vmseal doctor and to the agent",
            )
        }
    }
}

/// What is said of a program that does not run, with where it was looked for.
fn missing(program: &Path, search: &OsStr) -> String {
    match program.components().count() {
        0 | 1 => format!(
            "{} is in no directory of PATH ({}), or does not run",
            program.display(),
            search.display()
        ),
        _ => format!("{} does not run", program.display()),
    }
}

fn said(program: &Path, arguments: &[&str]) -> Option<String> {
    said_within(TIMEOUT, program, arguments)
}

/// The output of a program that exits with success within `limit`.
fn said_within(limit: Duration, program: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let (sender, answer) = channel();
    let from = child.stdout.take()?;
    // In its own thread: a program that prints nothing, or without end, must not delay the other checks.
    std::thread::spawn(move || {
        let mut said = Vec::new();
        let read = from.take(SAID_MAX).read_to_end(&mut said);
        // The receiver is gone when the time is over.
        let _ = sender.send(read.map(|_| said));
    });
    let said = answer.recv_timeout(limit);
    let deadline = Instant::now() + ENDING;
    while said.is_ok() && Instant::now() < deadline && matches!(child.try_wait(), Ok(None)) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let ended = child.wait().ok()?;
    let said = said.ok()?.ok()?;
    ended.success().then(|| String::from_utf8_lossy(&said).into_owned())
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use crate::storage::pool::tests::write_script;

    fn script(directory: &Path, body: &str) -> std::path::PathBuf {
        let path = directory.join("program");
        write_script(&path, &format!("#!/bin/sh\n{body}\n"));
        path
    }

    #[test]
    fn programs_that_are_missing_old_or_lack_a_device_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let run = |body: &str| script(directory.path(), body);
        let same = format!("echo vmseal-filter {}", env!("CARGO_PKG_VERSION"));
        assert_eq!(filter(&run(&same)).result, Verdict::Ok);
        assert_eq!(filter(&run("echo vmseal-filter 0.0.9")).result, Verdict::Failed);
        assert_eq!(filter(&run("exit 1")).result, Verdict::Failed);
        assert_eq!(filter(Path::new("/nowhere")).result, Verdict::Failed);
        let began = Instant::now();
        for silent in ["exec sleep 60", "echo vmseal-filter 0.1.0; exec >&-; exec sleep 60"] {
            assert_eq!(said_within(Duration::from_millis(300), &run(silent), &[]), None);
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        let verdicts =
            |body: &str| qemu(&run(body)).iter().map(|finding| finding.result).collect::<Vec<_>>();
        assert_eq!(
            verdicts("echo 'name \"vhost-user-blk-pci\", bus PCI'"),
            [Verdict::Ok, Verdict::Ok]
        );
        assert_eq!(verdicts("echo 'name \"virtio-blk-pci\"'"), [Verdict::Ok, Verdict::Failed]);
        assert_eq!(qemu(Path::new("/nowhere"))[0].result, Verdict::Failed);
        let found = swtpm(&run("echo 'TPM emulator version 0.7.1, Copyright'"));
        assert_eq!(found.result, Verdict::Ok);
        assert!(found.found.contains("0.7.1"), "{}", found.found);
        let missing = swtpm(Path::new("/nowhere"));
        assert_eq!(missing.result, Verdict::Warning);
        assert!(missing.found.contains("/nowhere"), "{}", missing.found);
        assert!(missing.remedy.unwrap().contains("--swtpm"));
        let missing = ovmf(directory.path());
        assert_eq!(missing.result, Verdict::Warning);
        assert!(missing.found.contains(&directory.path().display().to_string()));
        assert!(missing.remedy.unwrap().contains("--firmware-directory"));
    }

    #[test]
    fn a_program_that_is_not_found_is_reported_with_where_it_was_looked_for() {
        let search = OsStr::new("/usr/bin:/opt/bin");
        let by_name = missing(Path::new("swtpm"), search);
        assert!(
            by_name.contains("swtpm is in no directory of PATH (/usr/bin:/opt/bin)"),
            "{by_name}"
        );
        assert_eq!(missing(Path::new("/opt/swtpm"), search), "/opt/swtpm does not run");
    }
}
