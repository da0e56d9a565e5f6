//! Words of the commands that people are told to type.

use std::borrow::Cow;

/// A text as one word for a shell: names in a domain are not the user's own.
pub fn word(text: &str) -> String {
    // Only a NUL cannot be quoted, and neither XML nor a path has one.
    shlex::try_quote(text).map_or_else(|_| "''".to_owned(), Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_every_text_as_one_word() {
        for text in ["", "a b", "$(reboot)", "it's", "`id`", "-x;y", "\u{e9}\"\n"] {
            assert_eq!(shlex::split(&word(text)).unwrap(), [text], "{}", word(text));
        }
        assert_eq!(word("/srv/out/web1-disk0.qcow2"), "/srv/out/web1-disk0.qcow2");
    }
}
