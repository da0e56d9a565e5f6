//! The thawing of file systems that a guest has frozen for a snapshot, where that was not done at once: the agent ended before it, or the
//! guest did not answer. A task of its own asks the guest, and nothing waits for that. It is tried again until the guest says that
//! nothing is frozen.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use vmseal_api::host::{Notice, NoticeCode, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};

use super::internal;
use crate::hypervisor::guest_agent::GuestAgent;
use crate::hypervisor::plug;
use crate::hypervisor::qmp::Qmp;

/// The pause after the first attempt that failed; it doubles after each. The owner looks every ten seconds whether it is over.
const FIRST_PAUSE: Duration = Duration::from_secs(5);

/// The longest pause between attempts: a guest that answers again writes nothing until the next one.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Default)]
pub struct Thawing {
    attempt: Option<Attempt>,
    /// Why the last attempt failed; none before the first failure.
    failed: Option<Failed>,
}

/// An attempt under way. Dropped, it ends.
struct Attempt(JoinHandle<Result<(), Problem>>);

impl Drop for Attempt {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Failed {
    why: String,
    at: Instant,
    /// How long the next attempt waits.
    pause: Duration,
}

impl Thawing {
    /// Whether it is time to try it.
    pub fn is_due(&self) -> bool {
        self.attempt.is_none()
            && self.failed.as_ref().is_none_or(|failed| failed.at.elapsed() >= failed.pause)
    }

    /// Begins to thaw the guest's file systems.
    pub fn thaw(&mut self, agent: GuestAgent, qmp: Arc<Qmp>) {
        self.begin(async move {
            // One without an agent would only be waited for.
            if !plug::guest_agent_listens(&qmp).await {
                let what = "no guest agent runs in the guest";
                return Err(Problem::new(ErrorCode::Unreachable, what));
            }
            agent.thaw().await.map(drop)
        });
    }

    fn begin(&mut self, attempt: impl Future<Output = Result<(), Problem>> + Send + 'static) {
        self.attempt = Some(Attempt(tokio::spawn(attempt)));
    }

    /// Ends the attempt under way, if there is one.
    pub fn stop(&mut self) {
        self.attempt = None;
    }

    /// Waits until an attempt has ended. While there is none, this never returns.
    pub async fn ended(&mut self) -> Result<(), Problem> {
        let Some(attempt) = &mut self.attempt else { return pending().await };
        let ended = (&mut attempt.0).await.unwrap_or_else(|error| Err(internal(error)));
        self.attempt = None;
        ended
    }

    /// Notes that an attempt has failed.
    pub fn failed(&mut self, why: &Problem) {
        let before = self.failed.take();
        let pause = before.map_or(FIRST_PAUSE, |before| (before.pause * 2).min(PAUSE_MAX));
        self.failed = Some(Failed { why: why.detail.clone(), at: Instant::now(), pause });
    }

    /// The notice for operators of a guest that may be frozen since then.
    pub fn notice(&self, spec: &VmSpec, since: Timestamp) -> Option<Notice> {
        let why = &self.failed.as_ref()?.why;
        let name = &spec.name;
        let detail = format!(
            "the guest of VM '{name}' may have its file systems frozen since {since:.0}, for a snapshot, and they could not be thawed: {why}. What writes there waits. It is tried again and again. Thaw them (vmseal vm guest fsthaw {name}, or fsfreeze --unfreeze in the guest), or reset the guest (vmseal vm reset {name})"
        );
        Some(Notice { code: NoticeCode::GuestFrozen, disk: None, detail })
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::{advance, timeout};

    use super::*;
    use crate::process::run_dir::tests::spec;

    fn refused() -> Problem {
        Problem::new(ErrorCode::Unreachable, "nobody answers")
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_tried_again_after_pauses_that_stay_short_and_told_from_the_first_failure_on() {
        let mut thawing = Thawing::default();
        let mut pause = FIRST_PAUSE;
        for number in 0..8 {
            assert!(thawing.is_due(), "{number}");
            assert_eq!(thawing.notice(&spec(), Timestamp::UNIX_EPOCH).is_some(), number > 0);
            thawing.begin(async { Err(refused()) });
            assert!(!thawing.is_due(), "one attempt at a time");
            let ended = thawing.ended().await;
            thawing.failed(&ended.unwrap_err());
            assert!(!thawing.is_due(), "{number}");
            advance(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        let told = thawing.notice(&spec(), Timestamp::UNIX_EPOCH).unwrap();
        assert_eq!(told.code, NoticeCode::GuestFrozen);
        for word in ["nobody answers", "1970-01-01", "vmseal vm guest fsthaw"] {
            assert!(told.detail.contains(word), "{}", told.detail);
        }
        thawing.begin(async { Ok(()) });
        thawing.ended().await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_never_answers_is_not_waited_for() {
        for stops in [true, false] {
            let mut thawing = Thawing::default();
            let (alive, gone) = oneshot::channel::<()>();
            thawing.begin(async move {
                let _alive = alive;
                pending().await
            });
            let waits = timeout(Duration::from_secs(3600), thawing.ended()).await;
            assert!(waits.is_err() && !thawing.is_due());
            match stops {
                true => {
                    thawing.stop();
                    assert!(thawing.is_due());
                }
                false => drop(thawing),
            }
            assert!(gone.await.is_err(), "the attempt goes on");
        }
    }
}
