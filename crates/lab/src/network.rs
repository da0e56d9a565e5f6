//! Networks of the kernel (namespaces): a process has the one that its thread had that started it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use nix::sched::{CloneFlags, setns, unshare};

/// The network of a thread.
const OF_THREAD: &str = "/proc/thread-self/ns/net";

/// A network, which is there as long as this is.
#[derive(Debug)]
pub struct Network(File);

impl Network {
    /// The one of this thread.
    pub fn here() -> io::Result<Self> {
        File::open(OF_THREAD).map(Self)
    }

    /// Another one, with nothing but a loopback that is down. This thread stays where it is.
    pub fn new() -> io::Result<Self> {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Self::here()
        };
        std::thread::scope(|scope| scope.spawn(make).join().expect("it does not panic"))
    }

    /// Has this thread be in it from now on.
    pub fn enter(&self) -> io::Result<()> {
        setns(&self.0, CloneFlags::CLONE_NEWNET).map_err(io::Error::from)
    }

    /// Does something in it, by a thread of its own.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let inside = || self.enter().and_then(|()| work());
        std::thread::scope(|scope| scope.spawn(inside).join().expect("it does not panic"))
    }

    /// The number of the descriptor by which this process has it.
    pub fn descriptor(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// The same network once more.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}
