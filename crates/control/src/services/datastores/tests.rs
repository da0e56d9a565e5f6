use vmseal_api::new_pools::NewPools;
use vmseal_api::redundancy::Layout;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::datastore_keys::tests::request;
use crate::testing::Fixture;

/// Adds the datastore `ceph`, and makes its pools so.
fn with(create: NewPools) -> AddDatastore {
    let mut request = request(None);
    let DatastoreLocation::Rbd { pool, .. } = &mut request.location else { unreachable!() };
    pool.keyring = Some("/etc/ceph/keyring".into());
    pool.data_pool = Some("ec".to_owned());
    pool.create = Some(create);
    request
}

#[tokio::test]
async fn a_number_of_data_chunks_is_refused_past_its_limits_and_where_an_agent_cannot_make_it() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let planned = async |create: NewPools| match add(&services, &me, with(create), true).await? {
        Outcome::Planned(plan) => Ok::<_, Problem>(plan.steps.concat()),
        Outcome::Done(_) => panic!("it is done"),
    };
    let layout = Some(Layout::ErasureCoding);
    let usual = NewPools { failures: 2, layout, ..NewPools::default() };
    let eight = NewPools { data_chunks: Some(8), ..usual };
    let steps = planned(eight).await.unwrap();
    let made = "the pool 'vms' and 'ec' for 2 failures, erasure-coding, 8 data chunks";
    assert!(steps.contains(made), "{steps}");
    for wrong in [NewPools { data_chunks: Some(1), ..usual }, NewPools { layout: None, ..eight }] {
        let refused = planned(wrong).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("location.pool.create.data_chunks"));
    }

    fixture.agent.lack_features(&[DATA_CHUNKS]);
    fixture.agent.restart();
    let (hosts, here) = (&services.hosts, fixture.host);
    let is_old = async || {
        (hosts.connected(here).is_ok() && !hosts.view(here).has(DATA_CHUNKS)).then_some(())
    };
    fixture.eventually("the old agent is connected", is_old).await;
    let refused = planned(eight).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported);
    let why =
        "host 'here' makes no pools with a number of data chunks (k) of one's choice: upgrade";
    assert!(refused.detail.contains(why), "{refused}");
    planned(usual).await.unwrap();
}
