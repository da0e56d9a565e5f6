//! How the program ends, for scripts: one code for each thing that a script may want to do differently.
//!
//! The codes are part of the interface: they are added to, never changed.

use std::fmt;

use vmseal_api::client::CUT_OFF;
use vmseal_api::problem::{ErrorCode, Problem};

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Done = 0,
    Failed = 1,
    Usage = 2,
    NotFound = 3,
    Conflict = 4,
    NotPermitted = 5,
    NoAnswer = 6,
    OutcomeUnknown = 7,
    NoKey = 8,
    GoesOn = 9,
    Interrupted = 130,
}

/// Every code with its meaning, for --help and the manual pages.
pub const ALL: &[(Exit, &str)] = &[
    (Exit::Done, "done"),
    (Exit::Failed, "failed"),
    (Exit::Usage, "wrong usage: an unknown option, or a value that is not allowed"),
    (Exit::NotFound, "not found"),
    (Exit::Conflict, "conflict: exists already, in use, or in the wrong state"),
    (Exit::NotPermitted, "not permitted: no access token, a wrong one, or a missing privilege"),
    (Exit::NoAnswer, "the server, a host or a guest is unreachable, or did not answer in time"),
    (
        Exit::OutcomeUnknown,
        "outcome unknown: the answer was lost, or the task could neither be finished nor undone",
    ),
    (Exit::NoKey, "VM key unavailable, or a wrong key"),
    (Exit::GoesOn, "timeout reached; the task goes on"),
    (Exit::Interrupted, "interrupted (Ctrl-C); a task that was waited for goes on"),
];

/// An error with the exit code that belongs to it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Ended {
    exit: Exit,
    message: String,
}

impl Ended {
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }
}

/// Tasks that did not end well. The program ends as for the first of them.
#[derive(Debug)]
pub struct FailedTasks(Vec<FailedTask>);

/// One of them.
#[derive(Debug)]
pub struct FailedTask {
    /// How the program ends for it.
    pub exit: Exit,
    /// What did not end well, and how far it had come.
    pub what: String,
    /// Why, as far as that is known.
    pub problem: Option<Problem>,
    /// How to find out more, where there is more.
    pub trace: String,
}

impl FailedTasks {
    /// None where no task failed.
    pub fn new(tasks: Vec<FailedTask>) -> Option<Self> {
        (!tasks.is_empty()).then_some(Self(tasks))
    }

    /// What is said of each, as far as it is known.
    pub fn problems(&mut self) -> impl Iterator<Item = &mut Problem> {
        self.0.iter_mut().filter_map(|task| task.problem.as_mut())
    }
}

impl fmt::Display for FailedTasks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&said.join("\n"))
    }
}

impl fmt::Display for FailedTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, problem, trace, .. } = self;
        match problem {
            Some(problem) => write!(f, "{what}: {problem}{trace}"),
            None => write!(f, "{what}{trace}"),
        }
    }
}

impl std::error::Error for FailedTasks {}

impl Exit {
    /// How the program ends with an error.
    pub fn of(error: &anyhow::Error) -> Self {
        if let Some(ended) = error.downcast_ref::<Ended>() {
            ended.exit
        } else if let Some(FailedTasks(tasks)) = error.downcast_ref() {
            tasks.first().map_or(Self::Failed, |task| task.exit)
        } else if let Some(problem) = error.downcast_ref::<Problem>() {
            if problem.in_doubt { Self::OutcomeUnknown } else { problem.code.into() }
        } else {
            Self::Failed
        }
    }
}

