mod attacked;
mod listening;
mod messages;
mod placing;

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::thread;

use uuid::Uuid;
use vmseal_seal::frame::FrameError;
use vmseal_secret::SecretBytes;
use vmseal_secret::digest::{SHA256_LEN, Sha256};

use super::socket::NOT_SENT_MAX;
use super::*;

/// For what has to come in any case, also on a machine that is very busy.
const LONG: Duration = Duration::from_secs(60);

const MIB: usize = 1 << 20;

fn spec(streams: u16, cipher: Cipher) -> Spec {
    spec_of(Uuid::from_bytes([7; 16]), 1, streams, cipher)
}

fn spec_of(migration: Uuid, key: u8, streams: u16, cipher: Cipher) -> Spec {
    let key = SecretBytes::from_wiped(&mut [key; 32]).unwrap();
    Spec::new(migration, key, 42, streams, cipher).unwrap()
}

async fn listener() -> Listener {
    Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap()
}

/// The connecting and the accepting end of a session.
async fn sessions(streams: u16, cipher: Cipher) -> (Session, Session) {
    let listener = listener().await;
    let expected = listener.expect(spec(streams, cipher)).unwrap();
    let accepting = tokio::spawn(expected.session(LONG));
    let connecting = connect(spec(streams, cipher), listener.address()).await.unwrap();
    (connecting, accepting.await.unwrap().unwrap())
}

/// What a QEMU on one side of a bridge has.
struct Local {
    bridge: Bridge,
    socket: UnixStream,
}

fn bridged(session: &mut Session, stream: u16) -> Local {
    bridged_with(session, stream, Compressed::Never)
}

fn bridged_with(session: &mut Session, stream: u16, compression: Compressed) -> Local {
    let (socket, other) = UnixStream::pair().unwrap();
    let carrier = Carrier::new(session.take(stream).unwrap()).unwrap();
    let bridge = carrier.compressing(compression).last(other).unwrap();
    Local { bridge, socket }
}

/// Writes random bytes and the end, and reads to the end. The digests of both.
fn talk(
    socket: UnixStream,
    length: usize,
) -> thread::JoinHandle<([u8; SHA256_LEN], [u8; SHA256_LEN], usize)> {
    thread::spawn(move || {
        let reading = socket.try_clone().unwrap();
        let read = thread::spawn(move || drain(reading));
        let written = pour(&socket, length);
        let (read, count) = read.join().unwrap();
        (written, read, count)
    })
}

fn pour(mut socket: &UnixStream, length: usize) -> [u8; SHA256_LEN] {
    let (mut digest, mut block, mut left) = (Sha256::new(), vec![0; MIB], length);
    aws_lc_rs::rand::fill(&mut block).unwrap();
    while left > 0 {
        let part = left.min(block.len());
        block[..8].copy_from_slice(&left.to_be_bytes());
        digest.update(&block[..part]);
        socket.write_all(&block[..part]).unwrap();
        left -= part;
    }
    socket.shutdown(std::net::Shutdown::Write).unwrap();
    digest.finish()
}

/// Reads to the end, whatever kind of end it is.
fn drain(mut socket: UnixStream) -> ([u8; SHA256_LEN], usize) {
    let (mut digest, mut block, mut count) = (Sha256::new(), vec![0; MIB], 0);
    while let Ok(read @ 1..) = socket.read(&mut block) {
        digest.update(&block[..read]);
        count += read;
    }
    (digest.finish(), count)
}

