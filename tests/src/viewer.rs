//! A viewer of a guest's screen: as much of the protocol RFB 3.8 (RFC 6143) as shows a picture and types.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::ensure;

/// How long a screen may take to answer.
const TIMEOUT: Duration = Duration::from_secs(30);

const VERSION: &[u8; 12] = b"RFB 003.008\n";

/// The bytes of a pixel, as screens offer it.
const PIXEL: usize = 4;

/// The key for a line's end; keys of ASCII's letters have their codes.
const RETURN: u32 = 0xff0d;

/// A viewer that is connected.
pub struct Viewer {
    stream: TcpStream,
    width: u16,
    height: u16,
}

impl Viewer {
    /// Connects, without a password.
    ///
    /// # Errors
    /// Nothing there speaks the protocol, or wants a password.
    pub fn connect(address: &str) -> anyhow::Result<Self> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let said: [u8; 12] = read(&mut stream)?;
        ensure!(said == *VERSION, "no screen: {said:?}");
        stream.write_all(VERSION)?;
        let [kinds] = read(&mut stream)?;
        let mut offered = vec![0; usize::from(kinds)];
        stream.read_exact(&mut offered)?;
        ensure!(offered.contains(&1), "it wants more than nothing to let a viewer in: {offered:?}");
        stream.write_all(&[1])?;
        let refused = u32::from_be_bytes(read(&mut stream)?);
        ensure!(refused == 0, "the viewer is not let in");
        stream.write_all(&[1])?; // others may look, too
        let size: [u8; 4] = read(&mut stream)?;
        let format: [u8; 16] = read(&mut stream)?;
        ensure!(usize::from(format[0]) == 8 * PIXEL, "pixels of {} bits", format[0]);
        let mut name = vec![0; u32::from_be_bytes(read(&mut stream)?).min(4096) as usize];
        stream.read_exact(&mut name)?;
        // One encoding: pixels as they are.
        stream.write_all(&[2, 0, 0, 1, 0, 0, 0, 0])?;
        let [width, height] = [[size[0], size[1]], [size[2], size[3]]].map(u16::from_be_bytes);
        Ok(Self { stream, width, height })
    }

    /// How many of the picture's pixels are not black.
    ///
    /// # Errors
    /// The screen does not answer, or not by the protocol.
    pub fn lit(&mut self) -> anyhow::Result<usize> {
        let mut request = vec![3, 0, 0, 0, 0, 0];
        request.extend(self.width.to_be_bytes());
        request.extend(self.height.to_be_bytes());
        self.stream.write_all(&request)?;
        loop {
            match read(&mut self.stream)? {
                [0] => return self.lit_in_update(),
                // The bell has nothing more to say.
                [2] => {}
                [other] => anyhow::bail!("a message {other} was not asked for"),
            }
        }
    }

    fn lit_in_update(&mut self) -> anyhow::Result<usize> {
        let [_, high, low] = read(&mut self.stream)?;
        let mut lit = 0;
        for _ in 0..u16::from_be_bytes([high, low]) {
            let rectangle: [u8; 12] = read(&mut self.stream)?;
            let [_, _, _, _, w0, w1, h0, h1, encoding @ ..] = rectangle;
            ensure!(encoding == [0; 4], "a rectangle is encoded as {encoding:?}");
            let [width, height] =
                [[w0, w1], [h0, h1]].map(|it| usize::from(u16::from_be_bytes(it)));
            let mut pixels = vec![0; width * height * PIXEL];
            self.stream.read_exact(&mut pixels)?;
            // The fourth byte is no colour.
            lit += pixels.chunks_exact(PIXEL).filter(|pixel| pixel[..3] != [0; 3]).count();
        }
        Ok(lit)
    }

    /// Types letters and a line's end, as a keyboard does.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn type_line(&mut self, text: &str) -> anyhow::Result<()> {
        for key in text.bytes().map(u32::from).chain([RETURN]) {
            for pressed in [1, 0] {
                let [a, b, c, d] = key.to_be_bytes();
                self.stream.write_all(&[4, pressed, 0, 0, a, b, c, d])?;
            }
        }
        Ok(())
    }
}

fn read<const N: usize>(stream: &mut TcpStream) -> anyhow::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
