//! A sealed stream over anything that is written to or read from: part by part, or as a whole by two threads.

mod pipeline;

use std::io::{self, ErrorKind, Read, Write};

use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

pub use self::pipeline::CopyError;
use crate::frame::{CONTENT_MAX, Content, FrameError, HEAD_LEN, Kind, Opener, Sealer, TAG_LEN};

/// The length of a full frame, in bytes.
const FRAME_MAX: usize = HEAD_LEN + CONTENT_MAX + TAG_LEN;

fn invalid(error: FrameError) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error)
}

/// A frame that gets its content in the place where it is sealed.
struct Frame {
    /// [`FRAME_MAX`] bytes, of which some may be content in the clear.
    bytes: Zeroizing<Vec<u8>>,
    /// The length of the content that is not sealed yet, in bytes.
    filled: usize,
}

impl Frame {
    fn new() -> Self {
        // With all its room from the start: growing would leave copies of the content behind.
        Self { bytes: Zeroizing::new(vec![0; FRAME_MAX]), filled: 0 }
    }

    fn is_full(&self) -> bool {
        self.filled == CONTENT_MAX
    }

    /// Where more content goes.
    fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[HEAD_LEN + self.filled..HEAD_LEN + CONTENT_MAX]
    }

    /// Seals the content. The whole frame is what is to be written: nothing without content. It can be filled again then.
    fn seal(&mut self, sealer: &mut Sealer) -> io::Result<&[u8]> {
        let filled = std::mem::take(&mut self.filled);
        if filled == 0 {
            return Ok(&[]);
        }
        let frame = &mut self.bytes[..HEAD_LEN + filled + TAG_LEN];
        sealer.seal(Kind::BYTES, frame).map_err(invalid)?;
        Ok(frame)
    }
}

/// Seals what is written to it. Without [`SealedWriter::finish`] the stream has no end, and does not open as a whole.
pub struct SealedWriter<W> {
    to: W,
    sealer: Sealer,
    frame: Frame,
}

impl<W: Write> SealedWriter<W> {
    /// A stream with this key, which no other stream may have.
    ///
    /// # Errors
    /// [`FrameError::KeyLength`].
    pub fn new(to: W, key: &SecretBytes) -> Result<Self, FrameError> {
        Ok(Self { to, sealer: Sealer::new(key)?, frame: Frame::new() })
    }

    fn seal(&mut self) -> io::Result<()> {
        self.to.write_all(self.frame.seal(&mut self.sealer)?)
    }

    /// Writes what is left and the end of the stream.
    ///
    /// # Errors
    /// Those of what it writes to.
    pub fn finish(mut self) -> io::Result<W> {
        self.seal()?;
        self.to.write_all(&self.sealer.end().map_err(invalid)?)?;
        Ok(self.to)
    }
}

impl<W: Write> Write for SealedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.frame.is_full() {
            self.seal()?;
        }
        let room = self.frame.room();
        let taken = bytes.len().min(room.len());
        room[..taken].copy_from_slice(&bytes[..taken]);
        self.frame.filled += taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.seal()?;
        self.to.flush()
    }
}

/// Opens what a [`SealedWriter`] has sealed. It ends where the authenticated end is, and nowhere else: a stream that was cut off
/// is an error of kind `InvalidData` with a [`FrameError`] in it, as every other damage.
pub struct SealedReader<R> {
    frames: SealedFrames<R>,
    frame: Zeroizing<Vec<u8>>,
    /// Where the content that was not read yet is in `frame`.
    unread: std::ops::Range<usize>,
}

/// The frames of a stream that is read.
struct SealedFrames<R> {
    from: R,
    opener: Opener,
    ended: bool,
}

/// Room for what follows the head of any frame.
fn room_for_a_frame() -> Zeroizing<Vec<u8>> {
    Zeroizing::new(Vec::with_capacity(CONTENT_MAX + TAG_LEN))
}

