//! What a host says of a datastore to an inventory that knows nothing of it, and of what VMs use.

use vmseal_api::drain::OnDrain;
use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::host::survey::FoundDescriptor;
use vmseal_api::host::{AboutVm, VmChange};
use vmseal_api::migration::MigrationEncryption;

use super::*;

/// The VM's descriptor, once it is authenticated.
async fn described(agent: &dyn HostAgent, session: &Session) -> VmDescriptor {
    let give_up = Instant::now() + session.fixture.timeout;
    loop {
        let found = done(agent.survey_datastore(session.place.location.clone()).await, "survey");
        assert_eq!(found.mark, Some(session.place.datastore));
        let of_vm = found.vms.into_iter().find(|found| found.vm == session.vm());
        if let Some(FoundDescriptor::Read { descriptor, .. }) = of_vm.map(|it| it.descriptor)
            && descriptor.mac.is_some()
        {
            return *descriptor;
        }
        assert!(Instant::now() < give_up, "the VM has no authenticated descriptor");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the VM's descriptor has this.
pub async fn described_as(
    agent: &dyn HostAgent,
    session: &Session,
    what: &str,
    is: impl Fn(&VmDescriptor) -> bool,
) {
    let give_up = Instant::now() + session.fixture.timeout;
    while !is(&described(agent, session).await) {
        assert!(Instant::now() < give_up, "its descriptor does not have {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A VM that runs is described on its datastore, and uses its host.
pub async fn of_running(agent: &dyn HostAgent, session: &Session) {
    let descriptor = described(agent, session).await;
    let spec = &session.spec;
    assert_eq!((descriptor.name.as_str(), descriptor.vcpus), (spec.name.as_str(), Some(1)));
    assert_eq!((descriptor.memory, &descriptor.key), (Some(spec.memory), &spec.key));
    assert_eq!(descriptor.nics, spec.nics().cloned().collect::<Vec<_>>());
    let disks: Vec<_> = descriptor.disks.iter().map(|disk| disk.disk).collect();
    assert_eq!(disks, spec.disks().map(|disk| disk.disk).collect::<Vec<_>>());
    // What only the policy's name differs in is no change of a VM that runs, and its descriptor has it.
    let named = VmSpec { policy: Some("gold".to_owned()), ..spec.clone() };
    done(agent.register_vm(named).await, "registering it with a policy");
    described_as(agent, session, "its policy", |it| it.policy.as_deref() == Some("gold")).await;
    // Nor is what users say of it; where the server does not say it, that stays.
    let labels = [("tier".to_owned(), "gold".to_owned())].into();
    let said = AboutVm {
        description: "the shop\n".to_owned(),
        labels,
        autostart: true,
        migration_encryption: MigrationEncryption::Required,
        on_drain: OnDrain::Stop,
        template: false,
    };
    let about = VmSpec { about: Some(said.clone()), ..spec.clone() };
    done(agent.register_vm(about).await, "registering it with what users say");
    described_as(agent, session, "what users say", |it| it.about == said).await;
    done(agent.register_vm(spec.clone()).await, "and without");
    described_as(agent, session, "no policy", |it| it.policy.is_none()).await;
    described_as(agent, session, "what was said before", |it| it.about == said).await;
    // An inventory that was restored and lacks a disk or a card of it is not to write over that.
    let ask = |spec: VmSpec| {
        agent.examine_change(session.vm(), VmChange::Restored { spec: Box::new(spec) })
    };
    done(ask(spec.clone()).await, "restored, and the same");
    let fewer = VmSpec { devices: spec.devices[1..].to_vec(), ..spec.clone() };
    refused(ask(fewer).await, ErrorCode::WrongState, "restored, and older");
    let usage = done(agent.usage().await, "usage");
    let used = usage.vms.iter().find(|used| used.vm == session.vm()).expect("it runs");
    assert!(used.counters.memory_resident > 0, "{used:?}");
}

/// A VM that is off uses nothing.
pub async fn of_one_that_is_off(agent: &dyn HostAgent, session: &Session) {
    let usage = done(agent.usage().await, "usage");
    assert!(usage.vms.iter().all(|used| used.vm != session.vm()), "{usage:?}");
    let location = DatastoreLocation::Dir { path: session.fixture.datastore.join("none") };
    match agent.survey_datastore(location).await {
        Ok(found) => assert_eq!((found.mark, found.vms.len()), (None, 0)),
        // A real host looks whether the directory is there.
        Err(problem) => assert_eq!(problem.code, ErrorCode::InvalidRequest, "{problem}"),
    }
}
