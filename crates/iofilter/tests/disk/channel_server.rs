//! A server of channels in this process, in the place of `vmseal-rbd`, over chains that a test makes: they may be late, and answer in
//! another order.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use vmseal_api::filter::Direct;
use vmseal_channel::{
    Answerer, Operation as Asked, REGION_BYTES_MAX, RING_BYTES, SharedMemory, Submission, ToFilter,
    ToServer, receive, ring_doorbell, send,
};
use vmseal_iofilter::stack::chain::{Chain, Storage};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation};
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::channel::Connection;
use vmseal_iofilter::storage::file::FileDisk;

const TICKET: [u8; 16] = *b"a ticket, 16 byt";

/// What a queue was asked: the operation, its length, and the region of its first piece.
pub type Seen = Arc<Mutex<Vec<(Asked, u64, Option<u32>)>>>;

/// Serves as many queues as there are chains; ends when its connection does.
pub struct ChannelServer {
    disk: FileDisk,
    stop: Arc<Stop>,
    attached: Arc<AtomicUsize>,
    gone: Receiver<()>,
    pub seen: Seen,
}

/// Two ends of a connection.
pub fn pair() -> (OwnedFd, OwnedFd) {
    let (family, kind) = (AddressFamily::Unix, SockType::SeqPacket);
    socketpair(family, kind, None, SockFlag::SOCK_CLOEXEC).unwrap()
}

/// The disk with this connection; its file is there for its length, and for those who go past the channel.
pub fn disk(connection: OwnedFd, size: u64, file: &File) -> FileDisk {
    file.set_len(size).unwrap();
    let file = file.try_clone().unwrap().into();
    let disk = FileDisk::open(file, 0, size, Direct::Off, false).unwrap();
    disk.with_channel(Arc::new(Connection::new(connection, TICKET)))
}

/// Waits for a queue to be attached on a connection; none where that has ended.
pub fn accept(connection: &OwnedFd) -> Option<(OwnedFd, Answerer)> {
    let (message, mut fds) = receive::<ToServer>(connection.as_fd(), true).unwrap()?;
    assert_eq!(message, ToServer::Attach { ticket: TICKET });
    let ring = SharedMemory::map(fds.pop().unwrap(), RING_BYTES).unwrap();
    Some((fds.pop().unwrap(), Answerer::new(ring).unwrap()))
}

impl ChannelServer {
    pub fn start(chains: Vec<Chain>, size: u64) -> Self {
        let (connection, servers) = pair();
        let disk = disk(connection, size, &tempfile::tempfile().unwrap());
        let (stop, attached) = (Arc::new(Stop::new().unwrap()), Arc::new(AtomicUsize::new(0)));
        let ((tell, gone), seen) = (channel(), Seen::default());
        let (stopping, counting, seeing) =
            (Arc::clone(&stop), Arc::clone(&attached), Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut chains = chains;
            while let Some((socket, answerer)) = accept(&servers) {
                let (chain, stop) = (chains.pop().unwrap(), Arc::clone(&stopping));
                let (seen, gone) = (Arc::clone(&seeing), tell.clone());
                counting.fetch_add(1, Ordering::SeqCst);
                send(socket.as_fd(), &ToFilter::Attached { errno: 0, size }, &[]).unwrap();
                std::thread::spawn(move || {
                    let queue = Queue { socket, answerer, regions: Vec::new(), seen };
                    queue.serve(chain, &stop, &gone);
                });
            }
        });
        Self { disk, stop, attached, gone, seen }
    }

    /// A queue, which goes through the channel.
    pub fn queue(&self) -> Box<dyn Storage> {
        let queue = self.disk.queue();
        assert!(queue.shares_memory(), "it goes through the file");
        queue
    }

    pub fn disk(&self) -> &FileDisk {
        &self.disk
    }

    /// Uses its chains no more, and fails all requests from now on.
    pub fn fail(&self) {
        self.stop.ask();
        for _ in 0..self.attached.swap(0, Ordering::SeqCst) {
            self.gone.recv().unwrap();
        }
    }
}

struct Queue {
    socket: OwnedFd,
    answerer: Answerer,
    regions: Vec<SharedMemory>,
    seen: Seen,
}

impl Queue {
    fn serve(mut self, chain: Chain, stop: &Stop, gone: &Sender<()>) {
        let (mut chain, mut under_way) = (Some(chain), HashSet::new());
        while self.hear() {
            while let Some(request) = self.answerer.next().unwrap() {
                let first = request.pieces.first().map(|piece| piece.region);
                self.seen.lock().unwrap().push((request.operation, request.length, first));
                match &mut chain {
                    None => self.answer(request.slot, libc::EIO),
                    Some(chain) => {
                        assert!(under_way.insert(request.slot));
                        self.ask(chain, &request);
                    }
                }
            }
            if stop.asked() && chain.take().is_some() {
                under_way.drain().for_each(|slot| self.answer(slot, libc::EIO));
                gone.send(()).unwrap();
            }
            let Some(chain) = &mut chain else {
                let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
                poll(&mut fds, PollTimeout::NONE).unwrap();
                continue;
            };
            chain.poll();
            while let Some(done) = chain.next_done() {
                let slot = done.tag as u32;
                assert!(under_way.remove(&slot));
                self.answer(slot, errno(done.result));
            }
            let others = [self.socket.as_fd(), stop.event()].map(|fd| (fd, PollFlags::POLLIN));
            chain.wait(others, None).unwrap();
        }
    }

    /// Reads messages; false if the filter is gone.
    fn hear(&mut self) -> bool {
        loop {
            match receive::<ToServer>(self.socket.as_fd(), false) {
                Ok(Some((ToServer::Share { region, bytes }, mut fds))) => {
                    let memory = SharedMemory::map(fds.pop().unwrap(), REGION_BYTES_MAX).unwrap();
                    assert_eq!(
                        (region as usize, bytes as usize),
                        (self.regions.len(), memory.len())
                    );
                    self.regions.push(memory);
                    send(self.socket.as_fd(), &ToFilter::Shared { errno: 0 }, &[]).unwrap();
                }
                Ok(Some((ToServer::Doorbell, _))) => {}
                Ok(Some((message, _))) => panic!("{message:?} on a queue"),
                Ok(None) => return false,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn ask(&self, chain: &mut Chain, request: &Submission) {
        let id = chain.begin().unwrap();
        for piece in &request.pieces {
            let region = &self.regions[piece.region as usize];
            let part = region.part(piece.offset, piece.length as usize).unwrap();
            // SAFETY: within the region, which outlives the chain.
            let segment = unsafe { Segment::new(part.as_ptr(), piece.length as usize) };
            chain.data_mut(id).push(segment);
        }
        let operation = match request.operation {
            Asked::Read => Operation::Read,
            Asked::Write => Operation::Write,
            Asked::Flush => Operation::Flush,
            Asked::Zero => Operation::WriteZeroes { unmap: true },
            Asked::ZeroKeepingRoom => Operation::WriteZeroes { unmap: false },
        };
        chain.submit(id, operation, request.offset, request.length, request.slot.into());
    }

    fn answer(&self, slot: u32, errno: i32) {
        if self.answerer.answer(slot, errno) {
            // The filter may have gone meanwhile.
            let _ = ring_doorbell(self.socket.as_fd(), &ToFilter::Doorbell);
        }
    }
}

fn errno(result: Result<(), IoError>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(IoError::OutOfRange | IoError::Truncated) => libc::EFBIG,
        Err(IoError::NoSpace) => libc::ENOSPC,
        Err(IoError::Device(errno)) => errno,
        Err(_) => libc::EIO,
    }
}
