//! A pool that an experiment has for itself, or one for each redundancy that it compares.
//!
//! ```text
//!  lock the cluster ─► remove what a run has left that was killed ─► pools, user ─► (measure) ─► pools and user go ─► unlock
//! ```
//! Nobody changes the cluster meanwhile, so there is one run with such pools at most, and one that is there before is nobody's.

use std::path::Path;

use vmseal_api::datastore::{Messenger, RbdPool};
use vmseal_api::osd_encryption::OSD_KEYS_CAPABILITY;

use super::answers::{OsdDump, Versions};
use super::arguments;
use super::daemon::Daemon;
use super::error::CephError;
use super::layout::{self, Layout, Lock};
use super::pools::{self, Pool};
use super::processes;
use super::progress::Progress;
use super::record::Record;
use super::redundancy::{Raid, Redundancy};
use super::tools::{self, Tools};
use crate::stop::Left;

/// Its name; where there are several, what the names of all begin with.
pub const NAME: &str = "vmseal-lab-run";
/// The user that has rights for them, as docs/ceph.md gives them, and no others.
const USER: &str = "client.vmseal-lab-run";
/// Its copies: one host may fail, as on the vSAN of the documents.
const COPIES: u32 = 2;

/// How a client gets to a pool, with the redundancy that it is for, where redundancies are compared.
pub type Access = (Option<Raid>, RbdPool);

/// A pool, or several, until they are removed or dropped.
#[derive(Debug)]
pub struct OwnPool {
    layout: Layout,
    release: String,
    accesses: Vec<Access>,
    removed: bool,
    /// What stays where the cluster does not answer.
    left: Left,
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
    let record = check(directory).map_err(|error| error.to_string())?;
    tools::check_programs(record.chroot.as_deref()).map_err(|error| error.to_string())?;
    match nix::unistd::geteuid().is_root() {
        true => Ok(directory),
        false => Err("it mounts a pool of the cluster, which takes root".to_owned()),
    }
}

/// A redundancy that is not measured, and why.
pub type LeftOut = (Raid, String);

/// Those of the redundancies that the cluster has OSDs for, and the others, each with why it is not measured.
///
/// # Errors
/// There is no cluster, or its record cannot be read.
pub fn fitting(directory: &Path, wanted: &[Raid]) -> Result<(Vec<Raid>, Vec<LeftOut>), CephError> {
    let (_, record) = Record::open(Layout::find(directory)?)?;
    let osds = record.osds.len();
    let fits = |raid: &Raid| raid.redundancy().osds() as usize <= osds;
    let (fitting, others): (Vec<Raid>, Vec<Raid>) = wanted.iter().copied().partition(fits);
    let why = |raid: Raid| {
        let (needed, at) = (raid.redundancy().osds(), directory.display());
        format!(
            "{raid} needs {needed} OSDs and the cluster has {osds}: vmseal lab ceph up --osds {needed} --directory {at}"
        )
    };
    Ok((fitting, others.into_iter().map(|raid| (raid, why(raid))).collect()))
}

/// The record of the cluster in a directory, which is whole and runs.
fn check(directory: &Path) -> Result<Record, CephError> {
    let (layout, record) = Record::open(Layout::find(directory)?)?;
    if record.destroyed {
        return Err(CephError::Destroyed { directory: directory.to_owned() });
    }
    if processes::running(&layout).iter().any(|it| it.daemon == Daemon::Monitor) {
        return Ok(record);
    }
    let at = directory.display();
    let why =
        format!("the cluster does not run: start it with `vmseal lab ceph up --directory {at}`");
    Err(CephError::Pool { pool: NAME.to_owned(), why })
}

impl OwnPool {
    /// Makes it in a cluster that runs, or one for each of `raids`, and waits until all can be used.
    ///
    /// # Errors
    /// [`CephError`]; then nothing of it stays, unless the cluster does not answer.
    pub fn make(
        directory: &Path,
        raids: &[Raid],
        observe: &mut dyn FnMut(&Progress),
    ) -> Result<Self, CephError> {
        let layout = Layout::find(directory)?;
        let lock = layout.lock()?;
        let (layout, record) = Record::open(layout)?;
        let versions: Versions = Tools { layout: &layout }.ask(&["versions"])?;
        let pools = pools_for(raids)?;
        let keyring = layout.keyring(USER);
        let access = |(raid, pool): &(Option<Raid>, Pool)| (*raid, access(&record, pool, &keyring));
        let accesses = pools.iter().map(access).collect();
        let left = Left::new(format!(
            "in the cluster in {} pools that begin with {NAME}, and {USER}: the next run on it removes them",
            layout.root().display()
        ));
        let release = versions.release();
        let this = Self { layout, release, accesses, removed: false, left, _lock: lock };
        this.clear()?;
        for (_, pool) in &pools {
            pools::ensure(&this.layout, pool, record.osds.len(), observe)?;
        }
        pools::wait_clean(&this.layout, &record.daemons(), observe)?;
        this.make_user()?;
        Ok(this)
    }

