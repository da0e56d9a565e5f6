//! Where a disk rests whose filter is killed: every backend but memory of the process, which goes with it.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Four times what the guest uses.
pub const SIZE: u64 = 4 << 20;

/// How long a child that another test has forked may hold a lock of ours, until it executes its program.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rests {
    /// In a file on storage: requests are under way in the kernel when the filter dies.
    Storage,
    /// In a file in memory: a system call is under way, if anything.
    Memory,
    /// In a qcow2 image on storage, of small clusters: many are new.
    Qcow2,
    /// The same in memory.
    Qcow2InMemory,
    /// In a qcow2 image over another that holds everything at first, on storage.
    Overlay,
}

impl Rests {
    pub fn directory(self) -> &'static Path {
        match self {
            Self::Storage | Self::Qcow2 | Self::Overlay => Path::new(env!("CARGO_TARGET_TMPDIR")),
            Self::Memory | Self::Qcow2InMemory => Path::new("/dev/shm"),
        }
    }

    fn is_qcow2(self) -> bool {
        matches!(self, Self::Qcow2 | Self::Qcow2InMemory | Self::Overlay)
    }

    pub fn backend(self, directory: &Path) -> Value {
        let base = directory.join("base");
        if !self.is_qcow2() {
            json!({ "kind": "file" })
        } else if base.exists() {
            let backing = json!([{ "file": { "path": base }, "format": "qcow2" }]);
            json!({ "kind": "qcow2", "backing": backing })
        } else {
            json!({ "kind": "qcow2" })
        }
    }

    pub fn make(self, directory: &Path) {
        let disk = directory.join("disk");
        if self.is_qcow2() {
            create(&disk, &[]);
        } else {
            File::create(disk).unwrap().set_len(SIZE).unwrap();
        }
    }

    /// Puts an empty image over the one that is there, which is in nobody's use.
    pub fn lay_over(self, directory: &Path) {
        let (disk, base) = (directory.join("disk"), directory.join("base"));
        std::fs::rename(&disk, &base).unwrap();
        create(&disk, &["-b", base.to_str().unwrap(), "-F", "qcow2"]);
    }

    /// Of a filter that was killed leaked clusters are left at worst, and now none.
    pub fn repair(self, directory: &Path) {
        let disk = directory.join("disk");
        if self.is_qcow2() {
            let (code, said) = qemu_img_check(&disk, &[]);
            assert!(matches!(code, Some(0 | 3)), "{said}");
            qemu_img_check(&disk, &["-r", "leaks"]);
            self.is_sound(directory);
        }
    }

    /// Nor does a filter leave any that ended in order.
    pub fn is_sound(self, directory: &Path) {
        if self.is_qcow2() {
            let (code, said) = qemu_img_check(&directory.join("disk"), &[]);
            assert_eq!(code, Some(0), "{said}");
        }
    }
}

fn create(disk: &Path, below: &[&str]) {
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"];
    let mut command = Command::new("qemu-img");
    command.args(create).args(below).arg(disk).arg(SIZE.to_string());
    assert!(command.status().unwrap().success());
}

/// Its exit code, and all that it has to say but which clusters are leaked.
fn qemu_img_check(disk: &Path, options: &[&str]) -> (Option<i32>, String) {
    let check = [&["check", "-f", "qcow2"], options].concat();
    let until = Instant::now() + PATIENCE;
    loop {
        let checked = Command::new("qemu-img").args(&check).arg(disk).output().unwrap();
        let said = [checked.stdout, checked.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        if !said.contains("Failed to lock") || Instant::now() > until {
            let lines = said.lines().filter(|line| !line.starts_with("Leaked cluster "));
            return (checked.status.code(), lines.collect::<Vec<_>>().join("\n"));
        }
    }
}
