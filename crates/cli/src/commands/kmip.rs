//! Key providers over KMIP: servers, trust, certificates, tests.

use std::io::{IsTerminal, Read};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::client::ServerClient;
use vmseal_api::id::check_name;
use vmseal_api::kmip::{
    AddKmip, AddKmipServer, ClientName, KmipDetails, KmipKeyTested, KmipSeen, KmipShown, KmipTrust,
    MoveKmipServer, PEM_MAX, Pem, ProviderTest, SetClientCertificate, SetKmipServer, TestProvider,
    TrustServer,
};
use vmseal_api::model::Provider;
use vmseal_api::passphrase::SealedPassphrase;
use vmseal_control::providers::kmip::KMIP_PORT;
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

use super::provider_secret::sealed;
use crate::arguments::{Certificate, Kmip, Output, ServerOf};
use crate::exit::{Ended, Exit};
use crate::passphrase::{self, Prompt};
use crate::print::{self, plan};

pub async fn run(server: &ServerClient, output: Output, verb: Kmip) -> anyhow::Result<()> {
    match verb {
        Kmip::Trust { name, kms, fingerprint, authority, dry_run } => {
            let authority = authority.as_deref().map(read_pem).transpose()?;
            let what = Trusting { only: kms, fingerprint, authority, dry_run: dry_run.dry_run };
            trust(server, output, &name, what).await
        }
        Kmip::Servers(verb) => servers_of(server, output, verb).await,
        Kmip::Certificate(certificate) => set_certificate(server, output, certificate).await,
        Kmip::Test { name, key } => test(server, output, &name, key).await,
    }
}

/// Parses the servers of a new provider; none for a native provider.
pub fn servers(typed: &[String]) -> anyhow::Result<Option<AddKmip>> {
    if typed.is_empty() {
        return Ok(None);
    }
    let servers = typed.iter().map(|text| server_of(text)).collect::<anyhow::Result<_>>();
    let servers = servers.map_err(|why| Ended::new(Exit::Usage, format!("--kms: {why:#}")))?;
    Ok(Some(AddKmip { servers }))
}

fn server_of(typed: &str) -> anyhow::Result<AddKmipServer> {
    let wrong = || format!("'{typed}' is not ALIAS=HOST[:PORT]");
    let (alias, address) = typed.split_once('=').with_context(wrong)?;
    let bracketed = address.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let (host, port) = match (bracketed, address.rsplit_once(':')) {
        (Some((host, "")), _) => (host, None),
        (Some((host, port)), _) => (host, Some(port.strip_prefix(':').with_context(wrong)?)),
        // An IPv6 address without brackets has no port.
        (None, Some((host, _))) if host.contains(':') => (address, None),
        (None, Some((host, port))) => (host, Some(port)),
        (None, None) => (address, None),
    };
    let port = match port {
        Some(port) => port.parse().ok().filter(|port| *port > 0).with_context(wrong)?,
        None => KMIP_PORT,
    };
    ensure!(!alias.is_empty() && !host.is_empty(), wrong());
    Ok(AddKmipServer { alias: alias.to_owned(), host: host.to_owned(), port })
}

/// Which servers to trust, on what evidence, and whether it is a dry run.
struct Trusting {
    only: Option<String>,
    fingerprint: Option<String>,
    authority: Option<String>,
    dry_run: bool,
}

async fn trust(
    server: &ServerClient,
    output: Output,
    name: &str,
    what: Trusting,
) -> anyhow::Result<()> {
    let Trusting { only, fingerprint, authority, dry_run } = what;
    let provider: Provider = server.get(&format!("providers/{name}")).await?;
    let details = provider.kmip.ok_or_else(|| {
        let message = format!("'{name}' is a native provider, which has no servers");
        Ended::new(Exit::Conflict, message)
    })?;
    let wanted: Vec<_> = details
        .servers
        .iter()
        .map(|it| it.alias.as_str())
        .filter(|alias| only.as_deref().is_none_or(|only| only == *alias))
        .collect();
    if wanted.is_empty() {
        let message = format!("provider '{name}' has no server '{}'", only.unwrap_or_default());
        return Err(Ended::new(Exit::NotFound, message).into());
    }
    if fingerprint.is_some() && wanted.len() > 1 {
        let message = format!(
            "a fingerprint is of one server's certificate, and provider '{name}' has {}: say which with --kms",
            wanted.join(", ")
        );
        return Err(Ended::new(Exit::Usage, message).into());
    }
    // All questions come before the first change: after one "no", nothing is trusted.
    let mut requests = Vec::new();
    for alias in wanted {
        let path = format!("providers/{name}/servers/{alias}");
        let request = match (&authority, &fingerprint) {
            (Some(authority), _) => {
                TrustServer { authorities: Some(authority.clone()), fingerprint: None }
            }
            (None, Some(known)) => {
                TrustServer { fingerprint: Some(known.clone()), authorities: None }
            }
            (None, None) => {
                let shown: KmipShown = server.get(&format!("{path}/certificate")).await?;
                let confirmed = match dry_run {
                    true => untrusted(alias, &shown),
                    false => confirmed(alias, &shown)?,
                };
                match confirmed {
                    Some(fingerprint) => {
                        TrustServer { fingerprint: Some(fingerprint), authorities: None }
                    }
                    None => continue,
                }
            }
        };
        requests.push((format!("{path}/trust"), request));
    }
    for (path, request) in requests {
        if dry_run {
            plan::show(output, &server.try_post(&path, &request).await?)?;
        } else {
            let _: Provider = server.post(&path, &request).await?;
        }
    }
    if dry_run {
        return Ok(());
    }
    show(server, output, name).await
}

