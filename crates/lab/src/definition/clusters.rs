//! What the file of an experiment says of clusters of Ceph.

use super::{AxisValue, Checked, Definition, DefinitionError, DiskMatrix, DiskSteps, Matter};
use crate::storage::Storage;

/// The axis.
pub const CLUSTERS: &str = "clusters";

impl Definition {
    /// The keys of the matrix that a point can be told by and whose values are names; those without values are none.
    pub(super) fn named_axes(&self) -> Option<(&'static str, Vec<AxisValue>)> {
        let Matter::Disk(matrix, _) = &self.matter else { return None };
        let names: Vec<_> = matrix.clusters.iter().map(|it| AxisValue::from(it.id())).collect();
        (!names.is_empty()).then_some((CLUSTERS, names))
    }
}

impl Checked<'_> {
    /// The clusters that disks are measured on, if they are told apart.
    pub(super) fn clusters(
        &self,
        matrix: &DiskMatrix,
        steps: &DiskSteps,
    ) -> Result<(), DefinitionError> {
        let clusters = &matrix.clusters;
        for (at, cluster) in clusters.iter().enumerate() {
            if clusters[..at].contains(cluster) {
                return self.refuse("matrix.clusters", cluster, "each value once");
            }
        }
        match clusters.first() {
            Some(cluster) if steps.storage != Storage::Ceph => {
                self.refuse("matrix.clusters", cluster, "none but with the storage `ceph`")
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
                "matrix.clusters: crc is not allowed: none but with the storage `ceph`",
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
                "claim.checks.where.cluster: secure is not allowed: keys are clusters, delay_us",
            ),
            (
                "loads = [\"c3-4m-random-read\"]",
                "loads = [\"c3-read\"]",
                "claim.checks.loads: c3-read is not allowed: a load of matrix.loads",
            ),
            ("depth = 16", "depth = 300", "steps.small.depth: 300 is not allowed: from 1 to 256"),
            ("disks = 2", "disks = 99", "steps.small.disks: 99 is not allowed: from 1 to 16"),
        ] {
            let found = refused_of(good, from, to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
            assert!(found.contains("mine.toml"), "{found}");
        }
    }
}
