//! Checking or changing the keys of a VM's disks, in the background of its owner.

use std::time::Instant;

use tokio::task::{JoinHandle, spawn_blocking};
use vmseal_api::host::{KeyReference, Power};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::super::{Change, Reply, internal};
use super::Owner;
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::storage::disk_keys::DiskKeys;
use crate::storage::locked::Access;

/// A check or change of keys in progress.
pub struct KeyChange {
    pub task: JoinHandle<Result<(), Problem>>,
    /// The disks whose data keys others get when it is done.
    pub shared: Vec<DiskId>,
    /// The caller that waits for it.
    pub reply: Reply<()>,
}

/// The result of the change of keys, when it has ended.
pub async fn changed(changing: &mut Option<KeyChange>) -> Result<(), Problem> {
    match changing {
        Some(change) => (&mut change.task).await.unwrap_or_else(|error| Err(internal(error))),
        None => std::future::pending().await,
    }
}

impl Owner {
    /// Begins to check or change the keys of the disks.
    pub(super) fn change_keys(
        &self,
        registered: &KeyReference,
        change: Change,
    ) -> Result<JoinHandle<Result<(), Problem>>, Problem> {
        self.situation().may(Action::ChangeKeys, None)?;
        rules::check_key_change(&self.spec, self.key(), registered)?;
        let kek = self.clone_kek()?.ok_or_else(|| internal("the key that is held is not there"))?;
        let other = match &change {
            Change::Add(key, sealed) => {
                Some((key.clone(), self.shared.key_box.open(self.spec.vm, key, sealed)?))
            }
            Change::Share(disks) => {
                disks.iter().try_for_each(|disk| find_disk(&self.spec, *disk).map(drop))?;
                None
            }
            Change::None | Change::DropOthers => None,
        };
        let (spec, registered) = (self.spec.clone(), registered.clone());
        let in_use = matches!(self.power(), Power::Running | Power::Paused);
        let work = move || {
            let access = match change {
                _ if in_use => Access::BesideGuest,
                Change::None => Access::Read,
                Change::Add(..) | Change::DropOthers | Change::Share(_) => Access::Write,
            };
            let (done, begun) = (change.done(), Instant::now());
            let mut opened = DiskKeys::open(&spec, &registered, &kek, access)?;
            match (change, &other) {
                (Change::DropOthers, _) => opened.drop_others()?,
                (Change::Share(disks), _) => opened.mark_shared(&disks)?,
                (_, Some((key, other))) => opened.add(key, other)?,
                (_, None) => {}
            }
            let microseconds = begun.elapsed().as_micros();
            tracing::info!(vm = %spec.vm, microseconds, "{done}");
            Ok(())
        };
        Ok(spawn_blocking(work))
    }
}
