//! What Ceph's tools answer, as far as it is used.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

/// `ceph status`.
#[derive(Debug, Deserialize)]
pub struct ClusterStatus {
    /// Whether all is well.
    pub health: Health,
    /// The OSDs.
    pub osdmap: OsdCounts,
    /// Data and placement groups.
    pub pgmap: PgMap,
    /// The manager.
    pub mgrmap: MgrMap,
}

/// Whether all is well.
#[derive(Debug, Deserialize)]
pub struct Health {
    /// `HEALTH_OK`, `HEALTH_WARN` or `HEALTH_ERR`.
    pub status: String,
    /// What is not, by code.
    #[serde(default)]
    pub checks: BTreeMap<String, Check>,
}

/// Something that is not well.
#[derive(Debug, Deserialize)]
pub struct Check {
    /// What.
    pub summary: Summary,
    /// Whether it was said to be left out.
    #[serde(default)]
    pub muted: bool,
}

/// A message.
#[derive(Debug, Deserialize)]
pub struct Summary {
    /// Its text.
    pub message: String,
}

/// How many OSDs there are.
#[derive(Debug, Deserialize)]
pub struct OsdCounts {
    /// In all.
    pub num_osds: u64,
    /// That serve.
    pub num_up_osds: u64,
    /// That data is placed on.
    pub num_in_osds: u64,
}

impl OsdCounts {
    /// How many serve, and have data placed on them.
    #[must_use]
    pub fn serving(&self) -> u64 {
        self.num_up_osds.min(self.num_in_osds)
    }
}

/// Data and placement groups, as the manager last told the monitor.
#[derive(Debug, Deserialize)]
pub struct PgMap {
    /// How many placement groups there are.
    #[serde(default)]
    pub num_pgs: u64,
    /// How many are in which state.
    #[serde(default)]
    pub pgs_by_state: Vec<PgState>,
    /// Bytes that are taken, on all OSDs.
    #[serde(default)]
    pub bytes_used: u64,
    /// Bytes that there are.
    #[serde(default)]
    pub bytes_total: u64,
}

/// Placement groups in one state.
#[derive(Debug, Deserialize)]
pub struct PgState {
    /// Such as `active+clean`.
    pub state_name: String,
    /// How many.
    pub count: u64,
}

impl PgMap {
    /// How many placement groups can be used and have all of their copies.
    #[must_use]
    pub fn clean(&self) -> u64 {
        let clean = |it: &&PgState| {
            let mut words = it.state_name.split('+');
            words.next() == Some("active") && words.next() == Some("clean")
        };
        self.pgs_by_state.iter().filter(clean).map(|it| it.count).sum()
    }
}

/// The manager.
#[derive(Debug, Deserialize)]
pub struct MgrMap {
    /// Whether one serves.
    pub available: bool,
}

/// `ceph osd dump`.
#[derive(Debug, Deserialize)]
pub struct OsdDump {
    /// What holds for all OSDs, separated by commas.
    pub flags: String,
    /// The pools.
    pub pools: Vec<PoolEntry>,
    /// The OSDs.
    pub osds: Vec<OsdEntry>,
}

impl OsdDump {
    /// Whether a flag is set.
    #[must_use]
    pub fn has(&self, flag: &str) -> bool {
        self.flags.split(',').any(|it| it == flag)
    }
}

/// An OSD.
#[derive(Debug, Deserialize)]
pub struct OsdEntry {
    /// Its number.
    pub osd: usize,
    /// 1 if it serves.
    pub up: u8,
    /// 1 if data is placed on it.
    #[serde(rename = "in")]
    pub placed: u8,
}

/// A pool.
#[derive(Clone, Debug, Deserialize)]
pub struct PoolEntry {
    /// Its name.
    pub pool_name: String,
    /// Copies, or data and coding chunks together.
    pub size: u32,
    /// How many must be there for I/O to go on.
    pub min_size: u32,
    /// 1 for copies, 3 for chunks.
    #[serde(rename = "type")]
    pub kind: u8,
    /// Placement groups.
    pub pg_num: u64,
    /// Its profile; empty if it keeps copies.
    #[serde(default)]
    pub erasure_code_profile: String,
    /// What it is for.
    #[serde(default)]
    pub application_metadata: BTreeMap<String, IgnoredAny>,
}

impl PoolEntry {
    /// Whether it keeps chunks.
    #[must_use]
    pub fn is_coded(&self) -> bool {
        self.kind == 3
    }

    /// Whether images can be in it.
    #[must_use]
    pub fn is_for_rbd(&self) -> bool {
        self.application_metadata.contains_key("rbd")
    }
}

/// `ceph df`.
#[derive(Debug, Deserialize)]
pub struct Df {
    /// The pools.
    pub pools: Vec<PoolSpace>,
}

/// The space of a pool.
#[derive(Debug, Deserialize)]
pub struct PoolSpace {
    /// Its name.
    pub name: String,
    /// The figures.
    pub stats: PoolStats,
}

/// The figures of a pool, in bytes.
#[derive(Debug, Deserialize)]
pub struct PoolStats {
    /// What clients have stored.
    #[serde(default)]
    pub stored: u64,
    /// What that takes on all OSDs.
    #[serde(default)]
    pub bytes_used: u64,
    /// What clients can store more.
    #[serde(default)]
    pub max_avail: u64,
}