/// Shows a certificate; gives its fingerprint, or nothing if it is trusted already.
fn untrusted(alias: &str, shown: &KmipShown) -> Option<String> {
    let certificate = &shown.certificate;
    print::say(format_args!("Server '{alias}' shows this certificate:"));
    for (head, text) in [
        ("SHA-256", certificate.fingerprint.as_str()),
        ("subject", &certificate.subject),
        ("issuer", &certificate.issuer),
        ("for", &shown.names.join(", ")),
        ("valid from", &certificate.not_before.to_string()),
        ("valid until", &certificate.not_after.to_string()),
    ] {
        print::say(format_args!("  {head:<12} {text}"));
    }
    if shown.trusted {
        print::say("It is trusted.");
        return None;
    }
    Some(certificate.fingerprint.clone())
}

/// Asks whether to trust a certificate; gives its fingerprint if so, nothing if it is trusted already.
fn confirmed(alias: &str, shown: &KmipShown) -> anyhow::Result<Option<String>> {
    let Some(fingerprint) = untrusted(alias, shown) else { return Ok(None) };
    ensure!(
        std::io::stdin().is_terminal(),
        "there is no terminal to confirm it: give --fingerprint or --authority"
    );
    if !super::confirm::says_yes("Compare it with the KMS's own display. Trust it")? {
        bail!("nothing was trusted");
    }
    Ok(Some(fingerprint))
}

async fn set_certificate(
    server: &ServerClient,
    output: Output,
    asked: Certificate,
) -> anyhow::Result<()> {
    if let Some(file) = &asked.import {
        return import(server, output, &asked, file).await;
    }
    let passphrase = match asked.replace {
        true => Some(new_passphrase(server, &asked).await?),
        false => None,
    };
    let verb = if asked.csr { "certificate-request" } else { "self-signed-certificate" };
    let path = format!("providers/{}/{verb}", asked.name);
    let Certificate { common_name, replace, force, .. } = asked;
    let request = ClientName { common_name, replace, passphrase, force };
    // A certificate request for the present key changes nothing, so a dry run makes it.
    if asked.dry_run.dry_run && (replace || !asked.csr) {
        return plan::show(output, &server.try_post(&path, &request).await?);
    }
    let made: Pem = server.post(&path, &request).await?;
    match output {
        Output::Json | Output::Yaml => print::whole(output, &made),
        Output::Table | Output::Csv => print::line(made.pem.trim_end()),
    }
}

/// The passphrase that a provider gets with a new key.
async fn new_passphrase(
    server: &ServerClient,
    asked: &Certificate,
) -> anyhow::Result<SealedPassphrase> {
    let what = "New passphrase of the provider";
    let given = passphrase::obtain(&asked.passphrase, what, Prompt::Twice)?;
    sealed(server, &asked.name, &given).await
}

