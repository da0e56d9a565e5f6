//! A disk that is encrypted, decrypted or re-encrypted in its own file holds what it held, whatever write the power cut off,
//! and however often; nothing that was in the clear is left in the file; and a sparse file stays sparse.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmseal_api::filter::{Holes, IN_PLACE_JOURNAL};
use vmseal_api::id::DiskId;
use vmseal_iofilter::copy::in_place::{InPlace, InPlaceError, PART_MAX, Parts, Side};
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::chain::{Chain, Io, Storage};
use vmseal_iofilter::stack::request::{IoError, Operation, RequestId};
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::extent::Extent;
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

use crate::platter::{Fault, Platter};
use crate::seed::seed;

const SECTOR: usize = 4096;

/// The disk: several parts where it moves, the last one not whole.
const SIZE: usize = 23 * SECTOR;

/// The header's room.
const ROOM: usize = 4 * SECTOR;

/// A disk that is longer than what a journal saves at a time.
const LONG: usize = (9 << 20) + 3 * SECTOR;

/// A byte that is nowhere but in the guest's data, often.
const MARK: u8 = 0xb7;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Encrypt,
    Decrypt,
    Recrypt,
}

impl Kind {
    fn offsets(self) -> (usize, usize) {
        match self {
            Self::Encrypt => (0, ROOM),
            Self::Decrypt => (ROOM, 0),
            Self::Recrypt => (ROOM, ROOM),
        }
    }

    fn keys(self) -> (Option<u8>, Option<u8>) {
        match self {
            Self::Encrypt => (None, Some(2)),
            Self::Decrypt => (Some(1), None),
            Self::Recrypt => (Some(1), Some(2)),
        }
    }
}

/// Fails all requests from a certain write on: the instant of the power cut.
#[derive(Clone)]
struct Fuse {
    writes: Arc<AtomicU64>,
    limit: u64,
}

/// A part of a platter, whose power fails.
struct Wired {
    inner: Box<dyn Storage>,
    fuse: Fuse,
}

impl Storage for Wired {
    fn prepare(&mut self, capacity: usize) {
        self.inner.prepare(capacity);
    }

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let changes = !matches!(io.request(id).operation, Operation::Read);
        let count = match changes {
            true => self.fuse.writes.fetch_add(1, Ordering::Relaxed),
            false => self.fuse.writes.load(Ordering::Relaxed),
        };
        if count >= self.fuse.limit {
            // What was being written may have been written in part: as in flight at the cut.
            if count == self.fuse.limit && !matches!(io.request(id).operation, Operation::Flush) {
                self.inner.submit(id, io);
                return;
            }
            return io.complete(id, Err(IoError::Device(5)));
        }
        self.inner.submit(id, io);
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        self.inner.poll(io);
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_handle()
    }
}

/// What is all zeroes is a hole.
struct Zeroes {
    platter: Platter,
    offset: usize,
    /// Whether it says so.
    known: bool,
}

impl Parts for Zeroes {
    fn extent(&self, at: u64, end: u64) -> io::Result<Extent> {
        if !self.known {
            return Ok(Extent { data: true, end });
        }
        let bytes = self.platter.bytes();
        let (at, end) = (at as usize + self.offset, end as usize + self.offset);
        let mut sectors = bytes[at..end].chunks(SECTOR).map(|it| it.iter().any(|byte| *byte != 0));
        let data = sectors.next().unwrap();
        let same = 1 + sectors.take_while(|other| *other == data).count();
        let end = (at + same * SECTOR).min(end) - self.offset;
        Ok(Extent { data, end: end as u64 })
    }
}

/// A disk in a file, with the journal beside it.
struct Rig {
    kind: Kind,
    size: usize,
    image: Platter,
    journal: Platter,
    disk: DiskId,
    sparse: bool,
    writes: Arc<AtomicU64>,
}

impl Rig {
    fn new(kind: Kind, size: usize, sparse: bool, random: &mut fastrand::Rng) -> Self {
        let platter = |size, random: &mut fastrand::Rng| {
            Platter::new(size, SECTOR, Fault::Nothing, random.fork())
        };
        Self {
            kind,
            size,
            image: platter(size + ROOM, random),
            journal: platter(IN_PLACE_JOURNAL as usize, random),
            disk: DiskId::new(),
            sparse,
            writes: Arc::default(),
        }
    }

