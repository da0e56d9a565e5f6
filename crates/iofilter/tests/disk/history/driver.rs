//! The front ends over storage that forgets. For a driver that sends no flushes (SeaBIOS) each write is
//! flushed before it is answered, and likewise for an NBD client that asks for it (FUA).

use std::io::{Read, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use vmseal_api::filter::Holes;
use vmseal_api::id::DiskId;
use vmseal_initiator::driver;
use vmseal_iofilter::disk::allocation::Allocation;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::front_ends::ServedDisk;
use vmseal_iofilter::front_ends::nbd;
use vmseal_iofilter::front_ends::vhost_user;
use vmseal_iofilter::handle::Socket;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::orders::Orders;
use vmseal_iofilter::stack::stop::Stop;

use crate::history::checker::{End, Finding, History, Write};
use crate::history::stamp::{self, Found, Stamp};
use crate::history::{BLOCK, Kind, SECTOR, SIZE};
use crate::platter::{Fault, Platter};
use crate::seed::seed;

const DISK: u64 = 0x6472_6976;

/// The number of a read and a write in both protocols.
const READ: u16 = 0;
const WRITE: u16 = 1;

/// virtio-blk: the driver sends flushes.
const FLUSH: u64 = 1 << 9;

/// NBD: the write must be durable before it is answered.
const FUA: u16 = 1;

/// How the disk is served, and what a write asks for.
#[derive(Clone, Copy, Debug)]
enum Way {
    Vhost { features: u64 },
    Nbd { flags: u16 },
}

/// One queue of the disk, being served.
struct Server {
    place: tempfile::TempDir,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<std::io::Result<Vec<Chain>>>>,
}

impl Server {
    fn start(kind: &Kind, platter: &Platter, way: Way) -> Self {
        let place = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(place.path().join("socket")).unwrap();
        let chains = vec![kind.disk().chain_over(platter.queue()).unwrap()];
        let state = Arc::new(DiskState::new(DiskId::new(), 1));
        let served = ServedDisk {
            size: SIZE.into(),
            read_only: false,
            serial: "serial-1".into(),
            state,
            allocation: Allocation::Unknown.into(),
        };
        let (served, stop) = (Arc::new(served), Arc::new(Stop::new().unwrap()));
        let stopping = Arc::clone(&stop);
        let uid = nix::unistd::geteuid().as_raw();
        let serve = move || match way {
            Way::Vhost { .. } => {
                let socket = Socket::Listening(listener);
                let orders = Orders::new(stopping)?;
                vhost_user::serve(&socket, uid, &served, chains, &orders)
            }
            Way::Nbd { .. } => {
                let orders = Orders::new(stopping)?;
                nbd::serve(&listener, uid, &served, chains, 1 << 20, &orders)
            }
        };
        Self { place, stop, thread: Some(std::thread::spawn(serve)) }
    }

    fn connect(&self, way: Way) -> Driver {
        let stream = UnixStream::connect(self.place.path().join("socket")).unwrap();
        match way {
            Way::Vhost { features } => {
                Driver::Vhost(Box::new(driver::Driver::connect(stream, 0, features)))
            }
            Way::Nbd { flags } => {
                negotiate(&stream);
                Driver::Nbd(stream, flags)
            }
        }
    }
}

enum Driver {
    Vhost(Box<driver::Driver>),
    Nbd(UnixStream, u16),
}

/// Enters transmission in the oldest way: fixed newstyle, no zeroes, the export without a name.
fn negotiate(mut stream: &UnixStream) {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(greeting[..16], *b"NBDMAGICIHAVEOPT");
    stream.write_all(&3_u32.to_be_bytes()).unwrap();
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    let mut about = [0; 10];
    stream.read_exact(&mut about).unwrap();
    assert_eq!(about[..8], SIZE.to_be_bytes());
}

impl Driver {
    /// Does one request that must succeed; returns the data.
    fn request(&mut self, kind: u16, unit: u64, data: &[u8]) -> Vec<u8> {
        match self {
            Driver::Vhost(initiator) => {
                let (status, data) = initiator.request(kind.into(), unit, data);
                assert_eq!(status, 0);
                data
            }
            Driver::Nbd(stream, flags) => {
                let length = u32::try_from(data.len()).unwrap().to_be_bytes();
                let head = [&0x2560_9513_u32.to_be_bytes()[..], &flags.to_be_bytes()].concat();
                let place = [kind.to_be_bytes().as_slice(), &[7; 8]].concat();
                let offset = (unit * BLOCK as u64).to_be_bytes();
                stream.write_all(&[&head[..], &place, &offset, &length].concat()).unwrap();
                if kind == WRITE {
                    stream.write_all(data).unwrap();
                }
                let mut reply = [0; 16];
                stream.read_exact(&mut reply).unwrap();
                let good = [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], &[7; 8]].concat();
                assert_eq!(reply[..], good);
                let mut data = vec![0; if kind == READ { data.len() } else { 0 }];
                stream.read_exact(&mut data).unwrap();
                data
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.ask();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            assert_eq!(ended.unwrap().unwrap().len(), 1);
        }
    }
}

/// Writes, then the power fails. Returns what is wrong if each answer meant that the write is durable.
fn run(kind: &Kind, way: Way, random: &mut fastrand::Rng) -> Vec<Finding> {
    let platter = Platter::new(SIZE as usize, kind.granule, Fault::Nothing, random.fork());
    let units = SIZE / BLOCK as u64;
    let mut history = History::new(vec![Found::Zeroes; units as usize]);
    let server = Server::start(kind, &platter, way);
    let mut driver = server.connect(way);
    for _ in 0..60 {
        let first = random.u64(..units);
        let range = first..(first + random.u64(1..20)).min(units);
        let asked = history.tick();
        let stamps = range.clone().map(|unit| Stamp { disk: DISK, unit, sequence: asked });
        let mut data = vec![0; (range.end - range.start) as usize * BLOCK];
        stamps.zip(data.chunks_mut(BLOCK)).for_each(|(stamp, bytes)| stamp.fill(bytes));
        driver.request(WRITE, first, &data);
        let end = End::Done(history.tick());
        history.writes.push(Write { sequence: asked, units: range, zeroes: false, asked, end });
        let flushed = history.tick();
        history.flushes.push(flushed);
    }
    platter.cut();
    let data = driver.request(READ, 0, &vec![0xee; SIZE as usize]);
    let found = (0..).zip(data.chunks(BLOCK)).map(|(unit, bytes)| stamp::find(bytes, DISK, unit));
    history.check_cut(&found.collect::<Vec<_>>())
}

#[test]
fn writes_answered_as_durable_survive_a_power_cut() {
    let mut random = fastrand::Rng::with_seed(seed());
    let ways = [
        (Way::Vhost { features: !FLUSH }, Way::Vhost { features: u64::MAX }),
        (Way::Nbd { flags: FUA }, Way::Nbd { flags: 0 }),
    ];
    for kind in [Kind::new(None, BLOCK), Kind::new(Some(Holes::Zero), SECTOR)] {
        for (durable, not_yet) in ways {
            assert_eq!(run(&kind, durable, &mut random), [], "{durable:?}");
            let lost = run(&kind, not_yet, &mut random);
            assert!(!lost.is_empty(), "{not_yet:?} loses nothing: the test proves nothing");
        }
    }
}
