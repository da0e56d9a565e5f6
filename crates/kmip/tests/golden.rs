//! Reads recorded answers of PyKMIP 0.11.0, in each version of the protocol.
//!
//! `RECORD_KMIP=1 cargo test -p vmseal-kmip --test golden` records them again from a PyKMIP that it
//! starts. The key in them has never been used.
#![allow(clippy::unwrap_used)] // in tests a panic is the report

use std::path::PathBuf;

use vmseal_kmip::message::{Outcome, request, responses};
use vmseal_kmip::operation::{
    Activate, AddAttribute, Create, Destroy, DiscoverVersions, Get, GetState, KeyId, Locate,
    Operation, Query, Revoke, Text,
};
use vmseal_kmip::testing::{Authority, PyKmip, RawConnection, Validity};
use vmseal_kmip::{OperationCode, ProtocolVersion, ResultReason, RevocationReason, State};

/// The batch item id that all requests here begin with.
const FIRST_ID: u64 = 1;

fn path(version: ProtocolVersion, name: &str) -> PathBuf {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/pykmip");
    PathBuf::from(format!("{golden}/{version}-{name}.bin"))
}

/// Where answers come from: the files, or a server whose answers become the files.
enum Source {
    Files,
    Server(Box<RawConnection>),
}

impl Source {
    fn ask<O: Operation>(
        &mut self,
        version: ProtocolVersion,
        name: &str,
        operations: &[O],
    ) -> Vec<Outcome<O::Answer>> {
        let path = path(version, name);
        if let Self::Server(connection) = self {
            let answer = connection.exchange(&request(version, FIRST_ID, operations).unwrap());
            std::fs::write(&path, answer).unwrap();
        }
        let answer = std::fs::read(&path).unwrap();
        responses(operations, FIRST_ID, &answer).unwrap()
    }

    fn one<O: Operation>(
        &mut self,
        version: ProtocolVersion,
        name: &str,
        operation: O,
    ) -> Outcome<O::Answer> {
        self.ask(version, name, &[operation]).pop().unwrap()
    }
}

fn done<A: std::fmt::Debug>(outcome: Outcome<A>) -> A {
    match outcome {
        Outcome::Done(answer) => answer,
        other => panic!("not done: {other:?}"),
    }
}

fn refused<A: std::fmt::Debug>(outcome: Outcome<A>) -> ResultReason {
    match outcome {
        Outcome::Refused(refusal) => refusal.reason,
        other => panic!("not refused: {other:?}"),
    }
}

fn life(source: &mut Source, version: ProtocolVersion) {
    let versions = source.one(version, "discover-versions", DiscoverVersions);
    if version == ProtocolVersion::V1_0 {
        assert_eq!(refused(versions), ResultReason::OperationNotSupported);
    } else {
        let mut expected = vec![ProtocolVersion { major: 2, minor: 0 }];
        expected.extend(ProtocolVersion::SPOKEN);
        assert_eq!(done(versions), expected);
    }
    let description = done(source.one(version, "query", Query));
    assert_eq!(description.vendor.unwrap(), "PyKMIP 0.11.0 Software Server");
    assert!(description.operations.contains(&OperationCode::Get));

    let id = done(source.one(version, "create", Create::default()));
    let get = || Get { id: id.clone() };
    let state = |id: &KeyId| GetState { id: id.clone() };
    done(source.one(version, "activate", Activate { id: id.clone() }));
    let key = done(source.one(version, "get", get()));
    assert_eq!(key.len(), 32);
    let missing = KeyId::new("4711").unwrap();
    let mut states = source.ask(version, "states", &[state(&id), state(&missing), state(&id)]);
    assert_eq!(done(states.remove(0)), State::Active);
    assert_eq!(refused(states.remove(0)), ResultReason::ItemNotFound);
    assert_eq!(done(states.remove(0)), State::Active);
    let (name, value) = (Text::new("product").unwrap(), Text::new("vmseal").unwrap());
    let add = AddAttribute { id: id.clone(), name, value };
    for outcome in source.ask(version, "add-attributes", &[add.clone(), add.clone(), add]) {
        assert_eq!(refused(outcome), ResultReason::InvalidMessage);
    }
    assert_eq!(done(source.one(version, "locate", Locate::default())), vec![id.clone()]);
    let destroy = || Destroy { id: id.clone() };
    assert_eq!(
        refused(source.one(version, "destroy-active", destroy())),
        ResultReason::PermissionDenied
    );
    let (reason, compromised_at) = (RevocationReason::KeyCompromise, 1_795_000_000);
    let revoke = Revoke { id: id.clone(), reason, compromised_at };
    done(source.one(version, "revoke", revoke));
    assert_eq!(done(source.one(version, "state-compromised", state(&id))), State::Compromised);
    done(source.one(version, "destroy", destroy()));
    assert_eq!(refused(source.one(version, "get-destroyed", get())), ResultReason::ItemNotFound);
}

#[test]
fn answers_of_pykmip_are_read() {
    let mut source = Source::Files;
    let server;
    if std::env::var_os("RECORD_KMIP").is_some() {
        let authority = Authority::new("kms");
        server = PyKmip::start(&authority);
        let identity = authority.client("vmseal", Validity::Now);
        let connection = RawConnection::open(&server.endpoint(), &authority, &identity);
        source = Source::Server(Box::new(connection));
    }
    for version in ProtocolVersion::SPOKEN {
        life(&mut source, version);
    }
}

/// A damaged answer is read or refused, and a key never has another length.
#[test]
fn damaged_answers_are_read_or_refused() {
    for (index, version) in ProtocolVersion::SPOKEN.into_iter().enumerate() {
        let golden = |name: &str| std::fs::read(path(version, name)).unwrap();
        // PyKMIP counts.
        let id = KeyId::new((index + 1).to_string()).unwrap();
        let key = golden("get");
        assert!(responses(&[Get { id: id.clone() }], FIRST_ID, &key).is_ok());
        for at in 0..key.len() {
            assert!(responses(&[Get { id: id.clone() }], FIRST_ID, &key[..at]).is_err());
            for bit in 0..8 {
                let mut damaged = key.clone();
                damaged[at] ^= 1 << bit;
                if let Ok(outcomes) = responses(&[Get { id: id.clone() }], FIRST_ID, &damaged)
                    && let [Outcome::Done(key)] = &outcomes[..]
                {
                    assert_eq!(key.len(), 32);
                }
            }
        }
        let answer = golden("states");
        let asked = [(); 3].map(|()| GetState { id: id.clone() });
        for at in 0..answer.len() {
            assert!(responses(&asked, FIRST_ID, &answer[..at]).is_err());
            let mut damaged = answer.clone();
            damaged[at] = !damaged[at];
            let _ = responses(&asked, FIRST_ID, &damaged);
        }
    }
}
