//! Adds KMIP providers, and sets the trust in their servers.

use std::sync::{Arc, PoisonError};

use futures_util::future::join_all;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use vmseal_api::fingerprint::is_same;
use vmseal_api::id::{ProviderId, check_name};
use vmseal_api::kmip::{
    AddKmipServer, Certificate, KmipDetails, KmipServer, KmipShown, KmipTrust, PEM_MAX, SERVERS_MAX,
};
use vmseal_api::model::ProviderKind;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::client::{Endpoint, ShownCertificate, Trust, show_certificate};
use vmseal_secret::SecretBytes;

use super::certificate::{of_der, summary};
use super::client_key::ClientKey;
use super::{KmipProvider, MonitoredProvider, ServerState, TIMEOUTS, problem};
use crate::providers::Providers;
use crate::store::events::NewEvent;
use crate::store::providers::Provider;
use crate::store::{kmip, providers};

fn shown_trust(trust: &kmip::Trust) -> Option<KmipTrust> {
    match trust {
        kmip::Trust::Pinned { certificate } => {
            Some(KmipTrust::Pinned { certificate: summary(certificate)? })
        }
        kmip::Trust::Authorities { certificates } => {
            let all = CertificateDer::pem_slice_iter(certificates.as_bytes());
            let certificates = all.filter_map(|der| of_der(&der.ok()?)).collect();
            Some(KmipTrust::Authorities { certificates })
        }
    }
}

pub(super) fn check_servers(servers: &[AddKmipServer]) -> Result<(), Problem> {
    if servers.is_empty() || servers.len() > SERVERS_MAX {
        let detail = format!("a KMIP provider has 1 to {SERVERS_MAX} servers");
        return Err(Problem::invalid("kmip.servers", detail));
    }
    for (index, server) in servers.iter().enumerate() {
        let field = |name| format!("kmip.servers[{index}].{name}");
        check_name(&server.alias)
            .map_err(|error| Problem::invalid(field("alias"), error.to_string()))?;
        Endpoint::new(server.host.clone(), server.port)
            .map_err(|error| Problem::invalid(field("host"), error.to_string()))?;
        if server.port == 0 {
            return Err(Problem::invalid(field("port"), "must be 1 to 65535"));
        }
        if servers[..index].iter().any(|other| other.alias == server.alias) {
            let detail = format!("'{}' is the alias of another server", server.alias);
            return Err(Problem::invalid(field("alias"), detail));
        }
    }
    Ok(())
}

pub(super) fn check_pem(field: &str, pem: &str) -> Result<(), Problem> {
    if pem.len() > PEM_MAX {
        return Err(Problem::invalid(field, format!("at most {PEM_MAX} bytes are taken")));
    }
    Ok(())
}

impl Providers {
    /// Adds a KMIP provider, with a new client key. The key's file is on disk before the inventory names
    /// it.
    ///
    /// # Errors
    /// `already-exists`; `invalid-request` for its servers, or without a passphrase.
    pub async fn add_kmip(
        &self,
        name: &str,
        servers: &[AddKmipServer],
        passphrase: Option<SecretBytes>,
        actor: &str,
    ) -> Result<Provider, Problem> {
        check_servers(servers)?;
        let passphrase = self.passphrase_of_new(name, passphrase).await?;
        let provider = Provider {
            id: ProviderId::new(),
            name: name.to_owned(),
            kind: ProviderKind::Kmip,
            default: false,
            // The KMS keeps its keys, so there is nothing to back up.
            verified: true,
        };
        let (id, directory) = (provider.id, self.directory_of(provider.id));
        let made = self.derive(move || {
            let key = ClientKey::generate()?;
            Ok((key.write(&directory, id, &passphrase)?, key))
        });
        let (key_file, key) = made.await?;
        let servers: Vec<_> = servers
            .iter()
            .map(|server| kmip::Server {
                alias: server.alias.clone(),
                host: server.host.clone(),
                port: server.port,
                trust: None,
            })
            .collect();
        let mut write = self.store.write().await?;
        providers::insert(&mut write, &provider).await?;
        kmip::insert_servers(&mut write, id, &servers).await?;
        let client = kmip::ClientRow { key_file, certificate: None, next_key_file: None };
        kmip::insert_client(&mut write, id, &client).await?;
        let detail = format!("over KMIP, with a new client key; servers: {}", servers.len());
        let kind = "provider.added";
        write.event(NewEvent { kind, actor, target: name, detail: &detail }).await?;
        write.commit().await?;
        let kmip = self.keep_kmip(&provider);
        kmip.load(Some(Arc::new(key))).await?;
        kmip.look_now();
        Ok(provider)
    }

