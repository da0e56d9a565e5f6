//! Structured replies, block status and dirty bitmaps, with libnbd, QEMU and our own client.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use vmseal_api::filter::{BitmapChange, Holes};
use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::allocation::Allocation;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::front_ends::ServedDisk;
use vmseal_iofilter::front_ends::nbd::option::Agreed;
use vmseal_iofilter::front_ends::nbd::transmission::Transmission;
use vmseal_iofilter::nbd::{chunk, command, command_flag, error, option, option_reply};
use vmseal_iofilter::stack::chain::{Chain, Io, Storage};
use vmseal_iofilter::stack::request::{Operation, RequestId};
use vmseal_iofilter::stack::stop::Stop;

use crate::server::{Client, OFFSET, Options, SIZE, Server, USUAL, noise, run, succeeds};

const MIB: u64 = 1 << 20;

/// A client with structured replies and `base:allocation`.
fn client(server: &Server) -> Client {
    let mut client = server.stranger();
    client.read::<18>();
    client.send(&[0, 0, 0, 3]);
    client.option(option::STRUCTURED_REPLY, b"");
    client.read::<20>();
    let name = b"base:allocation";
    let data = [&[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, name.len() as u8], &name[..]].concat();
    client.option(option::SET_META_CONTEXT, &data);
    let reply = client.read::<{ 20 + 4 + 15 }>();
    assert_eq!(reply[12..16], option_reply::META_CONTEXT.to_be_bytes());
    client.read::<20>();
    client.option(option::EXPORT_NAME, b"");
    client.read::<10>();
    client
}

/// The next chunk: whether it is the last, its type, and its payload.
fn next(client: &mut Client, cookie: u64) -> (bool, u16, Vec<u8>) {
    let header = client.read::<20>();
    assert_eq!(header[..4], 0x668e_33ef_u32.to_be_bytes());
    assert_eq!(header[8..16], cookie.to_be_bytes());
    let length = u32::from_be_bytes(header[16..].try_into().unwrap());
    let mut payload = vec![0; length as usize];
    std::io::Read::read_exact(&mut client.stream, &mut payload).unwrap();
    (header[5] == 1, u16::from_be_bytes([header[6], header[7]]), payload)
}

/// Reads; returns the data, and how many bytes came as holes.
fn read(client: &mut Client, flags: u16, offset: u64, length: u32) -> (Vec<u8>, usize) {
    client.ask(command::READ, flags, offset, length, 9);
    let (mut data, mut holes) = (vec![0xee; length as usize], 0);
    loop {
        let (last, kind, payload) = next(client, 9);
        let at = (u64::from_be_bytes(payload[..8].try_into().unwrap()) - offset) as usize;
        match kind {
            chunk::OFFSET_DATA => data[at..at + payload.len() - 8].copy_from_slice(&payload[8..]),
            chunk::OFFSET_HOLE => {
                let length = u32::from_be_bytes(payload[8..].try_into().unwrap()) as usize;
                data[at..at + length].fill(0);
                holes += length;
            }
            other => panic!("a chunk of type {other:#x}"),
        }
        if last {
            return (data, holes);
        }
    }
}

fn qemu_img(server: &Server, arguments: &[&str]) -> String {
    succeeds("qemu-img", arguments, server)
}

/// Runs lines of Python in nbdsh, which belongs to Debian's own Python; returns the output.
fn nbdsh(server: &Server, lines: &[&str]) -> String {
    let uri = server.uri();
    let mut arguments = vec!["-m", "nbd"];
    let connect = format!("h.connect_uri('{uri}')");
    lines.iter().filter(|line| line.starts_with("h.add_meta_context")).for_each(|line| {
        arguments.extend(["-c", *line]);
    });
    arguments.extend(["-c", &connect]);
    lines.iter().filter(|line| !line.starts_with("h.add_meta_context")).for_each(|line| {
        arguments.extend(["-c", *line]);
    });
    succeeds("/usr/bin/python3", &arguments, server)
}

/// Half noise, a fifth zeroes, the rest holes, in a pattern of megabytes.
fn fill(server: &Server) -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    for at in (0..SIZE).step_by(8 * MIB as usize) {
        bytes[at as usize..(at + 3 * MIB) as usize].copy_from_slice(&noise(3 << 20));
    }
    std::fs::write(server.path("image"), &bytes).unwrap();
    succeeds("nbdcopy", &["image", &server.uri()], server);
    bytes
}

