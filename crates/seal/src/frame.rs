//! Frames: a stream cut into pieces, each sealed with AES-256-GCM under one key that no other stream has.
//!
//! ```text
//! head (16): length of the content (4) ‖ kind (1): 0 bytes of a stream, 1 end, others on the wire only ‖ zero (3) ‖
//!            counter (8), from 0
//! content, sealed ‖ tag (16)
//! nonce: 4 zero bytes ‖ counter (8); associated data: the head
//! ```
//! Both sides count. A frame that is missing, doubled, in another place, or after the end is refused, and a stream without its
//! end is not whole. A file is one stream of bytes; on the wire a frame may be of other kinds too, and be empty.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::DERIVED_LEN;

/// The length of a frame's head, in bytes.
pub const HEAD_LEN: usize = 16;

/// The length of a frame's tag, in bytes.
pub const TAG_LEN: usize = 16;

/// How long the end of a stream is, in bytes: a frame without content.
pub const END_LEN: usize = HEAD_LEN + TAG_LEN;

/// The most content of one frame, in bytes: what a receiver has to hold before it can trust any of it. Longer frames are no faster.
pub const CONTENT_MAX: usize = 256 * 1024;

/// Why a frame was not sealed or opened. After any of them the stream is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The key has a wrong length.
    #[error("the key of a sealed stream is {DERIVED_LEN} bytes long; this one has {0}")]
    KeyLength(usize),
    /// The content is longer than a frame may be.
    #[error("a frame has at most {CONTENT_MAX} bytes of content; this one has {0}")]
    TooLong(usize),
    /// The head is none.
    #[error("the head of frame {0} is damaged")]
    Head(u64),
    /// Another frame was to come.
    #[error(
        "frame {found} came where frame {expected} was to come: one is missing, doubled or in another place"
    )]
    OutOfOrder {
        /// The counter of the frame that was to come.
        expected: u64,
        /// The counter of the one that came.
        found: u64,
    },
    /// The content or the head was changed, or the key is another stream's.
    #[error("frame {0} is damaged or was changed")]
    Damaged(u64),
    /// A frame follows the end.
    #[error("something follows the end of the stream")]
    AfterEnd,
    /// The stream has no end.
    #[error("the stream was cut off after {0} frames")]
    Truncated(u64),
    /// All counters were used, or an earlier frame could not be sealed or opened.
    #[error("no more frames can be sealed or opened with this key")]
    Spent,
    /// AWS-LC refused.
    #[error("AES-256-GCM failed in AWS-LC")]
    Cipher,
}

/// The number of the end in a head.
const END: u8 = 1;

/// What the content of a frame is: a number that both ends of a connection give a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(u8);

impl Kind {
    /// The next part of a stream of bytes.
    pub const BYTES: Self = Self(0);

    /// The kind with this number: any but 1, which is the end's.
    ///
    /// # Panics
    /// With the number 1.
    #[must_use]
    pub const fn new(number: u8) -> Self {
        assert!(number != END, "the kind 1 is the end of a stream");
        Self(number)
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u8 {
        self.0
    }
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Content(Kind),
    End,
}

/// The head of a frame. What it says is true only once the frame was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    what: What,
    length: usize,
    bytes: [u8; HEAD_LEN],
}

impl Head {
    fn new(what: What, length: usize, counter: u64) -> Result<Self, FrameError> {
        let mut bytes = [0; HEAD_LEN];
        let said = u32::try_from(length).map_err(|_| FrameError::TooLong(length))?;
        bytes[..4].copy_from_slice(&said.to_be_bytes());
        bytes[4] = match what {
            What::Content(kind) => kind.0,
            What::End => END,
        };
        bytes[8..].copy_from_slice(&counter.to_be_bytes());
        Ok(Self { what, length, bytes })
    }

    /// What follows the head, in bytes: the sealed content and its tag.
    #[must_use]
    pub fn following(&self) -> usize {
        self.length + TAG_LEN
    }
}

fn cipher(key: &SecretBytes) -> Result<LessSafeKey, FrameError> {
    let unbound = UnboundKey::new(&AES_256_GCM, key.expose());
    Ok(LessSafeKey::new(unbound.map_err(|_| FrameError::KeyLength(key.len()))?))
}

fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[NONCE_LEN - 8..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// What protects frames.
enum Protection {
    Sealed(LessSafeKey),
    /// Nothing: the tag is zero, and the content is as it is. For a connection whose spec says so on both ends.
    Plain,
}

/// Seals one stream. It owns the counter that the nonces are made of: it cannot be copied, and no key gets a second one, as only this
/// crate makes it, out of a key that was derived for this stream alone.
///
/// ```compile_fail
/// fn twice(sealer: vmseal_seal::frame::Sealer) { let _ = sealer.clone(); }
/// ```
pub struct Sealer {
    protection: Protection,
    /// The counter of the next frame; none when there is none any more.
    next: Option<u64>,
}

impl Sealer {
    /// A sealer with this key of 32 bytes, which has no other one.
    ///
    /// # Errors
    /// [`FrameError::KeyLength`].
    pub(crate) fn new(key: &SecretBytes) -> Result<Self, FrameError> {
        Ok(Self { protection: Protection::Sealed(cipher(key)?), next: Some(0) })
    }

    /// One that makes frames and protects nothing.
    pub(crate) fn plain() -> Self {
        Self { protection: Protection::Plain, next: Some(0) }
    }

    /// Seals a frame in its place: between the first [`HEAD_LEN`] and the last [`TAG_LEN`] bytes, which it fills, is the content.
    ///
    /// # Errors
    /// [`FrameError::TooLong`]; [`FrameError::Spent`]; [`FrameError::Cipher`], and from then on `Spent`.
    ///
    /// # Panics
    /// Where there is no room for head and tag.
    pub fn seal(&mut self, kind: Kind, frame: &mut [u8]) -> Result<(), FrameError> {
        self.seal_what(What::Content(kind), frame)
    }

    /// The end of the stream: the last frame.
    ///
    /// # Errors
    /// As [`Sealer::seal`].
    pub fn end(mut self) -> Result<[u8; HEAD_LEN + TAG_LEN], FrameError> {
        let mut frame = [0; HEAD_LEN + TAG_LEN];
        self.seal_what(What::End, &mut frame)?;
        Ok(frame)
    }

    fn seal_what(&mut self, what: What, frame: &mut [u8]) -> Result<(), FrameError> {
        let (head_bytes, rest) = frame.split_at_mut(HEAD_LEN);
        let (content, tag_bytes) = rest.split_at_mut(rest.len() - TAG_LEN);
        if content.len() > CONTENT_MAX {
            return Err(FrameError::TooLong(content.len()));
        }
        // The counter is used up before anything is sealed with it, so that no failure brings it back.
        let counter = self.next.take().ok_or(FrameError::Spent)?;
        let head = Head::new(what, content.len(), counter)?;
        head_bytes.copy_from_slice(&head.bytes);
        match &self.protection {
            Protection::Sealed(key) => {
                let tag =
                    key.seal_in_place_separate_tag(nonce(counter), Aad::from(head.bytes), content);
                tag_bytes.copy_from_slice(tag.map_err(|_| FrameError::Cipher)?.as_ref());
            }
            Protection::Plain => tag_bytes.fill(0),
        }
        self.next = counter.checked_add(1);
        Ok(())
    }
}

/// Opens what a [`Sealer`] has sealed.
pub struct Opener {
    protection: Protection,
    frames: Frames,
    state: State,
}

/// Which frames a stream has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Frames {
    /// Bytes, and no frame without any: a file.
    Bytes,
    /// Frames of every kind: the wire.
    All,
}

/// What the opener waits for.
enum State {
    /// The frame with this counter.
    Frame(u64),
    /// Nothing: the end has come.
    Ended,
    /// Nothing: a frame was refused.
    Failed,
}

/// What was in a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// Content of this kind.
    Data(Kind, &'a mut [u8]),
    /// The stream is whole.
    End,
}

impl Opener {
    /// An opener of a file, with the sealer's key.
    ///
    /// # Errors
    /// [`FrameError::KeyLength`].
    pub(crate) fn new(key: &SecretBytes) -> Result<Self, FrameError> {
        let protection = Protection::Sealed(cipher(key)?);
        Ok(Self { protection, frames: Frames::Bytes, state: State::Frame(0) })
    }

    /// One of the wire.
    ///
    /// # Errors
    /// [`FrameError::KeyLength`].
    pub(crate) fn of_wire(key: &SecretBytes) -> Result<Self, FrameError> {
        Ok(Self { frames: Frames::All, ..Self::new(key)? })
    }

    /// One of frames that nothing protects.
    pub(crate) fn plain() -> Self {
        Self { protection: Protection::Plain, frames: Frames::All, state: State::Frame(0) }
    }

    /// Checks the head of the next frame. What follows is read only then: [`Head::following`] bytes.
    ///
    /// # Errors
    /// [`FrameError`]: the head is damaged, too long, out of order, or after the end.
    pub fn head(&mut self, bytes: [u8; HEAD_LEN]) -> Result<Head, FrameError> {
        let expected = self.expected()?;
        let checked = check(bytes, expected, self.frames);
        if checked.is_err() {
            self.state = State::Failed;
        }
        checked
    }

