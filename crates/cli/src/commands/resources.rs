//! Hosts, datastores, events and alarms.

use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::host::DatastoreLocation;
use vmseal_api::model::{Alarm, Datastore, Event, Host, JoinToken, Page};
use vmseal_api::request::AddDatastore;

use crate::arguments::{self, Events, Output};
use crate::print;

/// How long the server holds a request for new events, in seconds.
const FOLLOW_WAIT: u32 = 20;

pub async fn host(
    server: &ServerClient,
    output: Output,
    verb: arguments::Host,
) -> anyhow::Result<()> {
    match verb {
        arguments::Host::List => print::list(output, &server.all::<Host>("hosts").await?),
        arguments::Host::Show(of) => {
            let host: Host = server.get(&format!("hosts/{}", of.name)).await?;
            let mut more = vec![("ID", host.id.to_string())];
            if let Some(described) = &host.description {
                more.push(("ACCELERATOR BECAUSE", described.accelerator.reason.clone()));
                more.push(("QEMU", described.qemu.clone()));
                more.push((
                    "AES INSTRUCTIONS",
                    if described.aes_hardware { "yes" } else { "no" }.into(),
                ));
                more.extend(described.weaknesses.iter().map(|text| ("WEAKNESS", text.clone())));
            }
            print::one(output, &host, &more)
        }
        arguments::Host::Token => {
            let token: JoinToken = server.post("hosts/tokens", &Value::Null).await?;
            match output {
                Output::Json => print::json(&token),
                Output::Table => {
                    println!("{}", token.token);
                    eprintln!(
                        "valid once, until {:.0}: give it to `vmseal agent join`",
                        token.expires
                    );
                    Ok(())
                }
            }
        }
        arguments::Host::Remove(of) => Ok(server.delete(&format!("hosts/{}", of.name)).await?),
    }
}

pub async fn datastore(
    server: &ServerClient,
    output: Output,
    verb: arguments::Datastore,
) -> anyhow::Result<()> {
    match verb {
        arguments::Datastore::List => {
            print::list(output, &server.all::<Datastore>("datastores").await?)
        }
        arguments::Datastore::Show(of) => {
            let datastore: Datastore = server.get(&format!("datastores/{}", of.name)).await?;
            print::one(output, &datastore, &[("ID", datastore.id.to_string())])
        }
        arguments::Datastore::Add { name, host, path } => {
            let request = AddDatastore { name, host, location: DatastoreLocation::Dir { path } };
            let datastore: Datastore = server.post("datastores", &request).await?;
            print::one(output, &datastore, &[])
        }
        arguments::Datastore::Scan(of) => {
            let scan = server.get(&format!("datastores/{}/scan", of.name)).await?;
            crate::print_scan::scan(output, &scan)
        }
        arguments::Datastore::Remove(of) => {
            Ok(server.delete(&format!("datastores/{}", of.name)).await?)
        }
    }
}

pub async fn events(server: &ServerClient, output: Output, options: &Events) -> anyhow::Result<()> {
    let events = server.all::<Event>("events").await?;
    print::list(output, &events)?;
    if !options.follow {
        return Ok(());
    }
    let mut last = events.last().map_or(0, |event| event.sequence);
    loop {
        let path = format!("events?after={last}&wait_seconds={FOLLOW_WAIT}");
        let page: Page<Event> = server.get(&path).await?;
        if let Some(newest) = page.items.last() {
            last = newest.sequence;
            print::list(output, &page.items)?;
        }
    }
}

pub async fn alarms(server: &ServerClient, output: Output) -> anyhow::Result<()> {
    print::list(output, &server.all::<Alarm>("alarms").await?)
}
