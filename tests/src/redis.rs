//! A client of redis that is outside of a guest and writes all the time: what was acknowledged, and how long it had to wait.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::eventually;

/// How long a request may remain unanswered: longer than any guest stands still, and than TCP takes to send again what was lost.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many requests are sent before an answer is read, where many are read back.
const BATCH: u64 = 500;

/// A connection.
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects to `10.77.0.10:6379`, as soon as redis answers there.
    pub fn new(to: &str) -> anyhow::Result<Self> {
        let address: SocketAddr = to.parse()?;
        eventually(&format!("redis answers at {to}"), || {
            let stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
            stream.set_read_timeout(Some(PATIENCE)).ok()?;
            stream.set_nodelay(true).ok()?;
            let mut this = Self { stream: BufReader::new(stream) };
            this.send(&["PING"]).ok()?;
            (this.line().ok()? == "+PONG").then_some(this)
        })
    }

    fn send(&mut self, words: &[&str]) -> anyhow::Result<()> {
        Ok(self.stream.get_mut().write_all(request(words).as_bytes())?)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).context("redis does not answer")?;
        ensure!(read > 0, "redis has ended the connection");
        Ok(line.trim_end().to_owned())
    }

    /// Sets a key, and waits until that is acknowledged.
    pub fn set(&mut self, key: &str, value: &str) -> anyhow::Result<()> {
        self.send(&["SET", key, value])?;
        let answer = self.line()?;
        ensure!(answer == "+OK", "SET {key}: {answer}");
        Ok(())
    }

    /// The number of keys.
    pub fn count(&mut self) -> anyhow::Result<u64> {
        self.send(&["DBSIZE"])?;
        let answer = self.line()?;
        let number = answer.strip_prefix(':').and_then(|number| number.parse().ok());
        number.with_context(|| format!("DBSIZE: {answer}"))
    }

    /// The value of a key that was asked for; none of one that is not there.
    fn value(&mut self) -> anyhow::Result<Option<String>> {
        let length = self.line()?;
        match length.strip_prefix('$') {
            Some("-1") => Ok(None),
            Some(_) => self.line().map(Some),
            None => anyhow::bail!("GET: {length}"),
        }
    }
}

/// A request as redis takes it (RESP): the number of its words, and each with its length.
fn request(words: &[&str]) -> String {
    let word = |word: &&str| format!("${}\r\n{word}\r\n", word.len());
    format!("*{}\r\n{}", words.len(), words.iter().map(word).collect::<String>())
}

/// The key and the value of a number: values differ from keys, and from each other.
fn pair(number: u64) -> (String, String) {
    (format!("key-{number}"), format!("value-{}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// Sets one key after the other by a thread of its own, each as soon as the one before is acknowledged, by one connection.
pub struct Writer {
    thread: JoinHandle<anyhow::Result<()>>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    ends: AtomicBool,
    /// How many are acknowledged: all keys below this number.
    acknowledged: AtomicU64,
    /// The longest that one has taken, in nanoseconds, since somebody asked.
    longest: AtomicU64,
}

impl Writer {
    /// Begins.
    pub fn begin(to: &str) -> anyhow::Result<Self> {
        let mut connection = Connection::new(to)?;
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let write = move || {
            for number in 0.. {
                if of_thread.ends.load(Ordering::Relaxed) {
                    break;
                }
                let ((key, value), begun) = (pair(number), Instant::now());
                connection.set(&key, &value)?;
                let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
                of_thread.longest.fetch_max(took, Ordering::Relaxed);
                of_thread.acknowledged.store(number + 1, Ordering::Relaxed);
            }
            Ok(())
        };
        Ok(Self { thread: std::thread::spawn(write), shared })
    }

    /// How many are acknowledged by now.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.shared.acknowledged.load(Ordering::Relaxed)
    }

    /// The longest that one has taken since this was asked last.
    #[must_use]
    pub fn longest(&self) -> Duration {
        Duration::from_nanos(self.shared.longest.swap(0, Ordering::Relaxed))
    }

    /// Waits until more are acknowledged than by now: what was under way when something happened is not enough.
    pub fn goes_on(&self) -> anyhow::Result<()> {
        let before = self.acknowledged();
        eventually("more is acknowledged", || {
            (self.acknowledged() > before + 10 || self.thread.is_finished()).then_some(())
        })?;
        ensure!(!self.thread.is_finished(), "the client has ended");
        Ok(())
    }

    /// Ends; how many are acknowledged.
    pub fn end(self) -> anyhow::Result<u64> {
        self.shared.ends.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended.map_err(|_| anyhow::anyhow!("the client panicked"))??;
        Ok(self.shared.acknowledged.load(Ordering::Relaxed))
    }
}

/// Reads back what a [`Writer`] was acknowledged; the keys that are not there, or have another value.
pub fn lost(to: &str, acknowledged: u64) -> anyhow::Result<Vec<String>> {
    let mut connection = Connection::new(to)?;
    let (mut asked, mut lost) = (Vec::new(), Vec::new());
    for begin in (0..acknowledged).step_by(usize::try_from(BATCH)?) {
        let pairs = (begin..acknowledged.min(begin + BATCH)).map(pair);
        let mut requests = String::new();
        for (key, value) in pairs {
            requests.push_str(&request(&["GET", &key]));
            asked.push((key, value));
        }
        connection.stream.get_mut().write_all(requests.as_bytes())?;
        for (key, value) in asked.drain(..) {
            let found = connection.value()?;
            if found.as_ref() != Some(&value) {
                lost.push(format!("{key}: {found:?} in place of {value}"));
            }
        }
    }
    Ok(lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_length_of_each_word() {
        assert_eq!(request(&["GET", "key-10"]), "*2\r\n$3\r\nGET\r\n$6\r\nkey-10\r\n");
    }
}
