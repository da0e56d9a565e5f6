use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::frame::{CONTENT_MAX, Content, HEAD_LEN, TAG_LEN};

const MIGRATION: Uuid = Uuid::from_bytes([0x11; 16]);
const STREAMS: u16 = 3;

struct Given {
    migration: Uuid,
    key: u8,
    nonce: u64,
    streams: u16,
    cipher: Cipher,
}

const GIVEN: Given = Given {
    migration: MIGRATION,
    key: 0,
    nonce: 0x0102_0304_0506_0708,
    streams: STREAMS,
    cipher: Cipher::Aes256Gcm,
};

impl Given {
    fn spec(&self) -> Spec {
        let mut key: Vec<u8> = (self.key..self.key + 32).collect();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        Spec::new(self.migration, key, self.nonce, self.streams, self.cipher).unwrap()
    }
}

/// Both ends of a connection for this stream: the connecting one's and the accepting one's.
fn connected(spec: &Spec, stream: u16) -> (Ends, Ends) {
    let (connecting, hello) = Connecting::new(spec, stream).unwrap();
    let hello = Hello::decode(&hello).unwrap();
    let (accepting, answer) = Accepting::new(spec, hello).unwrap();
    let (proving, proof) = connecting.answered(&answer).unwrap();
    let accepted = accepting.proven(&proof).unwrap();
    assert_eq!(accepted.stream(), stream);
    let (accepting, first) = accepted.take().unwrap();
    (proving.accepted(first).unwrap(), accepting)
}

fn frame(sealer: &mut Sealer, kind: Kind, content: &[u8]) -> Vec<u8> {
    let mut frame = [&[0; HEAD_LEN], content, &[0; TAG_LEN]].concat();
    sealer.seal(kind, &mut frame).unwrap();
    frame
}

/// The content of a frame, with the number of its kind.
type Part = (u8, Vec<u8>);

/// What an opener accepts of these bytes, and why it does not go on.
fn opened(opener: &mut Opener, mut bytes: &[u8]) -> (Vec<Part>, Result<(), FrameError>) {
    let mut contents = Vec::new();
    let mut open = || -> Result<(), FrameError> {
        while let Some((head, rest)) = bytes.split_first_chunk() {
            let head = opener.head(*head)?;
            assert!(head.following() <= CONTENT_MAX + TAG_LEN, "longer than what may be held");
            let Some((sealed, rest)) = rest.split_at_checked(head.following()) else { break };
            if let Content::Data(kind, content) = opener.open(&head, &mut sealed.to_vec())? {
                contents.push((kind.number(), content.to_vec()));
            }
            bytes = rest;
        }
        let after = opener.finish().is_ok() && !bytes.is_empty();
        if after { Err(FrameError::AfterEnd) } else { opener.finish() }
    };
    let end = open();
    (contents, end)
}

/// The golden files come from another implementation (pyca/cryptography) and the written format.
#[test]
fn a_connection_is_that_of_the_written_format() {
    let golden: [(Cipher, &[u8]); 2] = [
        (Cipher::Aes256Gcm, include_bytes!("../../tests/golden/migration-wire-v1.bin")),
        (Cipher::None, include_bytes!("../../tests/golden/migration-wire-v1-plain.bin")),
    ];
    for (cipher, expected) in golden {
        let spec = Given { cipher, ..GIVEN }.spec();
        let hello = Hello::given(&spec, Role::Connecting, 2, [0xaa; 16]);
        let (connecting, said) = Connecting::with(&spec, hello);
        let hello = Hello::decode(&said).unwrap();
        let own = Hello::given(&spec, Role::Accepting, 2, [0xbb; 16]);
        let (accepting, answer) = Accepting::with(&spec, hello, own);
        let (proving, proof) = connecting.answered(&answer).unwrap();
        let (accepting, first) = accepting.proven(&proof).unwrap().take().unwrap();
        let connecting = proving.accepted(first).unwrap();

        let (mut to_accepting, mut to_connecting) = (connecting.sealer, accepting.sealer);
        let bytes = frame(&mut to_accepting, Kind::BYTES, b"pages of a guest");
        let other = frame(&mut to_accepting, Kind::new(7), b"");
        let message = frame(&mut to_connecting, Kind::new(3), b"{}");
        let there = [&bytes[..], &other, &to_accepting.end().unwrap()].concat();
        let back = [&message[..], &to_connecting.end().unwrap()].concat();
        let all = [&said[..], &proof, &there, &answer, &first, &back].concat();
        assert!(all == expected, "{cipher:?}");

        let (contents, end) = opened(&mut { accepting.opener }, &there);
        assert_eq!(contents, [(0, b"pages of a guest".to_vec()), (7, vec![])]);
        assert_eq!(end, Ok(()));
        let (contents, end) = opened(&mut { connecting.opener }, &back);
        assert_eq!((contents, end), (vec![(3, b"{}".to_vec())], Ok(())));
    }
}

