//! The codec: golden bytes of the specification, round trips, and hostile input.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const SPECIFICATION: &str = include_str!("../../tests/golden/specification/9.1.2-examples.txt");

/// The bytes of a line such as `42 00 20 | 02 | …`.
fn hex(line: &str) -> Vec<u8> {
    let digits: String = line.chars().filter(char::is_ascii_hexdigit).collect();
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

fn encoded(item: &Item<'_>) -> Vec<u8> {
    let mut encoder = Encoder::new();
    encoder.item(item);
    encoder.finish().unwrap()
}

#[test]
fn the_examples_of_the_specification_are_read_and_written() {
    let tag = Tag(0x42_0020);
    let item = |value| Item { tag, value };
    let big = 1_234_567_890_000_000_000_000_000_000_i128.to_be_bytes();
    let parts = vec![
        Item { tag: Tag(0x42_0004), value: Value::Enumeration(254) },
        Item { tag: Tag(0x42_0005), value: Value::Integer(255) },
    ];
    let expected = [
        item(Value::Integer(8)),
        item(Value::LongInteger(123_456_789_000_000_000)),
        item(Value::BigInteger(&big)),
        item(Value::Enumeration(255)),
        item(Value::Boolean(true)),
        item(Value::TextString("Hello World")),
        item(Value::ByteString(&[1, 2, 3])),
        item(Value::DateTime(1_205_495_800)), // Friday, March 14, 2008, 11:56:40 GMT
        item(Value::Interval(10 * 24 * 60 * 60)),
        item(Value::Structure(parts)),
    ];
    let examples = SPECIFICATION.lines().filter(|line| !line.starts_with('#'));
    let examples: Vec<_> = examples.map(hex).collect();
    assert_eq!(examples.len(), expected.len());
    for (example, expected) in examples.iter().zip(expected) {
        assert_eq!(decode(example).unwrap(), expected);
        assert_eq!(encoded(&expected), *example);
    }
}

/// A value that owns what [`Value`] borrows.
#[derive(Clone, Debug)]
enum Owned {
    Structure(Vec<(u32, Owned)>),
    Integer(i32),
    LongInteger(i64),
    BigInteger(Vec<u64>),
    Enumeration(u32),
    Boolean(bool),
    Text(String),
    Bytes(Vec<u8>),
    DateTime(i64),
    Interval(u32),
}

fn owned() -> impl Strategy<Value = (u32, Owned)> {
    let leaf = prop_oneof![
        any::<i32>().prop_map(Owned::Integer),
        any::<i64>().prop_map(Owned::LongInteger),
        vec(any::<u64>(), 1..4).prop_map(Owned::BigInteger),
        any::<u32>().prop_map(Owned::Enumeration),
        any::<bool>().prop_map(Owned::Boolean),
        ".{0,20}".prop_map(Owned::Text),
        vec(any::<u8>(), 0..40).prop_map(Owned::Bytes),
        any::<i64>().prop_map(Owned::DateTime),
        any::<u32>().prop_map(Owned::Interval),
    ];
    let tag = || 0u32..1 << 24;
    let value = leaf.prop_recursive(DEPTH_MAX as u32 - 1, 100, 6, move |inner| {
        vec((tag(), inner), 0..6).prop_map(Owned::Structure)
    });
    (tag(), value)
}

/// The bytes of the big integers of a tree, in their order.
fn big_integers(value: &Owned, found: &mut Vec<Vec<u8>>) {
    match value {
        Owned::Structure(items) => items.iter().for_each(|(_, item)| big_integers(item, found)),
        Owned::BigInteger(words) => {
            found.push(words.iter().flat_map(|w| w.to_be_bytes()).collect())
        }
        _ => {}
    }
}

fn borrow<'a>(tag: u32, value: &'a Owned, big: &mut std::slice::Iter<'a, Vec<u8>>) -> Item<'a> {
    let value = match value {
        Owned::Structure(items) => {
            Value::Structure(items.iter().map(|(tag, item)| borrow(*tag, item, big)).collect())
        }
        Owned::Integer(value) => Value::Integer(*value),
        Owned::LongInteger(value) => Value::LongInteger(*value),
        Owned::BigInteger(_) => Value::BigInteger(big.next().unwrap()),
        Owned::Enumeration(value) => Value::Enumeration(*value),
        Owned::Boolean(value) => Value::Boolean(*value),
        Owned::Text(text) => Value::TextString(text),
        Owned::Bytes(bytes) => Value::ByteString(bytes),
        Owned::DateTime(value) => Value::DateTime(*value),
        Owned::Interval(value) => Value::Interval(*value),
    };
    Item { tag: Tag(tag), value }
}

/// Bytes that are nearly TTLV: random headers with small lengths.
fn nearly() -> impl Strategy<Value = Vec<u8>> {
    let header = (0u8..12, 0u32..40, vec(any::<u8>(), 0..24));
    vec(header, 0..20).prop_map(|items| {
        let item = |(kind, length, value): (u8, u32, Vec<u8>)| {
            [&[0x42, 0, 0x20, kind][..], &length.to_be_bytes(), &value].concat()
        };
        items.into_iter().flat_map(item).collect()
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read_back((tag, value) in owned()) {
        let mut big = Vec::new();
        big_integers(&value, &mut big);
        let item = borrow(tag, &value, &mut big.iter());
        let bytes = encoded(&item);
        prop_assert_eq!(bytes.len() % 8, 0);
        prop_assert_eq!(decode(&bytes).unwrap(), item);
    }

    #[test]
    fn every_prefix_is_refused_and_so_is_more((tag, value) in owned()) {
        let mut big = Vec::new();
        big_integers(&value, &mut big);
        let mut bytes = encoded(&borrow(tag, &value, &mut big.iter()));
        for len in 0..bytes.len() {
            let refused = decode(&bytes[..len]);
            prop_assert!(matches!(refused, Err(DecodeError::Truncated { .. })), "{:?}", refused);
        }
        bytes.push(0);
        prop_assert_eq!(decode(&bytes), Err(DecodeError::Trailing(1)));
    }

    #[test]
    fn arbitrary_bytes_are_read_or_refused(bytes in vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes);
    }

    #[test]
    fn what_is_accepted_is_written_the_same(bytes in nearly()) {
        // But for padding, which may hold anything and is written as zeroes.
        if let Ok(item) = decode(&bytes) {
            let again = encoded(&item);
            prop_assert_eq!(again.len(), bytes.len());
            prop_assert_eq!(decode(&again).unwrap(), item);
        }
    }
}

#[test]
fn padding_may_have_any_content_but_must_be_present() {
    let mut bytes = hex("42 00 20 | 08 | 00 00 00 03 | 01 02 03 00 00 00 00 00");
    bytes[15] = 0xff;
    let item = decode(&bytes).unwrap();
    assert_eq!(item.value, Value::ByteString(&[1, 2, 3]));
    bytes.truncate(11);
    let truncated = DecodeError::Truncated { at: 0, claimed: 16, left: 11 };
    assert_eq!(decode(&bytes), Err(truncated));
}

#[test]
fn lengths_that_a_type_cannot_have_are_refused() {
    for (kind, length) in
        [(1, 4), (2, 8), (2, 0), (3, 4), (4, 4), (4, 0), (5, 3), (6, 4), (9, 4), (10, 8)]
    {
        let mut bytes = vec![0x42, 0, 0x20, kind, 0, 0, 0, length];
        bytes.resize(8 + usize::from(length).next_multiple_of(8), 0);
        let expected = DecodeError::Length { at: 0, kind, found: length.into() };
        assert_eq!(decode(&bytes), Err(expected), "type {kind}");
    }
}

#[test]
fn values_that_a_type_cannot_have_are_refused() {
    let refused = |line| decode(&hex(line)).unwrap_err();
    let two = refused("42 00 20 | 06 | 00 00 00 08 | 00 00 00 00 00 00 00 02");
    assert_eq!(two, DecodeError::Boolean { at: 0 });
    let text = refused("42 00 20 | 07 | 00 00 00 01 | ff 00 00 00 00 00 00 00");
    assert_eq!(text, DecodeError::Text { at: 0 });
    for kind in [0, 11, 0x80, 0xff] {
        let mut bytes = hex("42 00 20 | 02 | 00 00 00 04 | 00 00 00 08 00 00 00 00");
        bytes[3] = kind;
        assert_eq!(decode(&bytes), Err(DecodeError::UnknownType { at: 0, found: kind }));
    }
}

#[test]
fn claimed_lengths_are_not_believed() {
    let claimed = hex("42 00 20 | 08 | ff ff ff ff | 01 02 03 00 00 00 00 00");
    let truncated = DecodeError::Truncated { at: 0, claimed: 8 + (1 << 32), left: 16 };
    assert_eq!(decode(&claimed), Err(truncated));
    // An item may not reach out of its structure, though the message goes on.
    let outer =
        hex("42 00 20 | 01 | 00 00 00 10 | 42 00 20 | 08 | 00 00 00 10 | 00 00 00 00 00 00 00 00
         42 00 20 | 02 | 00 00 00 04 | 00 00 00 08 00 00 00 00");
    let truncated = DecodeError::Truncated { at: 8, claimed: 24, left: 16 };
    assert_eq!(decode(&outer), Err(truncated));
}

/// `depth` structures in one another.
fn nested(depth: usize) -> Vec<u8> {
    (0..depth)
        .flat_map(|level| {
            let length = (depth - level - 1) as u32 * 8;
            [&[0x42, 0, 0x20, 1][..], &length.to_be_bytes()].concat()
        })
        .collect()
}

#[test]
fn depth_and_count_are_limited() {
    assert!(decode(&nested(DEPTH_MAX)).is_ok());
    assert_eq!(decode(&nested(DEPTH_MAX + 1)), Err(DecodeError::TooDeep));
    assert_eq!(decode(&nested(MESSAGE_LEN_MAX / 8)), Err(DecodeError::TooDeep));

    let many = |count: u32| {
        let empty = [0x42, 0, 0x20, 8, 0, 0, 0, 0].repeat(count as usize);
        [&[0x42, 0, 0x20, 1][..], &(count * 8).to_be_bytes(), &empty].concat()
    };
    assert!(decode(&many(ITEMS_MAX as u32 - 1)).is_ok());
    assert_eq!(decode(&many(ITEMS_MAX as u32)), Err(DecodeError::TooManyItems));
    let long = vec![0; MESSAGE_LEN_MAX + 8];
    assert_eq!(decode(&long), Err(DecodeError::TooLong(MESSAGE_LEN_MAX as u64 + 8)));
}

#[test]
fn the_length_of_a_message_is_known_from_its_header() {
    let of = |line| message_len(hex(line).try_into().unwrap(), Tag::RESPONSE_MESSAGE);
    assert_eq!(of("42 00 7b | 01 | 00 00 00 50"), Ok(0x58));
    assert_eq!(of("42 00 7b | 01 | 00 00 ff f8"), Ok(MESSAGE_LEN_MAX));
    assert_eq!(
        of("42 00 7b | 01 | 00 01 00 00"),
        Err(DecodeError::TooLong(MESSAGE_LEN_MAX as u64 + 8))
    );
    assert_eq!(of("42 00 7b | 01 | ff ff ff f8"), Err(DecodeError::TooLong(1 << 32)));
    assert_eq!(
        of("42 00 7b | 01 | 00 00 00 51"),
        Err(DecodeError::Length { at: 0, kind: 1, found: 0x51 })
    );
    for other in
        ["42 00 78 | 01 | 00 00 00 50", "42 00 7b | 02 | 00 00 00 50", "48 54 54 50 | 2f 31 2e 31"]
    {
        assert!(matches!(of(other), Err(DecodeError::OtherBeginning { .. })), "{other}");
    }
}

#[test]
fn too_long_messages_are_not_written() {
    let mut encoder = Encoder::new();
    encoder.structure(Tag::REQUEST_MESSAGE, |message| {
        message.bytes(Tag::KEY_MATERIAL, &vec![0; MESSAGE_LEN_MAX - 16]);
        message.text(Tag::NAME_VALUE, "more");
    });
    assert_eq!(encoder.finish(), Err(TooLong));
    let mut encoder = Encoder::new();
    encoder.structure(Tag::REQUEST_MESSAGE, |message| {
        message.bytes(Tag::KEY_MATERIAL, &vec![0; MESSAGE_LEN_MAX - 16]);
    });
    assert_eq!(encoder.finish().unwrap().len(), MESSAGE_LEN_MAX);
}

#[test]
fn debug_shows_no_bytes() {
    let secret = [0xab; 32];
    let item = Item {
        tag: Tag::KEY_VALUE,
        value: Value::Structure(vec![
            Item { tag: Tag::KEY_MATERIAL, value: Value::ByteString(&secret) },
            Item { tag: Tag(0x42_0054), value: Value::BigInteger(&secret) },
            Item { tag: Tag(0x54_0001), value: Value::Integer(7) },
        ]),
    };
    let shown = format!("{item:?}");
    assert_eq!(
        shown,
        "Key Value: [Key Material: 32 bytes, Name Type: big integer of 32 bytes, tag 540001: 7]"
    );
}
