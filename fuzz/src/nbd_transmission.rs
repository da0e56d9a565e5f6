//! Requests of an NBD client that has been let in. The first byte says what kind of disk it is and whether
//! replies are simple, or structured with `base:allocation` and a dirty bitmap to be told of; the rest
//! is what the client sends, with its cookies numbered so that answers can be told apart. What is
//! answered was asked, once, and has the form that the protocol has; a connection that ends in good order
//! has had all its answers.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;

use vmseal_api::filter::BitmapChange;
use vmseal_iofilter::front_ends::nbd::context;
use vmseal_iofilter::front_ends::nbd::option::Agreed;
use vmseal_iofilter::front_ends::nbd::transmission::Transmission;
use vmseal_iofilter::nbd::{
    BLOCK_MAX, CHUNK_LENGTH, CHUNK_MAGIC, REPLY_LENGTH, REPLY_MAGIC, REQUEST_LENGTH, Request,
    chunk, command, command_flag,
};
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::mem::MemDisk;

use crate::{INPUT_MAX, disk};

const SIZE: u64 = 128 * 1024;

/// The whole requests of a stream, whose cookies become their numbers, and whether it ends in good order:
/// with a disconnect, or just so.
fn number(stream: &mut [u8]) -> (Vec<Request>, bool) {
    let (mut requests, mut rest) = (Vec::new(), stream);
    loop {
        let Some((header, behind)) = rest.split_first_chunk_mut::<REQUEST_LENGTH>() else {
            return (requests, true);
        };
        let Some(mut request) = Request::decode(header) else { return (requests, false) };
        let data = if request.command == command::WRITE { request.length } else { 0 };
        if request.command == command::DISCONNECT || data > BLOCK_MAX {
            return (requests, data == 0);
        }
        request.cookie = requests.len() as u64;
        *header = request.encode();
        let Some((_, behind)) = behind.split_at_mut_checked(data as usize) else {
            return (requests, true);
        };
        requests.push(request);
        rest = behind;
    }
}

/// What of a read has come, and what a block status has told of.
#[derive(Clone, Default)]
struct Seen {
    ended: bool,
    read: u64,
    told: [u64; 2],
}

fn number_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Checks one chunk of the answer to `request`.
fn check_chunk(seen: &mut Seen, request: &Request, last: bool, kind: u16, payload: &[u8]) {
    assert!(!seen.ended, "a chunk after the last: {request:?}");
    seen.ended = last;
    let short = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
    let length = u64::from(request.length);
    match kind {
        chunk::NONE => assert!(last && payload.is_empty()),
        chunk::OFFSET_DATA | chunk::OFFSET_HOLE => {
            assert!(request.command == command::READ);
            assert_eq!(number_at(payload, 0), request.offset + seen.read, "{request:?}");
            let hole = kind == chunk::OFFSET_HOLE;
            seen.read += if hole { u64::from(short(8)) } else { payload.len() as u64 - 8 };
            assert!(last == (seen.read == length), "{request:?}");
            assert!(last || request.flags & command_flag::DF == 0, "{request:?}");
        }
        chunk::BLOCK_STATUS => {
            assert!(request.command == command::BLOCK_STATUS);
            let (extents, rest) = payload[4..].as_chunks::<8>();
            assert!(rest.is_empty() && !extents.is_empty());
            assert!(extents.len() == 1 || request.flags & command_flag::REQ_ONE == 0);
            let told = &mut seen.told[short(0) as usize];
            assert_eq!(*told, 0, "a context is told of twice");
            *told = extents.iter().map(|extent| number_at(extent, 0) >> 32).sum();
            assert!(*told <= length && *told > 0, "{request:?}");
            assert!(!last || seen.told.iter().all(|told| *told > 0), "a context is missing");
        }
        chunk::ERROR | chunk::ERROR_OFFSET => {
            assert!(last && short(0) != 0);
            let words = usize::from(u16::from_be_bytes([payload[4], payload[5]]));
            let place = if kind == chunk::ERROR_OFFSET { 8 } else { 0 };
            assert_eq!(payload.len(), 6 + words + place);
            str::from_utf8(&payload[6..6 + words]).unwrap();
            if place > 0 {
                let at = number_at(payload, 6 + words);
                assert!((request.offset..request.offset + length).contains(&at), "{request:?}");
            }
        }
        other => panic!("a chunk of type {other:#x}"),
    }
}

