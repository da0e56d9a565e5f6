//! Connections that a test can cut: a proxy before an agent or a server stands for the network on the way there.
//!
//! ```text
//!  server ──── way ──── agent            server ──── way ──── server of another control plane
//! ```
//! Servers alone connect: to the agents of their hosts, and to other servers. So each connection is cut without another one.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{scope, sleep, spawn};
use std::time::Duration;

use anyhow::Context;

use crate::installation::Installation;

/// How much is read at a time.
const CHUNK: usize = 64 << 10;

/// How often the proxy looks whether somebody connects.
const STEP: Duration = Duration::from_millis(5);

/// What a cut is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Nothing passes, and nobody is told. What was said meanwhile arrives when the cut is over.
    Silent,
    /// All connections end, and none is made.
    Refused,
}

/// A way to an agent or a server. All of its connections end when it is dropped.
pub struct Way {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    to: SocketAddr,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    cut: Option<How>,
    ends: bool,
    /// Both ends of each connection that is carried.
    carried: HashMap<u64, [TcpStream; 2]>,
    /// The number of the next one.
    next: u64,
}

impl Way {
    /// One to this address. It begins at another port of it.
    ///
    /// # Errors
    /// It cannot listen there.
    pub fn to(to: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((to.ip(), 0)).context("no way can begin there")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Shared { to, state: Mutex::default(), changed: Condvar::new() };
        let shared = Arc::new(shared);
        let accepts = Arc::clone(&shared);
        spawn(move || accept(&listener, &accepts));
        Ok(Self { address, shared })
    }

    /// One to the agent of a host, on which the server calls it from now on.
    ///
    /// # Errors
    /// Those of the commands.
    pub fn to_agent(here: &Installation, host: &str) -> anyhow::Result<Self> {
        let shown = here.json(&["host", "show", host])?;
        let agent = shown["address"].as_str().context("the host has no address")?;
        let way = Self::to(agent.parse()?)?;
        here.vmseal(&["host", "set", host, "--address", &way.address.to_string()])?;
        here.wait_hosts()?;
        Ok(way)
    }

    /// One to a server, for who is told [`Self::url`].
    ///
    /// # Errors
    /// It cannot listen there.
    pub fn to_server(here: &Installation) -> anyhow::Result<Self> {
        let url = here.url();
        Self::to(url.strip_prefix("https://").context("no address")?.parse()?)
    }

    /// The server's address, as it is called on this way.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Cuts it, until this is dropped.
    #[must_use]
    pub fn cut(&self, how: How) -> Cut<'_> {
        let mut state = self.shared.state();
        state.cut = Some(how);
        if how == How::Refused {
            state.end_all();
        }
        Cut(self)
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.ends = true;
        state.end_all();
        self.shared.changed.notify_all();
    }
}

/// A cut, until this is dropped.
pub struct Cut<'a>(&'a Way);

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        self.0.shared.state().cut = None;
        self.0.shared.changed.notify_all();
    }
}

impl State {
    fn end_all(&self) {
        for end in self.carried.values().flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while nothing passes and nobody is told; whether anything passes then.
    fn passes(&self) -> bool {
        let is_silent = |state: &mut State| !state.ends && state.cut == Some(How::Silent);
        let state = self.changed.wait_while(self.state(), is_silent);
        let state = state.unwrap_or_else(PoisonError::into_inner);
        !state.ends && state.cut.is_none()
    }

    /// Notes a connection, which ends when it is refused; its number. None where it is refused by now.
    fn enter(&self, ends: [TcpStream; 2]) -> Option<u64> {
        let mut state = self.state();
        if state.ends || state.cut == Some(How::Refused) {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.carried.insert(number, ends);
        Some(number)
    }

    fn leave(&self, number: u64) {
        self.state().carried.remove(&number);
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while !shared.state().ends {
        let Ok((near, _)) = listener.accept() else {
            sleep(STEP);
            continue;
        };
        let shared = Arc::clone(shared);
        // Who connects learns from the end of its connection that it is not carried.
        spawn(move || drop(carry(&shared, &near)));
    }
}

/// Carries one connection to its end.
fn carry(shared: &Shared, near: &TcpStream) -> std::io::Result<()> {
    if !shared.passes() {
        return Ok(());
    }
    let far = TcpStream::connect(shared.to)?;
    for end in [near, &far] {
        end.set_nodelay(true)?;
    }
    let Some(number) = shared.enter([near.try_clone()?, far.try_clone()?]) else {
        return Ok(());
    };
    scope(|both| {
        both.spawn(|| pump(shared, &far, near));
        pump(shared, near, &far);
    });
    shared.leave(number);
    Ok(())
}

/// Carries one direction to its end.
fn pump(shared: &Shared, mut from: &TcpStream, mut to: &TcpStream) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = match from.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.unwrap_or(0),
        };
        if !shared.passes() {
            return;
        }
        if length == 0 {
            let _ = to.shutdown(Shutdown::Write);
            return;
        }
        if to.write_all(&buffer[..length]).is_err() {
            let _ = from.shutdown(Shutdown::Both);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Longer than an answer takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Something that sends back each byte, and tells which it has heard.
    fn echo() -> (SocketAddr, Receiver<u8>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tells, heard) = channel();
        spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let tells = tells.clone();
                spawn(move || {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).is_ok() {
                        let _ = tells.send(byte[0]);
                        let _ = stream.write_all(&byte);
                    }
                });
            }
        });
        (address, heard)
    }

    fn connect(way: &Way) -> TcpStream {
        let stream = TcpStream::connect(way.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// What comes back; none where the connection has ended.
    fn answer(mut stream: &TcpStream) -> Option<u8> {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok().map(|()| byte[0])
    }

    fn say(mut stream: &TcpStream, byte: u8) {
        stream.write_all(&[byte]).unwrap();
    }

    #[test]
    fn what_is_said_while_nothing_passes_arrives_afterwards() {
        let (echo, heard) = echo();
        let (way, other) = (Way::to(echo).unwrap(), Way::to(echo).unwrap());
        let (early, uncut) = (connect(&way), connect(&other));
        say(&early, b'a');
        assert_eq!((answer(&early), heard.recv()), (Some(b'a'), Ok(b'a')));
        let cut = way.cut(How::Silent);
        say(&early, b'b');
        let late = connect(&way);
        say(&late, b'c');
        // On another way there was time enough for them.
        say(&uncut, b'd');
        assert_eq!(answer(&uncut), Some(b'd'));
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [b'd'], "something has passed");
        drop(cut);
        assert_eq!((answer(&early), answer(&late)), (Some(b'b'), Some(b'c')));
    }

    #[test]
    fn connections_that_are_refused_end_and_new_ones_are_made_afterwards() {
        let (echo, _heard) = echo();
        let way = Way::to(echo).unwrap();
        let early = connect(&way);
        say(&early, b'a');
        assert_eq!(answer(&early), Some(b'a'));
        let cut = way.cut(How::Refused);
        assert_eq!((answer(&early), answer(&connect(&way))), (None, None));
        drop(cut);
        let late = connect(&way);
        say(&late, b'b');
        assert_eq!(answer(&late), Some(b'b'));
        drop(way);
        assert_eq!(answer(&late), None);
    }
}
