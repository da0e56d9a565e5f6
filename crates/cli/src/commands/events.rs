//! Events.

use url::form_urlencoded::Serializer;
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Event, Page};

use super::reconnect::across;
use crate::arguments::{Events, Output};
use crate::print::{self, Lines};

/// How long the server holds a request for new events, in seconds.
const FOLLOW_WAIT: u32 = 20;

/// How many events `--follow` begins with, without `--last` and `--since`; as journalctl does.
const FOLLOW_LAST: u32 = 10;

pub async fn run(server: &ServerClient, output: Output, options: &Events) -> anyhow::Result<()> {
    let wanted = query(options);
    let follow = options.follow || options.list.watch;
    let last = options.last.or((follow && options.since.is_none()).then_some(FOLLOW_LAST));
    let read = async |after: Option<i64>, more: &str| -> Result<Page<Event>, _> {
        let after = after.map(|after| format!("&after={after}")).unwrap_or_default();
        server.get(&format!("events?{wanted}{after}{more}")).await
    };
    let mut page = match last {
        Some(last) => read(None, &format!("&last={last}")).await?,
        None => read(None, "").await?,
    };
    // Tables and CSV are printed page by page; a JSON or YAML array is one document.
    let whole = !follow && matches!(output, Output::Json | Output::Yaml);
    let mut lines = Lines::new(output, &options.list.columns);
    let (mut newest, mut all) = (0, Vec::new());
    loop {
        newest = page.items.last().map_or(newest, |event| event.sequence);
        // A table without a line looks as if something were missing.
        let none = newest == 0 && !follow && output == Output::Table;
        match whole {
            true => all.append(&mut page.items),
            false if none => print::say("no events"),
            false => print::append(output, &mut lines, &page.items)?,
        }
        if print::is_closed() || page.next.is_none() || last.is_some() {
            break;
        }
        page = read(Some(newest), "").await?;
    }
    if whole {
        return print::whole(output, &all);
    }
    let waiting = format!("&wait_seconds={FOLLOW_WAIT}");
    while follow && !print::is_closed() {
        let more = async || read(Some(newest), &waiting).await;
        let page = across(server, more).await?;
        if let Some(event) = page.items.last() {
            newest = event.sequence;
            print::append(output, &mut lines, &page.items)?;
        }
    }
    Ok(())
}

/// The query for the largest page of these events.
fn query(options: &Events) -> String {
    let mut query = Serializer::new(String::new());
    query.append_pair("limit", "1000");
    let since = options.since.map(|since| since.to_string());
    for (name, value) in [
        ("kind", &options.kind),
        ("target", &options.target),
        ("since", &since),
        ("request", &options.request),
    ] {
        if let Some(value) = value {
            query.append_pair(name, value);
        }
    }
    query.finish()
}
