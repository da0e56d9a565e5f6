//! Events.

use url::form_urlencoded::Serializer;
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Event, Page};

use crate::arguments::{Events, Output};
use crate::print;

/// How long the server holds a request for new events, in seconds.
const FOLLOW_WAIT: u32 = 20;

pub async fn run(server: &ServerClient, output: Output, options: &Events) -> anyhow::Result<()> {
    let wanted = query(options);
    let events = server.all::<Event>(&format!("events?{wanted}")).await?;
    if !options.follow && !options.list.watch {
        return print::list(output, &options.list.columns, events);
    }
    let mut lines = print::Lines::new(output, &options.list.columns);
    print::append(output, &mut lines, &events)?;
    let mut last = events.last().map_or(0, |event| event.sequence);
    while !print::is_closed() {
        let path = format!("events?{wanted}&after={last}&wait_seconds={FOLLOW_WAIT}");
        let page: Page<Event> = server.get(&path).await?;
        if let Some(newest) = page.items.last() {
            last = newest.sequence;
            print::append(output, &mut lines, &page.items)?;
        }
    }
    Ok(())
}

/// The largest page, and what is wanted.
fn query(options: &Events) -> String {
    let mut query = Serializer::new(String::new());
    query.append_pair("limit", "1000");
    if let Some(kind) = &options.kind {
        query.append_pair("kind", kind);
    }
    if let Some(target) = &options.target {
        query.append_pair("target", target);
    }
    if let Some(since) = &options.since {
        query.append_pair("since", &since.to_string());
    }
    query.finish()
}
