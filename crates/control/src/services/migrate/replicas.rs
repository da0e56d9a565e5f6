//! The replicas of a VM that runs: they stay where they are, and its new host goes on with them (docs/decisions/325).

use vmseal_api::host::version::MIGRATE_REPLICAS;
use vmseal_api::host::{ArrivingCopy, DatastoreSpec, Power};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::services::{Services, features};
use crate::store::datastores;
use crate::store::disks::Disk;
use crate::store::hosts::Host;
use crate::store::vms::Vm;

/// The disks that have replicas, and the name of the datastore of each.
fn replicated(disks: &[Disk]) -> impl Iterator<Item = (&Disk, &str)> {
    disks.iter().filter_map(|disk| Some((disk, disk.replica.as_ref()?.1.as_str())))
}

/// Refuses a VM with replicas whose host cannot send it so now.
///
/// # Errors
/// `unsupported`; `unreachable` for a host that does not answer; `wrong-state` for a VM that is paused.
pub(super) fn require(services: &Services, vm: &Vm, disks: &[Disk]) -> Result<(), Problem> {
    let Some((disk, _)) = replicated(disks).next() else { return Ok(()) };
    features::require(services, vm, MIGRATE_REPLICAS, "send VMs that run and have replicas")?;
    let view = services.hosts.view(vm.host);
    if view.vm(vm.id).is_none_or(|seen| seen.power != Power::Paused) {
        return Ok(());
    }
    let detail = format!(
        "VM '{0}' is paused, and has a replica of its disk '{1}': its filter is replaced before it is sent, and QEMU could not send all of its guest then. Unpause it first (vmseal vm unpause {0})",
        vm.name, disk.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Where a host has the datastores of the replicas, and their names; or why it cannot go on with these.
pub(super) async fn places(
    services: &Services,
    disks: &[Disk],
    host: &Host,
    copies: &[ArrivingCopy],
) -> Result<Vec<(DatastoreSpec, String)>, String> {
    if replicated(disks).next().is_none() {
        return Ok(Vec::new());
    }
    if !services.hosts.view(host.id).has(MIGRATE_REPLICAS) {
        return Err(
            "its agent cannot go on with replicas of disks: upgrade vmseal there".to_owned()
        );
    }
    let there = async { datastores::of_host(&mut *services.store.read().await?, host.id).await };
    let there = there.await.map_err(|error| Problem::from(error).detail)?;
    let mut places: Vec<(DatastoreSpec, String)> = Vec::new();
    for (disk, name) in replicated(disks) {
        if copies.iter().any(|copy| copy.disk == disk.id) {
            return Err(format!(
                "it would get a copy of disk '{}' with another key, whose replica would stay behind: share datastore '{1}' (vmseal datastore share {1} --host {2}), or stop the VM and move the disk to a datastore that both hosts have",
                disk.name, disk.datastore_name, host.name
            ));
        }
        let id = disk.replica.as_ref().map(|(place, _)| place.datastore.datastore);
        let known = there.iter().find(|known| Some(known.id) == id);
        let Some(place) = known.and_then(|known| known.spec_on(host.id)) else {
            return Err(format!(
                "it does not have datastore '{name}', which the replica of disk '{}' is on: share that (vmseal datastore share {name} --host {})",
                disk.name, host.name
            ));
        };
        if places.iter().all(|(known, _)| known.datastore != place.datastore) {
            places.push((place, name.to_owned()));
        }
    }
    Ok(places)
}

/// What is to be considered: the replicas are left as they are meanwhile, and copied as a whole then.
pub(super) fn warning(vm: &Vm, disks: &[Disk]) -> Option<String> {
    let of: Vec<_> =
        replicated(disks).map(|(disk, place)| format!("{} (on '{place}')", disk.name)).collect();
    (!of.is_empty()).then(|| {
        format!(
            "nothing is copied to the replicas of disks {} while the VM is sent. When its guest goes on, all of each disk is copied again: until that is done the replica has parts of different times (alarm 'replica-behind'; vmseal disk replica {} DISK). The guest sees two pauses of its disks, one at each host",
            of.join(", "),
            vm.name
        )
    })
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, GuestControl, HostAgent};
    use vmseal_api::id::{DatastoreId, HostId};
    use vmseal_api::model::Replication;
    use vmseal_secret::sealed_box::Recipient;

    use super::*;
    use crate::operation::Operation;
    use crate::services::migrate::tests::planned;
    use crate::services::{Caller, guests};
    use crate::store::policies;
    use crate::testing::Fixture;

    /// The datastore of the replicas, of the first host.
    async fn second(fixture: &Fixture) -> datastores::Datastore {
        let location = DatastoreLocation::Dir { path: "/second".into() };
        let spec = DatastoreSpec { datastore: DatastoreId::new(), location: location.clone() };
        fixture.agent.probe_datastore(spec.clone()).await.unwrap();
        let mut write = fixture.store.write().await.unwrap();
        let local = datastores::find(&mut write, "local").await.unwrap().unwrap();
        let on = datastores::OnHost { location, ..local.hosts[0].clone() };
        let (id, name) = (spec.datastore, "second".to_owned());
        let second = datastores::Datastore { id, name, hosts: vec![on], ..local };
        datastores::insert(&mut write, &second).await.unwrap();
        let policy = policies::find(&mut write, "encrypted").await.unwrap().unwrap();
        let (datastore, bytes_per_second) = ("second".to_owned(), 5 << 20);
        let replica = Some(Replication { datastore, bytes_per_second });
        policies::set(&mut write, &policies::Policy { replica, ..policy }).await.unwrap();
        write.commit().await.unwrap();
        second
    }

    /// Gives another host the datastore of the replicas, by another path.
    async fn share(fixture: &Fixture, second: &datastores::Datastore, host: HostId, name: &str) {
        let location = DatastoreLocation::Dir { path: "/second-there".into() };
        let spec = DatastoreSpec { datastore: second.id, location: location.clone() };
        fixture.agent_of(name).probe_datastore(spec).await.unwrap();
        let (host_name, first) = (name.to_owned(), second.hosts[0].clone());
        let on = datastores::OnHost { host, host_name, location, ..first };
        let mut write = fixture.store.write().await.unwrap();
        datastores::insert_host(&mut write, second, &on).await.unwrap();
        write.commit().await.unwrap();
    }

    #[tokio::test]
    async fn a_vm_goes_with_its_replicas_to_hosts_that_have_their_datastore_and_know_how() {
        let fixture = Fixture::new().await;
        let second = second(&fixture).await;
        let (near, agent) = fixture.add_host("near").await;
        let services = fixture.services(Recipient::generate().unwrap());
        let vm = fixture.requested(&services, Fixture::request("web", "encrypted")).await;
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;

        // A copy of a disk has another key.
        fixture.add_datastore(near, "near", "own").await;
        let told = planned(&fixture, Some("near"), None).await;
        assert!(told.contains("datastore share local --host near"), "{told}");
        fixture.share_datastore(near, "near").await;
        let told = planned(&fixture, Some("near"), None).await;
        assert!(told.contains("datastore share second --host near"), "{told}");
        share(&fixture, &second, near, "near").await;
        let told = planned(&fixture, Some("near"), None).await;
        assert!(told.contains("choose host 'near'; memory"), "{told}");

        let disks = fixture.disks(vm).await;
        let known = fixture.vm(vm).await.unwrap();
        let warned = warning(&known, &disks).unwrap();
        assert!(warned.contains("disk0 (on 'second'), disk1 (on 'second')"), "{warned}");
        // The new host is told of the replicas where it has them.
        let spec = crate::hosts::definition_with(&fixture.store, vm, near, &[]).await.unwrap();
        let there = DatastoreLocation::Dir { path: "/second-there".into() };
        let all = spec
            .disks()
            .all(|disk| disk.replica.as_ref().is_some_and(|it| it.datastore.location == there));
        assert!(all, "{spec:?}");

        agent.lack_features(&[MIGRATE_REPLICAS]);
        agent.restart();
        let told = fixture.eventually("the server sees an earlier agent", async || {
            let told = planned(&fixture, Some("near"), None).await;
            told.contains("cannot go on with replicas").then_some(())
        });
        told.await;
    }

    #[tokio::test]
    async fn a_paused_vm_with_replicas_is_not_sent() {
        let fixture = Fixture::new().await;
        second(&fixture).await;
        let services = fixture.services(Recipient::generate().unwrap());
        let vm = fixture.requested(&services, Fixture::request("web", "encrypted")).await;
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        let me = Caller::administrator("me");
        guests::control(&services, &me, "web", GuestControl::Pause, false).await.unwrap();
        let told = fixture.eventually("the server sees that it is paused", async || {
            let told = planned(&fixture, None, None).await;
            told.contains("vmseal vm unpause web").then_some(told)
        });
        assert!(told.await.contains("replica of its disk 'disk0'"));
    }
}
