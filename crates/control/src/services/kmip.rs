//! Operations of KMIP providers only: trust in servers, a client certificate, a test.

use vmseal_api::fingerprint;
use vmseal_api::kmip::{
    AddKmipServer, ClientName, KmipShown, MoveKmipServer, Pem, ProviderTest, SetClientCertificate,
    SetKmipServer, TestProvider, TrustServer,
};
use vmseal_api::model::Provider;
use vmseal_api::problem::Problem;

use super::caller::{Caller, Privilege};
use super::passphrases::open_passphrase;
use super::providers::{find, shown};
use super::{Outcome, Services};
use crate::providers::kmip::{NewCertificate, NewName, ServerChange};

/// Shows the current certificate of a server, without trusting it.
pub async fn certificate(
    services: &Services,
    caller: &Caller,
    name: &str,
    alias: &str,
) -> Result<KmipShown, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    services.providers.shown_certificate(&provider, alias).await
}

/// Trusts a server: the certificate with a fingerprint, or certificates that given authorities sign.
pub async fn trust(
    services: &Services,
    caller: &Caller,
    name: &str,
    alias: &str,
    request: TrustServer,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    if let Some(compared) = &request.fingerprint {
        fingerprint::check(compared)
            .map_err(|error| Problem::invalid("fingerprint", error.to_string()))?;
    }
    let provider = find(services, name).await?;
    let providers = &services.providers;
    let planned = |detail: String| {
        Outcome::planned("provider.trust", &provider.name, format!("trust {detail}"))
    };
    match (request.fingerprint, request.authorities) {
        (Some(fingerprint), None) if dry_run => {
            let checked = providers.check_certificate_trust(&provider, alias, &fingerprint).await?;
            return Ok(planned(checked.1));
        }
        (None, Some(authorities)) if dry_run => {
            let checked = providers.check_authorities_trust(&provider, alias, authorities)?;
            return Ok(planned(checked.1));
        }
        (Some(fingerprint), None) => {
            services
                .providers
                .trust_certificate(&provider, alias, &fingerprint, caller.name())
                .await?;
        }
        (None, Some(authorities)) => {
            services
                .providers
                .trust_authorities(&provider, alias, authorities, caller.name())
                .await?;
        }
        _ => {
            let detail = "either a fingerprint or authorities";
            return Err(Problem::invalid("fingerprint", detail));
        }
    }
    Ok(Outcome::Done(shown(services, provider)))
}

/// The requested name of a client certificate, with the passphrase opened.
fn new_name(services: &Services, provider: &str, request: ClientName) -> Result<NewName, Problem> {
    let ClientName { common_name, replace, passphrase, force } = request;
    let passphrase = passphrase.as_ref();
    let passphrase = passphrase
        .map(|sealed| open_passphrase(services, provider, sealed, "passphrase"))
        .transpose()?;
    Ok(NewName { common_name, replace, passphrase, force })
}

/// Makes a certificate request for the provider's client key or for a new one, for an authority to sign.
pub async fn request_certificate(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: ClientName,
    dry_run: bool,
) -> Result<Outcome<Pem>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    let name = new_name(services, &provider.name, request)?;
    if dry_run {
        let step = match name.replace {
            true => "make a new client key, which is used as soon as its certificate is imported",
            false => "make a certificate request; this changes nothing",
        };
        services.providers.check_certificate_request(&provider, name)?;
        return Ok(Outcome::planned("provider.certificate", &provider.name, step.to_owned()));
    }
    let pem = services.providers.certificate_request(&provider, name, caller.name()).await?;
    Ok(Outcome::Done(Pem { pem }))
}

/// Makes a self-signed client certificate, and uses it from now on.
pub async fn self_sign(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: ClientName,
    dry_run: bool,
) -> Result<Outcome<Pem>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    let name = new_name(services, &provider.name, request)?;
    if dry_run {
        let step =
            format!("make a certificate for '{}', and show it to its servers", name.common_name);
        services.providers.check_self_sign(&provider, name).await?;
        return Ok(Outcome::planned("provider.certificate", &provider.name, step));
    }
    let pem = services.providers.self_sign(&provider, name, caller.name()).await?;
    Ok(Outcome::Done(Pem { pem }))
}

/// Sets the client certificate: a signed one for the provider's key or for the key of its certificate request; or
/// one with another key.
pub async fn set_certificate(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: SetClientCertificate,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    let open = |sealed: &Option<_>, field| {
        let sealed = sealed.as_ref();
        sealed.map(|sealed| open_passphrase(services, &provider.name, sealed, field)).transpose()
    };
    let key = open(&request.private_key, "private_key")?;
    let passphrase = open(&request.passphrase, "passphrase")?;
    let SetClientCertificate { certificate, replace, force, .. } = request;
    let new = NewCertificate { certificate, key, passphrase, replace, force };
    if dry_run {
        services.providers.check_certificate(&provider, new).await?;
        let step = "show this certificate to its servers".to_owned();
        return Ok(Outcome::planned("provider.certificate", &provider.name, step));
    }
    services.providers.set_certificate(&provider, new, caller.name()).await?;
    Ok(Outcome::Done(shown(services, provider)))
}

/// Tests every server of a provider; on request also creates a key at one and reads it at each.
pub async fn test(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: TestProvider,
) -> Result<ProviderTest, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let provider = find(services, name).await?;
    let tested = services.providers.test(&provider, request.key, caller.name()).await?;
    Ok(tested)
}

/// Changes the servers of a provider, or plans that.
async fn change_servers(
    services: &Services,
    name: &str,
    change: ServerChange,
    actor: &str,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    let provider = find(services, name).await?;
    if dry_run {
        let step = services.providers.check_change_of_servers(&provider, &change).await?;
        return Ok(Outcome::planned("provider.servers", &provider.name, step));
    }
    services.providers.change_servers(&provider, &change, actor).await?;
    Ok(Outcome::Done(shown(services, provider)))
}

/// Adds a server to a KMIP provider, as the last in the order; its certificate must be trusted afterwards.
pub async fn add_server(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: AddKmipServer,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    change_servers(services, name, ServerChange::Add(request), caller.name(), dry_run).await
}

/// Removes a server from a KMIP provider; its keys stay where they are.
pub async fn remove_server(
    services: &Services,
    caller: &Caller,
    name: &str,
    alias: &str,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    change_servers(services, name, ServerChange::Remove(alias.to_owned()), caller.name(), dry_run)
        .await
}

/// Changes the address of a server; its trusted certificates stay.
pub async fn set_server(
    services: &Services,
    caller: &Caller,
    name: &str,
    alias: &str,
    request: SetKmipServer,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    let SetKmipServer { host, port } = request;
    let to = ServerChange::Set(AddKmipServer { alias: alias.to_owned(), host, port });
    change_servers(services, name, to, caller.name(), dry_run).await
}

/// Moves a server in the order in which vmseal asks them.
pub async fn move_server(
    services: &Services,
    caller: &Caller,
    name: &str,
    alias: &str,
    request: MoveKmipServer,
    dry_run: bool,
) -> Result<Outcome<Provider>, Problem> {
    caller.require(Privilege::ManageProviders)?;
    change_servers(
        services,
        name,
        ServerChange::Move(alias.to_owned(), request.place),
        caller.name(),
        dry_run,
    )
    .await
}
