//! Requests that a host has carried out and the inventory cannot note.

use vmseal_api::problem::{ErrorCode, Problem};

/// The problem of a request that a host has carried out, as `done` says, where `problem` came afterwards. One of the inventory would
/// have it sent again, and so carried out again: a guest would be reset twice. Others stay as they are.
pub(super) fn unnoted(done: &str, problem: Problem) -> Problem {
    if !problem.inventory {
        return problem;
    }
    let why = match problem.code {
        ErrorCode::Busy => "its inventory is busy".to_owned(),
        _ => problem.detail,
    };
    let detail = format!(
        "{done}, and the server could not record or show that: {why}. Sent again, the request would be carried out again"
    );
    Problem::new(ErrorCode::Internal, detail)
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::GuestControl;
    use vmseal_secret::sealed_box::Recipient;

    use super::*;
    use crate::services::{Caller, guests};
    use crate::store::Store;
    use crate::store::events::NewEvent;
    use crate::testing::Fixture;

    #[test]
    fn a_busy_inventory_has_nothing_sent_again_that_is_done() {
        let of = |code| Problem::new(code, "Try again");
        let busy = Problem { inventory: true, ..of(ErrorCode::Busy) };
        let told = unnoted("it was reset", busy);
        assert_eq!((told.code, told.inventory), (ErrorCode::Internal, false), "{told}");
        assert!(told.detail.starts_with("it was reset"), "{told}");
        assert!(!told.detail.contains("Try again"), "{told}");
        let lost = of(ErrorCode::Unreachable);
        assert_eq!(unnoted("it was reset", lost.clone()), lost);
    }

    /// Fills the file of the inventory, which may not grow, until it has no room for an event as long as one about this VM.
    async fn fill(store: &Store, vm: &str) {
        let mut write = store.write().await.unwrap();
        sqlx::query("PRAGMA max_page_count = 1").execute(&mut *write).await.unwrap();
        drop(write);
        loop {
            let mut write = store.write().await.unwrap();
            let added =
                write.event(NewEvent { kind: "k", actor: "a", target: vm, detail: "" }).await;
            if let Err(full) = added {
                assert!(full.may_pass(), "{full}");
                return;
            }
            write.commit().await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_guest_that_was_reset_is_told_so_where_the_inventory_cannot_note_it() {
        let fixture = Fixture::new().await;
        let services = fixture.services(Recipient::generate().unwrap());
        let me = Caller::administrator("me");
        let vm = fixture.running("web").await;
        fill(&fixture.store, "web").await;
        let reset = guests::control(&services, &me, "web", GuestControl::Reset, false).await;
        let problem = reset.err().unwrap();
        assert_eq!(problem.code, ErrorCode::Internal, "{problem}");
        assert!(problem.detail.starts_with("the guest of VM 'web' was reset"), "{problem}");
        assert_eq!(fixture.agent.resets(vm), 1);
    }
}
