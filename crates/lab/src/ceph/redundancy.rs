//! How a pool keeps data when OSDs are lost.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most copies that Ceph keeps of an object.
const SIZE_MAX: u32 = 10;
/// The copies of a pool of which nothing else is said.
const SIZE: u32 = 3;
/// The most chunks together; more than a lab has OSDs.
const CHUNKS_MAX: u32 = 20;
/// The longest name of a pool: it becomes a part of other names.
const NAME_MAX: usize = 64;

/// Data and coding chunks of a pool, written `4+2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Erasure {
    /// K: the chunks that an object is cut into.
    pub data: u32,
    /// M: the chunks that are computed, and so many may be lost.
    pub coding: u32,
}

impl FromStr for Erasure {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('+').and_then(|(data, coding)| {
            Some(Self { data: data.parse().ok()?, coding: coding.parse().ok()? })
        });
        let Some(erasure) = parsed else {
            return Err("two numbers are needed, such as 4+2".into());
        };
        // One data chunk is a copy; no coding chunk is no redundancy.
        match erasure {
            Self { data: 2.., coding: 1.. }
                if erasure.data.saturating_add(erasure.coding) <= CHUNKS_MAX =>
            {
                Ok(erasure)
            }
            _ => Err(format!(
                "at least 2 data chunks and 1 coding chunk are needed, and at most {CHUNKS_MAX} together"
            )),
        }
    }
}

impl fmt::Display for Erasure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.data, self.coding)
    }
}

/// Checks the name of a pool.
///
/// # Errors
/// What is wrong with it.
pub fn name(text: &str) -> Result<String, String> {
    let plain = |it: char| it.is_ascii_alphanumeric() || "._-".contains(it);
    if text.is_empty() || text.len() > NAME_MAX || !text.chars().all(plain) {
        return Err(format!(
            "a name of 1 to {NAME_MAX} letters, digits, '.', '_' and '-' is needed"
        ));
    }
    if text.starts_with(['.', '-']) {
        return Err("the name begins with neither '.' nor '-'".to_owned());
    }
    Ok(text.to_owned())
}

/// How a pool keeps data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redundancy {
    /// Copies.
    Copies {
        /// How many.
        size: u32,
        /// How many must be there for I/O to go on.
        min_size: u32,
    },
    /// Chunks, with copies of what a pool of chunks cannot keep.
    Chunks {
        /// How many.
        erasure: Erasure,
        /// How many must be there for I/O to go on.
        min_size: u32,
    },
}

/// What outlives two failures, by the names that storage policies have for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Raid {
    /// Three copies.
    Raid1,
    /// Four data chunks and two coding chunks.
    Raid6,
}

impl Raid {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Raid1, Self::Raid6];

    /// As pools of Ceph have it, with the copies or chunks that Ceph itself wants for I/O to go on.
    #[must_use]
    pub fn redundancy(self) -> Redundancy {
        match self {
            Self::Raid1 => Redundancy::Copies { size: 3, min_size: usual(3) },
            Self::Raid6 => {
                Redundancy::Chunks { erasure: Erasure { data: 4, coding: 2 }, min_size: 5 }
            }
        }
    }

    /// Its name in files and results.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Raid1 => "raid1",
            Self::Raid6 => "raid6",
        }
    }
}

impl fmt::Display for Raid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl Redundancy {
    /// The redundancy that the options of `pool add` describe.
    ///
    /// # Errors
    /// Which option is invalid, and why.
    pub fn new(
        size: Option<u32>,
        min_size: Option<u32>,
        erasure: Option<Erasure>,
    ) -> Result<Self, String> {
        let Some(erasure) = erasure else {
            let size = size.unwrap_or(SIZE);
            if !(2..=SIZE_MAX).contains(&size) {
                return Err(format!("--size is from 2 to {SIZE_MAX}"));
            }
            let min_size = min_size.unwrap_or(usual(size));
            return match (1..=size).contains(&min_size) {
                true => Ok(Self::Copies { size, min_size }),
                false => Err(format!("--min-size is from 1 to the {size} copies")),
            };
        };
        let Erasure { data, coding } = erasure;
        // Ceph's own default.
        let min_size = min_size.unwrap_or(data + u32::from(coding > 1));
        match (data..=data + coding).contains(&min_size) {
            true => Ok(Self::Chunks { erasure, min_size }),
            false => Err(format!("--min-size of {erasure} is from {data} to {}", data + coding)),
        }
    }

    /// What OSDs store of so many bytes.
    #[must_use]
    pub fn stored(self, bytes: u64) -> u64 {
        match self {
            Self::Copies { size, .. } => bytes.saturating_mul(u64::from(size)),
            Self::Chunks { erasure: Erasure { data, coding }, .. } => {
                let parity = bytes.div_ceil(u64::from(data)).saturating_mul(u64::from(coding));
                bytes.saturating_add(parity)
            }
        }
    }

