//! Disks that are exposed to an operator's tools, as the VM's owner sees them.

use vmseal_api::host::{ConsoleStream, Exposing};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::{Owner, State};
use crate::rules::exclusion::Action;
use crate::rules::{self, find_disk};
use crate::vm::exposed::{Exposure, OfflineDisk, Source};
use crate::vm::serve::beside;
use crate::vm::{Reply, internal};

impl Owner {
    /// Exposes a disk, or opens a connection to an exposed one; `to` is answered in any case.
    pub(super) fn expose(&mut self, disk: DiskId, what: Exposing, to: Reply<ConsoleStream>) {
        let refused = match what {
            Exposing::Hold { writable } => match self.ready_to_expose(disk, writable) {
                Ok(source) => {
                    let (exposure, sender) = Exposure::new(disk, source, to);
                    self.exposed.insert(disk, sender);
                    self.exposed_errors.remove(&disk);
                    return self.workers.begin_exposure(&self.shared, exposure);
                }
                Err(problem) => (to, problem),
            },
            Exposing::Connect => match (self.exposed.get(&disk), find_disk(&self.spec, disk)) {
                (_, Err(problem)) => (to, problem),
                (None, Ok(disk)) => (to, rules::not_exposed(&self.spec, disk)),
                (Some(sender), Ok(disk)) => match sender.try_send(to) {
                    Ok(()) => return,
                    Err(full) => (full.into_inner(), rules::not_exposed(&self.spec, disk)),
                },
            },
        };
        let (to, problem) = refused;
        let _ = to.send(Err(problem));
    }

    /// The source to serve the disk from, if that is allowed.
    fn ready_to_expose(&self, disk: DiskId, writable: bool) -> Result<Source, Problem> {
        let disk = find_disk(&self.spec, disk)?;
        rules::holds_data(&self.spec, disk)?;
        let action = if writable { Action::ExposeToWrite } else { Action::ExposeToRead };
        self.situation().may(action, Some(disk))?;
        if let State::Running(running) | State::Stopping { running, .. } = &self.state {
            let Some(known) = running.live.disk(disk.disk) else {
                return Err(rules::not_in_guest(&self.spec, disk));
            };
            let socket = running.directory.socket(&beside(known.socket));
            if !socket.exists() {
                let what =
                    "was started by a vmseal that could not expose disks in use. Stop and start it";
                return Err(rules::wrong_state(&self.spec, what));
            }
            return Ok(Source::Beside(socket));
        }
        let facts = self.facts(disk);
        rules::check_exposure(&self.spec, disk, self.key(), facts.is_some())?;
        let Some(facts) = facts else { return Err(internal("a disk without facts")) };
        let kek = if disk.encrypted { self.clone_kek()? } else { None };
        let (spec, disk, bitmaps) = (self.spec.clone(), disk.clone(), self.shared.bitmaps.clone());
        Ok(Source::Own(Box::new(OfflineDisk { spec, disk, facts, kek, writable, bitmaps })))
    }
}