impl<R: Read> SealedReader<R> {
    /// The stream with this key.
    ///
    /// # Errors
    /// [`FrameError::KeyLength`].
    pub fn new(from: R, key: &SecretBytes) -> Result<Self, FrameError> {
        let frames = SealedFrames { from, opener: Opener::new(key)?, ended: false };
        Ok(Self { frames, frame: room_for_a_frame(), unread: 0..0 })
    }
}

impl<R: Read> SealedFrames<R> {
    /// Opens the next frame in `frame`, where its content then begins. Returns the length of that; none at the authenticated end.
    fn open_next(&mut self, frame: &mut Vec<u8>) -> io::Result<Option<usize>> {
        if self.ended {
            return Ok(None);
        }
        let mut head = [0; HEAD_LEN];
        self.fill(&mut head)?;
        let head = self.opener.head(head).map_err(invalid)?;
        frame.resize(head.following(), 0);
        self.fill(frame)?;
        match self.opener.open(&head, frame).map_err(invalid)? {
            Content::Data(_, data) => Ok(Some(data.len())),
            Content::End => {
                self.ended = true;
                if self.from.read(&mut [0])? != 0 {
                    return Err(invalid(FrameError::AfterEnd));
                }
                Ok(None)
            }
        }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.from.read_exact(bytes).map_err(|error| match (error.kind(), self.opener.finish()) {
            (ErrorKind::UnexpectedEof, Err(truncated)) => invalid(truncated),
            _ => error,
        })
    }
}

impl<R: Read> Read for SealedReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        while self.unread.is_empty() {
            match self.frames.open_next(&mut self.frame)? {
                Some(length) => self.unread = 0..length,
                None => return Ok(0),
            }
        }
        let taken = to.len().min(self.unread.len());
        let start = self.unread.start;
        to[..taken].copy_from_slice(&self.frame[start..start + taken]);
        self.unread.start += taken;
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sealed(key: &SecretBytes, parts: &[Vec<u8>]) -> Vec<u8> {
        let mut writer = SealedWriter::new(Vec::new(), key).unwrap();
        for part in parts {
            writer.write_all(part).unwrap();
        }
        writer.finish().unwrap()
    }

    fn opened(key: &SecretBytes, sealed: &[u8]) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        SealedReader::new(sealed, key).unwrap().read_to_end(&mut content)?;
        Ok(content)
    }

    pub(super) fn why(error: &io::Error) -> FrameError {
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        *error.get_ref().unwrap().downcast_ref().unwrap()
    }

    #[test]
    fn a_stream_that_was_cut_or_goes_on_is_not_whole() {
        let key = SecretBytes::random(32).unwrap();
        let whole = sealed(&key, &[vec![5; CONTENT_MAX + 10]]);
        let frame = HEAD_LEN + CONTENT_MAX + TAG_LEN;
        for (length, frames) in [(0, 0), (5, 0), (frame - 1, 0), (frame, 1), (whole.len() - 1, 2)] {
            let error = opened(&key, &whole[..length]).unwrap_err();
            assert_eq!(why(&error), FrameError::Truncated(frames), "{length}");
        }
        let longer = [&whole[..], b"x"].concat();
        assert_eq!(why(&opened(&key, &longer).unwrap_err()), FrameError::AfterEnd);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn any_parts_come_back_as_one_stream(
            lengths in proptest::collection::vec(0usize..CONTENT_MAX + 1000, 0..4),
            changed in any::<prop::sample::Index>(),
        ) {
            let key = SecretBytes::random(32).unwrap();
            let parts: Vec<Vec<u8>> =
                lengths.iter().map(|length| (0..*length).map(|at| at as u8).collect()).collect();
            let mut stream = sealed(&key, &parts);
            prop_assert!(opened(&key, &stream).unwrap() == parts.concat());
            let at = changed.index(stream.len());
            stream[at] ^= 1;
            prop_assert!(opened(&key, &stream).is_err());
        }
    }
}
