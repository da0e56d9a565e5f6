//! The addresses that a guest says it has, by its agent. A guest answers when it likes, or never: a task of its own asks it,
//! and nothing waits for that.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use vmseal_api::nic::MacAddress;

use crate::hypervisor::guest_agent::GuestAgent;
use crate::hypervisor::network::addresses::{Said, is_link_local};
use crate::hypervisor::plug;
use crate::hypervisor::qmp::Qmp;

/// How long addresses count that a guest has said. One that has said none is asked at every check: it boots, and somebody may
/// wait for it.
const GOOD_FOR: Duration = Duration::from_secs(60);

/// How long they are shown where the guest does not answer any more.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(300);

/// See the module.
#[derive(Default)]
pub struct GuestAddresses {
    said: Vec<Said>,
    /// When it last said an address that others reach it at.
    said_at: Option<Instant>,
    /// When it last said any address.
    answered_at: Option<Instant>,
    asking: Option<Asking>,
}

/// A question that a guest has not answered yet. Dropped, it ends.
struct Asking(JoinHandle<Answer>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What comes of a question.
enum Answer {
    /// These, which may be none.
    Said(Vec<Said>),
    /// No program in the guest listens: it boots, or has no agent.
    NotThere,
    /// Nothing: what it said before stays.
    None,
}

impl GuestAddresses {
    /// What the guest said last.
    pub fn said(&self) -> &[Said] {
        &self.said
    }

    /// Whether it is time to ask.
    pub fn are_due(&self) -> bool {
        self.asking.is_none() && self.said_at.is_none_or(|then| then.elapsed() >= GOOD_FOR)
    }

    /// Begins to ask for the addresses of these cards.
    pub fn ask(&mut self, agent: GuestAgent, qmp: Arc<Qmp>, cards: Vec<MacAddress>) {
        self.begin(async move {
            // A guest without an agent would only be waited for.
            if !plug::guest_agent_listens(&qmp).await {
                return Answer::NotThere;
            }
            match agent.addresses(&cards).await {
                Ok(said) => Answer::Said(said),
                Err(problem) => {
                    // Each of many guests may have this at every check.
                    tracing::debug!(%problem, "a guest does not say its addresses");
                    Answer::None
                }
            }
        });
    }

    fn begin(&mut self, question: impl Future<Output = Answer> + Send + 'static) {
        self.asking = Some(Asking(tokio::spawn(question)));
    }

    /// Waits for what comes of a question. While there is none, this never returns.
    pub async fn answered(&mut self) {
        let Some(asking) = &mut self.asking else { return pending().await };
        let answer = (&mut asking.0).await.unwrap_or(Answer::None);
        self.asking = None;
        let said = match answer {
            Answer::Said(said) => said,
            Answer::NotThere => Vec::new(),
            // Another machine may have the address by now.
            Answer::None
                if self.answered_at.is_some_and(|then| then.elapsed() >= FORGOTTEN_AFTER) =>
            {
                Vec::new()
            }
            Answer::None => return,
        };
        let reached = said.iter().any(|said| !is_link_local(said.address));
        self.said_at = reached.then(Instant::now);
        self.answered_at = (!said.is_empty()).then(Instant::now);
        self.said = said;
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::{advance, timeout};

    use super::*;

    fn said(address: &str) -> Vec<Said> {
        let card = "52:54:00:12:34:56".parse().unwrap();
        vec![Said { card, address: address.parse().unwrap() }]
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_is_asked_until_it_has_said_an_address_and_again_later() {
        let mut known = GuestAddresses::default();
        for (answer, due) in [
            (Answer::NotThere, true),
            (Answer::Said(Vec::new()), true),
            (Answer::Said(said("fe80::1")), true),
            (Answer::Said(said("192.0.2.7")), false),
        ] {
            assert!(known.are_due());
            known.begin(async move { answer });
            assert!(!known.are_due(), "one question at a time");
            known.answered().await;
            assert_eq!(known.are_due(), due);
        }
        advance(GOOD_FOR).await;
        assert!(known.are_due());
        // What was said stays until the guest says something else, or its agent ends.
        known.begin(async { Answer::None });
        known.answered().await;
        assert_eq!((known.said(), known.are_due()), (&said("192.0.2.7")[..], true));
        advance(FORGOTTEN_AFTER).await;
        known.begin(async { Answer::None });
        known.answered().await;
        assert!(known.said().is_empty(), "it says nothing for minutes");
        known.begin(async { Answer::Said(said("192.0.2.7")) });
        known.answered().await;
        known.begin(async { Answer::NotThere });
        known.answered().await;
        assert!(known.said().is_empty());
        known.begin(async { Answer::Said(said("fe80::1")) });
        known.answered().await;
        advance(FORGOTTEN_AFTER).await;
        known.begin(async { Answer::None });
        known.answered().await;
        assert!(known.said().is_empty(), "addresses of one link are forgotten, too");
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_never_answers_is_not_waited_for() {
        let mut known = GuestAddresses::default();
        let (alive, gone) = oneshot::channel::<()>();
        known.begin(async move {
            let _alive = alive;
            pending().await
        });
        let waits = timeout(Duration::from_secs(3600), known.answered()).await;
        assert!(waits.is_err() && !known.are_due());
        // The question ends with the guest.
        drop(known);
        assert!(gone.await.is_err());
    }
}
