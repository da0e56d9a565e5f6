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

/// `ceph versions`.
#[derive(Debug, Deserialize)]
pub struct Versions {
    /// How many daemons have each version, of all that run.
    pub overall: BTreeMap<String, u64>,
}

impl Versions {
    /// The releases without what they were built from, such as `16.2.15 (pacific)`; several while a cluster is upgraded.
    #[must_use]
    pub fn release(&self) -> String {
        self.overall.keys().map(|text| release_of(text)).collect::<Vec<_>>().join(", ")
    }
}

/// The release of a version, which is written `ceph version 16.2.15 (COMMIT) pacific (stable)`; a text of another form is left as it is.
fn release_of(version: &str) -> String {
    match version.split(' ').collect::<Vec<_>>()[..] {
        ["ceph", "version", number, _, name, ..] => format!("{number} ({name})"),
        _ => version.to_owned(),
    }
}

/// Answers of Ceph 16.2.15, as a cluster of `vmseal lab ceph` gave them while `osd.1` was dead.
#[cfg(test)]
pub(crate) mod recorded {
    pub const STATUS: &str = include_str!("recorded/status.json");
    pub const OSD_DUMP: &str = include_str!("recorded/osd-dump.json");
    pub const DF: &str = include_str!("recorded/df.json");
    /// This one is written by hand, in the form that Ceph documents.
    pub const VERSIONS: &str = include_str!("recorded/versions.json");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ceph_answers_is_understood() {
        let status: ClusterStatus = serde_json::from_str(recorded::STATUS).unwrap();
        assert_eq!(status.health.status, "HEALTH_WARN");
        assert!(status.health.checks["OSD_DOWN"].summary.message.contains("1 osds down"));
        assert!(status.health.checks["OSDMAP_FLAGS"].muted);
        assert_eq!((status.osdmap.num_osds, status.osdmap.serving()), (3, 2));
        assert!(status.mgrmap.available && status.pgmap.bytes_total > 0);
        assert!(status.pgmap.clean() < status.pgmap.num_pgs);

        let dump: OsdDump = serde_json::from_str(recorded::OSD_DUMP).unwrap();
        assert!(dump.has("nodeep-scrub") && !dump.has("scrub"));
        let up: Vec<_> = dump.osds.iter().map(|it| (it.osd, it.up, it.placed)).collect();
        assert_eq!(up, [(0, 1, 1), (1, 0, 1), (2, 1, 1)]);
        let of = |name: &str| dump.pools.iter().find(|it| it.pool_name == name).unwrap();
        let (copies, chunks) = (of("vmseal"), of("coded"));
        assert!(!copies.is_coded() && copies.is_for_rbd());
        assert_eq!((copies.size, copies.min_size, copies.pg_num), (3, 2, 32));
        assert!(chunks.is_coded() && chunks.erasure_code_profile == "vmseal-2-1");

        let df: Df = serde_json::from_str(recorded::DF).unwrap();
        let names: Vec<_> = df.pools.iter().map(|it| &*it.name).collect();
        assert_eq!(names, ["vmseal", "coded", "coded-metadata"]);
        assert!(df.pools[0].stats.stored > 0 && df.pools[0].stats.max_avail > 0);

        let versions: Versions = serde_json::from_str(recorded::VERSIONS).unwrap();
        assert_eq!(versions.release(), "16.2.15 (pacific)");
    }

    #[test]
    fn daemons_of_several_releases_are_told_with_all_of_them() {
        let of = |texts: &[&str]| {
            let overall = texts.iter().map(|text| ((*text).to_owned(), 1)).collect();
            Versions { overall }.release()
        };
        let (old, new) = (
            "ceph version 16.2.15 (618f44) pacific (stable)",
            "ceph version 18.2.7 (6b0e98) reef (stable)",
        );
        assert_eq!(of(&[old, new]), "16.2.15 (pacific), 18.2.7 (reef)");
        assert_eq!(of(&["ceph of my own"]), "ceph of my own");
    }

    #[test]
    fn only_groups_with_all_copies_that_can_be_used_are_clean() {
        let map = |states: &[(&str, u64)]| PgMap {
            num_pgs: states.iter().map(|it| it.1).sum(),
            pgs_by_state: states
                .iter()
                .map(|(name, count)| PgState { state_name: (*name).into(), count: *count })
                .collect(),
            bytes_used: 0,
            bytes_total: 0,
        };
        assert_eq!(map(&[("active+clean", 30), ("active+clean+scrubbing", 2)]).clean(), 32);
        let not = [("active+undersized+degraded", 5), ("peering", 1), ("unknown", 2)];
        assert_eq!(map(&not).clean(), 0);
        // A manager that has not heard of any group leaves all of it out.
        let none: PgMap = serde_json::from_str("{}").unwrap();
        assert_eq!((none.clean(), none.num_pgs), (0, 0));
    }
}
