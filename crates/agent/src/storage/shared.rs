//! Whether two hosts can share a datastore ([`Sharing`]): both must see the same files, and each the other's locks. All else
//! that keeps hosts apart rests on these locks, and on the mark that says that there are others ([`datastore::sweep`]).

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use uuid::Uuid;
use vmseal_api::host::{DatastoreSpec, Sharing, SharingStep};
use vmseal_api::id::DatastoreId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::mounts::file_system;
use crate::storage::datastore;
use crate::storage::file_error::failed;
use crate::storage::locked::{Access, make_locked, open_locked, open_once};
use crate::storage::mark::marked;
use crate::storage::sealed::remove_if_there;
use crate::timed;

/// The file whose lock the hosts try, in the datastore's directory.
pub const CHECK_FILE: &str = "vmseal-sharing";

/// How long its lock is held: far longer than the other host needs, and short if the server dies meanwhile.
const HELD: Duration = Duration::from_secs(60);

/// The longest content of that file, in bytes.
const CONTENT_MAX: u64 = 64;

/// The locks that this host holds for checks.
#[derive(Clone, Default)]
pub struct SharingChecks(Arc<Mutex<HashMap<DatastoreId, Held>>>);

struct Held {
    check: Uuid,
    path: PathBuf,
    /// Its lock goes with it.
    _file: File,
}

impl SharingChecks {
    /// Takes a step.
    ///
    /// # Errors
    /// Those of [`vmseal_api::host::HostAgent::share_datastore`].
    pub async fn step(&self, Sharing { datastore, check, step }: Sharing) -> Result<(), Problem> {
        let path = datastore.location.path().to_owned();
        let this = self.clone();
        match step {
            SharingStep::Hold => {
                let held = timed::call(&path, move || this.hold(&datastore, check)).await?;
                let this = self.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(HELD).await;
                    drop(this.take(held, check));
                });
                Ok(())
            }
            SharingStep::Try => timed::call(&path, move || try_lock(&datastore, check)).await,
            SharingStep::Release => {
                let held = self.take(datastore.datastore, check);
                let Some(held) = held else {
                    let what =
                        "the lock that the hosts were to see is not held any more: try again";
                    return Err(Problem::new(ErrorCode::WrongState, what));
                };
                timed::call(&path, move || remove_if_there(&held.path)).await
            }
            SharingStep::Mark => tokio::task::spawn_blocking(move || {
                check_file_system(marked(&datastore)?)?;
                datastore::mark_shared(&datastore)
            })
            .await
            .map_err(|error| Problem::new(ErrorCode::Internal, error.to_string()))?,
        }
    }

    fn hold(&self, spec: &DatastoreSpec, check: Uuid) -> Result<DatastoreId, Problem> {
        let directory = marked(spec)?;
        check_file_system(directory)?;
        let path = directory.join(CHECK_FILE);
        // That of an earlier check, if there is one: a server that asks again has lost its answer.
        drop(self.held().remove(&spec.datastore));
        let mut file = match open_locked(&path, Access::Write)? {
            Some(file) => file,
            None => make_locked(&path)?,
        };
        file.set_len(0)
            .and_then(|()| file.write_all(check.to_string().as_bytes()))
            .and_then(|()| file.sync_all())
            .map_err(|error| failed(&path, "written", &error))?;
        self.held().insert(spec.datastore, Held { check, path, _file: file });
        Ok(spec.datastore)
    }

    fn take(&self, datastore: DatastoreId, check: Uuid) -> Option<Held> {
        let mut held = self.held();
        held.get(&datastore).filter(|held| held.check == check)?;
        held.remove(&datastore)
    }

    fn held(&self) -> std::sync::MutexGuard<'_, HashMap<DatastoreId, Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tries to get the lock that the other host holds. Blocks.
