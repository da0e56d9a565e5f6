//! File systems that may hang: each call runs in its own thread, and the wait for it is bounded.
//!
//! For calls that only read, or whose work may be done late. Other writes run to their end, so that nothing
//! is written after the caller has gone on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::problem::{ErrorCode, Problem};

/// The timeout of a call: a working file system answers at once, a disk that spins up in ten seconds.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The short timeout.
pub const SHORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Places that have not answered yet: no second thread is started for them.
static SILENT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Places about which something was asked by [`answer_within`] that has not answered yet. They are apart from [`SILENT`], as a place that waits
/// for another machine in one call may answer another call by itself.
static HANGING: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Something has not answered in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it has not answered in time")]
pub struct Silent;

/// Runs a call on the file system at `place`.
///
/// # Errors
/// Those of the call; `timed-out` when it takes too long.
pub async fn call<T: Send + 'static>(
    place: &Path,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    call_within(place, work, TIMEOUT).await
}

/// The same for calls that are made again and again and delay other work.
///
/// # Errors
/// As [`call`].
pub async fn quick_call<T: Send + 'static>(
    place: &Path,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    call_within(place, work, SHORT_TIMEOUT).await
}

/// The answer of a call on the file system at `place`, for callers that block themselves, also outside of the runtime.
///
/// # Errors
/// [`Silent`]: there was none within this time, or an earlier call has none yet.
pub fn answer_within<T: Send + 'static>(
    place: &Path,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Silent> {
    let hanging = || HANGING.lock().unwrap_or_else(PoisonError::into_inner);
    if hanging().contains(place) {
        return Err(Silent);
    }
    let (answer, answers) = mpsc::channel();
    let asked = place.to_owned();
    std::thread::spawn(move || {
        let _ = answer.send(work());
        HANGING.lock().unwrap_or_else(PoisonError::into_inner).remove(&asked);
    });
    match answers.recv_timeout(limit) {
        Ok(answer) => Ok(answer),
        Err(RecvTimeoutError::Disconnected) => Err(Silent),
        Err(RecvTimeoutError::Timeout) => {
            let mut hanging = hanging();
            match answers.try_recv() {
                // Its thread removes the place after it has answered, so it must not be noted after that.
                Ok(late) => Ok(late),
                Err(TryRecvError::Disconnected) => Err(Silent),
                Err(TryRecvError::Empty) => {
                    hanging.insert(place.to_owned());
                    Err(Silent)
                }
            }
        }
    }
}

async fn call_within<T: Send + 'static>(
    place: &Path,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    limit: Duration,
) -> Result<T, Problem> {
    let silent = || {
        let what = format!(
            "the file system at {} does not respond; check its server or device",
            place.display()
        );
        Problem::new(ErrorCode::TimedOut, what)
    };
    let places = || SILENT.lock().unwrap_or_else(PoisonError::into_inner);
    if places().contains(place) {
        return Err(silent());
    }
    let mut calling = spawn_blocking(work);
    match timeout(limit, &mut calling).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => Err(Problem::new(ErrorCode::Internal, error.to_string())),
        Err(_) => {
            let place = place.to_owned();
            places().insert(place.clone());
            tokio::spawn(async move {
                let _ = calling.await;
                SILENT.lock().unwrap_or_else(PoisonError::into_inner).remove(&place);
            });
            Err(silent())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_blocks_waits_only_so_long_and_asks_again_when_there_was_an_answer() {
        let place = Path::new("/a/place/that/blocks");
        let (answer, answers) = mpsc::channel::<()>();
        let hangs = move || {
            let _ = answers.recv();
        };
        let short = Duration::from_millis(50);
        assert_eq!(answer_within(place, short, hangs), Err(Silent));
        let second = answer_within(place, TIMEOUT, || -> u8 { unreachable!("a second thread") });
        assert_eq!(second, Err(Silent));
        assert_eq!(answer_within(Path::new("/another/one"), TIMEOUT, || 1), Ok(1));
        drop(answer);
        let give_up = std::time::Instant::now() + TIMEOUT;
        while answer_within(place, TIMEOUT, || 2) != Ok(2) {
            assert!(std::time::Instant::now() < give_up, "the place is never asked again");
            std::thread::sleep(short);
        }
    }

    #[tokio::test]
    async fn a_place_that_hangs_is_not_asked_again_until_it_answers() {
        let place = Path::new("/a/place/that/hangs");
        let (answer, answers) = mpsc::channel::<()>();
        let hangs = move || {
            let _ = answers.recv();
            Ok(())
        };
        let short = Duration::from_millis(50);
        let first = call_within(place, hangs, short).await.unwrap_err();
        assert_eq!(first.code, ErrorCode::TimedOut);
        let second = call(place, || -> Result<(), _> { unreachable!("a second thread") }).await;
        assert_eq!(second.unwrap_err(), first);
        call(Path::new("/another"), || Ok(())).await.unwrap();
        drop(answer);
        let give_up = std::time::Instant::now() + TIMEOUT;
        while call(place, || Ok(())).await.is_err() {
            assert!(std::time::Instant::now() < give_up, "the place is never tried again");
            tokio::time::sleep(short).await;
        }
    }
}
