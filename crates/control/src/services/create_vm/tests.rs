//! What a request says of the migrations of a new VM: it is on record, and the VM's host is told.

use vmseal_api::host::version::TREATMENT;
use vmseal_api::migration::MigrationEncryption;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::testing::Fixture;

fn request(mode: MigrationEncryption) -> CreateVm {
    CreateVm { migration_encryption: mode, ..Fixture::request(mode.name(), "plain") }
}

#[tokio::test]
async fn a_new_vm_has_the_mode_of_migrations_that_is_asked_for() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    for mode in MigrationEncryption::ALL {
        let vm = fixture.requested(&services, request(mode)).await;
        assert_eq!(fixture.vm(vm).await.unwrap().migration_encryption, mode);
        let told = fixture.agent.registered_as(vm).unwrap().about.unwrap_or_default();
        assert_eq!(told.migration_encryption, mode);
    }
}

/// An agent of an earlier version, which would refuse it, is not told. The server chooses the hosts that the VM goes to.
#[tokio::test]
async fn a_new_vm_has_its_mode_of_migrations_where_its_host_does_not_know_of_it() {
    let fixture = Fixture::new().await;
    fixture.restart_agent_without(&[TREATMENT]).await;
    let services = fixture.services(Recipient::generate().unwrap());
    let mode = MigrationEncryption::Required;
    let vm = fixture.requested(&services, request(mode)).await;
    assert_eq!(fixture.vm(vm).await.unwrap().migration_encryption, mode);
    let told = fixture.agent.registered_as(vm).unwrap().about.unwrap_or_default();
    assert!(!told.has_treatment(), "{told:?}");
}
