//! Versions of the protocol (KMIP 1.4 specification, section 6.1).

use std::fmt;

use crate::ttlv::{Encoder, Tag};

/// A version, as messages and DiscoverVersions carry it. Later ones compare greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProtocolVersion {
    /// Before the dot.
    pub major: i32,
    /// After the dot.
    pub minor: i32,
}

impl ProtocolVersion {
    /// KMIP 1.0 (2010): has no DiscoverVersions.
    pub const V1_0: Self = Self { major: 1, minor: 0 };
    /// KMIP 1.1 (2013): what vCenter speaks.
    pub const V1_1: Self = Self { major: 1, minor: 1 };
    /// KMIP 1.2 (2015).
    pub const V1_2: Self = Self { major: 1, minor: 2 };
    /// KMIP 1.3 (2016).
    pub const V1_3: Self = Self { major: 1, minor: 3 };
    /// KMIP 1.4 (2017).
    pub const V1_4: Self = Self { major: 1, minor: 4 };

    /// The versions that this crate speaks, latest first: the order in which it offers them. KMIP 2.x
    /// encodes attributes differently and is not supported.
    pub const SPOKEN: [Self; 5] = [Self::V1_4, Self::V1_3, Self::V1_2, Self::V1_1, Self::V1_0];

    /// Writes it as a `Protocol Version`.
    pub fn encode(self, encoder: &mut Encoder) {
        encoder.structure(Tag::PROTOCOL_VERSION, |structure| {
            structure.integer(Tag::PROTOCOL_VERSION_MAJOR, self.major);
            structure.integer(Tag::PROTOCOL_VERSION_MINOR, self.minor);
        });
    }
}

impl fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