    /// How a client gets to each of them, in the order in which they were asked for.
    #[must_use]
    pub fn accesses(&self) -> &[Access] {
        &self.accesses
    }

    /// The release of the cluster's daemons, such as `16.2.15 (pacific)`.
    #[must_use]
    pub fn release(&self) -> &str {
        &self.release
    }

    /// The processes that keep the data of the cluster's pools: OSDs, and what encrypts below them.
    #[must_use]
    pub fn osds(&self) -> Vec<u32> {
        let keeps = |process: &processes::Process| {
            matches!(process.daemon, Daemon::Osd(_) | Daemon::Block(_))
        };
        let running = processes::running(&self.layout).into_iter().filter(keeps);
        running.filter_map(|process| u32::try_from(process.pid).ok()).collect()
    }

    fn make_user(&self) -> Result<(), CephError> {
        let rights = rights(self.accesses.iter().map(|(_, pool)| pool));
        let of_monitors = format!("profile rbd, {OSD_KEYS_CAPABILITY}");
        let make = ["auth", "get-or-create", USER, "mon", &of_monitors, "osd", &rights];
        // In the cluster's directory, which programs in a chroot see, too.
        let keyring = self.layout.keyring(USER).display().to_string();
        Tools { layout: &self.layout }.ceph(&[&make[..], &["-o", &keyring]].concat())
    }

    /// Removes the pools with all that is in them, and the user.
    ///
    /// # Errors
    /// [`CephError`]; the next run tries it again.
    pub fn remove(mut self) -> Result<(), CephError> {
        self.removed = true;
        self.clear().inspect_err(|_| self.left.stays())
    }

    fn clear(&self) -> Result<(), CephError> {
        let tools = Tools { layout: &self.layout };
        let dump: OsdDump = tools.ask(&["osd", "dump"])?;
        let is_there = |name: &str| dump.pools.iter().any(|it| it.pool_name == name);
        for pool in every_pool()? {
            let metadata = pool.metadata();
            for Pool { name, .. } in [Some(&pool), metadata.as_ref()].into_iter().flatten() {
                if is_there(name) {
                    tools.ceph(&[
                        "osd",
                        "pool",
                        "rm",
                        name,
                        name,
                        "--yes-i-really-really-mean-it",
                    ])?;
                }
            }
            if metadata.is_some() && is_there(&pool.name) {
                // Ceph makes a rule for a pool of chunks, and leaves it.
                tools.ceph(&["osd", "crush", "rule", "rm", &pool.name])?;
            }
        }
        // One that is not there is no error.
        tools.ceph(&["auth", "rm", USER])?;
        let path = self.layout.keyring(USER);
        layout::remove(&path).map_err(|source| CephError::File { path, source })
    }
}

impl Drop for OwnPool {
    fn drop(&mut self) {
        if !self.removed {
            // Something else has failed, and is said.
            if self.clear().is_err() {
                self.left.stays();
            }
        }
    }
}

/// The pools for these redundancies; without any the one that other experiments have.
fn pools_for(raids: &[Raid]) -> Result<Vec<(Option<Raid>, Pool)>, CephError> {
    if raids.is_empty() {
        let refused = |why| CephError::Pool { pool: NAME.to_owned(), why };
        let redundancy = Redundancy::new(Some(COPIES), None, None).map_err(refused)?;
        return Ok(vec![(None, Pool { name: NAME.to_owned(), redundancy })]);
    }
    let pool = |raid: &Raid| {
        let name = format!("{NAME}-{raid}");
        (Some(*raid), Pool { name, redundancy: raid.redundancy() })
    };
    Ok(raids.iter().map(pool).collect())
}

