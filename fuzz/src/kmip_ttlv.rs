//! A key server's answer: TTLV, and the message around the answers of every operation. What is accepted is
//! written back the same, but for padding; a key has 32 bytes.

use vmseal_kmip::RevocationReason;
use vmseal_kmip::message::{Outcome, responses};
use vmseal_kmip::operation::{
    Activate, Create, Destroy, DiscoverVersions, Get, GetState, KeyId, Locate, Operation, Query,
    Revoke,
};
use vmseal_kmip::ttlv::{Encoder, decode};

/// The first batch item id of the requests that the seeds answer.
const FIRST_ID: u64 = 1;

fn outcomes<O: Operation>(operations: &[O], data: &[u8]) -> Vec<Outcome<O::Answer>> {
    let outcomes = responses(operations, FIRST_ID, data).unwrap_or_default();
    assert!(outcomes.is_empty() || outcomes.len() == operations.len());
    outcomes
}

/// See the module.
pub fn run(data: &[u8]) {
    let Ok(item) = decode(data) else {
        assert!(responses(&[Query], FIRST_ID, data).is_err());
        return;
    };
    let mut encoder = Encoder::new();
    encoder.item(&item);
    let written = encoder.finish().unwrap();
    assert_eq!(written.len(), data.len());
    assert!(decode(&written).unwrap() == item);

    let id = KeyId::new("1").unwrap();
    for outcome in outcomes(&[Get { id: id.clone() }], data) {
        if let Outcome::Done(key) = outcome {
            assert_eq!(key.len(), 32);
        }
    }
    outcomes(&[(); 3].map(|()| GetState { id: id.clone() }), data);
    outcomes(&[DiscoverVersions], data);
    outcomes(&[Query], data);
    outcomes(&[Create::default()], data);
    outcomes(&[Locate::default()], data);
    outcomes(&[Activate { id: id.clone() }], data);
    let (reason, compromised_at) = (RevocationReason::Unspecified, 0);
    outcomes(&[Revoke { id: id.clone(), reason, compromised_at }], data);
    outcomes(&[Destroy { id }], data);
}
