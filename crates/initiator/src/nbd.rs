//! A client of an NBD server over one connection (fixed newstyle, simple replies; NetworkBlockDevice/nbd,
//! `doc/proto.md`): one system call sends all submitted requests, and one receives all that has arrived.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{MsgFlags, recv};

use crate::{Completion, Initiator, InitiatorError, Operation, STALL, Wait, check_shape};

const GREETING: [u64; 2] = [u64::from_be_bytes(*b"NBDMAGIC"), OPTION_MAGIC];
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
/// `NBD_FLAG_FIXED_NEWSTYLE`, and the client's answer to it.
const FIXED_NEWSTYLE: u16 = 1;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;
/// The longest reply to an option: what it says about an export is short.
const OPTION_REPLY_MAX: u32 = 4096;
const REPLY_LENGTH: usize = 16;
/// The buffer of one receive call: the replies to 32 reads of 4 KiB fit twice.
const ARRIVALS: usize = 256 * 1024;

/// A slot's buffer, and the request in it.
struct Slot {
    buffer: Vec<u8>,
    request: Option<(Operation, u32)>,
}

/// A reply to a read with incomplete data.
struct Receiving {
    slot: u16,
    done: usize,
}

/// A connection to an NBD server.
pub struct Nbd {
    stream: UnixStream,
    capacity: u64,
    block: u32,
    wait: Wait,
    slots: Vec<Slot>,
    outgoing: Vec<u8>,
    arrivals: Box<[u8]>,
    /// The first byte that is not processed yet.
    begin: usize,
    end: usize,
    receiving: Option<Receiving>,
}

impl Nbd {
    /// Connects to the default export of a server.
    ///
    /// # Errors
    /// Any [`InitiatorError`] but those of requests.
    pub fn connect(
        path: &Path,
        depth: u16,
        block: u32,
        wait: Wait,
    ) -> Result<Self, InitiatorError> {
        check_shape(depth, block)?;
        let failed = |source| InitiatorError::Connect { path: path.into(), source };
        let mut stream = UnixStream::connect(path).map_err(failed)?;
        stream.set_read_timeout(Some(STALL)).map_err(failed)?;
        stream.set_write_timeout(Some(STALL)).map_err(failed)?;
        let capacity = negotiate(&mut stream)?;
        let slot = || Slot { buffer: vec![0; block as usize], request: None };
        Ok(Self {
            stream,
            capacity,
            block,
            wait,
            slots: (0..depth).map(|_| slot()).collect(),
            outgoing: Vec::new(),
            arrivals: vec![0; ARRIVALS].into(),
            begin: 0,
            end: 0,
            receiving: None,
        })
    }

    fn take(&mut self, length: usize) -> Option<&[u8]> {
        let begin = self.begin;
        if self.end - begin < length {
            return None;
        }
        self.begin += length;
        Some(&self.arrivals[begin..self.begin])
    }

    /// The completion of the next reply, if all of it has arrived.
    fn next(&mut self) -> Result<Option<Completion>, InitiatorError> {
        if self.receiving.is_none() {
            let Some(header) = self.take(REPLY_LENGTH) else { return Ok(None) };
            let (magic, error, cookie) = (word(header, 0), word(header, 4), long(header, 8));
            if magic != REPLY_MAGIC {
                return Err(InitiatorError::Protocol(
                    "a reply does not begin with its magic number",
                ));
            }
            let slot = u16::try_from(cookie).ok().filter(|slot| *slot < self.depth());
            let request =
                slot.and_then(|slot| Some((slot, self.slots[usize::from(slot)].request?)));
            let (slot, (operation, _)) =
                request.ok_or(InitiatorError::NotInFlight { id: cookie })?;
            if operation != Operation::Read || error != 0 {
                return Ok(Some(self.complete(slot, error)));
            }
            self.receiving = Some(Receiving { slot, done: 0 });
        }
        Ok(self.receive())
    }