/// All that a run may have left.
fn every_pool() -> Result<Vec<Pool>, CephError> {
    let all = pools_for(&[])?.into_iter().chain(pools_for(&Raid::ALL)?);
    Ok(all.map(|(_, pool)| pool).collect())
}

/// What OSDs store of so many bytes in such a pool; without a redundancy in the one that other experiments have.
#[must_use]
pub fn stored(raid: Option<Raid>, bytes: u64) -> u64 {
    match raid {
        Some(raid) => raid.redundancy().stored(bytes),
        None => bytes.saturating_mul(u64::from(COPIES)),
    }
}

/// The rights for these pools, as docs/ceph.md gives them.
fn rights<'a>(pools: impl Iterator<Item = &'a RbdPool>) -> String {
    let names = pools.flat_map(|pool| [Some(&pool.pool), pool.data_pool.as_ref()]).flatten();
    names.map(|name| format!("profile rbd pool={name}")).collect::<Vec<_>>().join(", ")
}

/// How a client gets to a pool: by the monitor's address, and by the key in a file. Images are in the pool beside one of
/// chunks, their data in that.
fn access(record: &Record, pool: &Pool, keyring: &Path) -> RbdPool {
    let metadata = pool.metadata();
    let data_pool = metadata.is_some().then(|| pool.name.clone());
    RbdPool {
        monitors: format!("v2:{}/0", record.listen),
        user: USER.to_owned(),
        keyring: Some(keyring.to_owned()),
        pool: metadata.map_or_else(|| pool.name.clone(), |metadata| metadata.name),
        namespace: None,
        data_pool,
        messenger: match record.messenger {
            arguments::Messenger::Crc => Messenger::Crc,
            arguments::Messenger::Secure => Messenger::Secure,
        },
        create: None,
        changed: None,
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
        let usual = pools_for(&[]).unwrap();
        let access = access(&record, &usual[0].1, Path::new("/x"));
        access.check().unwrap();
        assert_eq!(access.monitors, format!("v2:{}/0", record.listen));
        assert_eq!((access.messenger, &*access.pool), (Messenger::Secure, NAME));
        assert_eq!((usual[0].0, access.data_pool), (None, None));
    }

    #[test]
    fn data_of_raid_6_are_in_a_pool_of_chunks_and_its_names_beside_it() {
        let record = Record::new(&UpArguments::default()).unwrap();
        let both = pools_for(&Raid::ALL).unwrap();
        let of = |at: usize| access(&record, &both[at].1, Path::new("/x"));
        let (raid1, raid6) = (of(0), of(1));
        raid6.check().unwrap();
        assert_eq!((&*raid1.pool, raid1.data_pool.clone()), ("vmseal-lab-run-raid1", None));
        assert_eq!(raid6.pool, "vmseal-lab-run-raid6-metadata");
        assert_eq!(raid6.data_pool.as_deref(), Some("vmseal-lab-run-raid6"));
        assert_eq!(
            rights([&raid1, &raid6].into_iter()),
            "profile rbd pool=vmseal-lab-run-raid1, profile rbd pool=vmseal-lab-run-raid6-metadata, \
             profile rbd pool=vmseal-lab-run-raid6"
        );
        let names: Vec<_> = every_pool().unwrap().into_iter().map(|pool| pool.name).collect();
        assert_eq!(names, [NAME, "vmseal-lab-run-raid1", "vmseal-lab-run-raid6"]);
    }

    #[test]
    fn a_redundancy_that_takes_more_osds_is_told_with_the_command_that_makes_them() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::make(place.path()).unwrap();
        let of = |osds| {
            let record =
                Record::new(&UpArguments { osds: Some(osds), ..UpArguments::default() }).unwrap();
            record.write(&layout).unwrap();
            fitting(place.path(), &Raid::ALL).unwrap()
        };
        assert_eq!(of(6), (Raid::ALL.to_vec(), Vec::new()));
        let (fitting, others) = of(3);
        assert_eq!(fitting, [Raid::Raid1]);
        let [(Raid::Raid6, why)] = &others[..] else { panic!("{others:?}") };
        let at = place.path().display();
        let command = format!("vmseal lab ceph up --osds 6 --directory {at}");
        assert!(why.contains("raid6 needs 6 OSDs") && why.contains(&command), "{why}");
        assert!(!why.contains("raid1"), "{why}");
    }
}
