//! A secret sealed to a public key, or a wrapped key: the input is what is changed of a good one. It
//! opens unchanged only.

use std::sync::LazyLock;

use vmseal_secret::sealed_box::{Recipient, SealedBox, seal};
use vmseal_secret::wrap::{unwrap, wrap};

use crate::secret;

const INFO: &[u8] = b"vm-7";

struct Good {
    recipient: Recipient,
    sealed: Vec<u8>,
    wrapped: Vec<u8>,
}

static GOOD: LazyLock<Good> = LazyLock::new(|| {
    let recipient = Recipient::generate().unwrap();
    let key = secret((0..64).collect());
    let sealed = seal(&recipient.public_key(), INFO, &key).unwrap().as_bytes().to_vec();
    let wrapped = wrap(&secret(vec![7; 32]), &key).unwrap();
    Good { recipient, sealed, wrapped }
});

/// A good thing made longer or shorter by `length`, with bits flipped where `flips` has them.
fn changed(good: &[u8], length: i8, flips: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    bytes.resize(good.len().saturating_add_signed(isize::from(length)), 0);
    bytes.iter_mut().zip(flips).for_each(|(byte, flip)| *byte ^= flip);
    bytes
}

/// See the module.
pub fn run(data: &[u8]) {
    let Some((&[kind, length], flips)) = data.split_first_chunk() else { return };
    let length = i8::from_ne_bytes([length]);
    let key = || secret((0..64).collect());
    if kind % 2 == 0 {
        let bytes = changed(&GOOD.sealed, length, flips);
        let opened = SealedBox::from_bytes(bytes.clone())
            .ok()
            .and_then(|sealed| GOOD.recipient.open(&sealed, INFO).ok());
        assert_eq!(opened.is_some(), bytes == GOOD.sealed);
        assert!(opened.is_none_or(|opened| opened == key()));
    } else {
        let bytes = changed(&GOOD.wrapped, length, flips);
        let opened = unwrap(&secret(vec![7; 32]), &bytes).ok();
        assert_eq!(opened.is_some(), bytes == GOOD.wrapped);
        assert!(opened.is_none_or(|opened| opened == key()));
    }
}
