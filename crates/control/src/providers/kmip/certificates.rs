//! The client key of a provider and its certificate: set, replaced, sealed under another passphrase.
//!
//! ```text
//!              CSR with a new key               its certificate
//!   in use ─────────────────────────► in use ─────────────────────► the next one in use
//!     │ ▲                             + next key
//!     └─┘ another certificate of the key; or a key and its certificate at once
//! ```
//!
//! The next key does not depend on the one in use, whose passphrase or file may be lost. The one in use stays until
//! there is a certificate to replace it.

use std::sync::Arc;

use jiff::Timestamp;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::certificate::summary;
use super::client_key::ClientKey;
use super::life::check_pem;
use crate::providers::{Providers, check_new_passphrase};
use crate::store::events::NewEvent;
use crate::store::providers::Provider;
use crate::store::{StoreError, kmip};

/// A certificate to set.
pub struct NewCertificate {
    /// The certificate with its chain, PEM.
    pub certificate: String,
    /// Its private key; `None` if the provider has it.
    pub key: Option<SecretBytes>,
    /// The passphrase that seals the given key, or opens the one that waits for this certificate.
    pub passphrase: Option<SecretBytes>,
    /// The passphrase becomes the provider's: its old one is not needed.
    pub replace: bool,
    /// Replace even a valid certificate, or one with another name.
    pub force: bool,
}

/// The name for a certificate, or for a certificate request.
pub struct NewName {
    /// The common name.
    pub common_name: String,
    /// For a new key.
    pub replace: bool,
    /// The passphrase that seals the new key.
    pub passphrase: Option<SecretBytes>,
    /// Replace even a certificate with another name.
    pub force: bool,
}

/// The key of a certificate.
enum CertificateKey {
    /// The one in use.
    Present,
    /// The one that waited for it.
    Next(Arc<ClientKey>),
    /// One that came with it, and the passphrase that seals it.
    Given(ClientKey, SecretBytes),
}

impl Providers {
    /// A request for a certificate of the provider's client key, or of a new one, which takes its place as
    /// soon as there is a certificate of it.
    ///
    /// # Errors
    /// `wrong-state` while the provider is sealed, unless the key is a new one; `invalid-request` for the name
    /// or the passphrase.
    pub async fn certificate_request(
        &self,
        provider: &Provider,
        name: NewName,
        actor: &str,
    ) -> Result<String, Problem> {
        let kmip = self.kmip(provider.id)?;
        if !name.replace {
            return kmip.key()?.request(&name.common_name);
        }
        let _alone = kmip.changing.lock().await;
        let passphrase = self.new_passphrase(provider, name.passphrase)?;
        let key = ClientKey::generate()?;
        let request = key.request(&name.common_name)?;
        let before = self.client_row(provider).await?;
        let (file, key) = self.keep_client_key(provider, key, passphrase).await?;
        let client = kmip::ClientRow { next_key_file: Some(file), ..before.clone() };
        let (kind, detail) =
            ("provider.key-made", "a new client key, which waits for its certificate");
        self.change_client_row(provider, &before, &client, (kind, detail), actor).await?;
        kmip.set_next_key(key);
        Ok(request)
    }

    /// Whether [`Providers::certificate_request`] would make one with a new key; writes nothing.
    ///
    /// # Errors
    /// Those of [`Providers::certificate_request`].
    pub fn check_certificate_request(
        &self,
        provider: &Provider,
        name: NewName,
    ) -> Result<(), Problem> {
        let kmip = self.kmip(provider.id)?;
        if !name.replace {
            return kmip.key()?.request(&name.common_name).map(drop);
        }
        self.new_passphrase(provider, name.passphrase)?;
        ClientKey::generate()?.request(&name.common_name).map(drop)
    }

    /// Makes a self-signed certificate, and uses it from now on.
    ///
    /// # Errors
    /// As [`Providers::certificate_request`]; `conflict` for another name than that of the certificate in
    /// use.
    pub async fn self_sign(
        &self,
        provider: &Provider,
        name: NewName,
        actor: &str,
    ) -> Result<String, Problem> {
        let kmip = self.kmip(provider.id)?;
        let _alone = kmip.changing.lock().await;
        let before = self.client_row(provider).await?;
        let (certificate, chosen) = self.self_signed(provider, &before, name)?;
        self.set_alone(provider, before, certificate.clone(), chosen, actor).await?;
        Ok(certificate)
    }

    /// Whether [`Providers::self_sign`] would succeed; writes nothing.
    ///
    /// # Errors
    /// Those of [`Providers::self_sign`].
    pub async fn check_self_sign(&self, provider: &Provider, name: NewName) -> Result<(), Problem> {
        self.kmip(provider.id)?;
        let before = self.client_row(provider).await?;
        self.self_signed(provider, &before, name).map(drop)
    }

