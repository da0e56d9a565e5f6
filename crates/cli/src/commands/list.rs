//! Lists of resources and single ones, once or watched.

use serde::de::DeserializeOwned;
use vmseal_api::client::ServerClient;
use vmseal_api::model::Vm;
use vmseal_api::problem::{ErrorCode, Problem};

use super::follow::Changes;
use super::reconnect::across;
use crate::arguments::{List, Output, Show};
use crate::print::{self, Lines};
use crate::rows::{Change, Row, differences};

/// The lines about a resource that follow its columns.
type Details<T> = fn(&T) -> Vec<(&'static str, String)>;

/// Prints the list at `path` of the API; with `--watch`, then prints its changes.
pub async fn run<T: Row + DeserializeOwned>(
    server: &ServerClient,
    output: Output,
    how: &List<T>,
    path: &str,
) -> anyhow::Result<()> {
    read_with(server, output, how, kind_of(path), async || server.all(path).await).await
}

/// The same for a list that `read` fetches.
pub async fn read_with<T: Row>(
    server: &ServerClient,
    output: Output,
    how: &List<T>,
    kind: &'static str,
    mut read: impl AsyncFnMut() -> Result<Vec<T>, Problem>,
) -> anyhow::Result<()> {
    if !how.watch {
        return print::list(output, &how.columns, read().await?);
    }
    let mut lines = Lines::new(output, &how.columns);
    let mut changes = Changes::begin(server, kind).await?;
    let mut before: Option<Vec<T>> = None;
    loop {
        let mut now = across(server, &mut read).await?;
        now.sort_by(T::order);
        print::changes(output, &mut lines, &differences(before.as_deref(), &now))?;
        if print::is_closed() {
            return Ok(());
        }
        before = Some(now);
        across(server, async || changes.next().await).await?;
    }
}

/// The same for what VMs have, such as disks: of one VM, or of all.
pub async fn parts_of_vms<T: Row, I: Iterator<Item = T>>(
    server: &ServerClient,
    output: Output,
    how: &List<T>,
    vm: Option<&str>,
    parts_of: fn(Vm) -> I,
) -> anyhow::Result<()> {
    let mut found = false;
    read_with(server, output, how, "vm", async || {
        let vms = match vm {
            None => server.all::<Vm>("vms").await?,
            Some(vm) => match server.get::<Vm>(&format!("vms/{vm}")).await {
                Ok(vm) => vec![vm],
                // Deleted meanwhile, with all that it had.
                Err(problem) if found && problem.code == ErrorCode::NotFound => Vec::new(),
                Err(problem) => return Err(problem),
            },
        };
        found = true;
        Ok(vms.into_iter().flat_map(parts_of).collect())
    })
    .await
}

/// Prints the resource `how` names among those at `path`; with `--watch` a line for it now, and for every change
/// until it is gone.
pub async fn one<T: Row + DeserializeOwned>(
    server: &ServerClient,
    output: Output,
    how: &Show,
    path: &str,
    details: Details<T>,
) -> anyhow::Result<()> {
    let path = format!("{path}/{}", how.name);
    let kind = kind_of(&path);
    one_with(server, output, how.watch, details, kind, async || server.get(&path).await).await
}

/// The kind of change that a watch of this path waits for; disks and bitmaps change with their VM.
fn kind_of(path: &str) -> &'static str {
    match path.split(['/', '?']).next() {
        Some("hosts") => "host",
        Some("datastores") => "datastore",
        Some("providers") => "provider",
        Some("policies") => "policy",
        Some("tasks") => "task",
        Some("alarms") => "alarm",
        // Each change of them is an event.
        Some("remotes") => "event",
        _ => "vm",
    }
}

/// The same for a resource that `read` fetches.
pub async fn one_with<T: Row>(
    server: &ServerClient,
    output: Output,
    watch: bool,
    details: Details<T>,
    kind: &'static str,
    mut read: impl AsyncFnMut() -> Result<T, Problem>,
) -> anyhow::Result<()> {
    if !watch {
        let item = read().await?;
        return print::one(output, &item, &details(&item));
    }
    let mut lines = Lines::usual(output);
    let mut changes = Changes::begin(server, kind).await?;
    let mut before: Option<Vec<T>> = None;
    loop {
        let now = match across(server, &mut read).await {
            Ok(item) => vec![item],
            Err(problem) if problem.code == ErrorCode::NotFound && before.is_some() => Vec::new(),
            Err(problem) => return Err(problem.into()),
        };
        let news = differences(before.as_deref(), &now);
        print::changes(output, &mut lines, &news)?;
        if print::is_closed() || news.iter().any(|(change, _)| *change == Change::Removed) {
            return Ok(());
        }
        before = Some(now);
        across(server, async || changes.next().await).await?;
    }
}
