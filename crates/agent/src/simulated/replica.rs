//! Replicas: each is the disk at once, as nothing is written, unless its place has become another's.

use vmseal_api::filter::ReplicaStatus;
use vmseal_api::host::Power;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;

use super::Inside;
use crate::rules;

impl Inside {
    /// How that of a disk in use stands.
    pub fn replica(&self, vm: VmId, disk: DiskId) -> Result<ReplicaStatus, Problem> {
        let known = self.life.vms.get(&vm).ok_or_else(|| rules::unknown(vm))?;
        let (spec, power) = (&known.spec, known.power);
        let (disk, place) = rules::find_replica(spec, disk)?;
        if !matches!(power, Power::Running | Power::Stopping) {
            return Err(rules::replica_rests(spec));
        }
        if self.check_place(&place.datastore).is_err() {
            let what = format!("runs, but {}", rules::unreplicated(disk, place));
            return Err(rules::wrong_state(spec, &what));
        }
        Ok(ReplicaStatus { dirty_bytes: 0, lag_milliseconds: Some(0), trouble: None })
    }
}
