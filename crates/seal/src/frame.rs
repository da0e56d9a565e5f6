//! Frames: a stream cut into pieces, each sealed with AES-256-GCM under one key that no other stream has.
//!
//! ```text
//! head (16): length of the content (4) ‖ kind (1): 0 data, 1 end ‖ zero (3) ‖ counter (8), from 0
//! content, sealed ‖ tag (16)
//! nonce: 4 zero bytes ‖ counter (8); associated data: the head
//! ```
//! Both sides count. A frame that is missing, doubled, in another place, or after the end is refused, and a stream without its
//! end is not whole.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::DERIVED_LEN;

/// The length of a frame's head, in bytes.
pub const HEAD_LEN: usize = 16;

/// The length of a frame's tag, in bytes.
pub const TAG_LEN: usize = 16;

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

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A part of the stream.
    Data,
    /// The end of the stream. It has no content.
    End,
}

/// The head of a frame. What it says is true only once the frame was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    kind: Kind,
    length: usize,
    bytes: [u8; HEAD_LEN],
}

impl Head {
    fn new(kind: Kind, length: usize, counter: u64) -> Result<Self, FrameError> {
        let mut bytes = [0; HEAD_LEN];
        let said = u32::try_from(length).map_err(|_| FrameError::TooLong(length))?;
        bytes[..4].copy_from_slice(&said.to_be_bytes());
        bytes[4] = u8::from(kind == Kind::End);
        bytes[8..].copy_from_slice(&counter.to_be_bytes());
        Ok(Self { kind, length, bytes })
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

/// Seals one stream. The key must be new: a second sealer with the same key would use the same nonces again.
pub struct Sealer {
    key: LessSafeKey,
    /// The counter of the next frame; none when there is none any more.
    next: Option<u64>,
}

impl Sealer {
    /// A sealer with this key of 32 bytes.
    ///
    /// # Errors
    /// [`FrameError::KeyLength`].
    pub fn new(key: &SecretBytes) -> Result<Self, FrameError> {
        Ok(Self { key: cipher(key)?, next: Some(0) })
    }

    /// Appends a frame with this content to `out`: 1 to [`CONTENT_MAX`] bytes. No content makes no frame.
    ///
    /// # Errors
    /// [`FrameError::TooLong`]; [`FrameError::Spent`]; [`FrameError::Cipher`], and from then on `Spent`.
    pub fn data(&mut self, content: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
        if content.is_empty() { Ok(()) } else { self.frame(Kind::Data, content, out) }
    }

    /// Appends the end of the stream to `out`.
    ///
    /// # Errors
    /// As [`Sealer::data`].
    pub fn end(mut self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        self.frame(Kind::End, &[], out)
    }

    fn frame(&mut self, kind: Kind, content: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
        if content.len() > CONTENT_MAX {
            return Err(FrameError::TooLong(content.len()));
        }
        // The counter is used up before anything is sealed with it, so that no failure brings it back.
        let counter = self.next.take().ok_or(FrameError::Spent)?;
        let head = Head::new(kind, content.len(), counter)?;
        let start = out.len();
        out.reserve(HEAD_LEN + head.following());
        out.extend_from_slice(&head.bytes);
        out.extend_from_slice(content);
        let tag = self.key.seal_in_place_separate_tag(
            nonce(counter),
            Aad::from(head.bytes),
            &mut out[start + HEAD_LEN..],
        );
        let Ok(tag) = tag else {
            // It may hold the content in the clear.
            out[start..].fill(0);
            out.truncate(start);
            return Err(FrameError::Cipher);
        };
        out.extend_from_slice(tag.as_ref());
        self.next = counter.checked_add(1);
        Ok(())
    }
}

/// Opens what a [`Sealer`] has sealed.
pub struct Opener {
    key: LessSafeKey,
    state: State,
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
    /// A part of the stream.
    Data(&'a [u8]),
    /// The stream is whole.
    End,
}

impl Opener {
    /// An opener with the sealer's key.
    ///
    /// # Errors
    /// [`FrameError::KeyLength`].
    pub fn new(key: &SecretBytes) -> Result<Self, FrameError> {
        Ok(Self { key: cipher(key)?, state: State::Frame(0) })
    }

    /// Checks the head of the next frame. What follows is read only then: [`Head::following`] bytes.
    ///
    /// # Errors
    /// [`FrameError`]: the head is damaged, too long, out of order, or after the end.
    pub fn head(&mut self, bytes: [u8; HEAD_LEN]) -> Result<Head, FrameError> {
        let expected = self.expected()?;
        let checked = check(bytes, expected);
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
        check(head.bytes, counter)?;
        if sealed.len() != head.following() {
            return Err(FrameError::Damaged(counter));
        }
        let opened = self.key.open_in_place(nonce(counter), Aad::from(head.bytes), sealed);
        let content = opened.map_err(|_| FrameError::Damaged(counter))?;
        match head.kind {
            Kind::Data => {
                self.state = State::Frame(counter.checked_add(1).ok_or(FrameError::Spent)?);
                Ok(Content::Data(content))
            }
            Kind::End => {
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

fn check(bytes: [u8; HEAD_LEN], expected: u64) -> Result<Head, FrameError> {
    let [l0, l1, l2, l3, kind, zero @ .., c0, c1, c2, c3, c4, c5, c6, c7] = bytes;
    let length = usize::try_from(u32::from_be_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
    let kind = match (kind, zero) {
        (0, [0, 0, 0]) if length > 0 => Kind::Data,
        (1, [0, 0, 0]) if length == 0 => Kind::End,
        _ => return Err(FrameError::Head(expected)),
    };
    if length > CONTENT_MAX {
        return Err(FrameError::TooLong(length));
    }
    let found = u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]);
    if found != expected {
        return Err(FrameError::OutOfOrder { expected, found });
    }
    Ok(Head { kind, length, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> SecretBytes {
        SecretBytes::random(DERIVED_LEN).unwrap()
    }

    /// The frames of a stream of these parts, its end included.
    fn frames(key: &SecretBytes, parts: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut sealer = Sealer::new(key).unwrap();
        let mut frames = Vec::new();
        for part in parts {
            let mut frame = Vec::new();
            sealer.data(part, &mut frame).unwrap();
            frames.push(frame);
        }
        let mut end = Vec::new();
        sealer.end(&mut end).unwrap();
        frames.push(end);
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
                Content::Data(data) => content.extend_from_slice(data),
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
        let refused = sealer.data(&vec![0; CONTENT_MAX + 1], &mut Vec::new());
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
        let mut out = Vec::new();
        sealer.data(b"last", &mut out).unwrap();
        let length = out.len();
        assert_eq!(sealer.data(b"more", &mut out), Err(FrameError::Spent));
        assert_eq!(out.len(), length, "a refused frame leaves nothing");
        assert!(matches!(
            Sealer::new(&SecretBytes::zeroed(16).unwrap()),
            Err(FrameError::KeyLength(16))
        ));
    }
}
