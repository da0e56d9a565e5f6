//! A guest that serves redis on a network card, in memory or with a log on a disk (`redis_disk`), and a client outside that asks it
//! while it moves: how many answers come in a second, and how long one waits for one.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::dip::{self, Answer};
use super::redis_disk::{self, Log};
use crate::children;
use crate::definition::Mix;
use crate::outcome::{OperationError, Served};
use crate::stop::{self, LOOK_EVERY};

/// Builds the guest's disk, with this option, and prints its path; in a checkout of vmseal.
const BUILDS: &str = "scripts/build-network-guest";
const WITH_REDIS: &str = "--redis";
const PORT: u16 = 6379;
/// The memory of the guest beside what redis holds, in MiB: its kernel, its files, and redis by itself.
const MORE_MIB: u64 = 256;
/// What redis takes for a value, at most, by its size.
const OVERHEAD: (u64, u64) = (3, 2);
/// The size of a value, in bytes: with what redis has before it no more than the next power of two.
const VALUE: usize = 1000;
/// The values of a MiB.
const VALUES: u64 = 1024;
/// How many values are sent before their answers are read, when redis is filled.
const BATCH: u64 = 512;

/// The connections of the client, and how long each waits from one request to the next if the answer came sooner: 1000 requests in a
/// second, which an emulated guest answers while the hosts have the processors for what is measured.
const CONNECTIONS: u32 = 4;
const EVERY: Duration = Duration::from_millis(4);
/// The same where nothing is asked but whether the guest is there, by one connection: a gap is known this well.
const PING_EVERY: Duration = Duration::from_millis(5);
/// How long the client asks before the guest moves, of which the first part is not counted, and afterwards.
const BEFORE: Duration = Duration::from_secs(4);
const WARM_UP: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(5);
/// How long a guest may take to boot, and how long an answer may take.
const BOOTS: Duration = Duration::from_secs(120);
const ANSWERS: Duration = Duration::from_secs(60);
/// How long redis may take to write its log anew: as long as a guest may take to fill as much memory.
const WRITTEN: Duration = Duration::from_secs(300);

/// What is typed for the driver of disks, and what its output has when it is done, which is not typed.
const GET_DRIVER: &[u8] = b"insmod /virtio_blk.ko; echo DRIVER-$((6 * 7))\n";
const HAS_DRIVER: &str = "DRIVER-42";

/// A program that ends with this.
struct Killed(Child);

impl Killed {
    fn start(mut command: Command) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn().map(Self)
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        children::end(&mut self.0);
    }
}

/// The disk of a guest with redis: the file that was chosen, or what the script of a checkout builds; else why there is none.
pub(super) fn image(chosen: Option<&Path>) -> Result<PathBuf, String> {
    let take = "give one with --guest";
    if let Some(path) = chosen {
        let found = path.is_file().then(|| path.to_owned());
        return found.ok_or_else(|| format!("there is no guest at {}: {take}", path.display()));
    }
    let script = Path::new(BUILDS);
    if !script.is_file() {
        return Err(format!(
            "a guest with redis is needed: {take} ({BUILDS} {WITH_REDIS} of a checkout builds it)"
        ));
    }
    let output = Command::new(script).arg(WITH_REDIS).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("{BUILDS} cannot be run: {error}"))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    match printed.lines().last() {
        Some(path) if output.status.success() => Ok(path.into()),
        _ => Err(format!("{BUILDS} has built no guest: {}", output.status)),
    }
}

/// The guest of a VM.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedisGuest {
    /// Its number: the guest takes its address from its card's, and no two VMs have the same.
    pub number: u8,
    /// How much redis holds.
    pub size_mib: u64,
    /// The size of the disk that it keeps its log on; 0 is none.
    pub disk_mib: u64,
}

impl RedisGuest {
    /// The memory of its machine, in MiB.
    pub fn memory_mib(self) -> u64 {
        self.size_mib * OVERHEAD.0 / OVERHEAD.1 + MORE_MIB
    }

