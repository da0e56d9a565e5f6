//! QMP, the language of QEMU's monitor (docs/interop/qmp-spec.txt): one JSON object a line.
//!
//! ```text
//! connect ─► greeting ─► qmp_capabilities ─► ┌ execute(id) ─► return | error, by id
//!                                            └ events, in order, to one receiver
//! ```
//! A task owns the reading half; callers write under a lock and wait for the reply with their id. When
//! the connection ends, every waiting call ends with [`QmpError::Closed`] and the event stream ends.

mod line;
#[cfg(test)]
pub(crate) mod recording;
mod wire;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use line::LineReader;
pub use wire::{Event, ShutdownReason};
use wire::{Incoming, Request};

/// The longest line that is taken from QEMU, in bytes; `query-qmp-schema`, the longest answer known, has
/// about 200 KiB.
const LINE_MAX: usize = 4 * 1024 * 1024;

/// The longest that QEMU may take for its greeting: under emulation, on a busy machine, with much memory.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest that a command may take, unless more is allowed ([`Qmp::execute_within`]).
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(20);

/// How many events may wait for the receiver. When it is full, reading waits.
const EVENTS_MAX: usize = 256;

/// Why a command failed, or may have failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket does not work.
    #[error("QEMU's monitor: {0}")]
    Io(#[from] io::Error),
    /// QEMU has ended, or closed the connection.
    #[error("QEMU's monitor has closed the connection")]
    Closed,
    /// No answer in time.
    #[error("QEMU's monitor has not answered '{command}' within {seconds} s")]
    TimedOut {
        /// Which command.
        command: String,
        /// How long was waited.
        seconds: u64,
    },
    /// QEMU said no.
    #[error("QEMU refuses '{command}': {description}")]
    Refused {
        /// Which command.
        command: String,
        /// QEMU's class of error.
        class: String,
        /// What QEMU says.
        description: String,
    },
    /// Not QMP.
    #[error("QEMU's monitor does not speak QMP: {0}")]
    Protocol(String),
}

type Waiting = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Result<Value, (String, String)>>>>>>;

/// A connection to QEMU's monitor.
pub struct Qmp {
    stream: Arc<UnixStream>,
    writer: tokio::sync::Mutex<()>,
    waiting: Waiting,
    next_id: AtomicU64,
}

impl std::fmt::Debug for Qmp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qmp").finish_non_exhaustive()
    }
}

impl Qmp {
    /// Connects and negotiates. The second value receives QEMU's events.
    ///
    /// # Errors
    /// [`QmpError`], also without a greeting within [`GREETING_TIMEOUT`].
    pub async fn connect(path: &Path) -> Result<(Self, mpsc::Receiver<Event>), QmpError> {
        let stream = Arc::new(UnixStream::connect(path).await?);
        let mut lines = LineReader::new(stream.clone(), LINE_MAX);
        let greeting = timeout(GREETING_TIMEOUT, lines.next())
            .await
            .map_err(|_| time_out("greeting", GREETING_TIMEOUT))??
            .ok_or(QmpError::Closed)?;
        match wire::parse(&greeting)? {
            Incoming::Greeting => {}
            Incoming::Event(_) | Incoming::Answer { .. } => {
                return Err(QmpError::Protocol("it does not begin with a greeting".to_owned()));
            }
        }
        let waiting: Waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        tokio::spawn(read(lines, waiting.clone(), events));
        let qmp = Self {
            stream,
            writer: tokio::sync::Mutex::new(()),
            waiting,
            next_id: AtomicU64::new(1),
        };
        qmp.execute("qmp_capabilities", Value::Null).await?;
        Ok((qmp, receiver))
    }

    /// Executes a command; `arguments` is an object, or null for none.
    ///
    /// # Errors
    /// [`QmpError`]; after [`QmpError::TimedOut`] the command may or may not have been executed.
    pub async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, COMMAND_TIMEOUT).await
    }

    /// The same with another limit: QEMU answers nothing while it sends the rest of its guest's memory.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        self.execute_with(command, arguments, None, limit).await
    }

    /// Passes a descriptor to QEMU under a name (`getfd`).
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn pass_descriptor(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        let arguments = serde_json::json!({ "fdname": name });
        self.execute_with("getfd", arguments, Some(fd), COMMAND_TIMEOUT).await.map(drop)
    }

    /// Passes a descriptor to QEMU in a set of descriptors of its own (`add-fd`); QEMU's answer.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub async fn add_descriptor(&self, fd: BorrowedFd<'_>) -> Result<Value, QmpError> {
        self.execute_with("add-fd", Value::Null, Some(fd), COMMAND_TIMEOUT).await
    }

    async fn execute_with(
        &self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        locked(&self.waiting).as_mut().ok_or(QmpError::Closed)?.insert(id, reply);
        let line = Request { execute: command, arguments, id }.to_line()?;
        let exchange = async {
            let _turn = self.writer.lock().await;
            wire::send(&self.stream, &line, fd).await?;
            answer.await.map_err(|_| QmpError::Closed)
        };
        let result = timeout(limit, exchange).await;
        if let Some(waiting) = locked(&self.waiting).as_mut() {
            waiting.remove(&id);
        }
        match result {
            Err(_) => Err(time_out(command, limit)),
            Ok(Err(error)) => Err(error),
            Ok(Ok(Ok(value))) => Ok(value),
            Ok(Ok(Err((class, description)))) => {
                Err(QmpError::Refused { command: command.to_owned(), class, description })
            }
        }
    }
}

impl Drop for Qmp {
    /// Stops the reading task.
    fn drop(&mut self) {
        if let Err(error) = nix::sys::socket::shutdown(
            std::os::fd::AsRawFd::as_raw_fd(&self.stream.as_fd()),
            nix::sys::socket::Shutdown::Both,
        ) {
            tracing::debug!(%error, "the monitor's connection is closed already");
        }
    }
}

fn time_out(command: &str, after: Duration) -> QmpError {
    crate::filter::metrics::QMP_TIMEOUTS.add();
    QmpError::TimedOut { command: command.to_owned(), seconds: after.as_secs() }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads until the connection ends.
async fn read(mut lines: LineReader, waiting: Waiting, events: mpsc::Sender<Event>) {
    loop {
        let incoming = match lines.next().await {
            Ok(Some(line)) => wire::parse(&line),
            Ok(None) => break,
            Err(error) => Err(error),
        };
        match incoming {
            Ok(Incoming::Answer { id, result }) => {
                let reply = locked(&waiting).as_mut().and_then(|waiting| waiting.remove(&id));
                if let Some(reply) = reply {
                    // The caller may have stopped waiting.
                    let _ = reply.send(result);
                }
            }
            Ok(Incoming::Event(event)) => {
                // The VM's owner is gone: events are dropped, and calls are still answered.
                let _ = events.send(event).await;
            }
            Ok(Incoming::Greeting) => {}
            Err(error) => {
                tracing::warn!(%error, "the monitor's connection failed");
                break;
            }
        }
    }
    // Dropping the senders ends every waiting call; `None` refuses later ones.
    *locked(&waiting) = None;
}

#[cfg(test)]
mod tests;
