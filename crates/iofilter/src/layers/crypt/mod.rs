//! The filter that encrypts: AES-256-XTS, in whole 4096-byte sectors; [`crate::layers::align`] handles smaller parts.
//!
//! ```text
//!  read         passed; decrypted on its way up: in place, in the guest's memory, or from where storage has left it
//!  write        sealed chunk by chunk into bounce buffers; each chunk is a child
//!  write-zeroes passed as a hole if it may be one and holes read as zeroes, else sealed as a write
//!  discard      passed if holes read as zeroes, else completed without doing anything
//!  flush        passed
//!
//!  Sealing:  Ready --chunk sealed--> Ready | Waiting (pool empty, or too many chunks) | Draining (all sealed, or failed)
//!            Waiting --a chunk came back--> Ready        Draining --last child up--> complete
//! ```
//! Where storage shares memory with another process, the bounce buffers are in such memory. What is in them is ciphertext, also
//! while it is made: nothing is encrypted in place. What that process changes meanwhile is its own ciphertext; it learns nothing by it.
//!
//! Guest memory is never changed by a write. A request that waits for a buffer holds none that does not
//! come back by itself.

use std::io;
use std::sync::Arc;

use vmseal_api::filter::{CRYPT_SECTOR, Holes};
use vmseal_secret::SecretBytes;
use vmseal_secret::xts::{Direction, SECTOR, Xts, XtsError};

use crate::stack::buffer_queue::BufferQueue;
use crate::stack::chain::{Filter, Io, Limits};
use crate::stack::figures::{CipherTime, CipherWork, Sampler};
use crate::stack::layer::{Boundary, Layer, Place};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::pool::{BLOCK, BLOCKS_MAX, Buffer, Pool};
use crate::stack::request::{IoError, Operation, RequestId};
use crate::storage::channel::BUFFER_BYTES;

// What the contract between filters calls a sector is what the cipher does.
const _: () = assert!(SECTOR == CRYPT_SECTOR as usize);

/// Its name.
pub const KIND: &str = "crypt";

/// How a disk is encrypted: the layer.
#[derive(Debug)]
pub struct Encryption {
    /// The data key (DEK).
    pub key: SecretBytes,
    /// What a sector of zeroes on the datastore means.
    pub holes: Holes,
}

impl Layer for Encryption {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn presents(&self, below: Boundary) -> Boundary {
        Boundary { block: below.block.max(CRYPT_SECTOR), ..below }
    }

    fn keeps_zeroes(&self) -> bool {
        self.holes == Holes::Zero
    }

    fn filter(&self, place: &Place) -> io::Result<Box<dyn Filter>> {
        let chunk = match (place.shares, place.works_at_once) {
            (true, _) => Chunk::Shared,
            (false, true) => Chunk::Small,
            (false, false) => Chunk::Large,
        };
        let bytes = if place.shares { SHARED_POOL_BYTES } else { place.pool_bytes / 4 * 3 };
        let time = Arc::clone(&place.cipher_time);
        let filter = Crypt::new(&self.key, self.holes, chunk, bytes, time);
        Ok(Box::new(filter.map_err(io::Error::other)?.taking_lent(place.lends)))
    }

    /// They are the cipher's figures, which are shown by themselves.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// The most chunks of one request in flight, so that a large one leaves buffers to others.
const CHUNKS_MAX: u32 = 8;

/// The same where buffers are shared: a chunk may be a quarter of them.
const SHARED_CHUNKS_MAX: u32 = 3;

/// The most buffers of one chunk.
const BUFFERS_MAX: usize = 8;

/// The same where buffers are shared: 4 MiB, a usual object of Ceph, which its OSDs then get by one write.
const SHARED_BUFFERS_MAX: usize = 64;

/// The memory of shared buffers, in bytes: eight of the longest chunks under way, as many as storage has for reads. It is taken as it is used.
const SHARED_POOL_BYTES: usize = BUFFER_BYTES;

/// The most chunks under way where buffers are shared: twice what the ring of such storage has slots for. A chain and its layers have tables
/// for each that there may be, in memory that is locked and not shared, and these buffers have 8192 blocks.
const SHARED_CHILDREN_MAX: usize = 512;

/// The most bytes of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// One buffer: it is still in the second-level cache when synchronous storage takes it.
    Small,
    /// [`BUFFERS_MAX`] buffers: a device is as fast with encryption as without only if its requests are as
    /// large.
    Large,
    /// [`SHARED_BUFFERS_MAX`] buffers that another process has, too, or a quarter of all buffers.
    Shared,
}

