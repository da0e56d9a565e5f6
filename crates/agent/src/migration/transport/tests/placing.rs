//! What comes and is placed in memory.

use super::*;
use crate::migration::placement::PlacementError;
use crate::migration::placement::page_stream::What;
use crate::migration::placement::tests::{Stream, all_of, assert_same, placement};

/// Sends a stream to a destination that places it. How that ended there, what its QEMU got, and what is in memory.
async fn sent(
    stream: Vec<u8>,
    compression: Compressed,
) -> (Result<Moved, TransportError>, Vec<u8>, Vec<u8>) {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
    let source = bridged_with(&mut here, 0, compression);
    let (placement, memory) = placement();
    let (mut socket, other) = UnixStream::pair().unwrap();
    let carrier = Carrier::new(there.take(0).unwrap()).unwrap().compressing(Compressed::Received);
    let bridge = carrier.placing(Some(placement)).last(other).unwrap();
    let writing = thread::spawn(move || {
        // The session may fail meanwhile.
        let _ = (&source.socket).write_all(&stream);
        let _ = source.socket.shutdown(std::net::Shutdown::Write);
        source
    });
    let reading = thread::spawn(move || {
        let mut got = Vec::new();
        let _ = socket.read_to_end(&mut got);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        got
    });
    let moved = bridge.done().await;
    let got = reading.join().unwrap();
    drop(writing.join().unwrap());
    (moved, got, all_of(&memory))
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_that_come_are_placed_and_the_local_socket_gets_the_rest() {
    let stream = Stream::usual().0;
    for compression in [Compressed::Never, Compressed::Sent] {
        let (moved, got, memory) = sent(stream.clone(), compression).await;
        let moved = moved.unwrap();
        assert_eq!(moved.received, stream.len() as u64);
        assert!(moved.placed.is_some_and(|placed| placed.bytes > 0), "{moved:?}");
        assert_same(&stream, &got, &memory);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_placed_fails_the_session() {
    let begun = || Stream::new().begun().part().filled(Some("ram"), 1, 7);
    let (failed, ..) = sent(begun().record(None, 0x40).0, Compressed::Never).await;
    match failed.unwrap_err() {
        TransportError::Placement { stream: 0, error: PlacementError::Stream(unexpected) } => {
            assert_eq!(unexpected.what, What::Record(0x60))
        }
        other => panic!("{other}"),
    }
    let (failed, ..) = sent(begun().0, Compressed::Never).await;
    let cut = TransportError::Placement { stream: 0, error: PlacementError::Cut };
    assert_eq!(failed.unwrap_err().to_string(), cut.to_string());
}
