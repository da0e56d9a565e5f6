//! Why a migration has failed. Each of its two hosts says what it has found, and often only that the other one is gone: what happened
//! first is what neither has from the other.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use vmseal_api::host::{HostState, JobState};
use vmseal_api::problem::{ErrorCode, Problem};

use super::is_handed_over;
use crate::tasks::run::{Run, StepError};

/// How long the other host has to say why it has given up, when one says only that it has: it ends its QEMU before it says so, which
/// takes some seconds with much memory. The guest runs at the source meanwhile.
const OTHER_HOST_WAIT: Duration = Duration::from_secs(10);

/// What a host says of its part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// It is at work.
    Works,
    /// It has done its part.
    Done,
    /// It has failed.
    Failed(Problem),
    /// Its agent knows nothing of it any more.
    Restarted(Problem),
}

impl Said {
    fn cancelled(what: &str) -> Self {
        Self::Failed(Problem::new(ErrorCode::Cancelled, what))
    }

    fn restarted(what: &str) -> Self {
        Self::Restarted(Problem::new(ErrorCode::Unreachable, what))
    }
}

/// What the source says.
pub(super) fn at_source(run: &Run<'_>, source: &HostState) -> Said {
    match run.job_in(source).map(|job| &job.state) {
        Some(JobState::Failed { problem }) => Said::Failed(problem.clone()),
        Some(JobState::Cancelled) => Said::cancelled("the source has cancelled it"),
        Some(JobState::ReadyToCommit | JobState::Done) => Said::Done,
        Some(JobState::Waiting | JobState::Running | JobState::Unknown) => Said::Works,
        None if is_handed_over(run, source) => Said::Done,
        None => Said::restarted("the agent of the source has restarted while it sent the VM"),
    }
}

/// What the destination says. The source does not notice that it has stopped, once the guest is handed over.
pub(super) fn at_destination(run: &Run<'_>, destination: &HostState) -> Said {
    match run.job_in(destination).map(|job| &job.state) {
        Some(JobState::Failed { problem }) => Said::Failed(problem.clone()),
        Some(JobState::Cancelled) => Said::cancelled("the destination has cancelled it"),
        Some(JobState::ReadyToCommit | JobState::Done) => Said::Done,
        Some(JobState::Waiting | JobState::Running | JobState::Unknown) => Said::Works,
        None => {
            Said::restarted("the agent of the destination has restarted while it received the VM")
        }
    }
}

/// What follows from what both say.
#[derive(Debug)]
pub(super) enum Verdict {
    GoesOn,
    /// One has failed because of the other, which has not said why yet.
    Waits,
    Ends(StepError),
}

/// Says what follows; `waited`: whether the other host has had time to say why.
pub(super) fn judge(source: &Said, destination: &Said, waited: bool) -> Verdict {
    match (source, destination) {
        (Said::Failed(source), Said::Failed(destination)) => {
            Verdict::Ends(StepError::Final(first_of(source, destination)))
        }
        (Said::Failed(one), Said::Works) | (Said::Works, Said::Failed(one))
            if one.of_other_host && !waited =>
        {
            Verdict::Waits
        }
        (Said::Failed(one), Said::Restarted(other))
        | (Said::Restarted(other), Said::Failed(one))
            if one.of_other_host =>
        {
            Verdict::Ends(StepError::Again(other.clone()))
        }
        (Said::Failed(one), _) | (_, Said::Failed(one)) => {
            Verdict::Ends(StepError::Final(told(one)))
        }
        (Said::Restarted(one), _) | (_, Said::Restarted(one)) => {
            Verdict::Ends(StepError::Again(one.clone()))
        }
        (Said::Works | Said::Done, Said::Works | Said::Done) => Verdict::GoesOn,
    }
}

/// What happened first, of what both hosts say: what one of them has from the other follows from that.
fn first_of(source: &Problem, destination: &Problem) -> Problem {
    match (source.of_other_host, destination.of_other_host) {
        (true, false) => told(destination),
        // Where both say that the other one is gone, the connection between them is.
        (false, true) | (true, true) => told(source),
        (false, false) if source.detail == destination.detail => told(source),
        (false, false) => {
            let detail = format!(
                "at the source: {}; at the destination: {}",
                source.detail, destination.detail
            );
            Problem { detail, ..told(source) }
        }
    }
}

