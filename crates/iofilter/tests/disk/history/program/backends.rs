//! The storage of a disk whose filter is killed: every kind of backend except process memory, which is lost with it.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Four times what the guest uses.
pub const SIZE: u64 = 4 << 20;

/// The offset of the disk, like that of LUKS2's data: a multiple of every storage unit.
const OFFSET: u64 = 16 << 10;

/// How long a child that another test has forked may hold a lock of ours, until it executes its program.
const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BackendKind {
    /// A file on storage, past the page cache: requests are in flight in the kernel when the filter dies.
    Storage,
    /// A file on storage that keeps its room, through the page cache.
    PageCache,
    /// A file in memory: at most a system call is in flight.
    Memory,
    /// A qcow2 image on storage, with small clusters: many are new.
    Qcow2,
    /// The same in memory.
    Qcow2InMemory,
    /// A qcow2 image over another over a raw file that holds everything at first, on storage.
    Overlay,
}

impl BackendKind {
    pub fn directory(self) -> &'static Path {
        match self {
            Self::Memory | Self::Qcow2InMemory => Path::new("/dev/shm"),
            Self::Storage | Self::PageCache | Self::Qcow2 | Self::Overlay => {
                Path::new(env!("CARGO_TARGET_TMPDIR"))
            }
        }
    }

    /// Whether a read may find a block half written by a write that is in flight. Buffered writes of io_uring are done
    /// by threads of the kernel, beside reads from the same pages; and a queue writes into an image beside its thread.
    pub fn tears_beside_writes(self) -> bool {
        match self {
            Self::PageCache | Self::Qcow2 | Self::Qcow2InMemory | Self::Overlay => true,
            Self::Storage | Self::Memory => false,
        }
    }

    /// Whether the image in this directory is qcow2.
    fn is_qcow2(self, directory: &Path) -> bool {
        match self {
            Self::Storage | Self::PageCache | Self::Memory => false,
            Self::Qcow2 | Self::Qcow2InMemory => true,
            Self::Overlay => directory.join("base").exists(),
        }
    }

    pub fn backend(self, directory: &Path) -> Value {
        let file = |(name, format): (&str, &str)| {
            let path = directory.join(name);
            path.exists().then(|| json!({ "file": { "path": path }, "format": format }))
        };
        let below: Vec<_> =
            [("middle", "qcow2"), ("base", "raw")].into_iter().filter_map(file).collect();
        if self.is_qcow2(directory) {
            json!({ "kind": "qcow2", "backing": below, "offset": OFFSET })
        } else if self == Self::PageCache {
            json!({ "kind": "file", "direct": "off", "keeps_room": true, "offset": OFFSET })
        } else {
            json!({ "kind": "file", "offset": OFFSET })
        }
    }

    pub fn make(self, directory: &Path) {
        let disk = directory.join("disk");
        if self.is_qcow2(directory) {
            create(&disk, &[]);
        } else {
            File::create(disk).unwrap().set_len(OFFSET + SIZE).unwrap();
        }
    }

    /// Puts an empty image over the present one, which is not in use and gets this name.
    pub fn lay_over(self, directory: &Path, name: &str) {
        let format = if self.is_qcow2(directory) { "qcow2" } else { "raw" };
        let (disk, below) = (directory.join("disk"), directory.join(name));
        std::fs::rename(&disk, &below).unwrap();
        create(&disk, &["-b", below.to_str().unwrap(), "-F", format]);
    }

    /// A killed filter leaves leaked clusters at worst.
    pub fn is_usable(self, directory: &Path) {
        if self.is_qcow2(directory) {
            let (code, said) = qemu_img_check(&directory.join("disk"), &[]);
            assert!(matches!(code, Some(0 | 3)), "{said}");
        }
    }

    /// Now there are none.
    pub fn repair(self, directory: &Path) {
        self.is_usable(directory);
        if self.is_qcow2(directory) {
            qemu_img_check(&directory.join("disk"), &["-r", "leaks"]);
            self.is_sound(directory);
        }
    }

    /// Nor does a filter that ended in order leave any.
    pub fn is_sound(self, directory: &Path) {
        if self.is_qcow2(directory) {
            let (code, said) = qemu_img_check(&directory.join("disk"), &[]);
            assert_eq!(code, Some(0), "{said}");
        }
    }
}

/// Makes an image of the size of a disk; `below` are qemu-img's options for one over another.
pub fn create(disk: &Path, below: &[&str]) {
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"];
    let size = (OFFSET + SIZE).to_string();
    let made = qemu_img(&[&create, below, &[disk.to_str().unwrap(), &size]].concat());
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// The exit code, and all output except which clusters are leaked.
pub fn qemu_img_check(disk: &Path, options: &[&str]) -> (Option<i32>, String) {
    let check = ["check", "-f", "qcow2", disk.to_str().unwrap()];
    let checked = qemu_img(&[&check, options].concat());
    let said = [checked.stdout, checked.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let lines = said.lines().filter(|line| !line.starts_with("Leaked cluster "));
    (checked.status.code(), lines.collect::<Vec<_>>().join("\n"))
}

/// Runs it, once nobody has its images' locks.
fn qemu_img(arguments: &[&str]) -> Output {
    let until = Instant::now() + TIMEOUT;
    loop {
        let ran = Command::new("qemu-img").args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        let locked = said.contains("Failed to lock") || said.contains("lock\nIs another process");
        if !locked || Instant::now() > until {
            return ran;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
