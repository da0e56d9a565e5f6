//! What of a Ceph cluster may fail: how its pools keep data, and what policies ask for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::failure_domain::FailureDomain;
use crate::pool_fullness::PoolFullness;

/// The most failures that a policy can ask disks to outlive: those of vSphere's storage policies.
pub const FAILURES_MAX: u8 = 3;

/// The fewest data chunks of erasure coding: with one, each coding chunk is a copy of it.
pub const DATA_CHUNKS_MIN: u32 = 2;

/// The most data chunks: Ceph's plugin `isa` takes no more with [`FAILURES_MAX`] coding chunks. The plugin `jerasure` takes more.
pub const DATA_CHUNKS_MAX: u32 = 32;

/// How a pool keeps data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum PoolLayout {
    /// Whole copies (RAID 1).
    Mirroring {
        /// How many there are (`size`).
        copies: u32,
        /// With how many reads and writes go on (`min_size`).
        copies_min: u32,
    },
    /// Data chunks, and coding chunks that are computed from them (RAID 5 with one of these, RAID 6 with two).
    ErasureCoding {
        /// How many data chunks (`k`).
        data: u32,
        /// How many coding chunks (`m`).
        coding: u32,
        /// With how many chunks of both kinds reads and writes go on (`min_size`).
        parts_min: u32,
    },
}

impl PoolLayout {
    /// How many failures lose nothing.
    #[must_use]
    pub fn outlived(self) -> u32 {
        match self {
            Self::Mirroring { copies, .. } => copies.saturating_sub(1),
            Self::ErasureCoding { coding, .. } => coding,
        }
    }

    /// With how many failures reads and writes go on.
    #[must_use]
    pub fn served(self) -> u32 {
        match self {
            Self::Mirroring { copies, copies_min } => copies.saturating_sub(copies_min),
            Self::ErasureCoding { data, coding, parts_min } => {
                (data + coding).saturating_sub(parts_min)
            }
        }
    }

    /// Which of the two it is.
    #[must_use]
    pub fn kind(self) -> Layout {
        match self {
            Self::Mirroring { .. } => Layout::Mirroring,
            Self::ErasureCoding { .. } => Layout::ErasureCoding,
        }
    }
}

impl fmt::Display for PoolLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mirroring { copies, .. } => write!(f, "mirroring, {copies} copies"),
            Self::ErasureCoding { data, coding, .. } => {
                write!(f, "erasure coding, k={data} m={coding}")
            }
        }
    }
}

/// A pool of a datastore, as its cluster describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolFacts {
    /// Its name.
    pub pool: String,
    /// How it keeps data.
    pub layout: PoolLayout,
    /// What fails as one, as its CRUSH rule has it: `osd`, `host`, `rack`.
    pub failure_domain: String,
    /// How its OSDs compress what they store; none where they do not. Ciphertext does not become smaller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<String>,
    /// The monitors' mark that it has little room left, or no room. It is absent where the pool has room, or where what serves it on the host is
    /// of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fullness: Option<PoolFullness>,
}

impl PoolFacts {
    /// How many failures a VM goes on with.
    #[must_use]
    pub fn failures(&self) -> u32 {
        self.layout.outlived().min(self.layout.served())
    }

    /// Whether writes to it wait until there is room.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.fullness.is_some_and(PoolFullness::stops_writes)
    }

    /// That it has little room left, or no room, and what may be done; absent where it has room.
    #[must_use]
    pub fn lack_of_room(&self) -> Option<String> {
        self.fullness.map(|fullness| fullness.told(&self.pool))
    }

    /// Why copies that are kept apart on what the pool has are not kept apart on this; none if they are.
    fn nearer_than(&self, asked: FailureDomain) -> Option<String> {
        let (pool, domain) = (&self.pool, &self.failure_domain);
        let each = match self.layout.kind() {
            Layout::Mirroring => "copy",
            Layout::ErasureCoding => "chunk",
        };
        let apart = format!("pool '{pool}' keeps each {each} in another {domain}");
        match domain.parse::<FailureDomain>() {
            Ok(domain) if domain >= asked => None,
            Ok(_) => Some(format!("{apart}, not in another {}", asked.name())),
            // A type of the administrator's own: where it stands among these is in his map alone.
            Err(_) => Some(format!(
                "{apart}, and whether that is another {}, too, is not known",
                asked.name()
            )),
        }
    }
}

