//! Whether there is room for what a run has clusters store, looked at before anything is measured: a file system that becomes full
//! ends the daemons, and whatever else writes there.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{RunArguments, RunError};
use crate::ceph::own_pool;
use crate::ceph::room::{self, Demand, OsdFiles, Use};
use crate::ceph::setup::Setup;
use crate::definition::{Definition, Extent, Matter};
use crate::experiment::ExperimentError;
use crate::load::Direction;
use crate::sections::{self, Section};
use crate::storage::Storage;

/// What a system's disks have besides their data: headers and, where they are files, those of the datastore.
const HEADERS: u64 = 64 << 20;

impl RunArguments {
    /// Finds that the clusters have room for these experiments, which are those that were named.
    pub(super) fn check_room(&self, definitions: &[Definition]) -> Result<(), RunError> {
        let mut demands: BTreeMap<PathBuf, Demand> = BTreeMap::new();
        for (definition, named) in definitions.iter().zip(&self.experiments) {
            let failed = |source| RunError::Experiment { id: definition.id.clone(), source };
            for (files, of) in self.demands(definition, named).map_err(failed)? {
                let together = demands.remove(&files.directory).map_or(of, |(_, it)| it.and(of));
                demands.insert(files.directory.clone(), (files, together));
            }
        }
        let demands: Vec<Demand> = demands.into_values().collect();
        match room::shortage(&demands) {
            None => Ok(()),
            Some(shortage) => Err(RunError::Room(shortage)),
        }
    }

    /// What an experiment, which was named so, does with each cluster that it is measured on.
    fn demands(
        &self,
        definition: &Definition,
        named: &str,
    ) -> Result<Vec<Demand>, ExperimentError> {
        if definition.storage() != Some(Storage::Ceph) {
            return Ok(Vec::new());
        }
        let mut demands = Vec::new();
        for cluster in definition.clusters_or_first() {
            // Points without a cluster are not measured, and the report says why.
            let Ok(directory) = self.directory_of(cluster, named) else { continue };
            let (raids, others) = own_pool::fitting(directory, definition.redundancy())?;
            if raids.is_empty() && !others.is_empty() {
                continue;
            }
            demands.push((OsdFiles::find(directory)?, use_of(definition, self.full, cluster)));
        }
        Ok(demands)
    }
}

/// What an experiment does with the disks that it has in a cluster.
fn use_of(definition: &Definition, full: bool, cluster: Option<Setup>) -> Use {
    match &definition.matter {
        Matter::Disk(matrix, steps) => {
            if matrix.loads.iter().any(|load| load.direction != Direction::Read) {
                return Use::Overwritten;
            }
            let extent = steps.extent(full);
            let sections = sections::of_definition(definition);
            let here = sections.iter().filter(|section| section.cluster == cluster);
            here.map(|section| Use::Filled(stored(section, extent))).fold(Use::Filled(0), Use::and)
        }
        // VMs are made and removed again in each round.
        Matter::Operation(..) => Use::Overwritten,
        // They have no disks on Ceph.
        Matter::Migration(..) => Use::Filled(0),
    }
}

/// What OSDs store of a section's disks that are only filled.
fn stored(section: &Section, extent: Extent) -> u64 {
    let disks = u64::from(section.clients) * u64::from(section.disks);
    let size = extent.size_mib.saturating_mul(disks).saturating_mul(1 << 20);
    let made = section.systems.len() as u64 * u64::from(section.places.max(1));
    own_pool::stored(section.redundancy, size.saturating_add(HEADERS).saturating_mul(made))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{catalogue, definition};

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_writes_takes_all_of_the_osds_files() {
        for (id, cluster) in [("c1", Some(Setup::Crc)), ("h", None), ("v5", None), ("v9", None)] {
            let definition = catalogue::find(id).unwrap().within(false);
            assert_eq!(use_of(&definition, false, cluster), Use::Overwritten, "{id}");
        }
    }

    #[test]
    fn what_only_reads_takes_its_disks_with_copies_and_coding_chunks() {
        let reads = |text: &str| {
            let text = text.replace("direction = \"write\"", "direction = \"read\"");
            // Checks about what was written are not of such a file.
            let text = text.split("[claim]").next().unwrap().to_owned();
            definition::parse(Path::new("mine.toml"), &text).unwrap().within(false)
        };
        let v5 = reads(include_str!("../../../../bench/experiments/v5.toml"));
        // 1, 2, 4 and 8 disks of 64 MiB, each point with two systems; two copies.
        let disks = (15 * 64 + 4 * 64) * MIB;
        assert_eq!(use_of(&v5, false, None), Use::Filled(disks * 2 * 2));
        let c3 = reads(include_str!("../../../../bench/experiments/c3.toml"));
        // Of each cluster its own point: two clients with a disk of 256 MiB, two systems, three copies.
        let of_one = (2 * 256 + 64) * MIB * 2 * 3;
        assert_eq!(use_of(&c3, false, Some(Setup::Osd)), Use::Filled(of_one));
        assert_eq!(use_of(&c3, false, Some(Setup::OsdSecure)), Use::Filled(0));
    }
}
