//! The loads: TCP in both directions, round trips, and redis. All that counts is done by programs of the host.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vmseal_lab::clock::{ProcessClock, own};
use vmseal_tests::eventually;

use crate::guests::{ECHO, Guest, Network, REDIS, SINK, SOURCE};

/// How long bytes are counted, and how long they flow before: buffers are full then.
const COUNTED: Duration = Duration::from_millis(700);
const WARM_UP: Duration = Duration::from_millis(300);

/// Requests of one measurement with redis, some half a second under emulation, and its connections.
const REQUESTS: u32 = 2000;
const CONNECTIONS: &str = "20";

/// How long redis-benchmark may take. It waits for ever for a guest that has gone.
const REDIS_TIMEOUT: &str = "60";

/// What is measured; more is better.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Load {
    ToGuest,
    FromGuest,
    RoundTrips,
    RedisGet,
    RedisSet,
}

impl Load {
    pub const ALL: [Self; 5] =
        [Self::ToGuest, Self::FromGuest, Self::RoundTrips, Self::RedisGet, Self::RedisSet];

    /// Whether it is measured over a network. A QEMU that is started by hand does not answer twenty connections at once to a forwarded
    /// port within a minute on a busy machine (docs/network.md, "Many clients at once"): there is nothing to compare with.
    pub fn is_of(self, network: Network) -> bool {
        network == Network::Bridge || !matches!(self, Self::RedisGet | Self::RedisSet)
    }

    /// Its name in `bench/goals.toml`, after that of the network.
    pub fn id(self) -> &'static str {
        match self {
            Self::ToGuest => "tcp-to-guest",
            Self::FromGuest => "tcp-from-guest",
            Self::RoundTrips => "round-trips",
            Self::RedisGet => "redis-get",
            Self::RedisSet => "redis-set",
        }
    }

    /// Its name, the unit that it is shown in, and how many of what is counted that is.
    pub fn shown(self) -> (&'static str, &'static str, f64) {
        match self {
            Self::ToGuest => ("TCP to the guest", "MB/s", 1e6),
            Self::FromGuest => ("TCP from the guest", "MB/s", 1e6),
            Self::RoundTrips => ("one byte there and back", "1/s", 1.0),
            Self::RedisGet => ("redis GET", "1/s", 1.0),
            Self::RedisSet => ("redis SET", "1/s", 1.0),
        }
    }

    /// Whether bytes are counted; else requests are.
    pub fn counts_bytes(self) -> bool {
        matches!(self, Self::ToGuest | Self::FromGuest)
    }

    /// Measures it once.
    pub fn measure(self, guest: &Guest, over: Network) -> anyhow::Result<Sample> {
        let stopwatch = Stopwatch { clocks: &guest.clocks };
        let connect = |port| connect(&guest.service(over, port));
        match self {
            Self::ToGuest => {
                let block = vec![0; 64 << 10];
                flow(&stopwatch, connect(SINK)?, |stream| Ok(stream.write(&block)?))
            }
            Self::FromGuest => {
                let mut block = vec![0; 64 << 10];
                flow(&stopwatch, connect(SOURCE)?, |stream| Ok(stream.read(&mut block)?))
            }
            Self::RoundTrips => flow(&stopwatch, connect(ECHO)?, |stream| {
                stream.write_all(b"x")?;
                stream.read_exact(&mut [0])?;
                Ok(1)
            }),
            Self::RedisGet => stopwatch.time(|| redis(guest, over, "get")),
            Self::RedisSet => stopwatch.time(|| redis(guest, over, "set")),
        }
    }
}

/// One measurement.
pub struct Sample {
    /// Bytes or requests.
    pub count: u64,
    /// The seconds that they took.
    pub seconds: f64,
    /// The CPU time of the guest's processes meanwhile, in seconds.
    pub cpu: f64,
    /// That of the load, where it is in this process.
    pub client_cpu: f64,
}

/// Takes times of the processes of a guest.
struct Stopwatch<'a> {
    clocks: &'a [ProcessClock],
}

impl Stopwatch<'_> {
    fn cpu(&self) -> anyhow::Result<Duration> {
        let read = self.clocks.iter().map(ProcessClock::read);
        read.sum::<std::io::Result<Duration>>().context("a process of the guest has ended")
    }

    fn time(&self, work: impl FnOnce() -> anyhow::Result<u64>) -> anyhow::Result<Sample> {
        let (begun, cpu, client) = (Instant::now(), self.cpu()?, own()?);
        let count = work()?;
        Ok(Sample {
            count,
            seconds: begun.elapsed().as_secs_f64(),
            cpu: (self.cpu()?.saturating_sub(cpu)).as_secs_f64(),
            client_cpu: own()?.saturating_sub(client).as_secs_f64(),
        })
    }
}

/// Waits until a guest has booted.
pub fn booted(guest: &Guest) -> anyhow::Result<()> {
    for network in Network::ALL {
        let (host, port) = guest.service(network, ECHO);
        eventually(&format!("{} echoes at {host}:{port}", guest.system), || {
            let mut stream = TcpStream::connect((host.as_str(), port)).ok()?;
            // QEMU takes connections before the guest does.
            stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
            stream.write_all(b"x").ok()?;
            stream.read_exact(&mut [0]).ok()
        })?;
    }
    Ok(())
}

fn connect((host, port): &(String, u16)) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect((host.as_str(), *port));
    let stream = stream.with_context(|| format!("{host}:{port} takes no connections"))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Runs `step`, which counts, for a while.
fn flow(
    stopwatch: &Stopwatch<'_>,
    mut stream: TcpStream,
    mut step: impl FnMut(&mut TcpStream) -> anyhow::Result<usize>,
) -> anyhow::Result<Sample> {
    let mut count = |time| {
        let (begun, mut counted) = (Instant::now(), 0);
        while begun.elapsed() < time {
            let more = step(&mut stream)?;
            ensure!(more > 0, "the guest has ended the connection");
            counted += more as u64;
        }
        Ok(counted)
    };
    count(WARM_UP)?;
    stopwatch.time(|| count(COUNTED))
}

/// Has redis-benchmark make its requests; their number.
fn redis(guest: &Guest, over: Network, test: &str) -> anyhow::Result<u64> {
    let (host, port) = guest.service(over, REDIS);
    let port = port.to_string();
    let at = ["redis-benchmark", "-h", &host, "-p", &port];
    let requests = REQUESTS.to_string();
    let what = ["--csv", "-t", test, "-n", &requests, "-c", CONNECTIONS];
    let output = Command::new("timeout")
        .arg(REDIS_TIMEOUT)
        .args([&at[..], &what].concat())
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "redis-benchmark: {} (is redis-tools there?)", output.status);
    let text = String::from_utf8(output.stdout)?;
    // It says so, and ends well, where a request is refused.
    ensure!(text.lines().any(|line| line.starts_with("\"")), "redis-benchmark: {text}");
    Ok(REQUESTS.into())
}