    fn self_signed(
        &self,
        provider: &Provider,
        before: &kmip::ClientRow,
        name: NewName,
    ) -> Result<(String, CertificateKey), Problem> {
        let (certificate, chosen) = if name.replace {
            let passphrase = self.new_passphrase(provider, name.passphrase)?;
            let key = ClientKey::generate()?;
            (key.self_signed(&name.common_name)?, CertificateKey::Given(key, passphrase))
        } else {
            (
                self.kmip(provider.id)?.key()?.self_signed(&name.common_name)?,
                CertificateKey::Present,
            )
        };
        if !name.force {
            check_successor(before.certificate.as_deref(), &certificate, Timestamp::now())?;
        }
        Ok((certificate, chosen))
    }

    /// Sets the client certificate: of a key that is there, or with another one, which the passphrase seals.
    ///
    /// # Errors
    /// `wrong-state` while the provider is sealed, unless its key is replaced; `invalid-request` when
    /// certificate and key do not belong together, or for a certificate that is not to replace the one in use;
    /// `key-mismatch` for a wrong passphrase.
    pub async fn set_certificate(
        &self,
        provider: &Provider,
        new: NewCertificate,
        actor: &str,
    ) -> Result<(), Problem> {
        let kmip = self.kmip(provider.id)?;
        let _alone = kmip.changing.lock().await;
        let (before, certificate, chosen) = self.chosen(provider, new).await?;
        self.set_alone(provider, before, certificate, chosen, actor).await
    }

    /// Whether [`Providers::set_certificate`] would succeed; writes nothing.
    ///
    /// # Errors
    /// Those of [`Providers::set_certificate`].
    pub async fn check_certificate(
        &self,
        provider: &Provider,
        new: NewCertificate,
    ) -> Result<(), Problem> {
        self.chosen(provider, new).await.map(drop)
    }

    async fn set_alone(
        &self,
        provider: &Provider,
        before: kmip::ClientRow,
        certificate: String,
        chosen: CertificateKey,
        actor: &str,
    ) -> Result<(), Problem> {
        let fingerprint = summary(&certificate).map(|it| it.fingerprint).unwrap_or_default();
        let certificate = Some(certificate);
        let (key, client) = match chosen {
            CertificateKey::Present => (None, kmip::ClientRow { certificate, ..before.clone() }),
            CertificateKey::Next(key) => {
                let key_file = before.next_key_file.clone().unwrap_or_default();
                (Some(key), kmip::ClientRow { key_file, certificate, next_key_file: None })
            }
            CertificateKey::Given(key, passphrase) => {
                let (key_file, key) = self.keep_client_key(provider, key, passphrase).await?;
                (Some(key), kmip::ClientRow { key_file, certificate, next_key_file: None })
            }
        };
        let another = if key.is_some() { ", with another key" } else { "" };
        let detail = format!("the client certificate {fingerprint}{another}");
        let told = ("provider.certificate-set", detail.as_str());
        self.change_client_row(provider, &before, &client, told, actor).await?;
        self.refreshed(provider, key).await
    }

    /// Finds the key of a certificate, and checks that the certificate may replace the one in use.
    async fn chosen(
        &self,
        provider: &Provider,
        new: NewCertificate,
    ) -> Result<(kmip::ClientRow, String, CertificateKey), Problem> {
        check_pem("certificate", &new.certificate)?;
        let kmip = self.kmip(provider.id)?;
        let before = self.client_row(provider).await?;
        let NewCertificate { certificate, key, passphrase, replace, force } = new;
        let chosen = match key {
            Some(key) => {
                let key = ClientKey::given(key)?;
                key.identity(&certificate)?;
                let passphrase = if replace {
                    self.new_passphrase(provider, passphrase)?
                } else {
                    kmip.key()?;
                    let passphrase = self.passphrase_for(&provider.name, passphrase)?;
                    let copy = passphrase.try_clone().map_err(|error| crate::internal(&error))?;
                    // It must open the existing key: a provider has one passphrase.
                    self.read_client_key(provider, copy).await?;
                    passphrase
                };
                CertificateKey::Given(key, passphrase)
            }
            None if replace => {
                let detail = "a certificate that replaces the key comes with its private key";
                return Err(Problem::invalid("private_key", detail));
            }
            None => self.chosen_of_ours(provider, &before, &certificate, passphrase).await?,
        };
        if !force {
            check_successor(before.certificate.as_deref(), &certificate, Timestamp::now())?;
        }
        Ok((before, certificate, chosen))
    }

