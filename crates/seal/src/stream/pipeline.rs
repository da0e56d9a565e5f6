//! Streams that are sealed or opened as a whole, by two threads. docs/decisions/223-memory-is-sealed-and-written-at-once.md
//!
//! ```text
//!  sealing   here: read ─► seal ── frames ──► the other thread: write
//!                  ▲───── frames to fill ────────────┘
//!  opening   the other thread: read ─► open ── frames ──► here: give out
//!                               ▲───── frames to fill ───────┘
//! ```
//! Only one side has the sealer or opener, and a channel keeps the order: the stream is the one that a single thread makes, and what
//! is given out is what it would give out. A side that ends drops its ends of both channels, by which the other one ends, too. When a
//! call returns or panics, the other thread has ended.

use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, ScopedJoinHandle, scope};

use zeroize::Zeroizing;

use super::{Frame, SealedFrames, SealedReader, SealedWriter, room_for_a_frame};
use crate::frame::Sealer;

/// How many frames there are: each thread works on one, and two wait between the threads. Together they take one MiB. With a single
/// frame the two threads would wait for each other and never go on.
const FRAMES: usize = 4;

/// Why the content of a stream was not given out to its end.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The stream could not be read, or is damaged.
    #[error("it could not be read: {0}")]
    Read(#[source] io::Error),
    /// The content was not taken.
    #[error("its content was not taken: {0}")]
    Give(#[source] io::Error),
}

/// A frame that was opened.
struct Opened {
    frame: Zeroizing<Vec<u8>>,
    /// Where the content that was not given out yet is in `frame`.
    unread: Range<usize>,
}

impl<W: Write + Send> SealedWriter<W> {
    /// Seals all that can be read, and has another thread write it meanwhile; returns how many bytes were read. What does not fill a
    /// frame is written later, as if it had been written to this.
    ///
    /// # Errors
    /// Those of reading, and of what it writes to; that no thread can be started. The stream is of no use then.
    pub fn copy_from(&mut self, from: impl Read) -> io::Result<u64> {
        let Self { to, sealer, frame } = self;
        scope(|scope| {
            let (sealed, to_write) = sync_channel(FRAMES);
            let (written, to_fill) = sync_channel(FRAMES);
            for _ in 1..FRAMES {
                // There is room for all frames.
                let _ = written.send(Frame::new());
            }
            let write = move || write_all(to, to_write, &written);
            let writing =
                Builder::new().name("seal-write".to_owned()).spawn_scoped(scope, write)?;
            let read = seal_all(from, (sealer, frame), sealed, &to_fill);
            // What was not written comes before what was not read.
            ended(writing)?;
            read
        })
    }
}

/// Reads to the end, and seals each frame that is full. Takes its end of the channel: then the writing ends.
fn seal_all(
    mut from: impl Read,
    (sealer, frame): (&mut Sealer, &mut Frame),
    sealed: SyncSender<Frame>,
    to_fill: &Receiver<Frame>,
) -> io::Result<u64> {
    let mut all = 0;
    loop {
        if frame.is_full() {
            frame.seal(sealer)?;
            // Where there is none, the writing has failed, and says why.
            let Ok(next) = to_fill.recv() else { break };
            if sealed.send(std::mem::replace(frame, next)).is_err() {
                break;
            }
        }
        match from.read(frame.room()) {
            Ok(0) => break,
            Ok(length) => {
                frame.filled += length;
                all += length as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

/// Writes frames, which are all full ones.
fn write_all(
    to: &mut impl Write,
    to_write: Receiver<Frame>,
    written: &SyncSender<Frame>,
) -> io::Result<()> {
    for frame in to_write {
        to.write_all(&frame.bytes)?;
        // After the last one has been read, nobody wants it.
        let _ = written.send(frame);
    }
    Ok(())
}

impl<R: Read + Send> SealedReader<R> {
    /// Gives out all content that was not read yet, part by part, up to the authenticated end, and has another thread open frames
    /// meanwhile. Of a damaged stream all is given out that is before the damage.
    ///
    /// # Errors
    /// [`CopyError`]. After one of `give`, nothing more is given.
    pub fn copy_to(self, give: impl FnMut(&[u8]) -> io::Result<()>) -> Result<(), CopyError> {
        let Self { frames, frame, unread } = self;
        scope(|scope| {
            let (opened, to_give) = sync_channel(FRAMES);
            let (given, to_fill) = sync_channel(FRAMES);
            for _ in 1..FRAMES {
                // There is room for all frames.
                let _ = given.send(room_for_a_frame());
            }
            let open = move || open_all(frames, &to_fill, &opened);
            let opening = Builder::new().name("seal-open".to_owned()).spawn_scoped(scope, open);
            let opening = opening.map_err(CopyError::Read)?;
            let gave = give_all(Opened { frame, unread }, to_give, given, give);
            // What was not taken comes before what was not read.
            let read = ended(opening);
            gave.map_err(CopyError::Give)?;
            read.map_err(CopyError::Read)
        })
    }
}

/// Opens frames up to the end, or until nobody takes them any more.
fn open_all<R: Read>(
    mut frames: SealedFrames<R>,
    to_fill: &Receiver<Zeroizing<Vec<u8>>>,
    opened: &SyncSender<Opened>,
) -> io::Result<()> {
    while let Ok(mut frame) = to_fill.recv() {
        let Some(length) = frames.open_next(&mut frame)? else { break };
        if opened.send(Opened { frame, unread: 0..length }).is_err() {
            break;
        }
    }
    Ok(())
}

/// Gives out what is left of the first frame, and the others. Takes its ends of the channels: then the opening ends.
fn give_all(
    first: Opened,
    to_give: Receiver<Opened>,
    given: SyncSender<Zeroizing<Vec<u8>>>,
    mut give: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    for Opened { frame, unread } in std::iter::once(first).chain(to_give) {
        if !unread.is_empty() {
            give(&frame[unread])?;
        }
        // After the last one has been opened, nobody wants it.
        let _ = given.send(frame);
    }
    Ok(())
}

/// Waits for the other thread. If it panicked, so does this one.
fn ended<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    match thread.join() {
        Ok(result) => result,
        Err(panic) => resume_unwind(panic),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use proptest::prelude::*;
    use vmseal_secret::SecretBytes;

    use super::super::FRAME_MAX;
    use super::super::tests::why;
    use super::*;
    use crate::frame::{CONTENT_MAX, FrameError, HEAD_LEN};

    /// What is read in pieces of at most so many bytes, as out of a pipe, and then fails or ends.
    struct Pieces<'a>(&'a [u8], usize, Option<ErrorKind>);

    impl Read for Pieces<'_> {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            match (self.0.is_empty(), self.2) {
                (true, Some(kind)) => Err(kind.into()),
                _ => {
                    let most = to.len().min(self.1);
                    self.0.read(&mut to[..most])
                }
            }
        }
    }

    /// A file system with room for so many bytes; with none it panics.
    struct Full(Option<usize>);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match self.0.as_mut().expect("it panics") {
                0 => Err(ErrorKind::StorageFull.into()),
                room => {
                    let taken = bytes.len().min(*room);
                    *room -= taken;
                    Ok(taken)
                }
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn key() -> SecretBytes {
        SecretBytes::random(32).unwrap()
    }

    fn content(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at ^ (at >> 9)) as u8).collect()
    }

    /// The stream of what is written to it, and then of what another thread writes of it, or the same one.
    fn stream(key: &SecretBytes, first: &[u8], rest: &[u8], piece: Option<usize>) -> Vec<u8> {
        let mut writer = SealedWriter::new(Vec::new(), key).unwrap();
        writer.write_all(first).unwrap();
        match piece {
            None => writer.write_all(rest).unwrap(),
            Some(piece) => {
                let copied = writer.copy_from(Pieces(rest, piece, None)).unwrap();
                assert_eq!(copied, rest.len() as u64);
            }
        }
        writer.finish().unwrap()
    }

    /// What a stream gives out of which so much was read before, and whether that was all.
    fn opened(key: &SecretBytes, sealed: &[u8], read: usize) -> (Vec<u8>, Result<(), CopyError>) {
        let mut reader = SealedReader::new(sealed, key).unwrap();
        let mut content = vec![0; read];
        reader.read_exact(&mut content).unwrap();
        let end = reader.copy_to(|part| {
            content.extend_from_slice(part);
            Ok(())
        });
        (content, end)
    }

    fn is_the_stream_of_one_thread(first: &[u8], rest: &[u8], piece: usize) {
        let (key, lengths) = (key(), (first.len(), rest.len(), piece));
        let sealed = stream(&key, first, rest, Some(piece));
        assert!(sealed == stream(&key, first, rest, None), "{lengths:?}");
        let (given, end) = opened(&key, &sealed, first.len());
        end.unwrap();
        assert!(given == [first, rest].concat(), "{lengths:?}");
    }

    #[test]
    fn streams_that_end_with_a_full_frame_or_beside_it_are_those_of_one_thread() {
        for rest in [0, 1, CONTENT_MAX - 1, CONTENT_MAX, 6 * CONTENT_MAX, 6 * CONTENT_MAX + 1] {
            for first in [0, 1, CONTENT_MAX] {
                is_the_stream_of_one_thread(&content(first), &content(rest), usize::MAX);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn any_stream_is_that_of_one_thread(
            first in 0..CONTENT_MAX + 1000,
            rest in 0..8 * CONTENT_MAX,
            piece in 4096..CONTENT_MAX + 1000,
        ) {
            is_the_stream_of_one_thread(&content(first), &content(rest), piece);
        }
    }

    #[test]
    fn a_side_that_fails_ends_the_other_one() {
        let key = key();
        let mut writer = SealedWriter::new(Full(Some(FRAME_MAX * 3 / 2)), &key).unwrap();
        let full = writer.copy_from(io::repeat(7)).unwrap_err();
        assert_eq!(full.kind(), ErrorKind::StorageFull);

        let all = content(6 * CONTENT_MAX + 5);
        let mut writer = SealedWriter::new(Vec::new(), &key).unwrap();
        let broken = Pieces(&all, 1 << 16, Some(ErrorKind::ConnectionReset));
        let reset = writer.copy_from(broken).unwrap_err();
        assert_eq!(reset.kind(), ErrorKind::ConnectionReset);
        assert_eq!(writer.to.len(), 6 * FRAME_MAX, "all that was read before is written");

        let sealed = stream(&key, &[], &content(12 * CONTENT_MAX), None);
        let mut given = 0;
        let refused = SealedReader::new(&sealed[..], &key).unwrap().copy_to(|part| {
            given += part.len();
            if given > CONTENT_MAX { Err(ErrorKind::TimedOut.into()) } else { Ok(()) }
        });
        let Err(CopyError::Give(error)) = refused else { panic!("{refused:?}") };
        assert_eq!((error.kind(), given), (ErrorKind::TimedOut, 2 * CONTENT_MAX));
    }

    #[test]
    fn a_side_that_panics_ends_the_other_one() {
        let key = key();
        let sealed = stream(&key, &[], &content(12 * CONTENT_MAX), None);
        let give =
            || SealedReader::new(&sealed[..], &key).unwrap().copy_to(|_| panic!("it panics"));
        assert!(catch_unwind(AssertUnwindSafe(give)).is_err());
        let mut writer = SealedWriter::new(Full(None), &key).unwrap();
        let write = || writer.copy_from(io::repeat(7));
        assert!(catch_unwind(AssertUnwindSafe(write)).is_err());
    }

    #[test]
    fn nothing_behind_damage_is_given_out_and_the_frame_is_named() {
        let (key, all) = (key(), content(8 * CONTENT_MAX + 10));
        let whole = stream(&key, &[], &all, None);
        let spoiled = |sealed: &[u8], frames: usize, expected: FrameError| {
            let (given, end) = opened(&key, sealed, 0);
            let Err(CopyError::Read(error)) = end else { panic!("{end:?}") };
            assert_eq!(why(&error), expected);
            assert!(given == all[..frames * CONTENT_MAX], "{expected}");
            // As one thread finds it.
            let mut read = Vec::new();
            let error = SealedReader::new(sealed, &key).unwrap().read_to_end(&mut read);
            assert_eq!(why(&error.unwrap_err()), expected);
            assert!(read == given, "{expected}");
        };
        for frame in [0, 1, 5, 8] {
            let mut changed = whole.clone();
            changed[frame * FRAME_MAX + HEAD_LEN + 3] ^= 1;
            spoiled(&changed, frame, FrameError::Damaged(frame as u64));
        }
        let doubled = [&whole[..3 * FRAME_MAX], &whole[2 * FRAME_MAX..]].concat();
        spoiled(&doubled, 3, FrameError::OutOfOrder { expected: 3, found: 2 });
        spoiled(&whole[..4 * FRAME_MAX + 40], 4, FrameError::Truncated(4));
    }
}
