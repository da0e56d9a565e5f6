//! An attacker between two hosts: a proxy on the way of a migration, which changes what one of its connections carries.
//!
//! An agent that receives VMs at all addresses of IPv6 is told to other hosts with the IPv4 address that the server knows it by. In a
//! network of the test's own, where IPv6 leaves the addresses of IPv4 alone, the proxy waits there.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::Context;

use crate::installation::Installation;

/// What each end says in a handshake, in bytes (docs/formats/migration-wire.md): hello and proof; hello, proof, and the first frame.
pub const HELLO: usize = 48;
/// See [`HELLO`].
pub const SAID_BY_SOURCE: usize = HELLO + 32;
/// See [`HELLO`].
pub const SAID_BY_DESTINATION: usize = HELLO + 32 + 32;

/// Where the number of its stream is in a hello.
const STREAM_AT: usize = 12;

/// How much is kept of what a source says on a connection, in bytes: more than a destination reads before it refuses it.
const KEPT_MAX: usize = 1 << 20;

/// How much is read at a time.
const CHUNK: usize = 64 << 10;

/// How often the proxy looks whether somebody connects.
const STEP: Duration = Duration::from_millis(5);

/// What is done to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// One bit of a byte is changed.
    Flip(u8),
    /// A stretch of so many bytes is left out.
    Drop(usize),
    /// One comes twice.
    Double(usize),
    /// It and the next one change places.
    Swap(usize),
    /// The connection ends.
    Truncate,
    /// It stays, and nothing comes any more.
    Hold,
    /// What the source of the last migration has said on this connection is said again, in place of what it says now.
    Replay,
}

/// What is done, and where.
#[derive(Clone, Copy, Debug)]
pub struct Aim {
    /// What.
    pub attack: Attack,
    /// The number of the connection.
    pub stream: u16,
    /// Whether to what goes to the destination, or to what comes from it.
    pub to_destination: bool,
    /// From which byte on.
    pub at: usize,
}

/// The proxy. It ends when this is dropped.
pub struct Wire(Arc<Shared>);

struct Shared {
    to: SocketAddr,
    plan: Mutex<Plan>,
    ends: AtomicBool,
}

#[derive(Default)]
struct Plan {
    aim: Option<Aim>,
    struck: bool,
    /// The beginning of what the source has said last, by connection.
    kept: BTreeMap<u16, Vec<u8>>,
}

/// Has IPv6 leave the addresses of IPv4 to others, in this thread's network.
///
/// # Errors
/// This kernel has no IPv6.
pub fn separate_ipv6() -> anyhow::Result<()> {
    std::fs::write("/proc/sys/net/ipv6/bindv6only", "1").context("no IPv6")
}

impl Wire {
    /// One before a host that receives VMs at [`Ipv6Addr::UNSPECIFIED`].
    ///
    /// # Errors
    /// It cannot listen there.
    pub fn before(here: &Installation, host: &str) -> anyhow::Result<Self> {
        let shown = here.json(&["host", "show", host])?;
        let at = shown["description"]["migration_address"].as_str().context("it receives none")?;
        let port = at.parse::<SocketAddr>()?.port();
        let listener = TcpListener::bind((here.address(), port))?;
        listener.set_nonblocking(true)?;
        let to = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
        let shared = Arc::new(Shared { to, plan: Mutex::default(), ends: AtomicBool::new(false) });
        let accepts = shared.clone();
        spawn(move || accept(&listener, &accepts));
        Ok(Self(shared))
    }

    /// What is done to the next migration; nothing, if it is none.
    pub fn aim(&self, aim: Option<Aim>) {
        let mut plan = self.0.plan();
        (plan.aim, plan.struck) = (aim, false);
    }

