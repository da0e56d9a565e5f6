//! The one-time token by which a machine joins as a host: a secret that authorizes the request, and the
//! fingerprint of the control plane's CA, by which the machine knows that it talks to the right server.
//!
//! Text form: 43 characters of base64url (32 random bytes), a dot, 64 hexadecimal digits (SHA-256 of the CA
//! certificate's DER). The server's TLS chain must contain the CA certificate, because the joining side knows
//! only its fingerprint.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// The length of the secret part, in bytes.
pub const SECRET_LEN: usize = 32;

/// A text that is not a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this is not a join token: one has 43 characters, a dot and 64 hexadecimal digits, as `vmseal host token` prints it"
)]
pub struct NotAToken;

/// The parts of a join token. `Debug` does not show the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// The secret that authorizes joining, once.
    pub secret: [u8; SECRET_LEN],
    /// SHA-256 of the CA certificate's DER.
    pub authority: [u8; 32],
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.", URL_SAFE_NO_PAD.encode(self.secret))?;
        self.authority.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken").finish_non_exhaustive()
    }
}

impl FromStr for JoinToken {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<Self, NotAToken> {
        let (secret, authority) = text.split_once('.').ok_or(NotAToken)?;
        let secret = URL_SAFE_NO_PAD.decode(secret).map_err(|_| NotAToken)?;
        if authority.len() != 64 || !authority.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(NotAToken);
        }
        let mut fingerprint = [0; 32];
        for (byte, at) in fingerprint.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(&authority[at..at + 2], 16).map_err(|_| NotAToken)?;
        }
        Ok(Self { secret: secret.try_into().map_err(|_| NotAToken)?, authority: fingerprint })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_text_and_other_texts_are_refused() {
        let token = JoinToken { secret: [0xfb; SECRET_LEN], authority: [0x0a; 32] };
        let text = token.to_string();
        assert_eq!(text.len(), 43 + 1 + 64);
        assert_eq!(text.parse(), Ok(token.clone()));
        assert!(!format!("{token:?}").contains("251"));
        let long = format!("{text}0");
        let wide = text.replace("0a0a", "0aä");
        for bad in ["", ".", "abc.def", &text[1..], &text[..text.len() - 1], &long, &wide] {
            assert_eq!(bad.parse::<JoinToken>(), Err(NotAToken), "{bad:?}");
        }
    }
}
