//! A small Linux guest on a disk of its own, which reads the disk that is made for cloud-init and says what it finds, again and again.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use crate::test_guest;

/// What the guest prints before what it has found, and what it prints behind it.
pub const FOUND: (&str, char) = ("VMSEAL-FIRST-BOOT ", ';');

/// How the lines of the documents begin whose hash the guest prints, sorted.
pub const TOLD: &str = "# told: ";

/// The guest's first process. It prints a hash: consoles are logged, and what it was told is not to be in a log; and how many lines
/// were typed before it read the disk.
const INIT: &str = r##"#!/usr/bin/busybox sh
/usr/bin/busybox --install -s /usr/bin
export PATH=/usr/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
exec </dev/console
stty -echo
modprobe virtio_pci; modprobe virtio_blk
until [ -b /dev/vdb ]; do sleep 1; done
label=$(dd if=/dev/vdb bs=1 skip=43 count=11 2>/dev/null | tr -d ' ') # where FAT12 has it
writes=no; dd if=/dev/zero of=/dev/vdb bs=512 count=1 conv=fsync 2>/dev/null && writes=yes
typed=0
while :; do
    hash=$(grep -a '^# told: ' /dev/vdb | sort | sha256sum | cut -c1-64) # the kernel keeps nothing of a disk that nobody has open
    echo "VMSEAL-FIRST-BOOT typed=$typed label=$label read-only=$(cat /sys/block/vdb/ro) writes=$writes hash=$hash;" >/dev/console
    read -r -t 2 line && typed=$((typed + 1))
done
"##;

/// Makes the guest's raw disk at `path`: GRUB, Debian's kernel, and an initramfs with busybox and virtio alone.
///
/// # Errors
/// Those of the programs that make it.
pub fn disk(path: &Path) -> anyhow::Result<()> {
    let work = tempfile::tempdir()?;
    let at = |name: &str| work.path().join(name);
    let guest = test_guest::images()?;
    std::fs::create_dir_all(at("root"))?;
    unpack(&guest.join("initrd"), &at("root"))?;
    std::fs::write(at("root/init"), INIT)?;
    std::fs::create_dir(at("files"))?;
    std::fs::copy(guest.join("vmlinuz"), at("files/vmlinuz"))?;
    let pack =
        "chmod 755 init; mkdir -p proc sys dev; find . | cpio --quiet -o -H newc >../files/initrd";
    shell(&at("root"), pack, &[])?;
    std::fs::write(
        at("grub.cfg"),
        "set root=(hd0,msdos1)\nlinux /vmlinuz console=ttyS0 quiet panic=-1\ninitrd /initrd\nboot\n",
    )?;
    let build = r#"
        PATH=$PATH:/usr/sbin:/sbin
        truncate -s 64M disk
        mke2fs -q -F -t ext4 -O ^has_journal,^metadata_csum_seed,^orphan_file -d files -E offset=1048576 disk 63M
        grub-mkimage -O i386-pc -c grub.cfg -p / -o core.img biosdisk part_msdos ext2 linux boot
        echo 'start=2048, type=83, bootable' | sfdisk -q --no-reread --no-tell-kernel -X dos disk >/dev/null 2>&1
        dd if=/usr/lib/grub/i386-pc/boot.img of=disk bs=1 count=440 conv=notrunc status=none
        dd if=core.img of=disk bs=512 seek=1 conv=notrunc status=none
        cp --sparse=always disk "$1""#;
    shell(work.path(), build, &[path])
}

/// Busybox and the modules, of all that is in the test guest.
fn unpack(initrd: &Path, to: &Path) -> anyhow::Result<()> {
    let patterns = "cpio --quiet -idm 'usr/bin/busybox' 'usr/lib/modules/*' 'bin' 'lib' 'lib64' 'sbin' 'init' <\"$1\"";
    shell(to, patterns, &[initrd])
}

/// Runs a script in this directory, which makes a guest's disk or a part of it.
pub(crate) fn shell(directory: &Path, script: &str, arguments: &[&Path]) -> anyhow::Result<()> {
    let mut command = Command::new("sh");
    command.arg("-euc").arg(script).arg("sh").args(arguments.iter().map(PathBuf::from));
    let output = command.current_dir(directory).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the guest's disk could not be made: {said}");
    Ok(())
}

/// What the guest says: the part of its line between the two of [`FOUND`].
///
/// # Errors
/// It says nothing.
pub fn found(console: &mut crate::guest::Console) -> anyhow::Result<String> {
    console.expect(FOUND.0, 0)?;
    let mut line = String::new();
    while !line.ends_with(FOUND.1) {
        line.push_str(&console.expect("", 1)?);
        ensure!(line.len() < 1000, "the guest's line has no end: {line}");
    }
    line.pop();
    Some(line).context("nothing")
}
