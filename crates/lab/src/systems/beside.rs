//! What is done with a disk of vmseal while it is measured: once in each cell, with a server of its own.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use vmseal_api::atomic_file::{self, PRIVATE};
use vmseal_api::filter::{
    BackendSpec, BackingSpec, ControlReply, ControlRequest, Direct, FilterSpec, Handle, Holes,
    MirrorSpec, NewStack, StackSpec,
};
use vmseal_api::pace::CopyPace;
use vmseal_api::transfer::ImageFormat;

use super::{Acted, DATA_OFFSET, Place, Program, SystemError};
use crate::stop;

/// The longest that a server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// How long the note is that an agent keeps of a disk with one layer and one snapshot, in bytes.
const NOTE_LENGTH: usize = 400;

/// See the module.
#[derive(Clone, Debug)]
pub enum Beside {
    /// The disk is copied to an encrypted image from the start of the server on.
    Encrypting,
    /// A snapshot is taken in the middle of the cell; with qemu-img.
    Snapshot(Program),
}

fn copy_path(place: &Place) -> PathBuf {
    place.directory.join("copy")
}

fn map_path(place: &Place) -> PathBuf {
    place.directory.join("map")
}

fn layer_path(place: &Place) -> PathBuf {
    place.directory.join("layer")
}

fn note_path(place: &Place) -> PathBuf {
    place.directory.join("note")
}

impl Beside {
    /// The filter that a server has for it.
    pub(super) fn link(&self, place: &Place) -> Option<FilterSpec> {
        let Self::Encrypting = self else { return None };
        let crypt = FilterSpec::Crypt { key: Handle::Path(place.key()), holes: Holes::Zero };
        let backend = BackendSpec::File {
            file: Handle::Path(copy_path(place)),
            offset: DATA_OFFSET,
            direct: Direct::Auto,
            keeps_room: false,
            channel: None,
        };
        let to = StackSpec { chain: vec![crypt], backend };
        let map = Handle::Path(map_path(place));
        Some(FilterSpec::Mirror(Box::new(MirrorSpec {
            to,
            map,
            pace: CopyPace::default(),
            same_below: false,
            stays: false,
        })))
    }

    /// Makes anew what a server that starts needs for it.
    pub(super) fn prepare(&self, place: &Place) -> Result<(), SystemError> {
        let made = |path: PathBuf, length: u64| {
            let made = File::create(&path).and_then(|file| file.set_len(length));
            made.map_err(|source| SystemError::File { path, source })
        };
        match self {
            Self::Encrypting => {
                made(copy_path(place), 0)?;
                made(copy_path(place), DATA_OFFSET + place.size)?;
                made(map_path(place), 0)
            }
            Self::Snapshot(image_tool) => {
                let (layer, disk) = (layer_path(place), place.disk());
                if let Err(source) = fs::remove_file(&layer)
                    && source.kind() != io::ErrorKind::NotFound
                {
                    return Err(SystemError::File { path: layer, source });
                }
                image_tool.make_layer(&disk, &layer)
            }
        }
    }

    /// Does what is done once in a cell, `after` this time; from when to when the guest may have waited.
    pub(super) fn act(&self, place: &Place, after: Duration) -> Result<Option<Acted>, SystemError> {
        let Self::Snapshot(_) = self else { return Ok(None) };
        stop::sleep(after);
        if stop::asked() {
            return Ok(None);
        }
        let path = place.directory.join("control");
        let taken = take_snapshot(place, &path);
        taken.map(Some).map_err(|source| SystemError::File { path, source })
    }
}

/// As the agent does it: a note of the layers is written and flushed beside its place, and while the guest waits it is renamed, and
/// its directory flushed. What the note says does not matter here.
fn take_snapshot(place: &Place, control: &Path) -> io::Result<Acted> {
    let layer = File::options().read(true).write(true).open(layer_path(place))?;
    let disk = File::open(place.disk())?;
    let stream = UnixStream::connect(control)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut stream = BufReader::new(stream);
    let ControlReply::Status(status) = ask(&mut stream, &ControlRequest::Status, &[])? else {
        return Err(io::Error::other("the filter does not tell its status"));
    };
    let Some(served) = status.disks.first().map(|disk| disk.disk) else {
        return Err(io::Error::other("the filter serves no disk"));
    };
    let below = BackingSpec { file: Handle::Fd(1), format: ImageFormat::Raw };
    let (file, offset) = (Handle::Fd(0), DATA_OFFSET);
    let backend = BackendSpec::Qcow2 { file, backing: vec![below], offset, lock: None };
    let stacks = vec![NewStack { disk: served, chain: None, backend, size: None }];
    let note = atomic_file::prepare(&note_path(place), &[b' '; NOTE_LENGTH], PRIVATE)?;
    let begun = Instant::now();
    done(ask(&mut stream, &ControlRequest::Drain { disks: vec![served] }, &[])?)?;
    atomic_file::put_all(vec![note])?;
    done(ask(&mut stream, &ControlRequest::Replace { stacks }, &[&layer, &disk])?)?;
    done(ask(&mut stream, &ControlRequest::Resume, &[])?)?;
    Ok((begun, Instant::now()))
}

fn done(reply: ControlReply) -> io::Result<()> {
    match reply {
        ControlReply::Done => Ok(()),
        other => Err(io::Error::other(format!("the filter takes no snapshot: {other:?}"))),
    }
}

fn ask(
    stream: &mut BufReader<UnixStream>,
    request: &ControlRequest,
    files: &[&File],
) -> io::Result<ControlReply> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    let numbers: Vec<_> = files.iter().map(|file| file.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights = if numbers.is_empty() { &[] } else { &rights[..] };
    let (socket, flags) = (stream.get_ref().as_raw_fd(), MsgFlags::MSG_NOSIGNAL);
    let sent = sendmsg::<()>(socket, &[IoSlice::new(&line)], rights, flags, None)?;
    if sent != line.len() {
        return Err(io::Error::other("the filter does not take a request"));
    }
    let mut answer = String::new();
    stream.read_line(&mut answer)?;
    Ok(serde_json::from_str(&answer)?)
}
