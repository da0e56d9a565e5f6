//! How datastores stand, asked again and again: nothing is written, and a file system that hangs holds up
//! one thread and no more.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec};
use vmseal_api::id::DatastoreId;

use crate::datastore;

/// How long a file system may take to tell its room: one that is there tells it at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// Measures datastores, each by one thread at a time.
#[derive(Clone, Default)]
pub struct Measuring(Arc<Mutex<HashSet<DatastoreId>>>);

impl Measuring {
    /// How a datastore stands.
    pub async fn measure(&self, spec: DatastoreSpec) -> DatastoreCondition {
        self.measure_by(spec, datastore::condition, PATIENCE).await
    }

    async fn measure_by(
        &self,
        spec: DatastoreSpec,
        look: impl FnOnce(&DatastoreSpec) -> DatastoreCondition + Send + 'static,
        patience: Duration,
    ) -> DatastoreCondition {
        let DatastoreLocation::Dir { path } = &spec.location;
        let silent = DatastoreCondition::Unavailable {
            detail: format!(
                "the file system at {} does not answer: see that its server or device is there",
                path.display()
            ),
        };
        // The thread that still waits for it takes the name away when it gets its answer.
        if !self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(spec.datastore) {
            return silent;
        }
        let busy = Arc::clone(&self.0);
        let looking = spawn_blocking(move || {
            let condition = look(&spec);
            busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&spec.datastore);
            condition
        });
        match timeout(patience, looking).await {
            Ok(Ok(condition)) => condition,
            Ok(Err(error)) => DatastoreCondition::Unavailable { detail: error.to_string() },
            Err(_) => silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_file_system_that_hangs_holds_up_one_thread_until_it_answers() {
        let measuring = Measuring::default();
        let location = DatastoreLocation::Dir { path: "/hangs".into() };
        let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
        let (answer, answers) = mpsc::channel::<()>();
        let well = || DatastoreCondition::WrongMark { detail: "it answered".to_owned() };
        let hangs = move |_: &DatastoreSpec| {
            let _ = answers.recv();
            well()
        };
        let short = Duration::from_millis(50);
        let first = measuring.measure_by(spec.clone(), hangs, short).await;
        assert!(matches!(first, DatastoreCondition::Unavailable { .. }), "{first:?}");
        let unasked = |_: &DatastoreSpec| unreachable!("a second thread was sent into it");
        let second = measuring.measure_by(spec.clone(), unasked, PATIENCE).await;
        assert_eq!(second, first);
        drop(answer);
        let give_up = std::time::Instant::now() + PATIENCE;
        while measuring.measure_by(spec.clone(), move |_| well(), PATIENCE).await != well() {
            assert!(std::time::Instant::now() < give_up, "it is never asked again");
            tokio::time::sleep(short).await;
        }
    }
}