#[test]
fn an_end_without_the_spec_is_refused_by_either_side() {
    let spec = GIVEN.spec();
    let (id, cipher) = (Uuid::from_bytes([0x12; 16]), Cipher::None);
    for other in [Given { key: 1, ..GIVEN }, Given { nonce: 1, ..GIVEN }] {
        let other = other.spec();
        let (connecting, hello) = Connecting::new(&spec, 0).unwrap();
        let hello = Hello::decode(&hello).unwrap();
        let (accepting, answer) = Accepting::new(&other, hello).unwrap();
        assert!(matches!(connecting.answered(&answer), Err(HelloError::WrongProof)));
        // Somebody who goes on nevertheless.
        let own = Accepting::new(&spec, hello).unwrap().1;
        let (forger, _) = Connecting::with(&spec, hello);
        let (_, proof) = forger.answered(&own).unwrap();
        assert!(matches!(accepting.proven(&proof), Err(HelloError::WrongProof)));
    }
    let refused = |other: Given| {
        let other = other.spec();
        let (connecting, hello) = Connecting::new(&other, 0).unwrap();
        let hello = Hello::decode(&hello).unwrap();
        let there = Accepting::new(&spec, hello).err().unwrap();
        // The accepting end's own hello, to an end with the other spec.
        let own = Hello::given(&spec, Role::Accepting, 0, [1; 16]);
        let (_, answer) = Accepting::with(&spec, hello, own);
        let here = connecting.answered(&answer).err().unwrap();
        (there, here)
    };
    assert!(matches!(
        refused(Given { migration: id, ..GIVEN }),
        (HelloError::OtherMigration(other), HelloError::OtherMigration(MIGRATION)) if other == id
    ));
    assert!(matches!(
        refused(Given { streams: 4, ..GIVEN }),
        (
            HelloError::OtherCount { expected: 3, found: 4 },
            HelloError::OtherCount { expected: 4, found: 3 }
        )
    ));
    assert!(matches!(
        refused(Given { cipher, ..GIVEN }),
        (
            HelloError::OtherCipher { expected: Cipher::Aes256Gcm, found: Cipher::None },
            HelloError::OtherCipher { expected: Cipher::None, found: Cipher::Aes256Gcm }
        )
    ));
}

#[test]
fn an_answer_for_another_stream_or_sent_back_is_refused() {
    let spec = GIVEN.spec();
    let (connecting, hello) = Connecting::new(&spec, 1).unwrap();
    let hello = Hello::decode(&hello).unwrap();
    let own = Hello::given(&spec, Role::Accepting, 2, [1; 16]);
    let (_, answer) = Accepting::with(&spec, hello, own);
    let refused = connecting.answered(&answer).err().unwrap();
    assert!(matches!(refused, HelloError::OtherStream { expected: 1, found: 2 }));

    let (connecting, hello) = Connecting::new(&spec, 1).unwrap();
    let mut back = [0; ANSWER_LEN];
    back[..HELLO_LEN].copy_from_slice(&hello);
    assert!(matches!(connecting.answered(&back).err().unwrap(), HelloError::SameRole));
    let own = Hello::given(&spec, Role::Accepting, 1, [1; 16]);
    assert!(matches!(Accepting::new(&spec, own).err().unwrap(), HelloError::SameRole));

    let refused = Connecting::new(&spec, STREAMS).err().unwrap();
    assert!(matches!(refused, HelloError::NoSuchStream { stream: STREAMS, streams: STREAMS }));
    let mut beyond = Hello::given(&spec, Role::Connecting, 0, [1; 16]).encode();
    beyond[13] = 3;
    let refused = Accepting::new(&spec, Hello::decode(&beyond).unwrap()).err().unwrap();
    assert!(matches!(refused, HelloError::NoSuchStream { stream: STREAMS, streams: STREAMS }));
}

