//! What the file of an experiment says of the loads of disks.

use serde::Deserialize;

use super::{AXIS_MAX, Checked, DefinitionError};
use crate::load::{Direction, Order};

/// The largest block, in bytes: the load generator's; and the most requests in flight.
const BLOCK_MAX: u32 = vmseal_initiator::BLOCK_MAX;
pub(super) const DEPTH_MAX: u16 = 256;
/// Every load's block is a multiple of this.
const BLOCK_UNIT: u32 = 4096;

/// A load as a file has it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadSpec {
    /// Its name in goals and results.
    pub id: String,
    /// The order of its blocks.
    pub order: Order,
    /// What its requests do.
    pub direction: Direction,
    /// Bytes of a request.
    pub block: u32,
    /// Requests in flight.
    pub depth: u16,
}

impl Checked<'_> {
    pub(super) fn loads(&self, loads: &[LoadSpec]) -> Result<(), DefinitionError> {
        self.range("number of matrix.loads", loads.len(), (1, AXIS_MAX))?;
        for (at, load) in loads.iter().enumerate() {
            self.id("matrix.loads.id", &load.id)?;
            if loads[..at].iter().any(|other| other.id == load.id) {
                return self.refuse("matrix.loads.id", &load.id, "each name once");
            }
            self.range("matrix.loads.block", load.block, (BLOCK_UNIT, BLOCK_MAX))?;
            if !load.block.is_power_of_two() {
                return self.refuse("matrix.loads.block", load.block, "a power of two");
            }
            self.range("matrix.loads.depth", load.depth, (1, DEPTH_MAX))?;
            if let Direction::Mixed(reads) = load.direction {
                // All or none of them are a direction of their own.
                self.range("matrix.loads.direction.reads", reads, (1, 99))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::tests::refused_of;
    use super::super::{Matter, parse};
    use super::*;

    const GOOD: &str = include_str!("../../../../bench/experiments/h.toml");
    const CLIENT: &str = include_str!("../../../../bench/experiments/ceph-client.toml");
    const CLIENTS: &str = include_str!("../../../../bench/experiments/ceph-clients.toml");

    /// The requests in flight of each load, by its id.
    fn depths(text: &str, full: bool) -> Vec<(String, u16)> {
        let definition = parse(Path::new("mine.toml"), text).unwrap().within(full);
        let Matter::Disk(matrix, _) = definition.matter else { panic!("it is about disks") };
        matrix.loads.into_iter().map(|load| (load.id, load.depth)).collect()
    }

    #[test]
    fn large_requests_are_fewer_in_the_small_size_alone() {
        let with = |text: &str, full: bool, id: &str| {
            let found = depths(text, full).into_iter().find(|(name, _)| name == id);
            found.unwrap_or_else(|| panic!("{id}")).1
        };
        for direction in ["read", "write"] {
            let small = |load: &str| with(CLIENT, false, &format!("ceph-{load}-{direction}"));
            assert_eq!((small("4k"), small("4m"), small("4k-alone")), (128, 16, 1));
            let full = |load: &str| with(CLIENT, true, &format!("ceph-{load}-{direction}"));
            assert_eq!((full("4k"), full("4m"), full("4k-alone")), (128, 128, 1));
            let clients =
                |full, load: &str| with(CLIENTS, full, &format!("ceph-clients-{load}-{direction}"));
            // Four clients have as many in flight as the one above.
            assert_eq!((clients(false, "4k"), clients(false, "4m")), (128, 4));
            assert_eq!((clients(true, "4k"), clients(true, "4m")), (128, 128));
        }
        // One request is larger than that.
        let one = CLIENT.replace("in_flight_mib = 64", "in_flight_mib = 1");
        assert!(depths(&one, false).contains(&("ceph-4m-read".to_owned(), 1)));
        for (to, expected) in [
            ("in_flight_mib = 0", "steps.small.in_flight_mib: 0 is not allowed: from 1 to 1024"),
            ("in_flight_mib = 2000", "steps.small.in_flight_mib: 2000 is not allowed"),
        ] {
            let found = refused_of(CLIENT, "in_flight_mib = 64", to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
        }
    }

    #[test]
    fn a_load_of_both_directions_says_how_many_are_reads() {
        let Matter::Disk(matrix, _) = parse(Path::new("h.toml"), GOOD).unwrap().matter else {
            panic!("h is about disks")
        };
        let directions: Vec<_> = matrix.loads.iter().map(|load| load.direction).collect();
        assert_eq!(
            directions[..6],
            [Direction::Write, Direction::Mixed(20), Direction::Mixed(70)]
                .map(|direction| [direction; 2])
                .concat()
        );
        for (to, expected) in [
            ("{ reads = 0 }", "matrix.loads.direction.reads: 0 is not allowed: from 1 to 99"),
            ("{ reads = 100 }", "100 is not allowed: from 1 to 99"),
            ("{ writes = 20 }", "unknown variant `writes`"),
            ("\"mixed\"", "unknown variant `mixed`"),
        ] {
            let found = refused_of(GOOD, "{ reads = 20 }", to);
            assert!(found.contains(expected), "{found}\nnot: {expected}");
        }
    }

    #[test]
    fn the_matrix_of_the_document_is_whole() {
        let Matter::Disk(matrix, _) = parse(Path::new("h.toml"), GOOD).unwrap().matter else {
            panic!("h is about disks")
        };
        let mut expected = Vec::new();
        for block in [4_u32, 16, 64, 128] {
            for direction in [Direction::Write, Direction::Mixed(20), Direction::Mixed(70)] {
                expected.extend([1_u16, 2].map(|depth| (block << 10, direction, depth)));
            }
        }
        let loads = matrix.loads.iter().map(|load| (load.block, load.direction, load.depth));
        assert_eq!(loads.collect::<Vec<_>>(), expected);
        for (at, load) in matrix.loads.iter().enumerate() {
            assert_eq!(load.order, Order::Random);
            let (direction, block) = (load.direction, load.block >> 10);
            let mix = match direction {
                Direction::Mixed(reads) => format!("{reads}-{}", 100 - reads),
                Direction::Write => "0-100".to_owned(),
                Direction::Read => panic!("the document has none"),
            };
            // Numbered as in the document.
            assert_eq!(load.id, format!("h{}-{block}k-{mix}-x{}", at + 1, load.depth));
        }
    }
}
