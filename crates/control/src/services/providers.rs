//! Key providers.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::id::check_name;
use vmseal_api::model::{Page, Provider, ProviderStatus};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{AddProvider, Backup, ChangePassphrase, GivePassphrase, VerifyBackup};

use super::caller::{Caller, Privilege};
use super::passphrases::open_passphrase;
use super::{Outcome, PageRequest, Services, page_of};
use crate::providers::{Providers, Restore};
use crate::store::events::NewEvent;
use crate::store::providers;

pub(super) fn shown(services: &Services, provider: providers::Provider) -> Provider {
    let status = services.providers.status(&provider);
    let kmip = services.providers.kmip_details(&provider);
    Provider {
        id: provider.id,
        name: provider.name,
        kind: provider.kind,
        default: provider.default,
        status,
        kmip,
    }
}

pub(super) async fn find(services: &Services, name: &str) -> Result<providers::Provider, Problem> {
    let found = providers::find(&mut *services.store.read().await?, name).await?;
    found.ok_or_else(|| Problem::not_found("provider", name))
}

fn decode(backup: &str) -> Result<Vec<u8>, Problem> {
    STANDARD.decode(backup).map_err(|_| Problem::invalid("backup", "it is not base64"))
}

/// Lists the key providers.
pub async fn list(
    services: &Services,
    caller: &Caller,
    request: PageRequest,
) -> Result<Page<Provider>, Problem> {
    caller.require(Privilege::Read)?;
    let part = request.part();
    let found = providers::list(&mut *services.store.read().await?, &part).await?;
    let items = found.into_iter().map(|provider| shown(services, provider)).collect();
    Ok(page_of(items, part.limit, |it: &Provider| it.id.to_string()))
}

/// Adds a key provider: a native one, with a new key or from a backup, or one over KMIP.
pub async fn add(
    services: &Services,
    caller: &Caller,
    request: AddProvider,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let name = &request.name;
    check_name(name).map_err(|error| Problem::invalid("name", error.to_string()))?;
    let passphrase = match &request.passphrase {
        Some(sealed) => Some(open_passphrase(services, name, sealed, "passphrase")?),
        None => None,
    };
    if let Some(kmip) = &request.kmip {
        if request.backup.is_some() || request.backup_passphrase.is_some() {
            let detail = "a KMIP provider is not restored from a backup: its KMS keeps the keys";
            return Err(Problem::invalid("backup", detail));
        }
        if dry_run {
            services.providers.check_new_kmip(name, &kmip.servers, passphrase).await?;
            return Ok(Outcome::planned("provider.add", name, "make its client key".to_owned()));
        }
        let provider =
            services.providers.add_kmip(name, &kmip.servers, passphrase, caller.name()).await?;
        return Ok(Outcome::Done(shown(services, provider)));
    }
    let restore = match (&request.backup, &request.backup_passphrase) {
        (Some(backup), Some(sealed)) => Some(Restore {
            backup: decode(backup)?,
            passphrase: open_passphrase(services, name, sealed, "backup_passphrase")?,
        }),
        (None, None) => None,
        (Some(_), None) => {
            let detail = "the backup's passphrase is needed with the backup";
            return Err(Problem::invalid("backup_passphrase", detail));
        }
        (None, Some(_)) => {
            return Err(Problem::invalid("backup", "a passphrase came without a backup"));
        }
    };
    if dry_run {
        let step =
            if restore.is_some() { "restore its key from the backup" } else { "make its key" };
        services.providers.check_new(name, passphrase, restore).await?;
        return Ok(Outcome::planned("provider.add", name, step.to_owned()));
    }
    let provider = services.providers.add(name, passphrase, restore, caller.name()).await?;
    Ok(Outcome::Done(shown(services, provider)))
}

/// Shows a key provider.
pub async fn show(services: &Services, caller: &Caller, name: &str) -> Result<Provider, Problem> {
    caller.require(Privilege::Read)?;
    let provider = find(services, name).await?;
    Ok(shown(services, provider))
}

/// Removes a key provider that is not in use, with its key.
pub async fn remove(
    services: &Services,
    caller: &Caller,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<()>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    if dry_run {
        Providers::check_unused(&mut *services.store.read().await?, &provider).await?;
        let step = "remove it with its key; nothing uses it".to_owned();
        return Ok(Outcome::planned("provider.remove", &provider.name, step));
    }
    services.providers.remove(&provider, caller.name()).await?;
    Ok(Outcome::Done(()))
}

/// Unlocks a provider with its passphrase, after a start of the server.
pub async fn unlock(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: GivePassphrase,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    let passphrase = open_passphrase(services, &provider.name, &request.passphrase, "passphrase")?;
    if dry_run {
        services.providers.check_unlock(&provider, passphrase).await?;
        let step = "unlock it; the passphrase is the right one".to_owned();
        return Ok(Outcome::planned("provider.unlock", &provider.name, step));
    }
    services.providers.unlock(&provider, passphrase, caller.name()).await?;
    Ok(Outcome::Done(shown(services, provider)))
}

