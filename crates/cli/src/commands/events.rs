//! Events.

use vmseal_api::client::ServerClient;
use vmseal_api::model::{Event, Page};

use crate::arguments::{Events, Output};
use crate::print;

/// How long the server holds a request for new events, in seconds.
const FOLLOW_WAIT: u32 = 20;

pub async fn run(server: &ServerClient, output: Output, options: &Events) -> anyhow::Result<()> {
    let events = server.all::<Event>("events").await?;
    if !options.follow {
        return print::list(output, &options.list, events);
    }
    let mut lines = print::Lines::new(output, &options.list);
    print::append(output, &mut lines, &events)?;
    let mut last = events.last().map_or(0, |event| event.sequence);
    loop {
        let path = format!("events?after={last}&wait_seconds={FOLLOW_WAIT}");
        let page: Page<Event> = server.get(&path).await?;
        if let Some(newest) = page.items.last() {
            last = newest.sequence;
            print::append(output, &mut lines, &page.items)?;
        }
    }
}
