//! What pools of a Ceph cluster are to be like that are made for a datastore.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::redundancy::{Layout, Redundancy};

/// How new pools keep their data, and how many failures they survive. Agents of earlier versions take it where no failure domain is named.
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
    /// What fails as one: each copy or part is in another one. None is what the cluster's usual rule says, which is a host unless its
    /// administrator has chosen otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<FailureDomain>,
}

/// What fails as one, of the types that a cluster's map has from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FailureDomain {
    /// A disk.
    Osd,
    /// A host.
    Host,
    /// A rack.
    Rack,
    /// A room.
    Room,
    /// A data centre.
    Datacenter,
}

impl FailureDomain {
    const ALL: [Self; 5] = [Self::Osd, Self::Host, Self::Rack, Self::Room, Self::Datacenter];

    /// Its type in the cluster's map (CRUSH).
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Osd => "osd",
            Self::Host => "host",
            Self::Rack => "rack",
            Self::Room => "room",
            Self::Datacenter => "datacenter",
        }
    }
}

impl NewPools {
    /// What of it policies can ask for.
    #[must_use]
    pub fn redundancy(self) -> Redundancy {
        Redundancy { failures: self.failures, layout: self.layout }
    }

    /// Checks what can be checked without a cluster.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(self) -> Result<(), String> {
        self.redundancy().check()
    }

    /// As options have it: `NUMBER[,LAYOUT][,DOMAIN]`.
    #[must_use]
    pub fn to_option(self) -> String {
        let domain = self.failure_domain.map_or_else(String::new, |it| format!(",{}", it.name()));
        format!("{}{domain}", self.redundancy().to_option())
    }
}

impl FromStr for NewPools {
    type Err = String;

    /// `NUMBER[,LAYOUT][,DOMAIN]`.
    fn from_str(text: &str) -> Result<Self, String> {
        let domain = |text: &str| FailureDomain::ALL.into_iter().find(|it| it.name() == text);
        let (asked, failure_domain) = match text.rsplit_once(',') {
            Some((asked, last)) if domain(last).is_some() => (asked, domain(last)),
            _ => (text, None),
        };
        let unknown = |what: String| {
            format!("{what}; behind that it is 'osd', 'host', 'rack', 'room' or 'datacenter'")
        };
        let Redundancy { failures, layout } = asked.parse::<Redundancy>().map_err(unknown)?;
        Ok(Self { failures, layout, failure_domain })
    }
}

impl fmt::Display for NewPools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.redundancy())?;
        let domain = self.failure_domain.map(FailureDomain::name);
        domain.map_or(Ok(()), |domain| write!(f, ", each copy in another {domain}"))
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
        // As versions before have it.
        let old = serde_json::to_value(NewPools { failures: 1, ..NewPools::default() }).unwrap();
        assert_eq!(old, serde_json::json!({ "failures": 1 }));
    }
}
