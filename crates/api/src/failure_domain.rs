//! What of a Ceph cluster fails as one.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What fails as one, of the types that a cluster's map (CRUSH) has from the beginning: smaller ones are before those that they are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FailureDomain {
    /// A disk.
    Osd,
    /// A host.
    Host,
    /// An enclosure of hosts.
    Chassis,
    /// A rack.
    Rack,
    /// A row of racks.
    Row,
    /// What is behind one power supply.
    Pdu,
    /// A pod.
    Pod,
    /// A room.
    Room,
    /// A data centre.
    Datacenter,
    /// A zone.
    Zone,
    /// A region.
    Region,
}

impl FailureDomain {
    /// All of them, the smallest first.
    pub const ALL: [Self; 11] = [
        Self::Osd,
        Self::Host,
        Self::Chassis,
        Self::Rack,
        Self::Row,
        Self::Pdu,
        Self::Pod,
        Self::Room,
        Self::Datacenter,
        Self::Zone,
        Self::Region,
    ];

    /// Its type in the cluster's map.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Osd => "osd",
            Self::Host => "host",
            Self::Chassis => "chassis",
            Self::Rack => "rack",
            Self::Row => "row",
            Self::Pdu => "pdu",
            Self::Pod => "pod",
            Self::Room => "room",
            Self::Datacenter => "datacenter",
            Self::Zone => "zone",
            Self::Region => "region",
        }
    }

    /// What a change of a policy asks for: one of them by its name, or none by an empty text.
    ///
    /// # Errors
    /// What is wrong.
    pub fn asked(text: &str) -> Result<Option<Self>, String> {
        if text.is_empty() { Ok(None) } else { text.parse().map(Some) }
    }
}

impl FromStr for FailureDomain {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|domain| domain.name() == text);
        found.ok_or_else(|| format!("it is one of {}", Self::ALL.map(Self::name).join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_ceph_and_larger_ones_are_greater() {
        for domain in FailureDomain::ALL {
            assert_eq!(domain.name().parse(), Ok(domain));
            assert_eq!(serde_json::to_value(domain).unwrap(), domain.name());
        }
        assert!(FailureDomain::ALL.is_sorted());
        assert!("shelf".parse::<FailureDomain>().unwrap_err().contains("datacenter"));
        assert_eq!(FailureDomain::asked(""), Ok(None));
        assert_eq!(FailureDomain::asked("rack"), Ok(Some(FailureDomain::Rack)));
        assert!(FailureDomain::asked("any").is_err());
    }
}