    /// The provider's key that belongs to a certificate: the one in use, or the next one.
    async fn chosen_of_ours(
        &self,
        provider: &Provider,
        before: &kmip::ClientRow,
        certificate: &str,
        passphrase: Option<SecretBytes>,
    ) -> Result<CertificateKey, Problem> {
        let kmip = self.kmip(provider.id)?;
        let not_the_present = match kmip.key().and_then(|key| key.identity(certificate)) {
            Ok(_) => return Ok(CertificateKey::Present),
            Err(problem) => problem,
        };
        let Some(file) = before.next_key_file.clone() else { return Err(not_the_present) };
        let next = match kmip.next_key() {
            Some(next) => next,
            None => {
                let passphrase = self.passphrase_for(&provider.name, passphrase)?;
                Arc::new(self.read_key_file(provider, file, passphrase).await?)
            }
        };
        next.identity(certificate)?;
        Ok(CertificateKey::Next(next))
    }

    /// The passphrase that seals a new key.
    fn new_passphrase(
        &self,
        provider: &Provider,
        given: Option<SecretBytes>,
    ) -> Result<SecretBytes, Problem> {
        let passphrase = self.passphrase_for(&provider.name, given)?;
        check_new_passphrase(&passphrase, "passphrase")?;
        Ok(passphrase)
    }

    async fn client_row(&self, provider: &Provider) -> Result<kmip::ClientRow, Problem> {
        let row = kmip::client(&mut *self.store.read().await?, provider.id).await?;
        row.ok_or_else(|| Problem::not_found("client key of", &provider.name))
    }

    /// Seals a client key into a new file, which the inventory does not name yet.
    async fn keep_client_key(
        &self,
        provider: &Provider,
        key: ClientKey,
        passphrase: SecretBytes,
    ) -> Result<(String, Arc<ClientKey>), Problem> {
        let (id, directory) = (provider.id, self.directory_of(provider.id));
        self.derive(move || Ok((key.write(&directory, id, &passphrase)?, Arc::new(key)))).await
    }

    /// Records other keys in the inventory, with an event, and removes the files that it no longer names.
    async fn change_client_row(
        &self,
        provider: &Provider,
        before: &kmip::ClientRow,
        after: &kmip::ClientRow,
        (kind, detail): (&str, &str),
        actor: &str,
    ) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        let changed = kmip::change_client(&mut write, provider.id, &before.key_file, after).await?;
        if !changed {
            let detail = format!("provider '{}' was given another key meanwhile", provider.name);
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
        write.event(NewEvent { kind, actor, target: &provider.name, detail }).await?;
        write.commit().await?;
        for file in [Some(&before.key_file), before.next_key_file.as_ref()].into_iter().flatten() {
            if *file != after.key_file && after.next_key_file.as_ref() != Some(file) {
                // It is sealed, and no longer referenced.
                let _ = std::fs::remove_file(self.directory_of(provider.id).join(file));
            }
        }
        Ok(())
    }

    /// Seals the client key under another passphrase; the key that waits for its certificate, too, where the
    /// old passphrase opens it.
    pub(in crate::providers) async fn reseal_client_key(
        &self,
        provider: &Provider,
        old: SecretBytes,
        new: SecretBytes,
        actor: &str,
    ) -> Result<(), Problem> {
        let kmip = self.kmip(provider.id)?;
        let _alone = kmip.changing.lock().await;
        let before = self.client_row(provider).await?;
        let copy =
            |secret: &SecretBytes| secret.try_clone().map_err(|error| crate::internal(&error));
        let key = self.read_client_key(provider, copy(&old)?).await?;
        let mut after = before.clone();
        (after.key_file, _) = self.keep_client_key(provider, key, copy(&new)?).await?;
        if let Some(file) = &before.next_key_file
            && let Ok(next) = self.read_key_file(provider, file.clone(), old).await
        {
            after.next_key_file = Some(self.keep_client_key(provider, next, new).await?.0);
        }
        let told = ("provider.passphrase-changed", "its client key is sealed under another one");
        self.change_client_row(provider, &before, &after, told, actor).await
    }

    /// Opens the client key of a provider.
    pub(in crate::providers) async fn unlock_kmip(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
    ) -> Result<(), Problem> {
        let kmip = self.kmip(provider.id)?;
        let _alone = kmip.changing.lock().await;
        let key = self.read_client_key(provider, passphrase).await?;
        kmip.load(Some(Arc::new(key))).await?;
        kmip.look_now();
        Ok(())
    }

