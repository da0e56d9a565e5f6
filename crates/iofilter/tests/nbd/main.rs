//! The NBD front end against common tools (fio, nbdinfo, nbdcopy, nbdsh, qemu-img, qemu-io),
//! and against hostile clients.

#![allow(clippy::unwrap_used)] // a test

mod server;
mod structured;

use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use vmseal_api::filter::{DelaySpec, DiskActivity, NBD_CONNECTIONS, OperationKind};
use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::allocation::Allocation;
use vmseal_iofilter::disk::status::DiskState;
use vmseal_iofilter::front_ends::ServedDisk;
use vmseal_iofilter::front_ends::nbd::option::{Agreed, OPTION_MAX, OPTIONS_MAX};
use vmseal_iofilter::front_ends::nbd::transmission::{ENDING_MAX, REQUESTS_MAX, Transmission};
use vmseal_iofilter::layers::delay::Delay;
use vmseal_iofilter::nbd::{
    BLOCK_MAX, OPTION_MAGIC, Request, command, command_flag, error, option,
};
use vmseal_iofilter::stack::chain::{Chain, Filter, Io, Limits};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::request::{Operation, RequestId};
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::mem::MemDisk;

use crate::server::{Client, OFFSET, Options, SIZE, Server, USUAL, noise, run, succeeds};

#[test]
fn fio_verifies_what_it_wrote_at_random() {
    for in_memory in [true, false] {
        let server = Server::start(Options { in_memory, ..USUAL });
        let uri = format!("--uri={}", server.uri());
        succeeds(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &uri,
                "--rw=randwrite",
                "--bsrange=512-128k",
                "--blocksize_unaligned=0",
                "--bs_is_seq_rand=0",
                "--size=48m",
                "--iodepth=32",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_backlog=512",
                "--randseed=11",
                "--fsync=200",
                "--output-format=terse",
            ],
            &server,
        );
        let counters = server.state.totals();
        assert!(counters.writes > 500 && counters.reads > 500 && counters.flushes > 0);
        assert_eq!(counters.errors, 0, "{counters:?}");
        server.wait_until(&DiskActivity::Idle);
    }
}

#[test]
fn nbdinfo_sees_the_disk_under_its_name_and_under_none() {
    let server = Server::start(USUAL);
    let name = server.state.disk().to_string();
    let socket = server.path("nbd");
    for export in ["", &name] {
        let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
        let info = succeeds("nbdinfo", &[&uri], &server);
        for expected in [
            "newstyle-fixed without TLS, using structured packets",
            "export-size: 67108864",
            "is_read_only: false",
            "can_multi_conn: true",
            "can_flush: true",
            "can_fua: true",
            "can_trim: true",
            "can_zero: true",
            "block_size_minimum: 512",
            "block_size_preferred: 4096",
            "block_size_maximum: 33554432",
        ] {
            assert!(info.contains(expected), "{expected}: {info}");
        }
    }
    let list = succeeds("nbdinfo", &["--list", &server.uri()], &server);
    assert!(list.contains(&format!("export=\"{name}\"")), "{list}");
    let other = format!("nbd+unix:///other?socket={}", socket.display());
    let refused = run("nbdinfo", &[&other], &server);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("No such file"), "{said}");
    let read_only = Server::start(Options { read_only: true, ..USUAL });
    let info = succeeds("nbdinfo", &[&read_only.uri()], &read_only);
    assert!(info.contains("is_read_only: true") && info.contains("can_trim: false"), "{info}");
}

