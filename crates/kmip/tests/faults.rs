//! The client with servers that die, hang, answer garbage, or refuse.
#![allow(clippy::unwrap_used)] // in tests a panic is the report

mod server;

use std::time::{Duration, Instant};

use tokio::time::timeout;
use vmseal_kmip::client::{Client, Error, NewKey, Settings, Step};
use vmseal_kmip::fields::Violation;
use vmseal_kmip::message::Outcome;
use vmseal_kmip::operation::{Create, KeyId, Locate, Text};
use vmseal_kmip::testing::{Asked, Authority, PyKmip, Reaction, ScriptedServer, Validity};
use vmseal_kmip::ttlv::{DecodeError, Encoder, Tag};
use vmseal_kmip::{OperationCode, ProtocolVersion, ResultReason, State};

use server::AUTHORITY;

/// The timeout that a test waits for.
const SHORT: Duration = Duration::from_secs(1);

/// How long a step may take on a busy machine.
const MAX_ELAPSED: Duration = Duration::from_secs(20);

fn settings(server: &ScriptedServer) -> Settings {
    let identity = AUTHORITY.client("vmseal", Validity::Now).identity();
    Settings::new(server.endpoint(), AUTHORITY.trust(), identity)
}

fn client(server: &ScriptedServer) -> Client {
    Client::new(settings(server)).unwrap()
}

fn scripted(script: impl Fn(&Asked) -> Reaction + Send + Sync + 'static) -> ScriptedServer {
    ScriptedServer::start(&AUTHORITY.server(&["127.0.0.1"], Validity::Now), None, script)
}

fn id() -> KeyId {
    KeyId::new("17").unwrap()
}

fn active(payload: &mut Encoder) {
    payload.structure(Tag::ATTRIBUTE, |attribute| {
        attribute.text(Tag::ATTRIBUTE_NAME, "State");
        attribute.enumeration(Tag::ATTRIBUTE_VALUE, State::Active.number());
    });
}

/// A good answer to any request.
fn good(asked: &Asked) -> Vec<u8> {
    asked.done(|payload| match asked.operation {
        OperationCode::GetAttributes => active(payload),
        _ => payload.text(Tag::UNIQUE_IDENTIFIER, id().as_str()),
    })
}

#[tokio::test]
async fn a_server_that_hangs_in_the_middle_of_its_answer_times_out() {
    let server = scripted(|asked| {
        let answer = good(asked);
        Reaction::SendAndHang(answer[..answer.len() / 2].to_vec())
    });
    let mut settings = settings(&server);
    settings.timeouts.read = SHORT;
    let client = Client::new(settings).unwrap();
    let begun = Instant::now();
    let error = client.key_state(&id()).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { step: Step::Read, after: SHORT, .. }), "{error}");
    assert!(begun.elapsed() >= SHORT && begun.elapsed() < MAX_ELAPSED);
    assert_eq!(client.idle_connections(), 0, "its connection is not used again");
    // It is unknown whether the key was created.
    let error = client.create(Create::default()).await.unwrap_err();
    let Error::OutcomeUnknown { operation: OperationCode::Create, source } = &error else {
        panic!("{error}")
    };
    assert!(matches!(**source, Error::TimedOut { step: Step::Read, .. }), "{source}");
}

