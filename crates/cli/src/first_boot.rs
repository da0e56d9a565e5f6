//! What a guest is told at its first boot: files that are read here, and a password that is hashed here.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use sha_crypt::{Algorithm, Params, PasswordHasher, ShaCrypt};
use vmseal_api::client::ServerClient;
use vmseal_api::cloud_init::{CLOUD_INIT_MAX, CloudInit, SecretText};
use vmseal_api::model::Policy;
use vmseal_secret::SecretBytes;
use zeroize::{Zeroize, Zeroizing};

use crate::arguments::FirstBoot;
use crate::disk_option::parts;
use crate::exit::{Ended, Exit, text};
use crate::passphrase::{self, Prompt};
use crate::print;

/// The length of a password's salt, in bytes: 16 characters, the most that crypt(3) heeds.
const SALT_LEN: usize = 12;

/// How often crypt(3) repeats its hash: about a quarter of a second in 2026. Its own 5000 are of 2007.
const ROUNDS: u32 = 200_000;

/// What the options ask for; none where they ask for nothing.
pub fn asked(options: &FirstBoot) -> anyhow::Result<Option<CloudInit>> {
    let FirstBoot { cloud_init, ssh_keys, password, password_file, user } = options;
    let password = match password_file {
        Some(file) => Some(
            passphrase::from_file(file).map_err(|why| wrong_file("--password-file", file, &why))?,
        ),
        None if *password => Some(passphrase::ask("Password", Prompt::Twice, "--password-file")?),
        None => None,
    };
    if cloud_init.is_none() && ssh_keys.is_empty() && password.is_none() {
        if user.is_some() {
            let message = "--user is who logs in with --ssh-key or --password: give one of them";
            return Err(Ended::new(Exit::Usage, message).into());
        }
        return Ok(None);
    }
    let mut asked = match cloud_init {
        Some(option) => {
            documents(option).map_err(|why| Ended::new(Exit::Usage, format!("{why:#}")))?
        }
        None => CloudInit::default(),
    };
    let logs_in = !ssh_keys.is_empty() || password.is_some() || user.is_some();
    if asked.user_data.is_some() && logs_in {
        let message = "user-data is given: write the user, the SSH keys and the password into it, and leave out --user, --ssh-key and --password";
        return Err(Ended::new(Exit::Usage, message).into());
    }
    asked.user = user.clone();
    for file in ssh_keys {
        asked.ssh_keys.extend(keys_of(file)?);
    }
    asked.password_hash = password.as_ref().map(hash).transpose()?;
    Ok(Some(asked))
}

/// Says so where the policy leaves the documents in the clear.
pub async fn warn_if_plain(server: &ServerClient, policy: &str) {
    // A policy that is not there is refused when the VM is made.
    if let Ok(Policy { encryption: false, name, .. }) =
        server.get(&format!("policies/{policy}")).await
    {
        print::say(format_args!(
            "warning: policy '{name}' does not encrypt: the cloud-init data, with all that is secret in it, is in the clear on the datastore"
        ));
    }
}

/// The files that `--cloud-init` names.
fn documents(option: &str) -> anyhow::Result<CloudInit> {
    let mut documents = CloudInit::default();
    for part in parts(option) {
        let (key, file) = part.split_once('=').with_context(|| {
            format!("--cloud-init {option}: '{part}' is not of the form key=FILE; a comma within a value is doubled (,,)")
        })?;
        let document = match key {
            "user-data" => &mut documents.user_data,
            "meta-data" => &mut documents.meta_data,
            "network-config" => &mut documents.network_config,
            _ => bail!(
                "--cloud-init {option}: there is no '{key}'; known are user-data, meta-data and network-config"
            ),
        };
        ensure!(document.is_none(), "--cloud-init {option}: '{key}' is given twice");
        *document =
            Some(read(Path::new(file)).with_context(|| format!("--cloud-init {key}={file}"))?);
    }
    Ok(documents)
}

fn read(file: &Path) -> anyhow::Result<SecretText> {
    // At once as long as it gets: no copy is left behind by growing.
    let mut content = Vec::with_capacity(CLOUD_INIT_MAX + 1);
    File::open(file)
        .and_then(|open| open.take(CLOUD_INIT_MAX as u64 + 1).read_to_end(&mut content))
        .with_context(|| format!("cannot read {}", file.display()))?;
    if content.len() > CLOUD_INIT_MAX {
        content.zeroize();
        bail!("{} is longer than {CLOUD_INIT_MAX} bytes", file.display());
    }
    let text = String::from_utf8(content).map_err(|error| {
        error.into_bytes().zeroize();
        anyhow::anyhow!("{} is no text (UTF-8)", file.display())
    })?;
    Ok(text.into())
}

/// What is wrong with the file that an option names.
fn wrong_file(option: &str, file: &Path, why: &anyhow::Error) -> Ended {
    Ended::new(Exit::Usage, format!("{option} {}: {}", file.display(), text(why)))
}