#[test]
fn nbdcopy_in_and_out_is_the_same_over_several_connections() {
    let server = Server::start(USUAL);
    let mut bytes = noise(SIZE as usize);
    bytes[20 << 20..40 << 20].fill(0);
    std::fs::write(server.path("image"), &bytes).unwrap();
    succeeds("nbdcopy", &["--flush", "image", &server.uri()], &server);
    let used = server.file().metadata().unwrap().blocks() * 512;
    assert!(used < 48 << 20, "{used} bytes are in use; zeroes are holes");
    let raw = std::fs::read(server.path("disk")).unwrap();
    assert!(raw[OFFSET as usize..][..4096] != bytes[..4096], "plaintext is on the datastore");
    succeeds("nbdcopy", &[&server.uri(), "copy"], &server);
    assert!(std::fs::read(server.path("copy")).unwrap() == bytes, "the copy differs");
    let large = format!("--request-size={BLOCK_MAX}");
    std::fs::remove_file(server.path("copy")).unwrap();
    succeeds("nbdcopy", &[&large, &server.uri(), "copy"], &server);
    assert!(std::fs::read(server.path("copy")).unwrap() == bytes, "the copy in large pieces");
    bytes.reverse();
    std::fs::write(server.path("image"), &bytes).unwrap();
    succeeds("nbdcopy", &[&large, "--connections=1", "image", &server.uri()], &server);
    succeeds("nbdcopy", &["--connections=2", &server.uri(), "copy"], &server);
    assert!(std::fs::read(server.path("copy")).unwrap() == bytes, "written in large pieces");
    // As many as are served, and one more, which is an error and no deadlock.
    succeeds("nbdcopy", &["--connections=4", "--threads=4", &server.uri(), "copy"], &server);
    assert!(std::fs::read(server.path("copy")).unwrap() == bytes, "over four connections");
    let more = ["30", "nbdcopy", "--connections=5", "--threads=5", &server.uri(), "copy"];
    let more = run("timeout", &more, &server);
    assert_eq!(more.status.code(), Some(1), "the fifth connection: {more:?}");
}

#[test]
fn qemu_io_zeroes_with_and_without_holes_discards_and_reads_back() {
    let server = Server::start(USUAL);
    let uri = server.uri();
    let blocks = || server.file().metadata().unwrap().blocks() * 512;
    let io = |commands: &[&str]| {
        let mut arguments = vec!["-f", "raw"];
        commands.iter().for_each(|command| arguments.extend(["-c", *command]));
        arguments.push(&uri);
        let said = succeeds("qemu-io", &arguments, &server);
        assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    };
    io(&["write -P 7 0 16M", "read -P 7 0 16M", "flush"]);
    let full = blocks();
    assert!(full >= 16 << 20);
    io(&["write -z 1M 2M", "read -P 0 1M 2M", "read -P 7 0 1M", "read -P 7 3M 13M"]);
    assert!(blocks() >= full, "zeroes without -u keep their space");
    io(&["write -z -u 4M 2M", "read -P 0 4M 2M", "read -P 7 6M 1M"]);
    assert!(blocks() <= full - (2 << 20), "zeroes with -u are holes");
    io(&["discard 8M 4M", "read -P 7 12M 4M", "read -P 0 8M 4M"]);
    assert!(blocks() <= full - (6 << 20), "what was discarded is given back");
    io(&["write -f -P 9 512 1024", "read -P 9 512 1024", "read -P 7 0 512", "read -P 7 1536 512"]);
    assert!(server.state.totals().flushes >= 1);
}

#[test]
fn many_requests_at_once_are_all_answered_even_in_little_memory() {
    for pool_bytes in [2 << 20, 64 << 10] {
        let server = Server::start(Options { pool_bytes, in_memory: false, ..USUAL });
        let mut client = server.client();
        let data = noise(256 << 10);
        let count = REQUESTS_MAX as u64 + 40;
        let mut sender = Client { stream: client.stream.try_clone().unwrap() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for index in 0..count {
                    let length = data.len() as u32 >> (index % 8);
                    let fua = if index % 16 == 0 { command_flag::FUA } else { 0 };
                    sender.ask(command::WRITE, fua, index << 18, length, index);
                    sender.send(&data[..length as usize]);
                }
                for index in 0..count {
                    sender.ask(command::FLUSH, 0, 0, 0, count + index);
                }
            });
            let mut seen = vec![false; 2 * count as usize];
            for _ in 0..2 * count {
                let (cookie, error) = client.reply();
                assert_eq!(error, 0);
                assert!(!std::mem::replace(&mut seen[cookie as usize], true), "answered twice");
            }
        });
        for index in 0..count {
            let length = data.len() as u32 >> (index % 8);
            assert!(client.data(index << 18, length) == data[..length as usize], "{index}");
        }
        let counters = server.state.totals();
        assert_eq!((counters.writes, counters.flushes, counters.errors), (count, count, 0));
    }
}

