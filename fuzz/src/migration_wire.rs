//! The wire of a migration. The first byte says what the rest is: a hello, which is written as it was read; what somebody without the
//! spec says in a handshake, which gets nobody anywhere; or changes to good frames, of which the unchanged begin opens and no more.

use vmseal_seal::frame::{Content, HEAD_LEN, Kind, TAG_LEN};
use vmseal_seal::wire::{
    ANSWER_LEN, Accepting, Cipher, Connecting, Ends, HELLO_LEN, Hello, PROOF_LEN, Spec,
};

use crate::secret;

const MIGRATION: uuid::Uuid = uuid::Uuid::from_bytes([0x11; 16]);

/// What the good frames hold, by kind.
const CONTENTS: [(u8, &[u8]); 4] = [(0, b"pages of a guest"), (3, b"{}"), (0, b"more"), (7, b"")];

fn spec(cipher: Cipher) -> Spec {
    Spec::new(MIGRATION, secret((0..32).collect()), 7, 3, cipher).unwrap()
}

/// See the module.
pub fn run(data: &[u8]) {
    let Some((what, rest)) = data.split_first() else { return };
    match what % 3 {
        0 => hello(rest),
        1 => stranger(rest),
        _ => frames(rest, if what & 0x80 == 0 { Cipher::Aes256Gcm } else { Cipher::None }),
    }
}

/// The first bytes of the input, zeroes behind them, and the rest of it.
fn take<const N: usize>(data: &[u8]) -> ([u8; N], &[u8]) {
    let mut taken = [0; N];
    let (part, rest) = data.split_at(data.len().min(N));
    taken[..part.len()].copy_from_slice(part);
    (taken, rest)
}

fn hello(data: &[u8]) {
    let bytes: [u8; HELLO_LEN] = take(data).0;
    match Hello::decode(&bytes) {
        Ok(hello) => assert!(hello.encode() == bytes, "a hello is written as it was read"),
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}

fn stranger(data: &[u8]) {
    for cipher in [Cipher::Aes256Gcm, Cipher::None] {
        let spec = spec(cipher);
        let (bytes, rest) = take::<HELLO_LEN>(data);
        if let Ok(hello) = Hello::decode(&bytes)
            && let Ok((accepting, _)) = Accepting::new(&spec, hello)
        {
            let proof: [u8; PROOF_LEN] = take(rest).0;
            assert!(accepting.proven(&proof).is_err(), "a proof without the key");
        }
        let answer: [u8; ANSWER_LEN] = take(data).0;
        let (connecting, _) = Connecting::new(&spec, 1).unwrap();
        assert!(connecting.answered(&answer).is_err(), "an answer without the key");
    }
}

fn connected(spec: &Spec) -> (Ends, Ends) {
    let (connecting, hello) = Connecting::new(spec, 1).unwrap();
    let hello = Hello::decode(&hello).unwrap();
    let (accepting, answer) = Accepting::new(spec, hello).unwrap();
    let (proving, proof) = connecting.answered(&answer).unwrap();
    let (accepting, first) = accepting.proven(&proof).unwrap().take().unwrap();
    (proving.accepted(first).unwrap(), accepting)
}

fn frames(data: &[u8], cipher: Cipher) {
    let (mut from, mut to) = connected(&spec(cipher));
    let mut good = Vec::new();
    for (kind, content) in CONTENTS {
        let mut frame = [&[0; HEAD_LEN], content, &[0; TAG_LEN]].concat();
        from.sealer.seal(Kind::new(kind), &mut frame).unwrap();
        good.extend_from_slice(&frame);
    }
    good.extend_from_slice(&from.sealer.end().unwrap());

    let Some((&length, flips)) = data.split_first() else { return };
    let length = i8::from_ne_bytes([length]);
    let mut bytes = good.clone();
    bytes.resize(good.len().saturating_add_signed(isize::from(length)), 0);
    bytes.iter_mut().zip(flips).for_each(|(byte, flip)| *byte ^= flip);

    let (mut left, mut opened) = (&bytes[..], 0);
    let mut open = || {
        while let Some((head, rest)) = left.split_first_chunk() {
            let head = to.opener.head(*head)?;
            let Some((sealed, rest)) = rest.split_at_checked(head.following()) else { break };
            // What follows the end is for who reads on, and nobody does.
            let mut sealed = sealed.to_vec();
            let Content::Data(kind, content) = to.opener.open(&head, &mut sealed)? else { break };
            let expected = CONTENTS.get(opened) == Some(&(kind.number(), &*content));
            assert!(expected || cipher == Cipher::None, "changed content was accepted");
            opened += 1;
            left = rest;
        }
        to.opener.finish()
    };
    let whole = open().is_ok();
    if cipher == Cipher::Aes256Gcm {
        assert_eq!(whole, bytes.starts_with(&good));
    }
}
