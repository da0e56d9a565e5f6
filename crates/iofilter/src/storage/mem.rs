//! A disk in memory, for tests: shared by its queues, lost with the process.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::stack::chain::{Io, Storage};
use crate::stack::memory::Cursor;
use crate::stack::request::{IoError, Operation, RequestId};

/// The bytes of a disk.
#[derive(Clone, Debug)]
pub struct MemDisk(Arc<Mutex<Vec<u8>>>);

impl MemDisk {
    /// A disk of `size` zeroes.
    #[must_use]
    pub fn new(size: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![0; size])))
    }

    /// The stored bytes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A backend for one queue.
    #[must_use]
    pub fn queue(&self) -> Box<dyn Storage> {
        Box::new(Mem { disk: self.clone(), waiting: Vec::new() })
    }

    fn perform(&self, id: RequestId, io: &Io<'_>) -> Result<(), IoError> {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let request = io.request(id);
        let start = usize::try_from(request.offset).map_err(|_| IoError::OutOfRange)?;
        let end = start + request.length as usize;
        let range = bytes.get_mut(start..end).ok_or(IoError::Truncated)?;
        match request.operation {
            Operation::Read => {
                Cursor::default().scatter(&request.data, range);
            }
            Operation::Write => {
                Cursor::default().gather(&request.data, range);
            }
            Operation::Discard | Operation::WriteZeroes { .. } => range.fill(0),
            Operation::Flush => {}
        }
        Ok(())
    }
}

/// Completes in the opposite order of submission, one pass late: a layer above must cope with that.
struct Mem {
    disk: MemDisk,
    waiting: Vec<RequestId>,
}

impl Storage for Mem {
    fn prepare(&mut self, capacity: usize) {
        self.waiting.reserve(capacity);
    }

    fn submit(&mut self, id: RequestId, _io: &mut Io<'_>) {
        self.waiting.push(id);
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        while let Some(id) = self.waiting.pop() {
            let result = self.disk.perform(id, io);
            io.complete(id, result);
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
