//! Hosts.

use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Host, JoinToken};

use super::{list, log_level, plan};
use crate::arguments::{self, Output};
use crate::print;

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
        arguments::Host::Remove { name, dry_run } => {
            let path = format!("hosts/{name}");
            if dry_run.dry_run {
                return plan::show(output, &server.try_delete(&path).await?);
            }
            Ok(server.delete(&path).await?)
        }
    }
}

/// What `host show` says beyond the columns.
fn details(host: &Host) -> Vec<(&'static str, String)> {
    let Some(described) = &host.description else { return Vec::new() };
    let because = ("ACCELERATOR BECAUSE", described.accelerator.reason.clone());
    let weaknesses = described.weaknesses.iter().map(|text| ("WEAKNESS", text.clone()));
    std::iter::once(because).chain(weaknesses).collect()
}
