//! An NBD server in this process: our own front end, over chains that a test makes.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::allocation::Allocation;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::front_ends::ServedDisk;
use vmseal_iofilter::front_ends::nbd::serve;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::orders::Orders;
use vmseal_iofilter::stack::stop::Stop;

const POOL_BYTES: usize = 2 << 20;

/// Ends, with all of its connections, when dropped.
pub struct NbdServer {
    directory: tempfile::TempDir,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<std::io::Result<Vec<Chain>>>>,
}

impl NbdServer {
    /// Serves as many connections at a time as there are chains.
    pub fn start(chains: Vec<Chain>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (size, queues) = (chains[0].size(), chains.len());
        let served = ServedDisk {
            size: size.into(),
            read_only: chains[0].read_only(),
            serial: "nbd".into(),
            state: Arc::new(DiskState::new(DiskId::new(), queues)),
            allocation: Allocation::Unknown.into(),
        };
        let stop = Arc::new(Stop::new().unwrap());
        let stopping = Arc::clone(&stop);
        let listener = UnixListener::bind(directory.path().join("nbd")).unwrap();
        let uid = nix::unistd::geteuid().as_raw();
        let thread = std::thread::spawn(move || {
            let orders = Orders::new(stopping)?;
            serve(&listener, uid, &served, chains, POOL_BYTES, &orders)
        });
        Self { directory, stop, thread: Some(thread) }
    }

    /// Connections that are not negotiated on yet.
    pub fn connect(&self, count: usize) -> Vec<OwnedFd> {
        let connect = |_| UnixStream::connect(self.directory.path().join("nbd")).unwrap().into();
        (0..count).map(connect).collect()
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop.ask();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(std::thread::panicking() || ended.is_ok_and(|ended| ended.is_ok()));
        }
    }
}
