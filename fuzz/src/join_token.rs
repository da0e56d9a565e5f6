//! What somebody gives for a join token. What is accepted is written as it was read.

use vmseal_api::join_token::JoinToken;

/// See the module.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(token) = text.parse::<JoinToken>() else { return };
    let written = token.to_string();
    assert_eq!(written[..44], text[..44], "the secret has one spelling");
    assert!(written.eq_ignore_ascii_case(text));
    assert_eq!(written.parse(), Ok(token));
}
