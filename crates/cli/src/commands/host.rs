//! Hosts.

use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Host, JoinToken};

use super::list;
use crate::arguments::{self, Output};
use crate::print;

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Host,
) -> anyhow::Result<()> {
    match verb {
        arguments::Host::List(how) => list::run(server, output, &how, "hosts").await,

        arguments::Host::Show(of) => {
            let host: Host = server.get(&format!("hosts/{}", of.name)).await?;
            let mut more = Vec::new();
            if let Some(described) = &host.description {
                more.push(("ACCELERATOR BECAUSE", described.accelerator.reason.clone()));
                more.extend(described.weaknesses.iter().map(|text| ("WEAKNESS", text.clone())));
            }
            print::one(output, &host, &more)
        }
        arguments::Host::Token => {
            let token: JoinToken = server.post("hosts/tokens", &Value::Null).await?;
            if output != Output::Table {
                return print::one(output, &token, &[]);
            }
            print::line(&token.token);
            eprintln!("valid once, until {:.0}: give it to `vmseal agent join`", token.expires);
            Ok(())
        }
        arguments::Host::Remove(of) => Ok(server.delete(&format!("hosts/{}", of.name)).await?),
    }
}