    fn receive(&mut self) -> Option<Completion> {
        let receiving = self.receiving.as_mut()?;
        let slot = &mut self.slots[usize::from(receiving.slot)];
        let length = slot.request.map_or(0, |(_, length)| length as usize);
        let count = (self.end - self.begin).min(length - receiving.done);
        slot.buffer[receiving.done..receiving.done + count]
            .copy_from_slice(&self.arrivals[self.begin..self.begin + count]);
        receiving.done += count;
        self.begin += count;
        if receiving.done < length {
            return None;
        }
        let slot = receiving.slot;
        self.receiving = None;
        Some(self.complete(slot, 0))
    }

    fn complete(&mut self, slot: u16, error: u32) -> Completion {
        self.slots[usize::from(slot)].request = None;
        Completion { slot, status: u8::try_from(error).unwrap_or(u8::MAX) }
    }

    /// Receives what has arrived, waiting for it or not; true if there was something.
    fn receive_more(&mut self, flags: MsgFlags) -> Result<bool, InitiatorError> {
        self.arrivals.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        match recv(self.stream.as_raw_fd(), &mut self.arrivals[self.end..], flags) {
            Ok(0) => Err(InitiatorError::Closed),
            Ok(count) => {
                self.end += count;
                Ok(true)
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => Ok(false),
            Err(errno) => Err(broken(errno.into())),
        }
    }
}

impl Initiator for Nbd {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn depth(&self) -> u16 {
        self.slots.len() as u16
    }

    fn fill(&mut self, slot: u16, bytes: &[u8]) {
        self.slots[usize::from(slot)].buffer[..bytes.len()].copy_from_slice(bytes);
    }

    fn copy(&self, slot: u16, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.slots[usize::from(slot)].buffer[..bytes.len()]);
    }

    fn submit(&mut self, slot: u16, operation: Operation, offset: u64, length: u32) {
        assert!(length <= self.block);
        let Slot { buffer, request } = &mut self.slots[usize::from(slot)];
        assert!(request.replace((operation, length)).is_none(), "slot {slot} is in flight");
        let (kind, data): (u16, &[u8]) = match operation {
            Operation::Read => (0, &[]),
            Operation::Write => (1, &buffer[..length as usize]),
            Operation::Flush => (3, &[]),
        };
        self.outgoing.extend(REQUEST_MAGIC.to_be_bytes());
        self.outgoing.extend(u32::from(kind).to_be_bytes()); // no flags, and the kind
        self.outgoing.extend(u64::from(slot).to_be_bytes());
        self.outgoing.extend(offset.to_be_bytes());
        self.outgoing.extend(length.to_be_bytes());
        self.outgoing.extend(data);
    }

    /// A load only reads or only writes, so replies cannot fill the socket while this waits for room.
    fn publish(&mut self) -> Result<(), InitiatorError> {
        if !self.outgoing.is_empty() {
            self.stream.write_all(&self.outgoing).map_err(broken)?;
            self.outgoing.clear();
        }
        Ok(())
    }

    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<(), InitiatorError> {
        while let Some(completion) = self.next()? {
            completions.push(completion);
        }
        Ok(())
    }

    /// Its socket waits for [`STALL`] at a time, and is not told otherwise for each request.
    fn wait_for(&mut self, _limit: Duration) -> Result<(), InitiatorError> {
        let flags = match self.wait {
            Wait::Sleep => MsgFlags::empty(),
            Wait::Poll => MsgFlags::MSG_DONTWAIT,
        };
        let begin = Instant::now();
        while !self.receive_more(flags)? {
            if begin.elapsed() >= STALL {
                return Err(InitiatorError::Stalled);
            }
        }
        Ok(())
    }
}

/// The error for a failed socket.
fn broken(error: io::Error) -> InitiatorError {
    match error.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof => {
            InitiatorError::Closed
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => InitiatorError::Stalled,
        _ => InitiatorError::Socket(error),
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) << 32 | u64::from(word(bytes, at + 4))
}

