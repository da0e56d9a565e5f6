//! File systems that may hang: each call runs in its own thread, and the wait for it is bounded.
//!
//! For calls that only read, or whose work may be done late. Other writes run to their end, so that nothing
//! is written after the caller has gone on.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::problem::{ErrorCode, Problem};

/// The timeout of a call: a working file system answers at once, a disk that spins up in ten seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// The short timeout.
const GLANCE: Duration = Duration::from_secs(2);

/// Places that have not answered yet: no second thread is started for them.
static SILENT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Runs a call on the file system at `place`.
///
/// # Errors
/// Those of the call; `timed-out` when it takes too long.
pub async fn look<T: Send + 'static>(
    place: &Path,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    look_for(place, work, PATIENCE).await
}

/// The same for calls that are made again and again and delay other work.
///
/// # Errors
/// As [`look`].
pub async fn glance<T: Send + 'static>(
    place: &Path,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    look_for(place, work, GLANCE).await
}

async fn look_for<T: Send + 'static>(
    place: &Path,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    patience: Duration,
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
    let mut looking = spawn_blocking(work);
    match timeout(patience, &mut looking).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => Err(Problem::new(ErrorCode::Internal, error.to_string())),
        Err(_) => {
            let place = place.to_owned();
            places().insert(place.clone());
            tokio::spawn(async move {
                let _ = looking.await;
                SILENT.lock().unwrap_or_else(PoisonError::into_inner).remove(&place);
            });
            Err(silent())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_place_that_hangs_is_not_asked_again_until_it_answers() {
        let place = Path::new("/a/place/that/hangs");
        let (answer, answers) = mpsc::channel::<()>();
        let hangs = move || {
            let _ = answers.recv();
            Ok(())
        };
        let short = Duration::from_millis(50);
        let first = look_for(place, hangs, short).await.unwrap_err();
        assert_eq!(first.code, ErrorCode::TimedOut);
        let second = look(place, || -> Result<(), _> { unreachable!("a second thread") }).await;
        assert_eq!(second.unwrap_err(), first);
        look(Path::new("/another"), || Ok(())).await.unwrap();
        drop(answer);
        let give_up = std::time::Instant::now() + PATIENCE;
        while look(place, || Ok(())).await.is_err() {
            assert!(std::time::Instant::now() < give_up, "the place is never tried again");
            tokio::time::sleep(short).await;
        }
    }
}
