//! One host's datastores: measured periodically while the host answers, with an alarm for each that is nearly
//! full, does not answer, or has a wrong identity; and for each VM whose policy asks for more than they give.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::{DatastoreLocation, DatastoreUsage, HostAgent};
use vmseal_api::id::{DatastoreId, HostId};
use vmseal_api::model::Connection;
use vmseal_api::problem::Problem;
use vmseal_api::redundancy::PoolFacts;

use super::HostView;
use crate::compliance;
use crate::store::alarms::RaisedAlarm;
use crate::store::datastores::{Datastore, OnHost};
use crate::store::{self, Store};

/// How often: a guest that writes 1 GiB/s fills 10 GiB between two measurements.
const EVERY: Duration = Duration::from_secs(10);

/// The use that raises an alarm, in percent: vSphere's threshold for datastores.
const FULL_FROM: u64 = 85;

/// The use below which the alarm is cleared, in percent: lower, so that it does not flap.
const FULL_UNTIL: u64 = 80;

/// The use at which the alarm says what guests are about to meet, in percent.
const CRITICAL_FROM: u64 = 95;

/// The change of free space that is written to the inventory, as a fraction of the capacity: each write is a
/// transaction.
const NOTED_CHANGE: u64 = 1000;

pub(super) struct DatastoreMonitor {
    pub(super) host: HostId,
    pub(super) store: Arc<Store>,
    pub(super) agent: Arc<dyn HostAgent>,
    pub(super) view: watch::Receiver<HostView>,
    /// Those with an alarm about their free space.
    pub(super) full: HashSet<DatastoreId>,
}