/// Negotiates the default export; returns its size.
fn negotiate(stream: &mut (impl Read + Write)) -> Result<u64, InitiatorError> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).map_err(broken)?;
    if [long(&greeting, 0), long(&greeting, 8)] != GREETING {
        return Err(InitiatorError::Protocol("it does not greet as NBD's newstyle does"));
    }
    if u16::from_be_bytes([greeting[16], greeting[17]]) & FIXED_NEWSTYLE == 0 {
        return Err(InitiatorError::Missing("the fixed newstyle of NBD's negotiation"));
    }
    let mut go = Vec::from(u32::from(FIXED_NEWSTYLE).to_be_bytes());
    go.extend(OPTION_MAGIC.to_be_bytes());
    go.extend(OPTION_GO.to_be_bytes());
    // No name, and one request for information: the block sizes, which we must then respect.
    let data = [&0u32.to_be_bytes()[..], &1u16.to_be_bytes(), &INFO_BLOCK_SIZE.to_be_bytes()];
    go.extend(8u32.to_be_bytes());
    go.extend(data.concat());
    stream.write_all(&go).map_err(broken)?;
    let mut capacity = None;
    loop {
        let (kind, data) = option_reply(stream)?;
        match kind {
            REPLY_INFO if data.len() == 12 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                capacity = Some(long(&data, 2));
            }
            REPLY_INFO => {}
            REPLY_ACK => {
                return capacity
                    .ok_or(InitiatorError::Protocol("it does not tell its export's size"));
            }
            _ => return Err(InitiatorError::Missing("its default export")),
        }
    }
}

