//! Every way to store a disk's data, and the chains over it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use vmseal_api::filter::{
    Budget, CacheSpec, DelaySpec, Direct, FaultSpec, FilterSpec, Holes, LimitSpec,
};
use vmseal_api::transfer::ImageFormat;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers;
use vmseal_iofilter::stack::layer::Layer;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_iofilter::storage::nbd::NbdDisk;
use vmseal_iofilter::storage::qcow2::Qcow2Disk;
use vmseal_secret::SecretBytes;

use crate::model::SIZE;
use crate::nbd_server::NbdServer;
use crate::replicated::Replicated;

/// The offset of the disk in a raw file.
pub const OFFSET: u64 = 1 << 16;

/// The offset of the disk in a qcow2 image: its last cluster is not whole.
pub const OFFSET_QCOW2: u64 = 4096;

/// How many connections to an NBD server: a chain for each writer of a test, or for a disk and what copies it.
const CONNECTIONS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    Mem,
    /// tmpfs: synchronous calls.
    Memory,
    /// The build directory's file system: io_uring, direct where it can be.
    Storage,
    /// A memfd.
    Gone,
    /// An export of an NBD server, of our own.
    Nbd,
    /// The usual qcow2.
    Qcow2,
    /// qcow2 with many tables that grow.
    SmallClusters,
    /// qcow2 that cannot mark zeroes.
    Version2,
    /// qcow2 on qcow2 on a raw file, all of them with data.
    Overlay,
    /// A qcow2 image with compressed clusters.
    Compressed,
}

pub const PLACES: [Place; 10] = [
    Place::Mem,
    Place::Memory,
    Place::Storage,
    Place::Gone,
    Place::Nbd,
    Place::Qcow2,
    Place::SmallClusters,
    Place::Version2,
    Place::Overlay,
    Place::Compressed,
];

impl Place {
    fn options(self) -> Option<&'static str> {
        match self {
            Self::Mem | Self::Memory | Self::Storage | Self::Gone | Self::Nbd => None,
            Self::Qcow2 | Self::Overlay | Self::Compressed => Some("cluster_size=64k"),
            Self::SmallClusters => Some("cluster_size=512"),
            Self::Version2 => Some("compat=0.10,cluster_size=4k"),
        }
    }
}

fn qemu_img(at: &Path, arguments: &[&str]) -> String {
    let ran = Command::new("qemu-img").args(arguments).current_dir(at).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{arguments:?}: {said}{}", String::from_utf8_lossy(&ran.stderr));
    said
}

/// An image and its content.
pub struct Images {
    directory: tempfile::TempDir,
    pub content: Vec<u8>,
}

impl Images {
    fn new(place: Place, options: &str) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = directory.path();
        let all = OFFSET_QCOW2 + SIZE;
        let size = all.to_string();
        let mut content = vec![0; all as usize];
        match place {
            Place::Overlay => {
                content[100_000..700_000]
                    .iter_mut()
                    .enumerate()
                    .for_each(|(n, b)| *b = n as u8 | 1);
                // Shorter than the image above it.
                std::fs::write(at.join("base"), &content[..800_000]).unwrap();
                let below = ["-f", "qcow2", "-o", "cluster_size=4k", "-b", "base", "-F", "raw"];
                qemu_img(at, &[&["create"], &below[..], &["middle", &size]].concat());
                let mut middle = content.clone();
                middle[600_000..900_000].fill(7);
                write_by_qemu(&at.join("middle"), &middle[600_064..899_072], 600_064);
                content[600_064..899_072].fill(7);
                let above = ["-f", "qcow2", "-o", options, "-b", "middle", "-F", "qcow2"];
                qemu_img(at, &[&["create"], &above[..], &["image", &size]].concat());
            }
            Place::Compressed => {
                content[100_000..700_000].fill(7);
                std::fs::write(at.join("base"), &content).unwrap();
                let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options];
                qemu_img(at, &[&convert[..], &["base", "image"]].concat());
            }
            _ => {
                qemu_img(at, &["create", "-f", "qcow2", "-o", options, "image", &size]);
            }
        }
        Self { directory, content }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn open(&self, place: Place) -> Qcow2Disk {
        let open = |name, write| {
            OwnedFd::from(File::options().read(true).write(write).open(self.path(name)).unwrap())
        };
        let below = if place == Place::Overlay {
            let (middle, base) = (open("middle", false), open("base", false));
            vec![(middle, ImageFormat::Qcow2), (base, ImageFormat::Raw)]
        } else {
            Vec::new()
        };
        Qcow2Disk::open(open("image", true), below, OFFSET_QCOW2, SIZE, false).unwrap()
    }

    /// QEMU finds no errors and no leaks; returns all that it reads.
    pub fn checked(&self) -> Vec<u8> {
        qemu_img(self.directory.path(), &["check", "-f", "qcow2", "image"]);
        qemu_img(self.directory.path(), &["convert", "-f", "qcow2", "-O", "raw", "image", "raw"]);
        std::fs::read(self.path("raw")).unwrap()
    }
}

