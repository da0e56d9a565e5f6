//! A pool that an experiment has for itself.
//!
//! ```text
//!  lock the cluster ─► remove what a run has left that was killed ─► pool, user ─► (measure) ─► pool and user go ─► unlock
//! ```
//! Nobody changes the cluster meanwhile, so there is one such pool at most, and one that is there before is nobody's.

use std::path::Path;

use tempfile::TempDir;
use vmseal_api::datastore::{Messenger, RbdPool};

use super::answers::OsdDump;
use super::arguments;
use super::daemon::Daemon;
use super::error::CephError;
use super::layout::{Layout, Lock};
use super::pools::{self, Pool};
use super::processes;
use super::progress::Progress;
use super::record::Record;
use super::redundancy::Redundancy;
use super::tools::{self, Tools};

/// Its name.
pub const NAME: &str = "vmseal-lab-run";
/// The user that has rights for it, as docs/ceph.md gives them, and no others.
const USER: &str = "client.vmseal-lab-run";
/// Its copies: one host may fail, as on the vSAN of the documents.
const COPIES: u32 = 2;

/// A pool, until it is removed or dropped.
#[derive(Debug)]
pub struct OwnPool {
    layout: Layout,
    access: RbdPool,
    removed: bool,
    /// With the user's key.
    _home: TempDir,
    _lock: Lock,
}

/// The directory of a cluster that can be measured on; else why an experiment, which was named so, cannot.
///
/// # Errors
/// The reason, and what to do.
pub fn usable<'a>(directory: Option<&'a Path>, experiment: &str) -> Result<&'a Path, String> {
    let Some(directory) = directory else {
        return Err(format!(
            "it needs a Ceph cluster, and none is given: make one with `vmseal lab ceph up --directory DIR`, then \
             measure with `vmseal lab run {experiment} --ceph-directory DIR`"
        ));
    };
    tools::check_programs().map_err(|error| error.to_string())?;
    check(directory).map_err(|error| error.to_string())?;
    match nix::unistd::geteuid().is_root() {
        true => Ok(directory),
        false => Err("it mounts a pool of the cluster, which takes root".to_owned()),
    }
}

/// Finds that the cluster in a directory is whole and runs.
fn check(directory: &Path) -> Result<(), CephError> {
    let layout = Layout::find(directory)?;
    match Record::read(&layout)? {
        None => return Err(CephError::NoCluster { directory: directory.to_owned() }),
        Some(record) if record.destroyed => {
            return Err(CephError::Destroyed { directory: directory.to_owned() });
        }
        Some(_) => {}
    }
    if processes::running(&layout).iter().any(|it| it.daemon == Daemon::Monitor) {
        return Ok(());
    }
    let at = directory.display();
    let why =
        format!("the cluster does not run: start it with `vmseal lab ceph up --directory {at}`");
    Err(CephError::Pool { pool: NAME.to_owned(), why })
}

impl OwnPool {
    /// Makes it in a cluster that runs, and waits until it can be used.
    ///
    /// # Errors
    /// [`CephError`]; then nothing of it stays, unless the cluster does not answer.
    pub fn make(directory: &Path, observe: &mut dyn FnMut(&Progress)) -> Result<Self, CephError> {
        let layout = Layout::find(directory)?;
        let lock = layout.lock()?;
        let Some(record) = Record::read(&layout)? else {
            return Err(CephError::NoCluster { directory: directory.to_owned() });
        };
        let refused = |why| CephError::Pool { pool: NAME.to_owned(), why };
        let redundancy = Redundancy::new(Some(COPIES), None, None).map_err(refused)?;
        let pool = Pool { name: NAME.to_owned(), redundancy };
        let temporary = std::env::temp_dir();
        // For this user alone.
        let home = tempfile::Builder::new().prefix("vmseal-lab-").tempdir_in(&temporary);
        let home = home.map_err(|source| CephError::File { path: temporary, source })?;
        let access = access(&record, home.path());
        let this = Self { layout, access, removed: false, _home: home, _lock: lock };
        this.clear()?;
        pools::ensure(&this.layout, &pool, record.osds.len(), observe)?;
        pools::wait_clean(&this.layout, &record.daemons(), observe)?;
        this.make_user()?;
        Ok(this)
    }