impl fmt::Display for PoolFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layout, domain) = (self.layout, &self.failure_domain);
        let (outlived, served) = (layout.outlived(), layout.served());
        let plural = if outlived == 1 { "" } else { "s" };
        write!(
            f,
            "{layout}: outlives {outlived} failed {domain}{plural}, guests go on with {served}"
        )?;
        if served > 0 && served == outlived {
            // min_size is what is needed to read the data: a further failure loses what was written since.
            f.write_str(", and what is written then has no second copy")?;
        }
        match &self.compression {
            None => Ok(()),
            Some(mode) => write!(f, "; compression {mode}, which does nothing for ciphertext"),
        }
    }
}

/// How data is kept more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// In whole copies.
    Mirroring,
    /// In data chunks, and coding chunks that are computed from them.
    ErasureCoding,
}

impl Layout {
    /// Its name, as options have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mirroring => "mirroring",
            Self::ErasureCoding => "erasure-coding",
        }
    }
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Mirroring, Self::ErasureCoding]
            .into_iter()
            .find(|layout| layout.name() == text)
            .ok_or_else(|| "it is 'mirroring' or 'erasure-coding'".to_owned())
    }
}

/// What a policy asks of the storage of disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Redundancy {
    /// With how many failures, of what the pool's failure domain says, nothing is lost and guests go on; from 0 to 3.
    #[serde(default)]
    pub failures: u8,
    /// How the data is kept; none leaves it to the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Layout>,
    /// How many data chunks erasure coding has (`k`), from 2 to 32: exactly so many. It is given with the layout `erasure_coding` alone. None
    /// leaves it to the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_chunks: Option<u32>,
    /// On what copies and chunks are kept apart at least: a pool that keeps them in other racks does for `host`, too. None leaves it to the
    /// pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<FailureDomain>,
}

impl Redundancy {
    /// Whether it asks for nothing.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Checks what can be checked without a pool.
    ///
    /// # Errors
    /// The field, and what is wrong with it.
    pub fn check(self) -> Result<(), (&'static str, String)> {
        if self.failures > FAILURES_MAX {
            return Err(("failures", format!("must be 0 to {FAILURES_MAX}")));
        }
        let Some(chunks) = self.data_chunks else { return Ok(()) };
        if !(DATA_CHUNKS_MIN..=DATA_CHUNKS_MAX).contains(&chunks) {
            let what = format!("must be {DATA_CHUNKS_MIN} to {DATA_CHUNKS_MAX}, not {chunks}");
            return Err(("data_chunks", what));
        }
        if self.layout != Some(Layout::ErasureCoding) {
            let what = "is only for erasure coding: ask for that, too (2,erasure-coding)";
            return Err(("data_chunks", what.to_owned()));
        }
        Ok(())
    }

    /// What guests risk that go on with as many failures as it names, in pools that survive no more; none where it names no failures.
    #[must_use]
    pub fn risk(self) -> Option<String> {
        let failures = match self.failures {
            0 => return None,
            1 => "1 failure".to_owned(),
            more => format!("{more} failures"),
        };
        // There is no larger number.
        let more = match self.failures {
            FAILURES_MAX => "",
            _ => "choose one failure more, or ",
        };
        Some(format!(
            "guests go on with {failures} (min_size). In a pool that survives no more, as those that 'vmseal datastore add --create' makes, what they write then has no second copy until the cluster has recovered: a further failure may lose writes that were acknowledged. Where that risk is too high, {more}make a pool that keeps one copy or chunk more"
        ))
    }

    /// As options have it: `NUMBER`, or `NUMBER,LAYOUT`. The data chunks and the failure domain are options of their own.
    #[must_use]
    pub fn to_option(self) -> String {
        let layout = self.layout.map_or_else(String::new, |layout| format!(",{}", layout.name()));
        format!("{}{layout}", self.failures)
    }

