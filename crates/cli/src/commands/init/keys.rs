//! The passphrase, the key provider, and its backup.
//!
//! One passphrase seals both the provider's key on the server and the backup. It is kept in a file of its own that
//! the server is given as a credential, so that a reboot needs nobody; never in the server's data directory or a
//! datastore, whose copies must not open by themselves.

use std::fs::DirBuilder;
use std::io::IsTerminal;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use vmseal_api::atomic_file::{self, PRIVATE};
use vmseal_api::model::{Provider, ProviderKind, ProviderStatus};
use vmseal_api::request::{AddProvider, Backup, GivePassphrase, VerifyBackup};
use vmseal_secret::{SecretBytes, passphrase_rule};
use zeroize::Zeroizing;

use super::super::provider::read_backup;
use super::super::provider_secret::sealed;
use super::{Init, PROVIDER, Standing};
use crate::exit::{Ended, Exit};
use crate::passphrase::{self, Prompt};

/// What a generated passphrase is made of: 32 characters that nobody mistakes for each other.
const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

/// How a generated passphrase is written: groups of characters, of 5 bits each; 125 bits.
const GROUPS: usize = 5;
const GROUP_LEN: usize = 5;

/// The directory of credentials, as systemd would give it to the server.
pub(super) fn credentials_in(config_dir: &Path) -> PathBuf {
    config_dir.join("credentials")
}

/// Where the passphrase is kept; the server knows the credential by this name.
pub(super) fn kept_in(config_dir: &Path) -> PathBuf {
    credentials_in(config_dir).join(format!("vmseal-provider-{PROVIDER}"))
}

/// Whose keys the policy uses.
enum Found {
    /// There is no provider that could be used.
    None,
    /// The one that init makes.
    Ours(Provider),
    /// Another one is the default: the operator has chosen.
    Other(Provider),
}

impl Init {
    async fn provider(&self) -> anyhow::Result<Found> {
        let Some(server) = &self.server else { return Ok(Found::None) };
        let mut known: Vec<Provider> = server.all("providers").await?;
        if let Some(ours) = known.iter().position(|it| it.name == PROVIDER) {
            return Ok(Found::Ours(known.swap_remove(ours)));
        }
        Ok(known.into_iter().find(|it| it.default).map_or(Found::None, Found::Other))
    }

    fn kept(&self) -> PathBuf {
        kept_in(&self.options.places.config_dir)
    }

    pub(super) async fn look_at_passphrase(&self) -> anyhow::Result<Standing> {
        let (kept, given) = (self.kept(), &self.options.passphrase_file);
        if kept.exists() {
            if let Some(given) = given
                && passphrase::from_file(given)?.expose() != passphrase::from_file(&kept)?.expose()
            {
                let message = format!(
                    "{} holds another passphrase than {}: leave --passphrase-file out, or see vmseal provider passphrase --help",
                    kept.display(),
                    given.display()
                );
                return Err(Ended::new(Exit::Conflict, message).into());
            }
            return Ok(Standing::There(format!("kept in {}", kept.display())));
        }
        let keep = || format!("keep it in {}, for the server's starts", kept.display());
        match self.provider().await? {
            Found::Other(other) => Ok(Standing::There(format!("of provider '{}'", other.name))),
            // Whoever has taken it away, or gives it to the server in another way, is not asked for it.
            Found::Ours(_) if given.is_none() || self.options.no_keep_passphrase => {
                Ok(Standing::There("not kept on this machine".to_owned()))
            }
            Found::None if self.options.no_keep_passphrase => {
                Ok(Standing::There("not to be kept on this machine".to_owned()))
            }
            Found::Ours(_) => Ok(Standing::ToDo(keep())),
            Found::None => Ok(Standing::ToDo(match given {
                Some(file) => format!("take it from {}, and {}", file.display(), keep()),
                None if self.options.yes => format!("generate one, and {}", keep()),
                None => format!("ask for one or generate it, and {}", keep()),
            })),
        }
    }

    pub(super) async fn settle_passphrase(&mut self) -> anyhow::Result<String> {
        let (passphrase, how) = match self.provider().await? {
            Found::Ours(_) => {
                let known = self.known_passphrase()?;
                // Tried before it is kept: nothing is unlocked by trying.
                let server = self.server()?;
                let request =
                    GivePassphrase { passphrase: sealed(server, PROVIDER, &known).await? };
                server.try_post(&format!("providers/{PROVIDER}/unlock"), &request).await?;
                (known, "")
            }
            Found::None | Found::Other(_) => self.new_passphrase()?,
        };
        let kept = self.kept();
        keep(&kept, &passphrase)
            .with_context(|| format!("cannot keep it in {}", kept.display()))?;
        self.processes.settle()?;
        self.passphrase = Some(passphrase);
        Ok(format!("{how}kept in {} (0600), for the server's starts", kept.display()))
    }

