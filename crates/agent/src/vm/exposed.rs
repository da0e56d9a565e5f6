//! A disk that is exposed to an operator's tools for as long as the client holds its stream.
//!
//! ```text
//!  VM off      opened, locked ─► filter of its own ─► held ─► flushed, ended, directory removed
//!  VM runs     held: connections go to the NBD that its filter has beside the guest
//!  a snapshot  opened without a lock, as nobody writes there ─► filter of its own ─► as that of a VM that is off
//!
//!  held:       until the client releases it, disconnects or goes silent, the filter ends, or it is cancelled
//! ```
//! It is one of the VM's [`super::jobs`], so the VM does not start meanwhile, and nothing else is done with
//! the disk: what a snapshot keeps is not removed or merged. All are cancelled when a guest that runs ends. When the agent
//! dies, the filter remains; the next agent sweeps it together with those of imports.

use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until, timeout};
use vmseal_api::expose::{HOLD_TIMEOUT, LET_GO};
use vmseal_api::host::{ConsoleStream, DiskFacts, DiskSpec, Exposing, Notice, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::bitmap_files::BitmapFiles;
use super::report::{Progress, Report};
use super::running::disk_errors;
use super::{Reply, internal};
use crate::filter::{self, Control, FilterError};
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::storage::builder::{self, DiskBuilder};
use crate::storage::locked::Access;
use crate::storage::opening::{self, Open};
use crate::storage::{mirror, open};

/// Requests for connections that may wait.
const WAITING_MAX: usize = 16;

/// The longest error text that a client is sent, in bytes.
const WORDS_MAX: usize = 4096;

/// What a client is told when the guest has ended.
const VM_STOPPED: &str = "its VM was stopped, which ends this. Expose it again";

/// How often the disk's own filter is checked for errors.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The socket of the disk's own filter.
const SOCKET: &str = "nbd";

/// Requests for connections, sent to the task that serves an exposed disk.
type ConnectionSender = mpsc::Sender<Reply<ConsoleStream>>;

/// A disk that is exposed, as the VM's owner knows it.
pub struct ExposedDisk {
    /// Where requests for connections go.
    pub connections: ConnectionSender,
    /// Whether the filter of the running VM serves it: it ends with that filter.
    pub beside: bool,
}

/// What serves the disk.
pub enum Source {
    /// Its own filter, not started yet.
    Own(Box<DiskToServe>),
    /// The filter of the running VM, at this socket.
    Beside(PathBuf),
}

/// A disk to serve with a filter of its own: while its VM is off, or what a snapshot keeps of it.
pub struct DiskToServe {
    /// The VM.
    pub spec: VmSpec,
    /// The disk, one of the VM's.
    pub disk: DiskSpec,
    /// The facts that are pinned of it.
    pub facts: DiskFacts,
    /// The VM's KEK, where the disk is to be decrypted.
    pub kek: Option<SecretBytes>,
    /// What of it.
    pub what: Exposing,
    /// Where its dirty bitmaps may be kept, which changes would not be in.
    pub bitmaps: BitmapFiles,
}

/// A new exposure.
pub struct Exposure {
    disk: DiskId,
    source: Source,
    /// The client waits for its stream.
    holder: Reply<ConsoleStream>,
    connections: mpsc::Receiver<Reply<ConsoleStream>>,
}

impl Exposure {
    /// An exposure for this client, as it is served and as it is known.
    pub fn new(disk: DiskId, source: Source, holder: Reply<ConsoleStream>) -> (Self, ExposedDisk) {
        let (sender, connections) = mpsc::channel(WAITING_MAX);
        let beside = matches!(source, Source::Beside(_));
        let known = ExposedDisk { connections: sender, beside };
        (Self { disk, source, holder, connections }, known)
    }

    pub fn disk(&self) -> DiskId {
        self.disk
    }

    /// Serves until it ends. Keep the client's stream until the disk is known to be free.
    pub async fn serve(
        self,
        builder: DiskBuilder,
        show: Progress,
        mut cancelled: oneshot::Receiver<()>,
    ) -> Option<DuplexStream> {
        let Self { disk, source, holder, mut connections } = self;
        let holder =
            serve(disk, source, holder, &mut connections, (builder, show), &mut cancelled).await;
        // Requests that came too late.
        connections.close();
        while let Ok(connection) = connections.try_recv() {
            let what = "the disk is not exposed any more";
            let _ = connection.send(Err(Problem::new(ErrorCode::WrongState, what)));
        }
        holder
    }
}

async fn serve(
    disk: DiskId,
    source: Source,
    holder: Reply<ConsoleStream>,
    connections: &mut mpsc::Receiver<Reply<ConsoleStream>>,
    (builder, show): (DiskBuilder, Progress),
    cancelled: &mut oneshot::Receiver<()>,
) -> Option<DuplexStream> {
    let own = match source {
        Source::Own(own) => own,
        Source::Beside(socket) => {
            let mut held = Held { socket, holder: admit(holder), connections };
            let ended = held.until_the_end(cancelled, std::future::pending::<()>()).await;
            if matches!(ended, End::Cancelled) {
                held.tell(VM_STOPPED).await;
            }
            return Some(held.holder);
        }
    };
    let directory = &builder.directory;
    let spec = own.spec.clone();
    let started = tokio::select! {
        started = start(*own, &builder) => started,
        _ = &mut *cancelled => Err(Problem::new(ErrorCode::Cancelled, "the exposure was cancelled")),
    };
    match started {
        Ok((process, _slot)) => {
            let socket = directory.socket(SOCKET);
            let mut held = Held { socket, holder: admit(holder), connections };
            let mut check =
                ErrorCheck { spec, control: Control::of(directory), show, told: Vec::new() };
            let ended = held.until_the_end(cancelled, check.until(process.ended())).await;
            let stopped = matches!(ended, End::Cancelled).then(|| VM_STOPPED.to_owned());
            let wrong = match ended {
                End::Served(exit) => Some(filter::ended(exit, directory).to_string()),
                End::Released | End::Cancelled => {
                    let errors = check.look().await;
                    let end = end(disk, &check.control, &process).await;
                    end.err().map(|error| error.to_string()).or(errors).or(stopped)
                }
            };
            if let Some(wrong) = wrong {
                held.tell(&wrong).await;
            }
            sweep(disk, directory).await;
            Some(held.holder)
        }
        Err(problem) => {
            // The filter first: it has the disk open.
            sweep(disk, directory).await;
            let _ = holder.send(Err(problem));
            None
        }
    }
}

async fn sweep(disk: DiskId, directory: &ProcessDir) {
    if let Err(error) = directory.sweep().await {
        tracing::warn!(%disk, %error, "cannot remove the directory of an exposed disk");
    }
}

/// Gives the client its stream; ours ends at once if the client is gone.
fn admit(holder: Reply<ConsoleStream>) -> DuplexStream {
    let (ours, theirs) = duplex(WORDS_MAX);
    let _ = holder.send(Ok(Box::new(theirs)));
    ours
}

/// Opens what is to be served; also returns its length in bytes. Blocks.
fn opened(
    (spec, disk, facts): (&VmSpec, &DiskSpec, &DiskFacts),
    kek: Option<&SecretBytes>,
    what: Exposing,
) -> Result<(Open, u64), Problem> {
    let open = match what {
        Exposing::HoldSealed => return open::open_sealed(spec, disk, facts),
        Exposing::HoldKept { snapshot, sealed: true } => {
            return opening::open_sealed_kept(spec, disk, facts, snapshot);
        }
        Exposing::HoldKept { snapshot, sealed: false } => {
            opening::open_kept(spec, disk, facts, kek, snapshot)
        }
        Exposing::Hold { writable: true } => open::open(spec, disk, facts, kek, Access::Write),
        Exposing::Hold { writable: false } | Exposing::Connect => {
            open::open(spec, disk, facts, kek, Access::Read)
        }
    };
    Ok((open?, disk.size))
}

async fn start(
    own: DiskToServe,
    builder: &DiskBuilder,
) -> Result<(Process, crate::process::users::Slot), Problem> {
    let slot = builder.users.take().ok_or_else(builder::too_many)?;
    let directory = &builder.directory;
    // A filter of an earlier attempt is ended, which releases the disk.
    directory.renew().await.map_err(internal)?;
    let DiskToServe { spec, disk, facts, kek, what, bitmaps } = own;
    let (vm, writable) = (spec.vm, what == Exposing::Hold { writable: true });
    let (of, opening) = (spec.clone(), disk.clone());
    let open = move || {
        if writable {
            bitmaps.distrust(opening.disk)?;
        }
        opened((&of, &opening, &facts), kek.as_ref(), what)
    };
    let (open, size) = spawn_blocking(open).await.map_err(internal)??;
    let replica = match writable {
        true => mirror::replica_for_writer(&spec, &disk, &open.file, open.offset).await?,
        false => None,
    };
    let socket = directory.listen(SOCKET).map_err(internal)?;
    let work = filter::Work::Expose { socket, writable };
    let served = filter::Disk { replica, size, ..open.into_disk(&disk, work) };
    let (process, keys) =
        filter::start(&builder.filter, vm, directory, vec![served], slot.filter())
            .await
            .map_err(internal)?;
    Control::of(directory).ready(&process, directory).await.map_err(internal)?;
    drop(keys);
    Ok((process, slot))
}

/// Checks whether an exposed disk answers with errors.
struct ErrorCheck {
    spec: VmSpec,
    control: Control,
    show: Progress,
    /// The notices that were reported last.
    told: Vec<Notice>,
}

impl ErrorCheck {
    /// Checks periodically until the filter ends.
    async fn until<T>(&mut self, ended: impl Future<Output = T>) -> T {
        tokio::pin!(ended);
        loop {
            if let Ok(ended) = timeout(CHECK_INTERVAL, &mut ended).await {
                return ended;
            }
            self.look().await;
        }
    }

    /// The error, which is also reported to operators if it is new.
    async fn look(&mut self) -> Option<String> {
        let Ok(status) = self.control.status().await else { return None };
        let errors: Vec<Notice> = disk_errors(&self.spec, &status).collect();
        if errors != self.told {
            self.told.clone_from(&errors);
            self.show.tell(Report::ExposedErrors(errors.clone())).await;
        }
        errors.into_iter().next().map(|notice| notice.detail)
    }
}

/// Has the filter flush and exit.
async fn end(disk: DiskId, control: &Control, process: &Process) -> Result<(), FilterError> {
    let ended = control.shut_down().await;
    match &ended {
        Ok(()) => drop(process.end_within(filter::SHUTDOWN_TIMEOUT).await),
        Err(error) => {
            tracing::warn!(%disk, %error, "the filter of an exposed disk did not end cleanly");
            process.kill();
            process.ended().await;
        }
    }
    ended
}

/// Why an exposure ended.
enum End<T> {
    /// Its client let it go or is gone, or its owner is.
    Released,
    /// The guest has ended.
    Cancelled,
    /// What served it has.
    Served(T),
}

/// An exposure in progress.
struct Held<'a> {
    socket: PathBuf,
    holder: DuplexStream,
    connections: &'a mut mpsc::Receiver<Reply<ConsoleStream>>,
}