fn try_lock(spec: &DatastoreSpec, check: Uuid) -> Result<(), Problem> {
    let directory = marked(spec)?;
    check_file_system(directory)?;
    let path = directory.join(CHECK_FILE);
    let mut content = String::new();
    if let Some(file) = open_once(&path, Access::BesideGuest)? {
        // What is no text is no check.
        let _ = file.take(CONTENT_MAX).read_to_string(&mut content);
    }
    if content != check.to_string() {
        let what = format!(
            "{} carries the datastore's mark, and what the other host has just written to it is not there: it is a copy, or another file system",
            directory.display()
        );
        return Err(Problem::new(ErrorCode::WrongState, what));
    }
    match open_once(&path, Access::Write) {
        Err(problem) if problem.code == ErrorCode::InUse => Ok(()),
        Err(problem) => Err(problem),
        Ok(_) => {
            let what = format!(
                "locks on {} do not reach the other host: both could write one disk. Mount it with working locks (NFSv4, without nolock and local_lock; or a cluster file system)",
                directory.display()
            );
            Err(Problem::new(ErrorCode::Unsupported, what))
        }
    }
}

/// Refuses file systems whose locks are no leases: a host that is cut off could write on after another one has its lock.
fn check_file_system(directory: &Path) -> Result<(), Problem> {
    let kind = file_system(directory).map_err(|error| failed(directory, "examined", &error))?;
    // That of version 4 is `nfs4`.
    if kind.as_deref() != Some("nfs") {
        return Ok(());
    }
    let what = format!(
        "{} is mounted over NFS of a version before 4: a host that is cut off would write on after another one has got its locks. Mount it with vers=4.2 on every host",
        directory.display()
    );
    Err(Problem::new(ErrorCode::Unsupported, what))
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::DatastoreLocation;

    use super::*;
    use crate::storage::datastore::{probe, tests::unmarked};

    fn datastore() -> (tempfile::TempDir, DatastoreSpec) {
        let (directory, spec) = unmarked();
        probe(&spec).unwrap();
        (directory, spec)
    }

    fn step(datastore: &DatastoreSpec, check: Uuid, step: SharingStep) -> Sharing {
        Sharing { datastore: datastore.clone(), check, step }
    }

    #[tokio::test]
    async fn a_lock_that_the_other_host_does_not_see_is_refused() {
        let (directory, spec) = datastore();
        let (one, other) = (SharingChecks::default(), SharingChecks::default());
        let check = Uuid::new_v4();
        one.step(step(&spec, check, SharingStep::Hold)).await.unwrap();
        one.step(step(&spec, check, SharingStep::Hold)).await.unwrap();
        other.step(step(&spec, check, SharingStep::Try)).await.unwrap();
        let foreign = other.step(step(&spec, Uuid::new_v4(), SharingStep::Try)).await.unwrap_err();
        assert_eq!(foreign.code, ErrorCode::WrongState, "{foreign}");
        // As where each host has its locks for itself.
        drop(one.take(spec.datastore, check).unwrap());
        let unseen = other.step(step(&spec, check, SharingStep::Try)).await.unwrap_err();
        assert_eq!(unseen.code, ErrorCode::Unsupported, "{unseen}");
        let late = one.step(step(&spec, check, SharingStep::Release)).await.unwrap_err();
        assert_eq!(late.code, ErrorCode::WrongState, "{late}");
        one.step(step(&spec, check, SharingStep::Hold)).await.unwrap();
        one.step(step(&spec, check, SharingStep::Release)).await.unwrap();
        let gone = other.step(step(&spec, check, SharingStep::Try)).await.unwrap_err();
        assert_eq!(gone.code, ErrorCode::WrongState, "{gone}");
        assert!(!directory.path().join(CHECK_FILE).exists());
    }

    #[tokio::test]
    async fn a_copy_of_a_datastore_is_not_shared() {
        let (directory, spec) = datastore();
        let checks = SharingChecks::default();
        let copy = tempfile::tempdir().unwrap();
        let mark = crate::storage::mark::MARKER;
        std::fs::copy(directory.path().join(mark), copy.path().join(mark)).unwrap();
        let location = DatastoreLocation::Dir { path: copy.path().to_owned() };
        let copy = DatastoreSpec { location, ..spec.clone() };
        let check = Uuid::new_v4();
        checks.step(step(&spec, check, SharingStep::Hold)).await.unwrap();
        let refused = checks.step(step(&copy, check, SharingStep::Try)).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        let other = DatastoreSpec { datastore: DatastoreId::new(), ..spec };
        for wrong in [SharingStep::Hold, SharingStep::Try, SharingStep::Mark] {
            let refused = checks.step(step(&other, check, wrong)).await.unwrap_err();
            assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        }
    }
}
