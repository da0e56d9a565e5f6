//! Requests to a running filter that pass descriptors. They give disks other stacks (docs/decisions/140) or copies
//! (docs/decisions/152). All requests about drained disks use one connection: the filter resumes the disks when it ends.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use vmseal_api::filter::{
    ControlReply, ControlRequest, Direct, Handle, LINE_MAX, NewCopy, NewStack,
};
use vmseal_api::id::DiskId;

use super::{Control, FilterError, Mirror, unexpected};
use crate::filter::channel::Channels;
use crate::filter::disk::stored;

/// The longest that the requests of disks may take to end; the filter itself gives up before.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(40);

/// The longest that a filter may take to write what a bitmap says.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The most descriptors that the kernel takes with one call (`SCM_MAX_FD`).
const RIGHTS_MAX: usize = 253;

/// The layers that a disk is to have.
pub struct NewLayers {
    /// The disk.
    pub disk: DiskId,
    /// The image; where there are layers it is only read.
    pub file: File,
    /// The layers above it, the active one first.
    pub layers: Vec<File>,
    /// Where the guest's first byte is, in bytes.
    pub offset: u64,
    /// Whether the image keeps its room when the guest discards.
    pub keeps_room: bool,
    /// The file with the disk's lock, where that is not the image.
    pub own: Option<File>,
    /// The channel of the image, where there are no layers ([`super::channel_of`]). A filter that knows no channels does not get it.
    pub channel: Option<OwnedFd>,
}

/// Disks that wait; they go on when this is dropped.
pub struct Waiting(BufReader<UnixStream>);

impl Control {
    /// Has these disks wait, without a request in flight in any. Blocks.
    ///
    /// # Errors
    /// [`FilterError`]; none of them waits.
    pub fn drain(&self, disks: Vec<DiskId>) -> Result<Waiting, FilterError> {
        let mut waiting = self.connect()?;
        waiting.ask(&ControlRequest::Drain { disks }, &[])?;
        Ok(waiting)
    }

    /// Has these disks be copied from now on. Blocks.
    ///
    /// # Errors
    /// [`FilterError::Refused`]: none of them is copied. After any other error either may be the case.
    pub fn mirror(&self, copies: &[(DiskId, Mirror)]) -> Result<(), FilterError> {
        let mut connection = self.connect()?;
        let mut channels = Channels::of(copies.iter().filter_map(|(_, mirror)| mirror.image()));
        if !channels.is_empty() && !connection.takes_channels() {
            channels = Channels::default();
        }
        let mut numbers = Vec::new();
        let copies = copies.iter().map(|(disk, mirror)| {
            let mirror = mirror.spec(&channels, |fd| {
                numbers.push(fd.as_raw_fd());
                Handle::Fd(i32::try_from(numbers.len() - 1).unwrap_or(i32::MAX))
            });
            NewCopy { disk: *disk, mirror }
        });
        let request = ControlRequest::Mirror { copies: copies.collect() };
        connection.ask(&request, &numbers)
    }

    fn connect(&self) -> Result<Waiting, FilterError> {
        let stream = UnixStream::connect(&self.0)?;
        stream.set_read_timeout(Some(DRAIN_TIMEOUT))?;
        stream.set_write_timeout(Some(DRAIN_TIMEOUT))?;
        Ok(Waiting(BufReader::new(stream)))
    }
}

impl Control {
    /// Has the dirty extents of a bitmap written to a file. Blocks.
    ///
    /// # Errors
    /// [`FilterError`]
    pub fn read_bitmap(&self, disk: DiskId, name: String, to: &File) -> Result<(), FilterError> {
        let stream = UnixStream::connect(&self.0)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        stream.set_write_timeout(Some(READ_TIMEOUT))?;
        let request = ControlRequest::ReadBitmap { disk, name };
        Waiting(BufReader::new(stream)).ask(&request, &[to.as_raw_fd()])
    }
}

impl Waiting {
    /// Has the filter end rather than serve these disks by the layers that they have. Blocks.
    ///
    /// # Errors
    /// [`FilterError::Refused`]: they may have gone on. After any other error either may be the case.
    pub fn retire(&mut self) -> Result<(), FilterError> {
        self.ask(&ControlRequest::Retire, &[])
    }

    /// Completes the copies that other hosts get of these disks. Blocks.
    ///
    /// # Errors
    /// [`FilterError::Refused`]: one lacks something.
    pub fn complete(&mut self, disks: Vec<DiskId>) -> Result<(), FilterError> {
        self.ask(&ControlRequest::Complete { disks }, &[])
    }

    /// Gives all of these disks other layers. Blocks.
    ///
    /// # Errors
    /// [`FilterError::Refused`]: they have what they had. After any other error either may be the case.
    pub fn replace(&mut self, new: &[NewLayers]) -> Result<(), FilterError> {
        self.exchange(new, None)
    }

    /// Gives one of these disks its files with `size` bytes, which may be more than it has. Only a filter that grows disks does. Blocks.
    ///
    /// # Errors
    /// As [`Waiting::replace`].
    pub fn lengthen(&mut self, new: NewLayers, size: u64) -> Result<(), FilterError> {
        self.exchange(&[new], Some(size))
    }