    /// Removes the files of client keys that a crash has left: what the inventory does not name was never
    /// used, or is used no more. At the start, when nobody else writes one.
    pub(in crate::providers) async fn sweep_client_keys(
        &self,
        provider: &Provider,
    ) -> Result<(), StoreError> {
        let row = kmip::client(&mut *self.store.read().await?, provider.id).await?;
        let Some(row) = row else { return Ok(()) };
        let Ok(files) = std::fs::read_dir(self.directory_of(provider.id)) else { return Ok(()) };
        for file in files.flatten() {
            let name = file.file_name();
            let Some(name) = name.to_str() else { continue };
            let named = name == row.key_file || row.next_key_file.as_deref() == Some(name);
            if !named && name.starts_with("client-") && name.ends_with(".key") {
                let removed = std::fs::remove_file(file.path()).is_ok();
                tracing::info!(provider = provider.name, name, removed, "a file of a former key");
            }
        }
        Ok(())
    }

    /// The client key of a provider, from its file.
    pub(in crate::providers) async fn read_client_key(
        &self,
        provider: &Provider,
        passphrase: SecretBytes,
    ) -> Result<ClientKey, Problem> {
        let file = self.client_row(provider).await?.key_file;
        self.read_key_file(provider, file, passphrase).await
    }

    async fn read_key_file(
        &self,
        provider: &Provider,
        file: String,
        passphrase: SecretBytes,
    ) -> Result<ClientKey, Problem> {
        let (id, name) = (provider.id, provider.name.clone());
        let path = self.directory_of(id).join(file);
        self.derive(move || ClientKey::read(&path, id, &name, &passphrase)).await
    }
}

/// Refuses a certificate that would take the place of a better one by mistake: one that is not valid in place
/// of a valid one, or one with another name, which at most KMSs is another client without the keys.
fn check_successor(present: Option<&str>, new: &str, now: Timestamp) -> Result<(), Problem> {
    let Some((present, present_name)) =
        present.and_then(|pem| Some((summary(pem)?, name_in(pem)?)))
    else {
        return Ok(());
    };
    let invalid = |why: String| {
        let detail =
            format!("{why}. It replaces the certificate in use if that is meant (--force)");
        Err(Problem::invalid("certificate", detail))
    };
    let (Some(certificate), Some(name)) = (summary(new), name_in(new)) else {
        return invalid("the certificate has no name or validity that can be read".to_owned());
    };
    let is_valid = |it: &vmseal_api::kmip::Certificate| it.not_before <= now && now <= it.not_after;
    if is_valid(&present) && !is_valid(&certificate) {
        return invalid(format!(
            "the certificate is valid from {} to {}, and the one in use is valid now",
            certificate.not_before, certificate.not_after
        ));
    }
    if name != present_name {
        return invalid(format!(
            "the certificate is for '{name}' and the one in use for '{present_name}': at most KMSs that is another client, which may not read the keys"
        ));
    }
    Ok(())
}

/// The common name in a certificate, or its whole subject if it has none.
fn name_in(pem: &str) -> Option<String> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
    let (_, certificate) = X509Certificate::from_der(&der).ok()?;
    let subject = certificate.subject();
    let common_name = subject.iter_common_name().next().and_then(|name| name.as_str().ok());
    Some(common_name.map_or_else(|| subject.to_string(), str::to_owned))
}

#[cfg(test)]
mod tests {
    use vmseal_kmip::testing::{Authority, Validity};

    use super::*;

    #[test]
    fn a_worse_certificate_does_not_replace_a_better_one() {
        let authority = Authority::new("kms");
        let pem = |name, validity| authority.client(name, validity).certificate;
        let now = Timestamp::now();
        let good = pem("vmseal", Validity::Now);
        let may = |present: Option<&str>, new: &str| check_successor(present, new, now).is_ok();
        assert!(may(None, &pem("vmseal", Validity::Expired)), "there is nothing to lose");
        assert!(may(Some(&good), &pem("vmseal", Validity::Now)));
        assert!(!may(Some(&good), &pem("vmseal", Validity::Expired)));
        assert!(!may(Some(&good), &pem("vmseal", Validity::NotYet)));
        assert!(!may(Some(&good), &pem("vmseal-2", Validity::Now)));
        let old = pem("vmseal", Validity::Expired);
        assert!(may(Some(&old), &pem("vmseal", Validity::Expired)));
        assert!(!may(Some(&old), &pem("other", Validity::Now)), "its keys are another client's");
        let refused = check_successor(Some(&good), &pem("other", Validity::Now), now).unwrap_err();
        assert!(refused.detail.contains("--force"), "{refused}");
    }
}