impl Chunk {
    /// How many bytes, where all buffers have this many.
    fn bytes(self, pool_bytes: usize) -> u64 {
        let of_buffers = |buffers: usize| buffers * BLOCKS_MAX * BLOCK;
        let bytes = match self {
            Self::Small => of_buffers(1),
            Self::Large => of_buffers(BUFFERS_MAX),
            Self::Shared => {
                let quarter = pool_bytes / 4 / BLOCK * BLOCK;
                of_buffers(SHARED_BUFFERS_MAX).min(quarter.max(of_buffers(1)))
            }
        };
        bytes as u64
    }

    /// The most buffers: more than the bytes need where only short ones are free.
    fn buffers_max(self) -> usize {
        match self {
            Self::Small | Self::Large => BUFFERS_MAX,
            Self::Shared => SHARED_BUFFERS_MAX,
        }
    }

    /// The most chunks of one request under way.
    fn chunks_max(self) -> u32 {
        match self {
            Self::Small | Self::Large => CHUNKS_MAX,
            Self::Shared => SHARED_CHUNKS_MAX,
        }
    }

    /// The most chunks of all requests under way, in so many blocks: each has a buffer of at least one.
    fn children_max(self, blocks: usize) -> usize {
        match self {
            Self::Small | Self::Large => blocks,
            Self::Shared => blocks.min(SHARED_CHILDREN_MAX),
        }
    }
}

