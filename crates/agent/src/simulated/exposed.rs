//! Exposed disks: each connection sends the beginning of an NBD server's greeting, and echoes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::task::JoinHandle;
use vmseal_api::expose::LET_GO;
use vmseal_api::host::ConsoleStream;
use vmseal_api::id::DiskId;

/// The beginning of an NBD server's greeting: its two magic numbers, and flags.
const GREETING: [u8; 18] = *b"NBDMAGICIHAVEOPT\0\x03";

/// The buffer of a stream, each way, in bytes.
const BUFFER: usize = 64 * 1024;

/// The exposed disks; each exposure ends with its client.
#[derive(Default)]
pub struct Exposed(BTreeMap<DiskId, Held>);

struct Held {
    task: JoinHandle<()>,
    over: Arc<AtomicBool>,
    /// Whether it ends with the filter of a guest.
    beside: bool,
}

impl Exposed {
    pub fn has(&self, disk: DiskId) -> bool {
        self.0.get(&disk).is_some_and(|held| !held.over.load(Ordering::Acquire))
    }

    /// Whether the filter of a guest would serve it.
    pub fn has_beside(&self, disk: DiskId) -> bool {
        self.has(disk) && self.0.get(&disk).is_some_and(|held| held.beside)
    }

    /// The stream of the client that exposes the disk.
    pub fn hold(&mut self, disk: DiskId, beside: bool) -> ConsoleStream {
        let (mut ours, theirs) = duplex(BUFFER);
        let over = Arc::new(AtomicBool::new(false));
        let at_the_end = Arc::clone(&over);
        let task = tokio::spawn(async move {
            while ours.read_u8().await.is_ok_and(|said| said != LET_GO) {}
            // Before the client sees the end of its stream.
            at_the_end.store(true, Ordering::Release);
        });
        self.0.insert(disk, Held { task, over, beside });
        Box::new(theirs)
    }

    /// A connection; none while the disk is not exposed.
    pub fn connect(&self, disk: DiskId) -> Option<ConsoleStream> {
        let (ours, theirs) = duplex(BUFFER);
        self.has(disk).then(|| {
            tokio::spawn(greet(ours));
            Box::new(theirs) as ConsoleStream
        })
    }

    /// Ends an exposure.
    pub fn end(&mut self, disk: DiskId) {
        if let Some(held) = self.0.remove(&disk) {
            held.task.abort();
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        self.0.values().for_each(|held| held.task.abort());
    }
}

async fn greet(mut stream: DuplexStream) {
    if stream.write_all(&GREETING).await.is_err() {
        return;
    }
    let mut said = [0; 1024];
    while let Ok(length @ 1..) = stream.read(&mut said).await {
        if stream.write_all(&said[..length]).await.is_err() {
            return;
        }
    }
}
