//! Hosts.

use serde_json::Value;
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Host, JoinToken};
use vmseal_api::request::{ChangeHost, DrainHost, UndrainHost};
use vmseal_api::usage::HostRoom;

use super::{drain, list, log_level};
use crate::arguments::{self, Output};
use crate::print::{self, plan};
use crate::rows::column::Cell;

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
        arguments::Host::Drain { name, parallel, stop_others, rate, compress, dry_run, wait } => {
            let request = DrainHost { parallel: Some(parallel), stop_others, rate, compress };
            let path = format!("hosts/{name}/drain");
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &request).await?);
            }
            let begun: Host = server.post(&path, &request).await?;
            if wait.no_wait {
                return print::one(output, &begun, &details(&begun));
            }
            drain::wait(server, output, begun, wait.timeout).await
        }
        arguments::Host::Undrain { name, cancel, dry_run } => {
            let (path, request) = (format!("hosts/{name}/undrain"), UndrainHost { cancel });
            if dry_run.dry_run {
                return plan::show(output, &server.try_post(&path, &request).await?);
            }
            let host: Host = server.post(&path, &request).await?;
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
    let mut room = host.room.as_ref().map(room).unwrap_or_default();
    room.extend(host.drain.iter().flat_map(drain::details));
    let Some(described) = &host.description else { return room };
    let because = ("ACCELERATOR BECAUSE", described.accelerator.reason.clone());
    let transfer = described.transfer_directories.iter();
    let transfer = transfer.map(|path| ("TRANSFER DIRECTORY", path.clone()));
    let weaknesses = described.weaknesses.iter().map(|text| ("WEAKNESS", text.clone()));
    std::iter::once(because).chain(room).chain(transfer).chain(weaknesses).collect()
}

/// What is left of a host.
fn room(room: &HostRoom) -> Vec<(&'static str, String)> {
    let size = |bytes| Cell::Bytes(bytes).for_people();
    let mut lines = vec![
        ("VMS", format!("{}, of which {} run", room.vms, room.running)),
        ("VCPUS", format!("{} of VMs that run, {} of all", room.vcpus_running, room.vcpus)),
        (
            "GUEST MEMORY",
            format!("{} of VMs that run, {} of all", size(room.memory_running), size(room.memory)),
        ),
    ];
    lines.extend(room.memory_left.map(|left| ("MEMORY LEFT", size(left))));
    lines.extend(room.datastores.iter().map(|datastore| {
        let room = match datastore.usage {
            Some(usage) => format!("{} free of {}", size(usage.free), size(usage.capacity)),
            None => "not measured yet".to_owned(),
        };
        ("DATASTORE", format!("{}: {room}", datastore.name))
    }));
    lines
}
