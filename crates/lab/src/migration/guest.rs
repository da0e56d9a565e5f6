//! The guest whose migration is measured: it fills memory with pseudo-random numbers, each once or several times, and stands still or changes it at a rate.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::outcome::OperationError;
use crate::stop;

/// Its boot sector without the numbers at its end: `guest.S`, assembled.
const CODE: [u8; 252] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xe4, 0x92, 0x0c, 0x02, 0x24, 0xfe,
    0xe6, 0x92, 0x66, 0x0f, 0x01, 0x16, 0xf8, 0x7c, 0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0,
    0xbb, 0x08, 0x00, 0x8e, 0xe3, 0x24, 0xfe, 0x0f, 0x22, 0xc0, 0xea, 0x2f, 0x7c, 0x00, 0x00, 0x66,
    0xbf, 0x00, 0x00, 0x10, 0x00, 0x66, 0x8b, 0x0e, 0xf6, 0x7d, 0x66, 0xc1, 0xe1, 0x0a, 0x66, 0xb8,
    0xb9, 0x79, 0x37, 0x9e, 0x66, 0x89, 0xc2, 0x66, 0xc1, 0xe2, 0x0d, 0x66, 0x31, 0xd0, 0x66, 0x89,
    0xc2, 0x66, 0xc1, 0xea, 0x11, 0x66, 0x31, 0xd0, 0x66, 0x89, 0xc2, 0x66, 0xc1, 0xe2, 0x05, 0x66,
    0x31, 0xd0, 0x66, 0x8b, 0x2e, 0xf2, 0x7d, 0x64, 0x67, 0x66, 0x89, 0x07, 0x66, 0x83, 0xc7, 0x04,
    0x66, 0x49, 0x74, 0x06, 0x66, 0x4d, 0x75, 0xef, 0xeb, 0xca, 0x66, 0x83, 0x3e, 0xfa, 0x7d, 0x00,
    0x75, 0x03, 0xf4, 0xeb, 0xfd, 0xc7, 0x06, 0x20, 0x00, 0xd6, 0x7c, 0xc7, 0x06, 0x22, 0x00, 0x00,
    0x00, 0xb0, 0xfe, 0xe6, 0x21, 0xb0, 0xff, 0xe6, 0xa1, 0xb0, 0x34, 0xe6, 0x43, 0xb0, 0x9c, 0xe6,
    0x40, 0xb0, 0x2e, 0xe6, 0x40, 0x66, 0xbf, 0x00, 0x00, 0x10, 0x00, 0x66, 0x8b, 0x0e, 0xf6, 0x7d,
    0x66, 0xff, 0x0e, 0xdd, 0x7c, 0x79, 0x0d, 0x66, 0xa1, 0xfa, 0x7d, 0x66, 0xa3, 0xdd, 0x7c, 0xfb,
    0xf4, 0xfa, 0xeb, 0xec, 0x64, 0x67, 0x66, 0xff, 0x07, 0x66, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00,
    0x66, 0x49, 0x75, 0xdc, 0xeb, 0xcf, 0x50, 0xb0, 0x20, 0xe6, 0x20, 0x58, 0xcf, 0x00, 0x00, 0x00,
    0x00, 0x8d, 0xb4, 0x00, 0x00, 0x8d, 0x74, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0xff, 0xff, 0x00, 0x00, 0x00, 0x92, 0xcf, 0x00, 0x0f, 0x00, 0xe8, 0x7c,
];

/// Where it is told how often each number is repeated, then the number of pages that are filled, and that of those that are changed in
/// a hundredth of a second.
const NUMBERS_AT: usize = 498;
/// How often in a second the guest changes something.
const TICKS: u64 = 100;
/// The pages of a MiB.
const PAGES: u64 = 256;
/// The size of the disk, in bytes: the smallest that is of use anywhere.
const DISK: u64 = 8 << 20;
/// How much memory the machine has beside what is filled, in MiB: what firmware uses, at both ends.
pub(super) const MORE_MIB: u64 = 64;
/// How long the guest may take to fill its memory: an emulated one fills 100 MiB in a second or two.
const FILLED: Duration = Duration::from_secs(300);

/// What the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Guest {
    /// How much memory it fills.
    pub size_mib: u64,
    /// How much of it it changes in a second.
    pub changes_mib: u64,
    /// How often each of the numbers is repeated that fill it: what of it compression finds.
    pub repeats: u64,
}

impl Guest {
    /// Makes its disk, full of random bytes after what it starts from, so that nothing of it is left out when it is copied; 0 is one
    /// as small as can be, with nothing else.
    pub fn make(self, path: &Path, full_mib: u64) -> Result<(), OperationError> {
        let made = match full_mib {
            0 => fs::File::create_new(path).and_then(|file| file.set_len(DISK)),
            full_mib => crate::operation::fill(path, full_mib),
        };
        let written = made.and_then(|()| {
            fs::File::options().write(true).open(path)?.write_all_at(&self.boot_sector(), 0)
        });
        written.map_err(|source| OperationError::File { path: path.into(), source })
    }

    fn boot_sector(self) -> [u8; 512] {
        let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
        let mut sector = [0; 512];
        sector[..CODE.len()].copy_from_slice(&CODE);
        let numbers = [self.repeats, self.size_mib * PAGES, self.changes_mib * PAGES / TICKS];
        for (place, value) in sector[NUMBERS_AT..].chunks_exact_mut(4).zip(numbers) {
            place.copy_from_slice(&number(value));
        }
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        sector
    }

    /// The memory of its machine, in MiB.
    pub fn memory_mib(self) -> u64 {
        self.size_mib + MORE_MIB
    }

    /// Waits until the guest of this QEMU has filled its memory: all of it is there then, and it was not before.
    pub fn until_filled(self, pid: i32) -> Result<(), OperationError> {
        let begun = Instant::now();
        loop {
            stop::check()?;
            let path = format!("/proc/{pid}/status");
            let status = fs::read_to_string(&path)
                .map_err(|source| OperationError::File { path: path.into(), source })?;
            let there = shared_memory(&status).unwrap_or(0);
            if there >= self.size_mib << 20 {
                return Ok(());
            }
            if begun.elapsed() > FILLED {
                let log = format!("{there} bytes are there");
                return Err(OperationError::Never { what: "the guest has filled its memory", log });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The shared memory of a process (RssShmem of proc(5)), in bytes.
fn shared_memory(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|it| it << 10)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_code_is_what_its_source_says() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/migration/guest.S");
        let run = |command: &mut Command| assert!(command.status().unwrap().success());
        run(Command::new("as").arg("--32").arg(source).arg("-o").arg(path("o")));
        let link = ["-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-o"];
        run(Command::new("ld").args(link).arg(path("bin")).arg(path("o")));
        let assembled = fs::read(path("bin")).unwrap();
        let none = Guest { size_mib: 0, changes_mib: 0, repeats: 0 };
        assert_eq!(assembled, none.boot_sector());
    }

    #[test]
    fn the_guest_is_told_pages() {
        let sector = Guest { size_mib: 3, changes_mib: 25, repeats: 2 }.boot_sector();
        assert_eq!(sector[NUMBERS_AT..], [2, 0, 0, 0, 0, 3, 0, 0, 64, 0, 0, 0, 0x55, 0xaa]);
    }

    #[test]
    fn memory_that_is_there_is_read() {
        assert_eq!(shared_memory("RssFile:\t 1 kB\nRssShmem:\t      24 kB\n"), Some(24 << 10));
        assert_eq!(shared_memory("RssFile:\t 1 kB\n"), None);
    }
}
