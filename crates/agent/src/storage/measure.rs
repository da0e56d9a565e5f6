//! Measuring datastores again and again: nothing is written, and a file system that hangs blocks one thread
//! only.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::DatastoreSpec;
use vmseal_api::id::{DatastoreId, VmId};

use crate::storage::{datastore, pool};

/// How long a file system may take to report its room; one that works answers at once.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Measures datastores, each by one thread at a time.
#[derive(Clone, Default)]
pub struct Measuring(Arc<Mutex<HashSet<DatastoreId>>>);

impl Measuring {
    /// Measures a datastore.
    pub async fn measure(&self, spec: DatastoreSpec) -> DatastoreCondition {
        // Also where an earlier measurement hangs: who mounts the pool when what serves it has ended is to do so by the way of now.
        if spec.location.pool().is_some_and(|pool| pool.changed.is_some()) {
            let location = spec.location.clone();
            drop(spawn_blocking(move || pool::note_way(&location)).await);
        }
        self.measure_by(spec, datastore::condition, TIMEOUT).await
    }

    async fn measure_by(
        &self,
        spec: DatastoreSpec,
        look: impl FnOnce(&DatastoreSpec) -> DatastoreCondition + Send + 'static,
        limit: Duration,
    ) -> DatastoreCondition {
        let path = spec.location.path();
        let silent = DatastoreCondition::Unavailable {
            detail: format!(
                "the file system at {} does not respond; check its server or device",
                path.display()
            ),
        };
        // The thread that still waits removes the name when it gets its answer.
        if !self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(spec.datastore) {
            return silent;
        }
        let busy = Arc::clone(&self.0);
        let looking = spawn_blocking(move || {
            let condition = look(&spec);
            busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&spec.datastore);
            condition
        });
        match timeout(limit, looking).await {
            Ok(Ok(condition)) => condition,
            Ok(Err(error)) => DatastoreCondition::Unavailable { detail: error.to_string() },
            Err(_) => silent,
        }
    }
}

/// How often debris is swept.
const SWEPT_EVERY: Duration = Duration::from_secs(24 * 3600);

/// Sweeps datastores, each when this agent uses it first and then once a day.
#[derive(Clone, Default)]
pub struct Sweeping(Arc<Mutex<HashMap<DatastoreId, Instant>>>);

impl Sweeping {
    /// Sweeps a datastore that answers, if it is due; `is_own` says which VMs are this host's.
    pub fn when_due(&self, spec: DatastoreSpec, is_own: impl Fn(VmId) -> bool + Send + 'static) {
        let mut swept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if swept.get(&spec.datastore).is_some_and(|at| at.elapsed() < SWEPT_EVERY) {
            return;
        }
        swept.insert(spec.datastore, Instant::now());
        drop(spawn_blocking(move || {
            if let Err(problem) = datastore::sweep(&spec, &is_own) {
                tracing::warn!(%problem, "a datastore is not swept");
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use vmseal_api::host::DatastoreLocation;

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
        let unasked = |_: &DatastoreSpec| unreachable!("a second thread was started");
        let second = measuring.measure_by(spec.clone(), unasked, TIMEOUT).await;
        assert_eq!(second, first);
        drop(answer);
        let give_up = std::time::Instant::now() + TIMEOUT;
        while measuring.measure_by(spec.clone(), move |_| well(), TIMEOUT).await != well() {
            assert!(std::time::Instant::now() < give_up, "the datastore is never measured again");
            tokio::time::sleep(short).await;
        }
    }

    #[tokio::test]
    async fn another_way_to_a_pool_is_known_while_an_earlier_measurement_hangs() {
        let path = std::path::Path::new("/a/pool/whose/measurement/hangs");
        let way = |monitors: &str, changed| {
            let (monitors, pool) = (monitors.to_owned(), crate::storage::pool::tests::pool());
            vmseal_api::datastore::RbdPool { monitors, changed, ..pool }
        };
        let (former, now) =
            (way("v2:10.0.0.1:3300", None), way("v2:10.0.0.2:3300", Some(jiff::Timestamp::now())));
        let location = DatastoreLocation::Rbd { path: path.into(), pool: Box::new(now.clone()) };
        let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
        let measuring = Measuring::default();
        measuring.0.lock().unwrap().insert(spec.datastore);
        let condition = measuring.measure(spec).await;
        assert!(matches!(condition, DatastoreCondition::Unavailable { .. }), "{condition:?}");
        assert_eq!(pool::latest(path, &former).monitors, now.monitors);
    }

    #[tokio::test]
    async fn debris_is_swept_when_a_datastore_is_seen_first_and_not_each_time() {
        let directory = tempfile::tempdir().unwrap();
        let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&spec).unwrap();
        let home = directory.path().join("01890a5d-ac96-774b-bcce-b302099a8057");
        std::fs::create_dir(&home).unwrap();
        let debris = home.join("01890a5d-ac96-774b-bcce-b302099a8058.raw.creating");
        std::fs::write(&debris, "").unwrap();
        let sweeping = Sweeping::default();
        sweeping.when_due(spec.clone(), |_| true);
        let give_up = std::time::Instant::now() + TIMEOUT;
        while home.exists() {
            assert!(std::time::Instant::now() < give_up, "the datastore is never swept");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        std::fs::create_dir_all(&home).unwrap();
        std::fs::write(&debris, "").unwrap();
        sweeping.when_due(spec, |_| true);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(debris.exists(), "the datastore is swept at every measurement");
    }
}
