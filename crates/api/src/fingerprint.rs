//! SHA-256 fingerprints of certificates, as people copy them: with or without colons and spaces, in either case.

/// What [`check`] accepts, as a regular expression of ECMA 262.
pub const FINGERPRINT_PATTERN: &str = "^[: ]*([0-9A-Fa-f][: ]*){64}$";

/// The hexadecimal digits of a fingerprint: those of 32 bytes.
const DIGITS: usize = 64;

/// A text is no fingerprint.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "is no SHA-256 fingerprint: that has {DIGITS} hexadecimal digits, with or without colons (AB:CD:…)"
)]
pub struct NoFingerprint;

fn digits(text: &str) -> String {
    text.replace([':', ' '], "").to_ascii_uppercase()
}

/// Checks the form of a fingerprint.
///
/// # Errors
/// [`NoFingerprint`].
pub fn check(text: &str) -> Result<(), NoFingerprint> {
    let digits = digits(text);
    match digits.len() == DIGITS && digits.bytes().all(|it| it.is_ascii_hexdigit()) {
        true => Ok(()),
        false => Err(NoFingerprint),
    }
}

/// Whether two texts are the same fingerprint.
#[must_use]
pub fn is_same(one: &str, other: &str) -> bool {
    digits(one) == digits(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_fingerprint_is_written_in_several_ways() {
        let (bare, pairs) = ("ab".repeat(32), ["AB"; 32].join(":"));
        for text in [&bare, &pairs, &format!(" {pairs} ")] {
            assert_eq!(check(text), Ok(()), "{text}");
            assert!(is_same(text, &bare), "{text}");
        }
        for text in ["", "ab:cd", &format!("{bare}a"), &bare.replace('b', "x"), &"ä".repeat(32)] {
            assert_eq!(check(text), Err(NoFingerprint), "{text}");
        }
        assert!(!is_same(&bare, &"ac".repeat(32)));
    }
}
