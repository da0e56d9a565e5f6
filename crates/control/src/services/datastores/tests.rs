use vmseal_api::datastore::Messenger;
use vmseal_api::new_pools::NewPools;
use vmseal_api::osd_encryption::AskedOsds;
use vmseal_api::redundancy::{Layout, Redundancy};
use vmseal_api::request::SetPolicy;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::datastore_keys::tests::request;
use crate::services::set_policy;
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

#[tokio::test]
async fn compression_is_warned_of_and_refused_where_an_agent_cannot_set_it() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let planned = async |create: NewPools| match add(&services, &me, with(create), true).await? {
        Outcome::Planned(plan) => Ok::<_, Problem>((plan.steps.concat(), plan.warnings)),
        Outcome::Done(_) => panic!("it is done"),
    };
    let layout = Some(Layout::ErasureCoding);
    let usual = NewPools { failures: 1, layout, ..NewPools::default() };
    let in_mode = |mode| NewPools { compression: Some(mode), ..usual };
    let says = |warnings: &[String]| warnings.iter().any(|it| it.contains("saves no room"));
    let (steps, warnings) = planned(in_mode(Compression::Aggressive)).await.unwrap();
    assert!(steps.contains("1 failure, erasure-coding; compression aggressive"), "{steps}");
    assert!(says(&warnings) && warnings.len() == 2, "{warnings:?}");
    for quiet in [usual, in_mode(Compression::None)] {
        let (_, warnings) = planned(quiet).await.unwrap();
        assert!(!says(&warnings), "{warnings:?}");
    }

    fixture.restart_agent_without(&[POOL_COMPRESSION]).await;
    let refused = planned(in_mode(Compression::None)).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported);
    let why = "host 'here' makes no pools with compression of one's choice: upgrade";
    assert!(refused.detail.contains(why), "{refused}");
    planned(usual).await.unwrap();
}

/// Adds the datastore `ceph`, and makes its pools for this policy.
fn for_policy(policy: &str, data_pool: Option<&str>) -> AddDatastore {
    let mut request = with(NewPools::default());
    let DatastoreLocation::Rbd { pool, .. } = &mut request.location else { unreachable!() };
    pool.data_pool = data_pool.map(str::to_owned);
    pool.create = None;
    AddDatastore { create_for_policy: Some(policy.to_owned()), ..request }
}

/// The same with this compression of the pool of data.
fn compressed(mut request: AddDatastore, create: NewPools) -> AddDatastore {
    let DatastoreLocation::Rbd { pool, .. } = &mut request.location else { unreachable!() };
    pool.create = Some(create);
    request
}

/// Has the policy `encrypted` ask for this.
async fn ask(services: &Services, request: SetPolicy) {
    let me = Caller::administrator("me");
    set_policy::set(services, &me, "encrypted", request, false).await.unwrap();
}

fn failures(failures: u8, layout: Option<Layout>) -> Option<Redundancy> {
    Some(Redundancy { failures, layout, ..Redundancy::default() })
}

#[tokio::test]
async fn pools_that_are_made_for_a_policy_have_what_it_asks_for() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    ask(
        &services,
        SetPolicy {
            redundancy: failures(2, Some(Layout::ErasureCoding)),
            data_chunks: Some(8),
            failure_domain: Some("rack".to_owned()),
            ..SetPolicy::default()
        },
    )
    .await;
    let asked = for_policy("encrypted", Some("ec"));
    let resolved = pools_for_policy::resolve(&services, asked.clone()).await.unwrap();
    let numbers: NewPools = "2,erasure-coding,rack".parse().unwrap();
    let numbers = NewPools { data_chunks: Some(8), ..numbers };
    assert_eq!(resolved.location.pool().unwrap().create, Some(numbers));
    // How they are compressed is no policy's.
    let with_mode = NewPools { compression: Some(Compression::Force), ..NewPools::default() };
    let both = compressed(asked, with_mode);
    let resolved = pools_for_policy::resolve(&services, both.clone()).await.unwrap();
    let wanted = NewPools { compression: Some(Compression::Force), ..numbers };
    assert_eq!(resolved.location.pool().unwrap().create, Some(wanted));

    let me = Caller::administrator("me");
    let planned = add(&services, &me, both.clone(), true).await.unwrap();
    let Outcome::Planned(plan) = planned else { panic!("it is done") };
    let made = "make the pool 'vms' and 'ec' for policy 'encrypted' (2 failures, erasure-coding, 8 data chunks, each copy in another rack; compression force), unless";
    assert!(plan.steps[0].starts_with(made), "{}", plan.steps[0]);
    let risk = plan.warnings.iter().any(|it| it.contains("lose writes"));
    assert!(risk && plan.warnings.len() == 2, "{:?}", plan.warnings);
    let Outcome::Done(added) = add(&services, &me, both, false).await.unwrap() else {
        panic!("it is not done")
    };
    let kept = added.hosts[0].location.pool().unwrap().create;
    assert_eq!(kept, None, "a pool that has vanished would be made again");
}