    /// What pools lack of this: that of names and headers, and that of data where it is another one. None if they do not. Of a
    /// datastore without pools, or whose cluster has not described them, nothing is known.
    #[must_use]
    pub fn lacking(self, pools: &[PoolFacts]) -> Option<String> {
        if pools.is_empty() && !self.is_nothing() {
            let what = "it is not known what failures it outlives: it is a directory, or its cluster has not described its pools yet";
            return Some(what.to_owned());
        }
        let weak = pools.iter().find(|pool| pool.failures() < u32::from(self.failures));
        if let Some(pool) = weak {
            return Some(format!("pool '{}' has {pool}", pool.pool));
        }
        let asked = self.failure_domain;
        let near = asked.and_then(|asked| pools.iter().find_map(|pool| pool.nearer_than(asked)));
        if near.is_some() {
            return near;
        }
        let data = pools.last()?;
        if let Some(wanted) = self.layout.filter(|layout| *layout != data.layout.kind()) {
            let (pool, layout) = (&data.pool, data.layout);
            return Some(format!("pool '{pool}' has {layout}, not {}", wanted.name()));
        }
        self.other_chunks(data)
    }

    /// Why a pool of erasure coding does not have the data chunks that this asks for; none if it has.
    fn other_chunks(self, pool: &PoolFacts) -> Option<String> {
        let asked = self.data_chunks?;
        let PoolLayout::ErasureCoding { data, coding, .. } = pool.layout else { return None };
        (data != asked).then(|| {
            format!("pool '{}' has k={data} m={coding}, not k={asked} (data chunks)", pool.pool)
        })
    }
}

impl FromStr for Redundancy {
    type Err = String;

    /// `NUMBER`, or `NUMBER,LAYOUT`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (failures, layout) = match text.split_once(',') {
            Some((failures, layout)) => (failures, Some(layout.parse()?)),
            None => (text, None),
        };
        let failures = failures.parse().map_err(|_| format!("'{failures}' is no number"))?;
        let asked = Self { failures, layout, ..Self::default() };
        asked.check().map(|()| asked).map_err(|(_, what)| what)
    }
}

