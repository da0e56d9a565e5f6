//! This machine as a host: joined, connected, with a datastore.

use anyhow::Context;
use serde_json::Value;
use vmseal_agent::JoinOptions;
use vmseal_agent::host::identity::{Identity, IdentityError};
use vmseal_api::datastore::DatastoreLocation;
use vmseal_api::id::check_name;
use vmseal_api::model::{Connection, Datastore, Host, JoinToken};
use vmseal_api::request::AddDatastore;
use zeroize::Zeroizing;

use super::server::{START_POLL, START_TIMEOUT};
use super::{DATASTORE, Init, Standing, found};
use crate::exit::{Ended, Exit};

/// The name where the machine has none that can be used.
const FALLBACK: &str = "host1";

/// The host's name: the one that was given, or the machine's.
pub(super) fn name(given: Option<&str>) -> anyhow::Result<String> {
    if let Some(given) = given {
        check_name(given).map_err(|error| Ended::new(Exit::Usage, format!("--host: {error}")))?;
        return Ok(given.to_owned());
    }
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    Ok(name_from(own.trim()))
}

fn name_from(hostname: &str) -> String {
    let first = hostname.split('.').next().unwrap_or_default();
    if check_name(first).is_ok() { first.to_owned() } else { FALLBACK.to_owned() }
}

