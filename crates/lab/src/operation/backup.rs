//! Backups of a VM whose guest has changed a hundredth of its disk, beside full ones.
//!
//! ```text
//!   VM made ─► started ─► full backup (timed for `full-backup`) ─► guest reset: it writes a hundredth ─► backup (timed) ─► all of it removed
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{ENCRYPTED, OperationError, fill, timed, words};
use crate::installation::Installation;

/// What is changed: one part of so many.
const PARTS: u64 = 100;

/// The unit in which changes are noted and read, in bytes.
const BLOCK: u64 = 64 << 10;

/// How long the guest may take to write.
const WRITTEN: Duration = Duration::from_secs(60);

/// Real-mode code that writes 32 KiB from address 0 on, so often as the number at [`COUNT_AT`] says, one after another from 1 MiB on
/// of the disk that it was started from, and halts. What is written has the time in it, so it is another one each time.
///
/// ```text
///         xor ax,ax; mov ds,ax; mov ss,ax; mov sp,0x7000; sti
///   next: mov ax,0x4300; mov si,packet; push dx; int 0x13; pop dx; jc halt
///         add dword [address],64; dec dword [count]; jnz next
///   halt: hlt; jmp halt
/// packet: db 16,0; dw 64; dw 0,0
/// address: dq 2048
///  count: dd 0
/// ```
const WRITER: [u8; 58] = [
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x70, 0xfb, 0xb8, 0x00, 0x43, 0xbe, 0x26, 0x7c,
    0x52, 0xcd, 0x13, 0x5a, 0x72, 0x0d, 0x66, 0x83, 0x06, 0x2e, 0x7c, 0x40, 0x66, 0xff, 0x0e, 0x36,
    0x7c, 0x75, 0xe7, 0xf4, 0xeb, 0xfd, 0x10, 0x00, 0x40, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x08,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
];

/// Where the number of writes is in that.
const COUNT_AT: u64 = 0x36;

/// How long a backup took, in seconds, and how much it read of the disk, in bytes.
pub(super) struct Backup {
    pub seconds: f64,
    pub read_bytes: f64,
}

/// How much is changed of a disk of this size, in bytes.
fn changed(size_mib: u64) -> u64 {
    ((size_mib << 20) / PARTS).next_multiple_of(BLOCK)
}

/// The image of such a disk: random bytes, and what changes them.
pub(super) fn image(here: &Installation, size_mib: u64) -> Result<PathBuf, OperationError> {
    let path = here.store().join(format!("{size_mib}-changing.raw"));
    if !path.exists() {
        make(&path, size_mib)
            .map_err(|source| OperationError::File { path: path.clone(), source })?;
    }
    Ok(path)
}

fn make(path: &Path, size_mib: u64) -> io::Result<()> {
    fill(path, size_mib)?;
    let file = File::options().write(true).open(path)?;
    file.write_all_at(&WRITER, 0)?;
    let writes = u32::try_from(changed(size_mib) / (BLOCK / 2)).unwrap_or(u32::MAX);
    file.write_all_at(&writes.to_le_bytes(), COUNT_AT)?;
    file.write_all_at(&[0x55, 0xaa], 510)
}

/// Backs up running VMs: all of them, or what their guests have changed since. `create` makes a VM of this name.
pub(super) fn measure(
    here: &Installation,
    vms: &[String],
    size_mib: u64,
    incremental: bool,
    create: impl Fn(&str) -> Result<(), OperationError>,
) -> Result<Backup, OperationError> {
    let to = here.store().join("backups");
    let made = std::fs::create_dir_all(&to);
    made.map_err(|source| OperationError::File { path: to.clone(), source })?;
    let to = to.display().to_string();
    for vm in vms {
        create(vm)?;
        here.vmseal(&["vm", "start", vm])?;
    }
    let backup = |vm: &str, name: &str| words(&["backup", "create", vm, name, "--to", &to]);
    let mut seconds = timed(here, vms, |vm| backup(vm, "full"))?;
    let mut name = "full";
    if incremental {
        for vm in vms {
            here.vmseal(&["vm", "reset", vm])?;
            until_written(here, vm, changed(size_mib))?;
        }
        seconds = timed(here, vms, |vm| backup(vm, "changed"))?;
        name = "changed";
    }
    let mut read_bytes = 0.0;
    for vm in vms {
        let shown = here.json(&["backup", "show", vm, name])?;
        read_bytes += shown["read_bytes"].as_u64().map_or(f64::NAN, |bytes| bytes as f64);
        here.vmseal(&["vm", "stop", vm, "--force"])?;
        if incremental {
            here.vmseal(&["backup", "delete", vm, "changed"])?;
        }
        here.vmseal(&["backup", "delete", vm, "full"])?;
        here.vmseal(&["vm", "delete", vm])?;
    }
    Ok(Backup { seconds, read_bytes })
}

/// Waits until the guest has changed so much of its disk since the backup.
fn until_written(here: &Installation, vm: &str, bytes: u64) -> Result<(), OperationError> {
    let begun = Instant::now();
    loop {
        let bitmaps = here.json(&["disk", "bitmap", "list", vm, "disk0"])?;
        let dirty = |it: &Value| it["dirty_bytes"].as_u64();
        let noted = bitmaps.as_array().and_then(|all| all.iter().filter_map(dirty).max());
        if noted.is_some_and(|noted| noted >= bytes) {
            return Ok(());
        }
        if begun.elapsed() > WRITTEN {
            let (what, log) = ("the guest has changed its disk", bitmaps.to_string());
            return Err(OperationError::Never { what, log });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The VMs of a measurement.
pub(super) fn names(at_once: u32) -> Vec<String> {
    (0..at_once).map(|number| format!("{ENCRYPTED}-changing-{number}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundredth_is_changed_in_whole_blocks() {
        assert_eq!(changed(256), 41 * BLOCK);
        assert_eq!(changed(1), BLOCK);
        let count = COUNT_AT as usize;
        assert_eq!((WRITER.len(), &WRITER[count..]), (count + 4, &[0; 4][..]));
    }
}
