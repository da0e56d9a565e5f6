//! Storage that shows a half-done write to concurrent readers, as page caches do: a sector that was a hole is
//! then zeroes in one half and ciphertext in the other.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use vmseal_api::filter::Holes;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::stack::chain::{Chain, Io, Storage};
use vmseal_iofilter::stack::request::{Operation, RequestId};
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

use crate::model::SIZE;
use crate::model::ask::{Ask, What, submit};

const SECTOR: usize = 4096;

/// One queue's end of the storage.
struct Tearing {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Requests that are held for now: reads are not begun, writes are half done.
    held: Arc<Mutex<Option<Operation>>>,
    waiting: Vec<RequestId>,
}

impl Storage for Tearing {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, _io: &mut Io<'_>) {
        self.waiting.push(id);
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        let (mut bytes, held) = (self.bytes.lock().unwrap(), *self.held.lock().unwrap());
        self.waiting.retain(|id| {
            let request = io.request(*id);
            let (start, length) = (request.offset as usize, request.length as usize);
            let there = &mut bytes[start..start + length];
            let is_held = held == Some(request.operation);
            match request.operation {
                Operation::Read if !is_held => {
                    request.copy_from(0, there);
                }
                Operation::Write => {
                    let until = if is_held { length / 2 } else { length };
                    request.copy_to(0, &mut there[..until]);
                }
                _ => {}
            }
            if !is_held {
                io.complete(*id, Ok(()));
            }
            is_held
        });
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// One queue, and the requests held below it.
struct Queue {
    chain: Chain,
    held: Arc<Mutex<Option<Operation>>>,
}

impl Queue {
    fn new(disk: &Disk, bytes: &Arc<Mutex<Vec<u8>>>, held: Operation) -> Self {
        let held = Arc::new(Mutex::new(Some(held)));
        let (bytes, holds) = (Arc::clone(bytes), Arc::clone(&held));
        let backend = Tearing { bytes, held: holds, waiting: Vec::new() };
        Self { chain: disk.chain_over(Box::new(backend)).unwrap(), held }
    }

    fn begin(&mut self, what: What, start: u64, buffer: &mut [u8]) {
        let blocks = buffer.len() as u64 / 512;
        submit(&mut self.chain, &Ask { what, start, blocks, fill: 0, cut: SECTOR }, buffer, 0);
        self.chain.poll();
    }

    fn release(&mut self) {
        *self.held.lock().unwrap() = None;
        self.chain.poll();
    }

    fn is_done(&mut self) -> bool {
        self.chain.poll();
        self.chain.next_done().map(|done| done.result.unwrap()).is_some()
    }
}

#[test]
fn a_read_of_a_whole_sector_that_is_a_hole_finds_no_noise_while_a_part_of_it_is_written() {
    for read_comes_first in [true, false] {
        let key = SecretBytes::from_wiped(&mut (0..64).collect::<Vec<u8>>()).unwrap();
        let encryption = Some(Encryption { key, holes: Holes::Zero });
        let disk = Disk::new(SIZE, false, encryption, DiskStorage::Mem(MemDisk::new(0)), 2);
        let bytes = Arc::new(Mutex::new(vec![0; SIZE as usize]));
        let mut reader = Queue::new(&disk, &bytes, Operation::Read);
        let mut writer = Queue::new(&disk, &bytes, Operation::Write);
        let (mut found, mut written) = (vec![0xee; SECTOR], vec![7; 512]);
        if read_comes_first {
            reader.begin(What::Read, 0, &mut found);
        }
        writer.begin(What::Write, 1, &mut written);
        let stored = bytes.lock().unwrap()[..SECTOR].to_vec();
        let half = |half: &[u8]| half.iter().any(|&byte| byte != 0);
        let is_torn = half(&stored[..SECTOR / 2]) && !half(&stored[SECTOR / 2..]);
        assert!(is_torn, "nothing is torn: the test proves nothing");
        if !read_comes_first {
            reader.begin(What::Read, 0, &mut found);
        }
        reader.release();
        let early = reader.is_done();
        writer.release();
        assert!(writer.is_done());
        assert!(early || reader.is_done(), "the read waits for ever");
        let mut after = vec![0; SECTOR];
        after[512..1024].fill(7);
        assert!(found == after || found == [0; SECTOR], "noise, read first: {read_comes_first}");
    }
}