#[test]
fn nbdinfo_maps_holes_where_there_are_some_and_data_where_none_can_be() {
    let server = Server::start(USUAL);
    fill(&server);
    let json = succeeds("nbdinfo", &["--json", &server.uri()], &server);
    for expected in [
        "\"structured\": true",
        "\"base:allocation\"",
        "\"can_df\": true",
        "\"can_fast_zero\": true",
    ] {
        assert!(json.contains(expected), "{expected}: {json}");
    }
    let map = succeeds("nbdinfo", &["--map", &server.uri()], &server);
    let lines: Vec<Vec<u64>> = map
        .lines()
        .map(|line| line.split_whitespace().take(3).map(|word| word.parse().unwrap()).collect())
        .collect();
    let expected: Vec<Vec<u64>> = (0..SIZE / (8 * MIB))
        .flat_map(|part| {
            let at = part * 8 * MIB;
            [vec![at, 3 * MIB, 0], vec![at + 3 * MIB, 5 * MIB, 3]]
        })
        .collect();
    assert_eq!(lines, expected, "{map}");
    let totals = succeeds("nbdinfo", &["--map", "--totals", &server.uri()], &server);
    assert!(totals.contains("37.5%") && totals.contains("62.5%"), "{totals}");
    let qemu = qemu_img(&server, &["map", "--output=json", "-f", "raw", &server.uri()]);
    assert_eq!(qemu.matches("\"zero\": true").count(), 8, "{qemu}");
    // As ciphertext, a hole is noise to the reader.
    let server = Server::start(Options { holes: Holes::Ciphertext, ..USUAL });
    let map = succeeds("nbdinfo", &["--map", &server.uri()], &server);
    assert!(map.lines().count() == 1 && map.contains("data"), "{map}");
}

#[test]
fn nbdcopy_copies_what_is_there_and_no_holes() {
    let server = Server::start(USUAL);
    let bytes = fill(&server);
    let uri = server.uri();
    for arguments in [
        &["--allocated"][..],
        &["--synchronous"],
        &["--connections=4", "--threads=2"],
        &["--no-extents"],
        &["--requests=128", "--request-size=1048576"],
    ] {
        let _ = std::fs::remove_file(server.path("copy"));
        let before = server.state.totals().read_bytes;
        succeeds("nbdcopy", &[arguments, &[&uri, "copy"]].concat(), &server);
        assert!(std::fs::read(server.path("copy")).unwrap() == bytes, "{arguments:?}");
        let read = server.state.totals().read_bytes - before;
        let all = arguments.contains(&"--no-extents");
        assert_eq!(read, if all { SIZE } else { SIZE / 8 * 3 }, "{arguments:?}");
        let used = server.path("copy").metadata().unwrap().blocks() * 512;
        assert!(used < SIZE / 2 || arguments.contains(&"--allocated"), "{arguments:?}: {used}");
    }
    for arguments in [&["--allocated"][..], &["--synchronous"], &["--destination-is-zero"]] {
        let target = Server::start(USUAL);
        let to = target.uri();
        let copied = [arguments, &[&uri, &to]].concat();
        succeeds("nbdcopy", &copied, &server);
        succeeds("nbdcopy", &[&target.uri(), "copy"], &target);
        assert!(std::fs::read(target.path("copy")).unwrap() == bytes, "{arguments:?}");
    }
}

#[test]
fn qemu_img_converts_compares_and_keeps_holes() {
    let server = Server::start(USUAL);
    let bytes = fill(&server);
    let uri = server.uri();
    let info = qemu_img(&server, &["info", "-f", "raw", &uri]);
    assert!(info.contains("64 MiB"), "{info}");
    qemu_img(&server, &["convert", "-f", "raw", "-O", "qcow2", &uri, "image.qcow2"]);
    let used = server.path("image.qcow2").metadata().unwrap().blocks() * 512;
    assert!(used < SIZE / 2, "{used}");
    qemu_img(&server, &["compare", "-f", "raw", "-F", "qcow2", &uri, "image.qcow2"]);
    qemu_img(&server, &["compare", "-s", "-f", "raw", "-F", "raw", &uri, &uri]);
    // Zeroed fast first, then the data.
    let target = Server::start(USUAL);
    std::fs::write(target.path("noise"), noise(SIZE as usize)).unwrap();
    succeeds("nbdcopy", &["noise", &target.uri()], &target);
    qemu_img(&target, &["convert", "-n", "-f", "raw", "-O", "raw", &uri, &target.uri()]);
    succeeds("nbdcopy", &[&target.uri(), "copy"], &target);
    assert!(std::fs::read(target.path("copy")).unwrap() == bytes);
}

