//! Disks that are exposed to an operator's tools, as the VM's owner sees them.

use vmseal_api::host::{ConsoleStream, DiskSpec, Exposing};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::{Owner, State};
use crate::rules::{self, find_disk};
use crate::vm::exposed::{DiskToServe, Exposure, Source};
use crate::vm::running::Running;
use crate::vm::serve::beside;
use crate::vm::{Reply, internal};

impl Owner {
    /// Exposes a disk, or opens a connection to an exposed one; `to` is answered in any case.
    pub(super) async fn expose(&mut self, disk: DiskId, what: Exposing, to: Reply<ConsoleStream>) {
        let refused = match what {
            Exposing::Connect => match (self.exposed.get(&disk), find_disk(&self.spec, disk)) {
                (_, Err(problem)) => (to, problem),
                (None, Ok(disk)) => (to, rules::not_exposed(&self.spec, disk)),
                (Some(exposed), Ok(disk)) => match exposed.connections.try_send(to) {
                    Ok(()) => return,
                    Err(full) => (full.into_inner(), rules::not_exposed(&self.spec, disk)),
                },
            },
            held => match self.ready_to_expose(disk, held).await {
                Ok(source) => {
                    let (exposure, known) = Exposure::new(disk, source, to);
                    self.exposed.insert(disk, known);
                    self.exposed_errors.remove(&disk);
                    return self.workers.begin_exposure(&self.shared, exposure);
                }
                Err(problem) => (to, problem),
            },
        };
        let (to, problem) = refused;
        let _ = to.send(Err(problem));
    }

    /// The source to serve the disk from, if that is allowed.
    async fn ready_to_expose(&self, disk: DiskId, what: Exposing) -> Result<Source, Problem> {
        let disk = find_disk(&self.spec, disk)?;
        rules::holds_data(&self.spec, disk)?;
        self.situation().may(rules::exposing(what), Some(disk))?;
        let kept = match what {
            Exposing::HoldKept { snapshot, .. } => Some(snapshot),
            _ => None,
        };
        if let (None, State::Running(running) | State::Stopping { running, .. }) =
            (kept, &self.state)
        {
            if what.is_sealed() {
                // The guest's filter has the key: it serves plaintext alone.
                return Err(rules::not_in_guest(&self.spec, disk));
            }
            return self.source_beside(running, disk);
        }
        let facts = self.facts(disk);
        rules::check_exposure(&self.spec, disk, self.key(), facts.is_some(), what)?;
        if let Some(snapshot) = kept {
            self.keeps(disk, snapshot).await?;
        }
        let Some(facts) = facts else { return Err(internal("a disk without facts")) };
        let needs_key = disk.encrypted && !what.is_sealed();
        let kek = if needs_key { self.clone_kek()? } else { None };
        let (spec, disk, bitmaps) = (self.spec.clone(), disk.clone(), self.shared.bitmaps.clone());
        Ok(Source::Own(Box::new(DiskToServe { spec, disk, facts, kek, what, bitmaps })))
    }

    /// The filter of the running VM, where it serves the disk.
    fn source_beside(&self, running: &Running, disk: &DiskSpec) -> Result<Source, Problem> {
        let Some(known) = running.live.disk(disk.disk) else {
            return Err(rules::not_in_guest(&self.spec, disk));
        };
        let socket = running.directory.socket(&beside(known.socket));
        if !socket.exists() {
            let what =
                "was started by a vmseal that could not expose disks in use. Stop and start it";
            return Err(rules::wrong_state(&self.spec, what));
        }
        Ok(Source::Beside(socket))
    }
}