    /// Its card, on this bridge.
    pub fn card(self, bridge: &str) -> String {
        format!("bridge={bridge},mac=52:54:0a:4d:00:{:02x}", self.number)
    }

    fn address(self) -> SocketAddr {
        (Ipv4Addr::new(10, 77, 0, self.number), PORT).into()
    }

    /// Has the guest of a VM use its disks when it has booted, by the shell on its console: it gets their driver, and redis keeps its log
    /// where there is a disk for it. QEMU before 9.0 loses a disk that its guest does not use when it moves, so vmseal does not move such
    /// a guest.
    pub fn use_disks(self, console: Command) -> Result<(), OperationError> {
        // Its shell is there as redis is.
        self.connected()?;
        match self.disk_mib {
            0 => type_in(console, GET_DRIVER, HAS_DRIVER),
            _ => type_in(console, redis_disk::KEEP_LOG, redis_disk::KEEPS_LOG),
        }
    }

    /// A connection to redis, as soon as it answers.
    fn connected(self) -> Result<Connection, OperationError> {
        let begun = Instant::now();
        loop {
            stop::check()?;
            match Connection::new(self.address()) {
                Ok(connection) => return Ok(connection),
                Err(_) if begun.elapsed() < BOOTS => std::thread::sleep(Duration::from_millis(50)),
                Err(error) => return Err(self.failed(&error)),
            }
        }
    }

    /// Waits until redis answers, and puts into it what it is to hold.
    pub fn fill(self) -> Result<(), OperationError> {
        let mut connection = self.connected()?;
        let mut random = fastrand::Rng::with_seed(u64::from(self.number));
        let filled = (0..self.keys()).step_by(BATCH as usize).try_for_each(|first| {
            let numbers = first..self.keys().min(first + BATCH);
            let count = numbers.end - numbers.start;
            let mut requests = Vec::new();
            numbers.for_each(|number| set(&mut requests, number, &mut random));
            connection.stream.get_mut().write_all(&requests)?;
            (0..count).try_for_each(|_| connection.answer())
        });
        filled.map_err(|error| self.failed(&error))
    }

    /// Where redis has a log, it is written anew before a move, and synced from then on before a SET is answered.
    pub fn begin_log(self) -> Result<(), OperationError> {
        if self.disk_mib == 0 {
            return Ok(());
        }
        let mut connection = self.connected()?;
        let mut ask = |request: &[u8]| {
            connection.stream.get_mut().write_all(request)?;
            connection.said()
        };
        for request in [redis_disk::SYNC, redis_disk::WRITE_ANEW] {
            ask(request).map_err(|error| self.failed(&error))?;
        }
        let begun = Instant::now();
        loop {
            let told = ask(redis_disk::HOW_FAR).map_err(|error| self.failed(&error))?;
            match Log::of(&told) {
                Log::New => return Ok(()),
                Log::Begun if begun.elapsed() < WRITTEN => stop::check()?,
                Log::Begun | Log::Failed => {
                    let why = "it could not write its log anew; it says: ";
                    return Err(self.failed(&io::Error::other(format!("{why}{told}"))));
                }
            }
            stop::sleep(LOOK_EVERY);
        }
    }

    fn keys(self) -> u64 {
        self.size_mib * VALUES
    }

    fn failed(self, error: &io::Error) -> OperationError {
        let what = format!("redis in the guest at {}", self.address());
        OperationError::Command { what, said: error.to_string() }
    }

