//! A guest that UEFI firmware starts from a disk or a medium, and that says from which (`tests/images/uefi.S`).

use std::path::Path;

use anyhow::ensure;

use crate::first_boot::shell;
use crate::guest::{Code, Console, assembled, el_torito};

/// What the guest says before the name of what it was started from.
const STARTED: &str = "VMSEAL-STARTED-FROM ";

/// Code that the firmware loads anywhere.
const ANYWHERE: Code = Code { bits: "--64", emulation: "elf_x86_64", at: "0" };

/// The size of the program, as its header has it.
const PROGRAM: usize = 0x2000;

/// El Torito's number of UEFI among platforms.
const UEFI: u8 = 0xef;

/// Makes a raw disk of 1 MiB that UEFI firmware starts this guest from: FAT, with the program at the path that firmware tries. The
/// guest says `name`.
///
/// # Errors
/// Those of the programs that make it (packages `binutils`, `dosfstools`, `mtools`).
pub fn disk(path: &Path, name: &str) -> anyhow::Result<()> {
    let work = tempfile::tempdir()?;
    let mut program = assembled("uefi.S", &ANYWHERE)?;
    program.extend_from_slice(format!("{name}\r\n\0").as_bytes());
    ensure!(program.len() <= PROGRAM, "the guest has {} bytes", program.len());
    program.resize(PROGRAM, 0);
    std::fs::write(work.path().join("program"), program)?;
    let build = r#"
        PATH=$PATH:/usr/sbin:/sbin
        truncate -s 1M disk
        mkfs.vfat --invariant disk >/dev/null
        mmd -i disk ::EFI ::EFI/BOOT
        mcopy -i disk program ::EFI/BOOT/BOOTX64.EFI
        cp disk "$1""#;
    shell(work.path(), build, &[path])
}

/// Makes a medium that UEFI firmware starts this guest from, and a BIOS nothing.
///
/// # Errors
/// As [`disk`].
pub fn medium(path: &Path, name: &str) -> anyhow::Result<()> {
    let work = tempfile::tempdir()?;
    let started = work.path().join("disk");
    disk(&started, name)?;
    Ok(std::fs::write(path, el_torito(UEFI, &std::fs::read(started)?)?)?)
}

/// Waits until the guest says that it was started, and checks that it was from this disk or medium.
///
/// # Errors
/// It says nothing, or was started from another one.
pub fn started_from(guest: &mut Console, name: &str) -> anyhow::Result<()> {
    let said = guest.expect(STARTED, name.len())?;
    ensure!(said == name, "the guest was started from '{said}', not from '{name}'");
    Ok(())
}

/// Resets the guest, and checks what it is started from then.
///
/// # Errors
/// As [`started_from`].
pub fn starts_again_from(guest: &mut Console, name: &str) -> anyhow::Result<()> {
    guest.type_text("b")?;
    started_from(guest, name)
}
