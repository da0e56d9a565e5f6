//! Hosts.

use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Host, JoinToken};
use vmseal_api::request::ChangeHost;

use super::{list, log_level};
use crate::arguments::{self, Output};
use crate::print::{self, plan};

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Host,
) -> anyhow::Result<()> {
    match verb {
        arguments::Host::List(how) => list::run(server, output, &how, "hosts").await,
        arguments::Host::Show(of) => list::one(server, output, &of, "hosts", details).await,
        arguments::Host::Token { dry_run } => {
            if dry_run.dry_run {
                return plan::show(output, &server.try_post("hosts/tokens", &Value::Null).await?);
            }
            let token: JoinToken = server.post("hosts/tokens", &Value::Null).await?;
            if output != Output::Table {
                return print::one(output, &token, &[]);
            }
            print::line(&token.token)?;
            print::say(format_args!(
                "valid once, until {:.0}: give it to `vmseal agent join`",
                token.expires
            ));
            Ok(())
        }
        arguments::Host::LogLevel { name, levels } => {
            log_level::run(server, output, &format!("hosts/{name}/log-level"), levels).await
        }
        arguments::Host::Set { name, address, dry_run } => {
            let (path, request) = (format!("hosts/{name}"), ChangeHost { address });
            if dry_run.dry_run {
                return plan::show(output, &server.try_patch(&path, &request).await?);
            }
            let host: Host = server.patch(&path, &request).await?;
            print::one(output, &host, &details(&host))
        }
        arguments::Host::Remove { name, dry_run } => {
            let path = format!("hosts/{name}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            Ok(server.delete(&path).await?)
        }
    }
}

/// What `host show` adds to the columns.
fn details(host: &Host) -> Vec<(&'static str, String)> {
    let Some(described) = &host.description else { return Vec::new() };
    let because = ("ACCELERATOR BECAUSE", described.accelerator.reason.clone());
    let transfer = described.transfer_directories.iter();
    let transfer = transfer.map(|path| ("TRANSFER DIRECTORY", path.clone()));
    let weaknesses = described.weaknesses.iter().map(|text| ("WEAKNESS", text.clone()));
    std::iter::once(because).chain(transfer).chain(weaknesses).collect()
}
