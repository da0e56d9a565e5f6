//! A disk that is stored at an NBD server: other people's servers, and servers that go or break the protocol.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vmseal_api::filter::Holes;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::nbd::{
    NBD_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_LENGTH, info, option, option_reply, reply,
    transmission,
};
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation};
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_iofilter::storage::nbd::{NbdDisk, NbdError};
use vmseal_secret::SecretBytes;

use crate::nbd_server::NbdServer;
use crate::waiting;

const SIZE: u64 = 8 << 20;
const OFFSET: u64 = 64 << 10;
const TIMEOUT: Duration = Duration::from_secs(30);

/// A server of somebody else, ended when dropped.
struct Other {
    child: Child,
    directory: tempfile::TempDir,
}

impl Other {
    /// None, with a message, where it is not installed. It listens on `socket` in the directory.
    fn start(program: &str, arguments: &[&str]) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let disk = std::fs::File::create(directory.path().join("disk")).unwrap();
        disk.set_len(OFFSET + SIZE).unwrap();
        // qemu-nbd takes no other path of a socket.
        let socket = directory.path().join("socket").into_os_string();
        let of_socket = |argument: &&str| match *argument {
            "socket" => socket.clone(),
            other => other.into(),
        };
        let mut command = Command::new(program);
        command.args(arguments.iter().map(of_socket)).current_dir(directory.path());
        command.stdin(Stdio::null()).stderr(Stdio::null());
        match command.spawn() {
            Ok(child) => Some(Self { child, directory }),
            Err(error) => {
                // Not by a macro, whose output the harness hides when a test passes.
                let message = format!("skipped: {program}: {error}\n");
                std::io::stderr().write_all(message.as_bytes()).unwrap();
                None
            }
        }
    }

    fn connect(&self, count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| connect(&self.directory.path().join("socket"))).collect()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(socket: &Path) -> OwnedFd {
    let until = Instant::now() + TIMEOUT;
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return stream.into(),
            Err(error) => assert!(Instant::now() < until, "{socket:?}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn encryption() -> Encryption {
    let mut key: Vec<u8> = (0..64).collect();
    Encryption { key: SecretBytes::from_wiped(&mut key).unwrap(), holes: Holes::Zero }
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..)).take(length).collect()
}

fn write(chain: &mut Chain, at: u64, bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    blocking::move_bytes(chain, Operation::Write, &mut bytes, at).unwrap();
}

fn read(chain: &mut Chain, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    blocking::move_bytes(chain, Operation::Read, &mut bytes, at).unwrap();
    bytes
}

fn change(chain: &mut Chain, operation: Operation, at: u64, length: u64) -> Result<(), IoError> {
    let id = chain.begin().unwrap();
    chain.submit(id, operation, at, length, 0);
    blocking::drain(chain)
}

/// Everything that a guest does, on two queues: long requests, small ones, zeroes, flushes. Returns what the disk holds then.
fn use_it(disk: &Disk) -> Vec<u8> {
    let (mut one, mut other) = (disk.chain().unwrap(), disk.chain().unwrap());
    let mut model = vec![0; SIZE as usize];
    let long = noise(3 << 20, 1);
    write(&mut one, 4096, &long);
    model[4096..4096 + long.len()].copy_from_slice(&long);
    for (index, at) in [(2, 512), (3, 4 << 20), (4, (4 << 20) + 1536)] {
        let short = noise(1024, index);
        write(&mut other, at, &short);
        model[at as usize..at as usize + 1024].copy_from_slice(&short);
    }
    blocking::flush(&mut other).unwrap();
    for (unmap, at) in [(true, 1 << 20), (false, 2 << 20)] {
        change(&mut one, Operation::WriteZeroes { unmap }, at, 700 << 10).unwrap();
        model[at as usize..at as usize + (700 << 10)].fill(0);
    }
    change(&mut other, Operation::Discard, 6 << 20, 1 << 20).unwrap();
    assert!(read(&mut one, 0, SIZE as usize) == model, "it reads otherwise than it was written");
    let beyond = change(&mut one, Operation::Discard, SIZE, 512);
    assert_eq!(beyond, Err(IoError::OutOfRange));
    blocking::flush(&mut one).unwrap();
    drop((one, other));
    // The connections are used again.
    let mut again = disk.chain().unwrap();
    assert!(read(&mut again, 0, SIZE as usize) == model);
    model
}

