//! Who is let in, and who is not.

use std::io::Read as _;
use std::net::TcpStream;

use vmseal_seal::wire::{
    ANSWER_LEN, Accepting, Connecting, HELLO_LEN, Hello, HelloError, PROOF_LEN,
};

use super::*;

/// Does a handshake by hand, up to the frame that confirms the stream; false when the host closes instead.
fn by_hand(to: SocketAddr, spec: &Spec, stream: u16, damage: bool) -> (TcpStream, bool) {
    let mut socket = TcpStream::connect(to).unwrap();
    let (connecting, hello) = Connecting::new(spec, stream).unwrap();
    socket.write_all(&hello).unwrap();
    let mut answer = [0; ANSWER_LEN];
    if socket.read_exact(&mut answer).is_err() {
        return (socket, false);
    }
    let (_, mut proof) = connecting.answered(&answer).unwrap();
    proof[PROOF_LEN - 1] ^= u8::from(damage);
    socket.write_all(&proof).unwrap();
    let confirmed = socket.read_exact(&mut [0; 32]).is_ok();
    (socket, confirmed)
}

/// Waits until the other end closes, and says how many bytes came before.
fn closed(mut socket: TcpStream) -> usize {
    let mut said = Vec::new();
    match socket.read_to_end(&mut said) {
        Ok(_) => said.len(),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => said.len(),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_is_not_expected_is_refused_without_a_word() {
    let listener = listener().await;
    let refused = connect(spec(1, Cipher::Aes256Gcm), listener.address()).await.err().unwrap();
    assert!(matches!(refused, TransportError::Refused { stream: 0 }), "{refused}");
    assert_eq!(listener.refused(), Refused { unknown_migration: 1, ..Refused::default() });
    // One that was expected, and is no more.
    drop(listener.expect(spec(1, Cipher::Aes256Gcm)).unwrap());
    assert!(connect(spec(1, Cipher::Aes256Gcm), listener.address()).await.is_err());
    assert_eq!(listener.refused().unknown_migration, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_with_another_key_or_another_cipher_is_refused() {
    let listener = listener().await;
    let expected = listener.expect(spec(1, Cipher::Aes256Gcm)).unwrap();
    let other = spec_of(Uuid::from_bytes([7; 16]), 2, 1, Cipher::Aes256Gcm);
    let refused = connect(other, listener.address()).await.err().unwrap();
    let TransportError::Hello { stream: 0, error } = refused else { panic!("{refused}") };
    assert!(matches!(*error, HelloError::WrongProof), "{error}");

    let refused = connect(spec(1, Cipher::None), listener.address()).await.err().unwrap();
    assert!(matches!(refused, TransportError::Refused { stream: 0 }), "{refused}");
    assert_eq!(listener.refused().hello, 1);

    let good = spec(1, Cipher::Aes256Gcm);
    assert!(!by_hand(listener.address(), &good, 0, true).1);
    assert_eq!(listener.refused().proof, 1);
    // None of them has taken the stream.
    let accepting = tokio::spawn(expected.session(LONG));
    let connecting = connect(good, listener.address()).await;
    assert!(connecting.is_ok() && accepting.await.unwrap().is_ok());
}

/// A host that has not the spec cannot be taken for the destination, also in the clear.
#[tokio::test(flavor = "multi_thread")]
async fn a_destination_with_another_key_is_refused() {
    for cipher in [Cipher::Aes256Gcm, Cipher::None] {
        let impostor = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = impostor.local_addr().unwrap();
        let answering = thread::spawn(move || {
            let (mut socket, _) = impostor.accept().unwrap();
            let mut hello = [0; HELLO_LEN];
            socket.read_exact(&mut hello).unwrap();
            let other = spec_of(Uuid::from_bytes([7; 16]), 2, 1, cipher);
            let hello = Hello::decode(&hello).unwrap();
            let answer = Accepting::new(&other, hello).unwrap().1;
            socket.write_all(&answer).unwrap();
            closed(socket)
        });
        let refused = connect(spec(1, cipher), address).await.err().unwrap();
        let TransportError::Hello { error, .. } = refused else { panic!("{refused}") };
        assert!(matches!(*error, HelloError::WrongProof), "{error}");
        assert_eq!(answering.join().unwrap(), 0, "it was told nothing more");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_stream_is_taken_once_and_a_spec_serves_one_session() {
    let listener = listener().await;
    let good = spec(2, Cipher::Aes256Gcm);
    let expected = listener.expect(spec(2, Cipher::Aes256Gcm)).unwrap();
    let again = listener.expect(spec(2, Cipher::Aes256Gcm)).err().unwrap();
    assert!(matches!(again, TransportError::AlreadyExpected(_)));
    let accepting = tokio::spawn(expected.session(LONG));
    let (first, confirmed) = by_hand(listener.address(), &good, 0, false);
    assert!(confirmed);
    assert!(!by_hand(listener.address(), &good, 0, false).1, "stream 0 a second time");
    assert_eq!(listener.refused(), Refused { taken: 1, ..Refused::default() });
    let (second, confirmed) = by_hand(listener.address(), &good, 1, false);
    assert!(confirmed);
    let session = accepting.await.unwrap().unwrap();
    assert!(!by_hand(listener.address(), &good, 1, false).1);
    assert_eq!(listener.refused().unknown_migration, 1, "it is complete");
    drop((first, second, session));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_is_not_complete_in_time_says_what_has_come() {
    let listener = listener().await;
    let expected = listener.expect(spec(2, Cipher::Aes256Gcm)).unwrap();
    let (_socket, confirmed) = by_hand(listener.address(), &spec(2, Cipher::Aes256Gcm), 1, false);
    assert!(confirmed);
    let missing = expected.session(Duration::from_millis(200)).await.err().unwrap();
    let TransportError::NotConnected { streams: 2, came: 1, .. } = missing else {
        panic!("{missing}")
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_do_not_take_the_place_of_others() {
    let listener = listener().await;
    let to = listener.address();
    let idle: Vec<TcpStream> =
        (0..UNPROVEN_PER_SOURCE).map(|_| TcpStream::connect(to).unwrap()).collect();
    assert_eq!(closed(TcpStream::connect(to).unwrap()), 0, "one too many");
    assert_eq!(listener.refused().crowded, 1);
    // Another address has places.
    let source = std::net::SocketAddr::from(([127, 0, 0, 2], 0));
    let other = tokio::net::TcpSocket::new_v4().unwrap();
    other.bind(source).unwrap();
    let other = other.connect(to).await.unwrap().into_std().unwrap();
    other.set_nonblocking(false).unwrap();
    (&other).write_all(&[b'x'; HELLO_LEN]).unwrap();
    assert_eq!(closed(other), 0);
    assert_eq!(listener.refused().hello, 1, "it was listened to");
    // Those who leave make room.
    for socket in idle {
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(closed(socket), 0);
    }
    let expected = listener.expect(spec(1, Cipher::Aes256Gcm)).unwrap();
    let accepting = tokio::spawn(expected.session(LONG));
    assert!(connect(spec(1, Cipher::Aes256Gcm), to).await.is_ok());
    assert!(accepting.await.unwrap().is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_closes_without_a_word_has_only_tried_the_port() {
    let listener = listener().await;
    let to = listener.address();
    examine(to).await.unwrap();
    let leaves_after = |said: &[u8]| {
        let mut socket = TcpStream::connect(to).unwrap();
        socket.write_all(said).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(closed(socket), 0);
    };
    leaves_after(&[]);
    assert_eq!(listener.refused(), Refused::default());
    leaves_after(&[0; 3]);
    assert_eq!(listener.refused(), Refused { lost: 1, ..Refused::default() });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_nobody_waits_at_is_not_reached() {
    // Nobody else gets the port meanwhile.
    let held = tokio::net::TcpSocket::new_v4().unwrap();
    held.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let refused = examine(held.local_addr().unwrap()).await.unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{refused}");
}

/// The clock of the runtime stands still, and goes to the next deadline when nothing else is left to do.
#[tokio::test(start_paused = true)]
async fn who_says_nothing_is_closed_in_time() {
    use tokio::io::AsyncReadExt as _;
    let listener = listener().await;
    let mut silent = tokio::net::TcpStream::connect(listener.address()).await.unwrap();
    assert_eq!(silent.read(&mut [0; 1]).await.unwrap(), 0);
    assert_eq!(listener.refused(), Refused { timed_out: 1, ..Refused::default() });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_is_watched_and_keeps_little_unsent() {
    use std::os::fd::AsRawFd as _;
    let listener = listener().await;
    let socket = TcpStream::connect(listener.address()).unwrap();
    socket::prepare(&socket).unwrap();
    let get = |level, option| {
        let (mut value, mut length) = (0i32, size_of::<i32>() as libc::socklen_t);
        let (place, length) = ((&raw mut value).cast(), &raw mut length);
        // SAFETY: the kernel writes one integer, which lives until the call returns.
        let done = unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, place, length) };
        assert_eq!(done, 0);
        value
    };
    assert_eq!(get(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT), 30_000);
    assert_eq!(get(libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT), NOT_SENT_MAX);
    assert_eq!(get(libc::IPPROTO_TCP, libc::TCP_NODELAY), 1);
    assert_eq!(get(libc::SOL_SOCKET, libc::SO_KEEPALIVE), 1);
    let [idle, interval, probes] = [libc::TCP_KEEPIDLE, libc::TCP_KEEPINTVL, libc::TCP_KEEPCNT]
        .map(|o| get(libc::IPPROTO_TCP, o));
    assert_eq!(idle + interval * probes, 30, "found within the same time");
}