impl Init {
    /// Who this machine is to a server; none before it has joined.
    fn identity(&self) -> anyhow::Result<Option<Identity>> {
        match Identity::load(&self.options.places.state_dir) {
            Ok(identity) => Ok(Some(identity)),
            Err(IdentityError::None(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn look_at_join(&self) -> anyhow::Result<Standing> {
        let Some(identity) = self.identity()? else {
            let address = self.options.agent_listen;
            let what = format!("join this machine as host '{}', its agent at {address}", self.host);
            return Ok(Standing::ToDo(what));
        };
        let ours = std::fs::read_to_string(self.authority_file()).unwrap_or_default();
        if identity.authority.trim() != ours.trim() {
            let message = format!(
                "this machine is host '{}' of another server, {}: init is for a machine with a server of its own; remove the host there and {} here first",
                identity.name,
                identity.server,
                self.options.places.state_dir.display()
            );
            return Err(Ended::new(Exit::Conflict, message).into());
        }
        Ok(Standing::There(format!("this machine has joined as '{}'", identity.name)))
    }

    pub(super) async fn join(&mut self) -> anyhow::Result<String> {
        self.forget_half_joined().await?;
        let token: JoinToken = self.server()?.post("hosts/tokens", &Value::Null).await?;
        let joined = vmseal_agent::join(JoinOptions {
            replace: false,
            server: self.url.clone(),
            token: Zeroizing::new(token.token),
            name: self.host.clone(),
            address: Some(self.options.agent_listen.to_string()),
            state_dir: self.options.places.state_dir.clone(),
        })
        .await?;
        Ok(format!("this machine has joined as '{}'", self.host)
            + &format!(", its agent at {}", joined.address))
    }

    /// The server may have been told by a run that was cut short, and nothing kept here. Such a host has never had an
    /// agent, or has this machine's address.
    async fn forget_half_joined(&self) -> anyhow::Result<()> {
        let server = self.server()?;
        let path = format!("hosts/{}", self.host);
        let Some(known) = found::<Host>(server, &path).await? else { return Ok(()) };
        let ours =
            known.description.is_none() || known.address == self.options.agent_listen.to_string();
        if !ours || known.connection == Connection::Connected {
            let message = format!(
                "the server has a host '{}' already, at {}: give this machine another name (--host NAME)",
                known.name, known.address
            );
            return Err(Ended::new(Exit::Conflict, message).into());
        }
        Ok(server.delete(&path).await?)
    }

    /// This machine's host, as the server has it; none before it has joined.
    pub(super) async fn own_host(&self) -> anyhow::Result<Option<Host>> {
        let (Some(server), Some(identity)) = (&self.server, self.identity()?) else {
            return Ok(None);
        };
        Ok(found(server, &format!("hosts/{}", identity.host)).await?)
    }

    pub(super) async fn look_at_agent(&self) -> anyhow::Result<Standing> {
        let to_do = self.processes.agent_to_do()?;
        let how = self.processes.how();
        let start = || Standing::ToDo(format!("start it {how}, and wait until it is connected"));
        if self.server.is_none() {
            return Ok(start());
        }
        let Some(host) = self.own_host().await? else {
            if let Some(identity) = self.identity()? {
                let message = format!(
                    "the server does not know host '{}' any more: remove {} to join again",
                    identity.name,
                    self.options.places.state_dir.display()
                );
                return Err(Ended::new(Exit::Conflict, message).into());
            }
            return Ok(start());
        };
        Ok(match (host.connection, to_do) {
            (Connection::Connected, None) => {
                Standing::There(format!("host '{}' is connected", host.name))
            }
            (_, Some(what)) => Standing::ToDo(what),
            (Connection::Disconnected, None) => start(),
        })
    }

    pub(super) async fn start_agent(&mut self) -> anyhow::Result<String> {
        let connected = |host: &Host| host.connection == Connection::Connected;
        let runs = self.own_host().await?.as_ref().is_some_and(connected);
        self.processes.start_agent(runs).await?;
        let begun = tokio::time::Instant::now();
        loop {
            if let Some(host) = self.own_host().await?.filter(connected) {
                let kind = host.description.map(|it| it.accelerator.kind);
                let kind = kind.map(|kind| crate::rows::word(&kind)).unwrap_or_default();
                return Ok(format!("host '{}' is connected; guests run under {kind}", host.name));
            }
            self.processes.check_agent()?;
            anyhow::ensure!(
                begun.elapsed() < START_TIMEOUT,
                "it is not connected after {START_TIMEOUT:?}; {}",
                self.processes.where_logs_are()
            );
            tokio::time::sleep(START_POLL).await;
        }
    }

    pub(super) async fn look_at_datastore(&self) -> anyhow::Result<Standing> {
        let path = &self.options.datastore;
        let make = Standing::ToDo(format!("add {} as datastore '{DATASTORE}'", path.display()));
        let Some(server) = &self.server else { return Ok(make) };
        let Some(host) = self.own_host().await? else { return Ok(make) };
        let known = format!("datastores/{}:{DATASTORE}", host.name);
        let Some(known) = found::<Datastore>(server, &known).await? else { return Ok(make) };
        let here = known.hosts.iter().find(|on| on.host == host.name);
        let here = here.context("the host does not have its own datastore")?;
        let is_at = here.location.path();
        if is_at != path {
            let message = format!(
                "the datastore '{DATASTORE}' is at {}, not at {}: give --datastore {}, or add the other by vmseal datastore add",
                is_at.display(),
                path.display(),
                is_at.display()
            );
            return Err(Ended::new(Exit::Conflict, message).into());
        }
        Ok(Standing::There(format!("'{DATASTORE}' at {}", path.display())))
    }

    pub(super) async fn add_datastore(&mut self) -> anyhow::Result<String> {
        let host = self.own_host().await?.context("the host has not joined")?;
        let path = self.options.datastore.clone();
        let (name, location) = (DATASTORE.to_owned(), DatastoreLocation::Dir { path });
        let request = AddDatastore {
            name,
            host: host.name,
            location,
            existing: false,
            key: None,
            osd_encryption: None,
            create_for_policy: None,
        };
        let datastore: Datastore = self.server()?.post("datastores", &request).await?;
        let free = datastore
            .usage
            .map(|usage| format!(", {} free", bytesize::ByteSize(usage.free).display().iec()));
        let path = self.options.datastore.display();
        Ok(format!("'{DATASTORE}' at {path}{}", free.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_named_after_itself_where_that_is_a_name() {
        assert_eq!(name_from("node7.example.org"), "node7");
        assert_eq!(name_from("node 7"), FALLBACK);
        assert_eq!(name_from(""), FALLBACK);
        assert!(name(Some("a b")).is_err());
    }
}
