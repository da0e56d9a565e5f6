//! What the API offers: one function for each operation.
//!
//! A function takes a [`Caller`] and names the [`Privilege`] that the caller needs; who lacks it is answered
//! `forbidden`, and nothing is done. Requests, answers and errors are those of the API ([`vmseal_api`]); nothing here
//! knows HTTP.
//!
//! With `dry_run`, a request is checked as if it were meant, and answered with what would be done. Nothing is done:
//! what the inventory would be told is written and not committed.
//!
//! | module | what |
//! |---|---|
//! | [`caller`], [`users`] | who asks, and what they may do |
//! | [`hosts`], [`datastores`], [`policies`], [`tasks`], [`events`] | resources of these names |
//! | [`providers`], [`kmip`], [`passphrases`] | key providers, and what is secret on its way to them |
//! | [`vms`], [`create_vm`], [`recrypt`], [`disks`], [`bitmaps`] | virtual machines |
//! | [`log_levels`], [`metrics`] | diagnostics |

pub mod bitmaps;
pub mod caller;
pub mod create_vm;
pub mod datastores;
pub mod disks;
pub mod events;
pub mod hosts;
pub mod kmip;
pub mod log_levels;
pub mod metrics;
pub mod passphrases;
pub mod policies;
pub mod providers;
pub mod recrypt;
mod scan;
pub mod tasks;
pub mod users;
pub mod vms;

use std::sync::Arc;

use vmseal_api::model::{Page, Plan};
use vmseal_secret::sealed_box::Recipient;

pub use self::caller::{Caller, Privilege, Privileges};
use crate::hosts::Hosts;
use crate::providers::Providers;
use crate::setup::authority::Authority;
use crate::store::{PAGE_MAX, Part, Store};
use crate::tasks::Engine;

/// How many resources a page has where nobody says otherwise.
const PAGE_DEFAULT: u32 = 100;

/// What the services work with.
pub struct Services {
    /// The inventory.
    pub store: Arc<Store>,
    /// The key providers.
    pub providers: Arc<Providers>,
    /// The hosts.
    pub hosts: Arc<Hosts>,
    /// The tasks.
    pub engine: Arc<Engine>,
    /// The authority.
    pub authority: Arc<Authority>,
    /// What passphrases are sealed to.
    pub recipient: Recipient,
}

/// What a request that has a dry run is answered with.
#[derive(Debug)]
pub enum Outcome<T> {
    /// It is done.
    Done(T),
    /// It would be done.
    Planned(Plan),
}

impl<T> Outcome<T> {
    /// What would be done, as one step.
    fn planned(kind: &str, target: &str, step: String) -> Self {
        Self::Planned(Plan { kind: kind.to_owned(), target: target.to_owned(), steps: vec![step] })
    }

    /// The same, with another answer where it is done.
    pub fn map<U>(self, to: impl FnOnce(T) -> U) -> Outcome<U> {
        match self {
            Self::Done(answer) => Outcome::Done(to(answer)),
            Self::Planned(plan) => Outcome::Planned(plan),
        }
    }

    /// The same, where the other answer may be an error.
    fn try_map<U, E>(self, to: impl FnOnce(T) -> Result<U, E>) -> Result<Outcome<U>, E> {
        Ok(match self {
            Self::Done(answer) => Outcome::Done(to(answer)?),
            Self::Planned(plan) => Outcome::Planned(plan),
        })
    }
}

/// Which part of a list.
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

/// A page; there may be another one when it is full.
fn page_of<T>(items: Vec<T>, limit: u32, place: impl FnOnce(&T) -> String) -> Page<T> {
    let full = u32::try_from(items.len()).is_ok_and(|count| count >= limit);
    let next = items.last().filter(|_| full).map(place);
    Page { items, next }
}
