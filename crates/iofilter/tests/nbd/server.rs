//! A disk that is being served, and our own client.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmseal_api::filter::{Direct, DiskActivity, Holes, NBD_CONNECTIONS};
use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::front_ends::ServedDisk;
use vmseal_iofilter::front_ends::nbd::serve;
use vmseal_iofilter::nbd::{OPTION_MAGIC, Request, command, option};
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::dirty::Bitmaps;
use vmseal_iofilter::stack::orders::Orders;
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_secret::SecretBytes;

pub const SIZE: u64 = 64 << 20;
pub const OFFSET: u64 = 1 << 16;
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// An encrypted disk that is being served.
pub struct Server {
    pub directory: tempfile::TempDir,
    pub state: Arc<DiskState>,
    pub bitmaps: Arc<Bitmaps>,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<std::io::Result<Vec<Chain>>>>,
}

#[derive(Clone, Copy)]
pub struct Options {
    pub read_only: bool,
    pub holes: Holes,
    /// On tmpfs, where requests complete at once, or on the build's file system, with io_uring.
    pub in_memory: bool,
    pub pool_bytes: usize,
}

pub const USUAL: Options =
    Options { read_only: false, holes: Holes::Zero, in_memory: true, pool_bytes: 2 << 20 };

impl Server {
    pub fn start(options: Options) -> Self {
        let place = if options.in_memory { "/dev/shm" } else { env!("CARGO_TARGET_TMPDIR") };
        let directory = tempfile::tempdir_in(place).unwrap();
        let path = directory.path().join("disk");
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(OFFSET + SIZE).unwrap();
        let read_only = options.read_only;
        let file = FileDisk::open(OwnedFd::from(file), OFFSET, SIZE, Direct::Auto, read_only);
        let mut key: Vec<u8> = (0..64).collect();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        let encryption = Some(Encryption { key, holes: options.holes });
        let queues = usize::from(NBD_CONNECTIONS);
        let disk = Disk::new(SIZE, read_only, encryption, DiskStorage::File(file.unwrap()), queues);
        let chains = (0..queues).map(|_| disk.chain().unwrap()).collect();
        let bitmaps = disk.bitmaps();
        let state = DiskState::new(DiskId::new(), queues).with_bitmaps(Arc::clone(&bitmaps));
        let state = Arc::new(state);
        let served = ServedDisk {
            size: SIZE.into(),
            read_only,
            serial: "serial-1".into(),
            state: Arc::clone(&state),
            allocation: disk.allocation().into(),
        };
        let stop = Arc::new(Stop::new().unwrap());
        let stopping = Arc::clone(&stop);
        let listener = UnixListener::bind(directory.path().join("nbd")).unwrap();
        let uid = nix::unistd::geteuid().as_raw();
        let thread = std::thread::spawn(move || {
            let orders = Orders::new(stopping)?;
            serve(&listener, uid, &served, chains, options.pool_bytes, &orders)
        });
        Self { directory, state, bitmaps, stop, thread: Some(thread) }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("nbd").display())
    }

    pub fn file(&self) -> File {
        File::options().read(true).write(true).open(self.path("disk")).unwrap()
    }

    /// A client after its negotiation.
    pub fn client(&self) -> Client {
        let mut client = self.stranger();
        client.read::<18>();
        client.send(&[0, 0, 0, 3]);
        client.option(option::EXPORT_NAME, b"");
        assert_eq!(client.read::<10>()[..8], SIZE.to_be_bytes());
        client
    }

    /// A client before its negotiation.
    pub fn stranger(&self) -> Client {
        let stream = UnixStream::connect(self.path("nbd")).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        Client { stream }
    }

    pub fn wait_until(&self, state: &DiskActivity) {
        let until = Instant::now() + TIMEOUT;
        while self.state.status().state != *state {
            assert!(Instant::now() < until, "the disk is not {state:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops, and returns how many chains came back.
    pub fn end(&mut self) -> usize {
        self.stop.ask();
        self.thread.take().map_or(0, |thread| thread.join().unwrap().unwrap().len())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let chains = self.end();
            assert!(chains == 0 || chains == usize::from(NBD_CONNECTIONS), "{chains} came back");
        }
    }
}

pub struct Client {
    pub stream: UnixStream,
}

impl Client {
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn read<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        let length = (data.len() as u32).to_be_bytes();
        let header = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length];
        self.send(&[&header.concat(), data].concat());
    }

    pub fn ask(&mut self, command: u16, flags: u16, offset: u64, length: u32, cookie: u64) {
        self.send(&Request { flags, command, cookie, offset, length }.encode());
    }

    /// The cookie and the error of the next reply.
    pub fn reply(&mut self) -> (u64, u32) {
        let reply = self.read::<16>();
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        (u64::from_be_bytes(reply[8..].try_into().unwrap()), error)
    }

    /// Whether the server ends the connection.
    pub fn is_ended(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub fn data(&mut self, offset: u64, length: u32) -> Vec<u8> {
        self.ask(command::READ, 0, offset, length, 5);
        assert_eq!(self.reply(), (5, 0));
        let mut data = vec![0; length as usize];
        self.stream.read_exact(&mut data).unwrap();
        data
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.ask(command::WRITE, 0, offset, data.len() as u32, 6);
        self.send(data);
        self.reply().1
    }
}

pub fn run(program: &str, arguments: &[&str], server: &Server) -> Output {
    Command::new(program)
        .args(arguments)
        .current_dir(server.directory.path())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}; run scripts/prerequisites"))
}

pub fn succeeds(program: &str, arguments: &[&str], server: &Server) -> String {
    let output = run(program, arguments, server);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}{said}");
    text
}

pub fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let word = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 32) as u32
    };
    (0..length / 4).map(word).flat_map(u32::to_le_bytes).collect()
}