    /// Whether it was done.
    #[must_use]
    pub fn has_struck(&self) -> bool {
        self.0.plan().struck
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.0.ends.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while !shared.ends.load(Ordering::Relaxed) {
        let Ok((near, _)) = listener.accept() else {
            sleep(STEP);
            continue;
        };
        let shared = shared.clone();
        // Who connects learns from the end of its connection that it is not carried.
        spawn(move || drop(carry(&shared, near)));
    }
}

/// Carries one connection of a source.
fn carry(shared: &Arc<Shared>, mut near: TcpStream) -> std::io::Result<()> {
    let mut hello = [0; HELLO];
    near.read_exact(&mut hello)?;
    let stream = u16::from_be_bytes([hello[STREAM_AT], hello[STREAM_AT + 1]]);
    let mut far = TcpStream::connect(shared.to)?;
    for socket in [&near, &far] {
        socket.set_nodelay(true)?;
    }
    let (aim, earlier) = {
        let mut plan = shared.plan();
        let aim = plan.aim.filter(|aim| aim.stream == stream);
        let replays = aim.is_some_and(|aim| aim.attack == Attack::Replay);
        let earlier = if replays { plan.kept.get(&stream).cloned() } else { None };
        plan.struck |= earlier.is_some();
        if !replays {
            plan.kept.insert(stream, Vec::new());
        }
        (aim, earlier)
    };
    if let Some(earlier) = earlier {
        // The destination closes the connection in the middle of it.
        let _ = far.write_all(&earlier);
        let _ = far.read_to_end(&mut Vec::new());
        return near.shutdown(Shutdown::Both);
    }
    let of = |to_destination| aim.filter(|aim| aim.to_destination == to_destination);
    let (mut there, mut back) = (Altering::new(of(true)), Altering::new(of(false)));
    let (from_far, mut to_near) = (far.try_clone()?, near.try_clone()?);
    let shares = shared.clone();
    let returns = spawn(move || pump(&shares, &mut back, from_far, &mut to_near, |_| ()));
    let keep = |said: &[u8]| {
        let mut plan = shared.plan();
        let kept = plan.kept.entry(stream).or_default();
        let room = KEPT_MAX.saturating_sub(kept.len()).min(said.len());
        kept.extend_from_slice(&said[..room]);
    };
    let said = hello.as_slice().chain(near);
    pump(shared, &mut there, said, &mut far, keep);
    let _ = returns.join();
    Ok(())
}

/// What can be read, and ended.
trait Source: Read {
    fn end(&self);
}

impl Source for TcpStream {
    fn end(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

impl Source for std::io::Chain<&[u8], TcpStream> {
    fn end(&self) {
        self.get_ref().1.end();
    }
}

/// Carries one direction to its end.
fn pump(
    shared: &Shared,
    altering: &mut Altering,
    mut from: impl Source,
    to: &mut TcpStream,
    keep: impl Fn(&[u8]),
) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => return to.end(),
        };
        keep(&buffer[..length]);
        let carried = altering.take(&buffer[..length]);
        shared.plan().struck |= altering.struck;
        let passed_on = to.write_all(&carried);
        if altering.cuts() || passed_on.is_err() {
            from.end();
            return to.end();
        }
    }
    if altering.keeps_back() {
        // The end as well.
        return;
    }
    let _ = to.write_all(&altering.held);
    let _ = to.shutdown(Shutdown::Write);
}

/// One direction of a connection, as the attacker passes it on.
struct Altering {
    aim: Option<Aim>,
    /// How many bytes have come.
    came: usize,
    /// From where it is changed on, until all that is needed for that is here.
    held: Vec<u8>,
    struck: bool,
}

impl Altering {
    fn new(aim: Option<Aim>) -> Self {
        Self { aim, came: 0, held: Vec::new(), struck: false }
    }

    /// What is passed on after these bytes.
    fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        let Some(Aim { attack, at, .. }) = self.aim else { return bytes.to_vec() };
        if self.struck {
            let passes = !matches!(attack, Attack::Truncate | Attack::Hold);
            return if passes { bytes.to_vec() } else { Vec::new() };
        }
        let before = at.saturating_sub(self.came).min(bytes.len());
        self.came += bytes.len();
        let (before, rest) = bytes.split_at(before);
        self.held.extend_from_slice(rest);
        let mut passed = before.to_vec();
        if self.held.len() >= attack.needs() {
            self.struck = true;
            passed.extend(attack.alter(std::mem::take(&mut self.held)));
        }
        passed
    }

    /// Whether nothing more is passed on, not even that the connection ends.
    fn keeps_back(&self) -> bool {
        self.struck && self.aim.is_some_and(|aim| aim.attack == Attack::Hold)
    }

    /// Whether the connection ends here.
    fn cuts(&self) -> bool {
        self.struck && self.aim.is_some_and(|aim| aim.attack == Attack::Truncate)
    }
}

impl Attack {
    /// How many bytes are there at least when it is done.
    fn needs(self) -> usize {
        match self {
            Self::Flip(_) | Self::Truncate | Self::Hold | Self::Replay => 1,
            Self::Drop(length) | Self::Double(length) => length,
            Self::Swap(length) => 2 * length,
        }
    }

    /// What becomes of these bytes, the first ones that are changed.
    fn alter(self, mut held: Vec<u8>) -> Vec<u8> {
        match self {
            Self::Flip(bit) => {
                held[0] ^= 1 << (bit % 8);
                held
            }
            Self::Drop(length) => held.split_off(length),
            Self::Double(length) => [&held[..length], &held[..]].concat(),
            Self::Swap(length) => {
                let (one, rest) = held.split_at(length);
                let (other, rest) = rest.split_at(length);
                [other, one, rest].concat()
            }
            Self::Truncate | Self::Hold => Vec::new(),
            Self::Replay => held,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attack_changes_what_comes_from_its_place_on_however_that_comes() {
        let said = b"0123456789";
        for (attack, expected) in [
            (Attack::Flip(0), &b"0133456789"[..]),
            (Attack::Drop(3), &b"0156789"[..]),
            (Attack::Double(2), &b"012323456789"[..]),
            (Attack::Swap(2), &b"0145236789"[..]),
            (Attack::Truncate, &b"01"[..]),
            (Attack::Hold, &b"01"[..]),
        ] {
            for chunk in 1..=said.len() {
                let aim = Aim { attack, stream: 1, to_destination: true, at: 2 };
                let mut altering = Altering::new(Some(aim));
                let passed: Vec<u8> =
                    said.chunks(chunk).flat_map(|bytes| altering.take(bytes)).collect();
                assert_eq!(passed, expected, "{attack:?} in {chunk}");
                assert!(altering.struck && altering.held.is_empty(), "{attack:?} in {chunk}");
            }
        }
    }
}