impl fmt::Display for Redundancy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failures = match self.failures {
            0 if self.is_nothing() => Some("any number of failures".to_owned()),
            0 => None,
            1 => Some("1 failure".to_owned()),
            more => Some(format!("{more} failures")),
        };
        let layout = self.layout.map(|layout| layout.name().to_owned());
        let chunks = self.data_chunks.map(|chunks| format!("{chunks} data chunks"));
        let apart = |domain: FailureDomain| format!("each copy in another {}", domain.name());
        let parts = [failures, layout, chunks, self.failure_domain.map(apart)];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(pool: &str, layout: PoolLayout) -> PoolFacts {
        let (pool, failure_domain) = (pool.to_owned(), "host".to_owned());
        PoolFacts { pool, layout, failure_domain, compression: None, fullness: None }
    }

    fn mirrored(copies: u32, copies_min: u32) -> PoolFacts {
        pool("vms", PoolLayout::Mirroring { copies, copies_min })
    }

    fn coded(data: u32, coding: u32, parts_min: u32) -> PoolFacts {
        pool("ec", PoolLayout::ErasureCoding { data, coding, parts_min })
    }

    #[test]
    fn a_pool_stands_what_neither_loses_data_nor_stops_guests() {
        assert_eq!(mirrored(3, 2).failures(), 1);
        assert_eq!(mirrored(2, 1).failures(), 1);
        assert_eq!(mirrored(2, 2).failures(), 0, "guests wait");
        assert_eq!(mirrored(1, 1).failures(), 0);
        assert_eq!(coded(4, 2, 5).failures(), 1);
        assert_eq!(coded(4, 2, 4).failures(), 2);
        assert_eq!(coded(2, 1, 3).failures(), 0);
    }

    #[test]
    fn what_a_policy_asks_for_is_compared_with_the_weaker_pool_and_the_layout_of_data() {
        let asks = |failures, layout| Redundancy { failures, layout, ..Redundancy::default() };
        let both = [mirrored(3, 2), coded(2, 1, 2)];
        assert_eq!(asks(1, Some(Layout::ErasureCoding)).lacking(&both), None);
        assert!(asks(1, Some(Layout::Mirroring)).lacking(&both).unwrap().contains("'ec'"));
        assert!(asks(2, None).lacking(&both).unwrap().contains("'vms'"));
        let weak = [mirrored(1, 1), coded(4, 2, 4)];
        assert!(asks(1, None).lacking(&weak).unwrap().contains("'vms'"));
        assert_eq!(asks(0, None).lacking(&weak), None);
        assert!(asks(1, None).lacking(&[]).unwrap().contains("not known"));
        assert_eq!(asks(0, None).lacking(&[]), None);
    }

    #[test]
    fn data_chunks_are_as_many_as_a_policy_names_and_are_of_erasure_coding() {
        let asks = |chunks| Redundancy {
            failures: 2,
            layout: Some(Layout::ErasureCoding),
            data_chunks: Some(chunks),
            failure_domain: None,
        };
        let pools = [mirrored(3, 1), coded(2, 2, 2)];
        assert_eq!(asks(2).lacking(&pools), None);
        // Neither fewer nor more: what data takes and what a write costs follow from the number.
        for (asked, why) in [
            (4, "pool 'ec' has k=2 m=2, not k=4 (data chunks)"),
            (3, "pool 'ec' has k=2 m=2, not k=3 (data chunks)"),
        ] {
            assert_eq!(asks(asked).lacking(&pools).unwrap(), why);
        }
        assert_eq!(asks(2).lacking(&[mirrored(3, 1), coded(2, 3, 2)]), None, "more are computed");
        let copies = asks(2).lacking(&[mirrored(3, 1)]).unwrap();
        assert_eq!(copies, "pool 'vms' has mirroring, 3 copies, not erasure-coding");
        let wherever = Redundancy { data_chunks: None, ..asks(2) };
        for data in [2, 4, 8] {
            assert_eq!(wherever.lacking(&[mirrored(3, 1), coded(data, 2, data)]), None, "{data}");
        }
    }

    #[test]
    fn data_chunks_have_limits_and_no_other_layout_has_them() {
        let asks = |layout, chunks| {
            let asked = Redundancy { layout, data_chunks: Some(chunks), ..Redundancy::default() };
            asked.check()
        };
        let coding = Some(Layout::ErasureCoding);
        for right in [DATA_CHUNKS_MIN, 4, DATA_CHUNKS_MAX] {
            assert_eq!(asks(coding, right), Ok(()), "{right}");
        }
        for wrong in [0, 1, DATA_CHUNKS_MAX + 1, u32::MAX] {
            let (field, what) = asks(coding, wrong).unwrap_err();
            assert_eq!(field, "data_chunks");
            assert!(what.contains("2 to 32"), "{what}");
        }
        for layout in [None, Some(Layout::Mirroring)] {
            let (field, what) = asks(layout, 4).unwrap_err();
            assert_eq!(field, "data_chunks");
            assert!(what.contains("erasure-coding"), "{what}");
        }
        let many = Redundancy { failures: FAILURES_MAX + 1, ..Redundancy::default() };
        assert_eq!(many.check().unwrap_err().0, "failures");
    }

    #[test]
    fn copies_are_kept_apart_on_what_a_policy_names_or_on_more() {
        let in_another = |domain: &str, facts: PoolFacts| {
            let failure_domain = domain.to_owned();
            PoolFacts { failure_domain, ..facts }
        };
        let asks = |domain| Redundancy { failure_domain: Some(domain), ..Redundancy::default() };
        let (copies, parts) = (mirrored(3, 2), coded(2, 1, 2));
        let racks = [in_another("rack", copies.clone()), in_another("rack", parts.clone())];
        assert_eq!(asks(FailureDomain::Rack).lacking(&racks), None);
        assert_eq!(asks(FailureDomain::Osd).lacking(&racks), None);
        assert_eq!(
            asks(FailureDomain::Row).lacking(&racks).unwrap(),
            "pool 'vms' keeps each copy in another rack, not in another row"
        );
        // Both pools count.
        let mixed = [in_another("rack", copies.clone()), in_another("host", parts)];
        assert_eq!(
            asks(FailureDomain::Rack).lacking(&mixed).unwrap(),
            "pool 'ec' keeps each chunk in another host, not in another rack"
        );
        let own = [in_another("shelf", copies)];
        assert!(asks(FailureDomain::Osd).lacking(&own).unwrap().contains("not known"));
        assert!(asks(FailureDomain::Osd).lacking(&[]).unwrap().contains("a directory"));
        // The number of failures is of these.
        let both = Redundancy { failures: 2, ..asks(FailureDomain::Rack) };
        assert!(both.lacking(&racks).unwrap().contains("failed racks"));
    }

    #[test]
    fn what_a_policy_asks_for_is_said() {
        let asks = |failures, layout, failure_domain| {
            Redundancy { failures, layout, failure_domain, data_chunks: None }.to_string()
        };
        assert_eq!(asks(0, None, None), "any number of failures");
        assert_eq!(asks(1, None, None), "1 failure");
        assert_eq!(asks(0, None, Some(FailureDomain::Rack)), "each copy in another rack");
        assert_eq!(
            asks(2, Some(Layout::Mirroring), Some(FailureDomain::Host)),
            "2 failures, mirroring, each copy in another host"
        );
        let layout = Some(Layout::ErasureCoding);
        let chunks =
            Redundancy { failures: 2, layout, data_chunks: Some(4), ..Redundancy::default() };
        assert_eq!(chunks.to_string(), "2 failures, erasure-coding, 4 data chunks");
        let said =
            serde_json::json!({ "failures": 2, "layout": "erasure_coding", "data_chunks": 4 });
        assert_eq!(serde_json::to_value(chunks).unwrap(), said);
        // Policies of earlier versions.
        let old: Redundancy = serde_json::from_str(r#"{"failures":1}"#).unwrap();
        assert_eq!(old, Redundancy { failures: 1, ..Redundancy::default() });
    }

    #[test]
    fn what_a_pool_risks_is_said() {
        assert_eq!(
            mirrored(3, 2).to_string(),
            "mirroring, 3 copies: outlives 2 failed hosts, guests go on with 1"
        );
        assert_eq!(
            mirrored(2, 1).to_string(),
            "mirroring, 2 copies: outlives 1 failed host, guests go on with 1, and what is written then has no second copy"
        );
        assert!(!mirrored(1, 1).to_string().contains("second copy"));
        assert_eq!(
            coded(4, 2, 4).to_string(),
            "erasure coding, k=4 m=2: outlives 2 failed hosts, guests go on with 2, and what is written then has no second copy"
        );
        assert_eq!(
            coded(4, 2, 5).to_string(),
            "erasure coding, k=4 m=2: outlives 2 failed hosts, guests go on with 1"
        );
        let compressed = PoolFacts { compression: Some("force".to_owned()), ..mirrored(3, 2) };
        assert!(compressed.to_string().contains("does nothing for ciphertext"));
    }

    #[test]
    fn who_asks_for_failures_is_told_what_guests_risk_that_go_on_with_them() {
        let risk = |failures| Redundancy { failures, ..Redundancy::default() }.risk();
        assert_eq!(risk(0), None);
        let one = risk(1).unwrap();
        assert!(one.contains("with 1 failure (min_size)"), "{one}");
        assert!(one.contains("lose writes") && one.contains("one failure more, or make"), "{one}");
        let most = risk(FAILURES_MAX).unwrap();
        assert!(most.contains("with 3 failures"), "{most}");
        assert!(!most.contains("one failure more"), "{most}");
    }

    #[test]
    fn names_are_read_back() {
        for layout in [Layout::Mirroring, Layout::ErasureCoding] {
            assert_eq!(layout.name().parse(), Ok(layout));
        }
        assert!("raid6".parse::<Layout>().is_err());
        let layout = Some(Layout::ErasureCoding);
        let asked = Redundancy { failures: 2, layout, ..Redundancy::default() };
        assert_eq!("2,erasure-coding".parse(), Ok(asked));
        assert_eq!(asked.to_option(), "2,erasure-coding");
        assert_eq!("1".parse(), Ok(Redundancy { failures: 1, ..Redundancy::default() }));
        for wrong in ["", "4", "-1", "one", "1,", "1,raid1", ",mirroring"] {
            assert!(wrong.parse::<Redundancy>().is_err(), "{wrong}");
        }
    }
}
