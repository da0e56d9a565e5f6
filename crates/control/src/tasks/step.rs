//! A step of an operation. Each operation has its own `enum Step`, in its own file.

use std::fmt;

use async_trait::async_trait;
use serde::Serialize;
use vmseal_api::problem::Problem;

use super::run::{Run, StepError};

/// What a step gives to later ones; kept with the task, so it holds no secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Output(pub(super) Option<serde_json::Value>);

impl Output {
    /// What later steps read by [`Run::output`].
    pub(super) fn of(value: &impl Serialize) -> Self {
        // A reference to a key and the like: it has a form in JSON.
        Self(serde_json::to_value(value).ok())
    }
}

impl From<()> for Output {
    fn from((): ()) -> Self {
        Self(None)
    }
}

/// Who is waited for, as long as it takes, before the commit step; after it, everybody is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitPolicy {
    /// The VM's host: it may have hours of work with the step, which is not given up because it is away for a
    /// while. What it has done is there when it is back.
    pub host: bool,
    /// The key provider.
    pub provider: bool,
}

impl WaitPolicy {
    /// Nobody is waited for long: somebody waits for the outcome.
    pub const NONE: Self = Self { host: false, provider: false };
    /// The provider is.
    pub const PROVIDER: Self = Self { host: false, provider: true };
    /// Host and provider are.
    pub const BOTH: Self = Self { host: true, provider: true };
}

/// Of what only so much happens at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Long work on a host: disks are filled or written.
    HostWork,
    /// Calls of a key provider.
    Provider,
}

/// A part of an operation. Doing and undoing may both be repeated.
#[async_trait]
pub(crate) trait Step: fmt::Debug + Send + Sync {
    /// Its name in the inventory. It never changes: a task of an older version goes on by it.
    fn name(&self) -> &'static str;

    /// Its name for people.
    fn title(&self) -> &'static str;

    /// Whether it is nothing for a VM without a key.
    fn needs_key(&self) -> bool {
        false
    }

    /// Whether nothing is undone once it is done: from there on the task goes only forward.
    fn commits(&self) -> bool {
        false
    }

    /// Who is waited for.
    fn wait_policy(&self) -> WaitPolicy {
        WaitPolicy::NONE
    }

    /// Of what it takes a share.
    fn limit(&self) -> Option<Limit> {
        None
    }

    /// Whether it notes every change that it asks a host for ([`Run::noted`]): only then is it known that a host has
    /// heard nothing of it.
    fn notes_what_it_sends(&self) -> bool {
        false
    }

    /// Whether it is undone without the task when the host does not answer: its monitor sees to that when it does.
    fn is_undone_by_monitor(&self) -> bool {
        false
    }

    /// Does it.
    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError>;

    /// Undoes it, as far as it was done. `cause` is why. Never called after the commit step.
    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError>;
}