    /// Opens what follows a head, in its place. The content is the stream's next part.
    ///
    /// # Errors
    /// [`FrameError::Damaged`]; `sealed` then holds nothing of the content.
    pub fn open<'a>(
        &mut self,
        head: &Head,
        sealed: &'a mut [u8],
    ) -> Result<Content<'a>, FrameError> {
        let counter = self.expected()?;
        self.state = State::Failed;
        // A head that was kept back from an earlier frame must not open this one.
        check(head.bytes, counter, self.frames)?;
        if sealed.len() != head.following() {
            return Err(FrameError::Damaged(counter));
        }
        let damaged = FrameError::Damaged(counter);
        let content = match &self.protection {
            Protection::Sealed(key) => key
                .open_in_place(nonce(counter), Aad::from(head.bytes), sealed)
                .map_err(|_| damaged)?,
            Protection::Plain => match sealed.split_last_chunk_mut() {
                Some((content, tag)) if *tag == [0; TAG_LEN] => content,
                _ => return Err(damaged),
            },
        };
        match head.what {
            What::Content(kind) => {
                self.state = State::Frame(counter.checked_add(1).ok_or(FrameError::Spent)?);
                Ok(Content::Data(kind, content))
            }
            What::End => {
                self.state = State::Ended;
                Ok(Content::End)
            }
        }
    }

    /// Says whether the stream is whole, when nothing follows any more.
    ///
    /// # Errors
    /// [`FrameError::Truncated`]; [`FrameError::Spent`] after a frame that was refused.
    pub fn finish(&self) -> Result<(), FrameError> {
        match self.state {
            State::Ended => Ok(()),
            State::Frame(counter) => Err(FrameError::Truncated(counter)),
            State::Failed => Err(FrameError::Spent),
        }
    }

    fn expected(&self) -> Result<u64, FrameError> {
        match self.state {
            State::Frame(counter) => Ok(counter),
            State::Ended => Err(FrameError::AfterEnd),
            State::Failed => Err(FrameError::Spent),
        }
    }
}

/// Whether the last bytes of a stream may be its end: one that was cut off has others there. Whether they are is only known once it has
/// been opened.
#[must_use]
pub fn may_be_end(last: &[u8; END_LEN]) -> bool {
    matches!(last, [0, 0, 0, 0, END, 0, 0, 0, ..])
}