    /// The OSDs that it needs.
    #[must_use]
    pub fn osds(self) -> u32 {
        match self {
            Self::Copies { size, .. } => size,
            Self::Chunks { erasure, .. } => erasure.data + erasure.coding,
        }
    }

    /// How many must be there for I/O to go on.
    #[must_use]
    pub fn min_size(self) -> u32 {
        match self {
            Self::Copies { min_size, .. } | Self::Chunks { min_size, .. } => min_size,
        }
    }

    /// Of the pool beside one of chunks: it stands as many losses, and with as many of them I/O goes on.
    #[must_use]
    pub fn of_metadata(self) -> Option<Self> {
        match self {
            Self::Copies { .. } => None,
            Self::Chunks { erasure, min_size } => Some(Self::Copies {
                size: erasure.coding + 1,
                min_size: min_size - erasure.data + 1,
            }),
        }
    }
}

/// The copies that must be there, where nothing is said: half of them, rounded up, as in Ceph.
fn usual(size: u32) -> u32 {
    size - size / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(text: &str, min_size: Option<u32>) -> Result<Redundancy, String> {
        Redundancy::new(None, min_size, Some(text.parse()?))
    }

    #[test]
    fn what_is_not_said_is_as_in_ceph() {
        for (size, min_size) in [(None, 2), (Some(2), 1), (Some(3), 2), (Some(4), 2), (Some(5), 3)]
        {
            let usual = Redundancy::new(size, None, None).unwrap();
            assert_eq!(usual, Redundancy::Copies { size: size.unwrap_or(3), min_size });
        }
        for (text, min_size) in [("2+1", 2), ("4+2", 5), ("8+3", 9)] {
            assert_eq!(chunks(text, None).unwrap().min_size(), min_size, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (size, min_size, why) in [
            (Some(1), None, "--size"),
            (Some(11), None, "--size"),
            (None, Some(0), "--min-size"),
            (None, Some(4), "--min-size"),
        ] {
            let refused = Redundancy::new(size, min_size, None).unwrap_err();
            assert!(refused.contains(why), "{size:?} {min_size:?}: {refused}");
        }
        for text in ["1+2", "4+0", "4", "4+", "x+y", "-4+2", "30+2", "4294967295+4294967295"] {
            assert!(text.parse::<Erasure>().is_err(), "{text}");
        }
        assert!(chunks("4+2", Some(3)).unwrap_err().contains("from 4 to 6"));
        assert!(chunks("4+2", Some(7)).is_err());
    }

    #[test]
    fn metadata_stands_what_data_stands() {
        for (text, min_size) in
            [("2+1", None), ("4+2", None), ("4+2", Some(4)), ("4+2", Some(6)), ("8+3", None)]
        {
            let data = chunks(text, min_size).unwrap();
            let metadata = data.of_metadata().unwrap();
            let goes_on_without = |it: Redundancy| it.osds() - it.min_size();
            assert_eq!(goes_on_without(data), goes_on_without(metadata), "{text} {min_size:?}");
            let erasure: Erasure = text.parse().unwrap();
            assert_eq!(metadata.osds() - 1, erasure.coding);
        }
        assert_eq!(Redundancy::new(None, None, None).unwrap().of_metadata(), None);
    }

    #[test]
    fn both_raids_outlive_two_failures_and_are_named_as_in_files() {
        for raid in Raid::ALL {
            let lost = match raid.redundancy() {
                Redundancy::Copies { size, .. } => size - 1,
                Redundancy::Chunks { erasure, .. } => erasure.coding,
            };
            assert_eq!(lost, 2, "{raid}");
            assert_eq!(serde_json::to_value(raid).unwrap(), raid.to_string());
        }
        assert_eq!(Raid::Raid1.redundancy(), Redundancy::new(None, None, None).unwrap());
        assert_eq!(Raid::Raid6.redundancy(), chunks("4+2", None).unwrap());
    }

    #[test]
    fn copies_are_stored_whole_and_chunks_with_their_share() {
        assert_eq!(Raid::Raid1.redundancy().stored(100), 300);
        assert_eq!(Raid::Raid6.redundancy().stored(100), 150);
        assert_eq!(chunks("2+1", None).unwrap().stored(5), 8);
    }

    #[test]
    fn names_are_safe_in_command_lines_and_paths() {
        for good in ["vmseal", "rep3", "ec-4_2.a"] {
            assert_eq!(name(good).unwrap(), good);
        }
        for bad in ["", "-f", ".mgr", "a/b", "a b", "ä", "a@b", &"x".repeat(65)] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }
}
