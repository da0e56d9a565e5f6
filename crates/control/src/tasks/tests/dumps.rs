//! Core dumps that are written, decrypted and removed.

use std::path::PathBuf;

use vmseal_api::id::DumpId;
use vmseal_api::request::TakeDump;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{Caller, dumps as service};
use crate::store::dumps;

/// What is done with a core dump of a VM that runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Dump {
    Take,
    /// It is decrypted at once.
    TakeAndDecrypt,
    Decrypt,
    Delete,
}

const TO: &str = "/exports/core";

async fn rows(fixture: &Fixture, vm: VmId) -> Vec<dumps::Dump> {
    dumps::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

impl Dump {
    fn takes(self) -> bool {
        matches!(self, Self::Take | Self::TakeAndDecrypt)
    }

    fn decrypts(self) -> bool {
        matches!(self, Self::TakeAndDecrypt | Self::Decrypt)
    }

    fn of(self, vm: VmId, dump: DumpId) -> Operation {
        match self {
            Self::Take => Operation::DumpVm { vm, dump, to: None },
            Self::TakeAndDecrypt => Operation::DumpVm { vm, dump, to: Some(TO.into()) },
            Self::Decrypt => Operation::DecryptDump { vm, dump, to: TO.into() },
            Self::Delete => Operation::DeleteDump { vm, dump },
        }
    }

    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let vm = fixture.running("web").await;
        if !self.takes() {
            let dump = fixture.add_dump(vm, "first").await;
            fixture.done(Self::Take.of(vm, dump), "web").await;
        }
        vm
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        let dump = match self.takes() {
            true => fixture.add_dump(vm, "first").await,
            false => rows(fixture, vm).await[0].id,
        };
        self.of(vm, dump)
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        steps::of(&self.of(VmId::new(), DumpId::new()))
    }

    pub(super) fn is_past_commit(self, step: &str) -> bool {
        is_past_commit(self.steps(), step)
    }

    async fn assert_there(fixture: &Fixture, vm: VmId, there: bool, what: &str) {
        fixture.assert_whole(vm, Power::Running, what).await;
        let (rows, files) = (rows(fixture, vm).await, fixture.agent.dumps());
        assert_eq!((rows.len(), files.len()), (there.into(), there.into()), "{what}: {rows:?}");
        assert!(rows.iter().all(|row| row.bytes.is_some()), "{what}: {rows:?}");
    }

    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        Self::assert_there(fixture, vm, self != Self::Delete, what).await;
        let named: Vec<PathBuf> = self.decrypts().then(|| TO.into()).into_iter().collect();
        assert_eq!(fixture.agent.exports(), (named, 0), "{what}");
    }

    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        Self::assert_there(fixture, vm, !self.takes(), what).await;
        assert_eq!(fixture.agent.exports(), (vec![], 0), "{what}");
    }

    /// Past its commit step, or the decrypted file had its name: the problem says so.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &mut Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        if self == Self::Decrypt {
            assert!(problem.detail.contains("is whole"), "{what}: {problem}");
            assert_eq!(fixture.agent.exports(), (vec![TO.into()], 0), "{what}");
            return;
        }
        assert!(problem.detail.contains("again once the cause is fixed"), "{what}: {problem}");
        if self == Self::Delete && !rows(fixture, vm).await.is_empty() {
            // The fault is still there.
            fixture.restart(|_| {}).await;
            let operation = self.operation(fixture, vm).await;
            let task = fixture.begin(operation, "web").await;
            assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
        }
        Self::assert_there(fixture, vm, self != Self::Delete, what).await;
    }
}

#[tokio::test]
async fn a_core_dump_is_written_or_nothing_of_it_is_left() {
    matrix(Kind::Dump(Dump::Take)).await;
    matrix(Kind::Dump(Dump::TakeAndDecrypt)).await;
}

#[tokio::test]
async fn a_core_dump_is_decrypted_or_no_file_is_left() {
    matrix(Kind::Dump(Dump::Decrypt)).await;
}

#[tokio::test]
async fn a_core_dump_is_deleted_or_stays() {
    matrix(Kind::Dump(Dump::Delete)).await;
}

#[tokio::test]
async fn a_suspended_vm_is_to_be_resumed_before_it_is_dumped() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.running("web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let refused =
        service::take(&services, &me, "web", TakeDump::default(), false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    assert!(refused.detail.contains("vmseal vm resume web"), "{refused}");
    assert!(rows(&fixture, vm).await.is_empty());
    fixture.assert_whole(vm, Power::Suspended, "it is not dumped").await;
}
