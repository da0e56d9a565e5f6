//! The encoding of requests, and responses that are right, odd or wrong.
#![allow(clippy::unwrap_used)] // in tests a panic is the report

use vmseal_kmip::fields::Violation;
use vmseal_kmip::message::{BATCH_MAX, Outcome, request, responses};
use vmseal_kmip::operation::{
    AddAttribute, AnswerError, Create, Get, GetState, KeyId, Locate, Operation, Query,
    TEXT_LEN_MAX, Text, UnusableKey,
};
use vmseal_kmip::testing::{Asked, Reaction};
use vmseal_kmip::ttlv::{Encoder, MESSAGE_LEN_MAX, Tag, TooLong};
use vmseal_kmip::{OperationCode, ProtocolVersion, ResultReason, State};

const FIRST_ID: u64 = 7;

/// The bytes of an annotated file; a `#` begins a comment.
fn hex(text: &str) -> Vec<u8> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap());
    let digits: String = lines.flat_map(str::chars).filter(char::is_ascii_hexdigit).collect();
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

fn text(text: &str) -> Text {
    Text::new(text).unwrap()
}

fn id(id: &str) -> KeyId {
    KeyId::new(id).unwrap()
}

#[test]
fn requests_match_the_specification() {
    let create = include_str!("golden/specification/create-request-1.1.txt");
    assert_eq!(request(ProtocolVersion::V1_1, 1, &[Create::default()]).unwrap(), hex(create));
    let add = |name, value| AddAttribute { id: id("17"), name: text(name), value: text(value) };
    let batch = [add("product", "vmseal"), add("cluster", "cluster")];
    let expected = include_str!("golden/specification/add-attribute-batch-1.1.txt");
    assert_eq!(request(ProtocolVersion::V1_1, 7, &batch).unwrap(), hex(expected));
}

#[test]
fn a_request_carries_no_more_than_its_answers_may_take() {
    let longest = GetState { id: id(&"i".repeat(TEXT_LEN_MAX)) };
    let batch = vec![longest.clone(); BATCH_MAX];
    assert!(request(ProtocolVersion::V1_4, 1, &batch).unwrap().len() < MESSAGE_LEN_MAX);
    let batch = vec![longest; BATCH_MAX + 1];
    assert_eq!(request(ProtocolVersion::V1_4, 1, &batch), Err(TooLong));
}

