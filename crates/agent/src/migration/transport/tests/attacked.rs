//! Somebody between the hosts changes what goes to the destination.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc;

use vmseal_seal::frame::{HEAD_LEN, TAG_LEN};
use vmseal_seal::wire::{HELLO_LEN, PROOF_LEN};

use super::*;

/// What is done to the frames of one stream.
#[derive(Clone, Copy, Debug)]
enum Attack {
    /// A bit of the frame with this counter, at this byte from its begin.
    Flip(u64, usize),
    Drop(u64),
    Double(u64),
    /// With the one after it.
    Swap(u64),
    /// In its place comes the frame of the other stream with the same counter.
    Splice(u64),
    /// The connection is cut after this many bytes of frames.
    Cut(usize),
    /// An end is put in: the head of one, and a tag of zeroes.
    Forge(u64),
}

/// Between the hosts: each stream is a connection to it and one of its own to the destination.
fn proxy(to: SocketAddr, streams: u16, attack: Attack) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (spare, spares) = mpsc::channel();
    let mut spares = Some(spares);
    thread::spawn(move || {
        for _ in 0..streams {
            let (source, _) = listener.accept().unwrap();
            let destination = TcpStream::connect(to).unwrap();
            let (back, to_source) = (destination.try_clone().unwrap(), source.try_clone().unwrap());
            thread::spawn(move || pass(back, &to_source));
            let mut hello = [0; HELLO_LEN];
            (&source).read_exact(&mut hello).unwrap();
            (&destination).write_all(&hello).unwrap();
            // Stream 0 is attacked, stream 1 has the frames that are put in.
            let (spare, spares) = (spare.clone(), (hello[13] == 0).then(|| spares.take().unwrap()));
            thread::spawn(move || {
                let attacked = spares.map(|spares| (attack, spares));
                // Either host may close at any time.
                let _ = forward(&source, &destination, attacked, &spare);
                let _ = destination.shutdown(Shutdown::Write);
                if matches!(attack, Attack::Cut(_)) {
                    let _ = destination.shutdown(Shutdown::Both);
                    let _ = source.shutdown(Shutdown::Both);
                }
                let _ = std::io::copy(&mut &source, &mut std::io::sink());
            });
        }
    });
    address
}

fn pass(mut from: TcpStream, mut to: &TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
}

fn frame(mut from: &TcpStream) -> std::io::Result<Vec<u8>> {
    let mut frame = vec![0; HEAD_LEN];
    from.read_exact(&mut frame)?;
    let length = u32::from_be_bytes(frame[..4].try_into().unwrap()) as usize;
    frame.resize(HEAD_LEN + length + TAG_LEN, 0);
    from.read_exact(&mut frame[HEAD_LEN..])?;
    Ok(frame)
}

fn forward(
    mut from: &TcpStream,
    mut to: &TcpStream,
    attacked: Option<(Attack, mpsc::Receiver<Vec<u8>>)>,
    spare: &mpsc::Sender<Vec<u8>>,
) -> std::io::Result<()> {
    let mut proof = [0; PROOF_LEN];
    from.read_exact(&mut proof)?;
    to.write_all(&proof)?;
    let Some((attack, spares)) = attacked else {
        loop {
            let frame = frame(from)?;
            let _ = spare.send(frame.clone());
            to.write_all(&frame)?;
        }
    };
    if let Attack::Cut(bytes) = attack {
        // The source sends once the stream was confirmed; before that there is no session.
        from.peek(&mut [0])?;
        std::io::copy(&mut from.take(bytes as u64), &mut to)?;
        return Ok(());
    }
    for counter in 0.. {
        let mut next = frame(from)?;
        let now = |at: u64| at == counter;
        match attack {
            Attack::Flip(at, byte) if now(at) => {
                let byte = byte.min(next.len() - 1);
                next[byte] ^= 0x40;
            }
            Attack::Drop(at) if now(at) => continue,
            Attack::Double(at) if now(at) => to.write_all(&next)?,
            Attack::Swap(at) if now(at) => to.write_all(&frame(from)?)?,
            Attack::Splice(at) if now(at) => {
                next = spares.iter().nth(at as usize).unwrap();
            }
            Attack::Forge(at) if now(at) => {
                let mut end = [0; HEAD_LEN + TAG_LEN];
                end[4] = 1;
                end[8..16].copy_from_slice(&counter.to_be_bytes());
                to.write_all(&end)?;
            }
            _ => {}
        }
        to.write_all(&next)?;
    }
    Ok(())
}

/// How many parts go through each stream, and how long each of them is.
const PARTS: u8 = 8;
const PART: usize = 50_000;