    /// Asks it all the time while it is moved; gives what moving gave, what was answered, and the longest that one waited from then on.
    pub fn asked<T>(
        self,
        mix: Mix,
        seed: u64,
        moves: impl FnOnce() -> Result<T, OperationError>,
    ) -> Result<(T, Served, Duration), OperationError> {
        let (connections, every) = match mix {
            Mix::Idle => (1, PING_EVERY),
            Mix::Gets(_) => (CONNECTIONS, EVERY),
        };
        let ends = AtomicBool::new(false);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let ask = |number: u32| {
                let (ends, random) =
                    (&ends, fastrand::Rng::with_seed(seed << 8 | u64::from(number)));
                move || self.ask(mix, every, random, begun, ends)
            };
            let asking: Vec<_> = (0..connections).map(|number| scope.spawn(ask(number))).collect();
            std::thread::sleep(BEFORE);
            let from = begun.elapsed();
            let moved = moves();
            let to = begun.elapsed();
            if moved.is_ok() {
                std::thread::sleep(AFTER);
            }
            ends.store(true, Ordering::Relaxed);
            let end = begun.elapsed();
            let mut answers = Vec::new();
            for asked in asking {
                let asked = asked.join().expect("a client does not panic");
                answers.extend(asked.map_err(|error| self.failed(&error))?);
            }
            let (served, longest) = summarize(&answers, (from, to), end);
            Ok((moved?, served, longest))
        })
    }

    /// By one connection, until it is to end: when each request was sent, and when it was answered.
    fn ask(
        self,
        mix: Mix,
        every: Duration,
        mut random: fastrand::Rng,
        begun: Instant,
        ends: &AtomicBool,
    ) -> io::Result<Vec<Answer>> {
        let mut connection = Connection::new(self.address())?;
        let (mut answers, mut request) = (Vec::new(), Vec::new());
        while !ends.load(Ordering::Relaxed) {
            request.clear();
            let key = random.u64(0..self.keys());
            match mix {
                Mix::Idle => request.extend_from_slice(b"PING\r\n"),
                Mix::Gets(gets) if random.u8(0..100) < gets => get(&mut request, key),
                Mix::Gets(_) => set(&mut request, key, &mut random),
            }
            let sent = begun.elapsed();
            connection.stream.get_mut().write_all(&request)?;
            connection.answer()?;
            let answered = begun.elapsed();
            answers.push((sent, answered));
            std::thread::sleep((sent + every).saturating_sub(answered));
        }
        Ok(answers)
    }
}

/// Types something on the console of a VM whose guest has a shell there, and waits until the output has what shows that it is done.
fn type_in(console: Command, what: &[u8], done: &'static str) -> Result<(), OperationError> {
    let failed = |said: String| OperationError::Command { what: "vm console".to_owned(), said };
    let mut console = Killed::start(console).map_err(|error| failed(error.to_string()))?;
    let (Some(mut keys), Some(screen)) = (console.0.stdin.take(), console.0.stdout.take()) else {
        return Ok(());
    };
    // What is typed before there is a shell waits for it.
    keys.write_all(what).map_err(|error| failed(error.to_string()))?;
    let (shown, seen) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(screen).lines().map_while(Result::ok);
        let has = lines.any(|line| line.contains(done));
        // Nobody listens if it took too long.
        let _ = shown.send(has);
    });
    let begun = Instant::now();
    loop {
        match seen.recv_timeout(LOOK_EVERY) {
            Ok(true) => return Ok(()),
            Err(RecvTimeoutError::Timeout) if begun.elapsed() < BOOTS => stop::check()?,
            _ => {
                return Err(failed(format!(
                    "the shell on the guest's console has not answered {done}"
                )));
            }
        }
    }
}

