//! What pools of a Ceph cluster are to be like that are made for a datastore.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::compression::Compression;
use crate::failure_domain::FailureDomain;
use crate::redundancy::{Layout, Redundancy};

/// What pools can be made for. Agents that make pools know no others.
pub const CHOICES: [FailureDomain; 5] = [
    FailureDomain::Osd,
    FailureDomain::Host,
    FailureDomain::Rack,
    FailureDomain::Room,
    FailureDomain::Datacenter,
];

/// How these are told.
const CHOICE: &str = "'osd', 'host', 'rack', 'room' or 'datacenter'";

/// How names of pools end that vmseal makes and has not finished. No pool is made whose own name ends so.
pub const UNFINISHED_SUFFIX: &str = ".vmseal-unfinished";

/// How new pools keep their data, and how many failures they survive. Agents of earlier versions take it where neither a failure domain nor a
/// number of data chunks nor compression is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NewPools {
    /// How many failures lose nothing and stop no guest; from 1 to 3.
    #[serde(default)]
    pub failures: u8,
    /// How data is kept; none is mirroring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Layout>,
    /// How many data chunks erasure coding has (`k`), from 2 to 32: it is given with the layout `erasure_coding` alone. None is 2 for one
    /// failure, and 4 for more. Agents without the feature `data-chunks` do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_chunks: Option<u32>,
    /// What fails as one: each copy or chunk is in another `osd`, `host`, `rack`, `room` or `datacenter`. None is what the cluster's usual rule
    /// says, which is a host unless its administrator has chosen otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<FailureDomain>,
    /// How OSDs compress what they store of the pool of data. None is as the cluster has it for pools that do not say. Agents without the
    /// feature `pool-compression` do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
}

impl NewPools {
    /// What of it policies can ask for.
    #[must_use]
    pub fn redundancy(self) -> Redundancy {
        let Self { failures, layout, data_chunks, failure_domain, compression: _ } = self;
        Redundancy { failures, layout, data_chunks, failure_domain }
    }

    /// Checks what can be checked without a cluster.
    ///
    /// # Errors
    /// The field of a pool, and what is wrong with it.
    pub fn check(self) -> Result<(), (&'static str, String)> {
        if self.failure_domain.is_some_and(|domain| !CHOICES.contains(&domain)) {
            return Err(("create", format!("pools are made for {CHOICE}")));
        }
        self.redundancy().check().map_err(|(field, what)| match field {
            "data_chunks" => ("create.data_chunks", what),
            _ => ("create", what),
        })
    }

    /// As options have it: `NUMBER[,LAYOUT][,DOMAIN]`. The data chunks and the compression are options of their own.
    #[must_use]
    pub fn to_option(self) -> String {
        let domain = self.failure_domain.map_or_else(String::new, |it| format!(",{}", it.name()));
        format!("{}{domain}", self.redundancy().to_option())
    }
}

impl From<Redundancy> for NewPools {
    /// Pools that have what a policy asks for, and no more.
    fn from(asked: Redundancy) -> Self {
        let Redundancy { failures, layout, data_chunks, failure_domain } = asked;
        Self { failures, layout, data_chunks, failure_domain, compression: None }
    }
}

impl FromStr for NewPools {
    type Err = String;

    /// `NUMBER[,LAYOUT][,DOMAIN]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let domain = |text: &str| CHOICES.into_iter().find(|it| it.name() == text);
        let (asked, failure_domain) = match text.rsplit_once(',') {
            Some((asked, last)) if domain(last).is_some() => (asked, domain(last)),
            _ => (text, None),
        };
        let unknown = |what: String| format!("{what}; behind that it is {CHOICE}");
        let asked = asked.parse::<Redundancy>().map_err(unknown)?;
        Ok(Self { failure_domain, ..Self::from(asked) })
    }
}

impl fmt::Display for NewPools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.redundancy())?;
        match self.compression {
            None => Ok(()),
            Some(mode) => write!(f, "; compression {}", mode.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_new_pools_are_like_is_read_back() {
        for text in ["1", "1,mirroring", "2,erasure-coding,rack", "1,host", "3,datacenter"] {
            let read: NewPools = text.parse().unwrap();
            assert_eq!(read.to_option(), text);
        }
        let read: NewPools = "2,erasure-coding,rack".parse().unwrap();
        assert_eq!(read.failure_domain, Some(FailureDomain::Rack));
        assert_eq!(read.to_string(), "2 failures, erasure-coding, each copy in another rack");
        for wrong in ["", "rack", "1,rack,mirroring", "1,shelf", "4,host", "1,host,host"] {
            assert!(wrong.parse::<NewPools>().is_err(), "{wrong}");
        }
        // What agents that make pools do not know.
        let row = NewPools { failure_domain: Some(FailureDomain::Row), ..read };
        assert!(row.check().unwrap_err().1.contains("'rack'"));
        assert_eq!(read.check(), Ok(()));
        let chunks = NewPools { data_chunks: Some(8), ..read };
        assert_eq!(chunks.check(), Ok(()));
        assert_eq!(chunks.to_option(), read.to_option(), "it is an option of its own");
        let text = "2 failures, erasure-coding, 8 data chunks, each copy in another rack";
        assert_eq!(chunks.to_string(), text);
        let one = NewPools { data_chunks: Some(1), ..read };
        assert_eq!(one.check().unwrap_err().0, "create.data_chunks");
        let copies = NewPools { layout: None, ..chunks };
        assert_eq!(copies.check().unwrap_err().0, "create.data_chunks");
        let many = NewPools { failures: 9, ..read };
        assert_eq!(many.check().unwrap_err().0, "create");
        let compressed = NewPools { compression: Some(Compression::Force), ..chunks };
        assert_eq!(compressed.to_string(), format!("{text}; compression force"));
        assert_eq!(compressed.to_option(), read.to_option(), "it is an option of its own");
        assert_eq!(NewPools::from(compressed.redundancy()), chunks, "no policy asks for it");
        let said = serde_json::to_value(compressed).unwrap();
        assert_eq!(said["compression"], "force");
        assert_eq!(serde_json::from_value::<NewPools>(said).unwrap(), compressed);
        // As versions before have it.
        let old = serde_json::to_value(NewPools { failures: 1, ..NewPools::default() }).unwrap();
        assert_eq!(old, serde_json::json!({ "failures": 1 }));
    }
}
