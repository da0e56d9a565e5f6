//! Many requests at a time, and idle connections.
#![allow(clippy::unwrap_used)] // in tests a panic is the report

mod server;

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmseal_kmip::State;
use vmseal_kmip::client::{Client, Error, NewKey, PoolLimits, Settings, Step};
use vmseal_kmip::operation::KeyId;
use vmseal_kmip::testing::{Asked, Reaction, ScriptedServer, Validity};
use vmseal_kmip::ttlv::Tag;

use server::AUTHORITY;

const TIMEOUT: Duration = Duration::from_secs(30);

/// A server that takes `late` for each answer.
fn slow(late: Duration) -> ScriptedServer {
    let certificate = AUTHORITY.server(&["127.0.0.1"], Validity::Now);
    ScriptedServer::start(&certificate, None, move |asked: &Asked| {
        let answer = asked.done(|payload| {
            payload.structure(Tag::ATTRIBUTE, |attribute| {
                attribute.text(Tag::ATTRIBUTE_NAME, "State");
                attribute.enumeration(Tag::ATTRIBUTE_VALUE, State::Active.number());
            });
        });
        Reaction::SendLate(late, answer)
    })
}

fn settings(server: &ScriptedServer, limits: PoolLimits) -> Settings {
    let identity = AUTHORITY.client("vmseal", Validity::Now).identity();
    let mut settings = Settings::new(server.endpoint(), AUTHORITY.trust(), identity);
    settings.limits = limits;
    settings.timeouts.wait = TIMEOUT;
    settings
}

async fn ask_at_once(client: &Arc<Client>, count: usize) {
    let tasks = (0..count).map(|_| {
        let client = Arc::clone(client);
        tokio::spawn(async move { client.key_state(&KeyId::new("1").unwrap()).await })
    });
    for task in tasks.collect::<Vec<_>>() {
        assert_eq!(task.await.unwrap().unwrap(), State::Active);
    }
}

async fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !test() {
        assert!(begun.elapsed() < TIMEOUT, "not so after {TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn no_more_connections_are_opened_than_are_allowed() {
    let server = slow(Duration::from_millis(20));
    let limits = PoolLimits { connections: 4, idle: 4, idle_for: TIMEOUT, ..PoolLimits::default() };
    let client = Arc::new(Client::new(settings(&server, limits)).unwrap());
    client.discover().await.unwrap();
    ask_at_once(&client, 40).await;
    assert_eq!(server.accepted(), 4, "each is used ten times");
    assert_eq!(server.requests(), 41);
    assert_eq!(client.idle_connections(), 4);
}

#[tokio::test]
async fn waiting_too_long_for_a_connection_is_an_error() {
    let server = slow(Duration::from_secs(3));
    let limits = PoolLimits { connections: 1, ..PoolLimits::default() };
    let mut settings = settings(&server, limits);
    settings.timeouts.wait = Duration::from_millis(100);
    let client = Arc::new(Client::new(settings).unwrap());
    client.discover().await.unwrap();
    let id = KeyId::new("1").unwrap();
    let (first, second) = tokio::join!(client.key_state(&id), async {
        tokio::task::yield_now().await;
        client.key_state(&id).await
    });
    assert_eq!(first.unwrap(), State::Active);
    let error = second.unwrap_err();
    assert!(matches!(error, Error::TimedOut { step: Step::Wait, .. }), "{error}");
}

#[tokio::test]
async fn few_idle_connections_stay_open() {
    let server = slow(Duration::from_millis(50));
    let limits =
        PoolLimits { connections: 10, idle: 2, idle_for: TIMEOUT, ..PoolLimits::default() };
    let client = Arc::new(Client::new(settings(&server, limits)).unwrap());
    ask_at_once(&client, 10).await;
    assert_eq!(client.idle_connections(), 2);
    eventually("the server sees the others closed", || server.open() == 2).await;
}

#[tokio::test]
async fn a_hundred_idle_connections_are_closed_in_their_time() {
    let server = slow(Duration::from_millis(500));
    let idle_for = Duration::from_secs(2);
    let limits = PoolLimits { connections: 100, idle: 100, idle_for, ..PoolLimits::default() };
    let client = Arc::new(Client::new(settings(&server, limits)).unwrap());
    client.discover().await.unwrap();
    ask_at_once(&client, 100).await;
    assert!(server.accepted() > 50, "{} connections", server.accepted());
    eventually("they are closed", || client.idle_connections() == 0).await;
    eventually("the server sees them closed", || server.open() == 0).await;
    // And then it goes on.
    ask_at_once(&client, 1).await;
    assert_eq!(client.idle_connections(), 1);
    eventually("this one too", || client.idle_connections() == 0).await;
}

#[tokio::test]
async fn a_connection_that_is_too_old_is_not_used_again() {
    let server = slow(Duration::ZERO);
    let limits = PoolLimits { lifetime: Duration::ZERO, ..PoolLimits::default() };
    let client = Arc::new(Client::new(settings(&server, limits)).unwrap());
    ask_at_once(&client, 1).await;
    ask_at_once(&client, 1).await;
    assert_eq!((server.accepted(), server.requests()), (3, 3), "one to negotiate, and two");
    assert_eq!(client.idle_connections(), 0);
}

#[tokio::test]
async fn a_client_that_is_dropped_leaves_no_connection() {
    let server = slow(Duration::ZERO);
    let limits = PoolLimits { idle_for: TIMEOUT, ..PoolLimits::default() };
    let client = Arc::new(Client::new(settings(&server, limits)).unwrap());
    ask_at_once(&client, 1).await;
    assert_eq!(server.open(), 1);
    drop(client);
    eventually("the server sees it closed", || server.open() == 0).await;
}

#[tokio::test]
async fn a_real_server_is_asked_by_many_at_once() {
    let client = Arc::new(server::client());
    let tasks = (0..24).map(|_| {
        let client = Arc::clone(&client);
        tokio::spawn(async move {
            let id = client.create_key(NewKey::default()).await.unwrap().id;
            let key = client.get_key(&id).await.unwrap();
            (id, key)
        })
    });
    let mut made = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        made.push(task.await.unwrap());
    }
    // Every answer went to its request.
    for (id, key) in &made {
        assert_eq!(client.get_key(id).await.unwrap(), *key);
        assert_eq!(made.iter().filter(|(_, other)| other == key).count(), 1);
    }
}
