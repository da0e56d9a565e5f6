//! Other control planes.

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, bail};
use vmseal_api::client::ServerClient;
use vmseal_api::kmip::Certificate;
use vmseal_api::model::About;
use vmseal_api::remote::{AddRemote, LookAtRemote, Remote, RemoteChecked, RemoteShown};
use vmseal_secret::SecretBytes;

use super::list;
use crate::arguments::{self, Output};
use crate::exit::{Ended, Exit};
use crate::passphrase::{self, Prompt};
use crate::print::{self, plan};

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Remote,
) -> anyhow::Result<()> {
    match verb {
        arguments::Remote::List(how) => list::run(server, output, &how, "remotes").await,
        arguments::Remote::Show(of) => {
            list::one::<Remote>(server, output, &of, "remotes", |_| Vec::new()).await
        }
        arguments::Remote::Add { name, url, fingerprint, token, dry_run } => {
            let fingerprint = match fingerprint {
                Some(fingerprint) => fingerprint,
                None => {
                    let look = LookAtRemote { url: url.clone() };
                    let shown: RemoteShown = server.post("remote-certificate", &look).await?;
                    confirmed(&url, &shown.certificate)?
                }
            };
            let token = access_token(token.as_deref())?;
            let about: About = server.get("about").await?;
            let token = passphrase::seal(&token, &name, &about.passphrase_box)?;
            let request = AddRemote { name, url, fingerprint, token };
            if dry_run.dry_run {
                return plan::show(output, &server.try_post("remotes", &request).await?);
            }
            let remote: Remote = server.post("remotes", &request).await?;
            print::one(output, &remote, &[])
        }
        arguments::Remote::Check { name } => {
            let checked: RemoteChecked = server.get(&format!("remotes/{name}/check")).await?;
            match output {
                Output::Json | Output::Yaml => print::whole(output, &checked),
                Output::Table | Output::Csv => {
                    let takes = if checked.arrivals { "takes" } else { "does not take" };
                    print::line(&format!(
                        "'{name}' is vmseal {}, and {takes} VMs of other control planes",
                        checked.vmseal
                    ))
                }
            }
        }
        arguments::Remote::Remove { name, force, dry_run } => {
            let path = format!("remotes/{name}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            let path = if force { format!("{path}?force=true") } else { path };
            Ok(server.delete(&path).await?)
        }
    }
}

/// Shows a certificate, and asks whether it is the right one; gives its fingerprint.
fn confirmed(url: &str, certificate: &Certificate) -> anyhow::Result<String> {
    print::say(format_args!("The authority of {url} shows this certificate:"));
    for (head, text) in [
        ("SHA-256", certificate.fingerprint.as_str()),
        ("subject", &certificate.subject),
        ("valid from", &certificate.not_before.to_string()),
        ("valid until", &certificate.not_after.to_string()),
    ] {
        print::say(format_args!("  {head:<12} {text}"));
    }
    if !std::io::stdin().is_terminal() {
        let message = "there is no terminal to confirm it: give --fingerprint";
        return Err(Ended::new(Exit::Usage, message).into());
    }
    if !super::confirm::says_yes("Compare it with ca.pem of the other server. Trust it")? {
        bail!("nothing was added");
    }
    Ok(certificate.fingerprint.clone())
}

/// The access token of a user there.
fn access_token(file: Option<&Path>) -> anyhow::Result<SecretBytes> {
    match file {
        Some(file) => passphrase::from_file(file)
            .with_context(|| format!("the token file {}", file.display())),
        None => {
            let what = "Access token of a user there";
            passphrase::ask(what, Prompt::Once, "--remote-token-file")
        }
    }
}
