//! What the file of an experiment says of the pools of Ceph that have the disks: in which clusters they are, how they keep data,
//! and how many clients they have.

use std::fmt;

use super::{AxisValue, Checked, Definition, DefinitionError, DiskMatrix, DiskSteps, MANY, Matter};
use crate::ceph::redundancy::Raid;
use crate::ceph::setup::Setup;
use crate::storage::Storage;

/// The axis of clusters.
pub const CLUSTERS: &str = "clusters";
/// The axis of what pools keep data by.
pub const REDUNDANCY: &str = "redundancy";

impl Definition {
    /// The clusters that are compared, by what of them is encrypted; none but on Ceph.
    #[must_use]
    pub fn clusters(&self) -> &[Setup] {
        match &self.matter {
            Matter::Disk(matrix, _) => &matrix.clusters,
            Matter::Operation(..) | Matter::Migration(..) => &[],
        }
    }

    /// The clusters that are compared; where none are told apart, the one that is given first.
    #[must_use]
    pub fn clusters_or_first(&self) -> Vec<Option<Setup>> {
        match self.clusters() {
            [] => vec![None],
            clusters => clusters.iter().copied().map(Some).collect(),
        }
    }

    /// The redundancies that are compared; none but on Ceph.
    #[must_use]
    pub fn redundancy(&self) -> &[Raid] {
        match &self.matter {
            Matter::Disk(matrix, _) => &matrix.redundancy,
            Matter::Operation(..) | Matter::Migration(..) => &[],
        }
    }

    /// The keys of the matrix that a point can be told by and whose values are names, where they have values.
    pub(super) fn named_axes(&self) -> Vec<(&'static str, Vec<AxisValue>)> {
        let clusters = self.clusters().iter().map(|it| it.id().into()).collect();
        let redundancy = self.redundancy().iter().map(|it| it.id().into()).collect();
        let axes: [(_, Vec<AxisValue>); 2] = [(CLUSTERS, clusters), (REDUNDANCY, redundancy)];
        axes.into_iter().filter(|(_, values)| !values.is_empty()).collect()
    }
}

impl Checked<'_> {
    /// The pools that disks are in, if they are told apart.
    pub(super) fn pools(
        &self,
        matrix: &DiskMatrix,
        steps: &DiskSteps,
    ) -> Result<(), DefinitionError> {
        self.on_ceph("matrix.clusters", &matrix.clusters, steps)?;
        self.on_ceph("matrix.redundancy", &matrix.redundancy, steps)?;
        self.clients(matrix, steps)
    }

    /// Only a pool of Ceph can be mounted for each client.
    fn clients(&self, matrix: &DiskMatrix, steps: &DiskSteps) -> Result<(), DefinitionError> {
        let key = "matrix.clients";
        self.axis(key, &matrix.clients, (1, MANY))?;
        let of_matrix = matrix.clients.iter().map(|clients| (key, *clients));
        let extents = [("steps.small.clients", steps.small), ("steps.full.clients", steps.full)];
        let of_steps = extents.iter().filter_map(|(key, it)| Some((*key, it.clients?)));
        for (key, clients) in of_matrix.chain(of_steps) {
            self.range(key, clients, (1, MANY))?;
            if clients > 1 && steps.storage != Storage::Ceph {
                return self.refuse(key, clients, "only on `ceph`");
            }
        }
        Ok(())
    }

    /// A key whose values are each there once, and on Ceph alone.
    fn on_ceph<T: PartialEq + fmt::Display>(
        &self,
        key: &str,
        values: &[T],
        steps: &DiskSteps,
    ) -> Result<(), DefinitionError> {
        for (at, value) in values.iter().enumerate() {
            if values[..at].contains(value) {
                return self.refuse(key, value, "each value once");
            }
        }
        match values.first() {
            Some(value) if steps.storage != Storage::Ceph => {
                self.refuse(key, value, "only on `ceph`")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::refused_of;

    #[test]
    fn clusters_are_those_that_there_are_and_on_ceph() {
        let good = include_str!("../../../../bench/experiments/c3.toml");
        let clusters = "clusters = [\"crc\", \"secure\", \"osd\"]";
        for (from, to, expected) in [
            (
                clusters,
                "clusters = [\"crc\", \"luks\"]",
                "unknown variant `luks`, expected one of `crc`, `secure`, `osd`, `osd-secure`",
            ),
            (
                clusters,
                "clusters = [\"crc\", \"crc\"]",
                "matrix.clusters: crc is not allowed: each value once",
            ),
            (
                "storage = \"ceph\"",
                "storage = \"memory\"",
                "matrix.clusters: crc is not allowed: only on `ceph`",
            ),
            (
                "where = { clusters = \"secure\" }",
                "where = { clusters = \"osd-secure\" }",
                "claim.checks.where.clusters: osd-secure is not allowed: a value of matrix.clusters",
            ),
            (
                "where = { clusters = \"secure\" }",
                "where = { clusters = -1 }",
                "a whole number that is not negative, or a name, is needed",
            ),
            (
                "where = { clusters = \"secure\" }",
                "where = { cluster = \"secure\" }",
                "claim.checks.where.cluster: secure is not allowed: keys are clients, clusters, delay_us",
            ),
            (
                "loads = [\"c3-4m-random-read\"]",
                "loads = [\"c3-read\"]",
                "claim.checks.loads: c3-read is not allowed: a load of matrix.loads",
            ),
            ("depth = 16", "depth = 300", "steps.small.depth: 300 is not allowed: from 1 to 256"),
            ("clients = 2", "disks = 99", "steps.small.disks: 99 is not allowed: from 1 to 16"),
            ("clients = 2", "clients = 99", "steps.small.clients: 99 is not allowed: from 1 to 16"),
            (
                "clients = [8]",
                "clients = [8, 8]",
                "matrix.clients: 8 is not allowed: each value once",
            ),
            ("clients = [8]", "clients = [0]", "matrix.clients: 0 is not allowed: from 1 to 16"),
        ] {
            let found = refused_of(good, from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
            assert!(found.contains("mine.toml"), "{found}");
        }
    }
}