async fn import(
    server: &ServerClient,
    output: Output,
    asked: &Certificate,
    file: &Path,
) -> anyhow::Result<()> {
    let mut request = SetClientCertificate {
        certificate: read_pem(file)?,
        private_key: None,
        passphrase: None,
        replace: asked.replace,
        force: asked.force,
    };
    let given = async || {
        let what = "Passphrase of the provider";
        let given = passphrase::obtain(&asked.passphrase, what, Prompt::Once)?;
        sealed(server, &asked.name, &given).await
    };
    if let Some(key) = &asked.key {
        let key = read_key(key)?;
        request.private_key = Some(sealed(server, &asked.name, &key).await?);
        request.passphrase = Some(match asked.replace {
            true => new_passphrase(server, asked).await?,
            false => given().await?,
        });
    } else if asked.passphrase.passphrase_file.is_some() {
        request.passphrase = Some(given().await?);
    }
    let path = format!("providers/{}/certificate", asked.name);
    if asked.dry_run.dry_run {
        return plan::show(output, &server.try_put(&path, &request).await?);
    }
    let provider: Provider = match server.put(&path, &request).await {
        // The certificate is for the key of a request, which is sealed after a restart of the server.
        Err(problem)
            if problem.field.as_deref() == Some("passphrase") && request.passphrase.is_none() =>
        {
            request.passphrase = Some(given().await?);
            server.put(&path, &request).await?
        }
        answer => answer?,
    };
    print::one(output, &provider, &details(&provider))
}

async fn servers_of(server: &ServerClient, output: Output, verb: ServerOf) -> anyhow::Result<()> {
    let provider: Provider = match verb {
        ServerOf::Add { name, address, dry_run } => {
            let (path, request) = (format!("providers/{name}/servers"), address_of(&address)?);
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &request).await?);
            }
            let provider: Provider = server.post(&path, &request).await?;
            let alias = &request.alias;
            print::say(format_args!("next: vmseal provider trust {name} --kms {alias}"));
            provider
        }
        ServerOf::Remove { name, kms, dry_run } => {
            let path = format!("providers/{name}/servers/{kms}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            server.delete(&path).await?;
            server.get(&format!("providers/{name}")).await?
        }
        ServerOf::Set { name, address, dry_run } => {
            let AddKmipServer { alias, host, port } = address_of(&address)?;
            let path = format!("providers/{name}/servers/{alias}");
            let request = SetKmipServer { host, port };
            if dry_run.dry_run {
                return plan::show(output, &server.try_put(&path, &request).await?);
            }
            server.put(&path, &request).await?
        }
        ServerOf::Move { name, kms, to, dry_run } => {
            let path = format!("providers/{name}/servers/{kms}/move");
            let request = MoveKmipServer { place: to };
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &request).await?);
            }
            server.post(&path, &request).await?
        }
    };
    print::one(output, &provider, &details(&provider))
}

/// Parses a server; its alias becomes a part of a request's path.
fn address_of(typed: &str) -> anyhow::Result<AddKmipServer> {
    let read = server_of(typed).and_then(|server| {
        check_name(&server.alias).with_context(|| format!("'{}'", server.alias))?;
        Ok(server)
    });
    Ok(read.map_err(|why| Ended::new(Exit::Usage, format!("{why:#}")))?)
}

async fn test(server: &ServerClient, output: Output, name: &str, key: bool) -> anyhow::Result<()> {
    let path = format!("providers/{name}/test");
    let tested: ProviderTest = server.post(&path, &TestProvider { key }).await?;
    if matches!(output, Output::Json | Output::Yaml) {
        print::whole(output, &tested)?;
    } else {
        for it in &tested.servers {
            let key = it.key.map_or("", said_of_key);
            print::words(&format!("{}: {}{key}", it.alias, words(&it.seen)))?;
        }
        if tested.replicate == Some(true) {
            print::words("the servers replicate")?;
        }
    }
    let bad = tested.servers.iter().filter(|it| it.seen.problem.is_some()).count();
    ensure!(bad == 0, "{bad} of {} servers cannot be used", tested.servers.len());
    ensure!(
        tested.replicate != Some(false),
        "the servers do not replicate: a key that one makes is not at the others"
    );
    Ok(())
}

fn said_of_key(key: KmipKeyTested) -> &'static str {
    match key {
        KmipKeyTested::Made => ", made, read and destroyed a key",
        KmipKeyTested::Read => ", has the key that the other one made",
        KmipKeyTested::Missing => ", does not have the key that the other one made",
        KmipKeyTested::OtherKey => ", has another key under the id of the one that was made",
    }
}

fn words(seen: &KmipSeen) -> String {
    match &seen.problem {
        Some(problem) => problem.to_string(),
        None => {
            let vendor = seen.vendor.as_deref().map(|it| format!(", {it}")).unwrap_or_default();
            format!("KMIP {}{vendor}", seen.version.as_deref().unwrap_or("?"))
        }
    }
}

async fn show(server: &ServerClient, output: Output, name: &str) -> anyhow::Result<()> {
    let provider: Provider = server.get(&format!("providers/{name}")).await?;
    print::one(output, &provider, &details(&provider))
}