#[test]
fn what_was_said_in_one_connection_is_of_no_use_in_another() {
    let spec = GIVEN.spec();
    let (connecting, hello) = Connecting::new(&spec, 0).unwrap();
    let hello = Hello::decode(&hello).unwrap();
    let (_, answer) = Accepting::new(&spec, hello).unwrap();
    let (proving, proof) = connecting.answered(&answer).unwrap();
    // The hello again: the accepting end has other random bits now.
    let (again, _) = Accepting::new(&spec, hello).unwrap();
    assert!(matches!(again.proven(&proof), Err(HelloError::WrongProof)));
    // The answer again, to another connection.
    let (second, _) = Connecting::new(&spec, 0).unwrap();
    assert!(matches!(second.answered(&answer), Err(HelloError::WrongProof)));
    // The confirmation of another connection.
    let (other, hello) = Connecting::new(&spec, 0).unwrap();
    let (accepting, answer) = Accepting::new(&spec, Hello::decode(&hello).unwrap()).unwrap();
    let (_, proof) = other.answered(&answer).unwrap();
    let (_, first) = accepting.proven(&proof).unwrap().take().unwrap();
    let refused = proving.accepted(first).err().unwrap();
    assert!(matches!(refused, HelloError::Frame(FrameError::Damaged(0))));
}

