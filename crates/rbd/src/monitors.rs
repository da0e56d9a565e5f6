//! What the monitors are asked for requests of the file system.
//!
//! ```text
//!  ask ──answered of late──> that
//!   └────else──> a thread asks ──> its answer, if it comes within WAIT
//!                              └──> else what they said before, if that is not older than OLDEST
//!                                    └──> else an error: what they answered last, or ETIMEDOUT
//! ```
//! A thread of its own for each question, as monitors may not answer for long while OSDs serve all data.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a request waits for an answer, from when the question was asked. Monitors that are well answer within milliseconds; the agent
/// asks four questions when it measures a datastore, within ten seconds.
const WAIT: Duration = Duration::from_secs(1);

/// How old an answer may be that is told while the monitors do not give another one. The room of a pool changes slowly, and who has a disk
/// opened asks on what file system it is, which comes with the room.
const OLDEST: Duration = Duration::from_secs(3600);

/// How long answers are good.
#[derive(Clone, Copy, Debug)]
pub struct Good {
    /// An answer.
    pub answer: Duration,
    /// An error: so long it is not asked again.
    pub error: Duration,
}

type Ask<T> = dyn Fn() -> io::Result<T> + Send + Sync;

/// A question, and what is known of its answer.
pub struct Question<T>(Arc<Shared<T>>);

struct Shared<T> {
    /// What is asked, for the log.
    what: &'static str,
    good: Good,
    ask: Box<Ask<T>>,
    state: Mutex<State<T>>,
    ended: Condvar,
}

struct State<T> {
    /// What was answered last, and when.
    told: Option<(Instant, T)>,
    /// The error number, and when, if there was an error after that.
    failed: Option<(Instant, i32)>,
    /// Since when a thread asks.
    asking: Option<Instant>,
}

impl<T: Clone + Send + 'static> Question<T> {
    /// What `ask` asks; `ETIMEDOUT` means that there was no answer, any other error is one.
    #[must_use]
    pub fn new(
        what: &'static str,
        good: Good,
        ask: impl Fn() -> io::Result<T> + Send + Sync + 'static,
    ) -> Self {
        let state = Mutex::new(State { told: None, failed: None, asking: None });
        Self(Arc::new(Shared { what, good, ask: Box::new(ask), state, ended: Condvar::new() }))
    }

    /// What was answered of late; nobody waits.
    #[must_use]
    pub fn known(&self) -> Option<T> {
        self.0.state().fresh(self.0.good)
    }

    /// Has it asked, so that the answer is known when it is needed. Nobody waits.
    pub fn begin(&self) {
        self.start(&mut self.0.state());
    }

    /// The answer. It waits for a second at most.
    ///
    /// # Errors
    /// The monitors'; `ETIMEDOUT` where they do not answer.
    pub fn ask(&self) -> io::Result<T> {
        let mut state = self.0.state();
        if let Some(told) = state.fresh(self.0.good) {
            return Ok(told);
        }
        self.start(&mut state);
        // From its beginning: monitors that hang are not waited for again and again.
        let left =
            state.asking.map_or(Duration::ZERO, |begun| WAIT.saturating_sub(begun.elapsed()));
        let goes_on = |state: &mut State<T>| state.asking.is_some();
        let waited = self.0.ended.wait_timeout_while(state, left, goes_on);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.last()
    }

    /// Starts a thread that asks, unless one does, or the monitors have just refused to answer.
    fn start(&self, state: &mut State<T>) {
        let refused = state.failed.is_some_and(|(at, _)| at.elapsed() < self.0.good.error);
        if state.asking.is_some() || refused {
            return;
        }
        let shared = Arc::clone(&self.0);
        let ask = move || {
            let answer = (shared.ask)();
            shared.state().note(shared.what, answer);
            shared.ended.notify_all();
        };
        match std::thread::Builder::new().name("monitors".into()).spawn(ask) {
            Ok(_) => state.asking = Some(Instant::now()),
            Err(error) => {
                tracing::warn!(%error, "{} is not asked: there is no thread", self.0.what);
            }
        }
    }
}

impl<T> Shared<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Clone> State<T> {
    fn fresh(&self, good: Good) -> Option<T> {
        self.not_older(good.answer)
    }

    fn not_older(&self, than: Duration) -> Option<T> {
        let (at, told) = self.told.as_ref()?;
        (at.elapsed() < than).then(|| told.clone())
    }

    /// What is told without a new answer.
    fn last(&self) -> io::Result<T> {
        let number = self.failed.map_or(libc::ETIMEDOUT, |(_, number)| number);
        self.not_older(OLDEST).ok_or_else(|| io::Error::from_raw_os_error(number))
    }

