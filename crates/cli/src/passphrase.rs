//! Passphrases: read from a file or asked for, held in locked memory, sealed for the server.

use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::Path;

use anyhow::{Context, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::passphrase::{SealedPassphrase, passphrase_info};
use vmseal_secret::sealed_box;
use vmseal_secret::{SecretBytes, passphrase_rule};
use zeroize::{Zeroize, Zeroizing};

use crate::arguments::Passphrase;
use crate::exit::{Ended, Exit};
use crate::print;

/// The longest passphrase, in bytes; cryptsetup's limit for one that is typed.
const PASSPHRASE_MAX: usize = 512;

/// How often to ask: twice where a typing error would lock the owner out.
pub enum Prompt {
    /// An existing passphrase.
    Once,
    /// A new passphrase.
    Twice,
}

/// The passphrase from the file in the options, or from a prompt that calls it `what`.
pub fn obtain(options: &Passphrase, what: &str, prompt: Prompt) -> anyhow::Result<SecretBytes> {
    match &options.passphrase_file {
        Some(file) => from_file(file),
        None => ask(what, prompt, "--passphrase-file"),
    }
}

/// The passphrase in `file`, without one trailing newline.
pub fn from_file(file: &Path) -> anyhow::Result<SecretBytes> {
    let mut content = Zeroizing::new(Vec::with_capacity(PASSPHRASE_MAX + 2));
    File::open(file)
        .and_then(|open| open.take(PASSPHRASE_MAX as u64 + 2).read_to_end(&mut content))
        .with_context(|| format!("cannot read the passphrase file {}", file.display()))?;
    if content.last() == Some(&b'\n') {
        content.pop();
    }
    checked(&mut content).with_context(|| format!("the passphrase file {}", file.display()))
}

/// The passphrase that is typed at the terminal; `option` names a file in place of that.
pub fn ask(what: &str, prompt: Prompt, option: &str) -> anyhow::Result<SecretBytes> {
    if !std::io::stdin().is_terminal() {
        let message =
            format!("{what} is needed and there is no terminal to ask at: give {option} FILE");
        return Err(Ended::new(Exit::Usage, message).into());
    }
    let mut first = Zeroizing::new(rpassword::prompt_password(format!("{what}: "))?.into_bytes());
    if let Prompt::Twice = prompt {
        let again = Zeroizing::new(rpassword::prompt_password(format!("{what}, again: "))?);
        ensure!(first.as_slice() == again.as_bytes(), "the two differ");
    }
    checked(&mut first)
}

/// A new passphrase, asked for until it is one; none where that is `optional` and nothing is typed.
pub fn ask_new(what: &str, optional: bool) -> anyhow::Result<Option<SecretBytes>> {
    loop {
        let mut first =
            Zeroizing::new(rpassword::prompt_password(format!("{what}: "))?.into_bytes());
        if first.is_empty() && optional {
            return Ok(None);
        }
        let refused = match checked(&mut Zeroizing::new(first.to_vec())) {
            Ok(typed) => passphrase_rule::check_new(&typed).err().map(|why| why.to_string()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = refused {
            print::say(why);
            continue;
        }
        let again = Zeroizing::new(rpassword::prompt_password(format!("{what}, again: "))?);
        if first.as_slice() == again.as_bytes() {
            return checked(&mut first).map(Some);
        }
        print::say("the two passphrases differ");
    }
}

fn checked(content: &mut Zeroizing<Vec<u8>>) -> anyhow::Result<SecretBytes> {
    ensure!(!content.is_empty(), "the passphrase is empty");
    ensure!(content.len() <= PASSPHRASE_MAX, "it is longer than {PASSPHRASE_MAX} bytes");
    let secret = SecretBytes::from_wiped(content)?;
    content.zeroize();
    Ok(secret)
}

/// Seals a passphrase for the server's box, so that no HTTP buffer on the way holds it.
pub fn seal(
    passphrase: &SecretBytes,
    provider: &str,
    passphrase_box: &str,
) -> anyhow::Result<SealedPassphrase> {
    let sealed = seal_to(passphrase, &passphrase_info(provider), passphrase_box)?;
    Ok(SealedPassphrase { passphrase_box: passphrase_box.to_owned(), sealed })
}

/// Seals a passphrase for the holder of the private key of `public` (base64), and for the one use that
/// `info` names.
pub fn seal_to(passphrase: &SecretBytes, info: &[u8], public: &str) -> anyhow::Result<String> {
    let public: [u8; 32] =
        STANDARD.decode(public).ok().and_then(|bytes| bytes.try_into().ok()).context(
            "the server sent no usable public key for passphrases: is it a vmseal server?",
        )?;
    let sealed = sealed_box::seal(&public, info, passphrase)?;
    Ok(STANDARD.encode(sealed.as_bytes()))
}