    /// Whether [`Providers::add_kmip`] would succeed; writes nothing, asks no server.
    ///
    /// # Errors
    /// As [`Providers::add_kmip`].
    pub async fn check_new_kmip(
        &self,
        name: &str,
        servers: &[AddKmipServer],
        passphrase: Option<SecretBytes>,
    ) -> Result<(), Problem> {
        check_servers(servers)?;
        self.passphrase_of_new(name, passphrase).await.map(drop)
    }

    /// The details of a KMIP provider; `None` for one of another kind.
    #[must_use]
    pub fn kmip_details(&self, provider: &Provider) -> Option<KmipDetails> {
        self.kmip(provider.id).ok().map(|kmip| kmip.details())
    }

    /// The certificate that a server sends now.
    ///
    /// # Errors
    /// `not-found`; the KMS's.
    pub async fn shown_certificate(
        &self,
        provider: &Provider,
        alias: &str,
    ) -> Result<KmipShown, Problem> {
        let kmip = self.kmip(provider.id)?;
        let server = kmip.server(alias)?;
        let shown = kmip.look(&server).await?;
        let trusted = match server.row.trust.as_ref() {
            None => false,
            Some(kmip::Trust::Pinned { certificate }) => {
                Trust::pinned(certificate).is_ok_and(|trust| match trust {
                    Trust::Pinned(pinned) => pinned == shown.certificate,
                    Trust::Authorities(_) => false,
                })
            }
            Some(kmip::Trust::Authorities { .. }) => {
                kmip.probe(&server).await;
                server.fault().is_none()
            }
        };
        Ok(KmipShown { certificate: kmip.readable(&shown)?, names: shown.names, trusted })
    }

    /// Trusts the certificate with this fingerprint, if the server sends it now.
    ///
    /// # Errors
    /// `not-found`; `key-mismatch` if it sends another one; the KMS's.
    pub async fn trust_certificate(
        &self,
        provider: &Provider,
        alias: &str,
        fingerprint: &str,
        actor: &str,
    ) -> Result<(), Problem> {
        let kmip = self.kmip(provider.id)?;
        let _alone = kmip.changing.lock().await;
        let (trust, detail) = self.check_certificate_trust(provider, alias, fingerprint).await?;
        self.trust(provider, alias, trust, &detail, actor).await
    }

    /// What [`Providers::trust_certificate`] would trust, and the text of its event.
    ///
    /// # Errors
    /// Those of [`Providers::trust_certificate`].
    pub async fn check_certificate_trust(
        &self,
        provider: &Provider,
        alias: &str,
        fingerprint: &str,
    ) -> Result<(kmip::Trust, String), Problem> {
        let kmip = self.kmip(provider.id)?;
        let server = kmip.server(alias)?;
        let shown = kmip.look(&server).await?;
        if !is_same(fingerprint, &shown.fingerprint.to_string()) {
            let detail = format!(
                "server '{alias}' shows the certificate {}, not {fingerprint}: nothing was trusted",
                shown.fingerprint
            );
            return Err(Problem::new(ErrorCode::KeyMismatch, detail));
        }
        let certificate = super::certificate::pem_of(&shown.certificate);
        let detail = format!("server '{alias}': the certificate {}", shown.fingerprint);
        Ok((kmip::Trust::Pinned { certificate }, detail))
    }

    /// Trusts certificates that these authorities sign.
    ///
    /// # Errors
    /// `not-found`; `invalid-request` when there is no certificate in `authorities`.
    pub async fn trust_authorities(
        &self,
        provider: &Provider,
        alias: &str,
        authorities: String,
        actor: &str,
    ) -> Result<(), Problem> {
        let kmip = self.kmip(provider.id)?;
        let _alone = kmip.changing.lock().await;
        let (trust, detail) = self.check_authorities_trust(provider, alias, authorities)?;
        self.trust(provider, alias, trust, &detail, actor).await
    }

