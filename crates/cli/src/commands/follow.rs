//! Waiting for changes on the server, without polling: it answers when something has changed.

use std::time::Duration;

use vmseal_api::client::ServerClient;
use vmseal_api::model;
use vmseal_api::problem::Problem;

/// How long the server holds a request for changes, in seconds; below the usual idle timeouts.
const WAIT: u32 = 20;

/// The least time between two requests, so that many changes at once are read once.
const PAUSE: Duration = Duration::from_millis(100);

/// Changes on the server. None is missed if this begins before the first read.
pub struct Changes<'a> {
    server: &'a ServerClient,
    kind: &'static str,
    number: u64,
}

impl<'a> Changes<'a> {
    /// Those of one kind, as the API names it.
    pub async fn begin(server: &'a ServerClient, kind: &'static str) -> Result<Self, Problem> {
        let now: model::Changes = server.get(&format!("changes?kinds={kind}")).await?;
        Ok(Self { server, kind, number: now.change })
    }

    /// Waits until something of this kind has changed.
    pub async fn next(&mut self) -> Result<(), Problem> {
        tokio::time::sleep(PAUSE).await;
        loop {
            let path =
                format!("changes?kinds={}&after={}&wait_seconds={WAIT}", self.kind, self.number);
            let now: model::Changes = self.server.get(&path).await?;
            if now.change != self.number {
                self.number = now.change;
                return Ok(());
            }
        }
    }
}
