//! Retries while the server restarts, or is busy.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use vmseal_api::client::ServerClient;
use vmseal_api::model::Changes;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::print;

/// How long, and how often, to retry.
#[derive(Clone, Copy)]
pub struct Retry {
    /// How long in all.
    pub timeout: Duration,
    /// The pause before the first retry; each further pause is twice as long.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// The longest that one request takes. A call that took longer has made several, and the server has answered some of them.
    pub request: Duration,
}

/// Enough for a restart of the server, and for the boot of a slow machine.
pub const DEFAULT: Retry = Retry {
    timeout: Duration::from_secs(120),
    first: Duration::from_millis(250),
    longest: Duration::from_secs(5),
    // The client gives up a request after 70 seconds, and a connection after 10.
    request: Duration::from_secs(80),
};

/// Repeats a request across restarts of the server. Reports when the server does not answer, and when it does again. A server that
/// answers other requests, and never this one, is given up like one that does not answer. A call that waits for changes makes many
/// requests: once the server has answered one of them, earlier failures no longer count.
///
/// # Errors
/// The server's refusal, or the last problem if it does not answer in time.
pub async fn across<T>(
    server: &ServerClient,
    ask: impl AsyncFnMut() -> Result<T, Problem>,
) -> Result<T, Problem> {
    across_within(DEFAULT, ask, async || answers(server).await).await
}

/// The same, with what finds out whether the server answers.
async fn across_within<T>(
    retry: Retry,
    mut ask: impl AsyncFnMut() -> Result<T, Problem>,
    answers: impl AsyncFn() -> Result<(), Problem>,
) -> Result<T, Problem> {
    let mut end = None;
    loop {
        let began = Instant::now();
        let problem = match ask().await {
            Err(problem) if is_temporary(&problem) => problem,
            answer => return answer,
        };
        if began.elapsed() > retry.request {
            end = None;
        }
        if Instant::now() >= *end.get_or_insert_with(|| Instant::now() + retry.timeout) {
            return Err(problem);
        }
        print::say(format_args!("{problem}: asking again for {}", within()));
        until_answer(retry, problem, &answers).await?;
        print::say("the server answers again");
    }
}

/// Repeats a request that a host answers through the server. The request itself is repeated until there is an answer,
/// as the host may be away when the server is back. Reports when there is no answer, and when there is one again.
///
/// # Errors
/// The refusal, or the last problem if there is no answer in time.
pub async fn repeated<T>(ask: impl AsyncFn() -> Result<T, Problem>) -> Result<T, Problem> {
    let lost = match ask().await {
        Err(problem) if is_temporary(&problem) => problem,
        answer => return answer,
    };
    print::say(format_args!("{lost}: asking again for {}", within()));
    let mut answer = None;
    let again = async || {
        answer = Some(ask().await?);
        Ok(())
    };
    until_answer(DEFAULT, lost.clone(), again).await?;
    print::say("there is an answer again");
    answer.ok_or(lost)
}

/// Whether the server answers.
pub async fn answers(server: &ServerClient) -> Result<(), Problem> {
    server.get::<Changes>("changes").await.map(drop)
}

/// How long requests are repeated, for people.
pub fn within() -> String {
    format!("{}m", DEFAULT.timeout.as_secs() / 60)
}

/// Whether a later request may succeed.
pub fn is_temporary(problem: &Problem) -> bool {
    matches!(problem.code, ErrorCode::Unreachable | ErrorCode::TimedOut | ErrorCode::Busy)
}

/// Asks until there is an answer; `lost` is the first problem.
///
/// # Errors
/// The last problem, after the timeout or if it is not temporary.
pub async fn until_answer(
    retry: Retry,
    lost: Problem,
    mut ask: impl AsyncFnMut() -> Result<(), Problem>,
) -> Result<(), Problem> {
    let end = Instant::now() + retry.timeout;
    let (mut last, mut pause) = (lost, retry.first);
    while is_temporary(&last) && Instant::now() < end {
        sleep(pause.min(end - Instant::now())).await;
        pause = (pause * 2).min(retry.longest);
        let left = end.saturating_duration_since(Instant::now()).max(retry.first);
        match timeout(left, ask()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(problem)) => last = problem,
            // The last problem still holds.
            Err(_) => {}
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Retry = Retry {
        timeout: Duration::from_millis(300),
        first: Duration::from_millis(10),
        longest: Duration::from_millis(40),
        request: Duration::from_millis(200),
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
        assert!(began.elapsed() >= SHORT.timeout, "{:?}", began.elapsed());
        // Not in a busy loop: at 10, 30, 70, and every 40 milliseconds from then on.
        assert!((4..=10).contains(&asked), "it was asked {asked} times");

        let began = Instant::now();
        let silent = until_answer(SHORT, away(), async || std::future::pending().await);
        assert!(silent.await.is_err());
        assert!(began.elapsed() < SHORT.timeout * 3, "{:?}", began.elapsed());
    }

    /// The server answers, and the host does not.
    #[tokio::test]
    async fn a_request_is_repeated_until_it_is_answered_or_refused() {
        for refusal in [None, Some(ErrorCode::WrongState)] {
            let asked = std::cell::Cell::new(0);
            let told = repeated(async || {
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

    /// The server answers whether it is there, and is too busy for more.
    #[tokio::test]
    async fn a_busy_server_is_asked_again_and_not_for_ever() {
        let busy = || Problem::new(ErrorCode::Busy, "too much to do");
        let mut asked = 0;
        let answer = across_within(
            SHORT,
            async || {
                asked += 1;
                if asked < 3 { Err(busy()) } else { Ok(asked) }
            },
            async || Ok(()),
        );
        assert_eq!(answer.await.unwrap(), 3);

        let began = Instant::now();
        let never = across_within(SHORT, async || Err::<(), _>(busy()), async || Ok(()));
        assert_eq!(never.await.unwrap_err().code, ErrorCode::Busy);
        assert!(began.elapsed() >= SHORT.timeout, "{:?}", began.elapsed());
    }

    /// Nothing changes for hours, and the connection is lost now and then.
    #[tokio::test(start_paused = true)]
    async fn who_waits_for_changes_outlasts_any_number_of_lost_connections() {
        let mut asked = 0;
        let changed = across_within(
            DEFAULT,
            async || {
                asked += 1;
                sleep(Duration::from_secs(3600)).await;
                if asked < 4 { Err(away()) } else { Ok(asked) }
            },
            async || Ok(()),
        );
        assert_eq!(changed.await.unwrap(), 4);

        // Each request takes as long as one may: there was no answer.
        let (began, mut asked) = (Instant::now(), 0);
        let never = across_within(
            DEFAULT,
            async || {
                asked += 1;
                sleep(Duration::from_secs(70)).await;
                Err::<(), _>(away())
            },
            async || Ok(()),
        );
        assert_eq!(never.await.unwrap_err().code, ErrorCode::Unreachable);
        assert!(began.elapsed() < Duration::from_secs(300), "{:?}", began.elapsed());
        assert_eq!(asked, 3);
    }

    #[tokio::test]
    async fn other_problems_are_not_waited_for() {
        let mut asked = 0;
        let refused = until_answer(SHORT, away(), async || {
            asked += 1;
            Err(Problem::new(ErrorCode::Unauthenticated, "another server"))
        });
        assert_eq!(refused.await.unwrap_err().code, ErrorCode::Unauthenticated);
        assert_eq!(asked, 1);
    }
}