#[test]
fn unprintable_or_too_long_texts_are_not_ids() {
    for wrong in ["", "a\nb", "\u{1b}[2J", &"i".repeat(TEXT_LEN_MAX + 1)] {
        assert!(KeyId::new(wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(id("käy").as_str(), "käy");
}

/// As if `count` items had been asked for.
fn asked(operation: OperationCode, count: u64) -> Asked {
    let ids = (FIRST_ID..FIRST_ID + count).map(|id| id.to_be_bytes().to_vec()).collect();
    Asked {
        connection: 0,
        request: 0,
        version: ProtocolVersion::V1_2,
        operation,
        ids,
        objects: Vec::new(),
    }
}

fn states(ids: &[&str]) -> Vec<GetState> {
    ids.iter().map(|key| GetState { id: id(key) }).collect()
}

fn state(payload: &mut Encoder, state: State) {
    payload.structure(Tag::ATTRIBUTE, |attribute| {
        attribute.text(Tag::ATTRIBUTE_NAME, "State");
        attribute.enumeration(Tag::ATTRIBUTE_VALUE, state.number());
    });
}

fn violation<O: Operation>(operations: &[O], message: &[u8]) -> Violation
where
    O::Answer: std::fmt::Debug,
{
    match responses(operations, FIRST_ID, message) {
        Err(AnswerError::Violation(violation)) => violation,
        other => panic!("no violation, but {other:?}"),
    }
}

#[test]
fn results_are_matched_by_their_ids_and_not_by_their_places() {
    let asked = asked(OperationCode::GetAttributes, 3);
    let message = asked.response(3, |message| {
        asked.result(message, &asked.ids[2], |payload| state(payload, State::Compromised));
        asked.refusal(message, &asked.ids[1], ResultReason::ItemNotFound);
        asked.result(message, &asked.ids[0], |payload| state(payload, State::Active));
    });
    let outcomes = responses(&states(&["a", "b", "c"]), FIRST_ID, &message).unwrap();
    match &outcomes[..] {
        [
            Outcome::Done(State::Active),
            Outcome::Refused(refusal),
            Outcome::Done(State::Compromised),
        ] => assert_eq!(refusal.reason, ResultReason::ItemNotFound),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_result_of_no_item_or_of_one_that_has_its_result_is_refused() {
    let asked = asked(OperationCode::GetAttributes, 2);
    let answer = |ids: [&[u8]; 2]| {
        asked.response(2, |message| {
            for id in ids {
                asked.result(message, id, |payload| state(payload, State::Active));
            }
        })
    };
    let (first, second) = (&asked.ids[0][..], &asked.ids[1][..]);
    let two = states(&["a", "b"]);
    assert!(responses(&two, FIRST_ID, &answer([second, first])).is_ok());
    for wrong in [[first, first], [first, &[9; 8]], [first, &second[1..]], [first, &[]]] {
        assert_eq!(violation(&two, &answer(wrong)), Violation::WrongBatchItem);
    }
    let alone = asked.response(1, |message| {
        asked.result(message, &[9; 8], |payload| state(payload, State::Active));
    });
    assert_eq!(violation(&states(&["a"]), &alone), Violation::WrongBatchItem);
}

fn without_id(asked: &Asked, count: usize) -> Vec<u8> {
    asked.response(count, |message| {
        for _ in 0..count {
            message.structure(Tag::BATCH_ITEM, |item| {
                item.enumeration(Tag::OPERATION, asked.operation.number());
                item.enumeration(Tag::RESULT_STATUS, 0);
                item.structure(Tag::RESPONSE_PAYLOAD, |payload| state(payload, State::Active));
            });
        }
    })
}

#[test]
fn only_a_result_that_is_alone_may_have_no_id() {
    let asked = asked(OperationCode::GetAttributes, 2);
    assert!(responses(&states(&["a"]), FIRST_ID, &without_id(&asked, 1)).is_ok());
    let wrong = violation(&states(&["a", "b"]), &without_id(&asked, 2));
    assert_eq!(wrong, Violation::WrongBatchItem);
}

#[test]
fn a_server_may_stop_at_a_refusal_but_not_without_one() {
    let asked = asked(OperationCode::GetAttributes, 3);
    let three = states(&["a", "b", "c"]);
    let stopped = asked.response(2, |message| {
        asked.result(message, &asked.ids[0], |payload| state(payload, State::Active));
        asked.refusal(message, &asked.ids[1], ResultReason::PermissionDenied);
    });
    let outcomes = responses(&three, FIRST_ID, &stopped).unwrap();
    assert!(matches!(
        outcomes[..],
        [Outcome::Done(State::Active), Outcome::Refused(_), Outcome::NotAttempted]
    ));
    let short = asked.response(1, |message| {
        asked.result(message, &asked.ids[0], |payload| state(payload, State::Active));
    });
    assert_eq!(violation(&three, &short), Violation::NoResult);
}

#[test]
fn a_request_that_is_not_understood_is_refused_as_a_whole() {
    let mut asked = asked(OperationCode::GetAttributes, 3);
    asked.version = ProtocolVersion::V1_0; // as PyKMIP does it
    let Reaction::Send(message) = asked.refused(ResultReason::InvalidMessage) else { panic!() };
    let outcomes = responses(&states(&["a", "b", "c"]), FIRST_ID, &message).unwrap();
    assert_eq!(outcomes.len(), 3);
    for outcome in outcomes {
        let Outcome::Refused(refusal) = outcome else { panic!("{outcome:?}") };
        assert_eq!(refusal.to_string(), "InvalidMessage (as the script says)");
    }
}

#[test]
fn violations_of_the_protocol_are_reported() {
    let one = states(&["a"]);
    let good = asked(OperationCode::GetAttributes, 1);
    let done = |asked: &Asked| asked.done(|payload| state(payload, State::Active));
    assert!(responses(&one, FIRST_ID, &done(&good)).is_ok());

    let newer = Asked { version: ProtocolVersion { major: 2, minor: 0 }, ..good.clone() };
    assert_eq!(violation(&one, &done(&newer)), Violation::Version(newer.version));
    let other = Asked { operation: OperationCode::Get, ..good.clone() };
    let (asked_for, answered) = (OperationCode::GetAttributes, OperationCode::Get);
    let wrong = Violation::WrongOperation { asked: asked_for, answered };
    assert_eq!(violation(&one, &done(&other)), wrong);

    let count = |announced| {
        good.response(announced, |message| {
            good.result(message, &good.ids[0], |payload| state(payload, State::Active));
        })
    };
    assert!(matches!(violation(&one, &count(2)), Violation::BatchCount { .. }));
    assert!(matches!(violation(&one, &count(0)), Violation::BatchCount { .. }));
    let two = asked(OperationCode::GetAttributes, 2);
    assert!(matches!(violation(&one, &done(&two)), Violation::BatchCount { found: 2, .. }));

    let status = |status| {
        good.response(1, |message| {
            message.structure(Tag::BATCH_ITEM, |item| {
                item.enumeration(Tag::OPERATION, good.operation.number());
                item.enumeration(Tag::RESULT_STATUS, status);
            });
        })
    };
    assert_eq!(violation(&one, &status(2)), Violation::Pending);
    assert_eq!(violation(&one, &status(9)), Violation::WrongValue(Tag::RESULT_STATUS));
    let missing = Violation::Missing { structure: Tag::RESPONSE_PAYLOAD, field: Tag::ATTRIBUTE };
    assert_eq!(violation(&one, &status(0)), missing);

    let of_another = good.done(|payload| {
        payload.text(Tag::UNIQUE_IDENTIFIER, "b");
        state(payload, State::Active);
    });
    assert_eq!(violation(&one, &of_another), Violation::OtherObject);
    let request = request(ProtocolVersion::V1_2, FIRST_ID, &one).unwrap();
    assert_eq!(violation(&one, &request), Violation::WrongValue(Tag::REQUEST_MESSAGE));
    assert!(matches!(
        violation(&one, b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        Violation::Malformed(_)
    ));
}

#[test]
fn fields_that_are_there_twice_or_of_another_type_are_refused() {
    let good = asked(OperationCode::Create, 1);
    let created = |payload: &dyn Fn(&mut Encoder)| {
        let message = good.done(payload);
        violation(&[Create::default()], &message)
    };
    let (structure, field) = (Tag::RESPONSE_PAYLOAD, Tag::UNIQUE_IDENTIFIER);
    assert_eq!(created(&|_| {}), Violation::Missing { structure, field });
    let twice = created(&|payload| {
        payload.text(field, "1");
        payload.text(field, "2");
    });
    assert_eq!(twice, Violation::Repeated { structure, field });
    let number = created(&|payload| payload.integer(field, 1));
    assert_eq!(number, Violation::WrongType { structure, field, expected: "Text String" });
    let unfit = created(&|payload| payload.text(field, "a\nb"));
    assert_eq!(unfit, Violation::WrongValue(field));
}

#[test]
fn texts_of_a_server_are_made_printable() {
    let good = asked(OperationCode::Query, 1);
    let long = format!("no\u{1b}[2J\r\n{}", "x".repeat(1000));
    let refused = good.response(1, |message| {
        message.structure(Tag::BATCH_ITEM, |item| {
            item.enumeration(Tag::RESULT_STATUS, 1);
            item.text(Tag::RESULT_MESSAGE, &long);
        });
    });
    let outcomes = responses(&[Query], FIRST_ID, &refused).unwrap();
    let [Outcome::Refused(refusal)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(refusal.reason, ResultReason::GeneralFailure);
    assert_eq!(refusal.text.chars().count(), 300);
    assert!(!refusal.text.chars().any(char::is_control), "{:?}", refusal.text);
    let described = good.done(|payload| payload.text(Tag::VENDOR_IDENTIFICATION, &long));
    let Ok([Outcome::Done(described)]) =
        responses(&[Query], FIRST_ID, &described).map(|some| <[_; 1]>::try_from(some).unwrap())
    else {
        panic!()
    };
    assert!(!described.vendor.unwrap().chars().any(char::is_control));
}

/// The properties of a key in an answer to Get.
struct Said {
    object: u32,
    format: u32,
    algorithm: u32,
    bits: i32,
    wrapped: bool,
    compressed: bool,
    material: Vec<u8>,
}

impl Default for Said {
    fn default() -> Self {
        let material = vec![0xc5; 32];
        let (object, format, algorithm, bits) = (2, 1, 3, 256);
        Self { object, format, algorithm, bits, wrapped: false, compressed: false, material }
    }
}

fn said(said: &Said) -> Vec<u8> {
    asked(OperationCode::Get, 1).done(|payload| {
        payload.enumeration(Tag::OBJECT_TYPE, said.object);
        payload.text(Tag::UNIQUE_IDENTIFIER, "a");
        payload.structure(Tag::SYMMETRIC_KEY, |key| {
            key.structure(Tag::KEY_BLOCK, |block| {
                block.enumeration(Tag::KEY_FORMAT_TYPE, said.format);
                if said.compressed {
                    block.enumeration(Tag::KEY_COMPRESSION_TYPE, 1);
                }
                block.structure(Tag::KEY_VALUE, |value| {
                    value.bytes(Tag::KEY_MATERIAL, &said.material);
                });
                block.enumeration(Tag::CRYPTOGRAPHIC_ALGORITHM, said.algorithm);
                block.integer(Tag::CRYPTOGRAPHIC_LENGTH, said.bits);
                if said.wrapped {
                    block.structure(Tag::KEY_WRAPPING_DATA, |_| {});
                }
            });
        });
    })
}

fn unusable(key: Said) -> UnusableKey {
    match responses(&[Get { id: id("a") }], FIRST_ID, &said(&key)) {
        Err(AnswerError::Key(problem)) => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_an_aes_256_key_in_the_clear_is_a_key() {
    let good = said(&Said::default());
    let outcomes = responses(&[Get { id: id("a") }], FIRST_ID, &good).unwrap();
    let [Outcome::Done(key)] = &outcomes[..] else { panic!() };
    assert_eq!(key.expose(), [0xc5; 32]);
    let shown = format!("{outcomes:?}");
    assert!(shown.contains("SecretBytes(32 bytes)") && !shown.contains("197"), "{shown}");

    let usual = Said::default;
    assert_eq!(unusable(Said { object: 1, ..usual() }), UnusableKey::ObjectType(1));
    assert_eq!(unusable(Said { format: 2, ..usual() }), UnusableKey::Format(2));
    assert_eq!(unusable(Said { algorithm: 2, ..usual() }), UnusableKey::Algorithm(2));
    assert_eq!(unusable(Said { bits: 128, ..usual() }), UnusableKey::Length { found: 128 });
    let short = Said { material: vec![1; 16], ..usual() };
    assert_eq!(unusable(short), UnusableKey::Length { found: 128 });
    let empty = Said { material: Vec::new(), ..usual() };
    assert_eq!(unusable(empty), UnusableKey::Length { found: 0 });
    assert_eq!(unusable(Said { wrapped: true, ..usual() }), UnusableKey::Wrapped);
    assert_eq!(unusable(Said { compressed: true, ..usual() }), UnusableKey::Compressed);
    let wrong = violation(&[Get { id: id("b") }], &said(&usual()));
    assert_eq!(wrong, Violation::OtherObject);
}

#[test]
fn located_ids_are_texts() {
    let good = asked(OperationCode::Locate, 1);
    let located = |number: bool| {
        good.done(|payload| {
            payload.text(Tag::UNIQUE_IDENTIFIER, "a");
            if number {
                payload.integer(Tag::UNIQUE_IDENTIFIER, 1);
            } else {
                payload.text(Tag::UNIQUE_IDENTIFIER, "b");
            }
        })
    };
    let outcomes = responses(&[Locate::default()], FIRST_ID, &located(false)).unwrap();
    assert!(matches!(&outcomes[..], [Outcome::Done(ids)] if *ids == [id("a"), id("b")]));
    let wrong = violation(&[Locate::default()], &located(true));
    assert_eq!(wrong, Violation::WrongValue(Tag::UNIQUE_IDENTIFIER));
}