/// The public keys in a file: lines, as `authorized_keys` has them.
fn keys_of(file: &Path) -> anyhow::Result<Vec<String>> {
    let usage = |what: &str| wrong_file("--ssh-key", file, &anyhow::anyhow!("{what}"));
    let text = read(file).map_err(|why| wrong_file("--ssh-key", file, &why))?;
    if text.expose().contains("PRIVATE KEY") {
        let public = PathBuf::from(format!("{}.pub", file.display()));
        let what = format!("this is a private key: give the public one ({})", public.display());
        return Err(usage(&what).into());
    }
    let lines = text.expose().lines().map(str::trim);
    let keys: Vec<_> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    if keys.is_empty() {
        return Err(usage("there is no key in it").into());
    }
    Ok(keys)
}

/// A password as crypt(3) has it, SHA-512.
fn hash(password: &SecretBytes) -> anyhow::Result<SecretText> {
    let salt = SecretBytes::random(SALT_LEN)?;
    hash_with(password, salt.expose())
}

fn hash_with(password: &SecretBytes, salt: &[u8]) -> anyhow::Result<SecretText> {
    let failed =
        |error: &dyn std::fmt::Display| anyhow::anyhow!("the password cannot be hashed: {error}");
    let parameters = Params::new(ROUNDS).map_err(|error| failed(&error))?;
    let hasher = ShaCrypt::new(Algorithm::Sha512Crypt, parameters);
    let hash =
        hasher.hash_password_with_salt(password.expose(), salt).map_err(|error| failed(&error))?;
    let hash = Zeroizing::new(hash.to_string());
    Ok(SecretText::from(hash.as_str().to_owned()))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn options() -> FirstBoot {
        FirstBoot::default()
    }

    fn file(content: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        file
    }

    #[test]
    fn files_are_read_and_keys_are_lines() {
        let (user, network) = (file("#cloud-config\n"), file("version: 2\n"));
        let option = format!(
            "user-data={},network-config={}",
            user.path().display(),
            network.path().display()
        );
        let read = asked(&FirstBoot { cloud_init: Some(option), ..options() }).unwrap().unwrap();
        assert_eq!(read.user_data.unwrap().expose(), "#cloud-config\n");
        assert_eq!(read.network_config.unwrap().expose(), "version: 2\n");
        assert!(read.meta_data.is_none());
        let keys = file("# mine\nssh-ed25519 AAAA me\n\nssh-rsa BBBB\n");
        let ssh_keys = vec![keys.path().to_owned()];
        let read = asked(&FirstBoot { ssh_keys, ..options() }).unwrap().unwrap();
        assert_eq!(read.ssh_keys, ["ssh-ed25519 AAAA me", "ssh-rsa BBBB"]);
        assert_eq!(asked(&options()).unwrap(), None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let (data, private, empty) = (file("#!"), file("-- OPENSSH PRIVATE KEY"), file("\n# x\n"));
        let path = |file: &tempfile::NamedTempFile| file.path().to_owned();
        let user_data = format!("user-data={}", data.path().display());
        let with = |option: &str| FirstBoot { cloud_init: Some(option.to_owned()), ..options() };
        let key = |file| FirstBoot { ssh_keys: vec![path(file)], ..options() };
        for (options, named) in [
            (with("user-data"), "key=FILE"),
            (with("vendor-data=x"), "vendor-data"),
            (with("user-data=/does/not/exist"), "/does/not/exist"),
            (with(&format!("{user_data},{user_data}")), "twice"),
            (FirstBoot { ssh_keys: vec![path(&data)], ..with(&user_data) }, "leave out --user"),
            (FirstBoot { user: Some("a".to_owned()), ..options() }, "--ssh-key or --password"),
            (key(&private), "private key"),
            (key(&empty), "no key"),
            (FirstBoot { password: true, ..options() }, "--password-file"),
            (with("user-data=/none"), "--cloud-init user-data=/none: cannot read"),
            (
                FirstBoot { ssh_keys: vec!["/none".into()], ..options() },
                "--ssh-key /none: cannot read",
            ),
            (
                FirstBoot { password_file: Some("/none".into()), ..options() },
                "--password-file /none: cannot read",
            ),
        ] {
            let error = asked(&options).unwrap_err();
            let message = text(&error);
            assert!(message.contains(named), "{message}");
            assert_eq!(Exit::of(&error), Exit::Usage, "{message}");
        }
    }

    #[test]
    fn a_password_is_hashed_as_the_system_does_it() {
        let secret = || SecretBytes::from_wiped(&mut b"correct horse".to_vec()).unwrap();
        let made = hash_with(&secret(), &[7; SALT_LEN]).unwrap();
        let salt = made.expose().split('$').nth(3).unwrap();
        let mut python = Command::new("python3");
        let program = "import crypt,sys; print(crypt.crypt('correct horse', sys.argv[1]), end='')";
        let setting = format!("$6$rounds={ROUNDS}${salt}");
        let system =
            python.args(["-W", "ignore", "-c", program, &setting]).stderr(Stdio::inherit());
        let system = system.output().unwrap().stdout;
        assert_eq!(made.expose(), String::from_utf8_lossy(&system));
        assert_ne!(hash(&secret()).unwrap(), hash(&secret()).unwrap(), "the salt is the same");
    }
}