fn check(server: &Other, export: &str, queues: usize) {
    for encrypted in [false, true] {
        let place = NbdDisk::open(server.connect(queues), export, OFFSET, SIZE, false).unwrap();
        let disk =
            Disk::new(SIZE, false, encrypted.then(encryption), DiskStorage::Nbd(place), queues);
        let mut chain = disk.chain().unwrap();
        change(&mut chain, Operation::WriteZeroes { unmap: true }, 0, SIZE).unwrap();
        drop(chain);
        let content = use_it(&disk);
        let stored = std::fs::read(server.directory.path().join("disk")).unwrap();
        let (before, stored) = stored.split_at(OFFSET as usize);
        assert!(before.iter().all(|byte| *byte == 0), "it writes before its beginning");
        assert_eq!(*stored == content[..], !encrypted, "what is stored");
    }
}

#[test]
fn a_disk_is_stored_at_qemu_nbd() {
    let arguments = ["-f", "raw", "-k", "socket", "-e", "4", "-t", "-x", "name", "disk"];
    if let Some(server) = Other::start_at("qemu-nbd", &arguments) {
        check(&server, "name", 2);
        let unknown = NbdDisk::open(server.connect(1), "other", 0, SIZE, false).unwrap_err();
        assert!(unknown.to_string().contains("no such export"), "{unknown}");
    }
}

#[test]
fn a_disk_is_stored_at_a_storage_daemon() {
    let arguments = [
        "--blockdev",
        "driver=file,node-name=file,filename=disk,discard=unmap",
        "--nbd-server",
        "addr.type=unix,addr.path=socket,max-connections=8",
        "--export",
        "type=nbd,id=it,node-name=file,name=it,writable=on",
    ];
    if let Some(server) = Other::start_at("qemu-storage-daemon", &arguments) {
        check(&server, "it", 2);
    }
}

#[test]
fn a_disk_is_stored_at_nbdkit_also_where_that_cannot_do_everything() {
    let filters: [&[&str]; 4] = [
        &[],
        &["--filter=nozero"],
        // Simple replies only, and blocks of 4096 bytes.
        &["--no-sr"],
        &["--filter=blocksize-policy"],
    ];
    for filter in filters {
        let listen = ["-f", "-U", "socket"];
        let mut arguments = [&listen[..], filter, &["file", "disk"]].concat();
        if filter.contains(&"--filter=blocksize-policy") {
            arguments.extend(["blocksize-minimum=4096", "blocksize-maximum=64K"]);
            arguments.push("blocksize-error-policy=error");
        }
        if let Some(server) = Other::start_at("nbdkit", &arguments) {
            check(&server, "", 2);
        }
    }
}

#[test]
fn a_server_that_cannot_be_trusted_with_a_disk_is_refused() {
    let opened = |filters: &[&str], sockets, read_only| {
        let listen = ["-f", "-U", "socket"];
        let arguments = [&listen[..], filters, &["file", "disk"]].concat();
        let server = Other::start_at("nbdkit", &arguments)?;
        let opened = NbdDisk::open(server.connect(sockets), "", OFFSET, SIZE, read_only);
        Some(opened.map(drop))
    };
    let Some(good) = opened(&[], 1, false) else { return };
    good.unwrap();
    for (filters, sockets, expected) in [
        (&["-r"][..], 1, "read-only"),
        (&["--filter=multi-conn", "multi-conn-mode=disable"], 2, "multi-conn"),
        (&["--filter=truncate", "truncate=1M"], 1, "where the disk needs"),
    ] {
        // Parameters come behind the plugin.
        let (filters, parameters): (Vec<_>, Vec<_>) =
            filters.iter().partition(|filter| filter.starts_with('-'));
        let listen = ["-f", "-U", "socket"];
        let arguments = [&listen[..], &filters, &["file", "disk"], &parameters].concat();
        let server = Other::start_at("nbdkit", &arguments).unwrap();
        let refused = NbdDisk::open(server.connect(sockets), "", OFFSET, SIZE, false).unwrap_err();
        assert!(refused.to_string().contains(expected), "{refused}");
    }
    opened(&["-r"], 2, true).unwrap().unwrap();
}

