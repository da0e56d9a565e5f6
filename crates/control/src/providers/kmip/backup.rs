//! A backup of a KMIP provider: its settings, and its client key sealed under a passphrase. The keys of VMs
//! are not in it; the KMS has them.

use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use vmseal_api::kmip::AddKmipServer;
use vmseal_api::model::ProviderKind;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::provider_backup::{self as format, BackupError, Parsed, Settings};
use vmseal_secret::SecretBytes;

use super::client_key::ClientKey;
use super::life::check_servers;
use crate::providers::{Providers, Restore, sealed_file};
use crate::store::events::NewEvent;
use crate::store::providers::Provider;
use crate::store::{kmip, providers};

const ASSOCIATED: &[u8] = b"vmseal kmip provider backup v1";

/// Seals a client key together with the digest of the settings that precede it.
fn seal(
    settings: &Settings,
    key: &ClientKey,
    passphrase: &SecretBytes,
) -> Result<Vec<u8>, Problem> {
    let mut backup = format::head(settings).map_err(|error| {
        let detail = format!("provider '{}' cannot be backed up: {error}", settings.name);
        Problem::new(ErrorCode::Unsupported, detail)
    })?;
    let key = key.der();
    let mut content = SecretBytes::zeroed(SHA256_OUTPUT_LEN + key.len())
        .map_err(|error| crate::internal(&error))?;
    let (sum, rest) = content.expose_mut().split_at_mut(SHA256_OUTPUT_LEN);
    sum.copy_from_slice(digest(&SHA256, &backup).as_ref());
    rest.copy_from_slice(key.expose());
    backup.extend(sealed_file::seal(&content, passphrase, ASSOCIATED)?);
    Ok(backup)
}

/// Reads a backup, and opens its sealed part.
fn open(restore: &Restore) -> Result<(Settings, ClientKey), Problem> {
    let Parsed { settings, head, sealed } = format::parse(&restore.backup).map_err(|error| {
        let code = match error {
            BackupError::UnknownVersion(_) => ErrorCode::Unsupported,
            _ => ErrorCode::Damaged,
        };
        Problem::new(code, format!("the backup cannot be read: {error}"))
    })?;
    let content = sealed_file::open(sealed, &restore.passphrase, ASSOCIATED, "the backup")?;
    let damaged = |why: &str| Problem::new(ErrorCode::Damaged, format!("the backup {why}"));
    let Some((sum, key)) = content.expose().split_at_checked(SHA256_OUTPUT_LEN) else {
        return Err(damaged("is too short"));
    };
    if sum != digest(&SHA256, head).as_ref() {
        return Err(damaged(
            "was changed: its settings are not those that were sealed with its key",
        ));
    }
    let mut copy = SecretBytes::zeroed(key.len()).map_err(|error| crate::internal(&error))?;
    copy.expose_mut().copy_from_slice(key);
    let key = ClientKey::given(copy)?;
    if let Some(certificate) = &settings.certificate {
        key.identity(certificate)?;
    }
    Ok((settings, key))
}

fn trust_to_file(trust: kmip::Trust) -> format::Trust {
    match trust {
        kmip::Trust::Pinned { certificate } => format::Trust::Pinned { certificate },
        kmip::Trust::Authorities { certificates } => format::Trust::Authorities { certificates },
    }
}

fn trust_from_file(trust: format::Trust) -> kmip::Trust {
    match trust {
        format::Trust::Pinned { certificate } => kmip::Trust::Pinned { certificate },
        format::Trust::Authorities { certificates } => kmip::Trust::Authorities { certificates },
    }
}

impl Providers {
    /// Whether the client key of a provider is open.
    pub(in crate::providers) fn kmip_is_open(&self, provider: &Provider) -> Result<(), Problem> {
        self.kmip(provider.id)?.key().map(drop)
    }

    /// A backup of a KMIP provider, sealed under a separate passphrase.
    ///
    /// # Errors
    /// `wrong-state` while the provider is sealed.
    pub(in crate::providers) async fn backup_kmip(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
    ) -> Result<Vec<u8>, Problem> {
        let kmip = self.kmip(provider.id)?;
        let _alone = kmip.changing.lock().await;
        let key = kmip.key()?;
        let mut read = self.store.read().await?;
        let servers = kmip::servers(&mut read, provider.id).await?;
        let client = kmip::client(&mut read, provider.id).await?;
        drop(read);
        let server = |server: kmip::Server| format::Server {
            alias: server.alias,
            host: server.host,
            port: server.port,
            trust: server.trust.map(trust_to_file),
        };
        let settings = Settings {
            id: provider.id,
            name: provider.name.clone(),
            servers: servers.into_iter().map(server).collect(),
            certificate: client.and_then(|client| client.certificate),
        };
        self.derive(move || seal(&settings, &key, &passphrase)).await
    }

