//! Whether migrations are encrypted, as users want it: hosts keep it in descriptors.

use serde::{Deserialize, Serialize};

/// Whether what a VM is sent with to another host is encrypted. Whatever it says, that of a VM with a key always is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum MigrationEncryption {
    /// Never.
    Disabled,
    /// Where both hosts can.
    #[default]
    Opportunistic,
    /// Always: it goes only to hosts that can.
    Required,
}

impl MigrationEncryption {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Disabled, Self::Opportunistic, Self::Required];

    /// Whether it is that of a VM of which nothing is said.
    #[must_use]
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Opportunistic => "opportunistic",
            Self::Required => "required",
        }
    }
}
