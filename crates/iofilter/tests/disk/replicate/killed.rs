//! The program, killed under load and started again: it resumes the copy, what its map calls equal is equal, and in the end
//! all of the replica is. The replica is a file, a file under an encryption of its own, or at a server of somebody else.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmseal_api::filter::{ControlReply, ControlRequest, Direct, Holes, ReplicaStatus};
use vmseal_initiator::driver::Driver;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers::replicate::format::{Geometry, Image};
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::request::Operation;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_secret::SecretBytes;

use crate::seed::seed;
use crate::successor::Filter;

const SIZE: u64 = 48 << 20;
/// Where the replica begins in its file or export.
const OFFSET: u64 = 4096;
const KILLS: usize = 12;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Slow enough that kills interrupt it.
const RATE: u64 = 64 << 20;

/// Where a replica is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// In a file, as earlier versions had it in their configurations.
    Earlier,
    /// In a file, encrypted once more.
    Encrypted,
    /// In a file that `qemu-nbd` serves.
    Server,
}

impl Place {
    fn layer(self, directory: &Path) -> Value {
        let path = |name: &str| json!({ "path": directory.join(name) });
        let backend = match self {
            Self::Earlier => {
                return json!({
                    "kind": "replicate", "replica": path("replica"), "offset": OFFSET,
                    "map": path("map"), "bytes_per_second": RATE
                });
            }
            Self::Encrypted => {
                json!({ "kind": "file", "file": path("replica"), "offset": OFFSET })
            }
            Self::Server => {
                json!({ "kind": "nbd", "sockets": [path("server")], "offset": OFFSET })
            }
        };
        let crypt = json!({ "kind": "crypt", "key": path("other key"), "holes": "zero" });
        let chain = if self == Self::Encrypted { json!([crypt]) } else { json!([]) };
        json!({
            "kind": "replicate", "to": { "chain": chain, "backend": backend },
            "map": path("map"), "bytes_per_second": RATE
        })
    }

    /// What the replica holds.
    fn content(self, directory: &Path) -> Vec<u8> {
        let path = directory.join("replica");
        if self != Self::Encrypted {
            return std::fs::read(path).unwrap()[OFFSET as usize..].to_vec();
        }
        let mut key = std::fs::read(directory.join("other key")).unwrap();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        let file =
            FileDisk::open(File::open(path).unwrap().into(), OFFSET, SIZE, Direct::Off, true);
        let encryption = Some(Encryption { key, holes: Holes::Zero });
        let disk = Disk::new(SIZE, true, encryption, DiskStorage::File(file.unwrap()), 1);
        let mut bytes = vec![0xee; SIZE as usize];
        blocking::move_bytes(&mut disk.chain().unwrap(), Operation::Read, &mut bytes, 0).unwrap();
        bytes
    }
}

/// A server of the file `replica` in a directory, killed when dropped.
struct Server(Child);

