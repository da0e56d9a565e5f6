//! Key providers.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nix::unistd::{AccessFlags, access};
use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::model::Provider;
use vmseal_api::provider_backup::{SEALED_MAX, SETTINGS_MAX};
use vmseal_api::request::{AddProvider, Backup, ChangePassphrase, GivePassphrase, VerifyBackup};

use super::provider_secret::sealed;
use super::{kmip, list};
use crate::arguments::{self, Output, Passphrase};
use crate::exit::{Ended, Exit};
use crate::passphrase::{self, Prompt};
use crate::print::{self, plan};

/// The longest backup file that is read, in bytes. A native provider's has a few hundred; a KMIP provider's has its
/// certificates too.
const BACKUP_MAX: u64 = (SETTINGS_MAX + SEALED_MAX + 1024) as u64;

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Provider,
) -> anyhow::Result<()> {
    match verb {
        arguments::Provider::List(how) => list::run(server, output, &how, "providers").await,
        arguments::Provider::Show(of) => {
            list::one(server, output, &of, "providers", kmip::details).await
        }
        arguments::Provider::Add {
            name,
            passphrase,
            restore,
            backup_passphrase_file,
            kmip: servers,
            dry_run,
        } => {
            let backup = restore.map(|file| (file, backup_passphrase_file));
            let mut request = new_provider(server, name, &passphrase, backup).await?;
            request.kmip = kmip::servers(&servers.servers)?;
            if dry_run.dry_run {
                return plan::show(output, &server.try_post("providers", &request).await?);
            }
            let provider: Provider = server.post("providers", &request).await?;
            if provider.kmip.as_ref().is_some_and(|kmip| kmip.client.is_none()) {
                let name = &provider.name;
                print::say(format_args!(
                    "next: vmseal provider trust {name}, then vmseal provider certificate {name}"
                ));
            }
            print::one(output, &provider, &kmip::details(&provider))
        }
        arguments::Provider::Kmip(verb) => kmip::run(server, output, verb).await,
        arguments::Provider::Unlock { name, passphrase, dry_run } => {
            let given = passphrase::obtain(&passphrase, "Passphrase", Prompt::Once)?;
            let request = GivePassphrase { passphrase: sealed(server, &name, &given).await? };
            let path = format!("providers/{name}/unlock");
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &request).await?);
            }
            let provider: Provider = server.post(&path, &request).await?;
            print::one(output, &provider, &[])
        }
        arguments::Provider::Passphrase { name, old_passphrase_file, passphrase, dry_run } => {
            let old = Passphrase { passphrase_file: old_passphrase_file };
            let old = passphrase::obtain(&old, "Passphrase of the provider", Prompt::Once)?;
            let new = "New passphrase of the provider";
            let new = passphrase::obtain(&passphrase, new, Prompt::Twice)?;
            let old = Some(sealed(server, &name, &old).await?);
            let request = ChangePassphrase { old, new: sealed(server, &name, &new).await? };
            let path = format!("providers/{name}/passphrase");
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &request).await?);
            }
            let provider: Provider = server.post(&path, &request).await?;
            print::say(format_args!(
                "if the server has the credential vmseal-provider-{}, give it the new passphrase",
                provider.name
            ));
            print::one(output, &provider, &[])
        }
        arguments::Provider::Backup { name, to, passphrase, dry_run } if dry_run.dry_run => {
            try_backup(server, output, &name, &to, &passphrase).await
        }
        arguments::Provider::Backup { name, to, passphrase, .. } => {
            backup(server, &name, &to, &passphrase).await
        }
        arguments::Provider::Verify { name, from, passphrase, dry_run } => {
            let given = passphrase::obtain(&passphrase, "Passphrase of the backup", Prompt::Once)?;
            let request = VerifyBackup {
                backup: read_backup(&from)?,
                passphrase: sealed(server, &name, &given).await?,
            };
            let path = format!("providers/{name}/verify");
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &request).await?);
            }
            let provider: Provider = server.post(&path, &request).await?;
            print::one(output, &provider, &[])
        }
        arguments::Provider::Default { name, dry_run } => {
            let path = format!("providers/{name}/default");
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &Value::Null).await?);
            }
            let provider: Provider = server.post(&path, &Value::Null).await?;
            print::one(output, &provider, &[])
        }
        arguments::Provider::Remove { name, dry_run } => {
            let path = format!("providers/{name}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            Ok(server.delete(&path).await?)
        }
    }
}

