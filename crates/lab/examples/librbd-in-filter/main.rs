//! Serves an encrypted disk on an image of a pool of Ceph as a filter would that had librbd in its own process. `vmseal lab run
//! ceph-process` measures it beside `vmseal-filter` with `vmseal-rbd` (docs/decisions/329-librbd-in-the-filter-is-measured.md).
//!
//! ```text
//!  vmseal-filter   vhost-user-blk ─► align ─► crypt ─► ring in shared memory ─► vmseal-rbd: librbd
//!  this program    vhost-user-blk ─► align ─► crypt ─► queue ─► librbd
//! ```
//! It is for measurements alone, and never installed: it has a pool's key, connects, and is not confined.

mod queue;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::Pid;
use vmseal_api::filter::{Handle, Holes};
use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::front_ends::{ServedDisk, vhost_user};
use vmseal_iofilter::handle::Handles;
use vmseal_iofilter::process::slice;
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::orders::Orders;
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_lab::systems::OneProcessDisk;
use vmseal_rbd::cluster::{Access, Cluster, Pool};
use vmseal_rbd::image::Image;
use vmseal_secret::cephx::CephxKey;
use vmseal_secret::process::harden;

use self::queue::Queue;

/// Serves an encrypted disk on an RBD image, with librbd in this process, until SIGTERM
#[derive(Parser)]
#[command(name = "librbd-in-filter", version)]
struct Line {
    /// The file that says which disk, as JSON
    disk: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let line = Line::parse();
    // As the filter does, before there are threads.
    harden();
    vmseal_log::start();
    let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    ends.thread_block().context("signals cannot be blocked")?;
    let disk = read(&line.disk)?;
    let image = open(&disk)?;
    let stop = Arc::new(Stop::new()?);
    let orders = Orders::new(Arc::clone(&stop))?;
    std::thread::spawn(move || {
        let _ = ends.wait();
        stop.ask();
    });
    run_as_the_filter(disk.core)?;
    serve(&disk, image, &orders)
}

fn read(path: &Path) -> anyhow::Result<OneProcessDisk> {
    let text = std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} does not describe a disk", path.display()))
}

/// Connects as `vmseal-rbd` does, and opens the image.
fn open(disk: &OneProcessDisk) -> anyhow::Result<Arc<Image>> {
    let pool = &disk.pool;
    let keyring = pool.keyring.as_ref().context("the pool has no keyring")?;
    let key = File::open(keyring).and_then(|file| CephxKey::read_of(file, &pool.user));
    let key = key.with_context(|| format!("the keyring {}", keyring.display()))?;
    let (monitors, user) = (pool.monitors.clone(), pool.user.clone());
    let cluster = Cluster::connect(&Access { monitors, user, key, messenger: pool.messenger })?;
    let namespace = pool.namespace.as_deref().unwrap_or_default();
    let pool = Arc::new(Pool::open(&cluster, &pool.pool, namespace)?);
    let image = Image::open_to_write(&pool, &disk.image, &[]);
    let image = image.with_context(|| format!("the image '{}' cannot be opened", disk.image))?;
    Ok(Arc::new(image))
}

/// Has this thread, and those that it starts from now on, run as the laboratory has the filter's: on one core, with the filter's slices.
/// librbd's threads are there already, and run where the kernel puts them, as in `vmseal-rbd`.
fn run_as_the_filter(core: Option<usize>) -> anyhow::Result<()> {
    if let Some(core) = core {
        let mut only = CpuSet::new();
        only.set(core)
            .and_then(|()| sched_setaffinity(Pid::from_raw(0), &only))
            .with_context(|| format!("the disk's threads cannot run on core {core}"))?;
    }
    // Where the kernel refuses it, it refuses it to the filter, too.
    let _ = slice::shorten();
    Ok(())
}

/// Serves the disk until it is told to stop, then flushes it.
fn serve(disk: &OneProcessDisk, image: Arc<Image>, orders: &Orders) -> anyhow::Result<()> {
    let mut handles = Handles::default();
    let key = handles.key(&Handle::Path(disk.key.clone()))?;
    let encryption = Encryption { key, holes: Holes::Zero };
    // It has the same limits as librbd: any address, and blocks of 512 bytes. No data goes there, as the queue takes its place.
    let memory = DiskStorage::Mem(MemDisk::new(0));
    let layers = Disk::new(disk.size, false, Some(encryption), memory, 1);
    let chain = layers.chain_over(Box::new(Queue::new(image, disk.offset)))?;
    let served = Arc::new(ServedDisk {
        size: disk.size.into(),
        read_only: false,
        serial: "laboratory".into(),
        state: Arc::new(DiskState::new(DiskId::new(), 1).with_cipher(layers.cipher_time())),
        allocation: layers.allocation().into(),
    });
    let socket = handles.socket(&Handle::Path(disk.socket.clone()))?;
    let user = nix::unistd::geteuid().as_raw();
    let chains = vhost_user::serve(&socket, user, &served, vec![chain], orders)?;
    for mut chain in chains {
        blocking::flush(&mut chain)?;
    }
    Ok(())
}