/// Changes a provider's passphrase.
pub async fn change_passphrase(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: ChangePassphrase,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    let old = request.old.as_ref();
    let old = old.map(|old| open_passphrase(services, &provider.name, old, "old")).transpose()?;
    let new = open_passphrase(services, &provider.name, &request.new, "new")?;
    if dry_run {
        services.providers.check_change_passphrase(&provider, old, &new).await?;
        let step = "seal its key under the new passphrase; the old one is right".to_owned();
        return Ok(Outcome::planned("provider.passphrase", &provider.name, step));
    }
    services.providers.change_passphrase(&provider, old, new, caller.name()).await?;
    Ok(Outcome::Done(shown(services, provider)))
}

/// Returns a backup of the provider's key, and of the settings of a KMIP provider, sealed under the passphrase of
/// the request.
pub async fn backup(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: GivePassphrase,
    dry_run: bool,
) -> Result<Outcome<Backup>, Problem> {
    caller.require(Privilege::ManageKeys)?;
    let provider = find(services, name).await?;
    let passphrase = open_passphrase(services, &provider.name, &request.passphrase, "passphrase")?;
    if dry_run {
        services.providers.check_backup(&provider, &passphrase)?;
        let step = "seal its key under the passphrase, as a backup".to_owned();
        return Ok(Outcome::planned("provider.backup", &provider.name, step));
    }
    let backup = services.providers.backup(&provider, passphrase, caller.name()).await?;
    Ok(Outcome::Done(Backup { backup: STANDARD.encode(backup) }))
}

/// Verifies a backup; the provider creates keys from the first success on.
pub async fn verify(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: VerifyBackup,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageKeys)?;
    let provider = find(services, name).await?;
    let restore = Restore {
        backup: decode(&request.backup)?,
        passphrase: open_passphrase(services, &provider.name, &request.passphrase, "passphrase")?,
    };
    if dry_run {
        services.providers.check_verify(&provider, restore).await?;
        let step = "have it make keys from now on; the backup opens and holds its key".to_owned();
        return Ok(Outcome::planned("provider.verify", &provider.name, step));
    }
    services.providers.verify(&provider, restore, caller.name()).await?;
    Ok(Outcome::Done(shown(services, find(services, name).await?)))
}

/// Makes a provider the default one.
pub async fn make_default(
    services: &Services,
    caller: &Caller,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    if dry_run {
        let known = providers::default(&mut *services.store.read().await?).await?;
        let step = match known.filter(|known| known.id != provider.id) {
            Some(known) => {
                format!("have policies that name none use it, in place of '{}'", known.name)
            }
            None => "have policies that name none use it".to_owned(),
        };
        return Ok(Outcome::planned("provider.default", &provider.name, step));
    }
    let mut write = services.store.write().await?;
    providers::set_default(&mut write, provider.id).await?;
    let (kind, target) = ("provider.made-default", provider.name.as_str());
    let detail = "policies that name none use it";
    write.event(NewEvent { kind, actor: caller.name(), target, detail }).await?;
    write.commit().await?;
    services.providers.default_changed().await?;
    Ok(Outcome::Done(shown(services, find(services, name).await?)))
}

/// A provider, if it can make keys now.
pub(super) fn usable(
    services: &Services,
    provider: providers::Provider,
) -> Result<providers::Provider, Problem> {
    let wrong = |detail: String| Err(Problem::new(ErrorCode::WrongState, detail));
    let name = &provider.name;
    match services.providers.status(&provider) {
        // A request to it will show.
        ProviderStatus::Normal | ProviderStatus::Degraded | ProviderStatus::Untried => Ok(provider),
        ProviderStatus::Sealed => wrong(format!(
            "key provider '{name}' is sealed: unlock it (vmseal provider unlock {name})"
        )),
        ProviderStatus::NeedsTrust => wrong(format!(
            "nobody has trusted a server of key provider '{name}' yet (vmseal provider trust {name})"
        )),
        ProviderStatus::NeedsCertificate => wrong(format!(
            "key provider '{name}' has no client certificate yet (vmseal provider certificate {name})"
        )),
        ProviderStatus::Failing => {
            let fault = services.providers.get(provider.id)?.known_fault();
            Err(fault.unwrap_or_else(|| {
                let detail = format!("key provider '{name}' is unreachable");
                Problem::new(ErrorCode::Unreachable, detail)
            }))
        }
        ProviderStatus::NeedsBackup => wrong(format!(
            "key provider '{name}' makes no keys before its backup is verified (vmseal provider backup {name}, then verify)"
        )),
    }
}
