//! The agent's side of a `vmseal-filter` process: starts it with open descriptors and talks to it over its
//! control socket ([`vmseal_api::filter`]).

mod channel;
mod disk;
pub(crate) mod log_level;
pub(crate) mod metrics;
pub(crate) mod pace;
mod stacks;

use std::fs::File;
use std::io;
use std::io::{PipeReader, PipeWriter, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::filter::{
    BitmapChange, BitmapStatus, ControlReply, ControlRequest, FilterConfig, FilterFigures,
    FilterStatus, Handle, LINE_MAX, VERSION,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::ErrorCode;
use vmseal_api::request_id;
use vmseal_secret::SecretFd;

use self::channel::Channels;
pub use self::channel::of_disk as channel_of;
pub use self::disk::{
    Conversion, CopyPlace, Disk, Lower, Mirror, Replica, Shared, Sums, Volume, Work,
};
pub use self::stacks::{NewLayers, Waiting};
use crate::process::run_dir::ProcessDir;
use crate::process::{self, Launch, Process, User};

/// The name of the process in its directory.
pub const NAME: &str = "filter";

/// The longest that a filter may take until it answers: it locks its memory and opens its disks.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// The longest that a status may take; the filter does no disk I/O for it.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest that flush and exit may take: a slow datastore with data that the kernel has not written yet.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

/// The longest that a disk may take to pivot: its requests end, the rest is copied, and all is flushed; the filter itself
/// gives up before.
const PIVOT_TIMEOUT: Duration = Duration::from_secs(60);

/// The pause between status requests while a filter starts.
const READY_INTERVAL: Duration = Duration::from_millis(20);

/// How long after its socket the end of a process may be noticed: the kernel closes files first.
pub const END_SEEN_WITHIN: Duration = Duration::from_secs(1);

/// Why a request to a filter failed.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The socket or process does not work.
    #[error("the filter process: {0}")]
    Io(#[from] io::Error),
    /// It has ended.
    #[error("the filter process {exit}, {said}")]
    Ended {
        /// How it ended.
        exit: process::Exit,
        /// The end of its log.
        said: String,
    },
    /// No answer in time.
    #[error("the filter process does not respond")]
    TimedOut,
    /// The filter reports an error.
    #[error("the filter process: {message}")]
    Refused {
        /// The error code.
        code: ErrorCode,
        /// The error text.
        message: String,
    },
    /// An answer of the wrong kind.
    #[error("unexpected answer of the filter process: {0}")]
    Protocol(String),
}

/// A socket that the filter has, too, and that this process connects to QEMU when the filter is ready. The filter keeps the
/// connection when this process dies: QEMU before 9.0 takes no other connection after one that ends before it is answered
/// (docs/decisions/020).
pub struct Connection {
    socket: OwnedFd,
    address: PathBuf,
    /// Closed when the socket is connected.
    _pipe: PipeWriter,
}

impl Connection {
    /// A connection to this socket of QEMU, and what the filter gets: the same socket, and the pipe that says when it is
    /// connected.
    ///
    /// # Errors
    /// The process has too many files open.
    pub fn new(address: PathBuf) -> io::Result<(Self, OwnedFd, PipeReader)> {
        let (reader, pipe) = std::io::pipe()?;
        let (family, kind) = (AddressFamily::Unix, SockType::Stream);
        let socket = socket::socket(family, kind, SockFlag::SOCK_CLOEXEC, None)?;
        let of_filter = socket.try_clone()?;
        Ok((Self { socket, address, _pipe: pipe }, of_filter, reader))
    }

    /// Connects.
    ///
    /// # Errors
    /// Those of connect(2).
    pub fn connect(self) -> io::Result<()> {
        let address = UnixAddr::new(&self.address)?;
        Ok(socket::connect(self.socket.as_raw_fd(), &address)?)
    }
}

/// The keys that a filter was given. Keep this until the filter answers: it has read them then. Keys in
/// ordinary memory are wiped when this is dropped.
#[must_use]
pub struct Keys(#[expect(dead_code, reason = "they are wiped when this goes")] Vec<SecretFd>);

/// Starts a filter. All descriptors but those of the keys are closed here when the call returns; the filter
/// keeps the locks.
///
/// # Errors
/// Those of making the socket and starting the process.
pub async fn start(
    program: &File,
    vm: VmId,
    directory: &ProcessDir,
    disks: Vec<Disk>,
    user: Option<u32>,
) -> io::Result<(Process, Keys)> {
    let disks = with_channels(disks).await?;
    launch(program, vm, directory, disks, user, |config| in_memory(config).map(Stdio::from))
}

/// A filter that has started and waits for its configuration: until [`Held::go_on`] it uses none of its files. It ends when
/// this is dropped.
#[must_use]
pub struct Held {
    process: Process,
    keys: Keys,
    config: Vec<u8>,
    input: PipeWriter,
}

impl Held {
    /// Starts a filter as [`start`] does, and holds it.
    ///
    /// # Errors
    /// As [`start`].
    pub async fn start(
        program: &File,
        vm: VmId,
        directory: &ProcessDir,
        disks: Vec<Disk>,
        user: Option<u32>,
    ) -> io::Result<Self> {
        let disks = with_channels(disks).await?;
        let (reader, input) = std::io::pipe()?;
        let mut config = Vec::new();
        let (process, keys) = launch(program, vm, directory, disks, user, |bytes| {
            config = bytes.to_vec();
            Ok(reader.into())
        })?;
        Ok(Self { process, keys, config, input })
    }

    /// Gives it its configuration.
    ///
    /// # Errors
    /// It has ended.
    pub fn go_on(mut self) -> io::Result<(Process, Keys)> {
        // A pipe takes this much at once, and what does not fit when the filter reads it.
        self.input.write_all(&self.config)?;
        Ok((self.process, self.keys))
    }
}

/// The disks with channels for their images, on a thread that may wait for `vmseal-rbd`.
async fn with_channels(disks: Vec<Disk>) -> io::Result<(Vec<Disk>, Channels)> {
    let connect = move || {
        let channels = Channels::of(disks.iter().flat_map(Disk::images));
        (disks, channels)
    };
    spawn_blocking(connect).await.map_err(io::Error::other)
}

fn launch(
    program: &File,
    vm: VmId,
    directory: &ProcessDir,
    (disks, channels): (Vec<Disk>, Channels),
    user: Option<u32>,
    input: impl FnOnce(&[u8]) -> io::Result<Stdio>,
) -> io::Result<(Process, Keys)> {
    directory.forget_socket(NAME)?;
    let control = directory.listen(NAME)?;
    let own = nix::unistd::geteuid().as_raw();
    let config = FilterConfig {
        version: VERSION,
        vm,
        control: Handle::Fd(control.as_raw_fd()),
        control_uid: Some(own),
        request_id: request_id::current().map(|id| id.to_string()),
        log_levels: Some(vmseal_log::levels().to_string()),
        disks: disks.iter().map(|disk| disk.config(own, &channels)).collect(),
    };
    let launched = process::launch(Launch {
        program,
        name: "vmseal-filter",
        arguments: vec!["--config".into(), "-".into()],
        keep: disks
            .iter()
            .flat_map(Disk::descriptors)
            .chain(channels.descriptors())
            .chain([control.as_fd()])
            .collect(),
        input: input(&serde_json::to_vec(&config)?)?,
        log: directory.log(NAME)?,
        user: user.map(|id| User { id, group: None }),
        locks_memory: true,
        record: &directory.process(NAME),
    })?;
    metrics::FILTERS_STARTED.add();
    Ok((launched, Keys(disks.into_iter().flat_map(Disk::into_keys).collect())))
}

/// A file in memory only.
fn in_memory(contents: &[u8]) -> io::Result<File> {
    use std::io::Seek;
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let mut file = File::from(nix::sys::memfd::memfd_create("filter-config", flags)?);
    file.write_all(contents)?;
    file.rewind()?;
    Ok(file)
}

/// A client of a running filter's control socket.
#[derive(Clone, Debug)]
pub struct Control(PathBuf);

impl Control {
    /// The filter of this directory.
    #[must_use]
    pub fn of(directory: &ProcessDir) -> Self {
        Self(directory.socket(NAME))
    }

    /// Its status.
    ///
    /// # Errors
    /// [`FilterError`].
    pub async fn status(&self) -> Result<FilterStatus, FilterError> {
        match ask(&self.0, &ControlRequest::Status, STATUS_TIMEOUT).await? {
            ControlReply::Status(status) => Ok(status),
            other => Err(unexpected(other)),
        }
    }

    /// The status of a filter that may end meanwhile.
    ///
    /// # Errors
    /// [`FilterError::Ended`], also when the socket shows the end first.
    pub async fn status_of(
        &self,
        process: &Process,
        directory: &ProcessDir,
    ) -> Result<FilterStatus, FilterError> {
        let answer = tokio::select! {
            exit = process.ended() => return Err(ended(exit, directory)),
            answer = self.status() => answer,
        };
        let Err(FilterError::Io(error)) = answer else { return answer };
        match tokio::time::timeout(END_SEEN_WITHIN, process.ended()).await {
            Ok(exit) => Err(ended(exit, directory)),
            Err(_) => Err(error.into()),
        }
    }

    /// Its figures.
    ///
    /// # Errors
    /// [`FilterError`]; a filter of an earlier vmseal does not know the request.
    pub async fn figures(&self) -> Result<FilterFigures, FilterError> {
        match ask(&self.0, &ControlRequest::Figures, STATUS_TIMEOUT).await? {
            ControlReply::Figures(figures) => Ok(figures),
            other => Err(unexpected(other)),
        }
    }

    /// Changes what it logs.
    ///
    /// # Errors
    /// [`FilterError`]; a filter of an earlier vmseal does not know the request.
    pub async fn set_log_level(&self, levels: String) -> Result<(), FilterError> {
        match ask(&self.0, &ControlRequest::SetLogLevel { levels }, STATUS_TIMEOUT).await? {
            ControlReply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Starts, clears or removes a dirty bitmap; returns the disk's bitmaps after that.
    ///
    /// # Errors
    /// [`FilterError`].
    pub async fn change_bitmap(
        &self,
        disk: DiskId,
        name: String,
        change: BitmapChange,
    ) -> Result<Vec<BitmapStatus>, FilterError> {
        let request = ControlRequest::Bitmap { disk, name, change };
        match ask(&self.0, &request, STATUS_TIMEOUT).await? {
            ControlReply::Bitmaps { bitmaps } => Ok(bitmaps),
            other => Err(unexpected(other)),
        }
    }

    /// Has it tell QEMU that a disk has another size than before.
    ///
    /// # Errors
    /// [`FilterError::Refused`] while the guest's driver does not use the disk: QEMU would not look.
    pub async fn announce_size(&self, disk: DiskId) -> Result<(), FilterError> {
        match ask(&self.0, &ControlRequest::AnnounceSize { disk }, STATUS_TIMEOUT).await? {
            ControlReply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Has a mirrored disk copied at this pace from now on.
    ///
    /// # Errors
    /// [`FilterError`]; a filter of an earlier vmseal does not know the request.
    pub async fn set_pace(&self, disk: DiskId, pace: CopyPace) -> Result<(), FilterError> {
        // It sees itself what the guest asks for.
        self.ask_pace(ControlRequest::Pace { disk, pace, rests: false }).await
    }

    /// Has a filter that serves nobody work on a disk at this pace from now on, and with rests where a guest runs beside it.
    /// One of an earlier vmseal, which knows no rests, has the pace alone.
    ///
    /// # Errors
    /// [`FilterError`].
    pub async fn set_work_pace(
        &self,
        disk: DiskId,
        pace: CopyPace,
        rests: bool,
    ) -> Result<(), FilterError> {
        match self.ask_pace(ControlRequest::Pace { disk, pace, rests }).await {
            // It refuses a word that it does not know, and the pace with it.
            Err(FilterError::Refused { code: ErrorCode::InvalidRequest, .. }) if rests => {
                self.ask_pace(ControlRequest::Pace { disk, pace, rests: false }).await
            }
            told => told,
        }
    }

    async fn ask_pace(&self, request: ControlRequest) -> Result<(), FilterError> {
        match ask(&self.0, &request, STATUS_TIMEOUT).await? {
            ControlReply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Has a disk served from its copy from now on.
    ///
    /// # Errors
    /// [`FilterError::Refused`] when the disk is served as before. After any other error either may be the case, and the
    /// copy's map says which.
    pub async fn pivot(&self, disk: DiskId) -> Result<(), FilterError> {
        match ask(&self.0, &ControlRequest::Pivot { disk }, PIVOT_TIMEOUT).await? {
            ControlReply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    /// Waits until it serves.
    ///
    /// # Errors
    /// [`FilterError::Ended`] with the end of its log when it failed to start.
    pub async fn ready(
        &self,
        process: &Process,
        directory: &ProcessDir,
    ) -> Result<FilterStatus, FilterError> {
        let give_up = Instant::now() + READY_TIMEOUT;
        loop {
            // The socket is there before the process: it answers as soon as it can.
            let answer = tokio::select! {
                exit = process.ended() => return Err(ended(exit, directory)),
                answer = self.status() => answer,
            };
            match answer {
                Ok(status) => return Ok(status),
                Err(FilterError::Io(_) | FilterError::TimedOut) if Instant::now() < give_up => {
                    tokio::time::sleep(READY_INTERVAL).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Has it finish its requests, flush and exit. [`FilterError::Refused`] means that something could not be
    /// flushed.
    ///
    /// # Errors
    /// [`FilterError`].
    pub async fn shut_down(&self) -> Result<(), FilterError> {
        match ask(&self.0, &ControlRequest::Shutdown, SHUTDOWN_TIMEOUT).await? {
            ControlReply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }
}

/// The error for a filter that has ended, with the end of its log.
#[must_use]
pub fn ended(exit: process::Exit, directory: &ProcessDir) -> FilterError {
    FilterError::Ended { exit, said: directory.log_ends(NAME) }
}

fn unexpected(reply: ControlReply) -> FilterError {
    match reply {
        ControlReply::Error { code, message } => FilterError::Refused { code, message },
        ControlReply::Bitmaps { .. } => FilterError::Protocol("a disk's dirty bitmaps".to_owned()),
        ControlReply::Status(_) => FilterError::Protocol("its status".to_owned()),
        ControlReply::Figures(_) => FilterError::Protocol("its figures".to_owned()),
        ControlReply::Done => FilterError::Protocol("done".to_owned()),
    }
}

async fn ask(
    socket: &Path,
    request: &ControlRequest,
    limit: Duration,
) -> Result<ControlReply, FilterError> {
    let exchange = async {
        let mut stream = UnixStream::connect(socket).await?;
        let mut line = serde_json::to_vec(request).map_err(io::Error::from)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut answer = Vec::new();
        let mut reader = BufReader::new(stream).take(LINE_MAX as u64 + 1);
        reader.read_until(b'\n', &mut answer).await?;
        match answer.pop() {
            Some(b'\n') => serde_json::from_slice(&answer)
                .map_err(|error| FilterError::Protocol(error.to_string())),
            Some(_) if answer.len() >= LINE_MAX => {
                Err(FilterError::Protocol(format!("more than {LINE_MAX} bytes in a line")))
            }
            _ => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        }
    };
    timeout(limit, exchange).await.map_err(|_| FilterError::TimedOut)?
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWrite;
    use tokio::net::UnixListener;

    use super::*;

    /// Answers one request with these bytes.
    async fn answered(answer: &'static [u8]) -> Result<FilterStatus, FilterError> {
        async fn send(stream: &mut (impl AsyncWrite + Unpin), answer: &[u8]) {
            // The client may stop reading before the end.
            let _ = stream.write_all(answer).await;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("filter.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 64];
            let length = stream.read(&mut request).await.unwrap();
            assert_eq!(&request[..length], b"{\"do\":\"status\"}\n");
            send(&mut stream, answer).await;
        };
        let control = Control(path);
        tokio::join!(control.status(), server).0
    }

    #[tokio::test]
    async fn answers_are_understood_and_wrong_ones_are_errors() {
        let refused = answered(b"{\"answer\":\"error\",\"message\":\"no\"}\n").await.unwrap_err();
        // A filter of an earlier vmseal sends no code.
        assert!(
            matches!(refused, FilterError::Refused { code: ErrorCode::Internal, message } if message == "no")
        );
        let done = answered(b"{\"answer\":\"done\"}\n").await.unwrap_err();
        assert!(matches!(done, FilterError::Protocol(_)));
        assert!(matches!(answered(b"x\n").await.unwrap_err(), FilterError::Protocol(_)));
        assert!(matches!(answered(b"").await.unwrap_err(), FilterError::Io(_)));
        assert!(matches!(answered(b"{\"answer\":").await.unwrap_err(), FilterError::Io(_)));
        static LONG: [u8; LINE_MAX + 10] = [b'x'; LINE_MAX + 10];
        assert!(matches!(answered(&LONG).await.unwrap_err(), FilterError::Protocol(_)));
    }

    #[tokio::test]
    async fn a_filter_that_knows_no_rests_has_the_pace_nevertheless() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("filter.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let disk = DiskId::new();
        let pace = CopyPace { bytes_per_second: None, paused: true };
        let server = async {
            let mut heard = Vec::new();
            for answer in [
                "{\"answer\":\"error\",\"code\":\"invalid-request\",\"message\":\"unknown field `rests`\"}\n",
                "{\"answer\":\"done\"}\n",
            ] {
                let (stream, _) = listener.accept().await.unwrap();
                let (reader, mut writer) = stream.into_split();
                let mut line = String::new();
                BufReader::new(reader).read_line(&mut line).await.unwrap();
                writer.write_all(answer.as_bytes()).await.unwrap();
                heard.push(serde_json::from_str::<ControlRequest>(&line).unwrap());
            }
            heard
        };
        let control = Control(path);
        let (told, heard) = tokio::join!(control.set_work_pace(disk, pace, true), server);
        assert!(told.is_ok(), "{told:?}");
        let with = |rests| ControlRequest::Pace { disk, pace, rests };
        assert_eq!(heard, [with(true), with(false)]);
    }
}
