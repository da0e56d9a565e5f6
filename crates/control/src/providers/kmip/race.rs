//! One request to several servers, any of which may answer it: the next one is asked when one fails, or
//! has not answered for a while. The first answer wins.

use std::future::Future;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};

/// How long a server may take before the next one is asked too. A healthy KMS answers in some tens of
/// milliseconds, even over a new connection; a shorter time would double the load of a busy one.
pub(super) const HEDGE: Duration = Duration::from_secs(1);

/// How long one operation may take at all servers together: longer than the timeouts of one request to one
/// server, and half of what a request of the API may take.
pub(super) const DEADLINE: Duration = Duration::from_secs(30);

/// The outcome. Servers are identified by their index in the order of the requests.
pub(super) struct Race<T, E> {
    /// Who answered, and what.
    pub(super) won: Option<(usize, T)>,
    /// Who failed, and why.
    pub(super) failed: Vec<(usize, E)>,
    /// Who was asked and had not answered for [`HEDGE`] or longer when it ended.
    pub(super) late: Vec<usize>,
}

/// Asks up to `count` servers. A request that is still in flight at the end is dropped.
pub(super) async fn race<T, E, F>(count: usize, ask: impl Fn(usize) -> F) -> Race<T, E>
where
    F: Future<Output = Result<T, E>>,
{
    let deadline = Instant::now() + DEADLINE;
    let mut in_flight = FuturesUnordered::new();
    let (mut begun, mut failed) = (Vec::<Instant>::new(), Vec::new());
    let begin = |place: usize| {
        let asked = ask(place);
        async move { (place, asked.await) }
    };
    let won = loop {
        // The first one, or the next one after all that were asked have failed.
        if in_flight.is_empty() {
            if begun.len() == count {
                break None;
            }
            in_flight.push(begin(begun.len()));
            begun.push(Instant::now());
        }
        let hedge = begun.last().map_or(deadline, |last| *last + HEDGE);
        let ask_next = tokio::select! {
            biased;
            Some((place, outcome)) = in_flight.next() => match outcome {
                Ok(answer) => break Some((place, answer)),
                Err(error) => {
                    failed.push((place, error));
                    true
                }
            },
            () = sleep_until(deadline) => break None,
            () = sleep_until(hedge), if begun.len() < count => true,
        };
        if ask_next && begun.len() < count {
            in_flight.push(begin(begun.len()));
            begun.push(Instant::now());
        }
    };
    let ended = |place: &usize| {
        won.as_ref().is_some_and(|(winner, _)| winner == place)
            || failed.iter().any(|(failed, _)| failed == place)
    };
    let late = (0..begun.len()).filter(|place| !ended(place) && begun[*place].elapsed() >= HEDGE);
    let late = late.collect();
    Race { won, failed, late }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::time::sleep;

    use super::*;

    /// The behaviour of a server: an answer or a failure after a time, or nothing.
    #[derive(Clone, Copy)]
    enum Scripted {
        Answers(u64),
        Fails(u64),
        Hangs,
    }

    /// Who won, who failed, who was late, who was asked, and how long it took in milliseconds.
    async fn run(servers: &[Scripted]) -> (Option<usize>, Vec<usize>, Vec<usize>, usize, u128) {
        let (begun, asked) = (Instant::now(), RefCell::new(0));
        let race = race(servers.len(), |place| {
            *asked.borrow_mut() += 1;
            async move {
                let pause = |millis| sleep(Duration::from_millis(millis));
                match servers[place] {
                    Scripted::Answers(after) => {
                        pause(after).await;
                        Ok(())
                    }
                    Scripted::Fails(after) => {
                        pause(after).await;
                        Err(())
                    }
                    Scripted::Hangs => std::future::pending().await,
                }
            }
        });
        let race = race.await;
        let failed = race.failed.into_iter().map(|(place, ())| place).collect();
        let won = race.won.map(|(place, ())| place);
        (won, failed, race.late, asked.into_inner(), begun.elapsed().as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_is_asked_when_one_fails_or_is_late() {
        use Scripted::{Answers, Fails, Hangs};
        assert_eq!(run(&[]).await, (None, vec![], vec![], 0, 0));
        assert_eq!(run(&[Answers(10), Hangs]).await, (Some(0), vec![], vec![], 1, 10));
        assert_eq!(run(&[Fails(10), Answers(10)]).await, (Some(1), vec![0], vec![], 2, 20));
        assert_eq!(run(&[Hangs, Answers(10)]).await, (Some(1), vec![], vec![0], 2, 1010));
        assert_eq!(run(&[Hangs, Hangs, Answers(10)]).await, (Some(2), vec![], vec![0, 1], 3, 2010));
        // One that is slow may still be the first to answer.
        assert_eq!(run(&[Answers(1500), Hangs]).await, (Some(0), vec![], vec![], 2, 1500));
        assert_eq!(run(&[Fails(10), Fails(10)]).await, (None, vec![0, 1], vec![], 2, 20));
    }

    #[tokio::test(start_paused = true)]
    async fn one_deadline_bounds_the_whole() {
        let (won, failed, late, asked, took) = run(&[Scripted::Hangs; 8]).await;
        assert_eq!((won, failed, asked, took), (None, vec![], 8, DEADLINE.as_millis()));
        assert_eq!(late, (0..8).collect::<Vec<_>>());
    }
}
