//! Questions that are answered with yes or no.

use std::io::{IsTerminal, Write};

use crate::exit::{Ended, Exit};

/// Asks at the terminal; whether the answer is yes.
///
/// # Errors
/// The terminal cannot be written or read.
pub fn says_yes(question: &str) -> anyhow::Result<bool> {
    eprint!("{question} (yes/no): ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(is_yes(&answer))
}

/// Asks whether something may be removed; `lost` says what is lost then.
///
/// # Errors
/// The answer is not yes, or there is no terminal to ask at.
pub fn removal(lost: &str, question: &str) -> anyhow::Result<()> {
    if !std::io::stdin().is_terminal() {
        let message = format!("{lost}. There is no terminal to confirm it: give --yes");
        return Err(Ended::new(Exit::Usage, message).into());
    }
    if says_yes(&format!("{lost}. {question}"))? {
        return Ok(());
    }
    Err(Ended::new(Exit::Failed, "nothing was removed").into())
}

fn is_yes(answer: &str) -> bool {
    matches!(answer.trim(), "y" | "yes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_yes_is_one() {
        assert!(is_yes("yes\n") && is_yes(" y "));
        assert!(["", "\n", "no", "Yes, but", "yess"].into_iter().all(|answer| !is_yes(answer)));
    }
}
