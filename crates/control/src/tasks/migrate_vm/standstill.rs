//! How long a guest stood still after its memory was sent, as its hosts say it.
//!
//! ```text
//!  source       all is sent ◄─────────── so long ago ───────────── asked, answers
//!  server                                     commit answered ─► asks both
//!  destination                goes on ◄─────── so long ago ─────── asked, answers
//! ```
//! Each host measures by its own clock how long ago that was, and the server adds and subtracts by its own: clocks of two hosts are not
//! compared. The hosts are asked when the guest runs, so that it does not wait for this. The ways of these questions and answers count as
//! standstill: what is told is rather too long than too short.

use std::time::{Duration, Instant};

use tokio::time::timeout;
use vmseal_api::host::JobStatus;
use vmseal_api::id::HostId;

use super::agent_of;
use crate::tasks::run::Run;

/// How long a host may take to answer. The guest runs, and the inventory is to say where: a figure is not worth a longer wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What the server has heard, and when by its own clock.
struct Heard {
    /// When it had heard that the guest goes on.
    committed: Instant,
    /// When it asked the source, after that.
    asked: Instant,
    /// How long ago all was sent when the source answered.
    all_sent: Duration,
    /// When the guest went on at the latest, as the destination says; none where it does not.
    went_on: Option<Instant>,
}

impl Heard {
    fn standstill(&self) -> Duration {
        let went_on = self.went_on.map_or(self.committed, |then| then.min(self.committed));
        self.all_sent.saturating_sub(self.asked.saturating_duration_since(went_on))
    }
}

/// Asks both hosts of a task, whose guest goes on as the server had heard when it was `committed`. A destination of another control plane
/// cannot be asked. None where the source does not say it: its agent has restarted, is of an earlier version, or does not answer.
pub(super) async fn asked(
    run: &Run<'_>,
    (from, to): (HostId, Option<HostId>),
    committed: Instant,
) -> Option<Duration> {
    let asked = Instant::now();
    let went_on = async {
        let ago = job_at(run, to?).await?.went_on_milliseconds?;
        Instant::now().checked_sub(Duration::from_millis(ago))
    };
    let (source, went_on) = tokio::join!(job_at(run, from), went_on);
    let all_sent = Duration::from_millis(source?.all_sent_milliseconds?);
    Some(Heard { committed, asked, all_sent, went_on }.standstill())
}

/// The status of a task's job at a host, if that says it.
async fn job_at(run: &Run<'_>, host: HostId) -> Option<JobStatus> {
    let agent = agent_of(run, host).ok()?;
    timeout(ANSWER_TIMEOUT, agent.job(run.vm_id, run.task.id)).await.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standstill_is_what_both_hosts_say_by_the_clock_of_the_server() {
        let (begin, ms) = (Instant::now(), Duration::from_millis);
        let at = |milliseconds| begin + ms(milliseconds);
        // All is sent at 0, and the guest goes on at 40. The server hears that at 43, and asks at 45; the source answers at 50.
        let heard = |went_on: Option<u64>| {
            let went_on = went_on.map(at);
            Heard { committed: at(43), asked: at(45), all_sent: ms(50), went_on }.standstill()
        };
        assert_eq!(heard(Some(40)), ms(45), "5 ms are the way of the question");
        assert_eq!(heard(Some(42)), ms(47), "the way of the destination's answer as well");
        assert_eq!(heard(None), ms(48), "an earlier agent: until the server had heard it");
        assert_eq!(heard(Some(60)), ms(48), "an answer that came late says no more than the first");
    }

    #[test]
    fn the_time_until_the_server_hears_that_all_is_sent_counts() {
        // Nobody had told the server for 30 ms that all was sent. It had the guest go on within 4 ms.
        let (begin, ms) = (Instant::now(), Duration::from_millis);
        let committed = begin + ms(34);
        let heard = Heard { committed, asked: committed, all_sent: ms(34), went_on: None };
        assert_eq!(heard.standstill(), ms(34));
    }

    #[test]
    fn a_guest_that_went_on_before_all_was_sent_did_not_stand_still() {
        let begin = Instant::now();
        let (committed, asked) = (begin + Duration::from_secs(9), begin + Duration::from_secs(10));
        let (all_sent, went_on) = (Duration::from_secs(1), Some(begin));
        let heard = Heard { committed, asked, all_sent, went_on };
        assert_eq!(heard.standstill(), Duration::ZERO, "a host says what cannot be");
    }
}