#[test]
fn requests_that_cannot_be_are_answered_and_the_connection_goes_on() {
    let server = Server::start(USUAL);
    let mut client = server.client();
    assert_eq!(client.write(SIZE - 512, &[1; 1024]), error::ENOSPC);
    assert_eq!(client.write(100, &noise(3 << 20)), error::EINVAL, "its data is read all the same");
    for (command, flags, offset, length, expected) in [
        (command::READ, 0, SIZE, 512, error::EINVAL),
        (command::READ, 0, 0, BLOCK_MAX + 512, error::EINVAL),
        (command::TRIM, 0, u64::MAX, 512, error::EINVAL),
        (command::WRITE_ZEROES, 0, SIZE - 512, 1024, error::ENOSPC),
        (command::WRITE_ZEROES, 0x40, 0, 1024, error::EINVAL),
        // NBD_CMD_RESIZE: the inventory sets the length of a disk.
        (8, 0, 2 * SIZE, 0, error::EINVAL),
        (99, 0, 0, 0, error::EINVAL),
        (command::READ, 0, 0, 0, 0),
        (command::WRITE, 0, 0, 0, 0),
        (command::WRITE_ZEROES, command_flag::FUA, 0, SIZE as u32, 0),
        (command::TRIM, 0, 0, SIZE as u32, 0),
    ] {
        client.ask(command, flags, offset, length, 3);
        assert_eq!(client.reply(), (3, expected), "{command} {flags} {offset} {length}");
    }
    assert_eq!(client.write(4096, &[8; 4096]), 0);
    assert!(client.data(4096, 4096).iter().all(|&byte| byte == 8));
    client.ask(command::DISCONNECT, 0, 0, 0, 0);
    assert!(client.is_ended());
    assert_eq!(server.state.totals().errors, 9);
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let server = Server::start(Options { read_only: true, ..USUAL });
    let mut client = server.client();
    assert_eq!(client.write(0, &[1; 4096]), error::EPERM);
    for command in [command::TRIM, command::WRITE_ZEROES] {
        client.ask(command, 0, 0, 4096, 1);
        assert_eq!(client.reply(), (1, error::EPERM));
    }
    assert!(client.data(0, 4096).iter().all(|&byte| byte == 0));
    client.ask(command::FLUSH, 0, 0, 0, 1);
    assert_eq!(client.reply(), (1, 0));
    assert_eq!(server.file().metadata().unwrap().blocks(), 0);
}

#[test]
fn an_error_of_the_datastore_is_reported_or_ends_a_read_that_has_begun() {
    let server = Server::start(USUAL);
    let mut client = server.client();
    server.file().set_len(OFFSET + (4 << 20)).unwrap();
    client.ask(command::READ, 0, 4 << 20, 8 << 20, 1);
    assert_eq!(client.reply(), (1, error::EIO), "nothing was sent yet");
    assert_eq!(client.write(8 << 20, &[1; 4096]), error::EIO);
    assert_eq!(client.write(0, &noise(4 << 20)), error::EIO, "in every piece");
    assert_eq!(client.data(0, 512).len(), 512, "the connection goes on");
    client.ask(command::READ, 0, 0, 8 << 20, 2);
    assert_eq!(client.reply(), (2, 0));
    let mut begun = Vec::new();
    client.stream.read_to_end(&mut begun).unwrap();
    assert_eq!(begun.len(), 4 << 20, "what could be read, and then the end");
    assert!(server.client().data(0, 512).iter().all(|&byte| byte == 0), "others are served");
}

#[test]
fn connections_share_the_disk_and_a_flush_is_for_all_of_them() {
    let server = Server::start(USUAL);
    let mut clients: Vec<Client> = (0..NBD_CONNECTIONS).map(|_| server.client()).collect();
    server.wait_until(&DiskActivity::Connected);
    // Each changes its own part of the same encrypted sectors, at the same time.
    std::thread::scope(|scope| {
        for (index, client) in clients.iter_mut().enumerate() {
            scope.spawn(move || {
                for sector in 0..200 {
                    let at = sector * 4096 + index as u64 * 512;
                    assert_eq!(client.write(at, &[index as u8 + 1; 512]), 0);
                }
            });
        }
    });
    for sector in 0..200 {
        let data = clients[0].data(sector * 4096, 2048);
        let right = data.chunks(512).zip(1u8..).all(|(part, byte)| part.iter().all(|&b| b == byte));
        assert!(right, "a neighbour's change is lost in sector {sector}");
    }
    clients[1].ask(command::FLUSH, 0, 0, 0, 1);
    assert_eq!(clients[1].reply(), (1, 0));
    // One more is closed: a client that waits for all of its connections would wait for ever.
    let stranger = server.stranger();
    assert_eq!((&stranger.stream).read(&mut [0]).unwrap(), 0, "it is kept waiting");
    assert_eq!(clients[2].write(0, &[9; 512]), 0, "the others go on");
    drop(clients.pop());
    let late = server.client();
    drop((clients, stranger, late));
    server.wait_until(&DiskActivity::Idle);
}

