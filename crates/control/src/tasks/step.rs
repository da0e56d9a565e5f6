//! A step of an operation. Each operation has its own `enum Step`, in its own file.

use std::fmt;

use async_trait::async_trait;
use serde::Serialize;
use vmseal_api::id::HostId;
use vmseal_api::problem::Problem;

use super::run::{Run, StepError};

/// The output of a step for later ones; stored with the task, so it must contain no secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Output(pub(super) Option<serde_json::Value>);

impl Output {
    /// An output that later steps read with [`Run::output`].
    pub(super) fn of(value: &impl Serialize) -> Self {
        // A reference to a key and the like: it can be serialized.
        Self(serde_json::to_value(value).ok())
    }
}

impl From<()> for Output {
    fn from((): ()) -> Self {
        Self(None)
    }
}

/// What a step waits for without a limit before the commit step; after it, a task waits for everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitPolicy {
    /// The VM's host: the step may take it hours, and is not aborted because the host is unreachable for a while. Its
    /// work is still there when it is back.
    pub host: bool,
    /// The key provider.
    pub provider: bool,
}

impl WaitPolicy {
    /// Waits for nothing for long: a user waits for the outcome.
    pub const NONE: Self = Self { host: false, provider: false };
    /// Waits for the provider.
    pub const PROVIDER: Self = Self { host: false, provider: true };
    /// Waits for host and provider.
    pub const BOTH: Self = Self { host: true, provider: true };
}

/// A kind of work with a concurrency limit ([`super::limits`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Whole disks are copied, read or overwritten on a host.
    Copy,
    /// Disks are made on a host: what they are made of says how long that takes.
    NewDisks,
    /// A host reads all of a VM's files, or a sample of them.
    Proof,
    /// Work on a host that takes minutes at most, however large disks are.
    Short,
    /// Calls of a key provider.
    Provider,
}

/// Whether a step's host has the VM otherwise than the inventory meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redefines {
    Never,
    /// It may have the copies used of an earlier task of the VM that could be neither finished nor undone, where there is one.
    AfterUnknownCopy,
    Always,
}

/// The host whose answer a step waits for, where that is not the VM's.
#[derive(Clone, Debug)]
pub(crate) struct Awaited {
    pub host: HostId,
    /// Its name.
    pub name: String,
    /// What its silence means, and what people can do if it never answers.
    pub advice: String,
}

/// A part of an operation. Doing and undoing may both be repeated.
#[async_trait]
pub(crate) trait Step: fmt::Debug + Send + Sync {
    /// Its name in the inventory. It never changes: it is how a task of an older version is resumed.
    fn name(&self) -> &'static str;

    /// Its name for people.
    fn title(&self) -> &'static str;

    /// Whether it is skipped for a VM without a key.
    fn needs_key(&self) -> bool {
        false
    }

    /// Whether it is the commit step: once it is done, the task goes only forward.
    fn commits(&self) -> bool {
        false
    }

    /// What it waits for.
    fn wait_policy(&self) -> WaitPolicy {
        WaitPolicy::NONE
    }

    /// Whether it is done, or undone, again and again until it is answered: another host or control plane decides what it comes
    /// to, or waits for it.
    fn insists(&self) -> bool {
        false
    }

    /// The host whose answer it waits for, where that is not the VM's.
    async fn awaited(&self, _run: &Run<'_>) -> Option<Awaited> {
        None
    }

    /// The kind of work that it needs a permit for.
    fn limit(&self) -> Option<Limit> {
        None
    }

    /// Whether its host has the VM otherwise than the inventory while it is done or undone: what would register the VM as the inventory
    /// has it, and start it, waits meanwhile.
    fn redefines(&self) -> Redefines {
        Redefines::Never
    }

    /// Whether it records every request for a change ([`Run::noted`]): only then is it known that no request has
    /// reached a host.
    fn notes_what_it_sends(&self) -> bool {
        false
    }

    /// Whether it is undone without the task when the host does not answer: its monitor sees to that when it does. Another control plane that
    /// does not answer gives up by itself what was asked of it.
    fn is_undone_by_monitor(&self) -> bool {
        false
    }

    /// Does it.
    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError>;

    /// Undoes it, as far as it was done. `cause` is why. Never called after the commit step.
    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError>;
}
