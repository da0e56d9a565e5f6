//! How OSDs of a Ceph cluster compress what they store of a pool.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How OSDs compress what they store of a pool (`compression_mode`): nothing; what clients mark as compressible, and vmseal marks nothing;
/// all but what clients mark as incompressible; all. It saves no room for encrypted disks. By which algorithm is the cluster's to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Nothing, also where OSDs compress unless a pool says otherwise.
    None,
    /// What clients mark as compressible. vmseal marks nothing.
    Passive,
    /// All but what clients mark as incompressible.
    Aggressive,
    /// All.
    Force,
}

impl Compression {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Passive, Self::Aggressive, Self::Force];

    /// Its name, as Ceph and options have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Passive => "passive",
            Self::Aggressive => "aggressive",
            Self::Force => "force",
        }
    }

    /// What who chooses it for a pool is told of it; nothing where nothing is compressed.
    #[must_use]
    pub fn caution(self) -> Option<String> {
        let marks = match self {
            Self::None => return None,
            Self::Passive => {
                ". In this mode OSDs compress only what clients mark as compressible, and vmseal marks nothing"
            }
            Self::Aggressive | Self::Force => "",
        };
        Some(format!(
            "compression '{}' saves no room for encrypted disks, as ciphertext does not become smaller: it is for VMs in the clear{marks}",
            self.name()
        ))
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| format!("it is one of {}", Self::ALL.map(Self::name).join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_ceph() {
        for mode in Compression::ALL {
            assert_eq!(mode.name().parse(), Ok(mode));
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.name());
        }
        let wrong = "lz4".parse::<Compression>().unwrap_err();
        assert!(wrong.contains("none, passive, aggressive, force"), "{wrong}");
    }

    #[test]
    fn who_chooses_compression_is_told_that_it_saves_nothing_above_ciphertext() {
        assert_eq!(Compression::None.caution(), None);
        for mode in [Compression::Passive, Compression::Aggressive, Compression::Force] {
            let told = mode.caution().unwrap();
            assert!(told.contains(mode.name()) && told.contains("ciphertext"), "{told}");
            assert_eq!(told.contains("marks nothing"), mode == Compression::Passive, "{told}");
        }
    }
}
