//! Requests of an NBD client that has been let in. The first byte says what kind of disk it is; the rest
//! is what the client sends, with its cookies numbered so that answers can be told apart. What is
//! answered was asked, once, and has the form that the protocol has; a connection that ends in good order
//! has had all its answers.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;

use vmseal_iofilter::backend::mem::MemDisk;
use vmseal_iofilter::nbd::transmission::Transmission;
use vmseal_iofilter::nbd::wire::{
    BLOCK_MAX, REPLY_LENGTH, REPLY_MAGIC, REQUEST_LENGTH, Request, command,
};
use vmseal_iofilter::stop::Stop;

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
    let transmission = Transmission::new(&server, &served, &stop, (0, chain), pool_bytes);
    let Ok(transmission) = transmission else { panic!("there is memory") };
    let chain = transmission.run();
    assert_eq!(chain.in_flight(), 0);
    server.shutdown(Shutdown::Write).unwrap();
    let said = reader.join().unwrap().unwrap();
    let answered = check(&said, &requests, read_only, whole);
    assert!(answered == requests.len() || !whole, "{answered} answers to {}", requests.len());
    assert!(!read_only || bytes.bytes().iter().all(|&byte| byte == 0), "read-only, and changed");
}
