//! A guest that panics: its VM is stopped, the guest is restarted or left as it is, and the host writes core dumps by itself, few of
//! them.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use vmseal_api::dump::DumpFormat;
use vmseal_api::hardware::{Hardware, OnCrash};
use vmseal_api::host::{
    ConsoleClaim, ConsoleStream, GuestControl, HostAgent, JobState, NoticeCode, Power, StopReason,
    VmSpec, VmState,
};
use vmseal_api::id::{DumpId, TaskId};
use vmseal_api::problem::ErrorCode;

use super::dumps::{decryption, dump_of};
use super::{BANNER, PANIC, Session, console, done, refused};
use crate::process::panics::RESTARTS_MAX;

async fn registered(agent: &dyn HostAgent, session: &Session, on_crash: OnCrash) {
    let crash_dump_format = Some(DumpFormat::Elf);
    let hardware = Hardware { on_crash, crash_dump_format, ..session.spec.hardware.clone() };
    let spec = VmSpec { hardware, ..session.spec.clone() };
    done(agent.register_vm(spec.clone()).await, "what is done when the guest panics");
    done(agent.register_vm(spec).await, "the same again");
}

/// The console of a guest that was told to panic.
struct Panicked {
    console: ConsoleStream,
    /// What was typed last.
    typed: String,
}

impl Panicked {
    /// Waits until the guest has booted again: what is typed before is lost.
    async fn boots_again(mut self, agent: &dyn HostAgent, session: &Session) {
        let mut seen = Vec::new();
        let boots = async {
            loop {
                let text = String::from_utf8_lossy(&seen);
                if text.rsplit_once(&self.typed).is_some_and(|(_, after)| after.contains(BANNER)) {
                    return;
                }
                let mut chunk = [0; 1024];
                let length = self.console.read(&mut chunk).await.expect("reading the console");
                assert!(length > 0, "the console ended: {}", String::from_utf8_lossy(&seen));
                seen.extend_from_slice(&chunk[..length]);
            }
        };
        let outcome = timeout(session.fixture.timeout, boots).await;
        if outcome.is_err() {
            let (state, seen) = (session.now(agent).await, String::from_utf8_lossy(&seen));
            panic!("the guest does not boot again: {state:?}; {:?} in {seen:?}", self.typed);
        }
    }
}

/// Has the guest panic, and waits until this has led to a state that was not there before.
async fn panic(agent: &dyn HostAgent, session: &Session) -> (VmState, Panicked) {
    let before = session.now(agent).await;
    let console = agent.console(session.vm(), ConsoleClaim::TakeOver).await;
    let mut console = done(console, "the console");
    // A new text each time: what was said before is shown again.
    let typed = format!("{}{}", DumpId::new(), char::from(PANIC));
    console.write_all(typed.as_bytes()).await.expect("typing");
    let state = session.wait(agent, "a panic", |state| {
        state.panics.len() > before.panics.len() || state.power == Power::Off
    });
    (state.await, Panicked { console, typed })
}

fn told(state: &VmState) -> Option<&str> {
    let notice = state.notices.iter().find(|notice| notice.code == NoticeCode::GuestPanicked);
    notice.map(|notice| notice.detail.as_str())
}

/// The VM runs, before and after.
pub async fn running(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    registered(agent, session, OnCrash::CoredumpRestart).await;
    let (state, panicked) = panic(agent, session).await;
    assert_eq!((state.power, state.panics.len()), (Power::Running, 1), "{state:?}");
    assert!(state.panics[0].restarted && told(&state).is_some(), "{state:?}");
    let [known] = &state.panic_dumps[..] else { panic!("{state:?}") };
    assert_eq!((known.format, known.encrypted), (DumpFormat::Elf, true));
    assert!(known.bytes > 0);
    let dump = known.dump;
    panicked.boots_again(agent, session).await;
    console(agent, session).await;
    // One after the other tells nothing more.
    let (state, panicked) = panic(agent, session).await;
    let detail = &state.panics[1].detail;
    assert!(state.panics[1].restarted && detail.contains("in 10 minutes at most"), "{detail}");
    assert_eq!(state.panic_dumps.len(), 1, "{state:?}");
    panicked.boots_again(agent, session).await;

    registered(agent, session, OnCrash::Preserve).await;
    let (state, panicked) = panic(agent, session).await;
    assert_eq!((state.power, state.panics[2].restarted), (Power::Paused, false), "{state:?}");
    assert!(told(&state).is_some_and(|detail| detail.contains("vm dump")), "{state:?}");
    let (task, asked) = (TaskId::new(), DumpId::new());
    done(agent.put_job(vm, task, dump_of(asked, disk)).await, "dumping what stands still");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    assert_eq!(session.now(agent).await.power, Power::Paused);
    done(agent.discard_dump(vm, asked).await, "removing that");
    done(agent.control_guest(vm, GuestControl::Reset).await, "resetting what stands still");
    done(agent.control_guest(vm, GuestControl::Unpause).await, "letting it go on");
    let state = session.now(agent).await;
    assert!(told(&state).is_none_or(|detail| detail.contains("restarted")), "{state:?}");
    panicked.boots_again(agent, session).await;
    console(agent, session).await;

    registered(agent, session, OnCrash::Restart).await;
    for number in 2..RESTARTS_MAX {
        let (state, panicked) = panic(agent, session).await;
        assert_eq!(state.power, Power::Running, "after {number} restarts: {state:?}");
        panicked.boots_again(agent, session).await;
    }
    let (state, _) = panic(agent, session).await;
    let stopped = state.stopped.expect("it was restarted too often");
    assert_eq!((state.power, stopped.reason), (Power::Off, StopReason::GuestPanicked));
    assert!(stopped.detail.contains("is not restarted any more"), "{}", stopped.detail);
    assert!(state.died.is_none(), "no process of the host's has died");

    let to = session.fixture.image.with_file_name(format!("core-{dump}"));
    let (task, job) = (TaskId::new(), decryption(dump, disk, &to));
    done(agent.put_job(vm, task, job.clone()).await, "decrypting what the host has written");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    done(agent.cancel_job(vm, task, job).await, "cancelling");
    done(agent.discard_dump(vm, dump).await, "removing what the host has written");
    done(agent.discard_dump(vm, dump).await, "removing what is removed");
    assert!(session.now(agent).await.panic_dumps.is_empty());

    registered(agent, session, OnCrash::CoredumpDestroy).await;
    done(agent.power_on(vm).await, "starting what was restarted too often");
    session.wait(agent, "running", |state| state.power == Power::Running).await;
    assert!(session.now(agent).await.panics.is_empty(), "panics of an earlier run");
    console(agent, session).await;
    let (state, _) = panic(agent, session).await;
    let stopped = state.stopped.expect("it panicked");
    assert_eq!((state.power, stopped.reason), (Power::Off, StopReason::GuestPanicked));
    assert!(stopped.detail.contains("a core dump"), "{}", stopped.detail);
    let [known] = &state.panic_dumps[..] else { panic!("{:?}", state.panic_dumps) };
    done(agent.discard_dump(vm, known.dump).await, "removing the last one");
    refused(
        agent.control_guest(vm, GuestControl::Reset).await,
        ErrorCode::WrongState,
        "resetting what is off",
    );
    done(agent.register_vm(session.spec.clone()).await, "as before");
    done(agent.power_on(vm).await, "starting");
    session.wait(agent, "running", |state| state.power == Power::Running).await;
    console(agent, session).await;
}