fn check(bytes: [u8; HEAD_LEN], expected: u64, frames: Frames) -> Result<Head, FrameError> {
    let [l0, l1, l2, l3, kind, zero @ .., c0, c1, c2, c3, c4, c5, c6, c7] = bytes;
    let length = usize::try_from(u32::from_be_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
    let what = match (kind, zero) {
        (END, [0, 0, 0]) if length == 0 => What::End,
        (END, _) => return Err(FrameError::Head(expected)),
        (0, [0, 0, 0]) if length > 0 || frames == Frames::All => What::Content(Kind::BYTES),
        (_, [0, 0, 0]) if frames == Frames::All => What::Content(Kind(kind)),
        _ => return Err(FrameError::Head(expected)),
    };
    if length > CONTENT_MAX {
        return Err(FrameError::TooLong(length));
    }
    let found = u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]);
    if found != expected {
        return Err(FrameError::OutOfOrder { expected, found });
    }
    Ok(Head { what, length, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> SecretBytes {
        SecretBytes::random(DERIVED_LEN).unwrap()
    }

    fn sealed(sealer: &mut Sealer, content: &[u8]) -> Result<Vec<u8>, FrameError> {
        let mut frame = [&[0; HEAD_LEN][..], content, &[0; TAG_LEN][..]].concat();
        sealer.seal(Kind::BYTES, &mut frame).map(|()| frame)
    }

    /// The frames of a stream of these parts, its end included.
    fn frames(key: &SecretBytes, parts: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut sealer = Sealer::new(key).unwrap();
        let mut frames: Vec<_> =
            parts.iter().map(|part| sealed(&mut sealer, part).unwrap()).collect();
        frames.push(sealer.end().unwrap().to_vec());
        frames
    }

    fn opened(key: &SecretBytes, frames: &[Vec<u8>]) -> Result<Vec<u8>, FrameError> {
        let (mut opener, mut content) = (Opener::new(key).unwrap(), Vec::new());
        for frame in frames {
            let (head, rest) = frame.split_first_chunk().unwrap();
            let head = opener.head(*head)?;
            let mut rest = rest.to_vec();
            rest.truncate(head.following());
            match opener.open(&head, &mut rest)? {
                Content::Data(Kind::BYTES, data) => content.extend_from_slice(data),
                Content::Data(kind, _) => panic!("{kind:?} in a file"),
                Content::End => {}
            }
        }
        opener.finish()?;
        Ok(content)
    }

    #[test]
    fn what_was_sealed_opens_with_its_key_alone() {
        let key = key();
        let long = vec![7; CONTENT_MAX];
        let sealed = frames(&key, &[b"one", &long, b"three"]);
        let expected = [b"one", &long[..], b"three"].concat();
        assert_eq!(opened(&key, &sealed).unwrap(), expected);
        assert_eq!(opened(&super::tests::key(), &sealed), Err(FrameError::Damaged(0)));
        assert!(!sealed[1].windows(8).any(|window| window == [7; 8]));
        assert_eq!(opened(&key, &frames(&key, &[])).unwrap(), b"");
    }

    #[test]
    fn frames_that_are_missing_doubled_moved_or_added_are_refused() {
        let key = key();
        let sealed = frames(&key, &[b"a", b"b", b"c"]);
        let of = |order: &[usize]| {
            let frames: Vec<_> = order.iter().map(|index| sealed[*index].clone()).collect();
            opened(&key, &frames)
        };
        assert_eq!(of(&[0, 1, 2, 3]).unwrap(), b"abc");
        let moved = |expected, found| Err(FrameError::OutOfOrder { expected, found });
        assert_eq!(of(&[1, 2, 3]), moved(0, 1));
        assert_eq!(of(&[0, 2, 3]), moved(1, 2));
        assert_eq!(of(&[0, 0, 1, 2, 3]), moved(1, 0));
        assert_eq!(of(&[0, 2, 1, 3]), moved(1, 2));
        assert_eq!(of(&[0, 1, 3]), moved(2, 3));
        assert_eq!(of(&[0, 1, 2, 3, 3]), Err(FrameError::AfterEnd));
        assert_eq!(of(&[0, 1, 2, 3, 0]), Err(FrameError::AfterEnd));
        for whole in 0..3 {
            let order: Vec<usize> = (0..whole).collect();
            assert_eq!(of(&order), Err(FrameError::Truncated(whole as u64)));
        }
        // The end of another stream ends nothing.
        let other = frames(&super::tests::key(), &[b"a"]);
        let mixed = [sealed[0].clone(), other[1].clone()];
        assert_eq!(opened(&key, &mixed), Err(FrameError::Damaged(1)));
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        let key = key();
        let sealed = frames(&key, &[b"content"]);
        for frame in 0..sealed.len() {
            for bit in 0..sealed[frame].len() * 8 {
                let mut bad = sealed.clone();
                bad[frame][bit / 8] ^= 1 << (bit % 8);
                assert!(opened(&key, &bad).is_err(), "frame {frame}, bit {bit}");
            }
        }
    }

    #[test]
    fn a_head_is_checked_before_what_follows_is_read() {
        let mut opener = Opener::new(&key()).unwrap();
        let mut head = [0; HEAD_LEN];
        head[..4].copy_from_slice(&(CONTENT_MAX as u32 + 1).to_be_bytes());
        assert_eq!(opener.head(head), Err(FrameError::TooLong(CONTENT_MAX + 1)));
        // A stream with a refused frame stays refused.
        head[..4].copy_from_slice(&1u32.to_be_bytes());
        assert_eq!(opener.head(head), Err(FrameError::Spent));
        assert_eq!(opener.finish(), Err(FrameError::Spent));
        let mut sealer = Sealer::new(&key()).unwrap();
        let refused = sealed(&mut sealer, &vec![0; CONTENT_MAX + 1]);
        assert_eq!(refused, Err(FrameError::TooLong(CONTENT_MAX + 1)));
    }

    #[test]
    fn a_head_of_an_earlier_frame_opens_no_later_one() {
        let key = key();
        let sealed = frames(&key, &[b"a", b"b"]);
        let mut opener = Opener::new(&key).unwrap();
        let first = opener.head(*sealed[0].first_chunk().unwrap()).unwrap();
        opener.open(&first, &mut sealed[0][HEAD_LEN..].to_vec()).unwrap();
        let mut again = sealed[0][HEAD_LEN..].to_vec();
        let again = opener.open(&first, &mut again);
        assert_eq!(again, Err(FrameError::OutOfOrder { expected: 1, found: 0 }));
    }

    #[test]
    fn no_counter_is_used_twice() {
        let mut sealer = Sealer::new(&key()).unwrap();
        sealer.next = Some(u64::MAX);
        sealed(&mut sealer, b"last").unwrap();
        assert_eq!(sealed(&mut sealer, b"more"), Err(FrameError::Spent));
        assert!(matches!(
            Sealer::new(&SecretBytes::zeroed(16).unwrap()),
            Err(FrameError::KeyLength(16))
        ));
    }
}