    /// The passphrase of a provider that is to be made, and how it was come by.
    fn new_passphrase(&self) -> anyhow::Result<(SecretBytes, &'static str)> {
        if let Some(file) = &self.options.passphrase_file {
            let given = passphrase::from_file(file)?;
            passphrase_rule::check_new(&given)?;
            return Ok((given, "taken over, "));
        }
        if !self.options.yes {
            let optional = !self.options.no_keep_passphrase;
            let empty = if optional { " (empty: generate one)" } else { "" };
            let what = format!("New passphrase of the keys and their backup{empty}");
            if let Some(asked) = passphrase::ask_new(&what, optional)? {
                return Ok((asked, ""));
            }
        }
        Ok((generate()?, "generated, "))
    }

    /// The passphrase of a provider that exists: a wrong one is refused by the server.
    fn known_passphrase(&mut self) -> anyhow::Result<SecretBytes> {
        if let Some(known) = &self.passphrase {
            return Ok(known.try_clone()?);
        }
        let kept = self.kept();
        if kept.exists() {
            return passphrase::from_file(&kept);
        }
        match &self.options.passphrase_file {
            Some(file) => passphrase::from_file(file),
            None => {
                let what = format!("Passphrase of provider '{PROVIDER}'");
                passphrase::ask(&what, Prompt::Once, "--passphrase-file")
            }
        }
    }

    pub(super) async fn look_at_provider(&self) -> anyhow::Result<Standing> {
        Ok(match self.provider().await? {
            Found::None => {
                Standing::ToDo(format!("add '{PROVIDER}', built into the server, with a new key"))
            }
            Found::Other(other) => Standing::There(format!("'{}' is the default", other.name)),
            Found::Ours(ours) if ours.status == ProviderStatus::Sealed => {
                Standing::ToDo(format!("unlock '{PROVIDER}'"))
            }
            Found::Ours(_) => Standing::There(format!("'{PROVIDER}'")),
        })
    }

    pub(super) async fn make_provider_usable(&mut self) -> anyhow::Result<String> {
        if let Found::Ours(_) = self.provider().await? {
            let passphrase = self.known_passphrase()?;
            let server = self.server()?;
            let request =
                GivePassphrase { passphrase: sealed(server, PROVIDER, &passphrase).await? };
            let path = format!("providers/{PROVIDER}/unlock");
            let _: Provider = server.post(&path, &request).await?;
            return Ok(format!("'{PROVIDER}' is unlocked"));
        }
        let passphrase = match self.passphrase.take() {
            Some(known) => known,
            None if self.kept().exists() => passphrase::from_file(&self.kept())?,
            None => self.new_passphrase()?.0,
        };
        let server = self.server()?;
        let request = AddProvider {
            name: PROVIDER.to_owned(),
            passphrase: Some(sealed(server, PROVIDER, &passphrase).await?),
            backup: None,
            backup_passphrase: None,
            kmip: None,
        };
        let _: Provider = server.post("providers", &request).await?;
        self.passphrase = Some(passphrase);
        Ok(format!("'{PROVIDER}', built into the server, with a new key"))
    }

    pub(super) async fn look_at_backup(&self) -> anyhow::Result<Standing> {
        let write =
            || Standing::ToDo(format!("write it to {}, and verify it", self.backup.display()));
        Ok(match self.provider().await? {
            Found::None => write(),
            Found::Other(_) => Standing::There("it is that provider's own matter".to_owned()),
            Found::Ours(ours) => match (ours.kind, ours.status) {
                (ProviderKind::Kmip, _) => Standing::There("its keys are kept by a KMS".to_owned()),
                (_, ProviderStatus::NeedsBackup) => write(),
                (_, ProviderStatus::Sealed) => Standing::ToDo(
                    "write and verify it, unless that was done (which is seen once it is unlocked)"
                        .to_owned(),
                ),
                _ => Standing::There("written and verified".to_owned()),
            },
        })
    }