/// Why the filter cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CryptError {
    /// The key is not usable.
    #[error("the disk's key cannot be used: {0}")]
    Key(#[from] XtsError),
    /// No memory.
    #[error("no memory for the buffers that data is encrypted into: {0}")]
    Memory(#[from] io::Error),
}

/// A write that is being sealed.
#[derive(Debug, Default)]
struct Sealing {
    /// Bytes sealed and passed down.
    sealed: u64,
    /// Children in flight.
    chunks: u32,
    cursor: Cursor,
    failed: Option<IoError>,
}

/// The filter; see the module.
pub struct Crypt {
    holes: Holes,
    chunk: Chunk,
    /// Whether storage may leave what is read in its own buffers.
    takes_lent: bool,
    encrypt: Xts,
    decrypt: Xts,
    pool: Pool,
    /// Chunks under way, of all requests, and the most that there may be.
    children: usize,
    children_max: usize,
    sampler: Sampler,
    /// Writes in flight, by request.
    sealing: Vec<Option<Sealing>>,
    /// The buffers of children, by child. A list is made when its place is first used, and kept.
    buffers: Vec<Vec<Buffer>>,
    /// The buffers of the next child.
    taken: Vec<Buffer>,
    /// Writes that wait for a buffer.
    waiting: BufferQueue,
    /// One sector, for sectors that are scattered in guest memory.
    scratch: Box<[u8; SECTOR]>,
}

impl Crypt {
    /// A filter for one queue with the disk's key; `pool_bytes` bounds its buffers, and `times` gets the
    /// cipher's CPU time.
    ///
    /// # Errors
    /// [`CryptError`].
    pub fn new(
        key: &SecretBytes,
        holes: Holes,
        chunk: Chunk,
        pool_bytes: usize,
        times: Arc<CipherTime>,
    ) -> Result<Self, CryptError> {
        let pool = match chunk {
            Chunk::Small | Chunk::Large => Pool::new(pool_bytes)?,
            Chunk::Shared => Pool::shared(pool_bytes)?,
        };
        Ok(Self {
            holes,
            chunk,
            takes_lent: false,
            encrypt: Xts::new(key.expose(), Direction::Encrypt)?,
            decrypt: Xts::new(key.expose(), Direction::Decrypt)?,
            children: 0,
            children_max: chunk.children_max(pool.blocks()),
            pool,
            sampler: Sampler::new(times),
            sealing: Vec::new(),
            buffers: Vec::new(),
            taken: Vec::new(),
            waiting: BufferQueue::default(),
            scratch: Box::new([0; SECTOR]),
        })
    }

    /// The same, which decrypts what is read from the buffers of storage, if it leaves it there. The filter must stand
    /// directly above storage then.
    #[must_use]
    pub fn taking_lent(self, takes_lent: bool) -> Self {
        Self { takes_lent, ..self }
    }

    /// Seals as much of a write as the buffers allow.
    fn pump(&mut self, id: RequestId, io: &mut Io<'_>) {
        let length = io.request(id).length;
        loop {
            let Some(state) = self.sealing[id.index()].as_ref() else { return };
            let all_under_way = state.chunks == self.chunk.chunks_max();
            if state.failed.is_some() || state.sealed == length || all_under_way {
                return self.finish_if_drained(id, length, io);
            }
            let bytes = self.take_buffers(length - state.sealed);
            let sealed = if bytes > 0 { self.next_chunk(id, bytes, io) } else { Ok(()) };
            let Some(state) = self.sealing[id.index()].as_mut() else { return };
            match sealed {
                Ok(()) if bytes > 0 => {
                    state.sealed += bytes;
                    state.chunks += 1;
                }
                Ok(()) => return self.waiting.wait(id, io),
                Err(error) => {
                    state.failed = Some(error);
                    self.taken.drain(..).for_each(|buffer| self.pool.give(buffer));
                }
            }
        }
    }

    /// Takes buffers for the next chunk of a write of which `left` bytes are not sealed yet. Returns the length that
    /// they hold, 0 if there is no buffer, or as many chunks are under way as there may be.
    fn take_buffers(&mut self, left: u64) -> u64 {
        if self.children == self.children_max {
            return 0;
        }
        let wanted = left.min(self.chunk.bytes(self.pool.blocks() * BLOCK));
        let mut held = 0;
        while held < wanted && self.taken.len() < self.chunk.buffers_max() {
            let missing = usize::try_from(wanted - held).unwrap_or(usize::MAX);
            let Some(buffer) = self.pool.take(missing) else { break };
            held += buffer.len() as u64;
            self.taken.push(buffer);
        }
        held.min(wanted)
    }

    /// Seals the next bytes of a write into the taken buffers, and passes them down.
    fn next_chunk(&mut self, id: RequestId, bytes: u64, io: &mut Io<'_>) -> Result<(), IoError> {
        let Some(state) = self.sealing[id.index()].as_mut() else { return Ok(()) };
        let at = io.request(id).offset + state.sealed;
        let child = io.child(id, Operation::Write, at, bytes).ok_or(IoError::Overload)?;
        self.children += 1;
        let (zeroes, timed) = (io.request(id).operation != Operation::Write, self.sampler.begin());
        let (cipher, scratch, mut done) = (&mut self.encrypt, &mut self.scratch, 0);
        for buffer in &self.taken {
            let length = buffer.len().min((bytes - done) as usize);
            let (target, at) = (self.pool.segment(buffer).part(0, length), at + done);
            let sealed = if zeroes {
                seal_zeroes(cipher, at, target)
            } else {
                seal(cipher, scratch, &io.request(id).data, &mut state.cursor, at, target)
            };
            if sealed.is_err() {
                io.release(child);
                self.children -= 1;
                return Err(IoError::Cipher);
            }
            io.lend(child, &self.pool, buffer, length);
            done += length as u64;
        }
        self.sampler.end(timed, CipherWork::Encrypt);
        std::mem::swap(&mut self.buffers[child.index()], &mut self.taken);
        io.pass(child);
        Ok(())
    }

    fn finish_if_drained(&mut self, id: RequestId, length: u64, io: &mut Io<'_>) {
        let Some(state) = &self.sealing[id.index()] else { return };
        if state.chunks > 0 || (state.failed.is_none() && state.sealed < length) {
            return;
        }
        let result = state.failed.map_or(Ok(()), Err);
        self.sealing[id.index()] = None;
        io.complete(id, result);
    }

    /// A chunk is written: its buffers serve the next one.
    fn chunk_up(&mut self, child: RequestId, parent: RequestId, io: &mut Io<'_>) {
        let result = io.request(child).result;
        self.buffers[child.index()].drain(..).for_each(|buffer| self.pool.give(buffer));
        io.release(child);
        self.children -= 1;
        if let Some(state) = self.sealing[parent.index()].as_mut() {
            state.chunks -= 1;
            state.failed = state.failed.or(result.err());
            let more = state.failed.is_none() && state.sealed < io.request(parent).length;
            if !self.waiting.goes_behind(parent, more, io) {
                self.pump(parent, io);
            }
        }
        while let Some(next) = self.waiting.take_next() {
            self.pump(next, io);
            if self.waiting.stays_first(next) {
                return;
            }
        }
    }

    /// Decrypts the data of a read in place.
    fn open(&mut self, id: RequestId, io: &Io<'_>) -> Result<(), IoError> {
        let request = io.request(id);
        let (data, mut cursor, mut at) = (&request.data, Cursor::default(), request.offset);
        let end = request.offset + request.length;
        while at < end {
            let Some(piece) = cursor.peek(data, (end - at) as usize) else { break };
            let whole = piece.len() / SECTOR;
            let taken = if whole > 0 {
                let run = piece.part(0, whole * SECTOR);
                self.open_run(at, run)?;
                cursor.skip(data, run.len());
                run.len()
            } else {
                self.open_scattered(at, data, &mut cursor)?;
                SECTOR
            };
            at += taken as u64;
        }
        Ok(())
    }

    /// Decrypts the data of a read from where storage has left it into the request's memory.
    fn open_lent(&mut self, id: RequestId, io: &Io<'_>) -> Result<(), IoError> {
        let request = io.request(id);
        let (lent, data) = (&request.lent, &request.data);
        let (mut from, mut to, mut at) = (Cursor::default(), Cursor::default(), request.offset);
        let end = request.offset + request.length;
        while at < end {
            let left = (end - at) as usize;
            let (source, target) = (from.peek(lent, left), to.peek(data, left));
            // Storage lends whole sectors of all of it.
            let source = source.filter(|source| source.len() >= SECTOR).ok_or(IoError::Cipher)?;
            let whole = source.len().min(target.map_or(0, |target| target.len())) / SECTOR;
            let taken = whole.max(1) * SECTOR;
            let sealed = source.part(0, taken);
            if let Some(target) = target.filter(|_| whole > 0) {
                self.open_into(at, sealed, target)?;
                to.skip(data, taken);
            } else {
                // SAFETY: `scratch` is alive, and only used through this segment until `scatter`.
                let sector = unsafe { Segment::new(self.scratch.as_mut_ptr(), SECTOR) };
                self.open_into(at, sealed, sector)?;
                to.scatter(data, &self.scratch[..]);
                self.scratch.fill(0);
            }
            from.skip(lent, taken);
            at += taken as u64;
        }
        Ok(())
    }

    /// Decrypts the sectors of `from` into `to`, other memory. `from` may be shared memory: if `vmseal-rbd` changes it meanwhile, the guest
    /// reads what it would read had `vmseal-rbd` stored other ciphertext.
    fn open_into(&mut self, offset: u64, from: Segment, to: Segment) -> Result<(), IoError> {
        for at in (0..from.len()).step_by(SECTOR) {
            let (sealed, sector) = (from.part(at, SECTOR), to.part(at, SECTOR));
            if self.holes == Holes::Zero && sealed.is_zero() {
                sector.clear();
                continue;
            }
            // SAFETY: both are `SECTOR` bytes: of the storage's buffers, which it has lent, and of the request's memory.
            unsafe { self.decrypt.sectors(offset + at as u64, sealed.base(), sector.base(), 1) }
                .map_err(|_| IoError::Cipher)?;
        }
        Ok(())
    }

    fn open_run(&mut self, offset: u64, run: Segment) -> Result<(), IoError> {
        for at in (0..run.len()).step_by(SECTOR) {
            let sector = run.part(at, SECTOR);
            if self.holes == Holes::Zero && sector.is_zero() {
                continue;
            }
            // SAFETY: the segment is `SECTOR` bytes of the request's memory, read and written in place.
            unsafe { self.decrypt.sectors(offset + at as u64, sector.base(), sector.base(), 1) }
                .map_err(|_| IoError::Cipher)?;
        }
        Ok(())
    }

    /// Decrypts a sector that is in several segments, using the scratch sector.
    fn open_scattered(
        &mut self,
        offset: u64,
        data: &Segments,
        cursor: &mut Cursor,
    ) -> Result<(), IoError> {
        let mut gathering = *cursor;
        gathering.gather(data, &mut self.scratch[..]);
        // SAFETY: `scratch` is alive, and only used through this segment until `scatter`.
        let sector = unsafe { Segment::new(self.scratch.as_mut_ptr(), SECTOR) };
        self.open_run(offset, sector)?;
        cursor.scatter(data, &self.scratch[..]);
        self.scratch.fill(0);
        Ok(())
    }
}

/// Encrypts from the cursor on into `target`, for the disk's offset `at`.
fn seal(
    cipher: &mut Xts,
    scratch: &mut [u8; SECTOR],
    data: &Segments,
    cursor: &mut Cursor,
    at: u64,
    target: Segment,
) -> Result<(), XtsError> {
    let mut done = 0;
    while done < target.len() {
        let offset = at + done as u64;
        let Some(piece) = cursor.peek(data, target.len() - done) else {
            return Err(XtsError::Failed);
        };
        let sectors = piece.len() / SECTOR;
        let to = target.part(done, sectors.max(1) * SECTOR);
        if sectors > 0 {
            // SAFETY: both are `sectors` sectors long; the target is a bounce buffer, apart from guest memory.
            unsafe { cipher.sectors(offset, piece.base(), to.base(), sectors) }?;
            cursor.skip(data, to.len());
        } else {
            cursor.gather(data, scratch);
            // SAFETY: the scratch sector and a sector of a bounce buffer.
            unsafe { cipher.sectors(offset, scratch.as_ptr(), to.base(), 1) }?;
        }
        done += to.len();
    }
    Ok(())
}

/// A sector of zeroes.
static ZEROES: [u8; SECTOR] = [0; SECTOR];

/// Encrypts zeroes into `target`. The zeroes are not put into `target` first: it may be shared memory, and `vmseal-rbd` could replace them by
/// plaintext of its choice.
fn seal_zeroes(cipher: &mut Xts, at: u64, target: Segment) -> Result<(), XtsError> {
    for done in (0..target.len()).step_by(SECTOR) {
        let sector = target.part(done, SECTOR);
        // SAFETY: a static that is read, and a sector of a bounce buffer.
        unsafe { cipher.sectors(at + done as u64, ZEROES.as_ptr(), sector.base(), 1) }?;
    }
    Ok(())
}

impl Filter for Crypt {
    fn limits(&self) -> Limits {
        Limits { children: self.children_max }
    }

    fn prepare(&mut self, capacity: usize) {
        self.sealing.resize_with(capacity, || None);
        self.buffers.resize_with(capacity, Vec::new);
        self.waiting.prepare(capacity);
    }

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        debug_assert!((request.offset | request.length).is_multiple_of(SECTOR as u64));
        match (request.operation, self.holes) {
            (Operation::Read | Operation::Flush, _)
            | (Operation::Discard | Operation::WriteZeroes { unmap: true }, Holes::Zero) => {
                if self.takes_lent && request.operation == Operation::Read {
                    io.take_lent(id);
                }
                io.pass(id);
            }
            (Operation::Discard, Holes::Ciphertext) => io.complete(id, Ok(())),
            (Operation::Write | Operation::WriteZeroes { .. }, _) => {
                self.sealing[id.index()] = Some(Sealing::default());
                self.pump(id, io);
            }
        }
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        if let Some(parent) = io.parent(id) {
            return self.chunk_up(id, parent, io);
        }
        let request = io.request(id);
        let (operation, mut result) = (request.operation, request.result);
        if operation == Operation::Read && result.is_ok() {
            let timed = self.sampler.begin();
            let is_lent = self.takes_lent && request.lent.bytes() > 0;
            result = if is_lent { self.open_lent(id, io) } else { self.open(id, io) };
            self.sampler.end(timed, CipherWork::Decrypt);
        }
        if self.takes_lent {
            io.return_lent(id);
        }
        io.complete(id, result);
    }
}

#[cfg(test)]
mod tests;
