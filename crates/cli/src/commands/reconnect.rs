//! A server that is restarted while somebody waits: it is asked until it answers again.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use vmseal_api::client::ServerClient;
use vmseal_api::model::Changes;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::print;

/// How long, and how often, a server that does not answer is asked.
#[derive(Clone, Copy)]
pub struct Patience {
    /// How long in all.
    pub total: Duration,
    /// Before the second question; twice as long before each further one.
    pub first: Duration,
    /// The longest between two.
    pub longest: Duration,
}

/// Enough for a restart and for the boot of a machine in a data centre's slower half.
pub const USUAL: Patience = Patience {
    total: Duration::from_secs(120),
    first: Duration::from_millis(250),
    longest: Duration::from_secs(5),
};

/// Asks a server that has answered before, across its restarts. Says that it is away, and back.
///
/// # Errors
/// What the server answers; the last problem of one that does not come back.
pub async fn across<T>(
    server: &ServerClient,
    mut ask: impl AsyncFnMut() -> Result<T, Problem>,
) -> Result<T, Problem> {
    loop {
        match ask().await {
            Err(problem) if may_pass(&problem) => {
                print::say(format_args!("{problem}: asking again for {}", within()));
                until_answer(USUAL, problem, async || answers(server).await).await?;
                print::say("the server answers again");
            }
            told => return told,
        }
    }
}

/// Asks what a host answers through the server: where that has been away, the question itself is asked until it is
/// answered, as a server that is back says nothing of a host. Says that one of them is away, and back.
///
/// # Errors
/// What is answered; the last problem where it does not pass.
pub async fn asked_again<T>(ask: impl AsyncFn() -> Result<T, Problem>) -> Result<T, Problem> {
    let lost = match ask().await {
        Err(problem) if may_pass(&problem) => problem,
        told => return told,
    };
    print::say(format_args!("{lost}: asking again for {}", within()));
    let mut told = None;
    let again = async || {
        told = Some(ask().await?);
        Ok(())
    };
    until_answer(USUAL, lost.clone(), again).await?;
    print::say("there is an answer again");
    told.ok_or(lost)
}

/// Whether the server answers.
pub async fn answers(server: &ServerClient) -> Result<(), Problem> {
    server.get::<Changes>("changes").await.map(drop)
}

/// How long a server that is away is asked, for people.
pub fn within() -> String {
    format!("{}m", USUAL.total.as_secs() / 60)
}

/// Whether whoever met this problem may meet a server that answers in a while.
pub fn may_pass(problem: &Problem) -> bool {
    matches!(problem.code, ErrorCode::Unreachable | ErrorCode::TimedOut)
}

/// Asks until there is an answer; `lost` is why it was not there.
///
/// # Errors
/// The last problem, when patience is over or it is not one that passes.
pub async fn until_answer(
    patience: Patience,
    lost: Problem,
    mut ask: impl AsyncFnMut() -> Result<(), Problem>,
) -> Result<(), Problem> {
    let over = Instant::now() + patience.total;
    let (mut last, mut pause) = (lost, patience.first);
    while may_pass(&last) && Instant::now() < over {
        sleep(pause.min(over - Instant::now())).await;
        pause = (pause * 2).min(patience.longest);
        let left = over.saturating_duration_since(Instant::now()).max(patience.first);
        match timeout(left, ask()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(problem)) => last = problem,
            // What the last answer said is as true.
            Err(_) => {}
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Patience = Patience {
        total: Duration::from_millis(300),
        first: Duration::from_millis(10),
        longest: Duration::from_millis(40),
    };

    fn away() -> Problem {
        Problem::new(ErrorCode::Unreachable, "nobody is there")
    }

    #[tokio::test]
    async fn a_server_that_comes_back_is_found_and_one_that_does_not_is_given_up() {
        let mut asked = 0;
        let back = until_answer(SHORT, away(), async || {
            asked += 1;
            if asked < 4 { Err(away()) } else { Ok(()) }
        });
        back.await.unwrap();
        assert_eq!(asked, 4);

        let (began, mut asked) = (Instant::now(), 0);
        let never = until_answer(SHORT, away(), async || {
            asked += 1;
            Err(away())
        });
        assert_eq!(never.await.unwrap_err().code, ErrorCode::Unreachable);
        assert!(began.elapsed() >= SHORT.total, "{:?}", began.elapsed());
        // Not in a busy loop: at 10, 30, 70, and every 40 milliseconds from then on.
        assert!((4..=10).contains(&asked), "it was asked {asked} times");

        let began = Instant::now();
        let silent = until_answer(SHORT, away(), async || std::future::pending().await);
        assert!(silent.await.is_err());
        assert!(began.elapsed() < SHORT.total * 3, "{:?}", began.elapsed());
    }

    /// The server answers all the while: it is the host that does not.
    #[tokio::test]
    async fn a_question_is_asked_again_until_it_is_answered_or_refused() {
        for refusal in [None, Some(ErrorCode::WrongState)] {
            let asked = std::cell::Cell::new(0);
            let told = asked_again(async || {
                asked.set(asked.get() + 1);
                match (asked.get(), refusal) {
                    (1, _) => Err(away()),
                    (_, Some(code)) => Err(Problem::new(code, "its VM is off")),
                    (number, None) => Ok(number),
                }
            });
            assert_eq!(told.await.map_err(|problem| problem.code), refusal.map_or(Ok(2), Err));
            assert_eq!(asked.get(), 2);
        }
    }

    #[tokio::test]
    async fn what_does_not_pass_is_not_waited_for() {
        let mut asked = 0;
        let refused = until_answer(SHORT, away(), async || {
            asked += 1;
            Err(Problem::new(ErrorCode::Unauthenticated, "another server"))
        });
        assert_eq!(refused.await.unwrap_err().code, ErrorCode::Unauthenticated);
        assert_eq!(asked, 1);
    }
}
