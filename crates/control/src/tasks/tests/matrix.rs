//! What may happen at each step of an operation, and what has to come of it.

use super::*;

/// What happens at a step.
#[derive(Clone, Copy, Debug)]
enum Happening {
    Crash,
    UnansweredOnce,
    Refusal,
    Panic,
    NeverAnswered,
    Twice,
}

impl Happening {
    /// Before a step and after it.
    const AT_POINTS: [Self; 5] =
        [Self::Crash, Self::UnansweredOnce, Self::Refusal, Self::Panic, Self::NeverAnswered];

    fn fault(self) -> (Fault, u32) {
        match self {
            Self::Crash => (Fault::Crash, 1),
            Self::UnansweredOnce => (Fault::Fail(silent()), 1),
            Self::Refusal => (Fault::Fail(refused()), 1),
            Self::Panic => (Fault::Panic, 1),
            Self::NeverAnswered => (Fault::Fail(silent()), u32::MAX),
            Self::Twice => (Fault::Twice, 1),
        }
    }

    async fn happens(self, kind: Kind, step: &'static str, point: FaultPoint) {
        let what = format!("{kind:?}, {self:?} {point:?} {step:?}");
        let (fault, times) = self.fault();
        let (faults, done) = at(step, TaskState::Running, point, fault, times);
        let asks_on = kind.is_past_commit(step) || kind.insists(step);
        if matches!(self, Self::NeverAnswered) && asks_on {
            return goes_on_until_answered(kind, faults, &done, &what).await;
        }
        let crashes = matches!(self, Self::Crash);
        let (mut fixture, vm, task) = carry_out(kind, faults, &done, crashes).await;
        match self {
            Self::Crash | Self::UnansweredOnce | Self::Twice => {
                assert_eq!(fixture.task(task).await.state, TaskState::Done, "{what}");
                kind.assert_done(&fixture, vm, &what).await;
            }
            Self::Refusal | Self::Panic | Self::NeverAnswered => {
                assert_failed_truly(kind, &mut fixture, vm, task, &what).await;
            }
        }
    }
}

/// What may happen at each step; a part of it in a run.
pub(super) async fn matrix(kind: Kind) {
    let mut part = Part::of_run();
    for step in kind.steps() {
        for point in [FaultPoint::Before, FaultPoint::After] {
            for happening in Happening::AT_POINTS {
                if part.has_next() {
                    happening.happens(kind, step, point).await;
                }
            }
        }
        if part.has_next() {
            Happening::Twice.happens(kind, step, FaultPoint::After).await;
        }
    }
}