    fn chain(&self, of: &Platter, size: usize, offset: usize, key: Option<u8>, fuse: u64) -> Chain {
        let key = key.map(|byte| {
            let mut key: Vec<u8> = (0..64).map(|index| byte.wrapping_mul(31) ^ index).collect();
            let key = SecretBytes::from_wiped(&mut key).unwrap();
            Encryption { key, holes: Holes::Zero }
        });
        let disk = Disk::new(size as u64, false, key, DiskStorage::Mem(MemDisk::new(0)), 4);
        let fuse = Fuse { writes: Arc::clone(&self.writes), limit: fuse };
        let inner = of.queue_at(offset);
        disk.chain_over(Box::new(Wired { inner, fuse })).unwrap()
    }

    fn side(&self, offset: usize, key: Option<u8>, fuse: u64) -> Side {
        let parts = Zeroes { platter: self.image.clone(), offset, known: self.sparse };
        let chain = self.chain(&self.image, self.size, offset, key, fuse);
        Side { chain, parts: Box::new(parts), offset: offset as u64 }
    }

    /// Converts until the end or the cut.
    fn convert(&self, fuse: u64) -> Result<(), InPlaceError> {
        let (from, to) = self.kind.offsets();
        let (from_key, to_key) = self.kind.keys();
        let conversion = InPlace {
            from: self.side(from, from_key, fuse),
            to: self.side(to, to_key, fuse),
            stored: self.chain(&self.image, self.size, from, None, fuse),
            journal: self.chain(&self.journal, IN_PLACE_JOURNAL as usize, 0, None, fuse),
            overwrites: self.kind == Kind::Encrypt,
            keeps_room: false,
            rate: None,
            part: if self.size == LONG { PART_MAX } else { 5 * SECTOR as u64 },
        };
        let state = DiskState::new(self.disk, 1);
        conversion.run(self.disk, &state, &Stop::new().unwrap())
    }

    fn write(&self, content: &[u8]) {
        let (from, _) = self.kind.offsets();
        let mut chain = self.chain(&self.image, self.size, from, self.kind.keys().0, u64::MAX);
        for (index, sector) in content.chunks(SECTOR).enumerate() {
            if sector.iter().any(|byte| *byte != 0) {
                let at = (index * SECTOR) as u64;
                blocking::move_bytes(&mut chain, Operation::Write, &mut sector.to_vec(), at)
                    .unwrap();
            }
        }
        blocking::flush(&mut chain).unwrap();
        self.writes.store(0, Ordering::Relaxed);
    }

    fn read(&self) -> Vec<u8> {
        let (_, to) = self.kind.offsets();
        let mut chain = self.chain(&self.image, self.size, to, self.kind.keys().1, u64::MAX);
        let mut content = vec![0; self.size];
        for (index, part) in content.chunks_mut(1 << 20).enumerate() {
            blocking::move_bytes(&mut chain, Operation::Read, part, (index << 20) as u64).unwrap();
        }
        content
    }

    /// Checks what the file has when the conversion has ended.
    fn check(&self, content: &[u8], what: &str) {
        assert!(self.read() == content, "{what}: the disk holds something else");
        let bytes = self.image.bytes();
        let (_, to) = self.kind.offsets();
        let stored = &bytes[to..to + self.size];
        if self.kind != Kind::Decrypt {
            // The room before the data is the agent's to overwrite.
            let plain = stored.windows(32).any(|part| part.iter().all(|byte| *byte == MARK));
            assert!(!plain, "{what}: data is left in the clear");
        }
        for (index, sector) in content.chunks(SECTOR).enumerate() {
            let zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
            let at = index * SECTOR;
            assert!(
                !zero(sector) || zero(&stored[at..at + SECTOR]),
                "{what}: sector {index} is no hole any more"
            );
        }
    }
}

fn content(size: usize, random: &mut fastrand::Rng) -> Vec<u8> {
    let mut content = vec![0; size];
    let mut at = 0;
    while at < size {
        let end = (at + random.usize(1..=6) * SECTOR).min(size);
        match random.u8(..3) {
            0 => {}
            1 => content[at..end].fill(MARK),
            _ => random.fill(&mut content[at..end]),
        }
        at = end;
    }
    content
}