/// What `provider show` adds to the list's columns.
pub fn details(provider: &Provider) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    let Some(KmipDetails { servers, client, next_key }) = &provider.kmip else { return lines };
    for server in servers {
        let seen = server.seen.as_ref().map_or_else(|| "not tried yet".to_owned(), words);
        lines.push((
            "SERVER",
            format!("{} at {} port {}: {seen}", server.alias, server.host, server.port),
        ));
        let trusted = match &server.trust {
            None => "nothing (vmseal provider trust)".to_owned(),
            Some(KmipTrust::Pinned { certificate }) => format!(
                "the certificate {} of {}, valid until {}",
                certificate.fingerprint, certificate.subject, certificate.not_after
            ),
            Some(KmipTrust::Authorities { certificates }) => {
                let names: Vec<_> = certificates
                    .iter()
                    .map(|it| {
                        format!("{} ({}, until {})", it.subject, it.fingerprint, it.not_after)
                    })
                    .collect();
                format!("what is signed by {}", names.join(", "))
            }
        };
        lines.push(("TRUSTED", format!("{}: {trusted}", server.alias)));
    }
    lines.push(match client {
        None => ("CLIENT", "no certificate yet (vmseal provider certificate)".to_owned()),
        Some(it) => (
            "CLIENT",
            format!(
                "{}, signed by {}, SHA-256 {}, valid until {}",
                it.subject, it.issuer, it.fingerprint, it.not_after
            ),
        ),
    });
    if *next_key {
        let text = "a new key waits for its certificate (vmseal provider certificate --import)";
        lines.push(("NEXT KEY", text.to_owned()));
    }
    lines
}

fn read_pem(file: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    std::fs::File::open(file)
        .and_then(|open| open.take(PEM_MAX as u64 + 1).read_to_string(&mut text))
        .with_context(|| format!("cannot read {}", file.display()))?;
    ensure!(text.len() <= PEM_MAX, "{} is larger than {PEM_MAX} bytes", file.display());
    ensure!(
        text.contains("-----BEGIN CERTIFICATE-----"),
        "{} holds no certificate",
        file.display()
    );
    Ok(text)
}

/// The private key in a PEM file, as DER.
fn read_key(file: &Path) -> anyhow::Result<SecretBytes> {
    let mut text = Zeroizing::new(String::with_capacity(PEM_MAX + 1));
    std::fs::File::open(file)
        .and_then(|open| open.take(PEM_MAX as u64).read_to_string(&mut text))
        .with_context(|| format!("cannot read {}", file.display()))?;
    key_of(&text).with_context(|| {
        format!(
            "{} holds no private key in PEM, PKCS #8, without a password (openssl pkcs8 -topk8 -nocrypt makes one)",
            file.display()
        )
    })
}

fn key_of(pem: &str) -> Option<SecretBytes> {
    let (_, rest) = pem.split_once("-----BEGIN PRIVATE KEY-----")?;
    let (body, _) = rest.split_once("-----END PRIVATE KEY-----")?;
    let mut base64 = Zeroizing::new(String::with_capacity(body.len()));
    base64.extend(body.chars().filter(|c| !c.is_whitespace()));
    let mut der = Zeroizing::new(STANDARD.decode(base64.as_bytes()).ok()?);
    SecretBytes::from_wiped(&mut der).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_parsed() {
        let read = |text| server_of(text).map(|it| (it.alias, it.host, it.port)).ok();
        let is = |alias: &str, host: &str, port| Some((alias.to_owned(), host.to_owned(), port));
        assert_eq!(read("a=kms.example.org"), is("a", "kms.example.org", 5696));
        assert_eq!(read("a=kms:1"), is("a", "kms", 1));
        assert_eq!(read("a=[::1]"), is("a", "::1", 5696));
        assert_eq!(read("a=[::1]:7"), is("a", "::1", 7));
        assert_eq!(read("a=fd00::1"), is("a", "fd00::1", 5696));
        for bad in ["kms", "=kms", "a=", "a=kms:", "a=kms:x", "a=kms:0", "a=kms:65536", "a=[::1]7"]
        {
            assert_eq!(read(bad), None, "{bad}");
        }
        assert!(servers(&[]).unwrap().is_none());
    }

    #[test]
    fn only_a_plain_pkcs8_key_is_read() {
        let pem = "-----BEGIN PRIVATE KEY-----\nAQID\nBA==\n-----END PRIVATE KEY-----\n";
        assert_eq!(key_of(pem).unwrap().expose(), [1, 2, 3, 4]);
        for bad in
            ["", "-----BEGIN PRIVATE KEY-----\nAQID\n", &pem.replace("PRIVATE", "EC PRIVATE")]
        {
            assert!(key_of(bad).is_none(), "{bad}");
        }
    }
}