#[test]
fn reads_come_in_chunks_as_holes_or_in_one() {
    for in_memory in [true, false] {
        let server = Server::start(Options { in_memory, ..USUAL });
        let bytes = fill(&server);
        let mut client = client(&server);
        for (offset, length) in [(0, 8 << 20), (2 << 20, 32 << 20), (3 << 20, 4096), (512, 1024)] {
            let part = &bytes[offset as usize..][..length as usize];
            let (data, holes) = read(&mut client, 0, offset, length);
            assert!(data == part, "{offset} {length}");
            let zeroes = part.chunks(4096).filter(|unit| unit.iter().all(|&byte| byte == 0));
            assert_eq!(holes, zeroes.count() * 4096, "{offset} {length}");
            client.ask(command::READ, command_flag::DF, offset, length, 7);
            let (last, kind, payload) = next(&mut client, 7);
            assert!(last && kind == chunk::OFFSET_DATA);
            assert!(payload[8..] == *part, "{offset} {length}");
        }
        client.ask(command::READ, 0, 0, 0, 1);
        assert_eq!(next(&mut client, 1), (true, chunk::NONE, vec![]));
    }
}

#[test]
fn errors_have_words_and_a_long_read_that_fails_does_not_end_the_connection() {
    let server = Server::start(USUAL);
    let mut client = client(&server);
    client.ask(command::WRITE, 0, SIZE, 512, 1);
    client.send(&[0; 512]);
    let (last, kind, payload) = next(&mut client, 1);
    assert!(last && kind == chunk::ERROR);
    assert_eq!(payload[..4], error::ENOSPC.to_be_bytes());
    assert!(String::from_utf8_lossy(&payload[6..]).contains("cannot grow"));
    for (command, flags) in
        [(8, 0), (command::BLOCK_STATUS, 4), (command::WRITE_ZEROES, 18), (command::READ, 1 << 9)]
    {
        client.ask(command, flags, 0, 512, 2);
        let (_, kind, payload) = next(&mut client, 2);
        let number = if flags == 18 { error::ENOTSUP } else { error::EINVAL };
        assert_eq!((kind, &payload[..4]), (chunk::ERROR, &number.to_be_bytes()[..]));
    }
    server.file().set_len(OFFSET + (4 << 20)).unwrap();
    client.ask(command::READ, 0, 0, 8 << 20, 3);
    let mut seen = 0;
    let payload = loop {
        let (last, kind, payload) = next(&mut client, 3);
        if last {
            assert_eq!(kind, chunk::ERROR_OFFSET);
            break payload;
        }
        seen += u32::from_be_bytes(payload[8..12].try_into().unwrap());
    };
    assert_eq!(seen, 4 << 20);
    assert_eq!(payload[..4], error::EIO.to_be_bytes());
    assert!(payload.ends_with(&(4u64 << 20).to_be_bytes()));
    assert!(String::from_utf8_lossy(&payload).contains("truncated"));
    assert_eq!(read(&mut client, 0, 0, 4096).1, 4096, "it goes on");
}

#[test]
fn written_parts_are_dirty_for_libnbd_and_for_qemu() {
    let server = Server::start(USUAL);
    fill(&server);
    let started = |name: &str| server.bitmaps.change(name, BitmapChange::Start).unwrap();
    let map = |name: &str| {
        let context = format!("--map=qemu:dirty-bitmap:{name}");
        let map = succeeds("nbdinfo", &[&context, &server.uri()], &server);
        let lines = map.lines().map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            (words[0].parse().unwrap(), words[1].parse().unwrap(), words[2] == "1")
        });
        lines.collect::<Vec<(u64, u64, bool)>>()
    };
    started("b1");
    assert_eq!(map("b1"), [(0, SIZE, false)]);
    let io = |commands: &[&str]| {
        let commands: Vec<&str> = commands.iter().flat_map(|command| ["-c", *command]).collect();
        let uri = server.uri();
        succeeds("qemu-io", &[&["-f", "raw"], &commands[..], &[&uri]].concat(), &server);
    };
    io(&["write -P 1 1M 512", "write -z -u 8M 1M", "discard 16M 64k"]);
    started("b2");
    io(&["write -P 2 32M 128k"]);
    let k64 = 64 << 10;
    let first = [
        (0, MIB, false),
        (MIB, k64, true),
        (MIB + k64, 7 * MIB - k64, false),
        (8 * MIB, MIB, true),
        (9 * MIB, 7 * MIB, false),
        (16 * MIB, k64, true),
        (16 * MIB + k64, 16 * MIB - k64, false),
        (32 * MIB, 2 * k64, true),
        (32 * MIB + 2 * k64, 32 * MIB - 2 * k64, false),
    ];
    assert_eq!(map("b1"), first);
    assert_eq!(map("b2")[1], (32 * MIB, 2 * k64, true));
    let socket = server.path("nbd");
    let image = format!(
        "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:b1",
        socket.display()
    );
    // QEMU shows dirty parts as parts without data.
    let qemu = qemu_img(&server, &["map", "--output=json", "--image-opts", &image]);
    assert_eq!(qemu.matches("\"data\": false").count(), 4, "{qemu}");
    let gone = run("nbdinfo", &["--map=qemu:dirty-bitmap:b3", &server.uri()], &server);
    assert!(!gone.status.success(), "a missing bitmap is not called clean");
    server.bitmaps.change("b1", BitmapChange::Clear).unwrap();
    assert_eq!(map("b1"), [(0, SIZE, false)]);
}