    pub(super) async fn back_up(&mut self) -> anyhow::Result<String> {
        let passphrase = self.known_passphrase()?;
        let file = self.backup.clone();
        let server = self.server()?;
        let there = file.symlink_metadata().is_ok();
        if !there {
            let request =
                GivePassphrase { passphrase: sealed(server, PROVIDER, &passphrase).await? };
            let path = format!("providers/{PROVIDER}/backup");
            let backup: Backup = server.post(&path, &request).await?;
            let bytes =
                STANDARD.decode(&backup.backup).context("the server's answer is not base64")?;
            atomic_file::write(&file, &bytes, PRIVATE)
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        let request = VerifyBackup {
            backup: read_backup(&file)?,
            passphrase: sealed(server, PROVIDER, &passphrase).await?,
        };
        let path = format!("providers/{PROVIDER}/verify");
        let verified = server.post::<Provider>(&path, &request).await;
        if there {
            // Of a run that was cut short, or somebody's.
            verified.with_context(|| taken(&file))?;
        } else {
            verified?;
        }
        Ok(format!("written to {} and verified", file.display()))
    }

    pub(super) async fn look_at_default(&self) -> anyhow::Result<Standing> {
        Ok(match self.provider().await? {
            Found::Other(other) => Standing::There(format!("'{}'", other.name)),
            Found::Ours(ours) if ours.default => Standing::There(format!("'{PROVIDER}'")),
            _ => Standing::ToDo(format!("make it '{PROVIDER}'")),
        })
    }

    pub(super) async fn make_default(&self) -> anyhow::Result<String> {
        let path = format!("providers/{PROVIDER}/default");
        let provider: Provider = self.server()?.post(&path, &Value::Null).await?;
        Ok(format!("'{}'", provider.name))
    }
}

/// What is said of a file that is where the backup is to be and is not it.
pub(super) fn taken(file: &Path) -> String {
    format!(
        "{} is there, and is no backup of this provider that the passphrase opens: move it away, or give --backup",
        file.display()
    )
}

/// Refuses what would have to be asked where nobody can answer.
pub(super) fn check_can_be_had(options: &crate::arguments::Init) -> anyhow::Result<()> {
    let usage = |message: &str| Err(Ended::new(Exit::Usage, message).into());
    if let Some(file) = &options.passphrase_file {
        return Ok(passphrase_rule::check_new(&passphrase::from_file(file)?)?);
    }
    if options.yes && options.no_keep_passphrase {
        return usage(
            "a generated passphrase that is not kept would be lost: give --passphrase-file FILE",
        );
    }
    if !options.yes && !std::io::stdin().is_terminal() {
        return usage(
            "a passphrase is needed and there is no terminal to ask at: give --passphrase-file FILE, or --yes to have one generated",
        );
    }
    Ok(())
}

/// A passphrase that can be written down and typed.
fn generate() -> anyhow::Result<SecretBytes> {
    loop {
        let random = SecretBytes::random(GROUPS * GROUP_LEN)?;
        let mut text = Zeroizing::new(Vec::with_capacity(GROUPS * (GROUP_LEN + 1)));
        for (index, byte) in random.expose().iter().enumerate() {
            if index > 0 && index % GROUP_LEN == 0 {
                text.push(b'-');
            }
            text.push(ALPHABET[usize::from(byte % 32)]);
        }
        let passphrase = SecretBytes::from_wiped(&mut text)?;
        // One in many millions is a sequence of neighbours.
        if passphrase_rule::check_new(&passphrase).is_ok() {
            return Ok(passphrase);
        }
    }
}

/// Keeps a passphrase where root alone reads it.
fn keep(file: &Path, passphrase: &SecretBytes) -> std::io::Result<()> {
    if let Some(directory) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    let mut text = Zeroizing::new(Vec::with_capacity(passphrase.len() + 1));
    text.extend_from_slice(passphrase.expose());
    text.push(b'\n');
    atomic_file::write(file, &text, PRIVATE)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_generated_passphrase_can_be_typed_and_is_another_each_time() {
        let (one, other) = (generate().unwrap(), generate().unwrap());
        assert_ne!(one.expose(), other.expose());
        let text = std::str::from_utf8(one.expose()).unwrap();
        assert_eq!(text.split('-').map(str::len).collect::<Vec<_>>(), [GROUP_LEN; GROUPS]);
        assert!(text.bytes().all(|byte| byte == b'-' || ALPHABET.contains(&byte)));
    }

    #[test]
    fn it_is_kept_where_root_alone_reads_it_also_over_what_a_crash_left() {
        let directory = tempfile::tempdir().unwrap();
        let file = kept_in(directory.path());
        std::fs::create_dir(file.parent().unwrap()).unwrap();
        std::fs::write(file.with_file_name("vmseal-provider-keys.new"), "half").unwrap();
        let passphrase = generate().unwrap();
        keep(&file, &passphrase).unwrap();
        assert_eq!(passphrase::from_file(&file).unwrap().expose(), passphrase.expose());
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(file.parent().unwrap().read_dir().unwrap().count(), 1);
    }
}
