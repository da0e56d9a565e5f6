//! A guest that an agent was about to hand over to another host when it ended: it is on record as handed over, and its filter still has
//! its disks.

use vmseal_api::host::{JobSpec, Power, PowerOff, SendJob, VmSpec};
use vmseal_api::id::TaskId;

use crate::bench::{Bench, running, wait};

/// Has the record of a VM say that its guest is handed over: its disks are as when it began to run.
fn record_as_handed_over(bench: &Bench, spec: &VmSpec) {
    let path = bench.path("run/vms").join(spec.vm.to_string()).join("run.json");
    let content = std::fs::read(&path).unwrap();
    let mut record: serde_json::Value = serde_json::from_slice(&content).unwrap();
    let generation = record["lease"].clone();
    assert!(generation.is_u64(), "{record}");
    record["handed_over"] = generation;
    std::fs::write(&path, record.to_string()).unwrap();
}

#[tokio::test]
async fn a_guest_goes_on_when_the_agent_ended_before_its_filter_let_go_of_its_disks() {
    let bench = Bench::new();
    let agent = bench.agent().await;
    let spec = running(&bench, &*agent).await;
    let filter = bench.process(spec.vm, "filter");
    drop(agent);
    record_as_handed_over(&bench, &spec);

    let agent = bench.agent().await;
    wait(&*agent, spec.vm, |state| state.power == Power::Migrating).await;
    let disks = spec.disks().map(|disk| disk.disk).collect();
    let sent = JobSpec::Send(SendJob { disks, copies: Vec::new(), begin: None });
    agent.cancel_job(spec.vm, TaskId::new(), sent).await.unwrap();
    wait(&*agent, spec.vm, |state| state.power == Power::Running).await;
    assert_eq!(bench.process(spec.vm, "filter"), filter);
    agent.power_off(spec.vm, PowerOff::Force).await.unwrap();
    bench.nothing_runs();
}
