//! The rules for a new passphrase. An attacker with a copy of the sealed data can try passphrases without
//! limit: key derivation makes each try cost some tenths of a second of one core, but cannot protect one that
//! is among the first million. Nothing of the passphrase is copied.

use crate::bytes::SecretBytes;

/// The shortest passphrase, in bytes: 12 random letters are some 56 bits.
pub const LENGTH_MIN: usize = 12;

/// The fewest different bytes.
pub const DIFFERENT_MIN: usize = 5;

/// How many bytes must be left without common words.
pub const REST_MIN: usize = 6;

/// Words that are in every list of passwords, and common key sequences.
const COMMON: &[&[u8]] = &[
    b"passphrase",
    b"password",
    b"passwort",
    b"qwertyuiop",
    b"qwerty",
    b"qwertz",
    b"asdfghjkl",
    b"asdfgh",
    b"zxcvbnm",
    b"letmein",
    b"changeme",
    b"welcome",
    b"secret",
    b"administrator",
    b"admin",
    b"root",
    b"vmseal",
];

/// Why a passphrase is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrivialPassphrase {
    /// Too short.
    #[error("the passphrase has {0} bytes: give at least {LENGTH_MIN}")]
    Short(usize),
    /// Too few different characters.
    #[error("the passphrase has {0} different characters: give at least {DIFFERENT_MIN}")]
    FewDifferent(usize),
    /// `abcdefghijkl`, `123456789012`.
    #[error("the passphrase is a sequence of neighbouring characters: give one that is none")]
    Sequence,
    /// `horsehorsehorse`.
    #[error("the passphrase repeats its beginning: give one that does not")]
    Repeated,
    /// `Password1234`.
    #[error("the passphrase is made of words that are tried first: give several words of your own")]
    Common,
}

/// Checks a passphrase that will seal something. Passphrases that open something are not checked.
///
/// # Errors
/// [`TrivialPassphrase`].
pub fn check_new(passphrase: &SecretBytes) -> Result<(), TrivialPassphrase> {
    let bytes = passphrase.expose();
    if bytes.len() < LENGTH_MIN {
        return Err(TrivialPassphrase::Short(bytes.len()));
    }
    let different = (0..=u8::MAX).filter(|byte| bytes.contains(byte)).count();
    if different < DIFFERENT_MIN {
        return Err(TrivialPassphrase::FewDifferent(different));
    }
    // Also with a few breaks: 1234567890123.
    let steps = bytes.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) <= 1).count();
    if steps * 4 >= (bytes.len() - 1) * 3 {
        return Err(TrivialPassphrase::Sequence);
    }
    let repeats = |unit: usize| bytes.iter().skip(unit).zip(bytes).all(|(one, other)| one == other);
    if (1..=bytes.len() / 2).any(repeats) {
        return Err(TrivialPassphrase::Repeated);
    }
    if without_common(bytes) < REST_MIN {
        return Err(TrivialPassphrase::Common);
    }
    Ok(())
}

/// How many bytes are in no common word.
fn without_common(bytes: &[u8]) -> usize {
    let (mut at, mut rest) = (0, 0);
    while at < bytes.len() {
        let begins = |word: &&&[u8]| {
            bytes.get(at..at + word.len()).is_some_and(|here| here.eq_ignore_ascii_case(word))
        };
        match COMMON.iter().find(begins) {
            Some(word) => at += word.len(),
            None => {
                at += 1;
                rest += 1;
            }
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<(), TrivialPassphrase> {
        check_new(&SecretBytes::from_wiped(&mut text.as_bytes().to_vec()).unwrap())
    }

    #[test]
    fn common_passphrases_are_refused() {
        use TrivialPassphrase as Trivial;
        for (text, why) in [
            ("hunter2", Trivial::Short(7)),
            ("eleven byte", Trivial::Short(11)),
            ("aaaaaaaaaaaaaaaa", Trivial::FewDifferent(1)),
            ("abcabcaabbcaabbcc", Trivial::FewDifferent(3)),
            ("abcdefghijkl", Trivial::Sequence),
            ("1234567890123", Trivial::Sequence),
            ("9876543210987", Trivial::Sequence),
            ("horsehorsehorse", Trivial::Repeated),
            ("horse7horse7h", Trivial::Repeated),
            ("Password1234", Trivial::Common),
            ("vmsealPassphrase", Trivial::Common),
            ("qwertyuiop!12", Trivial::Common),
        ] {
            assert_eq!(check(text), Err(why), "{text}");
        }
    }

    #[test]
    fn strong_passphrases_are_accepted() {
        for text in [
            "correct horse battery",
            "k3J-x9Qz_pLw",
            "my password is long",
            "8f14e45fceea167a5a36dedd4bea2543",
            "Zürich im Nebel",
        ] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
    }
}