impl DatastoreMonitor {
    /// Runs until it is dropped.
    pub(super) async fn run(mut self) {
        // The sender is dropped with the monitor, which ends together with this.
        while self.view.wait_for(|view| view.connection == Connection::Connected).await.is_ok() {
            if let Err(problem) = self.round().await {
                tracing::warn!(host = %self.host, %problem, "its datastores are not measured");
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Measures all datastores of the host once. A missing answer changes nothing.
    pub(super) async fn round(&mut self) -> Result<(), Problem> {
        let here = store::datastores::of_host(&mut *self.store.read().await?, self.host).await?;
        let (mut raised, mut changed, mut mounts) = (Vec::new(), Vec::new(), Vec::new());
        let mut of_osds = Vec::new();
        for datastore in here {
            // It was unshared meanwhile.
            let Some(spec) = datastore.spec_on(self.host) else { continue };
            let condition = self.agent.measure_datastore(spec).await?;
            if let DatastoreCondition::Available {
                usage, pools, mounted_key, mount, osds, ..
            } = &condition
            {
                // A cluster that does not say it for a moment keeps data as before.
                let news = !pools.is_empty() && *pools != datastore.pools;
                if news || has_changed(datastore.usage, *usage) {
                    changed.push((datastore.id, *usage, news.then(|| pools.clone())));
                }
                let other = |on: &OnHost| on.mounted_key != *mounted_key || on.mount != *mount;
                if datastore.on(self.host).is_some_and(other) {
                    mounts.push((datastore.id, mounted_key.clone(), mount.clone()));
                }
                let news = osds.filter(|told| datastore.is_news_of_osds(*told, self.host));
                of_osds.extend(news.map(|told| (datastore.id, told)));
            }
            raised.extend(self.judge(&datastore, condition));
        }
        if !changed.is_empty() || !mounts.is_empty() || !of_osds.is_empty() {
            let mut write = self.store.write().await?;
            for (datastore, usage, pools) in changed {
                store::datastores::set_usage(&mut write, datastore, usage).await?;
                if let Some(pools) = pools {
                    store::datastores::set_pools(&mut write, datastore, &pools).await?;
                }
            }
            for (datastore, key, mount) in mounts {
                let (key, mount) = (key.as_deref(), mount.as_ref());
                store::datastores::set_mounted_key(&mut write, datastore, self.host, key).await?;
                store::datastores::set_mount(&mut write, datastore, self.host, mount).await?;
            }
            for (datastore, told) in of_osds {
                store::datastores::set_osds_told(&mut write, datastore, told, self.host).await?;
            }
            write.commit().await?;
        }
        let source = store::alarms::source_of_datastores(self.host);
        let mut read = self.store.read().await?;
        raised.extend(compliance::alarms(&mut read, self.host).await?);
        let new_alarms = store::alarms::differ(&mut read, &source, &raised).await?;
        drop(read);
        if !new_alarms {
            return Ok(());
        }
        let mut write = self.store.write().await?;
        store::alarms::replace(&mut write, &source, &raised).await?;
        Ok(write.commit().await?)
    }

    fn judge(
        &mut self,
        datastore: &Datastore,
        condition: DatastoreCondition,
    ) -> Option<RaisedAlarm> {
        let (code, detail) = match condition {
            DatastoreCondition::Available { usage, pools, .. } => {
                let by_use = self.lack_by_use(datastore, usage);
                let lack = full_pool(&pools).or(by_use).or_else(|| nearly_full_pool(&pools));
                ("datastore-full", lack?)
            }
            DatastoreCondition::WrongMark { detail } => ("datastore-wrong", detail),
            DatastoreCondition::Unavailable { detail } => ("datastore-unavailable", detail),
        };
        // Hosts may have datastores of one name.
        let host = datastore.on(self.host).map_or("", |on| on.host_name.as_str());
        let detail = format!("on host '{host}': {detail}");
        Some(RaisedAlarm { code, target: datastore.name.clone(), detail, reason: None })
    }

    /// That a datastore has little room left, by how much of it is used.
    fn lack_by_use(&mut self, datastore: &Datastore, usage: DatastoreUsage) -> Option<String> {
        let used = used_percent(usage);
        let from = if self.full.contains(&datastore.id) { FULL_UNTIL } else { FULL_FROM };
        if used < from {
            self.full.remove(&datastore.id);
            return None;
        }
        self.full.insert(datastore.id);
        let what = if used < CRITICAL_FROM {
            "make room or move disks before thin disks run out of it"
        } else {
            when_full(&datastore.on(self.host)?.location)
        };
        // In steps of five, so that small changes do not change the alarm.
        Some(format!("at least {} % of it are used: {what}", used / 5 * 5))
    }
}

/// That a pool of a datastore takes no writes, as its cluster says.
fn full_pool(pools: &[PoolFacts]) -> Option<String> {
    let why = pools.iter().find(|pool| pool.is_full())?.lack_of_room()?;
    Some(format!(
        "{why}. Until there is room guests with disks on it stand still at their writes, or get errors where their policies say so"
    ))
}

/// That an OSD of a pool of a datastore has little room left, as its cluster says: other pools may have the data that fills it.
fn nearly_full_pool(pools: &[PoolFacts]) -> Option<String> {
    pools.iter().find_map(PoolFacts::lack_of_room)
}

/// What is about to happen in a datastore that is nearly full. A cluster keeps requests until there is room, where a file system refuses them.
fn when_full(location: &DatastoreLocation) -> &'static str {
    match location {
        DatastoreLocation::Dir { .. } => {
            "guests with thin disks or snapshots on it are about to get write errors; make room now"
        }
        DatastoreLocation::Rbd { .. } => {
            "when it is full, guests with disks on it stand still at their writes until there is room; make room now"
        }
    }
}

fn used_percent(usage: DatastoreUsage) -> u64 {
    let used = u128::from(usage.capacity.saturating_sub(usage.free));
    u64::try_from(used * 100 / u128::from(usage.capacity.max(1))).unwrap_or(100)
}

/// Whether the free space differs enough from that in the inventory.
fn has_changed(known: Option<DatastoreUsage>, now: DatastoreUsage) -> bool {
    known.is_none_or(|known| {
        known.capacity != now.capacity
            || known.free.abs_diff(now.free) > now.capacity / NOTED_CHANGE
    })
}

#[cfg(test)]
mod tests {
    use vmseal_api::datastore::{Messenger, SetDatastore};
    use vmseal_api::id::VmId;
    use vmseal_api::osd_encryption::{AskedOsds, OsdEncryption, OsdsUnknown, StatedOsds};
    use vmseal_api::pool_fullness::PoolFullness;
    use vmseal_api::redundancy::{PoolLayout, Redundancy};
    use vmseal_api::request::SetPolicy;
    use vmseal_secret::sealed_box::Recipient;

    use super::*;
    use crate::operation::Operation;
    use crate::services::caller::Caller;
    use crate::services::{Services, datastores as service, remount, set_policy};
    use crate::store::policies;
    use crate::testing::Fixture;

    const TIB: u64 = 1 << 40;

    async fn watch(fixture: &Fixture) -> DatastoreMonitor {
        let (_, view) = watch::channel(HostView::NOTHING);
        let (store, host) = (Arc::clone(&fixture.store), fixture.host);
        DatastoreMonitor {
            host,
            store,
            agent: Arc::new(fixture.agent.clone()),
            view,
            full: HashSet::new(),
        }
    }

    async fn free_shown(fixture: &Fixture) -> u64 {
        let mut read = fixture.store.read().await.unwrap();
        let found = store::datastores::find(&mut read, "local").await.unwrap().unwrap();
        found.usage.unwrap().free
    }

    #[tokio::test]
    async fn a_datastore_that_fills_is_an_alarm_at_its_thresholds_and_its_room_is_noted() {
        let fixture = Fixture::new().await;
        let mut watch = watch(&fixture).await;
        let steps: [(u64, &[&str]); 7] = [
            (50, &[]),
            (84, &[]),
            (85, &["datastore-full local"]),
            (81, &["datastore-full local"]),
            (79, &[]),
            (84, &[]),
            (99, &["datastore-full local"]),
        ];
        for (percent, alarms) in steps {
            let free = TIB - TIB / 100 * percent - (1 << 30);
            fixture.agent.set_free(free);
            watch.round().await.unwrap();
            assert_eq!(fixture.alarms().await, alarms, "{percent} %");
            assert_eq!(free_shown(&fixture).await, free, "{percent} %");
        }
        let told = fixture.events("alarm.raised").await;
        assert!(told.last().unwrap().detail.contains("write errors"), "{told:?}");
        // Too small a change to be written.
        let before = free_shown(&fixture).await;
        fixture.agent.set_free(before - 4096);
        watch.round().await.unwrap();
        assert_eq!(free_shown(&fixture).await, before);
    }

    /// Of a cluster that is full requests are not refused.
    #[tokio::test]
    async fn a_pool_that_is_nearly_full_has_guests_wait_and_a_directory_has_them_fail() {
        let fixture = Fixture::new().await;
        let mut watch = watch(&fixture).await;
        fixture.add_pool("ceph", Vec::new()).await;
        fixture.agent.set_free(TIB / 100);
        watch.round().await.unwrap();
        assert_eq!(fixture.alarms().await.len(), 2);
        let full = fixture.events("alarm.raised").await;
        let full: Vec<_> =
            full.into_iter().filter(|it| it.detail.starts_with("datastore-full")).collect();
        assert_eq!(full.len(), 2, "{full:?}");
        for told in full {
            let waits = told.detail.contains("until there is room");
            assert_eq!(waits, told.target == "ceph", "{told:?}");
            assert_eq!(told.detail.contains("write errors"), !waits, "{told:?}");
        }
    }

    #[tokio::test]
    async fn a_pool_that_its_cluster_marks_for_lack_of_room_is_an_alarm_that_says_why() {
        let fixture = Fixture::new().await;
        let mut watch = watch(&fixture).await;
        fixture.add_pool("ceph", Vec::new()).await;
        let mut pools = [mirrored(3), mirrored(2)].concat();
        pools[1].pool = "data".to_owned();
        for (fullness, used, told) in [
            (None, 0, None),
            (Some(PoolFullness::NearlyFull), 0, Some("pool 'data' is nearly full")),
            (Some(PoolFullness::NearlyFull), 90, Some("at least 90 %")),
            (Some(PoolFullness::Full), 90, Some("pool 'data' is full: an OSD")),
            (Some(PoolFullness::QuotaUsedUp), 0, Some("pool 'data' is full: its quota is used up")),
            (None, 0, None),
        ] {
            pools[1].fullness = fullness;
            fixture.agent.set_pools(pools.clone());
            fixture.agent.set_free(TIB / 100 * (100 - used));
            watch.round().await.unwrap();
            let mut read = fixture.store.read().await.unwrap();
            let raised = store::alarms::list(&mut read).await.unwrap();
            let of_pool = raised.into_iter().find(|it| it.target == "ceph").map(|it| it.detail);
            assert_eq!(of_pool.is_some(), told.is_some(), "{fullness:?}: {of_pool:?}");
            let told = told.unwrap_or_default();
            let detail = of_pool.unwrap_or_default();
            assert!(detail.contains(told), "{detail}");
            let waits = fullness.is_some_and(PoolFullness::stops_writes);
            assert_eq!(detail.contains("stand still at their writes"), waits, "{detail}");
            let known = store::datastores::find(&mut read, "ceph").await.unwrap().unwrap();
            assert_eq!(known.pools, pools, "it is shown");
        }
    }

    #[tokio::test]
    async fn another_ones_mark_is_an_alarm_and_a_hosts_silence_is_not_the_datastores() {
        let fixture = Fixture::new().await;
        let mut watch = watch(&fixture).await;
        watch.round().await.unwrap();
        assert!(fixture.alarms().await.is_empty());
        fixture.agent.change_mark(std::path::Path::new("/store"));
        watch.round().await.unwrap();
        assert_eq!(fixture.alarms().await, ["datastore-wrong local"]);
        fixture.agent.set_reachable(false);
        watch.round().await.unwrap_err();
        assert!(fixture.alarms().await.contains(&"datastore-wrong local".to_owned()));
    }

    #[tokio::test]
    async fn the_key_that_a_mount_uses_is_noted_as_its_host_says_it() {
        let fixture = Fixture::new().await;
        let mut watch = watch(&fixture).await;
        fixture.add_pool("ceph", Vec::new()).await;
        for key in [Some("11111111"), Some("22222222"), None] {
            fixture.agent.set_mounted_key(std::path::Path::new("/ceph"), key);
            watch.round().await.unwrap();
            let mut read = fixture.store.read().await.unwrap();
            let known = store::datastores::find(&mut read, "ceph").await.unwrap().unwrap();
            assert_eq!(known.hosts[0].mounted_key.as_deref(), key);
        }
    }

    #[tokio::test]
    async fn what_the_monitors_tell_of_osds_is_noted_and_silence_takes_nothing_back() {
        let fixture = Fixture::new().await;
        let mut watch = watch(&fixture).await;
        fixture.add_pool("ceph", Vec::new()).await;
        let unknown = |why| OsdEncryption::Unknown { why };
        let (plain, encrypted) =
            (OsdEncryption::No { osds: 3, plain: 3 }, OsdEncryption::Yes { osds: 3 });
        for (told, noted) in [
            (None, None),
            (Some(unknown(OsdsUnknown::NoAnswer)), Some(unknown(OsdsUnknown::NoAnswer))),
            (Some(plain), Some(plain)),
            (Some(unknown(OsdsUnknown::NoAnswer)), Some(plain)),
            (None, Some(plain)),
            (Some(encrypted), Some(encrypted)),
            // The user loses the right to ask.
            (Some(unknown(OsdsUnknown::NotAllowed)), Some(unknown(OsdsUnknown::NotAllowed))),
        ] {
            fixture.agent.set_osds(told);
            watch.round().await.unwrap();
            let mut read = fixture.store.read().await.unwrap();
            let known = store::datastores::find(&mut read, "ceph").await.unwrap().unwrap();
            assert_eq!(known.osds.facts.told, noted, "after {told:?}");
            let local = store::datastores::find(&mut read, "local").await.unwrap().unwrap();
            assert_eq!(local.osds.facts.told, None, "a directory has no OSDs");
        }
    }

    #[tokio::test]
    async fn a_host_that_may_not_ask_takes_nothing_back_that_another_one_was_told() {
        let fixture = Fixture::new().await;
        fixture.add_pool("ceph", Vec::new()).await;
        let (other, _) = fixture.add_host("there").await;
        let mut read = fixture.store.read().await.unwrap();
        let mut ceph = store::datastores::find(&mut read, "ceph").await.unwrap().unwrap();
        let earlier = OsdEncryption::Unknown { why: OsdsUnknown::EarlierVersion };
        let (encrypted, more) = (OsdEncryption::Yes { osds: 3 }, OsdEncryption::Yes { osds: 4 });
        assert!(ceph.is_news_of_osds(earlier, other));
        ceph.osds.facts.told = Some(encrypted);
        ceph.osds.told_by = Some(fixture.host);
        assert!(!ceph.is_news_of_osds(encrypted, other));
        assert!(!ceph.is_news_of_osds(earlier, other));
        assert!(ceph.is_news_of_osds(more, other));
        assert!(ceph.is_news_of_osds(earlier, fixture.host));
        // A host that does not have the datastore any more says nothing again.
        ceph.osds.told_by = Some(other);
        assert!(ceph.is_news_of_osds(earlier, fixture.host));
    }

    /// A pool that keeps so many copies, and goes on with one less.
    fn mirrored(copies: u32) -> Vec<PoolFacts> {
        let layout = PoolLayout::Mirroring { copies, copies_min: copies - 1 };
        let (pool, failure_domain) = ("vms".to_owned(), "host".to_owned());
        vec![PoolFacts { pool, layout, failure_domain, compression: None, fullness: None }]
    }

    /// A host with a pool, its monitor, and two VMs that are not in the pool yet: `web`, which is encrypted and whose id is returned, and
    /// `other`, which is not.
    async fn beside_a_pool() -> (Fixture, DatastoreMonitor, Services, VmId) {
        let fixture = Fixture::new().await;
        let watch = watch(&fixture).await;
        fixture.add_pool("ceph", Vec::new()).await;
        let services = fixture.services(Recipient::generate().unwrap());
        let vm = fixture.made("web", "encrypted").await;
        fixture.made("other", "plain").await;
        (fixture, watch, services, vm)
    }

    #[tokio::test]
    async fn a_vm_on_osds_that_are_not_encrypted_any_more_has_an_alarm_until_they_are() {
        let (fixture, mut watch, services, vm) = beside_a_pool().await;
        let me = Caller::administrator("me");
        let (plain, encrypted) =
            (OsdEncryption::No { osds: 3, plain: 1 }, OsdEncryption::Yes { osds: 3 });
        let unknown = |why| OsdEncryption::Unknown { why };
        fixture.agent.set_osds(Some(encrypted));
        watch.round().await.unwrap();
        let ask = async |asked| {
            let request = SetPolicy { osd_encryption: Some(asked), ..SetPolicy::default() };
            set_policy::set(&services, &me, "encrypted", request, false).await.map(drop).unwrap();
        };
        ask(AskedOsds::Required).await;
        for vm in ["web", "other"] {
            fixture.move_disks(&services, vm, "ceph").await;
        }
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;

        let raised = &["osd-not-encrypted web"][..];
        for (told, alarms) in [
            (encrypted, &[][..]),
            (plain, raised),
            // A cluster that does not answer for a moment has the OSDs that it had.
            (unknown(OsdsUnknown::NoAnswer), raised),
            (encrypted, &[]),
            (unknown(OsdsUnknown::NotAllowed), raised),
            (encrypted, &[]),
            (plain, raised),
        ] {
            fixture.agent.set_osds(Some(told));
            watch.round().await.unwrap();
            assert_eq!(fixture.alarms().await, alarms, "after {told:?}");
        }
        assert!(fixture.agent.runs(vm), "a guest that runs goes on");
        let events = fixture.events("alarm.raised").await;
        let told = &events.last().unwrap().detail;
        assert!(told.contains("policy 'encrypted' requires encrypted OSDs"), "{told}");
        assert!(told.contains("for 1 of 3 OSDs"), "{told}");

        // An administrator knows better; and then asks for nothing.
        let state = async |stated| {
            let request = SetDatastore { osd_encryption: Some(stated), ..SetDatastore::default() };
            service::set(&services, &me, "ceph", request, false).await.map(drop).unwrap();
        };
        state(StatedOsds::Yes).await;
        watch.round().await.unwrap();
        assert!(fixture.alarms().await.is_empty());
        state(StatedOsds::Ask).await;
        watch.round().await.unwrap();
        assert_eq!(fixture.alarms().await, raised);
        ask(AskedOsds::Any).await;
        watch.round().await.unwrap();
        assert!(fixture.alarms().await.is_empty());
    }

    #[tokio::test]
    async fn a_vm_over_connections_in_the_clear_has_an_alarm_until_they_are_encrypted() {
        let (fixture, mut watch, services, vm) = beside_a_pool().await;
        let me = Caller::administrator("me");
        watch.round().await.unwrap();
        for vm in ["web", "other"] {
            fixture.move_disks(&services, vm, "ceph").await;
        }
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        let ask = async |messenger| {
            let request = SetPolicy { messenger: Some(messenger), ..SetPolicy::default() };
            set_policy::set(&services, &me, "encrypted", request, false).await.map(drop).unwrap();
        };
        let told = async || {
            let mut read = fixture.store.read().await.unwrap();
            store::alarms::list(&mut read).await.unwrap().pop().unwrap().detail
        };

        let raised = &["messenger-not-secure web"][..];
        for (asked, alarms) in [
            (Messenger::Crc, &[][..]),
            (Messenger::Secure, raised),
            (Messenger::Crc, &[]),
            (Messenger::Secure, raised),
        ] {
            ask(asked).await;
            watch.round().await.unwrap();
            assert_eq!(fixture.alarms().await, alarms, "{asked:?}");
        }
        let said = told().await;
        assert!(said.contains("disk 'disk0' is in datastore 'ceph'"), "{said}");
        assert!(said.contains("hosts get to pool 'vms' with messenger 'crc'"), "{said}");
        assert!(said.contains("policy set encrypted --messenger any"), "{said}");

        // The mount, and with it what the guest uses, is as it was.
        let secure = SetDatastore { messenger: Some(Messenger::Secure), ..SetDatastore::default() };
        service::set(&services, &me, "ceph", secure, false).await.map(drop).unwrap();
        watch.round().await.unwrap();
        assert_eq!(fixture.alarms().await, raised);
        let said = told().await;
        assert!(said.contains("host 'here' still has it mounted with messenger 'crc'"), "{said}");
        assert!(said.contains("vmseal datastore remount ceph --host here"), "{said}");

        remount::remount(&services, &me, "ceph", "here", false).await.map(drop).unwrap();
        watch.round().await.unwrap();
        assert!(fixture.alarms().await.is_empty());
        assert!(fixture.agent.runs(vm), "a guest that runs goes on");
    }

    #[tokio::test]
    async fn a_vm_whose_pool_loses_its_redundancy_has_an_alarm_until_it_has_it_again() {
        let fixture = Fixture::new().await;
        let mut watch = watch(&fixture).await;
        fixture.add_pool("ceph", Vec::new()).await;
        fixture.made("web", "encrypted").await;
        fixture.made("other", "plain").await;
        let mut write = fixture.store.write().await.unwrap();
        let mut policy = policies::find(&mut write, "encrypted").await.unwrap().unwrap();
        policy.redundancy = Redundancy { failures: 1, ..Redundancy::default() };
        policies::set(&mut write, &policy).await.unwrap();
        write.commit().await.unwrap();

        // Of a directory it is not known.
        watch.round().await.unwrap();
        assert_eq!(fixture.alarms().await, ["less-redundant web"]);
        let services = fixture.services(Recipient::generate().unwrap());
        fixture.agent.set_pools(mirrored(3));
        watch.round().await.unwrap();
        fixture.move_disks(&services, "web", "ceph").await;
        for (copies, alarms) in [(2, &[][..]), (1, &["less-redundant web"]), (3, &[])] {
            fixture.agent.set_pools(mirrored(copies));
            watch.round().await.unwrap();
            assert_eq!(fixture.alarms().await, alarms, "{copies} copies");
        }
        // A cluster that does not say it for a moment keeps data as before.
        fixture.agent.set_pools(Vec::new());
        watch.round().await.unwrap();
        let mut read = fixture.store.read().await.unwrap();
        let known = store::datastores::find(&mut read, "ceph").await.unwrap().unwrap();
        assert_eq!(known.pools, mirrored(3));
    }
}