impl Server {
    fn start(directory: &Path) -> Self {
        let socket = directory.join("server");
        let _ = std::fs::remove_file(&socket);
        // With one client at a time, what a dead one has asked for is over when the next one is served.
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=1", "--format=raw", "--discard=unmap", "--socket"]);
        command.arg(&socket).arg(directory.join("replica")).stdin(Stdio::null());
        let child = command.spawn().expect("qemu-nbd; run scripts/prerequisites");
        let until = Instant::now() + TIMEOUT;
        while UnixStream::connect(&socket).is_err() {
            assert!(Instant::now() < until, "qemu-nbd does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A disk whose filter is killed, and its guest.
struct Run<'a> {
    directory: &'a Path,
    place: Place,
    chain: Value,
    random: fastrand::Rng,
    driver: Driver,
    filter: Filter,
}

impl<'a> Run<'a> {
    fn start(directory: &'a Path, place: Place, random: fastrand::Rng) -> Self {
        for name in ["key", "other key"] {
            let (key, first) = (directory.join(name), name.len() as u8);
            std::fs::write(&key, (first..first + 64).collect::<Vec<_>>()).unwrap();
            std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
        }
        let key = json!({ "path": directory.join("key") });
        let crypt = json!({ "kind": "crypt", "key": key, "holes": "zero" });
        let chain = json!([crypt, place.layer(directory)]);
        let (filter, socket) = Filter::start(directory, &backend(), SIZE, &chain);
        let driver = Driver::connect_with_record(socket, u64::MAX);
        Self { directory, place, chain, random, driver, filter }
    }

    fn make(directory: &Path) {
        for (name, length) in [("disk", SIZE), ("replica", OFFSET + SIZE), ("map", 0)] {
            File::create(directory.join(name)).unwrap().set_len(length).unwrap();
        }
    }

    /// The next filter.
    fn next(&mut self) {
        let socket;
        (self.filter, socket) = Filter::start(self.directory, &backend(), SIZE, &self.chain);
        self.driver.reconnect(socket);
    }

    fn ask(&mut self, kind: u32, sector: u64, data: &[u8]) {
        assert_eq!(self.driver.request(kind, sector, data).0, 0, "the guest sees an error");
    }

    /// Writes and flushes at random.
    fn work(&mut self) {
        for _ in 0..self.random.usize(1..60) {
            let sectors = self.random.usize(1..64);
            let at = self.random.u64(..SIZE / 512 - 64);
            let data = vec![self.random.u8(..); sectors * 512];
            match self.random.u8(..8) {
                0 => self.ask(FLUSH, at, &[]),
                _ => self.ask(WRITE, at, &data),
            }
        }
    }

    fn status(&self) -> ReplicaStatus {
        let until = Instant::now() + TIMEOUT;
        let mut stream = loop {
            match UnixStream::connect(self.directory.join("control")) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < until, "no control socket: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let ask = serde_json::to_vec(&ControlRequest::Status).unwrap();
        stream.write_all(&[&ask[..], b"\n"].concat()).unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        match serde_json::from_str(&answer).unwrap() {
            ControlReply::Status(mut status) => status.disks.remove(0).replica.unwrap(),
            other => panic!("{other:?}"),
        }
    }

    fn wait_until(&self, is: impl Fn(&ReplicaStatus) -> bool) -> ReplicaStatus {
        let until = Instant::now() + TIMEOUT;
        loop {
            let status = self.status();
            if is(&status) {
                return status;
            }
            assert!(Instant::now() < until, "{status:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Checks, of a filter that is dead, that what its map does not have copied again is equal; returns how many chunks it
    /// has copied again, of how many.
    fn what_is_copied_again(&self) -> (usize, usize) {
        let disk = "01890a5d-ac96-774b-bcce-b302099a8058".parse().unwrap();
        let geometry = Geometry::new(disk, SIZE);
        let read = |name: &str| std::fs::read(self.directory.join(name)).unwrap();
        let Ok((map, _)) = Image::read(geometry, &read("map")) else {
            return (geometry.chunks(), geometry.chunks());
        };
        let (disk, replica) = (read("disk"), self.place.content(self.directory));
        let (mut again, chunks) = (0, geometry.chunks());
        for chunk in 0..chunks {
            let (start, end) = geometry.range(chunk);
            let range = start as usize..end as usize;
            let differs = disk[range.clone()] != replica[range];
            assert!(map.is_dirty(chunk) || !differs, "chunk {chunk} differs and counts as equal");
            again += usize::from(map.is_dirty(chunk));
        }
        (again, chunks)
    }

    /// Waits until everything is copied, and compares.
    fn becomes_equal(&mut self) {
        self.ask(FLUSH, 0, &[]);
        let status = self.wait_until(|status| status.dirty_bytes == 0);
        assert_eq!((status.last_error, status.lag_milliseconds), (None, Some(0)));
        self.filter.kill();
        let disk = std::fs::read(self.directory.join("disk")).unwrap();
        let replica = self.place.content(self.directory);
        assert!(disk == replica, "the replica counts as equal and differs");
        assert!(disk.iter().any(|byte| *byte != 0), "nothing was written");
        let log = std::fs::read_to_string(self.directory.join("log")).unwrap();
        assert!(!log.contains("not allowed"), "{log}");
    }
}

fn backend() -> Value {
    json!({ "kind": "file", "offset": 0 })
}

fn goes_on_when_killed(place: Place) {
    let mut random = fastrand::Rng::with_seed(seed());
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    Run::make(directory.path());
    let _server = (place == Place::Server).then(|| Server::start(directory.path()));
    let mut run = Run::start(directory.path(), place, random.fork());
    let (mut went_on, mut told_apart) = (0, 0);
    for _ in 0..KILLS {
        run.work();
        std::thread::sleep(Duration::from_millis(random.u64(..400)));
        run.filter.kill();
        let (again, chunks) = run.what_is_copied_again();
        told_apart += usize::from(0 < again && again < chunks);
        run.next();
        let dirty = run.status().dirty_bytes;
        went_on += usize::from(0 < dirty && dirty < SIZE);
    }
    assert!(went_on > 0 && told_apart > 0, "no filter was killed while it copied");
    run.becomes_equal();
}

#[test]
fn a_filter_that_is_killed_goes_on_with_the_copy_until_the_replica_is_equal() {
    goes_on_when_killed(Place::Earlier);
}

#[test]
fn so_does_one_whose_replica_is_encrypted_once_more() {
    goes_on_when_killed(Place::Encrypted);
}

#[test]
fn so_does_one_whose_replica_is_at_a_server_of_somebody_else() {
    goes_on_when_killed(Place::Server);
}

/// Its connection is lost for good, but the next filter has another one.
#[test]
fn a_server_that_dies_costs_the_guest_nothing_and_the_next_filter_copies_what_is_missing() {
    let random = fastrand::Rng::with_seed(seed());
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    Run::make(directory.path());
    let server = Server::start(directory.path());
    let mut run = Run::start(directory.path(), Place::Server, random);
    run.work();
    run.wait_until(|status| status.dirty_bytes == 0);
    drop(server);
    let changed = [3u64, 17, 40];
    for chunk in changed {
        run.ask(WRITE, chunk << 11, &[7; 4096]);
    }
    run.ask(FLUSH, 0, &[]);
    let status = run.wait_until(|status| status.last_error.is_some());
    let why = status.last_error.unwrap();
    assert!(why.contains("cannot be written") && why.contains("NBD server"), "{why}");
    assert_eq!(status.dirty_bytes, (changed.len() as u64) << 20);
    run.filter.kill();
    assert_eq!(run.what_is_copied_again().0, changed.len());
    let _server = Server::start(directory.path());
    run.next();
    run.becomes_equal();
}

const WRITE: u32 = 1;
const FLUSH: u32 = 4;
