//! What goes over the network of a test's own namespace, and texts that are looked for in it.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use aho_corasick::AhoCorasick;
use anyhow::{Context, anyhow};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// More than the largest packet: the kernel does not cut what goes over loopback.
const PACKET_MAX: usize = 1 << 20;

/// What the kernel keeps until it is read, in bytes: some seconds of a busy machine.
const BUFFER: usize = 256 << 20;

/// How often the thread looks whether it is to end.
const LOOKS_EVERY_MS: i64 = 50;

/// Reads every packet of this thread's network namespace until it is ended.
pub struct Capture {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<std::io::Result<Captured>>,
}

/// What was there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// How many bytes went over the network.
    pub bytes: u64,
    /// Those of the texts that were in a packet.
    pub texts: BTreeSet<String>,
    /// The network cards that were announced: those of which a frame of RARP was there, as QEMU sends them for a guest that has moved.
    pub announced: BTreeSet<[u8; 6]>,
}

impl Capture {
    /// Begins to look for these texts.
    pub fn begin(texts: &[&str]) -> anyhow::Result<Self> {
        let socket = socket(
            AddressFamily::Packet,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::EthAll,
        )?;
        setsockopt(&socket, sockopt::RcvBufForce, &BUFFER)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(LOOKS_EVERY_MS))?;
        let search = AhoCorasick::new(texts).context("the texts cannot be looked for")?;
        let texts = texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let ends = Arc::new(AtomicBool::new(false));
        let told = ends.clone();
        let thread = std::thread::spawn(move || read(&socket, &search, &texts, &told));
        Ok(Self { ends, thread })
    }

    /// Ends it; what has come until now counts.
    pub fn end(self) -> anyhow::Result<Captured> {
        self.ends.store(true, Ordering::Relaxed);
        Ok(self.thread.join().map_err(|_| anyhow!("the capture has panicked"))??)
    }
}

/// Reads until it is told to end and nothing is left.
fn read(
    socket: &OwnedFd,
    search: &AhoCorasick,
    texts: &[String],
    ends: &AtomicBool,
) -> std::io::Result<Captured> {
    let mut captured = Captured::default();
    let mut packet = vec![0; PACKET_MAX];
    loop {
        match recv(socket.as_raw_fd(), &mut packet, MsgFlags::empty()) {
            Ok(length) => {
                captured.bytes += length as u64;
                let found = search.find_iter(&packet[..length]);
                captured.announced.extend(announced(&packet[..length]));
                captured.texts.extend(found.map(|found| texts[found.pattern()].clone()));
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) if ends.load(Ordering::Relaxed) => return Ok(captured),
            Err(Errno::EAGAIN) => {}
            Err(error) => return Err(std::io::Error::other(error)),
        }
    }
}

/// The card that an Ethernet frame announces.
fn announced(frame: &[u8]) -> Option<[u8; 6]> {
    const RARP: [u8; 2] = [0x80, 0x35];
    let is_rarp = frame.get(12..14)? == RARP;
    is_rarp.then(|| frame.get(6..12)?.try_into().ok()).flatten()
}
