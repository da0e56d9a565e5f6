//! Dirty bitmaps: the operations on them, and that they outlive filters, agents, and runs of the VM.

use vmseal_api::filter::{BITMAP_NAME_MAX, BITMAPS_MAX, BitmapChange};
use vmseal_api::host::HostAgent;
use vmseal_api::id::DiskId;
use vmseal_api::problem::ErrorCode;

use super::{Session, done, refused};

/// The dirty bitmaps of the suite's first disk after [`changed`] and [`start`].
pub const LEFT: [&str; 2] = ["b0", "kept"];

/// The names of the dirty bitmaps of the suite's first disk.
pub async fn named(agent: &dyn HostAgent, session: &Session) -> Vec<String> {
    let bitmaps = agent.bitmaps(session.vm(), session.disk(0).disk).await;
    done(bitmaps, "listing bitmaps").into_iter().map(|bitmap| bitmap.name).collect()
}

/// Starts the bitmap `kept` on that disk.
pub async fn start(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let started = agent.change_bitmap(vm, disk, "kept".to_owned(), BitmapChange::Start).await;
    done(started, "starting a bitmap");
}

/// Bitmaps are started up to the limit, cleared and removed; each disk has its own. One is left.
pub async fn changed(agent: &dyn HostAgent, session: &Session) {
    use BitmapChange::{Clear, Remove, Start};
    let (vm, [disk, other]) = (session.vm(), [0, 1].map(|index| session.disk(index).disk));
    let change = |name: &str, change| agent.change_bitmap(vm, disk, name.to_owned(), change);
    assert!(named(agent, session).await.is_empty(), "a bitmap of an earlier run");
    for name in ["", "a b", "a/b", &"a".repeat(BITMAP_NAME_MAX + 1)] {
        refused(change(name, Start).await, ErrorCode::InvalidRequest, name);
    }
    let unknown = agent.bitmaps(vm, DiskId::new()).await;
    refused(unknown, ErrorCode::NotFound, "bitmaps of an unknown disk");
    for how in [Clear, Remove] {
        refused(change("b0", how).await, ErrorCode::NotFound, "changing an unknown bitmap");
    }
    for number in 0..BITMAPS_MAX {
        let all = done(change(&format!("b{number}"), Start).await, "starting one");
        assert_eq!(all.len(), number + 1, "{all:?}");
    }
    refused(change("b0", Start).await, ErrorCode::AlreadyExists, "starting it again");
    refused(change("more", Start).await, ErrorCode::LimitExceeded, "one too many");
    let others = done(agent.bitmaps(vm, other).await, "listing those of another disk");
    assert!(others.is_empty(), "{others:?}");
    let before = done(agent.bitmaps(vm, disk).await, "listing bitmaps");
    let cleared = done(change("b1", Clear).await, "clearing one");
    assert!(cleared[1].since > before[1].since && cleared[0] == before[0], "{cleared:?}");
    for number in 1..BITMAPS_MAX {
        done(change(&format!("b{number}"), Remove).await, "removing one");
    }
    refused(change("b1", Remove).await, ErrorCode::NotFound, "removing it again");
    assert_eq!(named(agent, session).await, ["b0"]);
}