    fn exchange(&mut self, new: &[NewLayers], size: Option<u64>) -> Result<(), FilterError> {
        let has_channels = new.iter().any(|new| new.channel.is_some());
        let with_channels = has_channels && self.takes_channels();
        let mut numbers = Vec::new();
        let stacks = new.iter().map(|new| {
            let mut passed = |fd: BorrowedFd<'_>| {
                numbers.push(fd.as_raw_fd());
                Handle::Fd(i32::try_from(numbers.len() - 1).unwrap_or(i32::MAX))
            };
            let files = new.layers.iter().chain([&new.file]).map(AsFd::as_fd);
            let files: Vec<_> = files.map(&mut passed).collect();
            let lock = new.own.as_ref().map(AsFd::as_fd).map(&mut passed);
            let channel = new.channel.as_ref().filter(|_| with_channels);
            let channel = channel.map(AsFd::as_fd).map(passed);
            let backend = stored(&files, new.offset, new.keeps_room, Direct::Auto, lock, channel);
            NewStack { disk: new.disk, chain: None, backend, size }
        });
        let request = ControlRequest::Replace { stacks: stacks.collect() };
        self.ask(&request, &numbers)
    }

    /// Lets the disks go on. Blocks.
    ///
    /// # Errors
    /// [`FilterError`]: they have gone on before.
    pub fn resume(mut self) -> Result<(), FilterError> {
        self.ask(&ControlRequest::Resume, &[])
    }

    /// Whether the filter knows channels ([`vmseal_api::filter::FilterStatus::channels`]). One that does not say so does without.
    fn takes_channels(&mut self) -> bool {
        let answer = self.answer(&ControlRequest::Status, &[]);
        matches!(answer, Ok(ControlReply::Status(status)) if status.channels)
    }

    fn ask(&mut self, request: &ControlRequest, fds: &[RawFd]) -> Result<(), FilterError> {
        match self.answer(request, fds)? {
            ControlReply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    fn answer(
        &mut self,
        request: &ControlRequest,
        fds: &[RawFd],
    ) -> Result<ControlReply, FilterError> {
        let mut line = serde_json::to_vec(request).map_err(io::Error::from)?;
        line.push(b'\n');
        self.send(&line, fds)?;
        let mut answer = Vec::new();
        let mut limited = self.0.by_ref().take(LINE_MAX as u64);
        limited.read_until(b'\n', &mut answer)?;
        if answer.last() != Some(&b'\n') {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        serde_json::from_slice(&answer).map_err(|error| FilterError::Protocol(error.to_string()))
    }

    /// Sends a line, and all descriptors before its last byte.
    fn send(&self, line: &[u8], fds: &[RawFd]) -> io::Result<()> {
        let socket = self.0.get_ref().as_raw_fd();
        let (mut sent, mut parts) = (0, fds.chunks(RIGHTS_MAX).peekable());
        while sent < line.len() {
            let part = parts.next().unwrap_or_default();
            // A byte is left for each part that follows.
            let end = if parts.peek().is_some() { sent + 1 } else { line.len() };
            let rights = [ControlMessage::ScmRights(part)];
            let rights = if part.is_empty() { &[] } else { &rights[..] };
            let bytes = [IoSlice::new(&line[sent..end])];
            sent += sendmsg::<()>(socket, &bytes, rights, MsgFlags::MSG_NOSIGNAL, None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use serde_json::{Value, json};
    use vmseal_api::id::VmId;

    use super::*;

    /// What a filter is asked for by those who have a channel for it, and which says so, or not, that it knows channels.
    fn asked(knows: bool) -> Vec<Value> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("filter.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let filter = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            for line in BufReader::new(&stream).lines() {
                let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
                let answer = if request["do"] == "status" {
                    let mut status = json!({ "answer": "status", "version": 1, "pid": 1 });
                    status["vm"] = json!(VmId::new());
                    status["disks"] = json!([]);
                    if knows {
                        status["channels"] = json!(true);
                    }
                    status
                } else {
                    json!({ "answer": "done" })
                };
                writeln!(&stream, "{answer}").unwrap();
                asked.push(request);
            }
            asked
        });
        let (channel, _) = UnixStream::pair().unwrap();
        let new = NewLayers {
            disk: DiskId::new(),
            file: tempfile::tempfile().unwrap(),
            layers: Vec::new(),
            offset: 4096,
            keeps_room: false,
            own: None,
            channel: Some(channel.into()),
        };
        let mut waiting = Control(path).drain(vec![new.disk]).unwrap();
        waiting.replace(&[new]).unwrap();
        drop(waiting);
        filter.join().unwrap()
    }

    #[test]
    fn only_a_filter_that_knows_channels_gets_one() {
        for (knows, channel) in [(true, Some(json!({ "fd": 1 }))), (false, None)] {
            let asked = asked(knows);
            let kinds: Vec<_> = asked.iter().map(|it| it["do"].as_str().unwrap()).collect();
            assert_eq!(kinds, ["drain", "status", "replace"]);
            let backend = &asked[2]["stacks"][0]["backend"];
            assert_eq!(
                (backend.get("channel"), &backend["kind"]),
                (channel.as_ref(), &json!("file"))
            );
        }
    }
}
