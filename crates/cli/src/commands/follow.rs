//! Waiting for changes on the server, without polling: it answers when something has changed.

use std::time::{Duration, Instant};

use vmseal_api::client::ServerClient;
use vmseal_api::model;
use vmseal_api::problem::Problem;

/// How long the server holds a request for changes, in seconds; below the usual idle timeouts.
const WAIT: u32 = 20;

/// The longest pause before a request, so that many changes at once are read once.
const LONGEST: Duration = Duration::from_millis(100);

/// The shortest one, and the part of the time since the first request that a pause has: so the end of what takes half a second is
/// seen 30 ms later at most.
const SHORTEST: Duration = Duration::from_millis(5);
const PART: u32 = 16;

/// Changes on the server. None is missed if this begins before the first read.
pub struct Changes<'a> {
    server: &'a ServerClient,
    kind: &'static str,
    number: u64,
    begun: Instant,
}

impl<'a> Changes<'a> {
    /// Those of one kind, as the API names it.
    pub async fn begin(server: &'a ServerClient, kind: &'static str) -> Result<Self, Problem> {
        let now: model::Changes = server.get(&format!("changes?kinds={kind}")).await?;
        Ok(Self { server, kind, number: now.change, begun: Instant::now() })
    }

    /// Waits until something of this kind has changed.
    pub async fn next(&mut self) -> Result<(), Problem> {
        tokio::time::sleep((self.begun.elapsed() / PART).clamp(SHORTEST, LONGEST)).await;
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