impl Other {
    /// Started, and listening.
    fn start_at(program: &str, arguments: &[&str]) -> Option<Self> {
        let server = Self::start(program, arguments)?;
        // One that serves a number of connections only counts those that ask for something.
        drop(server.connect(1));
        Some(server)
    }
}

/// A disk at our own server, on this many connections, and its server.
fn at_our_own(connections: usize) -> (NbdServer, Disk) {
    let file = FileDisk::in_memory(SIZE).unwrap();
    let below = Disk::new(SIZE, false, None, DiskStorage::File(file), connections);
    let server = NbdServer::start((0..connections).map(|_| below.chain().unwrap()).collect());
    let place = NbdDisk::open(server.connect(connections), "", 0, SIZE, false).unwrap();
    (server, Disk::new(SIZE, false, None, DiskStorage::Nbd(place), connections))
}

#[test]
fn each_chain_has_a_connection_of_its_own_and_gives_it_back() {
    let (_server, disk) = at_our_own(2);
    let (one, mut other) = (disk.chain().unwrap(), disk.chain().unwrap());
    let none = disk.chain().err().unwrap().to_string();
    assert!(none.contains("all 2 connections"), "{none}");
    drop(one);
    let mut third = disk.chain().unwrap();
    write(&mut third, 0, &[7; 512]);
    assert_eq!(read(&mut other, 0, 512), [7; 512]);
}

#[test]
fn requests_fail_when_the_server_is_gone_and_a_flush_says_whether_something_may_be_lost() {
    for flushed in [true, false] {
        let (server, disk) = at_our_own(1);
        let mut chain = disk.chain().unwrap();
        write(&mut chain, 0, &[7; 512]);
        if flushed {
            blocking::flush(&mut chain).unwrap();
        }
        drop(server);
        let mut bytes = [0; 512];
        let failed = blocking::move_bytes(&mut chain, Operation::Read, &mut bytes, 0);
        assert_eq!(failed, Err(IoError::Disconnected));
        let failed = blocking::move_bytes(&mut chain, Operation::Write, &mut bytes, 0);
        assert_eq!(failed, Err(IoError::Disconnected));
        for _ in 0..2 {
            let expected = if flushed { Ok(()) } else { Err(IoError::Lost) };
            assert_eq!(blocking::flush(&mut chain), expected);
        }
    }
}

/// Speaks for a server, as far as the beginning of the transmission; what comes then is its own.
fn negotiated(transmit: impl FnOnce(&mut UnixStream) + Send + 'static) -> NbdDisk {
    let (mut server, client) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        let answer = |option: u32, kind: u32, data: &[u8]| {
            let length = (data.len() as u32).to_be_bytes();
            let numbers = [option.to_be_bytes(), kind.to_be_bytes(), length].concat();
            [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &numbers, data].concat()
        };
        let greeting = [&NBD_MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &[0, 3]];
        server.write_all(&greeting.concat()).unwrap();
        server.read_exact(&mut [0; 4 + 16]).unwrap();
        let refused = option_reply::ERROR_UNSUPPORTED;
        server.write_all(&answer(option::STRUCTURED_REPLY, refused, &[])).unwrap();
        server.read_exact(&mut [0; 16 + 4 + 4]).unwrap();
        let flags = transmission::HAS_FLAGS | transmission::SEND_FLUSH;
        let export = [&info::EXPORT.to_be_bytes()[..], &SIZE.to_be_bytes(), &flags.to_be_bytes()];
        server.write_all(&answer(option::GO, option_reply::INFO, &export.concat())).unwrap();
        server.write_all(&answer(option::GO, option_reply::ACK, &[])).unwrap();
        transmit(&mut server);
    });
    NbdDisk::open(vec![client.into()], "", 0, SIZE, false).unwrap()
}

fn cookie_of(request: &[u8; REQUEST_LENGTH]) -> u64 {
    u64::from_be_bytes(request[8..16].try_into().unwrap())
}