/// Sends numbered parts, and waits for what never comes: an answer. Why the session has failed.
fn send(session: &mut Session, stream: u16) -> thread::JoinHandle<TransportError> {
    let (mut sender, mut back) = records(session.take(stream).unwrap()).unwrap();
    thread::spawn(move || {
        let mut sending = || -> Result<(), TransportError> {
            for part in 0..PARTS {
                sender.send(Kind::BYTES, &[part; PART])?;
            }
            Ok(())
        };
        // The end of the other stream does not come: it is not done when the attack is noticed.
        let sent = match (sending(), stream) {
            (Ok(()), 0) => sender.finish(),
            (sent, _) => sent,
        };
        sent.and_then(|()| back.receive().map(|_| ())).unwrap_err()
    })
}

/// Sends through two streams, of which the first one is attacked. What the destination's QEMU got of that one, and why the destination
/// says that it failed.
async fn attacked(attack: Attack) -> (Vec<u8>, TransportError) {
    let listener = listener().await;
    let address = proxy(listener.address(), 2, attack);
    let expected = listener.expect(spec(2, Cipher::Aes256Gcm)).unwrap();
    let accepting = tokio::spawn(expected.session(LONG));
    let mut here = connect(spec(2, Cipher::Aes256Gcm), address).await.unwrap();
    let mut there = accepting.await.unwrap().unwrap();
    let (destination, other) = (bridged(&mut there, 0), bridged(&mut there, 1));
    let sending = [1, 0].map(|stream| send(&mut here, stream));
    let mut got = Vec::new();
    // Its end may be an error, too.
    let _ = (&destination.socket).read_to_end(&mut got);
    let failed = destination.bridge.done().await.unwrap_err();
    let also = other.bridge.done().await.unwrap_err();
    assert_eq!(failed.to_string(), also.to_string(), "{attack:?}: the other stream fails with it");
    for sending in sending {
        sending.join().unwrap();
    }
    assert!(here.handle().failure().is_some(), "{attack:?}: the source goes on");
    (got, failed)
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_frames_end_in_a_named_error_and_never_in_accepted_bytes() {
    let moved = |expected, found| FrameError::OutOfOrder { expected, found };
    let end = u64::from(PARTS);
    for (attack, error) in [
        (Attack::Flip(3, 0), FrameError::TooLong(0x4000_0000 + PART)),
        (Attack::Flip(3, 4), FrameError::Damaged(3)),
        (Attack::Flip(3, 5), FrameError::Head(3)),
        (Attack::Flip(3, 15), moved(3, 3 ^ 0x40)),
        (Attack::Flip(3, 1000), FrameError::Damaged(3)),
        (Attack::Flip(3, usize::MAX), FrameError::Damaged(3)),
        (Attack::Flip(end, 20), FrameError::Damaged(end)),
        (Attack::Drop(3), moved(3, 4)),
        (Attack::Drop(end), FrameError::Truncated(end)),
        (Attack::Double(2), moved(3, 2)),
        (Attack::Swap(4), moved(4, 5)),
        (Attack::Splice(5), FrameError::Damaged(5)),
        (Attack::Forge(3), FrameError::Damaged(3)),
    ] {
        let (got, failed) = attacked(attack).await;
        let TransportError::Frame { stream: 0, error: found } = failed else {
            panic!("{attack:?}: {failed}")
        };
        assert_eq!(found, error, "{attack:?}");
        accepted(&got);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_cut_anywhere_is_not_an_end() {
    let whole = usize::from(PARTS) * (PART + HEAD_LEN + TAG_LEN);
    let end = HEAD_LEN + TAG_LEN;
    let mut random = [0; 4 * 8];
    aws_lc_rs::rand::fill(&mut random).unwrap();
    let anywhere = random
        .chunks(8)
        .map(|chunk| u64::from_be_bytes(chunk.try_into().unwrap()) as usize % (whole + end));
    for at in anywhere.chain([0, HEAD_LEN, whole, whole + end - 1]) {
        let (got, failed) = attacked(Attack::Cut(at)).await;
        match failed {
            TransportError::Frame { error: FrameError::Truncated(_), .. }
            | TransportError::Lost { .. } => {}
            other => panic!("cut after {at} bytes: {other}"),
        }
        accepted(&got);
    }
}

/// What the destination's QEMU got is the begin of what was sent.
fn accepted(got: &[u8]) {
    let sent = (0..PARTS).flat_map(|part| [part; PART]);
    assert!(
        got.len() <= usize::from(PARTS) * PART && sent.zip(got).all(|(sent, got)| sent == *got)
    );
}
