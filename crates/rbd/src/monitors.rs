//! What the monitors are asked for requests of the file system.
//!
//! ```text
//!  ask ──answered of late──> that
//!   └────else──> a thread asks ──> its answer, if it comes within WAIT (the first one of some questions may take longer)
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
    /// What the question is about, as the log words it: `what room the pool has`.
    what: &'static str,
    good: Good,
    /// How long a request waits while there is nothing else to tell.
    first: Duration,
    ask: Box<Ask<T>>,
    state: Mutex<State<T>>,
    ended: Condvar,
}

/// A thread asks, until this is dropped, also where it ends by a defect: then it is asked again.
struct Asking<T>(Arc<Shared<T>>);

impl<T> Drop for Asking<T> {
    fn drop(&mut self) {
        self.0.state().asking = None;
        self.0.ended.notify_all();
    }
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
        Self::needed(what, good, WAIT, ask)
    }

    /// The same, for an answer that requests cannot do without: while none is known, they wait for `first` in place of a second.
    #[must_use]
    pub fn needed(
        what: &'static str,
        good: Good,
        first: Duration,
        ask: impl Fn() -> io::Result<T> + Send + Sync + 'static,
    ) -> Self {
        let state = Mutex::new(State { told: None, failed: None, asking: None });
        let (ask, ended) = (Box::new(ask), Condvar::new());
        Self(Arc::new(Shared { what, good, first, ask, state, ended }))
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

    /// The answer. It waits for a second at most, or as [`Question::needed`] says.
    ///
    /// # Errors
    /// The monitors'; `ETIMEDOUT` where they do not answer.
    pub fn ask(&self) -> io::Result<T> {
        let mut state = self.0.state();
        if let Some(told) = state.fresh(self.0.good) {
            return Ok(told);
        }
        self.start(&mut state);
        let left = self.left(&state);
        let goes_on = |state: &mut State<T>| state.asking.is_some();
        let waited = self.0.ended.wait_timeout_while(state, left, goes_on);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.last()
    }

    /// How long an answer is waited for. From its beginning: monitors that hang are not waited for again and again.
    fn left(&self, state: &State<T>) -> Duration {
        let most = if state.has_last() { WAIT } else { self.0.first };
        state.asking.map_or(Duration::ZERO, |begun| most.saturating_sub(begun.elapsed()))
    }

    /// Starts a thread that asks, unless one does, or the monitors have just refused to answer.
    fn start(&self, state: &mut State<T>) {
        let refused = state.failed.is_some_and(|(at, _)| at.elapsed() < self.0.good.error);
        if state.asking.is_some() || refused {
            return;
        }
        let shared = Arc::clone(&self.0);
        let ask = move || {
            let asking = Asking(shared);
            let shared = &asking.0;
            let answer = (shared.ask)();
            shared.state().note(shared.what, answer);
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

    /// Whether there is something to tell without a new answer.
    fn has_last(&self) -> bool {
        self.told.as_ref().is_some_and(|(at, _)| at.elapsed() < OLDEST)
    }

    /// What is told without a new answer.
    fn last(&self) -> io::Result<T> {
        let number = self.failed.map_or(libc::ETIMEDOUT, |(_, number)| number);
        self.not_older(OLDEST).ok_or_else(|| io::Error::from_raw_os_error(number))
    }

    fn note(&mut self, what: &str, answer: io::Result<T>) {
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
            let age = self.told.as_ref().map(|(at, _)| at.elapsed()).filter(|age| *age < OLDEST);
            let before = if age.is_some() {
                "; what they said before is told, for at most an hour"
            } else {
                ""
            };
            let seconds_old = age.map(|age| age.as_secs());
            tracing::warn!(%error, seconds_old, "the monitors do not say {what}{before}");
        }
        self.failed = Some((Instant::now(), number));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
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
        assert_eq!(question.ask().unwrap(), 7, "the former answer is not told");
        // After that they are left alone for a while.
        assert_eq!(asked.try_iter().count(), 1);
        let long_ago = Instant::now().checked_sub(OLDEST).unwrap();
        question.0.state().told = Some((long_ago, 7));
        assert_eq!(number(&question.ask()), Some(libc::ETIMEDOUT), "it is too old");
    }

    #[test]
    fn after_a_refusal_the_former_answer_is_told_no_more() {
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
    fn what_is_needed_is_waited_for_longer_while_there_is_nothing_else_to_tell() {
        let (tell, asked) = mpsc::channel();
        let (give, answers) = mpsc::channel::<()>();
        let answers = Mutex::new(answers);
        let good = Good { answer: Duration::ZERO, error: LONG };
        let question = Question::needed("a number", good, LONG, move || {
            tell.send(()).unwrap();
            let _ = answers.lock().unwrap().recv();
            Ok(7_u64)
        });
        let left = || question.left(&question.0.state());
        assert_eq!(left(), Duration::ZERO, "nobody asks");
        question.begin();
        asked.recv().unwrap();
        assert!(left() > WAIT);
        let told = |age| Instant::now().checked_sub(age).map(|at| (at, 6));
        question.0.state().told = told(WAIT);
        assert!(left() <= WAIT);
        question.0.state().told = told(OLDEST);
        assert!(left() > WAIT, "what is too old is told");
        // It ends as soon as there is an answer.
        drop(give);
        ended(&question);
        assert_eq!(question.ask().unwrap(), 7);
    }

    #[test]
    fn a_question_that_has_ended_by_a_defect_is_asked_again() {
        let is_first = AtomicBool::new(true);
        let question = Question::new("a number", Good { answer: LONG, error: LONG }, move || {
            assert!(!is_first.swap(false, Ordering::Relaxed), "a defect of a test");
            Ok(7_u64)
        });
        assert_eq!(number(&question.ask()), Some(libc::ETIMEDOUT));
        ended(&question);
        assert_eq!(question.ask().unwrap(), 7);
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