async fn violation(answer: &[u8]) -> Violation {
    let answer = answer.to_vec();
    let server = scripted(move |_| Reaction::Send(answer.clone()));
    let client = client(&server);
    let error = client.key_state(&id()).await.unwrap_err();
    assert_eq!(client.idle_connections(), 0, "its connection is not used again");
    match error {
        Error::Violation { source, .. } => source,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn garbage_and_claims_of_a_huge_length_are_reported() {
    let http = violation(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    assert!(matches!(http, Violation::Malformed(DecodeError::OtherBeginning { .. })), "{http}");
    let huge = violation(&[0x42, 0, 0x7b, 1, 0xff, 0xff, 0xff, 0xf8]).await;
    assert_eq!(huge, Violation::Malformed(DecodeError::TooLong(1 << 32)));
    let inside = violation(&[0x42, 0, 0x7b, 1, 0, 0, 0, 8, 0x42, 0, 0x7a, 1, 0, 0, 0xff, 0xf8]);
    let inside = inside.await;
    assert!(
        matches!(inside, Violation::Malformed(DecodeError::Truncated { at: 8, .. })),
        "{inside}"
    );
    let empty = violation(&[0x42, 0, 0x7b, 1, 0, 0, 0, 0]).await;
    assert!(matches!(empty, Violation::Missing { .. }), "{empty}");
}

#[tokio::test]
async fn an_answer_to_another_request_is_refused() {
    let server = scripted(|asked| {
        let mut other = asked.clone();
        other.ids[0][7] ^= 1;
        Reaction::Send(good(&other))
    });
    let error = client(&server).key_state(&id()).await.unwrap_err();
    let Error::Violation { source, .. } = error else { panic!("{error}") };
    assert_eq!(source, Violation::WrongBatchItem);
    // A garbled answer to Create: the key may be there.
    let error = client(&server).create(Create::default()).await.unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error}");
}

#[tokio::test]
async fn more_than_was_asked_for_is_not_taken_for_the_next_answer() {
    let server = scripted(|asked| Reaction::Send([good(asked), good(asked)].concat()));
    let client = client(&server);
    for connections in 1..4 {
        assert_eq!(client.key_state(&id()).await.unwrap(), State::Active);
        assert_eq!(server.accepted(), connections, "a new connection after each");
    }
}

#[tokio::test]
async fn a_long_answer_arrives_whole_and_in_order() {
    // Near the limit of a message: several records of TLS, and many reads.
    let ids: Vec<String> = (0..240).map(|number| format!("{number:0>250}")).collect();
    let expected = ids.clone();
    let server = scripted(move |asked| {
        let answer = asked.done(|payload| {
            ids.iter().for_each(|id| payload.text(Tag::UNIQUE_IDENTIFIER, id));
        });
        assert!(answer.len() > 60_000);
        Reaction::Send(answer)
    });
    let client = client(&server);
    for _ in 0..3 {
        let found = client.locate(Locate::default()).await.unwrap();
        assert!(found.iter().map(KeyId::as_str).eq(expected.iter()));
    }
    assert_eq!(server.accepted(), 1);
}

/// A server that answers `answered` requests on each of its first connections, then closes it as `end` says.
fn forgetful(answered: usize, end: fn(Vec<u8>) -> Vec<u8>) -> ScriptedServer {
    let seen = std::sync::Mutex::new(std::collections::HashMap::new());
    scripted(move |asked| {
        let mut seen = seen.lock().unwrap();
        let count = seen.entry(asked.connection).or_insert(0);
        *count += 1;
        if *count > answered && asked.connection == 0 {
            Reaction::SendAndClose(end(good(asked)))
        } else {
            Reaction::Send(good(asked))
        }
    })
}

#[tokio::test]
async fn a_dead_connection_of_the_pool_is_replaced_for_repeatable_requests() {
    let server = forgetful(1, |_| Vec::new());
    let client = client(&server);
    assert_eq!(client.key_state(&id()).await.unwrap(), State::Active);
    assert_eq!(client.key_state(&id()).await.unwrap(), State::Active);
    // DiscoverVersions, one answered, one not, one again.
    assert_eq!((server.accepted(), server.requests()), (2, 4));
}

#[tokio::test]
async fn changing_requests_are_never_sent_twice() {
    let server = forgetful(1, |_| Vec::new());
    let client = client(&server);
    client.key_state(&id()).await.unwrap();
    let error = client.create(Create::default()).await.unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error}");
    assert_eq!(server.requests(), 3);
    assert_eq!(client.create(Create::default()).await.unwrap(), id());
}

#[tokio::test]
async fn an_answer_that_was_cut_off_is_not_asked_for_again() {
    let server = forgetful(1, |answer| answer[..20].to_vec());
    let client = client(&server);
    client.key_state(&id()).await.unwrap();
    let error = client.key_state(&id()).await.unwrap_err();
    assert!(matches!(error, Error::ConnectionLost { .. }), "{error}");
    assert_eq!(server.requests(), 3);
}

#[tokio::test]
async fn a_server_that_closes_new_connections_too_is_given_up() {
    let server = scripted(|_| Reaction::SendAndClose(Vec::new()));
    let client = client(&server);
    let error = client.key_state(&id()).await.unwrap_err();
    assert!(matches!(error, Error::ConnectionLost { .. }), "{error}");
    assert_eq!((server.accepted(), server.requests()), (2, 3));
}

#[tokio::test]
async fn the_connection_of_a_cancelled_request_is_not_used_again() {
    let server = scripted(|asked| match asked.request {
        1 => Reaction::SendLate(
            SHORT,
            asked.done(|payload| {
                payload.structure(Tag::ATTRIBUTE, |attribute| {
                    attribute.text(Tag::ATTRIBUTE_NAME, "State");
                    attribute.enumeration(Tag::ATTRIBUTE_VALUE, State::Compromised.number());
                });
            }),
        ),
        _ => Reaction::Send(good(asked)),
    });
    let client = client(&server);
    client.discover().await.unwrap();
    assert!(timeout(SHORT / 3, client.key_state(&id())).await.is_err(), "cancelled");
    assert_eq!(client.key_state(&id()).await.unwrap(), State::Active);
    tokio::time::sleep(SHORT).await;
    assert_eq!(client.key_state(&id()).await.unwrap(), State::Active);
    assert_eq!(server.accepted(), 2);
}

#[tokio::test]
async fn a_key_that_cannot_be_activated_is_named() {
    let server = scripted(|asked| match asked.operation {
        OperationCode::Activate => asked.refused(ResultReason::PermissionDenied),
        _ => Reaction::Send(good(asked)),
    });
    let error = client(&server).create_key(NewKey::default()).await.unwrap_err();
    let Error::NotActivated { id: made, source } = &error else { panic!("{error}") };
    assert_eq!(*made, id());
    assert_eq!(source.refusal(), Some(ResultReason::PermissionDenied));
}

fn attributes() -> NewKey {
    let text = |text| Text::new(text).unwrap();
    let attributes = ["product", "cluster", "version"].map(|name| (text(name), text("vmseal")));
    NewKey { attributes: attributes.to_vec(), ..NewKey::default() }
}

#[tokio::test]
async fn attributes_that_are_refused_or_lost_do_not_hurt_the_key() {
    let server = scripted(|asked| match asked.operation {
        OperationCode::AddAttribute => Reaction::Send(asked.response(2, |message| {
            asked.result(message, &asked.ids[0], |_| {});
            asked.refusal(message, &asked.ids[1], ResultReason::InvalidField);
        })),
        _ => Reaction::Send(good(asked)),
    });
    let made = client(&server).create_key(attributes()).await.unwrap();
    assert_eq!(made.id, id());
    let outcomes = made.attributes.unwrap();
    assert!(matches!(
        outcomes[..],
        [Outcome::Done(()), Outcome::Refused(_), Outcome::NotAttempted]
    ));

    let server = scripted(|asked| match asked.operation {
        OperationCode::AddAttribute => Reaction::SendAndClose(Vec::new()),
        _ => Reaction::Send(good(asked)),
    });
    let made = client(&server).create_key(attributes()).await.unwrap();
    assert_eq!(made.id, id());
    assert!(matches!(made.attributes, Err(Error::OutcomeUnknown { .. })));
}

fn bare(script: impl Fn(&Asked) -> Reaction + Send + Sync + 'static) -> ScriptedServer {
    ScriptedServer::start_on(0, &AUTHORITY.server(&["127.0.0.1"], Validity::Now), None, script)
}

#[tokio::test]
async fn a_server_of_kmip_1_0_is_spoken_to_in_1_0() {
    let server = bare(|asked| match (asked.version, asked.operation) {
        (ProtocolVersion::V1_0, OperationCode::DiscoverVersions) => {
            asked.refused(ResultReason::OperationNotSupported)
        }
        (ProtocolVersion::V1_0, _) => Reaction::Send(good(asked)),
        _ => asked.refused(ResultReason::InvalidMessage),
    });
    let client = client(&server);
    assert_eq!(client.key_state(&id()).await.unwrap(), State::Active);
    let versions = client.discover().await.unwrap();
    assert_eq!((versions.spoken, versions.offered), (ProtocolVersion::V1_0, Vec::new()));
    let mut newer = settings(&server);
    newer.versions = vec![ProtocolVersion::V1_1];
    let error = Client::new(newer).unwrap().discover().await.unwrap_err();
    assert!(matches!(error, Error::VersionNotSupported { .. }), "{error}");
}

#[tokio::test]
async fn versions_are_negotiated() {
    const V2_0: ProtocolVersion = ProtocolVersion { major: 2, minor: 0 };
    const TWO: [ProtocolVersion; 2] = [ProtocolVersion::V1_1, ProtocolVersion::V1_2];
    let some = bare(|asked| match asked.operation {
        OperationCode::DiscoverVersions => asked.versions(&TWO),
        _ if asked.version == ProtocolVersion::V1_2 => Reaction::Send(good(asked)),
        _ => asked.refused(ResultReason::InvalidMessage),
    });
    assert_eq!(client(&some).key_state(&id()).await.unwrap(), State::Active);
    assert_eq!(client(&some).discover().await.unwrap().spoken, ProtocolVersion::V1_2);
    let mut lower = settings(&some);
    lower.versions = vec![ProtocolVersion::V1_1, ProtocolVersion::V1_0];
    let lower = Client::new(lower).unwrap().discover().await.unwrap();
    assert_eq!(lower.spoken, ProtocolVersion::V1_1);

    let newer = bare(|asked| match asked.version {
        ProtocolVersion::V1_4 => asked.versions(&[ProtocolVersion::V1_4]),
        _ => asked.refused(ResultReason::InvalidMessage),
    });
    assert_eq!(client(&newer).discover().await.unwrap().spoken, ProtocolVersion::V1_4);

    // Servers that know only one version, or two, and refuse all others.
    for known in [
        &[ProtocolVersion::V1_3][..],
        &[ProtocolVersion::V1_2],
        &[ProtocolVersion::V1_3, ProtocolVersion::V1_2],
    ] {
        let server = bare(move |asked| match asked.operation {
            _ if !known.contains(&asked.version) => asked.refused(ResultReason::InvalidMessage),
            OperationCode::DiscoverVersions => asked.versions(known),
            _ => Reaction::Send(good(asked)),
        });
        let client = client(&server);
        let found = client.discover().await.unwrap();
        assert_eq!((found.spoken, found.offered.as_slice()), (known[0], known));
        assert_eq!(client.key_state(&id()).await.unwrap(), State::Active);
    }
    // One that answers in its own version, whatever the version of the request.
    let own = bare(|asked| {
        let asked = Asked { version: V2_0, ..asked.clone() };
        asked.refused(ResultReason::InvalidMessage)
    });
    let error = client(&own).discover().await.unwrap_err();
    assert!(matches!(&error, Error::VersionNotSupported { offered, .. } if *offered == [V2_0]));

    let newest = bare(|asked| asked.versions(&[V2_0]));
    let error = client(&newest).discover().await.unwrap_err();
    assert!(matches!(&error, Error::VersionNotSupported { offered, .. } if *offered == [V2_0]));
    assert!(error.to_string().contains("(1.4, 1.3, 1.2, 1.1, 1.0); it speaks 2.0"), "{error}");

    let stranger = bare(|asked| asked.refused(ResultReason::AuthenticationNotSuccessful));
    let error = client(&stranger).discover().await.unwrap_err();
    assert_eq!(error.refusal(), Some(ResultReason::AuthenticationNotSuccessful));
    assert_eq!(stranger.requests(), 1, "no other version is tried");
}

/// An authority, a server, and a client of it.
fn pykmip() -> (Authority, PyKmip, Client) {
    let authority = Authority::new("kms");
    let server = PyKmip::start(&authority);
    let identity = authority.client("vmseal", Validity::Now).identity();
    let settings = Settings::new(server.endpoint(), authority.trust(), identity);
    (authority, server, Client::new(settings).unwrap())
}

#[tokio::test]
async fn a_broken_server_is_reported_and_used_again_when_it_is_well() {
    let (authority, mut server, client) = pykmip();
    let id = client.create_key(NewKey::default()).await.unwrap().id;
    let key = client.get_key(&id).await.unwrap();
    server.kill();
    let certificate = authority.server(&["127.0.0.1"], Validity::Now);
    let garbage = |_: &Asked| Reaction::Send(b"out of order".to_vec());
    let mad = ScriptedServer::start_on(server.port(), &certificate, Some(&authority), garbage);
    let error = client.get_key(&id).await.unwrap_err();
    assert!(matches!(error, Error::Violation { .. }), "{error}");
    drop(mad);
    server.restart();
    assert_eq!(client.get_key(&id).await.unwrap(), key);
}

#[tokio::test]
async fn a_restart_of_the_server_is_not_noticed() {
    let (_, mut server, client) = pykmip();
    let id = client.create_key(NewKey::default()).await.unwrap().id;
    let key = client.get_key(&id).await.unwrap();
    assert_eq!(client.idle_connections(), 1);
    server.restart();
    // A Create on a connection that is known to be dead would have an unknown outcome.
    let other = client.create(Create::default()).await.unwrap();
    server.restart();
    assert_eq!(client.get_key(&id).await.unwrap(), key);
    assert_ne!(client.get_key(&other).await.unwrap(), key);
}

#[tokio::test]
async fn a_server_that_is_killed_in_the_middle_of_a_request_is_reported() {
    let (_, mut server, client) = pykmip();
    let id = client.create_key(NewKey::default()).await.unwrap().id;
    server.freeze();
    let (error, ()) = tokio::join!(client.create(Create::default()), async {
        tokio::time::sleep(SHORT).await;
        server.kill();
    });
    let error = error.unwrap_err();
    let Error::OutcomeUnknown { source, .. } = &error else { panic!("{error}") };
    assert!(matches!(**source, Error::ConnectionLost { .. }), "{source}");
    let error = client.get_key(&id).await.unwrap_err();
    assert!(matches!(error, Error::ConnectionRefused { .. }), "{error}");
    server.restart();
    assert_eq!(client.key_state(&id).await.unwrap(), State::Active);
}

#[tokio::test]
async fn a_suspended_server_times_out_and_is_used_again_when_it_resumes() {
    let authority = Authority::new("kms");
    let server = PyKmip::start(&authority);
    let identity = authority.client("vmseal", Validity::Now).identity();
    let mut settings = Settings::new(server.endpoint(), authority.trust(), identity);
    settings.timeouts.read = SHORT;
    settings.timeouts.handshake = SHORT;
    let client = Client::new(settings).unwrap();
    let id = loop {
        // The first answer of a busy server may be late.
        match client.create(Create::default()).await {
            Ok(id) => break id,
            Err(Error::TimedOut { .. } | Error::OutcomeUnknown { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    server.freeze();
    let error = client.key_state(&id).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { step: Step::Read, .. }), "{error}");
    let error = client.key_state(&id).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { step: Step::Handshake, .. }), "{error}");
    server.resume();
    let begun = Instant::now();
    while client.key_state(&id).await.is_err() {
        assert!(begun.elapsed() < MAX_ELAPSED);
    }
}

/// An outcome is unknown if the request was sent, whatever went wrong.
#[tokio::test]
async fn a_request_that_was_never_sent_was_not_done() {
    let server = scripted(|asked| Reaction::Send(good(asked)));
    // The handshake fails on this side: the server's certificate is not trusted.
    let stranger = Authority::new("stranger");
    let mut untrusting = settings(&server);
    untrusting.trust = stranger.trust();
    untrusting.versions = vec![ProtocolVersion::V1_4];
    let error = Client::new(untrusting).unwrap().create(Create::default()).await.unwrap_err();
    assert!(matches!(error, Error::Tls { .. }), "{error}");

    // With the version known, Create itself meets the fault.
    let certificate = AUTHORITY.server(&["127.0.0.1"], Validity::Now);
    let server =
        ScriptedServer::start(&certificate, None, |asked| Reaction::SendAndClose(good(asked)));
    let client = client(&server);
    client.discover().await.unwrap();
    let port = server.endpoint().port();
    drop(server);
    let other = stranger.server(&["127.0.0.1"], Validity::Now);
    let other = ScriptedServer::start_on(port, &other, None, |asked| Reaction::Send(good(asked)));
    let error = client.create(Create::default()).await.unwrap_err();
    assert!(matches!(error, Error::Tls { .. }), "{error}");
    assert_eq!(other.requests(), 0);
}
