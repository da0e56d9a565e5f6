//! `vmseal vm console`.

use std::fmt;
use std::str::FromStr;

use clap::Args;

/// Ctrl-], the escape of telnet and virsh.
const DEFAULT: u8 = 0x1d;

/// The bits of a letter that Ctrl keeps.
const CONTROL: u8 = 0x1f;

/// The bit of a letter that Ctrl clears.
const LETTER: u8 = 0x40;

#[derive(Args)]
pub struct Console {
    /// The VM's name or id
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The key that closes the console: `^A` to `^_` (Ctrl with that key), or `none`
    #[arg(long, value_name = "KEY", default_value_t)]
    pub escape: Escape,
    /// Take over the console from another user, who is told
    #[arg(long)]
    pub force: bool,
}

/// The character that closes a console, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Escape(pub Option<u8>);

impl Default for Escape {
    fn default() -> Self {
        Self(Some(DEFAULT))
    }
}

impl FromStr for Escape {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.as_bytes() {
            b"none" => Ok(Self(None)),
            [b'^', key] if (b'A'..=b'_').contains(&key.to_ascii_uppercase()) => {
                Ok(Self(Some(key.to_ascii_uppercase() & CONTROL)))
            }
            _ => Err("give it as ^A to ^_, or none".to_owned()),
        }
    }
}

impl fmt::Display for Escape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("none"),
            Some(byte) => write!(f, "^{}", char::from(byte | LETTER)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_parsed_and_printed() {
        for (text, byte) in
            [("^]", Some(0x1d)), ("^a", Some(1)), ("^_", Some(0x1f)), ("none", None)]
        {
            let escape: Escape = text.parse().unwrap();
            assert_eq!(escape, Escape(byte));
            assert_eq!(escape.to_string(), text.to_uppercase().replace("NONE", "none"));
        }
        for bad in ["", "a", "^", "^^^", "^1", "ctrl-a"] {
            assert!(bad.parse::<Escape>().is_err(), "{bad}");
        }
    }
}