    fn note(&mut self, what: &str, answer: io::Result<T>) {
        self.asking = None;
        let error = match answer {
            Ok(told) => {
                if self.failed.take().is_some() {
                    tracing::info!("the monitors say {what} again");
                }
                self.told = Some((Instant::now(), told));
                return;
            }
            Err(error) => error,
        };
        let number = error.raw_os_error().unwrap_or(libc::EIO);
        if number != libc::ETIMEDOUT {
            self.told = None;
        }
        if self.failed.is_none() {
            let age = self.told.as_ref().map(|(at, _)| at.elapsed().as_secs());
            tracing::warn!(
                %error,
                seconds_old = age,
                "the monitors do not say {what}: what they said before is told, for at most an hour"
            );
        }
        self.failed = Some((Instant::now(), number));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Sender};

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    type Answers = Sender<io::Result<u64>>;

    /// A question whose answers a test gives, and where it learns that it is asked.
    fn question(good: Good) -> (Question<u64>, Answers, mpsc::Receiver<()>) {
        let (give, answers) = mpsc::channel();
        let (tell, asked) = mpsc::channel();
        let answers = Mutex::new(answers);
        let ask = move || {
            tell.send(()).unwrap();
            let answer = answers.lock().unwrap().recv();
            answer.unwrap_or_else(|_| Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)))
        };
        (Question::new("a number", good, ask), give, asked)
    }

    fn number(of: &io::Result<u64>) -> Option<i32> {
        of.as_ref().err().and_then(io::Error::raw_os_error)
    }

    fn failed(number: i32) -> io::Result<u64> {
        Err(io::Error::from_raw_os_error(number))
    }

    /// Waits until no thread asks.
    fn ended(question: &Question<u64>) {
        while question.0.state().asking.is_some() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_answer_is_good_for_a_while() {
        let (question, give, asked) = question(Good { answer: LONG, error: LONG });
        assert_eq!(question.known(), None);
        give.send(Ok(7)).unwrap();
        assert_eq!((question.ask().unwrap(), question.ask().unwrap()), (7, 7));
        assert_eq!(question.known(), Some(7));
        assert_eq!(asked.try_iter().count(), 1);
    }

    #[test]
    fn monitors_that_hang_are_waited_for_once_and_what_they_said_before_is_told() {
        let (question, give, asked) = question(Good { answer: Duration::ZERO, error: LONG });
        let begun = Instant::now();
        assert_eq!(number(&question.ask()), Some(libc::ETIMEDOUT));
        assert!(begun.elapsed() >= WAIT);
        let begun = Instant::now();
        assert_eq!(number(&question.ask()), Some(libc::ETIMEDOUT));
        assert!(begun.elapsed() < WAIT, "it was waited for again");
        assert_eq!(asked.try_iter().count(), 1, "two threads ask");
        give.send(Ok(7)).unwrap();
        ended(&question);
        // It is good no more, and there is no other.
        assert_eq!(question.known(), None);
        assert_eq!(question.ask().unwrap(), 7);
        give.send(failed(libc::ETIMEDOUT)).unwrap();
        ended(&question);
        assert_eq!(question.ask().unwrap(), 7, "no answer is one");
        // After that they are left alone for a while.
        assert_eq!(asked.try_iter().count(), 1);
        let long_ago = Instant::now().checked_sub(OLDEST).unwrap();
        question.0.state().told = Some((long_ago, 7));
        assert_eq!(number(&question.ask()), Some(libc::ETIMEDOUT), "it is too old");
    }

    #[test]
    fn what_the_monitors_refuse_is_not_told_as_they_said_it_before() {
        let (question, give, asked) =
            question(Good { answer: Duration::ZERO, error: Duration::ZERO });
        give.send(Ok(7)).unwrap();
        assert_eq!(question.ask().unwrap(), 7);
        give.send(failed(libc::EACCES)).unwrap();
        assert_eq!(number(&question.ask()), Some(libc::EACCES));
        give.send(Ok(8)).unwrap();
        assert_eq!(question.ask().unwrap(), 8);
        assert_eq!(asked.try_iter().count(), 3);
    }

    #[test]
    fn a_question_is_begun_without_waiting() {
        let (question, give, asked) = question(Good { answer: LONG, error: LONG });
        question.begin();
        question.begin();
        assert_eq!(question.known(), None);
        give.send(Ok(7)).unwrap();
        ended(&question);
        assert_eq!(question.known(), Some(7));
        assert_eq!(asked.try_iter().count(), 1);
    }
}