fn write_by_qemu(image: &Path, content: &[u8], at: usize) {
    let ask = format!("write -P {} {at} {}", content[0], content.len());
    let ran =
        Command::new("qemu-io").args(["-f", "qcow2", "-c", &ask]).arg(image).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

pub struct Store {
    place: Place,
    mem: MemDisk,
    gone: FileDisk,
    server: Option<NbdServer>,
    pub images: Option<Images>,
    pub file: tempfile::NamedTempFile,
    holes: Option<Holes>,
    /// Whether requests wait for a budget above encryption, and overtake each other below it.
    holds_back: bool,
    /// Whether there is a cache right below encryption.
    caches: bool,
    /// Whether it has a replica.
    pub replicates: bool,
}

impl Store {
    pub fn new(
        place: Place,
        holes: Option<Holes>,
        holds_back: bool,
        caches: bool,
        replicates: bool,
    ) -> Self {
        let directory =
            if place == Place::Storage { env!("CARGO_TARGET_TMPDIR") } else { "/dev/shm" };
        let file = tempfile::NamedTempFile::new_in(directory).unwrap();
        file.as_file().set_len(OFFSET + SIZE).unwrap();
        let images = place.options().map(|options| Images::new(place, options));
        let (mem, gone) = (MemDisk::new(SIZE as usize), FileDisk::in_memory(SIZE).unwrap());
        let server = (place == Place::Nbd).then(|| {
            let disk = Disk::new(SIZE, false, None, DiskStorage::File(gone.clone()), 1);
            NbdServer::start((0..CONNECTIONS).map(|_| disk.chain().unwrap()).collect())
        });
        Self { place, mem, gone, server, images, file, holes, holds_back, caches, replicates }
    }

    pub fn open(&self) -> Disk {
        self.open_replicated().0
    }

    /// The disk, and its layer with a replica, a new one, if it has one.
    pub fn open_replicated(&self) -> (Disk, Option<Replicated>) {
        let replicated = self.replicates.then(|| Replicated::new(SIZE));
        (self.open_with(replicated.as_ref(), &[]), replicated)
    }

    /// The disk with this replica, over storage that fails in this way.
    pub fn open_with(&self, replicated: Option<&Replicated>, faults: &[FaultSpec]) -> Disk {
        let mut key: Vec<u8> = (0..64).collect();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        let encryption = self.holes.map(|holes| Encryption { key, holes });
        let rest = match (&self.images, self.place) {
            (Some(images), place) => DiskStorage::Qcow2(images.open(place)),
            (None, Place::Mem) => DiskStorage::Mem(self.mem.clone()),
            (None, Place::Nbd) => {
                let sockets = self.server.as_ref().unwrap().connect(CONNECTIONS);
                DiskStorage::Nbd(NbdDisk::open(sockets, "", 0, SIZE, false).unwrap())
            }
            (None, Place::Gone) => DiskStorage::File(self.gone.clone()),
            (None, _) => {
                let file = File::options().read(true).write(true).open(self.file.path()).unwrap();
                let file = OwnedFd::from(file);
                DiskStorage::File(FileDisk::open(file, OFFSET, SIZE, Direct::Auto, false).unwrap())
            }
        };
        // As if 100 queues shared the budget: buffers run out, and requests have to wait for them.
        let disk = Disk::new(SIZE, false, encryption, rest, 100);
        let mut above = Vec::new();
        let mut below = if self.caches { vec![cache()] } else { Vec::new() };
        below.extend(replicated.map(|replicated| Arc::new(replicated.clone()) as Arc<dyn Layer>));
        if self.holds_back {
            above.push(limit());
            below.push(jitter());
        }
        below.extend(faults.iter().filter_map(|spec| layers::of(&FilterSpec::Fault(spec.clone()))));
        disk.with_layers(above, below)
    }
}

/// Fast enough for a test, and short enough for many to wait.
fn limit() -> Arc<dyn Layer> {
    let requests = Some(Budget { per_second: 50_000, burst: 4 });
    layers::of(&FilterSpec::Limit(LimitSpec { requests, bytes: None })).unwrap()
}

/// Less than the disk: blocks must be evicted.
fn cache() -> Arc<dyn Layer> {
    layers::of(&FilterSpec::Cache(CacheSpec { bytes: 0 })).unwrap()
}

fn jitter() -> Arc<dyn Layer> {
    let delay = DelaySpec {
        operations: Vec::new(),
        microseconds: 0,
        jitter_microseconds: 50,
        reorders: false,
        seed: 0,
    };
    layers::of(&FilterSpec::Delay(delay)).unwrap()
}
