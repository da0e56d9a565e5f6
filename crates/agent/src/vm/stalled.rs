//! Disks whose storage does not end what their guest has asked: the guest waits, or requests of the disk fail, as its policy says.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use vmseal_api::filter::FilterStatus;
use vmseal_api::host::{DatastoreLocation, DiskSpec, Notice, NoticeCode, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::rbd::POOLS_ATTRIBUTE;
use vmseal_api::redundancy::PoolFacts;

use crate::storage::pool;
use crate::timed::quick_call;

/// How long a request of a guest may wait for storage before that is reported: longer than a disk takes to give up a sector, a cluster of
/// Ceph to put another OSD in the place of one that has died, or an NFS server to be restarted.
pub const DISK_STALL: Duration = Duration::from_secs(30);

/// How old the oldest request of a disk is that stalls, and whether its requests fail; none of a disk that does not, for which a request may
/// wait for `most`.
fn stall(status: &FilterStatus, disk: DiskId, most: Duration) -> Option<(Duration, bool)> {
    let told = status.disks.iter().find(|told| told.disk == disk)?;
    let age = Duration::from_millis(told.oldest_milliseconds?);
    // What fails is told however short the time is after which it does.
    (age >= most || told.fails).then_some((age, told.fails))
}

/// The pools in which disks stall, by the places where they are mounted, each with the reason why it takes no writes. The reason is absent
/// where the pool takes them, or has not said in time whether it does.
pub type FullPools = BTreeMap<PathBuf, Option<String>>;

/// Asks the clusters of disks that stall whether they lack room.
pub async fn full_pools(spec: &VmSpec, status: &FilterStatus, most: Duration) -> FullPools {
    let stalls = |disk: &&DiskSpec| stall(status, disk.disk, most).is_some();
    let stalled: Vec<&DiskSpec> = spec.disks().filter(stalls).collect();
    let mut full = FullPools::new();
    for disk in stalled {
        let location = &disk.datastore.location;
        let path = location.path();
        if location.pool().is_none() || full.contains_key(path) {
            continue;
        }
        let asked = location.clone();
        // Apart from other calls there, which may hang while this is answered.
        let place = path.join(POOLS_ATTRIBUTE);
        let told = quick_call(&place, move || Ok(pool::facts(&asked))).await.unwrap_or_default();
        let why = told.iter().find(|pool| pool.is_full()).and_then(PoolFacts::lack_of_room);
        full.insert(path.to_owned(), why);
    }
    full
}

/// The disks of a VM that stall, and since when.
#[derive(Debug, Default)]
pub struct Stalled(BTreeMap<DiskId, Timestamp>);

impl Stalled {
    /// The notices for operators from a filter's status, as of `now`. A request may wait for `most`.
    pub fn notices(
        &mut self,
        spec: &VmSpec,
        (status, full): (&FilterStatus, &FullPools),
        most: Duration,
        now: Timestamp,
    ) -> Vec<Notice> {
        let stalls = |disk: &DiskId| stall(status, *disk, most);
        // One that goes on to stall keeps its time, whichever request is the oldest by now.
        self.0.retain(|disk, _| stalls(disk).is_some());
        let mut notices = Vec::new();
        for disk in spec.disks() {
            let Some((age, fails)) = stalls(&disk.disk) else { continue };
            let age = SignedDuration::try_from(age).unwrap_or(SignedDuration::MAX);
            let began = now.checked_sub(age).unwrap_or(Timestamp::MIN);
            let since = *self.0.entry(disk.disk).or_insert(began);
            let detail = detail(disk, since, fails, full);
            notices.push(Notice { code: NoticeCode::DiskStalled, disk: Some(disk.disk), detail });
        }
        notices
    }
}

fn detail(disk: &DiskSpec, since: Timestamp, fails: bool, full: &FullPools) -> String {
    let location = &disk.datastore.location;
    let why = full.get(location.path()).and_then(Option::as_ref);
    let path = location.path().display();
    let look = match (location, why) {
        (DatastoreLocation::Dir { .. }, _) => {
            format!("See that {path} and what it is mounted from answer")
        }
        (DatastoreLocation::Rbd { .. }, Some(why)) => format!("As the cluster says, {why}"),
        (DatastoreLocation::Rbd { pool, .. }, None) => format!(
            "See whether the cluster is well (ceph health detail): its network, OSDs that are down, placement groups of pool '{}' that are not active, room",
            pool.pool
        ),
    };
    let (meanwhile, then) = if fails {
        (
            "Requests of the disk fail, as its policy says; a write that has failed may be done or not",
            "When the datastore has answered all that it was given, the disk serves again by itself; see in the guest what it has made of the errors",
        )
    } else {
        (
            "The guest waits; nothing fails, and nothing is lost",
            "When the request ends, the guest goes on by itself",
        )
    };
    format!(
        "the datastore of disk '{}' ({path}) has not ended a request of the guest since {since:.0}. {meanwhile}. {look}. {then}",
        disk.name
    )
}

#[cfg(test)]
mod tests {
    use vmseal_api::filter::{DiskActivity, DiskCounters, DiskStatus};
    use vmseal_api::host::{DatastoreSpec, Device};
    use vmseal_api::id::DatastoreId;

    use super::*;

    fn disk(name: &str) -> DiskSpec {
        let location = DatastoreLocation::Dir { path: "/one".into() };
        DiskSpec {
            disk: DiskId::new(),
            name: name.to_owned(),
            datastore: DatastoreSpec { datastore: DatastoreId::new(), location },
            size: 4096,
            encrypted: false,
            allocation: Default::default(),
            role: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            facts: None,
        }
    }

    /// The status of a filter whose disks have requests of these ages.
    fn status(spec: &VmSpec, ages: [Option<u64>; 2]) -> FilterStatus {
        let disks = spec.disks().zip(ages).map(|(disk, oldest_milliseconds)| DiskStatus {
            waits: None,
            file: None,
            disk: disk.disk,
            state: DiskActivity::Connected,
            driver: None,
            oldest_milliseconds,
            fails: false,
            counters: DiskCounters::default(),
            last_error: None,
            bitmaps: Vec::new(),
            replica: None,
            mirror: None,
        });
        FilterStatus {
            replaces: true,
            retires: true,
            mirrors: true,
            completes: true,
            grows: true,
            channels: true,
            version: vmseal_api::filter::VERSION,
            pid: 1,
            vm: spec.vm,
            disks: disks.collect(),
            confinement: None,
        }
    }

    #[test]
    fn a_disk_that_ends_nothing_is_reported_since_when_until_it_does() {
        let mut spec = crate::process::run_dir::tests::spec();
        spec.devices = ["root", "data"].map(|name| Device::Disk(disk(name))).into();
        let mut stalled = Stalled::default();
        let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        // Requests of the first one fail, after a time of its own.
        let mut failing = status(&spec, [Some(6000), None]);
        failing.disks[0].fails = true;
        let none = FullPools::new();
        let told = Stalled::default().notices(&spec, (&failing, &none), DISK_STALL, start);
        assert!(told.len() == 1 && told[0].detail.contains("of the disk fail"), "{told:?}");
        let mut at = |seconds: i64, ages| {
            let now = start + SignedDuration::from_secs(seconds);
            stalled.notices(&spec, (&status(&spec, ages), &none), DISK_STALL, now)
        };
        assert_eq!(at(0, [None, Some(29_999)]), [], "too early");
        let told = at(30, [Some(3), Some(30_000)]);
        let [Notice { code: NoticeCode::DiskStalled, disk, detail }] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!(*disk, spec.disk_at(1).map(|disk| disk.disk));
        for part in ["'data'", "/one", "since 2026-01-01T00:00:00Z"] {
            assert!(detail.contains(part), "{part}: {detail}");
        }
        // The oldest one has ended, and the next one is as stuck.
        assert_eq!(at(70, [None, Some(40_000)]), told, "the text changes while nothing does");
        assert_eq!(at(80, [None, Some(2)]), [], "it goes on");
        let again = at(200, [None, Some(31_000)]);
        assert!(again[0].detail.contains("since 2026-01-01T00:02:49Z"), "{again:?}");
    }

    #[tokio::test]
    async fn a_disk_whose_pool_is_full_is_reported_with_that_reason() {
        let mut spec = crate::process::run_dir::tests::spec();
        let mut disks = ["root", "data"].map(disk);
        let place = PathBuf::from("/nowhere/ceph");
        let pool = Box::new(crate::storage::pool::tests::pool());
        disks[1].datastore.location = DatastoreLocation::Rbd { path: place.clone(), pool };
        spec.devices = disks.map(Device::Disk).into();
        let status = status(&spec, [Some(30_000), Some(30_000)]);
        // Nothing is mounted there that would say it; a directory is not asked.
        let mut full = full_pools(&spec, &status, DISK_STALL).await;
        assert_eq!(full, FullPools::from([(place.clone(), None)]));
        assert_eq!(full_pools(&spec, &status, DISK_STALL * 2).await, FullPools::new());
        let told = |full: &FullPools| {
            let now = "2026-01-01T00:00:00Z".parse().unwrap();
            let told = Stalled::default().notices(&spec, (&status, full), DISK_STALL, now);
            told.into_iter().map(|notice| notice.detail).collect::<Vec<_>>()
        };
        let known = told(&full);
        assert!(known[1].contains("ceph health detail"), "{known:?}");
        full.insert(place, Some("pool 'ec' is full: its quota is used up".to_owned()));
        let known = told(&full);
        assert!(known[1].contains("As the cluster says, pool 'ec' is full"), "{known:?}");
        assert!(known[0].contains("See that /one"), "{known:?}");
    }
}
