//! Exports of a simulated host: names of files, without files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use vmseal_api::host::{DiskPhase, DiskSpec, ExportPhase, ExportSpec, ExportState, ExportStep};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::calls::Later;
use super::{Inside, Work};
use crate::rules;

/// The files that are on the host.
#[derive(Default)]
pub struct Exports {
    unnamed: BTreeSet<TaskId>,
    named: BTreeMap<PathBuf, TaskId>,
}

impl Exports {
    pub fn files(&self) -> (Vec<PathBuf>, usize) {
        (self.named.keys().cloned().collect(), self.unnamed.len())
    }
}

impl Inside {
    pub fn export(
        &mut self,
        vm: VmId,
        disk: DiskId,
        step: ExportStep,
        spec: &ExportSpec,
    ) -> Result<Later, Problem> {
        rules::check_export(spec)?;
        let known = self.known(vm)?;
        rules::find_disk(&known.spec, disk)?;
        let same = known.exports.get(&disk).filter(|known| known.export == spec.export);
        let phase = same.map(|known| known.phase.clone());
        match (step, phase) {
            (ExportStep::Begin, Some(ExportPhase::Writing { .. } | ExportPhase::Written)) => {
                Ok(None)
            }
            (ExportStep::Check, _) => self.ready_to_export(vm, disk, spec).map(|_| None),
            (ExportStep::Begin, _) => self.begin_export(vm, disk, spec, self.work),
            (ExportStep::Finish, _) => self.name(spec).map(|()| None),
            (ExportStep::Drop, phase) => {
                if phase.is_some() {
                    known.exports.remove(&disk);
                    known.work.remove(&Work::Export(disk));
                }
                self.life.post(vm);
                let half_written = matches!(phase, Some(ExportPhase::Writing { .. }));
                if self.world.exports.unnamed.remove(&spec.export) || half_written {
                    return Ok(None);
                }
                if self.world.exports.named.get(&spec.to) == Some(&spec.export) {
                    return Err(rules::has_its_name(&spec.to));
                }
                Err(Problem::new(ErrorCode::NotFound, "there is no such half-written file"))
            }
        }
    }

    /// The disk, where nothing speaks against its export.
    fn ready_to_export(
        &mut self,
        vm: VmId,
        disk: DiskId,
        spec: &ExportSpec,
    ) -> Result<DiskSpec, Problem> {
        let key_box = self.life.key_box.clone();
        let taken = self.world.exports.named.contains_key(&spec.to);
        let known = self.known(vm)?;
        let found = rules::find_disk(&known.spec, disk)?.clone();
        let key = rules::key_state(&known.spec, known.key_held);
        let ready = matches!(known.phases.get(&disk), Some(DiskPhase::Ready { .. }));
        let made = ready || found.facts.is_some();
        rules::may_export(&known.spec, &found, spec.format, known.power, key, made)?;
        if taken {
            let what = format!("{} is there already", spec.to.display());
            return Err(Problem::new(ErrorCode::AlreadyExists, what));
        }
        if let Some(sealed) = &spec.passphrase {
            key_box.open_passphrase(vm, disk, sealed)?;
        }
        Ok(found)
    }

    fn begin_export(
        &mut self,
        vm: VmId,
        disk: DiskId,
        spec: &ExportSpec,
        duration: Duration,
    ) -> Result<Later, Problem> {
        let found = self.ready_to_export(vm, disk, spec)?;
        let known = self.known(vm)?;
        let phase = ExportPhase::Writing { done: 0, total: found.size };
        known.exports.insert(disk, ExportState { export: spec.export, disk, phase });
        self.numbered(vm, Work::Export(disk), duration)
    }

    pub fn exported(&mut self, vm: VmId, work: Work) {
        let Work::Export(disk) = work else { return };
        let full = self.full;
        let Ok(known) = self.known(vm) else { return };
        let Some(state) = known.exports.get_mut(&disk) else { return };
        let export = state.export;
        if full {
            let problem = Problem::new(ErrorCode::NoSpace, "the simulated host is full");
            state.phase = ExportPhase::Failed { problem };
        } else {
            state.phase = ExportPhase::Written;
            self.world.exports.unnamed.insert(export);
        }
    }

    fn name(&mut self, spec: &ExportSpec) -> Result<(), Problem> {
        let Exports { unnamed, named } = &mut self.world.exports;
        let there = named.get(&spec.to);
        match (unnamed.contains(&spec.export), there) {
            (true, Some(_)) => {
                let what = format!("{} is there already", spec.to.display());
                Err(Problem::new(ErrorCode::AlreadyExists, what))
            }
            (true, None) => {
                unnamed.remove(&spec.export);
                named.insert(spec.to.clone(), spec.export);
                Ok(())
            }
            (false, Some(export)) if *export == spec.export => Ok(()),
            (false, _) => Err(Problem::new(ErrorCode::NotFound, "the export is gone")),
        }
    }
}