/// An error and its causes on one line. A cause that the text before it already has is left out: many errors
/// end with the text of their cause.
pub fn text(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| {
        if text.is_empty() {
            cause
        } else if text.contains(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

/// The end of a message when the server has failed, or its answer was lost: how to find the request, or what to do.
pub fn trace(error: &anyhow::Error) -> String {
    let problem = error.downcast_ref::<Problem>();
    if let Some(Problem { in_doubt: true, request_id: Some(request), .. }) = problem {
        return format!(
            "; whether it was done is not known: look for request id {request} in `vmseal task list -c id,kind,target,state,request-id`"
        );
    }
    let cut_off = |it: &Problem| it.code == ErrorCode::Unreachable && it.detail.contains(CUT_OFF);
    if problem.is_some_and(|it| cut_off(it) && !it.in_doubt) {
        return "; try again once it answers".to_owned();
    }
    let request = problem.and_then(|problem| failed_inside(problem, problem.request_id.as_deref()));
    request.unwrap_or_default()
}

/// The same for a problem of a request, or of the task that it began.
pub fn failed_inside(problem: &Problem, request: Option<&str>) -> Option<String> {
    let request = request.filter(|_| problem.code == ErrorCode::Internal)?;
    Some(format!(" (request id {request})"))
}

impl From<ErrorCode> for Exit {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::InvalidRequest => Self::Usage,
            ErrorCode::Unauthenticated | ErrorCode::Forbidden => Self::NotPermitted,
            ErrorCode::NotFound => Self::NotFound,
            ErrorCode::AlreadyExists
            | ErrorCode::WrongState
            | ErrorCode::InUse
            | ErrorCode::Conflict => Self::Conflict,
            ErrorCode::Unreachable | ErrorCode::TimedOut | ErrorCode::Busy => Self::NoAnswer,
            ErrorCode::Locked | ErrorCode::KeyMismatch => Self::NoKey,
            ErrorCode::TooLarge
            | ErrorCode::Damaged
            | ErrorCode::NoSpace
            | ErrorCode::LimitExceeded
            | ErrorCode::Cancelled
            | ErrorCode::Unsupported
            | ErrorCode::Internal => Self::Failed,
        }
    }
}

/// The table at the end of `--help`.
pub fn help() -> String {
    let lines = ALL.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}", *exit as u8));
    format!("Exit codes:\n{}", lines.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn the_codes_are_those_that_scripts_know() {
        let codes: Vec<u8> = ALL.iter().map(|(exit, _)| *exit as u8).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 130]);
    }

    #[test]
    fn only_internal_failures_give_a_request_id_to_look_for() {
        let problem =
            |code| Problem { request_id: Some("r-1".into()), ..Problem::new(code, "why") };
        let told = |code| trace(&anyhow::Error::from(problem(code)).context("while doing this"));
        assert_eq!(told(ErrorCode::Internal), " (request id r-1)");
        assert_eq!(told(ErrorCode::NotFound), "");
        assert_eq!(trace(&Problem::new(ErrorCode::Internal, "why").into()), "");
    }

    #[test]
    fn a_lost_answer_is_an_unknown_outcome_with_advice() {
        for code in [ErrorCode::Unreachable, ErrorCode::TimedOut] {
            let lost = Problem { in_doubt: true, ..Problem::new(code, "it did not answer") };
            let lost = Problem { request_id: Some("r-1".into()), ..lost };
            let error = anyhow::Error::from(lost).context("while doing this");
            assert_eq!(Exit::of(&error), Exit::OutcomeUnknown);
            let told = trace(&error);
            assert!(told.contains("not known") && told.contains("request id r-1 in"), "{told}");
        }
    }

    #[test]
    fn a_lost_connection_is_told_with_what_to_do() {
        let detail = format!("the connection to the server {CUT_OFF}");
        let cut_off = Problem::new(ErrorCode::Unreachable, detail);
        assert_eq!(trace(&cut_off.clone().into()), "; try again once it answers");
        // It may be done: it is looked for first.
        let changed = Problem { in_doubt: true, request_id: Some("r-1".into()), ..cut_off };
        assert!(!trace(&changed.into()).contains("try again"));
        let refused = Problem::new(ErrorCode::Unreachable, "it cannot be reached");
        assert_eq!(trace(&refused.into()), "");
    }

    #[test]
    fn a_cause_is_told_once() {
        let missing = || std::io::Error::from_raw_os_error(2);
        let plain = anyhow::Error::from(missing()).context("cannot read a.pem");
        assert_eq!(text(&plain), "cannot read a.pem: No such file or directory (os error 2)");
        let told = plain.context("cannot read a.pem: No such file or directory (os error 2)");
        assert_eq!(text(&told), "cannot read a.pem: No such file or directory (os error 2)");
    }

    /// Scripts are written from the manual.
    #[test]
    fn the_manual_has_every_code_with_what_it_means() {
        let manual = include_str!("../../../docs/cli.md");
        for (exit, meaning) in ALL {
            let line = format!("| {} | {meaning} |", *exit as u8);
            assert!(manual.contains(&line), "docs/cli.md has no line: {line}");
        }
    }

    #[test]
    fn context_does_not_change_the_exit_code() {
        for (code, exit) in [
            (ErrorCode::InvalidRequest, Exit::Usage),
            (ErrorCode::Unauthenticated, Exit::NotPermitted),
            (ErrorCode::Forbidden, Exit::NotPermitted),
            (ErrorCode::NotFound, Exit::NotFound),
            (ErrorCode::AlreadyExists, Exit::Conflict),
            (ErrorCode::WrongState, Exit::Conflict),
            (ErrorCode::InUse, Exit::Conflict),
            (ErrorCode::Locked, Exit::NoKey),
            (ErrorCode::KeyMismatch, Exit::NoKey),
            (ErrorCode::Unreachable, Exit::NoAnswer),
            (ErrorCode::TimedOut, Exit::NoAnswer),
            (ErrorCode::Busy, Exit::NoAnswer),
            (ErrorCode::Internal, Exit::Failed),
        ] {
            let plain = anyhow::Error::from(Problem::new(code, "why"));
            assert_eq!(Exit::of(&plain), exit, "{code:?}");
            let wrapped = Err::<(), _>(plain).context("while doing this").unwrap_err();
            assert_eq!(Exit::of(&wrapped), exit, "{code:?} with context");
        }
        let unknown = Ended::new(Exit::OutcomeUnknown, "stuck").into();
        assert_eq!(Exit::of(&unknown), Exit::OutcomeUnknown);
        assert_eq!(Exit::of(&anyhow::anyhow!("a file is missing")), Exit::Failed);
    }
}
