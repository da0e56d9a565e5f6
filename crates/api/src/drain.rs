//! Hosts that are emptied before maintenance.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::id::TaskId;

/// How many VMs are sent away from a host at a time, unless another number is asked for: each has the network of its host to
/// share with the others, and takes longer the more there are, while its guest goes on changing its memory.
pub const PARALLEL_DEFAULT: u32 = 2;

/// The most that are sent at a time: beyond that even a network of 100 Gbit/s is full.
pub const PARALLEL_MAX: u32 = 16;

/// Whether a host is in maintenance. While it is, no VM is placed on it: none is created, started, cloned, restored or adopted
/// there, or moved to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Maintenance {
    /// It is not.
    #[default]
    No,
    /// The VMs that run there are being moved away or stopped.
    Draining,
    /// None runs there but those that are left as they are.
    Drained,
}

/// What happens to a VM that runs when its host is emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnDrain {
    /// It moves to another host.
    #[default]
    Migrate,
    /// Its guest is shut down.
    Stop,
    /// Nothing: it runs on there.
    Leave,
}

impl OnDrain {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Migrate, Self::Stop, Self::Leave];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Migrate => "migrate",
            Self::Stop => "stop",
            Self::Leave => "leave",
        }
    }
}

/// How far a host is emptied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Drain {
    /// The user who began it.
    pub actor: String,
    /// When.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub begun: Timestamp,
    /// The id of the request that began it; its tasks have it, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// How many VMs are sent at a time.
    pub parallel: u32,
    /// Whether those that cannot be moved are shut down.
    pub stop_others: bool,
    /// The highest rate at which each VM is sent, in bytes a second; none is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Whether the memory of VMs is compressed where that gets it to another host sooner.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compress: bool,
    /// The VMs that ran there when it began, or came there since, by name.
    #[serde(default)]
    pub vms: Vec<DrainedVm>,
}

impl Drain {
    /// Whether some stay, and nothing more happens unless an operator does something.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        let mut left = self.vms.iter().filter(|vm| vm.state != DrainState::Done).peekable();
        left.peek().is_some() && left.all(|vm| vm.state == DrainState::Stays)
    }
}

/// A VM of a host that is emptied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DrainedVm {
    /// Its name.
    pub vm: String,
    /// How far it is.
    pub state: DrainState,
    /// The last task that moves or stops it, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskId>,
    /// What happens, or why nothing does, for people.
    pub detail: String,
}

/// How far a VM of a host that is emptied is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DrainState {
    /// It waits: for others, or before the next attempt.
    Waiting,
    /// A task moves or stops it.
    UnderWay,
    /// It does not run there any more, or is left as it is.
    Done,
    /// It can be neither moved nor stopped.
    Stays,
}

/// What would happen to a VM of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PlannedVm {
    /// Its name.
    pub vm: String,
    /// What would happen.
    pub action: PlannedAction,
    /// The host that it would move to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Why, for people.
    pub why: String,
}

/// What would happen to a VM of a host that is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PlannedAction {
    /// It would move to another host.
    Migrate,
    /// Its guest would be shut down.
    Stop,
    /// It would stay.
    Stay,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_is_stuck_when_some_stay_and_nothing_goes_on() {
        use DrainState::{Done, Stays, UnderWay, Waiting};
        for (states, stuck) in [
            (&[][..], false),
            (&[Done, Done], false),
            (&[Done, Stays], true),
            (&[Stays, UnderWay], false),
            (&[Waiting, Stays], false),
        ] {
            let vms = states.iter().map(|state| DrainedVm {
                vm: "web".to_owned(),
                state: *state,
                task: None,
                detail: String::new(),
            });
            let drain = Drain {
                actor: "me".to_owned(),
                begun: Timestamp::UNIX_EPOCH,
                request_id: None,
                parallel: 1,
                stop_others: false,
                rate: None,
                compress: false,
                vms: vms.collect(),
            };
            assert_eq!(drain.is_stuck(), stuck, "{states:?}");
        }
    }
}
