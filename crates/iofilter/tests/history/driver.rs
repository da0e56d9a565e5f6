//! The vhost-user front end over storage that forgets: a driver that does not know of flushes (SeaBIOS) has
//! each write flushed before it is answered.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use vmseal_api::filter::Holes;
use vmseal_api::id::DiskId;
use vmseal_iofilter::chain::Chain;
use vmseal_iofilter::front_end::Served;
use vmseal_iofilter::status::DiskState;
use vmseal_iofilter::stop::Stop;
use vmseal_iofilter::vhost_user::serve;

use crate::checker::{End, Finding, History, Write};
use crate::initiator::Initiator;
use crate::platter::{Fault, Platter};
use crate::stamp::{self, Found, Stamp};
use crate::{BLOCK, Kind, SECTOR, SIZE, seed};

const DISK: u64 = 0x6472_6976;
const FLUSH: u64 = 1 << 9;
const IN: u32 = 0;
const OUT: u32 = 1;

/// One queue of the disk, being served.
struct Server {
    place: tempfile::TempDir,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<std::io::Result<Vec<Chain>>>>,
}

impl Server {
    fn start(kind: &Kind, platter: &Platter) -> Self {
        let place = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(place.path().join("vhost")).unwrap();
        let chains = vec![kind.disk().chain_over(platter.queue()).unwrap()];
        let state = Arc::new(DiskState::new(DiskId::new(), 1));
        let served = Served { size: SIZE, read_only: false, serial: "serial-1".into(), state };
        let stop = Arc::new(Stop::new().unwrap());
        let stopping = Arc::clone(&stop);
        let uid = nix::unistd::geteuid().as_raw();
        let serve = move || serve(&listener, uid, &Arc::new(served), chains, &stopping);
        Self { place, stop, thread: Some(std::thread::spawn(serve)) }
    }

    fn connect(&self, features: u64) -> Initiator {
        let stream = UnixStream::connect(self.place.path().join("vhost")).unwrap();
        Initiator::connect(stream, 0, features)
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

/// Writes with a driver of these features, then the power fails. What is wrong, if each answer meant that
/// the write is durable.
fn run(kind: &Kind, features: u64, random: &mut fastrand::Rng) -> Vec<Finding> {
    let platter = Platter::new(SIZE as usize, kind.granule, Fault::Nothing, random.fork());
    let units = SIZE / BLOCK as u64;
    let mut history = History::new(vec![Found::Zeroes; units as usize]);
    let server = Server::start(kind, &platter);
    let mut driver = server.connect(features);
    for _ in 0..60 {
        let first = random.u64(..units);
        let range = first..(first + random.u64(1..20)).min(units);
        let asked = history.tick();
        let stamps = range.clone().map(|unit| Stamp { disk: DISK, unit, sequence: asked });
        let mut data = vec![0; (range.end - range.start) as usize * BLOCK];
        stamps.zip(data.chunks_mut(BLOCK)).for_each(|(stamp, bytes)| stamp.fill(bytes));
        assert_eq!(driver.request(OUT, first, &data).0, 0);
        let end = End::Done(history.tick());
        history.writes.push(Write { sequence: asked, units: range, zeroes: false, asked, end });
        let flushed = history.tick();
        history.flushes.push(flushed);
    }
    platter.cut();
    let (status, data) = driver.request(IN, 0, &vec![0xee; SIZE as usize]);
    assert_eq!(status, 0);
    let found = (0..).zip(data.chunks(BLOCK)).map(|(unit, bytes)| stamp::find(bytes, DISK, unit));
    history.check_cut(&found.collect::<Vec<_>>())
}

#[test]
fn what_is_answered_to_a_driver_that_does_not_flush_survives_a_power_cut() {
    let mut random = fastrand::Rng::with_seed(seed());
    for kind in [Kind::new(None, BLOCK), Kind::new(Some(Holes::Zero), SECTOR)] {
        assert_eq!(run(&kind, u64::MAX & !FLUSH, &mut random), []);
        let with_flushes = run(&kind, u64::MAX, &mut random);
        assert!(!with_flushes.is_empty(), "nothing is ever lost: the test proves nothing");
    }
}