#[test]
fn every_changed_bit_of_a_handshake_is_noticed() {
    for cipher in [Cipher::Aes256Gcm, Cipher::None] {
        let spec = Given { cipher, ..GIVEN }.spec();
        let lengths = [HELLO_LEN, ANSWER_LEN, PROOF_LEN];
        for (message, bit) in (0..3).flat_map(|n| (0..lengths[n] * 8).map(move |bit| (n, bit))) {
            let flip = |now: usize, bytes: &mut [u8]| {
                if now == message {
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            };
            let shake = || -> Result<(), HelloError> {
                let (connecting, mut hello) = Connecting::new(&spec, 1)?;
                flip(0, &mut hello);
                let (accepting, mut answer) = Accepting::new(&spec, Hello::decode(&hello)?)?;
                flip(1, &mut answer);
                let (_, mut proof) = connecting.answered(&answer)?;
                flip(2, &mut proof);
                accepting.proven(&proof).map(drop)
            };
            assert!(shake().is_err(), "message {message}, bit {bit}");
        }
    }
    // Confirmed by another frame than the one for it.
    let spec = GIVEN.spec();
    let (connecting, hello) = Connecting::new(&spec, 1).unwrap();
    let (accepting, answer) = Accepting::new(&spec, Hello::decode(&hello).unwrap()).unwrap();
    let (proving, proof) = connecting.answered(&answer).unwrap();
    let mut accepted = accepting.proven(&proof).unwrap();
    let other = accepted.say(Kind::new(9)).unwrap();
    assert!(matches!(proving.accepted(other), Err(HelloError::NotConfirmed)));
}

#[test]
fn a_hello_of_something_else_is_told_apart() {
    let good = Hello::given(&GIVEN.spec(), Role::Connecting, 0, [1; 16]).encode();
    let with = |at: usize, byte: u8| {
        let mut bytes = good;
        bytes[at] = byte;
        Hello::decode(&bytes).err()
    };
    assert!(matches!(with(0, b'X'), Some(HelloError::NotAHello)));
    assert!(matches!(with(9, 2), Some(HelloError::Version(2))));
    for (at, byte) in [(10, 0), (10, 3), (11, 0), (11, 3)] {
        assert!(matches!(with(at, byte), Some(HelloError::Damaged)), "{at}: {byte}");
    }
    let key = || SecretBytes::random(32).unwrap();
    for streams in [0, STREAMS_MAX + 1] {
        let refused = Spec::new(MIGRATION, key(), 1, streams, Cipher::Aes256Gcm);
        assert!(matches!(refused, Err(HelloError::StreamCount(count)) if count == streams));
    }
    let short = SecretBytes::random(16).unwrap();
    let refused = Spec::new(MIGRATION, short, 1, 1, Cipher::Aes256Gcm);
    assert!(matches!(refused, Err(HelloError::Spec(DeriveError::MigrationKeyLength(16)))));
}

#[test]
fn a_spec_does_not_show_its_key() {
    let shown = format!("{:?}", GIVEN.spec());
    assert!(shown.contains("SecretBytes(32 bytes)"), "{shown}");
    assert!(!shown.contains("1, 2, 3"), "{shown}");
}

/// The frames of one direction of one stream of one migration.
struct Direction {
    frames: Vec<Vec<u8>>,
}

/// Where the frames come from that an attacker has at hand: the one that is received, the same one in a second connection, the other
/// direction, another stream, another migration.
const DIRECTIONS: usize = 5;

fn directions(contents: &[Part]) -> (Vec<Direction>, Opener) {
    let spec = GIVEN.spec();
    let other = Given { migration: Uuid::from_bytes([0x12; 16]), ..GIVEN }.spec();
    let (one, accepting) = connected(&spec, 1);
    let mut sealers = vec![one.sealer, connected(&spec, 1).0.sealer, accepting.sealer];
    sealers.extend([connected(&spec, 2).0.sealer, connected(&other, 1).0.sealer]);
    let sealed = sealers.into_iter().enumerate().map(|(at, mut sealer)| {
        let mut frames = Vec::new();
        for (kind, content) in contents.iter().skip(usize::from(at == 2)) {
            // The accepting end has sealed its first frame already.
            frames.push(frame(&mut sealer, Kind::new(*kind), content));
        }
        frames.push(sealer.end().unwrap().to_vec());
        Direction { frames }
    });
    (sealed.collect(), accepting.opener)
}

/// What an attacker does with the frames on their way.
#[derive(Clone, Debug)]
enum Change {
    Flip { frame: Index, bit: Index },
    Drop(Index),
    Double { frame: Index, to: Index },
    Swap(Index, Index),
    Splice { from: usize, frame: Index, to: Index },
    Replace { from: usize, frame: Index, at: Index },
    Cut(Index),
}

fn change() -> impl Strategy<Value = Change> {
    let index = any::<Index>;
    prop_oneof![
        (index(), index()).prop_map(|(frame, bit)| Change::Flip { frame, bit }),
        index().prop_map(Change::Drop),
        (index(), index()).prop_map(|(frame, to)| Change::Double { frame, to }),
        (index(), index()).prop_map(|(one, other)| Change::Swap(one, other)),
        (1..DIRECTIONS, index(), index()).prop_map(|(from, frame, to)| Change::Splice {
            from,
            frame,
            to
        }),
        (1..DIRECTIONS, index(), index()).prop_map(|(from, frame, at)| Change::Replace {
            from,
            frame,
            at
        }),
        index().prop_map(Change::Cut),
    ]
}

fn changed(directions: &[Direction], changes: &[Change]) -> Vec<u8> {
    let mut frames = directions[0].frames.clone();
    let mut cut = None;
    for change in changes {
        if frames.is_empty() {
            break;
        }
        match change {
            Change::Flip { frame, bit } => {
                let length = frames.len();
                let frame = &mut frames[frame.index(length)];
                let bit = bit.index(frame.len() * 8);
                frame[bit / 8] ^= 1 << (bit % 8);
            }
            Change::Drop(frame) => drop(frames.remove(frame.index(frames.len()))),
            Change::Double { frame, to } => {
                let copy = frames[frame.index(frames.len())].clone();
                frames.insert(to.index(frames.len() + 1), copy);
            }
            Change::Swap(one, other) => {
                let length = frames.len();
                frames.swap(one.index(length), other.index(length));
            }
            Change::Splice { from, frame, to } => {
                let from = &directions[*from].frames;
                frames.insert(to.index(frames.len() + 1), from[frame.index(from.len())].clone());
            }
            Change::Replace { from, frame, at } => {
                let from = &directions[*from].frames;
                let length = frames.len();
                frames[at.index(length)] = from[frame.index(from.len())].clone();
            }
            Change::Cut(at) => cut = Some(*at),
        }
    }
    let mut bytes = frames.concat();
    if let Some(at) = cut {
        bytes.truncate(at.index(bytes.len() + 1));
    }
    bytes
}

/// What the receiver must say of these bytes, by the written format alone: which of its frames it has, and the error at the first that is
/// not the next one.
fn expected(original: &[Vec<u8>], mut bytes: &[u8]) -> (usize, Result<(), FrameError>) {
    for (counter, frame) in (0u64..).zip(original) {
        if let Some(rest) = bytes.strip_prefix(&frame[..]) {
            bytes = rest;
            continue;
        }
        return (counter as usize, Err(error_of(counter, bytes)));
    }
    let after = !bytes.is_empty();
    (original.len() - 1, if after { Err(FrameError::AfterEnd) } else { Ok(()) })
}

fn error_of(counter: u64, bytes: &[u8]) -> FrameError {
    let Some(head) = bytes.first_chunk::<HEAD_LEN>() else {
        return FrameError::Truncated(counter);
    };
    let length = u32::from_be_bytes(head[..4].try_into().unwrap()) as usize;
    let found = u64::from_be_bytes(head[8..].try_into().unwrap());
    if head[5..8] != [0; 3] || (head[4] == 1 && length > 0) {
        FrameError::Head(counter)
    } else if length > CONTENT_MAX {
        FrameError::TooLong(length)
    } else if found != counter {
        FrameError::OutOfOrder { expected: counter, found }
    } else if bytes.len() < HEAD_LEN + length + TAG_LEN {
        FrameError::Truncated(counter)
    } else {
        FrameError::Damaged(counter)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever is done to the frames on their way, what is accepted is what was sent, from the first frame on without a gap; and where
    /// it is not all, the error is the one that says why.
    #[test]
    fn changed_frames_end_in_the_error_that_names_the_change(
        contents in proptest::collection::vec(
            (prop_oneof![Just(0u8), 2..6u8], proptest::collection::vec(any::<u8>(), 0..40)), 1..6),
        changes in proptest::collection::vec(change(), 0..4),
    ) {
        let (directions, mut opener) = directions(&contents);
        let bytes = changed(&directions, &changes);
        let (accepted, end) = opened(&mut opener, &bytes);
        let (whole, error) = expected(&directions[0].frames, &bytes);
        prop_assert_eq!(&end, &error);
        prop_assert_eq!(&accepted[..], &contents[..whole]);
        prop_assert_eq!(end.is_ok(), bytes == directions[0].frames.concat());
        if !matches!(end, Ok(()) | Err(FrameError::Truncated(_))) {
            // Nothing is accepted after a refused frame, not even the one that was to come.
            let (more, _) = opened(&mut opener, &directions[0].frames[whole]);
            prop_assert_eq!(more, vec![]);
        }
    }

    #[test]
    fn any_hello_is_written_as_it_was_read(mut bytes in any::<[u8; 32]>(), random in any::<[u8; 16]>()) {
        bytes[..10].copy_from_slice(b"VMSEALMG\0\x01");
        let mut hello = [0; HELLO_LEN];
        hello[..32].copy_from_slice(&bytes);
        hello[32..].copy_from_slice(&random);
        for (role, cipher) in [(1, 1), (1, 2), (2, 1), (2, 2), (bytes[10], bytes[11])] {
            (hello[10], hello[11]) = (role, cipher);
            match Hello::decode(&hello) {
                Ok(read) => prop_assert_eq!(read.encode(), hello),
                Err(_) => prop_assert!(!(1..=2).contains(&role) || !(1..=2).contains(&cipher)),
            }
        }
    }
}