    /// How a client gets to it.
    #[must_use]
    pub fn access(&self) -> &RbdPool {
        &self.access
    }

    fn make_user(&self) -> Result<(), CephError> {
        let rights = format!("profile rbd pool={NAME}");
        let make = ["auth", "get-or-create", USER, "mon", "profile rbd", "osd", &rights];
        let keyring = self.access.keyring.as_ref().map(|file| file.display().to_string());
        let to: Vec<_> = keyring.iter().flat_map(|file| ["-o", file.as_str()]).collect();
        Tools { layout: &self.layout }.ceph(&[&make[..], &to[..]].concat())
    }

    /// Removes the pool with all that is in it, and the user.
    ///
    /// # Errors
    /// [`CephError`]; the next run tries it again.
    pub fn remove(mut self) -> Result<(), CephError> {
        self.removed = true;
        self.clear()
    }

    fn clear(&self) -> Result<(), CephError> {
        let tools = Tools { layout: &self.layout };
        let dump: OsdDump = tools.ask(&["osd", "dump"])?;
        if dump.pools.iter().any(|it| it.pool_name == NAME) {
            tools.ceph(&["osd", "pool", "rm", NAME, NAME, "--yes-i-really-really-mean-it"])?;
        }
        // One that is not there is no error.
        tools.ceph(&["auth", "rm", USER])
    }
}

impl Drop for OwnPool {
    fn drop(&mut self) {
        if !self.removed {
            // Something else has failed, and is said.
            let _ = self.clear();
        }
    }
}

/// How a client gets to the pool: by the monitor's address, and by the key in a directory.
fn access(record: &Record, home: &Path) -> RbdPool {
    RbdPool {
        monitors: format!("v2:{}/0", record.listen),
        user: USER.to_owned(),
        keyring: Some(home.join("keyring")),
        pool: NAME.to_owned(),
        namespace: None,
        data_pool: None,
        messenger: match record.messenger {
            arguments::Messenger::Crc => Messenger::Crc,
            arguments::Messenger::Secure => Messenger::Secure,
        },
        create: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ceph::arguments::UpArguments;

    #[test]
    fn without_a_cluster_the_commands_are_told_that_make_one_and_measure() {
        let told = usable(None, "mine.toml").unwrap_err();
        for command in
            ["vmseal lab ceph up --directory DIR", "vmseal lab run mine.toml --ceph-directory DIR"]
        {
            assert!(told.contains(&format!("`{command}`")), "{told}");
        }
    }

    #[test]
    fn a_cluster_that_does_not_run_is_told_with_how_it_is_started() {
        let place = tempfile::tempdir().unwrap();
        let none = check(place.path()).unwrap_err().to_string();
        assert!(none.contains("no cluster"), "{none}");
        let layout = Layout::make(place.path()).unwrap();
        let record = Record::new(&UpArguments::default()).unwrap();
        record.write(&layout).unwrap();
        let stopped = check(place.path()).unwrap_err().to_string();
        let command = format!("vmseal lab ceph up --directory {}", place.path().display());
        assert!(stopped.contains("does not run") && stopped.contains(&command), "{stopped}");
        Record { destroyed: true, ..record }.write(&layout).unwrap();
        assert!(matches!(check(place.path()), Err(CephError::Destroyed { .. })));
    }

    #[test]
    fn clients_get_to_the_pool_as_a_datastore_does() {
        let mut record = Record::new(&UpArguments::default()).unwrap();
        record.messenger = arguments::Messenger::Secure;
        let access = access(&record, Path::new("/x"));
        access.check().unwrap();
        assert_eq!(access.monitors, format!("v2:{}/0", record.listen));
        assert_eq!((access.messenger, &*access.pool), (Messenger::Secure, NAME));
    }
}