#[test]
fn stopping_answers_what_is_under_way_and_waits_for_nobody() {
    let mut server = Server::start(Options { in_memory: false, ..USUAL });
    let mut idle = server.client();
    let mut silent = server.stranger();
    let mut busy = server.client();
    let mut halfway = server.client();
    halfway.ask(command::WRITE, 0, 0, 1 << 20, 1);
    halfway.send(&[1; 1000]);
    busy.ask(command::WRITE_ZEROES, command_flag::NO_HOLE, 0, 32 << 20, 7);
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    assert_eq!(server.end(), usize::from(NBD_CONNECTIONS));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let (cookie, error) = busy.reply();
    assert!(cookie == 7 && (error == 0 || error == error::ESHUTDOWN), "{error}");
    assert!(idle.is_ended() && silent.is_ended() && busy.is_ended() && halfway.is_ended());
}

/// Takes longer for a flush than a client has for its last replies.
struct Slow;

impl Filter for Slow {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        if io.request(id).operation == Operation::Flush {
            std::thread::sleep(ENDING_MAX + Duration::from_millis(200));
        }
        io.pass(id);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        io.complete(id, io.request(id).result);
    }
}

/// Serves one connection of a client over a disk with this filter, until it ends.
fn serve_one(filter: Box<dyn Filter>, server: UnixStream, stop: &Stop) {
    let chain = Chain::new(SIZE, false, vec![filter], MemDisk::new(1 << 20).queue()).unwrap();
    let served = ServedDisk {
        size: SIZE.into(),
        read_only: false,
        serial: "serial-1".into(),
        state: Arc::new(DiskState::new(DiskId::new(), 1)),
        allocation: Allocation::Unknown.into(),
    };
    let transmission =
        Transmission::new(&server, Agreed::default(), &served, stop, (0, chain), 1 << 20);
    assert_eq!(transmission.map_err(|(_, error)| error).unwrap().run().in_flight(), 0);
}

#[test]
fn a_client_that_is_done_gets_the_answers_of_a_slow_disk() {
    let (server, stream) = UnixStream::pair().unwrap();
    let mut client = Client { stream };
    client.ask(command::WRITE, command_flag::FUA, 0, 4096, 1);
    client.send(&[1; 4096]);
    client.ask(command::DISCONNECT, 0, 0, 0, 2);
    serve_one(Box::new(Slow), server, &Stop::new().unwrap());
    assert_eq!(client.reply(), (1, 0));
    assert!(client.is_ended());
}

#[test]
fn a_filter_that_ends_waits_for_no_delay() {
    let delay = Delay::new(DelaySpec {
        operations: vec![OperationKind::Write],
        microseconds: 60_000_000,
        jitter_microseconds: 0,
        reorders: false,
        seed: 0,
    });
    let (server, stream) = UnixStream::pair().unwrap();
    let mut client = Client { stream };
    client.ask(command::WRITE, 0, 0, 4096, 1);
    client.send(&[1; 4096]);
    let (filter, stop) = (delay.filter(&Place::simple(SIZE)).unwrap(), Stop::new().unwrap());
    let asked = std::thread::scope(|scope| {
        scope.spawn(|| serve_one(filter, server, &stop));
        while delay.counters()[0].1 < 1 {
            std::thread::yield_now();
        }
        stop.ask();
        Instant::now()
    });
    assert!(asked.elapsed() < Duration::from_secs(30), "it waited for the delay");
    assert_eq!(client.reply(), (1, 0));
    assert!(client.is_ended());
}

