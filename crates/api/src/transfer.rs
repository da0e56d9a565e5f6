//! The formats that images come in and leave in. A format is always named, never guessed from what an
//! image holds: a guest can write any header into its disk.

use serde::{Deserialize, Serialize};

/// What an image is that a disk is filled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ImageFormat {
    /// The disk's bytes, one after the other.
    Raw,
    /// QEMU's format, whole in itself: no backing file, no external data file, no encryption.
    Qcow2,
}

/// What a disk is exported as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExportFormat {
    /// The disk's bytes in the clear, in a sparse file.
    Raw,
    /// QEMU's format, in the clear.
    Qcow2,
    /// LUKS2 that opens with a passphrase, as cryptsetup makes it; nothing of vmseal is in it.
    Luks2,
    /// The image of an encrypted disk as it lies in the datastore, header and all: it opens with the VM's
    /// key alone, and is copied without it.
    Sealed,
}

impl ExportFormat {
    /// Whether the file is readable without a key.
    #[must_use]
    pub fn is_plain(self) -> bool {
        matches!(self, Self::Raw | Self::Qcow2)
    }

    /// Whether it is encrypted again, under a passphrase.
    #[must_use]
    pub fn has_passphrase(self) -> bool {
        self == Self::Luks2
    }

    /// Its name in the API and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Luks2 => "luks2",
            Self::Sealed => "sealed",
        }
    }
}

impl ImageFormat {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Raw, Self::Qcow2];

    /// Its name in the API and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// How far work on bytes is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Progress {
    /// Bytes dealt with.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

impl Progress {
    /// The same as a percentage; none if there are no bytes.
    #[must_use]
    pub fn percent(self) -> Option<u8> {
        let percent = u128::from(self.done) * 100 / u128::from(self.total).max(1);
        (self.total > 0).then(|| u8::try_from(percent.min(100)).unwrap_or(100))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_is_shown_only_of_something_and_never_above_100() {
        let percent = |done, total| Progress { done, total }.percent();
        assert_eq!(percent(0, 0), None);
        assert_eq!(percent(1, 4), Some(25));
        assert_eq!(percent(9, 4), Some(100));
        assert_eq!(percent(u64::MAX, u64::MAX), Some(100));
    }
}
