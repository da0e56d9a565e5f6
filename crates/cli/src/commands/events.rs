//! Events and alarms.

use vmseal_api::client::ServerClient;
use vmseal_api::model::{Alarm, Event, Page};

use crate::arguments::{Events, Output};
use crate::print;

/// How long the server holds a request for new events, in seconds.
const FOLLOW_WAIT: u32 = 20;

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
