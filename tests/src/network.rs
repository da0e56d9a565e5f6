//! Networks of a test's own, and the guest that is on them (`scripts/build-network-guest`).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sched::{CloneFlags, unshare};

use crate::eventually;

/// How long a peer may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Gives this thread, and what it starts, a network namespace with nothing but loopback; whether that is possible. A test that
/// cannot have one says so and ends.
pub fn own_namespace() -> anyhow::Result<bool> {
    if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
        crate::skipped(format_args!("no network namespace can be made: {error}"));
        return Ok(false);
    }
    ip("link set lo up")?;
    Ok(true)
}

/// Runs `ip`; gives what it prints.
pub fn ip(arguments: &str) -> anyhow::Result<String> {
    let run = Command::new("ip").args(arguments.split(' ')).output()?;
    ensure!(run.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&run.stderr));
    Ok(String::from_utf8(run.stdout)?)
}

/// Makes a bridge with this address, `10.77.0.1/24`.
pub fn bridge(name: &str, address: &str) -> anyhow::Result<()> {
    ip(&format!("link add {name} type bridge"))?;
    ip(&format!("addr add {address} dev {name}"))?;
    ip(&format!("link set {name} up")).map(drop)
}

/// How many taps there are that vmseal has made.
pub fn taps() -> anyhow::Result<usize> {
    Ok(ip("-o link")?.lines().filter(|line| line.contains("vmseal")).count())
}

/// A connection to `10.77.0.10:7`, as soon as it is taken.
pub fn connect(to: &str) -> anyhow::Result<TcpStream> {
    let address: SocketAddr = to.parse()?;
    eventually(&format!("{to} takes connections"), || {
        let stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        Some(stream)
    })
}

/// Has the guest send back what it is sent.
pub fn echoes(stream: &mut TcpStream, text: &[u8]) -> anyhow::Result<()> {
    stream.write_all(text)?;
    let mut back = vec![0; text.len()];
    stream.read_exact(&mut back)?;
    ensure!(back == text, "{} came back", String::from_utf8_lossy(&back));
    Ok(())
}

/// The guest's page: the addresses of its cards when it booted.
pub fn page(at: &str) -> anyhow::Result<String> {
    eventually(&format!("{at} has a page"), || {
        let mut stream = connect(at).ok()?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.contains(" 200 OK").then_some(text)
    })
}

/// Waits until somebody asks here for a page by HTTP, and gives them this one; gives the path that they asked for.
pub fn asked(at: &TcpListener, page: &str) -> anyhow::Result<String> {
    at.set_nonblocking(true)?;
    let (mut stream, _) = eventually("somebody asks for a page", || at.accept().ok())?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut heard = BufReader::new(&stream);
    let mut request = String::new();
    heard.read_line(&mut request)?;
    // To its end: what is left unread takes the answer along when the connection is closed.
    let mut line = String::new();
    while heard.read_line(&mut line)? > "\r\n".len() {
        line.clear();
    }
    let length = page.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{page}"
    )?;
    let path = request.split(' ').nth(1);
    Ok(path.with_context(|| format!("'{request}' is no request"))?.to_owned())
}