fn option_reply(stream: &mut impl Read) -> Result<(u32, Vec<u8>), InitiatorError> {
    let mut header = [0; 20];
    stream.read_exact(&mut header).map_err(broken)?;
    if long(&header, 0) != OPTION_REPLY_MAGIC || word(&header, 8) != OPTION_GO {
        return Err(InitiatorError::Protocol("it does not answer the option that it was asked"));
    }
    let length = word(&header, 16);
    if length > OPTION_REPLY_MAX {
        return Err(InitiatorError::Protocol("its answer to an option is too long"));
    }
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data).map_err(broken)?;
    Ok((word(&header, 12), data))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client past its negotiation, and the server's end.
    fn pair(depth: u16) -> (Nbd, UnixStream) {
        let (stream, server) = UnixStream::pair().unwrap();
        let slot = || Slot { buffer: vec![0; 512], request: None };
        let client = Nbd {
            stream,
            capacity: 1 << 20,
            block: 512,
            wait: Wait::Sleep,
            slots: (0..depth).map(|_| slot()).collect(),
            outgoing: Vec::new(),
            arrivals: vec![0; ARRIVALS].into(),
            begin: 0,
            end: 0,
            receiving: None,
        };
        (client, server)
    }

    fn reply(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
        [&REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
    }

    #[test]
    fn a_request_is_laid_out_as_nbd_says() {
        let (mut client, mut server) = pair(2);
        client.fill(1, &[7; 512]);
        client.submit(1, Operation::Write, 0x1000, 512);
        client.submit(0, Operation::Flush, 0, 0);
        client.publish().unwrap();
        let mut bytes = [0; 28 + 512 + 28];
        server.read_exact(&mut bytes).unwrap();
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(&bytes[..28]), "25609513000000010000000000000001000000000000100000000200");
        assert_eq!(bytes[28..540], [7; 512]);
        assert_eq!(hex(&bytes[540..]), "25609513000000030000000000000000000000000000000000000000");
    }

    #[test]
    fn replies_come_in_any_order_and_in_any_pieces() {
        let bytes = [reply(2, 0, &[2; 512]), reply(0, 5, &[]), reply(1, 0, &[1; 512])].concat();
        for piece in [1, 15, 16, 17, 100, 527, 528, 529, bytes.len()] {
            let (mut client, mut server) = pair(3);
            (0..3).for_each(|slot| client.submit(slot, Operation::Read, 0, 512));
            let mut completions = Vec::new();
            for chunk in bytes.chunks(piece) {
                server.write_all(chunk).unwrap();
                client.wait().unwrap();
                client.reap(&mut completions).unwrap();
            }
            let expected =
                [(2, 0), (0, 5), (1, 0)].map(|(slot, status)| Completion { slot, status });
            assert_eq!(completions, expected, "pieces of {piece}");
            for slot in [1, 2] {
                let mut data = [0; 512];
                client.copy(slot, &mut data);
                assert_eq!(data, [slot as u8; 512], "pieces of {piece}");
            }
        }
    }

    #[test]
    fn a_completion_of_nothing_is_an_error() {
        for cookie in [0, 2, 3, u64::from(u16::MAX) + 2, u64::MAX] {
            let (mut client, mut server) = pair(3);
            client.submit(1, Operation::Read, 0, 512);
            server.write_all(&reply(cookie, 0, &[])).unwrap();
            client.wait().unwrap();
            let reaped = client.reap(&mut Vec::new());
            assert!(
                matches!(reaped, Err(InitiatorError::NotInFlight { id }) if id == cookie),
                "{cookie}: {reaped:?}"
            );
        }
        let (mut client, mut server) = pair(1);
        server.write_all(&[0; 16]).unwrap();
        client.wait().unwrap();
        assert!(matches!(client.reap(&mut Vec::new()), Err(InitiatorError::Protocol(_))));
        drop(server);
        assert!(matches!(client.wait(), Err(InitiatorError::Closed)));
    }

    /// A scripted server: what it sends, and what the client sent.
    struct Script(io::Cursor<Vec<u8>>, Vec<u8>);

    impl Read for Script {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.0.read(bytes)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn option_reply(kind: u32, data: &[u8]) -> Vec<u8> {
        let words = [OPTION_GO, kind, data.len() as u32].map(u32::to_be_bytes).concat();
        [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &words, data].concat()
    }

    #[test]
    fn a_negotiation_ends_with_a_size_or_a_reason() {
        let greet = |flags: u8| [&b"NBDMAGICIHAVEOPT\0"[..], &[flags]].concat();
        let export = option_reply(REPLY_INFO, &[0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 1]);
        let sizes = option_reply(REPLY_INFO, &[0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 0, 32, 0, 0]);
        let acknowledged = option_reply(REPLY_ACK, &[]);
        let refused = option_reply(1 << 31 | 6, b"no such export");
        let negotiated = |parts: &[&[u8]]| {
            let mut script = Script(io::Cursor::new(parts.concat()), Vec::new());
            (negotiate(&mut script).map_err(|error| error.to_string()), script.1)
        };
        let (size, said) = negotiated(&[&greet(3), &export, &sizes, &acknowledged]);
        assert_eq!(size, Ok(1 << 20));
        assert_eq!(said[4..12], *b"IHAVEOPT");
        assert_eq!(said.len(), 4 + 16 + 8);
        for (parts, reason) in [
            (&[&greet(2)[..]][..], "fixed newstyle"),
            (&[&[0; 18]], "does not greet"),
            (&[&greet(1), &acknowledged], "size"),
            (&[&greet(1), &refused], "default export"),
            (&[&greet(1), &[0; 20]], "does not answer"),
            (&[&greet(1), &option_reply(REPLY_INFO, &[0; 5000])], "too long"),
            (&[&greet(1), &export], "closed"),
        ] {
            let (refused, _) = negotiated(parts);
            assert!(refused.as_ref().is_err_and(|e| e.contains(reason)), "{reason}: {refused:?}");
        }
    }
}
