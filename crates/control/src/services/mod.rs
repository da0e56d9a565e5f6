//! The operations of the API: one function for each.
//!
//! A function takes a [`Caller`] and names the [`Privilege`] that the caller needs; without it the answer is
//! `forbidden`, and nothing is done. Requests, answers and errors are those of the API ([`vmseal_api`]); nothing here
//! depends on HTTP.
//!
//! With `dry_run`, a request gets all checks, and its answer says what would be done. Nothing is done: the changes of
//! the inventory are written but not committed.
//!
//! | module | what |
//! |---|---|
//! | [`caller`], [`users`] | callers, their privileges and tokens |
//! | [`hosts`], [`datastores`], [`policies`], [`tasks`], [`events`] | resources of these names |
//! | [`providers`], [`kmip`], [`passphrases`] | key providers, and the secrets sent to them |
//! | [`vms`], [`create_vm`], [`clone_vm`], [`set_vm`], [`guests`], [`recrypt`], [`vm_devices`], [`vm_tpm`], [`disks`], [`bitmaps`] | virtual machines |
//! | [`backups`] | backups of virtual machines |
//! | [`remotes`], [`arrivals`] | other control planes, and VMs that come from them |
//! | [`drain`] | hosts that are emptied before maintenance |
//! | [`dumps`] | core dumps of virtual machines |
//! | [`snapshots`] | snapshots of virtual machines |
//! | [`proofs`] | proofs that virtual machines are encrypted |
//! | [`set_policy`] | changes of policies, and what they mean for VMs |
//! | [`sharing`] | datastores that several hosts have |
//! | `datastore_keys`, `datastore_ways` | the keys of pools that the server holds, and how hosts get to pools |
//! | `stated_osds` | what administrators state of the OSDs of pools' clusters |
//! | `pools_for_policy` | pools that are made for a policy |
//! | [`remount`] | pools that hosts mount anew, with the key of now |
//! | [`adopt`] | VMs of a datastore that the inventory does not have |
//! | [`usage`] | what VMs use, and what is left of hosts |
//! | [`log_levels`], [`metrics`] | diagnostics |
//! | [`server_backup`] | the server itself |

pub mod adopt;
pub mod arrivals;
pub mod backups;
pub mod bitmaps;
pub mod caller;
pub mod clone_vm;
mod cloud_init;
pub mod create_vm;
mod datastore_keys;
mod datastore_ways;
pub mod datastores;
pub mod disks;
pub mod drain;
pub mod dumps;
pub mod events;
mod examine_change;
mod features;
pub mod guest;
pub mod guests;
mod hardware;
pub mod hosts;
mod image_layouts;
pub mod kmip;
pub mod log_levels;
pub mod metrics;
pub mod migrate;
pub mod mirror;
mod nics;
pub mod passphrases;
pub mod policies;
mod pools_for_policy;
pub mod proofs;
pub mod providers;
pub mod recrypt;
mod redundancy;
pub mod remotes;
pub mod remount;
mod room;
mod saved_memory;
mod scan;
pub mod server_backup;
pub mod set_nic;
pub mod set_policy;
pub mod set_vm;
pub mod sharing;
pub mod snapshots;
mod stated_osds;
pub mod suspend;
pub mod tasks;
mod temporary_snapshot;
mod unnoted;
pub mod usage;
pub mod users;
pub mod vm_devices;
mod vm_key;
pub mod vm_tpm;
mod vm_values;
pub mod vms;

use std::path::PathBuf;
use std::sync::Arc;

use vmseal_api::model::{Page, Plan};
use vmseal_secret::sealed_box::Recipient;

pub use self::caller::{Caller, Privilege, Privileges};
use crate::hosts::Hosts;
use crate::providers::Providers;
use crate::remotes::Remotes;
use crate::setup::authority::Authority;
use crate::store::{PAGE_MAX, Part, Store};
use crate::tasks::Engine;

/// How many resources a page has by default.
const PAGE_DEFAULT: u32 = 100;

/// The parts of the server that the services use.
pub struct Services {
    /// The inventory.
    pub store: Arc<Store>,
    /// The key providers.
    pub providers: Arc<Providers>,
    /// The hosts.
    pub hosts: Arc<Hosts>,
    /// Other control planes.
    pub remotes: Arc<Remotes>,
    /// The tasks.
    pub engine: Arc<Engine>,
    /// The authority.
    pub authority: Arc<Authority>,
    /// The key pair to which passphrases are sealed.
    pub recipient: Recipient,
    /// The server's data directory.
    pub data_dir: PathBuf,
}

/// The answer to a request that supports dry runs.
#[derive(Debug)]
pub enum Outcome<T> {
    /// It is done.
    Done(T),
    /// It would be done.
    Planned(Plan),
}

impl<T> Outcome<T> {
    /// A plan of one step.
    fn planned(kind: &str, target: &str, step: String) -> Self {
        Self::Planned(Plan {
            kind: kind.to_owned(),
            target: target.to_owned(),
            steps: vec![step],
            ..Plan::default()
        })
    }

    /// Maps the answer, if it is done.
    pub fn map<U>(self, to: impl FnOnce(T) -> U) -> Outcome<U> {
        match self {
            Self::Done(answer) => Outcome::Done(to(answer)),
            Self::Planned(plan) => Outcome::Planned(plan),
        }
    }

    /// Maps the answer, if it is done, to another one or an error.
    fn try_map<U, E>(self, to: impl FnOnce(T) -> Result<U, E>) -> Result<Outcome<U>, E> {
        Ok(match self {
            Self::Done(answer) => Outcome::Done(to(answer)?),
            Self::Planned(plan) => Outcome::Planned(plan),
        })
    }
}

/// The requested part of a list.
#[derive(Clone, Debug, Default)]
pub struct PageRequest {
    /// The `next` of the last page.
    pub after: Option<String>,
    /// How many resources at most.
    pub limit: Option<u32>,
}

impl PageRequest {
    fn part(self) -> Part {
        Part { after: self.after.unwrap_or_default(), limit: page_limit(self.limit) }
    }
}

fn page_limit(asked: Option<u32>) -> u32 {
    asked.unwrap_or(PAGE_DEFAULT).clamp(1, PAGE_MAX)
}

/// A page; if it is full, there may be another one.
fn page_of<T>(items: Vec<T>, limit: u32, place: impl FnOnce(&T) -> String) -> Page<T> {
    let full = u32::try_from(items.len()).is_ok_and(|count| count >= limit);
    let next = items.last().filter(|_| full).map(place);
    Page { items, next }
}