#[test]
fn libnbd_lists_contexts_and_takes_several_at_once() {
    let server = Server::start(USUAL);
    server.bitmaps.change("b1", BitmapChange::Start).unwrap();
    let said = nbdsh(
        &server,
        &[
            "h.add_meta_context('base:allocation')",
            "h.add_meta_context('qemu:dirty-bitmap:b1')",
            "h.pwrite(b'x' * 65536, 131072, nbd.CMD_FLAG_FUA)",
            "seen = []",
            "h.block_status(262144, 0, lambda *a: seen.append(a[:3]) or 0)",
            "print(sorted(seen))",
            "h.block_status(262144, 0, lambda *a: seen.append(a[:3]) or 0, nbd.CMD_FLAG_REQ_ONE)",
            "print(sorted(seen[2:]))",
            "h.zero(65536, 131072, nbd.CMD_FLAG_FAST_ZERO)",
            "assert h.pread(65536, 131072) == bytearray(65536)",
            "assert h.pread_structured(65536, 131072, lambda *a: 0, nbd.CMD_FLAG_DF) == bytearray(65536)",
            "assert h.can_multi_conn() and h.can_df() and h.can_fast_zero() and not h.can_cache()",
            "h.set_strict_mode(0)",
            "exec('try:\\n h.zero(65536, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)\\nexcept nbd.Error as e:\\n print(e.errno)')",
            "exec('try:\\n h.cache(65536, 0)\\nexcept nbd.Error as e:\\n print(e.errno)')",
            "h.shutdown()",
        ],
    );
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(
        lines[0],
        "[('base:allocation', 0, [131072, 3, 65536, 0, 65536, 3]), ('qemu:dirty-bitmap:b1', 0, [131072, 0, 65536, 1, 65536, 0])]"
    );
    assert_eq!(
        lines[1],
        "[('base:allocation', 0, [131072, 3]), ('qemu:dirty-bitmap:b1', 0, [131072, 0])]"
    );
    assert_eq!(lines[2..], ["ENOTSUP", "EINVAL"]);
    let list = succeeds("nbdinfo", &["--list", &server.uri()], &server);
    assert!(list.contains("qemu:dirty-bitmap:b1") && list.contains("base:allocation"), "{list}");
}

/// A disk that loses unflushed data when the power is cut. A flush is for the whole disk.
#[derive(Clone, Default)]
struct PowerCut(Arc<Mutex<(Vec<u64>, Vec<u64>)>>);

impl Storage for PowerCut {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let mut disk = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (written, durable) = &mut *disk;
        match io.request(id).operation {
            Operation::Flush => durable.append(written),
            _ => written.push(io.request(id).offset),
        }
        io.complete(id, Ok(()));
    }

    fn poll(&mut self, _io: &mut Io<'_>) {}

    fn wait_handle(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_flush_makes_durable_what_was_answered_on_other_connections() {
    let disk = PowerCut::default();
    let connect = |disk: &PowerCut| {
        let chain = Chain::new(SIZE, false, Vec::new(), Box::new(disk.clone())).unwrap();
        let (server, stream) = UnixStream::pair().unwrap();
        let thread = std::thread::spawn(move || {
            let state = Arc::new(DiskState::new(DiskId::new(), 1));
            let serial = "serial-1".into();
            let allocation = Allocation::Unknown.into();
            let size = SIZE.into();
            let served = ServedDisk { size, read_only: false, serial, state, allocation };
            let (stop, agreed) = (Stop::new().unwrap(), Agreed::default());
            let connection =
                Transmission::new(&server, agreed, &served, &stop, (0, chain), 1 << 20);
            connection.map_err(|(_, error)| error).unwrap().run().in_flight()
        });
        (Client { stream }, thread)
    };
    let ((mut one, first), (mut other, second)) = (connect(&disk), connect(&disk));
    for round in 0..100u64 {
        assert_eq!(one.write(round * 4096, &[1; 4096]), 0);
        other.ask(command::FLUSH, 0, 0, 0, 1);
        assert_eq!(other.reply(), (1, 0));
        assert!(disk.0.lock().unwrap().1.contains(&(round * 4096)), "round {round} would be lost");
    }
    drop((one, other));
    assert_eq!((first.join().unwrap(), second.join().unwrap()), (0, 0));
}