/// What came of requests, each with when it was sent and answered, around a move; and the longest that one waited that was answered
/// after the move had begun.
fn summarize(
    answers: &[Answer],
    (from, to): (Duration, Duration),
    end: Duration,
) -> (Served, Duration) {
    let rate = |from: Duration, to: Duration| {
        let within = |(_, answered): &&Answer| *answered >= from && *answered < to;
        answers.iter().filter(within).count() as f64 / to.saturating_sub(from).as_secs_f64()
    };
    let latency = |from: Duration, to: Duration| {
        let within = answers.iter().filter(|(_, answered)| *answered >= from && *answered < to);
        median(within.map(|(sent, answered)| *answered - *sent).collect())
    };
    let by_tenth = dip::counted(answers, end);
    let silence = dip::silence(answers, (from, to));
    let meanwhile = answers.iter().filter(|(_, answered)| *answered >= from);
    let longest = meanwhile.map(|(sent, answered)| *answered - *sent).max().unwrap_or_default();
    let served = Served {
        before: rate(WARM_UP, from),
        during: rate(from, to),
        after: rate(to, end),
        moved: (from.as_secs_f64(), to.as_secs_f64()),
        silence: silence.map_or(f64::NAN, |(last, next)| (next - last).as_secs_f64()),
        recovery: silence.map_or(f64::NAN, |it| dip::recovery(&by_tenth, (WARM_UP, from), it, end)),
        by_tenth,
        // The client does not know.
        stood_still: f64::NAN,
        latency_before: latency(WARM_UP, from),
        latency_during: latency(from, to),
        latency_after: latency(to, end),
    };
    (served, longest)
}

/// The median of times, in nanoseconds; not a number where there are none.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_nanos() as f64)
}

/// A connection to redis.
struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects where redis answers.
    fn new(to: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&to, ANSWERS)?;
        stream.set_read_timeout(Some(ANSWERS))?;
        stream.set_nodelay(true)?;
        let mut this = Self { stream: BufReader::new(stream) };
        this.stream.get_mut().write_all(b"PING\r\n")?;
        this.answer()?;
        Ok(this)
    }

    /// Reads an answer, which must be a value or an acknowledgement.
    fn answer(&mut self) -> io::Result<()> {
        match answer(&mut self.stream)? {
            Answered::Value(_) => Ok(()),
            Answered::Line(said) if ["OK", "PONG"].contains(&said.as_str()) => Ok(()),
            Answered::Line(said) => Err(io::Error::other(format!("it says {said:?}"))),
        }
    }

    /// Reads an answer that is a text.
    fn said(&mut self) -> io::Result<String> {
        match answer(&mut self.stream)? {
            Answered::Value(value) => Ok(String::from_utf8_lossy(&value).into_owned()),
            Answered::Line(said) => Ok(said),
        }
    }
}

/// What redis answers.
#[derive(Debug, PartialEq, Eq)]
enum Answered {
    /// A line.
    Line(String),
    /// The value of a key, or a longer text.
    Value(Vec<u8>),
}

/// Reads an answer. An error of redis is one here, too, and so is a value that is missing: all keys have values.
fn answer(stream: &mut impl BufRead) -> io::Result<Answered> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let said = line.trim_end();
    if let Some(text) = said.strip_prefix('+') {
        return Ok(Answered::Line(text.to_owned()));
    }
    let other = || io::Error::other(format!("it says {said:?}"));
    let length = said.strip_prefix('$').and_then(|it| it.parse::<usize>().ok());
    let length = length.ok_or_else(other)?;
    let mut value = vec![0; length + 2];
    stream.read_exact(&mut value)?;
    value.truncate(length);
    Ok(Answered::Value(value))
}

/// Adds a request to set the key of a number to random bytes, as redis takes it (RESP): the number of its words, and each with its
/// length.
fn set(requests: &mut Vec<u8>, number: u64, random: &mut fastrand::Rng) {
    let mut head = String::from("*3\r\n$3\r\nSET\r\n");
    word(&mut head, number);
    let _ = write!(head, "${VALUE}\r\n");
    requests.extend_from_slice(head.as_bytes());
    let from = requests.len();
    requests.resize(from + VALUE, 0);
    random.fill(&mut requests[from..]);
    requests.extend_from_slice(b"\r\n");
}

/// Adds a request for the value of the key of a number.
fn get(requests: &mut Vec<u8>, number: u64) {
    let mut text = String::from("*2\r\n$3\r\nGET\r\n");
    word(&mut text, number);
    requests.extend_from_slice(text.as_bytes());
}

