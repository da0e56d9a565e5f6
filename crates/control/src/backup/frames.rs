//! The sealed content of a backup: frames of AES-256-GCM, each of at most a megabyte. The key is used for one file
//! alone, so that the number of a frame can be its nonce. A frame says whether it is the last one, and that is
//! authenticated: a file that was cut off, or added to, does not open.
//!
//! ```text
//! head (4): 1 bit: the last one ‖ 31 bits: length of the content    ‖ content, sealed ‖ tag (16)
//! nonce: 4 zero bytes ‖ number of the frame (8), from 0; associated data: the head
//! ```

use std::io::{self, ErrorKind, Read, Write};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use vmseal_api::server_backup::FRAME_MAX;
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

const TAG_LEN: usize = 16;

/// The bit of a head that says that the frame is the last one.
const LAST: u32 = 1 << 31;

fn cipher(key: &SecretBytes) -> io::Result<LessSafeKey> {
    let key = UnboundKey::new(&AES_256_GCM, key.expose());
    Ok(LessSafeKey::new(key.map_err(|_| io::Error::other("AES-256-GCM takes no such key"))?))
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[NONCE_LEN - 8..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Seals what is written to it.
pub(super) struct FrameWriter<W> {
    to: W,
    key: LessSafeKey,
    number: u64,
    content: Zeroizing<Vec<u8>>,
}

impl<W: Write> FrameWriter<W> {
    pub(super) fn new(to: W, key: &SecretBytes) -> io::Result<Self> {
        let content = Zeroizing::new(Vec::with_capacity(FRAME_MAX + TAG_LEN));
        Ok(Self { to, key: cipher(key)?, number: 0, content })
    }

    fn frame(&mut self, last: bool) -> io::Result<()> {
        let length = u32::try_from(self.content.len()).map_err(io::Error::other)?;
        let head = (if last { length | LAST } else { length }).to_be_bytes();
        self.key
            .seal_in_place_append_tag(nonce(self.number), Aad::from(head), &mut *self.content)
            .map_err(|_| io::Error::other("AES-256-GCM failed"))?;
        self.number += 1;
        self.to.write_all(&head)?;
        self.to.write_all(&self.content)?;
        self.content.clear();
        Ok(())
    }

    /// Writes the last frame.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.frame(true)?;
        Ok(self.to)
    }
}

impl<W: Write> Write for FrameWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.content.len() == FRAME_MAX {
            self.frame(false)?;
        }
        let taken = bytes.len().min(FRAME_MAX - self.content.len());
        self.content.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Opens what [`FrameWriter`] has sealed.
pub(super) struct FrameReader<R> {
    from: R,
    key: LessSafeKey,
    number: u64,
    /// The current frame's content, and how much of it has been read.
    content: Zeroizing<Vec<u8>>,
    read: usize,
    last: bool,
}

impl<R: Read> FrameReader<R> {
    pub(super) fn new(from: R, key: &SecretBytes) -> io::Result<Self> {
        let content = Zeroizing::new(Vec::with_capacity(FRAME_MAX + TAG_LEN));
        Ok(Self { from, key: cipher(key)?, number: 0, content, read: 0, last: false })
    }

    fn frame(&mut self) -> io::Result<()> {
        let wrong = |why: &str| io::Error::new(ErrorKind::InvalidData, why.to_owned());
        let cut = |error: io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => wrong("its end is missing"),
            _ => error,
        };
        let mut head = [0; 4];
        self.from.read_exact(&mut head).map_err(cut)?;
        let said = u32::from_be_bytes(head);
        let length = usize::try_from(said & !LAST).unwrap_or(usize::MAX);
        if length > FRAME_MAX {
            return Err(wrong("it is damaged"));
        }
        self.content.clear();
        self.content.resize(length + TAG_LEN, 0);
        self.from.read_exact(&mut self.content).map_err(cut)?;
        self.key
            .open_in_place(nonce(self.number), Aad::from(head), &mut self.content)
            .map_err(|_| wrong("it is damaged, or was changed"))?;
        self.content.truncate(length);
        self.number += 1;
        (self.read, self.last) = (0, said & LAST != 0);
        if self.last && self.from.read(&mut [0])? != 0 {
            return Err(wrong("something follows its end"));
        }
        Ok(())
    }

    /// Checks that all was read, to the last frame.
    pub(super) fn finish(mut self) -> io::Result<()> {
        match self.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(io::Error::new(ErrorKind::InvalidData, "it holds more than its list says")),
        }
    }
}

impl<R: Read> Read for FrameReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        while self.read == self.content.len() {
            if self.last {
                return Ok(0);
            }
            self.frame()?;
        }
        let taken = to.len().min(self.content.len() - self.read);
        to[..taken].copy_from_slice(&self.content[self.read..self.read + taken]);
        self.read += taken;
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY_LEN: usize = 32;

    fn sealed(content: &[u8], key: &SecretBytes) -> Vec<u8> {
        let mut writer = FrameWriter::new(Vec::new(), key).unwrap();
        writer.write_all(content).unwrap();
        writer.finish().unwrap()
    }

    fn opened(sealed: &[u8], key: &SecretBytes) -> io::Result<Vec<u8>> {
        let mut reader = FrameReader::new(sealed, key)?;
        let mut content = Vec::new();
        reader.read_to_end(&mut content)?;
        reader.finish()?;
        Ok(content)
    }

    #[test]
    fn what_was_sealed_opens_whatever_its_length() {
        let key = SecretBytes::random(KEY_LEN).unwrap();
        for length in [0, 1, FRAME_MAX - 1, FRAME_MAX, FRAME_MAX + 1, 2 * FRAME_MAX + 5] {
            let content: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            assert!(opened(&sealed(&content, &key), &key).unwrap() == content, "{length}");
        }
        let other = SecretBytes::random(KEY_LEN).unwrap();
        assert!(opened(&sealed(b"text", &key), &other).is_err());
    }

    /// At the ends of frames there is nothing else to see it by.
    #[test]
    fn frames_that_are_missing_swapped_or_added_do_not_open() {
        let key = SecretBytes::random(KEY_LEN).unwrap();
        let whole = sealed(&vec![7; 3 * FRAME_MAX], &key);
        let frame = 4 + FRAME_MAX + TAG_LEN;
        assert_eq!(whole.len(), 3 * frame);
        let part = |number: usize| &whole[number * frame..(number + 1) * frame];
        for (what, spoiled) in [
            ("the last one is missing", [part(0), part(1)].concat()),
            ("one is missing", [part(0), part(2)].concat()),
            ("two are swapped", [part(1), part(0), part(2)].concat()),
            ("the last one comes early", [part(0), part(2), part(1)].concat()),
            ("one follows the last one", [&whole[..], part(2)].concat()),
        ] {
            assert_eq!(
                opened(&spoiled, &key).unwrap_err().kind(),
                ErrorKind::InvalidData,
                "{what}"
            );
        }
        // Nor does one that claims to be the last.
        let mut early = part(0).to_vec();
        early[0] |= 0x80;
        assert!(opened(&early, &key).is_err());
    }
}