    /// Adds a KMIP provider from a backup, under its former id: the references of keys contain it.
    ///
    /// # Errors
    /// `already-exists`; `key-mismatch` or `damaged` for a backup that does not open.
    pub(in crate::providers) async fn restore_kmip(
        &self,
        name: &str,
        passphrase: SecretBytes,
        restore: Restore,
        actor: &str,
    ) -> Result<Provider, Problem> {
        let (settings, key) = self.open_kmip_backup(restore).await?;
        let provider = Provider {
            id: settings.id,
            name: name.to_owned(),
            kind: ProviderKind::Kmip,
            default: false,
            verified: true,
        };
        let (id, directory) = (provider.id, self.directory_of(provider.id));
        let made = self.derive(move || Ok((key.write(&directory, id, &passphrase)?, key)));
        let (key_file, key) = made.await?;
        let server = |server: format::Server| kmip::Server {
            alias: server.alias,
            host: server.host,
            port: server.port,
            trust: server.trust.map(trust_from_file),
        };
        let servers: Vec<_> = settings.servers.into_iter().map(server).collect();
        let client =
            kmip::ClientRow { key_file, certificate: settings.certificate, next_key_file: None };
        let mut write = self.store.write().await?;
        providers::insert(&mut write, &provider).await?;
        kmip::insert_servers(&mut write, id, &servers).await?;
        kmip::insert_client(&mut write, id, &client).await?;
        let (kind, detail) = ("provider.added", "restored from a backup");
        write.event(NewEvent { kind, actor, target: name, detail }).await?;
        write.commit().await?;
        let kmip = self.keep_kmip(&provider);
        kmip.load(Some(Arc::new(key))).await?;
        kmip.try_all().await;
        kmip.look_now();
        self.unlocked.send_modify(|count| *count += 1);
        Ok(provider)
    }

    /// Whether a backup opens and its provider does not exist here.
    pub(in crate::providers) async fn check_restore_kmip(
        &self,
        restore: Restore,
    ) -> Result<(), Problem> {
        self.open_kmip_backup(restore).await.map(drop)
    }

    async fn open_kmip_backup(&self, restore: Restore) -> Result<(Settings, ClientKey), Problem> {
        let (settings, key) = self.derive(move || open(&restore)).await?;
        self.check_not_here(settings.id).await?;
        let servers = settings.servers.iter().map(|server| AddKmipServer {
            alias: server.alias.clone(),
            host: server.host.clone(),
            port: server.port,
        });
        check_servers(&servers.collect::<Vec<_>>())?;
        Ok((settings, key))
    }

    /// Whether a backup opens and holds this provider's client key.
    pub(in crate::providers) async fn verify_kmip(
        &self,
        provider: &Provider,
        restore: Restore,
    ) -> Result<(), Problem> {
        let present = self.kmip(provider.id)?.key()?;
        let (settings, key) = self.derive(move || open(&restore)).await?;
        if settings.id != provider.id || key.der() != present.der() {
            let detail = format!(
                "the backup opens, but holds another client key than '{}' has: make a new one",
                provider.name
            );
            return Err(Problem::new(ErrorCode::KeyMismatch, detail));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use vmseal_api::id::ProviderId;

    use super::*;

    const GOLDEN: &[u8] = include_bytes!("../../../tests/golden/kmip-provider-backup-v1.bin");

    fn secret(text: &str) -> SecretBytes {
        SecretBytes::from_wiped(&mut text.as_bytes().to_vec()).unwrap()
    }

    fn golden(passphrase: &str) -> Restore {
        Restore { backup: GOLDEN.to_vec(), passphrase: secret(passphrase) }
    }

    /// Made from the written format by another implementation (pyca/cryptography): it has to
    /// open forever.
    #[test]
    fn the_golden_file_opens() {
        let (settings, key) = open(&golden("correct horse")).unwrap();
        let id = ProviderId(Uuid::from_bytes(std::array::from_fn(|index| index as u8)));
        assert_eq!((settings.id, settings.name.as_str()), (id, "kms"));
        assert_eq!(settings.servers.len(), 2);
        assert_eq!((settings.servers[1].host.as_str(), settings.servers[1].port), ("::1", 5697));
        key.identity(settings.certificate.as_deref().unwrap()).unwrap();
    }

    #[test]
    fn a_changed_setting_or_a_wrong_passphrase_is_refused() {
        assert_eq!(open(&golden("wrong")).err().unwrap().code, ErrorCode::KeyMismatch);
        let at = GOLDEN.windows(4).position(|bytes| bytes == b"5697").unwrap();
        let mut changed = golden("correct horse");
        changed.backup[at] = b'6';
        let refused = open(&changed).err().unwrap();
        assert_eq!(refused.code, ErrorCode::Damaged);
        assert!(refused.detail.contains("was changed"), "{refused}");
        let mut short = golden("correct horse");
        short.backup.truncate(20);
        assert_eq!(open(&short).err().unwrap().code, ErrorCode::Damaged);
    }
}