async fn new_provider(
    server: &ServerClient,
    name: String,
    passphrase: &Passphrase,
    backup: Option<(PathBuf, Option<PathBuf>)>,
) -> anyhow::Result<AddProvider> {
    let mut request = AddProvider {
        name: name.clone(),
        passphrase: None,
        backup: None,
        backup_passphrase: None,
        kmip: None,
    };
    if let Some((file, passphrase_file)) = backup {
        request.backup = Some(read_backup(&file)?);
        let options = Passphrase { passphrase_file };
        let given = passphrase::obtain(&options, "Passphrase of the backup", Prompt::Once)?;
        request.backup_passphrase = Some(sealed(server, &name, &given).await?);
    }
    let given = passphrase::obtain(passphrase, "New passphrase of the provider", Prompt::Twice)?;
    request.passphrase = Some(sealed(server, &name, &given).await?);
    Ok(request)
}

/// Checks whether a backup could be made and written.
async fn try_backup(
    server: &ServerClient,
    output: Output,
    name: &str,
    to: &Path,
    passphrase: &Passphrase,
) -> anyhow::Result<()> {
    let given = passphrase::obtain(passphrase, "New passphrase of the backup", Prompt::Twice)?;
    let directory = match to.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if to.symlink_metadata().is_ok() {
        return Err(taken(to).into());
    }
    access(directory, AccessFlags::W_OK | AccessFlags::X_OK)
        .with_context(|| format!("cannot create the backup file {}", to.display()))?;
    let request = GivePassphrase { passphrase: sealed(server, name, &given).await? };
    let mut plan = server.try_post(&format!("providers/{name}/backup"), &request).await?;
    plan.steps.push(format!("write it to {}", to.display()));
    plan::show(output, &plan)
}

async fn backup(
    server: &ServerClient,
    name: &str,
    to: &Path,
    passphrase: &Passphrase,
) -> anyhow::Result<()> {
    let given = passphrase::obtain(passphrase, "New passphrase of the backup", Prompt::Twice)?;
    // Created before the request: the server makes no backup that could not be written.
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(|error| {
            match error.kind() {
                ErrorKind::AlreadyExists => taken(to).into(),
                _ => anyhow::Error::from(error)
                    .context(format!("cannot create the backup file {}", to.display())),
            }
        })?;
    let written = async {
        let request = GivePassphrase { passphrase: sealed(server, name, &given).await? };
        let backup: Backup = server.post(&format!("providers/{name}/backup"), &request).await?;
        let bytes = STANDARD.decode(&backup.backup).context("the server's answer is not base64")?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        anyhow::Ok(())
    }
    .await;
    if written.is_err() {
        // An empty file could be mistaken for a backup.
        let _ = std::fs::remove_file(to);
    }
    written.with_context(|| format!("no backup of provider '{name}' was written"))?;
    print::say(format_args!("wrote {}", to.display()));
    print::say(format_args!(
        "now verify it: vmseal provider verify {name} --from {}",
        to.display()
    ));
    Ok(())
}

fn taken(file: &Path) -> Ended {
    Ended::new(Exit::Conflict, format!("the backup file {} exists already", file.display()))
}

pub(super) fn read_backup(file: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(file)
        .and_then(|open| open.take(BACKUP_MAX + 1).read_to_end(&mut bytes))
        .with_context(|| format!("cannot read the backup {}", file.display()))?;
    ensure!(
        bytes.len() as u64 <= BACKUP_MAX,
        "{} is larger than {BACKUP_MAX} bytes: it is not a provider's backup",
        file.display()
    );
    Ok(STANDARD.encode(&bytes))
}
