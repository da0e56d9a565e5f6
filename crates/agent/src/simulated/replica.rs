//! Replicas: each is always complete, as nothing is written, unless another datastore is in its place.

use vmseal_api::filter::ReplicaStatus;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use super::Inside;
use crate::rules;
use crate::rules::exclusion::Action;

impl Inside {
    /// The status of the replica of a disk in use.
    pub fn replica(&self, vm: VmId, disk: DiskId) -> Result<ReplicaStatus, Problem> {
        let situation = self.situation(vm)?;
        let spec = situation.spec;
        let (disk, place) = rules::find_replica(spec, disk)?;
        situation.may(Action::Replica, Some(disk))?;
        if self.check_place(&place.datastore).is_err() {
            let what = format!("runs, but {}", rules::unreplicated(disk, place));
            return Err(rules::wrong_state(spec, &what));
        }
        Ok(ReplicaStatus { dirty_bytes: 0, lag_milliseconds: Some(0), last_error: None })
    }
}