/// Nothing is placed in memory.
fn moved(sent: u64, received: u64) -> Moved {
    Moved { sent, received, placed: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn bridges_carry_all_bytes_both_ways_and_their_ends() {
    for (streams, cipher) in
        [(1, Cipher::Aes256Gcm), (2, Cipher::Aes256Gcm), (4, Cipher::Aes256Gcm), (2, Cipher::None)]
    {
        let (mut here, mut there) = sessions(streams, cipher).await;
        let (length, back) = (32 * MIB / usize::from(streams) + 13, 100_003);
        let mut all = Vec::new();
        for stream in 0..streams {
            let (source, destination) = (bridged(&mut here, stream), bridged(&mut there, stream));
            let sides = (talk(source.socket, length), talk(destination.socket, back));
            all.push((source.bridge, destination.bridge, sides));
        }
        for (source, destination, sides) in all {
            let (length, back) = (length as u64, back as u64);
            assert_eq!(source.done().await.unwrap(), moved(length, back));
            assert_eq!(destination.done().await.unwrap(), moved(back, length));
            let (here, there) = (sides.0.join().unwrap(), sides.1.join().unwrap());
            assert!(here.0 == there.1 && there.0 == here.1, "{streams} streams, {cipher:?}");
        }
        let counters = here.handle().counters();
        assert_eq!(counters.len(), usize::from(streams));
        for counted in counters {
            assert_eq!(counted.sent_bytes, length as u64);
            assert_eq!(counted.received_bytes, back as u64);
            assert!(counted.sent_frames > 0 && counted.sending_cpu > Duration::ZERO);
        }
        assert!(here.handle().failure().is_none() && there.handle().failure().is_none());
    }
}

/// The first 8 bytes of each MiB tell where it is, the others repeat.
fn compressible(length: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..length / 64).flat_map(|at| [(at % 251) as u8; 64]).collect();
    for (number, block) in bytes.chunks_mut(MIB).enumerate() {
        block[..8].copy_from_slice(&number.to_be_bytes());
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_rate_holds_back_is_compressed_and_comes_as_it_was() {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
    // Far below what compression and decompression can do.
    here.handle().set_rate(NonZeroU64::new(2 << 20));
    let source = bridged_with(&mut here, 0, Compressed::Sent);
    let mut destination = bridged_with(&mut there, 0, Compressed::Received);
    let bytes = compressible(32 * MIB);
    let (mut writing, written) = (source.socket, bytes.clone());
    let writer = thread::spawn(move || {
        writing.write_all(&written).unwrap();
        writing.shutdown(std::net::Shutdown::Write).unwrap();
        // What comes back is nothing, and its end.
        writing.read(&mut [0]).unwrap()
    });
    let mut received = Vec::new();
    destination.socket.read_to_end(&mut received).unwrap();
    assert!(received == bytes);
    destination.socket.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(writer.join().unwrap(), 0);
    let length = bytes.len() as u64;
    assert_eq!(source.bridge.done().await.unwrap(), moved(length, 0));
    assert_eq!(destination.bridge.done().await.unwrap(), moved(0, length));
    let sent = here.handle().counters()[0].sent_bytes;
    assert!(sent < length / 4, "{sent} of {length}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frame_that_cannot_be_decompressed_or_has_no_place_fails_the_session() {
    for compression in [Compressed::Received, Compressed::Never, Compressed::Sent] {
        let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
        let (mut sender, _unused) = records(here.take(0).unwrap()).unwrap();
        let destination = bridged_with(&mut there, 0, compression);
        sender.send(super::compression::COMPRESSED, &[0, 4, 0, 1, 7]).unwrap();
        let failed = destination.bridge.done().await.unwrap_err();
        let expected = match compression {
            Compressed::Received => matches!(failed, TransportError::Compressed { stream: 0 }),
            _ => matches!(failed, TransportError::Kind { stream: 0, kind: 5 }),
        };
        assert!(expected, "{compression:?}: {failed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_keep_their_kinds_and_bounds() {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
    let (mut sender, _unused) = records(here.take(0).unwrap()).unwrap();
    let (back, mut receiver) = records(there.take(0).unwrap()).unwrap();
    let (pages, blocks) = (Kind::new(16), Kind::new(17));
    let received = thread::spawn(move || {
        let mut received = Vec::new();
        while let Some((kind, content)) = receiver.receive().unwrap() {
            received.push((kind.number(), content.to_vec()));
        }
        assert!(receiver.receive().unwrap().is_none(), "the end stays the end");
        received
    });
    let long = vec![5; CONTENT_MAX];
    for (kind, content) in [(pages, &b"page"[..]), (blocks, b""), (pages, &long), (blocks, b"b")] {
        sender.send(kind, content).unwrap();
    }
    sender.finish().unwrap();
    back.finish().unwrap();
    let expected = [(16, b"page".to_vec()), (17, vec![]), (16, long), (17, b"b".to_vec())];
    assert!(received.join().unwrap() == expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_destination_leaves_what_it_has_not_taken_with_qemu() {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
    let (source, mut destination) = (bridged(&mut here, 0), bridged(&mut there, 0));
    let (length, handle) = (96 * MIB, here.handle());
    let writer = thread::spawn(move || pour(&source.socket, length));
    let unsent = || handle.counters()[0].unsent_bytes;
    // Nobody reads, so the kernel's buffers fill up until the connection takes no more.
    while unsent() == 0 {
        thread::yield_now();
    }
    let (mut block, mut count, mut most) = (vec![0; MIB], 0, 0);
    loop {
        let read = destination.socket.read(&mut block).unwrap();
        if read == 0 {
            break;
        }
        count += read;
        most = most.max(unsent());
    }
    assert_eq!(count, length);
    writer.join().unwrap();
    // The kernel looks at the limit before it takes a piece of at most 64 KiB or so.
    let bound = NOT_SENT_MAX as u64 + 128 * 1024;
    assert!(most <= bound, "{most} bytes waited in the kernel, more than {bound}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_holds_frames_back_until_it_is_lifted() {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
    let handle = here.handle();
    handle.set_rate(NonZeroU64::new(1));
    let (mut sender, _unused) = records(here.take(0).unwrap()).unwrap();
    let (_back, mut receiver) = records(there.take(0).unwrap()).unwrap();
    let sending = thread::spawn(move || {
        // At one byte per second the second one would go tomorrow.
        sender.send(Kind::BYTES, &[1; 100_000]).unwrap();
        sender.send(Kind::BYTES, &[2; 100_000]).unwrap();
        sender.finish().unwrap();
    });
    assert_eq!(receiver.receive().unwrap().unwrap().1.len(), 100_000);
    // It is counted a moment after it has gone.
    while handle.counters()[0].sent_frames == 0 {
        thread::yield_now();
    }
    assert_eq!(handle.counters()[0].sent_frames, 1);
    handle.set_rate(None);
    assert_eq!(receiver.receive().unwrap().unwrap().1, [2; 100_000]);
    sending.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_session_ends_everything_on_both_hosts() {
    // While the source waits for QEMU, for the network, and for the rate.
    for rate in [None, NonZeroU64::new(1)] {
        for busy in [false, true] {
            let (mut here, mut there) = sessions(2, Cipher::Aes256Gcm).await;
            let handle = here.handle();
            handle.set_rate(rate);
            let (source, destination) = (bridged(&mut here, 1), bridged(&mut there, 1));
            let mut socket = source.socket.try_clone().unwrap();
            // Nobody reads at the destination: the writer comes to a stop, and is set free by the cancellation.
            let writer =
                thread::spawn(move || while busy && socket.write_all(&[0; MIB]).is_ok() {});
            while busy && rate.is_none() && handle.counters()[1].unsent_bytes == 0 {
                thread::yield_now();
            }
            handle.cancel();
            let ended = source.bridge.done().await.unwrap_err();
            assert!(matches!(ended, TransportError::Cancelled), "{ended}");
            writer.join().unwrap();
            assert_eq!(drain(source.socket).1, 0, "QEMU's socket is closed");
            let ended = destination.bridge.done();
            drain(destination.socket);
            let ended = ended.await.unwrap_err();
            let truncated = FrameError::Truncated(0);
            match ended {
                TransportError::Frame { error: FrameError::Truncated(_), .. }
                | TransportError::Lost { .. } => {}
                other => panic!("{other}, not {truncated}"),
            }
            assert!(matches!(
                there.handle().failed().await,
                TransportError::Frame { .. } | TransportError::Lost { .. }
            ));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_dropped_before_its_end_fails_both_sessions() {
    let (mut here, mut there) = sessions(2, Cipher::Aes256Gcm).await;
    let (mut sender, _unused) = records(here.take(1).unwrap()).unwrap();
    let (_back, mut receiver) = records(there.take(1).unwrap()).unwrap();
    sender.send(Kind::BYTES, b"a part").unwrap();
    drop(sender);
    assert!(matches!(here.handle().failure(), Some(TransportError::Abandoned { stream: 1 })));
    assert_eq!(receiver.receive().unwrap().unwrap().1, b"a part");
    let cut = receiver.receive().unwrap_err();
    assert!(
        matches!(cut, TransportError::Frame { stream: 1, error: FrameError::Truncated(1) }),
        "{cut}"
    );
    // The other stream of either session ends with it.
    let other = records(here.take(0).unwrap()).unwrap().1.receive().map(|_| ());
    assert!(matches!(other, Err(TransportError::Abandoned { stream: 1 })), "{other:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_that_is_gone_ends_the_migration_on_both_hosts() {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
    let (source, destination) = (bridged(&mut here, 0), bridged(&mut there, 0));
    // The destination's QEMU is killed; the source's writes on until it hears of it.
    drop(destination.socket);
    let mut socket = source.socket;
    let writer = thread::spawn(move || while socket.write_all(&[0; MIB]).is_ok() {});
    let failed = destination.bridge.done().await.unwrap_err();
    assert!(matches!(failed, TransportError::Local { stream: 0, .. }), "{failed}");
    assert!(source.bridge.done().await.is_err());
    writer.join().unwrap();
}

#[test]
fn the_errors_of_a_connection_have_names() {
    use std::io::Error;
    let stalled = TransportError::of_connection(3, Error::from_raw_os_error(libc::ETIMEDOUT));
    assert!(matches!(stalled, TransportError::Stalled { stream: 3 }));
    assert_eq!(stalled.to_string(), "stream 3: the other host has taken nothing for 30 s");
    let lost = TransportError::of_connection(3, Error::from_raw_os_error(libc::ECONNRESET));
    assert!(matches!(lost, TransportError::Lost { stream: 3, .. }));
}
