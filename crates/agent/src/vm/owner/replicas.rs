//! How far the replica of a disk in use is behind. Only the filter that writes it knows.

use vmseal_api::filter::ReplicaStatus;
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;
use vmseal_api::replica::ReplicaPlace;
use vmseal_api::request_id;

use super::bitmaps::explained;
use super::{Owner, State};
use crate::filter::Control;
use crate::rules;
use crate::rules::exclusion::Action;
use crate::vm::service::Service;
use crate::vm::{Reply, internal};

impl Owner {
    /// Has the filter answer. That may take a while: the VM's other calls do not wait for it.
    pub(super) fn replica(&self, disk: DiskId, to: Reply<ReplicaStatus>) {
        let question = self.question(disk);
        let work = async move {
            let answer = match question {
                Ok(question) => question.answer().await,
                Err(problem) => Err(problem),
            };
            // The caller may have gone.
            let _ = to.send(answer);
        };
        tokio::spawn(request_id::inherit(work));
    }

    fn question(&self, disk: DiskId) -> Result<Question, Problem> {
        let (disk, place) = rules::find_replica(&self.spec, disk)?;
        self.situation().may(Action::Replica, Some(disk))?;
        let (State::Running(running) | State::Stopping { running, .. }) = &self.state else {
            return Err(internal("a VM that runs has no processes"));
        };
        if !matches!(running.service, Service::Served(_)) {
            return Err(rules::replica_waits(&self.spec));
        }
        let (disk, place) = (disk.clone(), place.clone());
        let (control, spec, left) =
            (running.control.clone(), self.spec.clone(), self.may_lack_replicas);
        Ok(Question { control, spec, disk, place, left })
    }
}

/// A question to the filter that serves the disk's guest.
struct Question {
    control: Control,
    spec: VmSpec,
    disk: DiskSpec,
    place: ReplicaPlace,
    /// Whether the replica may be left, as the guest is sent.
    left: bool,
}

impl Question {
    async fn answer(self) -> Result<ReplicaStatus, Problem> {
        let Self { control, spec, disk, place, left } = self;
        let status = control.status().await;
        let status = status.map_err(|error| explained(&rules::disk_of(&spec, &disk), error))?;
        let found = status.disks.into_iter().find(|found| found.disk == disk.disk);
        found.and_then(|found| found.replica).ok_or_else(|| {
            let why = match left {
                true => rules::left_replica(&disk, &place),
                false => rules::unreplicated(&disk, &place),
            };
            rules::wrong_state(&spec, &format!("runs, but {why}"))
        })
    }
}
