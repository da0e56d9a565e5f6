//! Concurrency limits of one host.

use super::*;
use crate::tasks::limits::HOST_WORK;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_work_on_a_host_queues_and_power_does_not_wait_for_it() {
    let fixture = Fixture::new().await;
    let other = fixture.made("other", "plain").await;
    fixture.agent.set_work(LONG);
    let mut tasks = Vec::new();
    for index in 0..HOST_WORK + 2 {
        tasks.push(fixture.create(&format!("web{index}"), "plain").await.1);
    }
    let count = async |state: TaskState| {
        let mut count = 0;
        for task in &tasks {
            count += usize::from(fixture.task(*task).await.state == state);
        }
        count
    };
    fixture
        .eventually("two are queued", async || (count(TaskState::Queued).await == 2).then_some(()))
        .await;
    assert_eq!(count(TaskState::Running).await, HOST_WORK);
    fixture.begin(Operation::StartVm { vm: other, boot_once: None }, "other").await;
    let started = async || (fixture.calls(Call::PowerOn) > 0).then_some(());
    fixture.eventually("a start does not wait for imports", started).await;
    // A queued task can be cancelled, and another runs when it gets its permit.
    let queued = tasks.pop().unwrap();
    fixture.engine.cancel(&queued.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(queued).await.state, TaskState::Cancelled);
    let first = tasks.remove(0);
    fixture.engine.cancel(&first.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(first).await.state, TaskState::Cancelled);
    fixture
        .eventually("the last one has its turn", async || {
            let mut running = 0;
            for task in &tasks {
                running += usize::from(fixture.task(*task).await.state == TaskState::Running);
            }
            (running == HOST_WORK).then_some(())
        })
        .await;
}
