//! The control socket: one JSON object a line, answered in order ([`vmseal_api::filter`]). Descriptors come with a request
//! ([`super::descriptors`]); those that it does not use are closed.
//!
//! A few connections at a time, a thread each: a new agent can connect while the dead agent's connection
//! is still open.

use std::fs::File;
use std::io::{self, BufRead, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};

use vmseal_api::bitmap::BitmapError;
use vmseal_api::filter::{
    BitmapChange, Confinement, ControlReply, ControlRequest, FilterFigures, FilterStatus, LINE_MAX,
    NewStack, VERSION,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::ErrorCode;

use crate::disk::current::IsRead;
use crate::front_ends::peer;
use crate::handle::Handles;
use crate::layers::replicate::mirror::{Former, NotPivoted, Pivot, Pivoted};
use crate::process::stacks::{self, DRAIN_TIMEOUT, DiskStack, Drained, FormerStack, NotChanged};
use crate::process::{RunningDisk, descriptors};
use crate::stack::chain::Chain;
use crate::stack::orders::NotAsked;

/// The most connections at a time.
const CONNECTIONS_MAX: usize = 8;

/// The stack size of a connection's thread.
const STACK: usize = 256 * 1024;

/// A request to the main thread.
#[derive(Debug)]
pub enum Event {
    /// Finish, flush and end; send the outcome to `reply`, if there is one.
    Shutdown {
        /// Receives the outcome.
        reply: Option<Sender<ControlReply>>,
        /// Disconnected when the outcome has been sent on.
        sent: Option<Receiver<()>>,
    },
}

/// What the socket serves.
pub struct Control {
    /// The VM of the disks.
    pub vm: VmId,
    /// The only user that may connect.
    pub uid: u32,
    /// The disks, in the configuration's order.
    pub disks: Vec<RunningDisk>,
    /// Which restrictions are in force.
    pub confinement: Confinement,
    /// Where to send a shutdown.
    pub events: Sender<Event>,
}

/// Serves connections until the process ends.
pub fn serve(listener: &UnixListener, control: &Arc<Control>) {
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%error, "a control connection was not accepted");
                std::thread::sleep(std::time::Duration::from_millis(100));
                continue;
            }
        };
        if let Err(refusal) = peer::check(&stream, control.uid) {
            tracing::warn!(%refusal, "a control connection is refused");
            continue;
        }
        if open.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
            open.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("too many control connections; the new one is closed");
            continue;
        }
        let (control, open_here) = (Arc::clone(control), Arc::clone(&open));
        let spawned = std::thread::Builder::new().stack_size(STACK).spawn(move || {
            if let Err(error) = control.connection(&stream) {
                tracing::warn!(%error, "a control connection is ended");
            }
            open_here.fetch_sub(1, Ordering::AcqRel);
        });
        if spawned.is_err() {
            open.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Control {
    fn connection(&self, stream: &UnixStream) -> io::Result<()> {
        let (mut reader, descriptors) = descriptors::reader(stream);
        let mut line = Vec::new();
        let mut drained = None;
        loop {
            line.clear();
            let read = reader.by_ref().take(LINE_MAX as u64 + 1).read_until(b'\n', &mut line)?;
            if read == 0 {
                return Ok(());
            }
            if read > LINE_MAX {
                let message = format!("the line is longer than {LINE_MAX} bytes");
                return send(stream, &refusal(ErrorCode::TooLarge, message));
            }
            let passed = descriptors.take();
            match serde_json::from_slice(&line) {
                Ok(ControlRequest::Status) => send(stream, &ControlReply::Status(self.status()))?,
                Ok(ControlRequest::Figures) => {
                    send(stream, &ControlReply::Figures(self.figures()))?;
                }
                Ok(ControlRequest::SetLogLevel { levels }) => {
                    send(stream, &set_log_level(&levels))?;
                }
                Ok(ControlRequest::Bitmap { disk, name, change }) => {
                    send(stream, &self.bitmap(disk, &name, change))?;
                }
                Ok(ControlRequest::ReadBitmap { disk, name }) => {
                    send(stream, &self.read_bitmap(disk, &name, passed))?;
                }
                Ok(ControlRequest::AnnounceSize { disk }) => {
                    send(stream, &self.announce_size(disk))?;
                }
                Ok(ControlRequest::Pace { disk, pace, rests }) => {
                    send(stream, &self.pace(disk, pace, rests))?;
                }
                Ok(ControlRequest::Pivot { disk }) => {
                    // What the disk had before is closed when the answer is sent.
                    let (answer, former) = self.pivot(disk);
                    send(stream, &answer)?;
                    drop(former);
                }
                Ok(ControlRequest::Drain { disks }) => {
                    let answer = self.drain(&mut drained, &disks);
                    send(stream, &changed(answer))?;
                }
                Ok(ControlRequest::Replace { stacks }) => {
                    let answer = replace(&mut drained, &stacks, passed);
                    send(stream, &changed(answer))?;
                }
                Ok(ControlRequest::Complete { disks }) => {
                    let answer = drained.as_ref().ok_or(NotChanged::NothingWaits);
                    send(stream, &changed(answer.and_then(|it| it.complete(&disks))))?;
                }
                Ok(ControlRequest::Retire) => {
                    let answer = drained.as_ref().ok_or(NotChanged::NothingWaits);
                    send(stream, &changed(answer.and_then(Drained::retire)))?;
                }
                Ok(ControlRequest::Mirror { copies }) => {
                    let passed = &mut Handles::passed(passed);
                    let (answer, former) = match stacks::mirror(&self.disks, &copies, passed) {
                        Ok(former) => (Ok(()), Some(former)),
                        Err(error) => (Err(error), None),
                    };
                    send(stream, &changed(answer))?;
                    drop(former);
                }
                Ok(ControlRequest::Resume) => {
                    // When it is answered, what the disks had before is closed: nothing holds those files any more.
                    let resumed = drained.take().ok_or(NotChanged::NothingWaits);
                    let answer = resumed.and_then(Drained::resume).map(drop);
                    send(stream, &changed(answer))?;
                }
                Ok(ControlRequest::Shutdown) => return self.shutdown(stream),
                Err(error) => {
                    let message = format!("the request is not understood: {error}");
                    send(stream, &refusal(ErrorCode::InvalidRequest, message))?;
                }
            }
        }
    }

    fn figures(&self) -> FilterFigures {
        FilterFigures {
            disks: self.disks.iter().map(|disk| disk.state.figures()).collect(),
            memory_limit_bytes: Some(self.confinement.memory_bytes),
        }
    }

    fn status(&self) -> FilterStatus {
        FilterStatus {
            version: VERSION,
            pid: std::process::id(),
            vm: self.vm,
            replaces: true,
            retires: true,
            mirrors: true,
            completes: true,
            grows: true,
            channels: true,
            disks: self.disks.iter().map(|disk| disk.state.status()).collect(),
            confinement: Some(self.confinement),
        }
    }

    fn disk(&self, disk: DiskId) -> Result<&RunningDisk, ControlReply> {
        self.disks.iter().find(|running| running.state.disk() == disk).ok_or_else(|| {
            refusal(ErrorCode::NotFound, format!("this filter does not serve disk {disk}"))
        })
    }

    fn bitmap(&self, disk: DiskId, name: &str, change: BitmapChange) -> ControlReply {
        let running = match self.disk(disk) {
            Ok(running) => running,
            Err(refusal) => return refusal,
        };
        let Some(bitmaps) = running.state.bitmaps() else {
            return refusal(ErrorCode::WrongState, format!("disk {disk} has no dirty bitmaps"));
        };
        match bitmaps.change(name, change) {
            Ok(()) => {
                tracing::info!(%disk, name, ?change, "a dirty bitmap is changed");
                ControlReply::Bitmaps { bitmaps: bitmaps.status() }
            }
            Err(error) => refusal(error.code(), error.to_string()),
        }
    }

    fn read_bitmap(&self, disk: DiskId, name: &str, passed: Vec<OwnedFd>) -> ControlReply {
        let running = match self.disk(disk) {
            Ok(running) => running,
            Err(refusal) => return refusal,
        };
        let Some(to) = passed.into_iter().next() else {
            return refusal(ErrorCode::InvalidRequest, "no file was sent with the request".into());
        };
        let reader = running.state.bitmaps().and_then(|bitmaps| bitmaps.read(name));
        let Some(reader) = reader else {
            let error = BitmapError::Unknown(name.to_owned());
            return refusal(error.code(), error.to_string());
        };
        match reader.write_to(&File::from(to)) {
            Ok(()) => ControlReply::Done,
            Err(error) => refusal(ErrorCode::Internal, format!("bitmap '{name}': {error}")),
        }
    }

    fn announce_size(&self, disk: DiskId) -> ControlReply {
        match self.disk(disk).map(|running| running.state.announce_size()) {
            Ok(Ok(())) => ControlReply::Done,
            Ok(Err(message)) => refusal(ErrorCode::WrongState, message),
            Err(refusal) => refusal,
        }
    }

    fn drain(&self, drained: &mut Option<Drained>, disks: &[DiskId]) -> Result<(), NotChanged> {
        if drained.is_some() {
            return Err(NotChanged::Drained);
        }
        *drained = Some(Drained::drain(&self.disks, disks)?);
        Ok(())
    }

    fn pace(&self, disk: DiskId, pace: CopyPace, rests: bool) -> ControlReply {
        let running = match self.disk(disk) {
            Ok(running) => running,
            Err(refusal) => return refusal,
        };
        if let Err(wrong) = pace.check() {
            return refusal(ErrorCode::InvalidRequest, format!("a copy that gets {wrong}"));
        }
        match (running.pivot.get(), running.state.pace()) {
            (Some(pivot), _) => pivot.set_pace(pace),
            (None, Some(work)) => {
                work.set(pace);
                work.set_rests(rests);
            }
            (None, None) => {
                let why = NotPivoted::NoMirror;
                return refusal(ErrorCode::WrongState, format!("disk {disk}: {why}"));
            }
        }
        ControlReply::Done
    }

    fn pivot(&self, disk: DiskId) -> (ControlReply, Option<FormerPlace>) {
        let running = match self.disk(disk) {
            Ok(running) => running,
            Err(refusal) => return (refusal, None),
        };
        match pivot(running) {
            Ok(former) => {
                tracing::info!(%disk, "the disk is served from its copy");
                (ControlReply::Done, former)
            }
            Err(error) => {
                tracing::warn!(%disk, %error, "the disk is not switched to its copy");
                (refusal(ErrorCode::WrongState, format!("disk {disk}: {error}")), None)
            }
        }
    }

    fn shutdown(&self, stream: &UnixStream) -> io::Result<()> {
        let (reply, outcome) = mpsc::channel();
        let (_open_until_sent, sent) = mpsc::channel();
        let event = Event::Shutdown { reply: Some(reply), sent: Some(sent) };
        let gone = || refusal(ErrorCode::WrongState, "the filter is already ending".into());
        let outcome = match self.events.send(event) {
            Ok(()) => outcome.recv().unwrap_or_else(|_| gone()),
            Err(_) => gone(),
        };
        send(stream, &outcome)
    }
}

fn replace(
    drained: &mut Option<Drained>,
    stacks: &[NewStack],
    descriptors: Vec<OwnedFd>,
) -> Result<(), NotChanged> {
    let drained = drained.as_mut().ok_or(NotChanged::NothingWaits)?;
    drained.replace(stacks, &mut Handles::passed(descriptors))
}

fn changed(outcome: Result<(), NotChanged>) -> ControlReply {
    let Err(error) = outcome else { return ControlReply::Done };
    tracing::warn!(%error, "the stacks of disks stay as they are");
    let code = match error {
        NotChanged::Unknown(_) => ErrorCode::NotFound,
        NotChanged::Names | NotChanged::Sense(..) => ErrorCode::InvalidRequest,
        _ => ErrorCode::WrongState,
    };
    refusal(code, error.to_string())
}

/// What a disk had before it pivoted; closed when this is dropped.
struct FormerPlace {
    _chains: Vec<Chain>,
    _copying: Former,
    _stack: Option<FormerStack>,
}

/// Pivots. The disk has no request in flight, and its chains are these; returns those that it has then.
fn turn(
    pivot: &Pivot,
    stack: Option<&DiskStack>,
    chains: Vec<Chain>,
) -> (Vec<Chain>, Result<Option<FormerPlace>, NotPivoted>) {
    let closed = match stack.map(DiskStack::close_to_readers).transpose() {
        Ok(closed) => closed.flatten(),
        Err(IsRead) => return (chains, Err(NotPivoted::Read)),
    };
    match pivot.pivot() {
        Ok(Some(Pivoted { chains: copy, former })) => {
            let stack = stack.map(|stack| stack.pivoted(closed));
            (copy, Ok(Some(FormerPlace { _chains: chains, _copying: former, _stack: stack })))
        }
        other => {
            if let Some(stack) = stack {
                stack.open_to_readers(closed);
            }
            (chains, other.map(|_| None))
        }
    }
}

/// Has the disk's own thread pivot; returns what the disk needs no more.
fn pivot(running: &RunningDisk) -> Result<Option<FormerPlace>, NotPivoted> {
    let pivot = running.pivot.get().ok_or(NotPivoted::NoMirror)?;
    let mirror = pivot.mirror();
    // Before the guest has to wait.
    if mirror.status().pivoted {
        return Ok(None);
    }
    pivot.is_near()?;
    let (tell, outcome) = mpsc::channel();
    let stack = running.stack.clone();
    let exchange = move |chains: Vec<Chain>| {
        let (chains, pivoted) = turn(&pivot, stack.as_deref(), chains);
        let _ = tell.send(pivoted);
        chains
    };
    let asked = running.orders.ask(Box::new(exchange)).map_err(|why| match why {
        NotAsked::Another => NotPivoted::Asked,
        NotAsked::Ended => NotPivoted::Ending,
    })?;
    let ending = || if mirror.status().pivoted { Ok(None) } else { Err(NotPivoted::Ending) };
    match outcome.recv_timeout(DRAIN_TIMEOUT) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) if running.orders.take_back(asked) => Err(NotPivoted::Busy),
        // It has begun, and ends within its own timeout.
        Err(RecvTimeoutError::Timeout) => outcome.recv().unwrap_or_else(|_| ending()),
        Err(RecvTimeoutError::Disconnected) => ending(),
    }
}

fn set_log_level(levels: &str) -> ControlReply {
    match levels.parse() {
        Ok(levels) => {
            tracing::info!(%levels, "logging at other levels from now on");
            vmseal_log::set_levels(levels);
            ControlReply::Done
        }
        Err(error) => refusal(ErrorCode::InvalidRequest, error.to_string()),
    }
}

fn refusal(code: ErrorCode, message: String) -> ControlReply {
    ControlReply::Error { code, message }
}

fn send(mut stream: &UnixStream, reply: &ControlReply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    stream.write_all(&line)
}