fn word(text: &mut String, number: u64) {
    let key = format!("key-{number}");
    let _ = write!(text, "${}\r\n{key}\r\n", key.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_as_redis_takes_them() {
        let mut requests = Vec::new();
        get(&mut requests, 10);
        assert_eq!(requests, b"*2\r\n$3\r\nGET\r\n$6\r\nkey-10\r\n");
        requests.clear();
        set(&mut requests, 7, &mut fastrand::Rng::with_seed(1));
        let head = b"*3\r\n$3\r\nSET\r\n$5\r\nkey-7\r\n$1000\r\n";
        assert!(requests.starts_with(head) && requests.ends_with(b"\r\n"));
        assert_eq!(requests.len(), head.len() + VALUE + 2);
    }

    #[test]
    fn what_was_answered_around_a_move_is_counted_where_it_belongs() {
        let at = |sent: u64, answered: u64| {
            (Duration::from_millis(sent), Duration::from_millis(answered))
        };
        // 10 in a second until 4 s, nothing until 5.5 s, 5 in a second until 9.5 s; one waits from 3.9 s to 5.5 s.
        let mut answers: Vec<_> =
            (0..39).map(|number| at(number * 100, number * 100 + 50)).collect();
        answers.push(at(3900, 5500));
        answers.extend((0..19).map(|number| at(5550 + number * 200, 5600 + number * 200)));
        // The slowest of all was before.
        answers[0].1 = Duration::from_millis(2000);
        let times = (Duration::from_secs(4), Duration::from_secs(6));
        let (served, longest) = summarize(&answers, times, Duration::from_millis(9500));
        assert_eq!(longest, Duration::from_millis(1600));
        let by_second: Vec<u64> = served.by_tenth.chunks(10).map(|it| it.iter().sum()).collect();
        assert_eq!(
            (served.by_tenth.len(), &by_second[..]),
            (95, &[9, 10, 11, 9, 0, 3, 5, 5, 5, 2][..])
        );
        // Nothing was answered from 3.85 s to 5.5 s, and half as much from then on.
        assert!((served.silence - 1.65).abs() < 1e-9, "{served:?}");
        assert!((served.recovery - 5.65).abs() < 1e-9, "{served:?}");
        assert_eq!((served.before, served.during), (10.0, 1.5));
        assert!((served.after - 17.0 / 3.5).abs() < 1e-9, "{served:?}");
        // One of three took longer while it moved.
        let latencies = [served.latency_before, served.latency_during, served.latency_after];
        assert_eq!(latencies, [50e6, 50e6, 50e6]);
        let (alone, _) = summarize(&answers[39..40], times, Duration::from_millis(9500));
        assert_eq!(alone.latency_during, 1600e6);
        assert!(alone.latency_before.is_nan() && alone.latency_after.is_nan(), "{alone:?}");
    }

    #[test]
    fn an_answer_is_a_line_a_value_or_an_error() {
        let read = |bytes: &[u8]| answer(&mut &bytes[..]);
        let line = |text: &str| Answered::Line(text.to_owned());
        assert_eq!(read(b"+OK\r\n").unwrap(), line("OK"));
        let begun = "Background append only file rewriting started";
        assert_eq!(read(format!("+{begun}\r\n").as_bytes()).unwrap(), line(begun));
        let mut two = &b"$5\r\na\r\nbc\r\n+PONG\r\n"[..];
        assert_eq!(answer(&mut two).unwrap(), Answered::Value(b"a\r\nbc".to_vec()));
        assert_eq!(answer(&mut two).unwrap(), line("PONG"));
        for wrong in [&b"-ERR no\r\n"[..], b"$-1\r\n", b":7\r\n", b"$5\r\nab", b""] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_guest_that_is_not_there_is_named() {
        let why = image(Some(Path::new("/nonexistent"))).unwrap_err();
        assert!(why.contains("no guest at /nonexistent"), "{why}");
    }
}