/// The same with data in half of its sectors at least: a disk of holes alone is converted without a write.
fn mostly_data(size: usize, random: &mut fastrand::Rng) -> Vec<u8> {
    loop {
        let content = content(size, random);
        let data = content.chunks(SECTOR).filter(|sector| sector.iter().any(|byte| *byte != 0));
        if data.count() * 2 >= size / SECTOR {
            return content;
        }
    }
}

const KINDS: [Kind; 3] = [Kind::Encrypt, Kind::Decrypt, Kind::Recrypt];

#[test]
fn a_conversion_goes_on_after_a_power_cut_at_every_write() {
    let mut random = fastrand::Rng::with_seed(seed());
    for kind in KINDS {
        for sparse in [false, true] {
            let content = mostly_data(SIZE, &mut random);
            let whole = Rig::new(kind, SIZE, sparse, &mut random);
            whole.write(&content);
            whole.convert(u64::MAX).unwrap();
            whole.check(&content, &format!("{kind:?}"));
            let writes = whole.writes.load(Ordering::Relaxed);
            assert!(writes > 10, "{kind:?}: {writes} writes");
            for cut in 0..writes {
                let rig = Rig::new(kind, SIZE, sparse, &mut random);
                rig.write(&content);
                assert!(rig.convert(cut).is_err(), "{kind:?}: write {cut} was not cut off");
                rig.image.cut();
                rig.journal.cut();
                rig.writes.store(0, Ordering::Relaxed);
                // Again while it goes on, and then to the end.
                if rig.convert(random.u64(..writes)).is_err() {
                    rig.image.cut();
                    rig.journal.cut();
                }
                rig.writes.store(0, Ordering::Relaxed);
                rig.convert(u64::MAX).unwrap();
                rig.check(&content, &format!("{kind:?}, sparse: {sparse}, cut at {cut}"));
            }
        }
    }
}

#[test]
fn a_conversion_survives_many_power_cuts_in_a_row() {
    let mut random = fastrand::Rng::with_seed(seed());
    for round in 0..60 {
        let kind = KINDS[round % 3];
        let (size, sparse) = (if round < 6 { LONG } else { SIZE }, random.bool());
        let content = content(size, &mut random);
        let rig = Rig::new(kind, size, sparse, &mut random);
        rig.write(&content);
        for _ in 0..200 {
            rig.writes.store(0, Ordering::Relaxed);
            let fuse = random.u64(1..if size == LONG { 600 } else { 24 });
            let ended = rig.convert(fuse).is_ok();
            rig.image.cut();
            rig.journal.cut();
            if ended {
                break;
            }
        }
        rig.writes.store(0, Ordering::Relaxed);
        rig.convert(u64::MAX).unwrap();
        rig.check(&content, &format!("{kind:?}, round {round}"));
    }
}

#[test]
fn a_journal_that_is_damaged_or_of_another_conversion_is_refused() {
    let mut random = fastrand::Rng::with_seed(seed());
    // Without holes, of which a random image may have so many that it is converted by fewer writes.
    let mut content = vec![0; SIZE];
    random.fill(&mut content);
    let mut rig = Rig::new(Kind::Recrypt, SIZE, true, &mut random);
    rig.write(&content);
    assert!(rig.convert(14).is_err());
    let before = rig.image.bytes();
    let disk = std::mem::replace(&mut rig.disk, DiskId::new());
    let other = rig.convert(u64::MAX).unwrap_err();
    assert!(other.to_string().contains("another conversion"), "{other}");
    rig.disk = disk;
    let mut chain = rig.chain(&rig.journal, IN_PLACE_JOURNAL as usize, 0, None, u64::MAX);
    for at in [0, IN_PLACE_JOURNAL / 2] {
        let mut noise = vec![0x5a; SECTOR];
        blocking::move_bytes(&mut chain, Operation::Write, &mut noise, at).unwrap();
    }
    let damaged = rig.convert(u64::MAX).unwrap_err();
    assert!(damaged.to_string().contains("damaged"), "{damaged}");
    assert!(rig.image.bytes() == before, "the image was changed");
}