/// A host's problem as that of the task, which is of no host.
fn told(problem: &Problem) -> Problem {
    Problem { of_other_host: false, ..problem.clone() }
}

/// The time that the other host has to say why it has given up.
#[derive(Debug, Default)]
pub(super) struct OtherHostWait(Option<Instant>);

impl OtherHostWait {
    /// It begins, unless it has.
    pub(super) fn begin(&mut self) {
        self.0.get_or_insert_with(|| Instant::now() + OTHER_HOST_WAIT);
    }

    /// Whether it has begun, and is over.
    pub(super) fn is_over(&self) -> bool {
        self.0.is_some_and(|until| until <= Instant::now())
    }

    /// Waits for its end, if it has begun.
    pub(super) async fn over(&self) {
        match self.0 {
            Some(until) => sleep_until(until).await,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cause(detail: &str) -> Said {
        Said::Failed(Problem::new(ErrorCode::NoSpace, detail))
    }

    fn of_other_host(detail: &str) -> Said {
        let problem = Problem::new(ErrorCode::Internal, detail);
        Said::Failed(Problem { of_other_host: true, ..problem })
    }

    fn restarted(detail: &str) -> Said {
        Said::restarted(detail)
    }

    /// The problem that the task gets, and whether it tries again; none while it goes on or waits.
    fn ends(source: &Said, destination: &Said, waited: bool) -> Option<(String, bool)> {
        match judge(source, destination, waited) {
            Verdict::GoesOn | Verdict::Waits => None,
            Verdict::Ends(StepError::Again(problem)) => Some((problem.detail, true)),
            Verdict::Ends(other) => {
                let problem = other.problem();
                assert!(!problem.of_other_host, "{problem}");
                Some((problem.detail, false))
            }
        }
    }

    #[test]
    fn what_one_host_has_from_the_other_is_not_told_as_the_cause() {
        let told = |detail: &str| Some((detail.to_owned(), false));
        let (lost, full) = (of_other_host("lost"), cause("full"));
        for waited in [false, true] {
            assert_eq!(ends(&lost, &full, waited), told("full"));
            assert_eq!(ends(&full, &lost, waited), told("full"));
            assert_eq!(ends(&full, &Said::Works, waited), told("full"));
            assert_eq!(ends(&Said::Works, &full, waited), told("full"));
            assert_eq!(ends(&lost, &of_other_host("ended"), waited), told("lost"));
            assert_eq!(ends(&full, &full, waited), told("full"));
            let both = "at the source: full; at the destination: broken";
            assert_eq!(ends(&full, &cause("broken"), waited), told(both));
        }
        let Verdict::Ends(error) = judge(&lost, &full, false) else { panic!("it goes on") };
        assert_eq!(error.problem().code, ErrorCode::NoSpace, "the code goes with the cause");
    }

    #[test]
    fn the_other_host_has_time_to_say_why_unless_the_guest_stands_still_for_it() {
        let lost = of_other_host("lost");
        for (source, destination) in [(&lost, &Said::Works), (&Said::Works, &lost)] {
            assert!(matches!(judge(source, destination, false), Verdict::Waits));
            assert_eq!(ends(source, destination, true), Some(("lost".to_owned(), false)));
        }
        // The source has handed its guest over, and has nothing to say.
        assert_eq!(ends(&Said::Done, &lost, false), Some(("lost".to_owned(), false)));
        for both in [Said::Works, Said::Done] {
            assert!(matches!(judge(&Said::Works, &both, false), Verdict::GoesOn));
        }
    }

    #[test]
    fn a_host_whose_agent_has_restarted_is_why_the_other_one_is_alone() {
        let (lost, gone) = (of_other_host("lost"), restarted("restarted"));
        let again = Some(("restarted".to_owned(), true));
        assert_eq!(ends(&lost, &gone, false), again);
        assert_eq!(ends(&gone, &lost, false), again);
        assert_eq!(ends(&gone, &Said::Done, false), again);
        assert_eq!(ends(&cause("full"), &gone, false), Some(("full".to_owned(), false)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_the_other_host_begins_once_and_ends() {
        let mut wait = OtherHostWait::default();
        assert!(!wait.is_over());
        wait.begin();
        tokio::time::advance(OTHER_HOST_WAIT / 2).await;
        wait.begin();
        assert!(!wait.is_over());
        wait.over().await;
        assert!(wait.is_over());
    }
}