#[test]
fn clients_that_disconnect_at_any_time_do_not_affect_others() {
    let server = Server::start(Options { in_memory: false, ..USUAL });
    for round in 0..40u64 {
        let mut client = server.client();
        match round % 5 {
            0 => {}
            1 => client.send(&[0x25; 3]),
            2 => {
                client.ask(command::WRITE, 0, 0, 2 << 20, 1);
                client.send(&vec![1; (round as usize) << 13]);
            }
            3 => (0..8).for_each(|at| client.ask(command::READ, 0, at << 20, 1 << 20, 1)),
            _ => client.ask(command::WRITE_ZEROES, command_flag::FUA, 0, 8 << 20, 1),
        }
    }
    // Where none of them wrote: their requests may still be in flight.
    let mut client = server.client();
    assert_eq!(client.write(SIZE - 4096, &[3; 4096]), 0);
    assert!(client.data(SIZE - 4096, 4096).iter().all(|&byte| byte == 3));
    drop(client);
    server.wait_until(&DiskActivity::Idle);
}

#[test]
fn hostile_negotiations_end_and_others_are_served() {
    let server = Server::start(USUAL);
    let mut client = server.stranger();
    client.read::<18>();
    client.send(&[0xff; 4]);
    assert!(client.is_ended(), "flags that were not offered");
    let mut client = server.stranger();
    client.send(&[0, 0, 0, 1]);
    client.send(&[0x55; 16]);
    assert!(client.is_ended(), "not an option");
    let mut client = server.stranger();
    client.send(&[0, 0, 0, 1]);
    let length = (OPTION_MAX as u32 + 1).to_be_bytes();
    client.send(&[&OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 7], &length].concat());
    assert!(client.is_ended(), "too long");
    let mut client = server.stranger();
    client.send(&[0, 0, 0, 1]);
    for _ in 0..=OPTIONS_MAX {
        client.option(option::LIST, b"");
    }
    assert!(client.is_ended(), "without end");
    let mut client = server.stranger();
    client.send(&[0, 0, 0, 1]);
    client.option(option::EXPORT_NAME, b"no such disk");
    assert!(client.is_ended());
    let mut client = server.client();
    client.ask(command::WRITE, 0, 0, BLOCK_MAX + 512, 1);
    assert!(client.is_ended(), "more than can be");
    assert_eq!(server.client().data(0, 512).len(), 512);
}

#[test]
fn random_bytes_end_their_connection_and_do_not_affect_others() {
    let server = Server::start(Options { pool_bytes: 64 << 10, ..USUAL });
    let mut witness = server.client();
    assert_eq!(witness.write(SIZE - 4096, &[0x42; 4096]), 0);
    let request = (any::<u16>(), 0u16..9, any::<u64>(), 0u64..(SIZE - 8192), 0u32..200_000);
    let strategy = prop::collection::vec((request, any::<bool>()), 1..12);
    let config = ProptestConfig { cases: 64, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let witness = std::cell::RefCell::new(witness);
    let outcome = runner.run(&strategy, |requests| {
        let mut client = server.client();
        for ((flags, command, cookie, offset, length), whole) in requests {
            let (mask, unit) = if whole { (3, 512) } else { (u16::MAX, 1) };
            let (offset, length) = (offset / unit * unit, length / unit as u32 * unit as u32);
            let flags = flags & mask;
            let length = length.min((SIZE - 8192 - offset) as u32);
            let header = Request { flags, command, cookie, offset, length }.encode();
            // Replies are not read: the client leaves when the server takes no more.
            client.stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
            if client.stream.write_all(&header).is_err() {
                break;
            }
            let data =
                if command == command::WRITE { length as usize } else { cookie as usize % 60 };
            if client.stream.write_all(&noise(data)).is_err() {
                break;
            }
        }
        drop(client);
        let mut witness = witness.borrow_mut();
        prop_assert!(witness.data(SIZE - 4096, 4096).iter().all(|&byte| byte == 0x42));
        Ok(())
    });
    outcome.unwrap();
    drop(witness);
    server.wait_until(&DiskActivity::Idle);
}

#[test]
fn a_broken_image_is_never_made_longer() {
    let server = Server::start(USUAL);
    let mut client = server.client();
    assert_eq!(client.write(0, &[1; 4096]), 0);
    server.file().set_len(OFFSET + 4096).unwrap();
    // The last check of its length must be an old one.
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(client.write(1 << 20, &[1; 4096]), error::EIO);
    assert_eq!(server.file().metadata().unwrap().len(), OFFSET + 4096);
    let mut first = [0; 8];
    server.file().read_exact_at(&mut first, OFFSET).unwrap();
    assert_ne!(first, [0; 8]);
    let message = server.state.status().last_error.unwrap();
    assert!(message.contains("truncated"), "{message}");
}