    /// What [`Providers::trust_authorities`] would trust, and the text of its event.
    ///
    /// # Errors
    /// Those of [`Providers::trust_authorities`].
    pub fn check_authorities_trust(
        &self,
        provider: &Provider,
        alias: &str,
        authorities: String,
    ) -> Result<(kmip::Trust, String), Problem> {
        check_pem("authorities", &authorities)?;
        Trust::authorities(&authorities)
            .map_err(|error| Problem::invalid("authorities", error.to_string()))?;
        self.kmip(provider.id)?.server(alias)?;
        let trust = kmip::Trust::Authorities { certificates: authorities };
        let detail = match shown_trust(&trust) {
            Some(KmipTrust::Authorities { certificates }) => {
                let names: Vec<_> = certificates.iter().map(|it| it.subject.as_str()).collect();
                format!("server '{alias}': what is signed by {}", names.join(", "))
            }
            _ => format!("server '{alias}'"),
        };
        Ok((trust, detail))
    }

    async fn trust(
        &self,
        provider: &Provider,
        alias: &str,
        trust: kmip::Trust,
        detail: &str,
        actor: &str,
    ) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        kmip::set_trust(&mut write, provider.id, alias, &trust).await?;
        let (kind, target) = ("provider.trusted", provider.name.as_str());
        write.event(NewEvent { kind, actor, target, detail }).await?;
        write.commit().await?;
        self.refreshed(provider, None).await
    }

    /// Reloads a provider's setup from the inventory, and tries its servers, so that the next request for
    /// their status sees how they answer.
    pub(super) async fn refreshed(
        &self,
        provider: &Provider,
        key: Option<Arc<ClientKey>>,
    ) -> Result<(), Problem> {
        let kmip = self.kmip(provider.id)?;
        kmip.load(key).await?;
        kmip.try_all().await;
        kmip.look_now();
        // Wakes what waited for this.
        self.unlocked.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Begins to watch a provider of the inventory; it is sealed, and knows its setup after
    /// [`KmipProvider::load`].
    pub(in crate::providers) fn keep_kmip(&self, provider: &Provider) -> Arc<KmipProvider> {
        let kmip = KmipProvider::new(
            provider.id,
            provider.name.clone(),
            Arc::clone(&self.store),
            self.unlocked.clone(),
        );
        let watched = MonitoredProvider::new(kmip);
        let kmip = Arc::clone(&watched.provider);
        self.insert(provider.id, crate::providers::Open::Kmip(watched));
        kmip
    }
}

impl KmipProvider {
    /// Tries all of its servers.
    pub(in crate::providers) async fn try_all(&self) {
        let servers = self.servers();
        join_all(servers.iter().map(|server| self.probe(server))).await;
    }

    fn details(&self) -> KmipDetails {
        let setup = self.setup.read().unwrap_or_else(PoisonError::into_inner);
        let servers = setup.servers.iter().map(|server| KmipServer {
            alias: server.row.alias.clone(),
            host: server.row.host.clone(),
            port: server.row.port,
            trust: server.row.trust.as_ref().and_then(shown_trust),
            seen: server.seen(),
        });
        let client = setup.certificate.as_deref().and_then(summary);
        KmipDetails { servers: servers.collect(), client, next_key: setup.next_key }
    }

    fn server(&self, alias: &str) -> Result<Arc<ServerState>, Problem> {
        let found = self.servers().into_iter().find(|server| server.row.alias == alias);
        found.ok_or_else(|| {
            Problem::not_found(&format!("server of provider '{}',", self.name), alias)
        })
    }

    /// The certificate that a server sends; trusts nothing.
    async fn look(&self, server: &ServerState) -> Result<ShownCertificate, Problem> {
        let endpoint = Endpoint::new(server.row.host.clone(), server.row.port)
            .map_err(|error| Problem::invalid("host", error.to_string()))?;
        let shown = show_certificate(&endpoint, &TIMEOUTS).await;
        shown.map_err(|error| problem::of(&self.name, &error))
    }

    fn readable(&self, shown: &ShownCertificate) -> Result<Certificate, Problem> {
        of_der(&shown.certificate).ok_or_else(|| {
            let detail = "the server shows a certificate whose validity cannot be read";
            Problem::new(ErrorCode::Damaged, detail)
        })
    }
}