impl Held<'_> {
    /// Waits for the end; `ended` is that of what serves it.
    async fn until_the_end<T>(
        &mut self,
        cancelled: &mut oneshot::Receiver<()>,
        ended: impl Future<Output = T>,
    ) -> End<T> {
        tokio::pin!(ended);
        let mut silent_until = Instant::now() + HOLD_TIMEOUT;
        let mut said = [0; 64];
        loop {
            tokio::select! {
                read = self.holder.read(&mut said) => match read {
                    Ok(count @ 1..) if !said[..count].contains(&LET_GO) => {
                        silent_until = Instant::now() + HOLD_TIMEOUT;
                    }
                    _ => return End::Released,
                },
                () = sleep_until(silent_until) => {
                    tracing::info!("the client of an exposed disk has gone silent; the exposure ends");
                    return End::Released;
                }
                connection = self.connections.recv() => match connection {
                    Some(connection) => self.connect(connection).await,
                    None => return End::Released,
                },
                cancelled = &mut *cancelled => {
                    return if cancelled.is_ok() { End::Cancelled } else { End::Released };
                }
                ended = &mut ended => return End::Served(ended),
            }
        }
    }

    async fn connect(&self, connection: Reply<ConsoleStream>) {
        let connected = UnixStream::connect(&self.socket).await;
        let stream = connected.map(|stream| Box::new(stream) as ConsoleStream).map_err(internal);
        // The client may have gone meanwhile.
        let _ = connection.send(stream);
    }

    /// Sends the client the error.
    async fn tell(&mut self, wrong: &str) {
        let words = &wrong.as_bytes()[..wrong.floor_char_boundary(WORDS_MAX)];
        // It may have gone meanwhile, and there is room for the text at once.
        let _ = self.holder.write_all(words).await;
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::expose::{HOLD, HOLD_INTERVAL};

    use super::*;

    /// Runs an exposure of a socket that nobody listens on; says whether it was cancelled.
    fn held() -> (tokio::task::JoinHandle<bool>, DuplexStream, oneshot::Sender<()>, ConnectionSender)
    {
        let (ours, theirs) = duplex(64);
        let (cancel, mut cancelled) = oneshot::channel();
        let (sender, mut connections) = mpsc::channel(1);
        let task = tokio::spawn(async move {
            let (socket, connections) = ("/nowhere".into(), &mut connections);
            let mut held = Held { socket, holder: ours, connections };
            let ended = held.until_the_end(&mut cancelled, std::future::pending::<()>()).await;
            matches!(ended, End::Cancelled)
        });
        (task, theirs, cancel, sender)
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_with_its_client_or_when_the_client_is_silent_or_when_cancelled() {
        let (task, holder, _cancel, _sender) = held();
        drop(holder);
        assert!(!task.await.unwrap());
        let (task, mut holder, _cancel, _sender) = held();
        holder.write_all(&[LET_GO]).await.unwrap();
        assert!(!task.await.unwrap());
        let (task, _holder, cancel, _sender) = held();
        cancel.send(()).unwrap();
        assert!(task.await.unwrap(), "its client is not told why");
        let (task, _holder, cancel, _sender) = held();
        drop(cancel);
        assert!(!task.await.unwrap(), "its VM was not stopped");
        let (task, mut holder, _cancel, sender) = held();
        for _ in 0..10 {
            tokio::time::sleep(HOLD_INTERVAL).await;
            holder.write_all(&[HOLD]).await.unwrap();
            assert!(!task.is_finished());
        }
        let (connection, answer) = oneshot::channel();
        sender.send(connection).await.unwrap();
        assert!(answer.await.unwrap().is_err(), "a refused connection ended the exposure");
        let silent = Instant::now();
        assert!(!task.await.unwrap());
        assert!(silent.elapsed() <= HOLD_TIMEOUT);
    }
}