#[tokio::test]
async fn a_pool_is_not_planned_with_the_name_of_an_unfinished_one() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let layout = Some(Layout::ErasureCoding);
    let numbers = with(NewPools { failures: 1, layout, ..NewPools::default() });
    let redundancy = failures(1, layout);
    ask(&services, SetPolicy { redundancy, ..SetPolicy::default() }).await;
    for request in [numbers, for_policy("encrypted", Some("ec"))] {
        add(&services, &me, request.clone(), true).await.unwrap();
        for (field, is_of_data) in
            [("location.pool.pool", false), ("location.pool.data_pool", true)]
        {
            let mut request = request.clone();
            let DatastoreLocation::Rbd { pool, .. } = &mut request.location else { unreachable!() };
            match is_of_data {
                true => pool.data_pool = Some("ec.vmseal-unfinished".to_owned()),
                false => pool.pool = "vms.vmseal-unfinished".to_owned(),
            }
            let refused = add(&services, &me, request, true).await.unwrap_err();
            assert_eq!(refused.field.as_deref(), Some(field), "{refused}");
            assert!(refused.detail.contains("must not end with '.vmseal-unfinished'"), "{refused}");
        }
    }
}

#[tokio::test]
async fn pools_for_a_policy_are_refused_where_its_disks_would_not_be() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let refused = async |request: AddDatastore, field: &str, why: &str| {
        let refused = add(&services, &me, request, true).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some(field), "{refused}");
        assert!(refused.detail.contains(why), "{refused}");
    };
    let named = "create_for_policy";
    refused(for_policy("none", None), named, "none").await;
    refused(for_policy("encrypted", None), named, "--failures-to-tolerate NUMBER").await;
    let numbers = NewPools { failures: 1, ..NewPools::default() };
    let both = compressed(for_policy("encrypted", None), numbers);
    refused(both, named, "Give one of the two").await;
    let location = DatastoreLocation::Dir { path: "/more".into() };
    let directory = AddDatastore { location, ..for_policy("encrypted", None) };
    refused(directory, named, "a directory has no pools").await;

    let redundancy = failures(1, None);
    ask(&services, SetPolicy { redundancy, ..SetPolicy::default() }).await;
    let with_data = for_policy("encrypted", Some("ec"));
    refused(with_data, "location.pool.data_pool", "must not be given").await;
    let redundancy = failures(1, Some(Layout::ErasureCoding));
    ask(&services, SetPolicy { redundancy, ..SetPolicy::default() }).await;
    let without_data = for_policy("encrypted", None);
    refused(without_data, "location.pool.data_pool", "must be named").await;
    // Agents make pools for the domains that were there first.
    let failure_domain = Some("row".to_owned());
    ask(&services, SetPolicy { failure_domain, ..SetPolicy::default() }).await;
    refused(for_policy("encrypted", Some("ec")), named, "pools are made for 'osd'").await;
    let failure_domain = Some(String::new());
    let messenger = Some(Messenger::Secure);
    ask(&services, SetPolicy { failure_domain, messenger, ..SetPolicy::default() }).await;
    let mut in_the_clear = for_policy("encrypted", Some("ec"));
    add(&services, &me, in_the_clear.clone(), true).await.unwrap();
    let DatastoreLocation::Rbd { pool, .. } = &mut in_the_clear.location else { unreachable!() };
    pool.messenger = Messenger::Crc;
    refused(in_the_clear, "location.pool.messenger", "must be 'secure'").await;
    let osd_encryption = Some(AskedOsds::Required);
    ask(&services, SetPolicy { osd_encryption, ..SetPolicy::default() }).await;
    let osd_encryption = Some(StatedOsds::No);
    let stated = AddDatastore { osd_encryption, ..for_policy("encrypted", Some("ec")) };
    refused(stated, "osd_encryption", "states that OSDs are not encrypted").await;
}