#[test]
fn a_server_that_breaks_the_protocol_loses_its_connection_and_no_memory_is_touched() {
    type Misbehaves = fn(&mut UnixStream, u64);
    let ways: [Misbehaves; 4] = [
        |server, _| server.write_all(&[0xff; 64]).unwrap(),
        |server, cookie| server.write_all(&reply(cookie + 1, 0)).unwrap(),
        |server, cookie| {
            // The beginning of an answer, and then none.
            server.write_all(&[&reply(cookie, 0)[..], &[9; 100]].concat()).unwrap();
        },
        |_, _| {},
    ];
    for misbehave in ways {
        let place = negotiated(move |server| {
            let mut request = [0; REQUEST_LENGTH];
            server.read_exact(&mut request).unwrap();
            misbehave(server, cookie_of(&request));
        });
        let disk = Disk::new(SIZE, false, None, DiskStorage::Nbd(place), 1);
        let mut chain = disk.chain().unwrap();
        let mut bytes = [7; 4096];
        let failed = blocking::move_bytes(&mut chain, Operation::Read, &mut bytes, 0);
        assert_eq!(failed, Err(IoError::Disconnected));
        assert!(bytes[100..] == [7; 4096 - 100], "it was not answered with that");
        assert_eq!(chain.in_flight(), 0);
    }
}

#[test]
fn an_error_of_the_server_is_the_requests_and_a_flush_that_failed_once_fails_from_then_on() {
    let place = negotiated(|server| {
        for error in [28, 5, 0] {
            let mut request = [0; REQUEST_LENGTH];
            server.read_exact(&mut request).unwrap();
            server.write_all(&reply(cookie_of(&request), error)).unwrap();
        }
    });
    let disk = Disk::new(SIZE, false, None, DiskStorage::Nbd(place), 1);
    let mut chain = disk.chain().unwrap();
    let mut bytes = [7; 512];
    let failed = blocking::move_bytes(&mut chain, Operation::Read, &mut bytes, 0);
    assert_eq!(failed, Err(IoError::NoSpace));
    assert_eq!(blocking::flush(&mut chain), Err(IoError::Device(5)));
    assert_eq!(blocking::flush(&mut chain), Err(IoError::Lost));
}

/// The thread sleeps on the socket alone: it is woken to send the rest when the server takes it, and by the reply.
#[test]
fn a_chain_sleeps_while_the_server_takes_nothing_and_is_woken_when_it_does() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let length = 4 << 20;
    let place = negotiated(move |server| {
        wait.recv().unwrap();
        let mut request = [0; REQUEST_LENGTH];
        server.read_exact(&mut request).unwrap();
        server.read_exact(&mut vec![0; length]).unwrap();
        server.write_all(&reply(cookie_of(&request), 0)).unwrap();
        let _ = wait.recv();
    });
    let disk = Disk::new(SIZE, false, None, DiskStorage::Nbd(place), 1);
    let mut chain = disk.chain().unwrap();
    let mut bytes = noise(length, 1);
    let id = chain.begin().unwrap();
    // SAFETY: the bytes outlive the request, which ends below.
    chain.data_mut(id).push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    chain.submit(id, Operation::Write, 0, 0, 0);
    chain.poll();
    let set = chain.wait_set().1.unwrap();
    assert!(set.1.contains(nix::poll::PollFlags::POLLOUT), "the rest is not waited for");
    let mut fds = [nix::poll::PollFd::new(set.0, set.1)];
    assert_eq!(nix::poll::poll(&mut fds, nix::poll::PollTimeout::from(50u8)), Ok(0));
    go.send(()).unwrap();
    let done = loop {
        chain.poll();
        if let Some(done) = chain.next_done() {
            break done;
        }
        waiting::sleep([&mut chain]);
    };
    assert_eq!(done.result, Ok(()));
    let set = chain.wait_set().1.unwrap();
    assert_eq!(set.1, nix::poll::PollFlags::POLLIN, "nothing is to be sent");
}

#[test]
fn whoever_does_not_speak_nbd_is_refused_in_time() {
    let (mut server, client) = UnixStream::pair().unwrap();
    server.write_all(b"SSH-2.0-OpenSSH_9.6 and so on").unwrap();
    let refused = NbdDisk::open(vec![client.into()], "", 0, SIZE, false).unwrap_err();
    assert!(refused.to_string().contains("does not speak NBD"), "{refused}");
    let (_silent, client) = UnixStream::pair().unwrap();
    let begun = Instant::now();
    let refused = NbdDisk::open(vec![client.into()], "", 0, SIZE, false).unwrap_err();
    assert!(matches!(refused, NbdError::Negotiation(_)) && begun.elapsed() < TIMEOUT / 2);
    assert!(refused.to_string().contains("in time"), "{refused}");
}
