//! A small Linux guest that runs a script with real dm-crypt and fio
//! (`scripts/build-test-initramfs` says what is in it).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{bail, ensure};

use crate::guest::built;

/// How long a script may take: emulated, on a machine that runs other tests.
const SCRIPT_SECONDS: u32 = 300;

/// A disk of the guest: `/dev/vda`, `/dev/vdb`, in order.
pub enum GuestDisk<'a> {
    /// Served on a vhost-user socket.
    VhostUser(&'a Path),
    /// Served by any process that connects to this vhost-user socket, one after the other.
    VhostUserServer(&'a Path),
    /// QEMU's own access to a raw file.
    Raw(&'a Path),
}

/// The directory with kernel and initramfs; built at the first use.
pub fn images() -> anyhow::Result<PathBuf> {
    built("build-test-initramfs", &[])
}

/// Boots the guest, runs `script` in it, and returns the script's output. `files` are in `/files`.
///
/// # Errors
/// The script ended with another status than 0, or not at all.
pub fn run(script: &str, disks: &[GuestDisk<'_>], files: Option<&Path>) -> anyhow::Result<String> {
    let work = tempfile::tempdir()?;
    let images = images()?;
    let script_file = work.path().join("script");
    std::fs::write(&script_file, script)?;
    let mut qemu = Command::new("timeout");
    qemu.arg(SCRIPT_SECONDS.to_string()).arg("qemu-system-x86_64");
    qemu.args(["-accel", "tcg", "-machine", "q35,memory-backend=m0", "-cpu", "max", "-m", "512"]);
    qemu.args(["-smp", "2", "-object", "memory-backend-memfd,id=m0,size=512M,share=on"]);
    qemu.args(["-nodefaults", "-nographic", "-no-reboot", "-serial", "stdio"]);
    qemu.arg("-kernel").arg(images.join("vmlinuz")).arg("-initrd").arg(images.join("initrd"));
    qemu.args(["-append", "console=ttyS0 quiet panic=-1"]);
    qemu.arg("-fw_cfg").arg(format!("name=opt/vmseal/run,file={}", script_file.display()));
    if let Some(files) = files {
        let tar = work.path().join("files.tar");
        let made =
            Command::new("tar").arg("-C").arg(files).arg("-cf").arg(&tar).arg(".").status()?;
        ensure!(made.success(), "tar failed");
        qemu.arg("-fw_cfg").arg(format!("name=opt/vmseal/files.tar,file={}", tar.display()));
    }
    for (index, disk) in disks.iter().enumerate() {
        match disk {
            GuestDisk::VhostUser(socket) | GuestDisk::VhostUserServer(socket) => {
                let listens = matches!(disk, GuestDisk::VhostUserServer(_));
                let server = if listens { ",server=on,wait=off" } else { "" };
                let socket = socket.display();
                qemu.arg("-chardev").arg(format!("socket,id=c{index},path={socket}{server}"));
                qemu.arg("-device")
                    .arg(format!("vhost-user-blk-pci,chardev=c{index},num-queues=2"));
            }
            GuestDisk::Raw(file) => {
                qemu.arg("-drive").arg(format!("file={},if=virtio,format=raw", file.display()));
            }
        }
    }
    let output = qemu.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let begin = said.rfind("VMSEAL-BEGIN").map(|at| at + "VMSEAL-BEGIN".len());
    let end = said.rfind("VMSEAL-EXIT ");
    let (Some(begin), Some(end)) = (begin, end) else {
        bail!(
            "the guest did not finish; it said:\n{said}\nQEMU said:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let printed = said[begin..end].trim().to_owned();
    ensure!(said[end..].starts_with("VMSEAL-EXIT 0"), "the guest's script failed:\n{printed}");
    Ok(printed)
}