/// Checks what was answered in chunks; how many requests were.
fn check_chunks(mut said: &[u8], requests: &[Request], read_only: bool, whole: bool) -> usize {
    let mut seen = vec![Seen::default(); requests.len()];
    while let Some((header, rest)) = said.split_first_chunk::<CHUNK_LENGTH>() {
        assert_eq!(header[..4], CHUNK_MAGIC.to_be_bytes());
        let (last, kind) = (header[5] == 1, u16::from_be_bytes([header[6], header[7]]));
        let (number, length) = (number_at(header, 8) as usize, number_at(header, 12) as u32);
        let Some((payload, rest)) = rest.split_at_checked(length as usize) else {
            assert!(!whole, "a chunk is cut off");
            said = &[];
            break;
        };
        let request = &requests[number];
        check_chunk(&mut seen[number], request, last, kind, payload);
        let changes = [command::WRITE, command::TRIM, command::WRITE_ZEROES];
        let changed = kind == chunk::NONE && changes.contains(&request.command);
        assert!(!(read_only && changed), "{request:?}");
        said = rest;
    }
    assert!(said.is_empty() || !whole, "a reply is cut off");
    seen.into_iter().filter(|seen| seen.ended).count()
}

/// Checks what was answered; how many requests were.
fn check(mut said: &[u8], requests: &[Request], read_only: bool, whole: bool) -> usize {
    let mut seen = vec![false; requests.len()];
    while let Some((reply, rest)) = said.split_first_chunk::<REPLY_LENGTH>() {
        assert_eq!(reply[..4], REPLY_MAGIC.to_be_bytes());
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        let number = u64::from_be_bytes(reply[8..].try_into().unwrap()) as usize;
        let request = requests[number];
        assert!(!std::mem::replace(&mut seen[number], true), "answered twice: {request:?}");
        said = rest;
        if error == 0 {
            let end = request.offset.saturating_add(u64::from(request.length));
            assert!(request.command == command::FLUSH || end <= SIZE, "{request:?}");
            let changes = ![command::READ, command::FLUSH].contains(&request.command);
            assert!(!(read_only && changes), "{request:?}");
            if request.command == command::READ {
                let data = said.split_at_checked(request.length as usize);
                assert!(data.is_some() || !whole, "a read is cut off: {request:?}");
                said = data.map_or(&[], |(_, rest)| rest);
            }
        }
    }
    assert!(said.is_empty() || !whole, "a reply is cut off");
    seen.into_iter().filter(|&seen| seen).count()
}

/// See the module.
pub fn run(data: &[u8]) {
    let Some((&kind, stream)) = data.split_first() else { return };
    let (read_only, encrypted, pool_bytes) = (kind & 1 != 0, kind & 2 == 0, 1 << (kind >> 2 & 15));
    let mut stream = stream[..stream.len().min(INPUT_MAX)].to_vec();
    let (requests, whole) = number(&mut stream);
    let bytes = MemDisk::new(SIZE as usize);
    let (disk, served) = disk(&bytes, read_only, encrypted, 1);
    let (server, mut client) = UnixStream::pair().unwrap();
    client.write_all(&stream).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let reader = thread::spawn(move || {
        let mut said = Vec::new();
        client.read_to_end(&mut said).map(|_| said)
    });
    let (chain, stop) = (disk.chain().unwrap(), Stop::new().unwrap());
    let bitmaps = disk.bitmaps();
    bitmaps.change("b1", BitmapChange::Start).unwrap();
    let structured = kind & 64 != 0;
    let names: &[&[u8]] = &[b"base:allocation", b"qemu:dirty-bitmap:b1"];
    let contexts = context::chosen(Some(&bitmaps), if structured { names } else { &[] });
    let contexts = contexts.into_iter().map(|(_, context)| context).collect();
    let agreed = Agreed { structured, contexts };
    let transmission = Transmission::new(&server, agreed, &served, &stop, (0, chain), pool_bytes);
    let Ok(transmission) = transmission else { panic!("there is memory") };
    let chain = transmission.run();
    assert_eq!(chain.in_flight(), 0);
    server.shutdown(Shutdown::Write).unwrap();
    let said = reader.join().unwrap().unwrap();
    let check = if structured { check_chunks } else { check };
    let answered = check(&said, &requests, read_only, whole);
    assert!(answered == requests.len() || !whole, "{answered} answers to {}", requests.len());
    assert!(!read_only || bytes.bytes().iter().all(|&byte| byte == 0), "read-only, and changed");
}
