//! The control channel.

use serde::{Deserialize, Serialize};

use super::*;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "type")]
enum Message {
    Prepare { disks: Vec<String> },
    Ready,
    Commit { generation: u64 },
}

async fn channels() -> (Session, Control, Session, Control) {
    let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
    let ends = (here.take(0).unwrap(), there.take(0).unwrap());
    (here, Control::new(ends.0).unwrap(), there, Control::new(ends.1).unwrap())
}

#[tokio::test]
async fn messages_go_both_ways_until_an_end() {
    let (here, mut source, there, mut destination) = channels().await;
    let prepare = Message::Prepare { disks: vec!["d".repeat(60_000)] };
    source.send(&prepare, LONG).await.unwrap();
    assert_eq!(destination.receive::<Message>(LONG).await.unwrap(), prepare);
    destination.send(&Message::Ready, LONG).await.unwrap();
    assert_eq!(source.receive::<Message>(LONG).await.unwrap(), Message::Ready);
    let (sender, mut receiver) = source.split();
    sender.finish(LONG).await.unwrap();
    for _ in 0..2 {
        let ended = destination.receive::<Message>(LONG).await.unwrap_err();
        assert!(matches!(ended, TransportError::Ended { stream: 0 }), "{ended}");
    }
    destination.send(&Message::Commit { generation: 3 }, LONG).await.unwrap();
    let commit = receiver.receive::<Message>(LONG).await.unwrap();
    assert_eq!(commit, Message::Commit { generation: 3 });
    destination.finish(LONG).await.unwrap();
    assert!(here.handle().failure().is_none() && there.handle().failure().is_none());
}

#[tokio::test]
async fn silence_is_an_error_and_loses_nothing() {
    let (_here, mut source, _there, mut destination) = channels().await;
    let soon = Duration::from_millis(1);
    let silent = destination.receive::<Message>(soon).await.unwrap_err();
    assert!(matches!(silent, TransportError::Silent { stream: 0, .. }), "{silent}");
    // Nor does a future that is dropped at any instant.
    let sending = tokio::spawn(async move {
        for generation in 0..200 {
            source.send(&Message::Commit { generation }, LONG).await.unwrap();
        }
        source
    });
    for expected in 0..200 {
        let message = loop {
            tokio::select! {
                biased;
                () = tokio::task::yield_now() => {}
                message = destination.receive::<Message>(LONG) => break message.unwrap(),
            }
            match destination.receive::<Message>(Duration::ZERO).await {
                Ok(message) => break message,
                Err(TransportError::Silent { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        };
        assert_eq!(message, Message::Commit { generation: expected });
    }
    drop(sending.await.unwrap());
}

#[tokio::test]
async fn messages_that_are_too_long_or_unknown_are_errors() {
    let (here, mut source, there, mut destination) = channels().await;
    let long = Message::Prepare { disks: vec!["d".repeat(MESSAGE_MAX)] };
    let refused = source.send(&long, LONG).await.unwrap_err();
    assert!(matches!(refused, TransportError::MessageTooLong { stream: 0, .. }), "{refused}");
    source.send(&"what?", LONG).await.unwrap();
    source.send(&Message::Ready, LONG).await.unwrap();
    let unknown = destination.receive::<Message>(LONG).await.unwrap_err();
    assert!(matches!(unknown, TransportError::Message { stream: 0, .. }), "{unknown}");
    assert_eq!(destination.receive::<Message>(LONG).await.unwrap(), Message::Ready);
    assert!(here.handle().failure().is_none() && there.handle().failure().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_are_no_messages_fail_the_session() {
    for (kind, length) in [(Kind::new(9), 10), (Kind::new(3), MESSAGE_MAX + 1)] {
        let (mut here, mut there) = sessions(1, Cipher::Aes256Gcm).await;
        let mut destination = Control::new(there.take(0).unwrap()).unwrap();
        let (mut sender, _unused) = records(here.take(0).unwrap()).unwrap();
        thread::spawn(move || sender.send(kind, &vec![b' '; length])).join().unwrap().unwrap();
        let refused = destination.receive::<Message>(LONG).await.unwrap_err();
        assert!(
            matches!(
                refused,
                TransportError::Kind { kind: 9, .. } | TransportError::MessageTooLong { .. }
            ),
            "{refused}"
        );
        assert!(there.handle().failure().is_some());
    }
}

#[tokio::test]
async fn a_channel_that_is_dropped_is_cut_off() {
    let (here, source, there, mut destination) = channels().await;
    drop(source);
    let cut = destination.receive::<Message>(LONG).await.unwrap_err();
    assert!(
        matches!(cut, TransportError::Frame { stream: 0, error: FrameError::Truncated(_) }),
        "{cut}"
    );
    assert!(matches!(here.handle().failure(), Some(TransportError::Abandoned { stream: 0 })));
    assert!(there.handle().failure().is_some());
    // A session that is dropped, too.
    let (here, _source, _there, mut destination) = channels().await;
    drop(here);
    assert!(destination.receive::<Message>(LONG).await.is_err());
}
