//! The values of axes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A value of a key of a matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a whole number that is not negative, or a name, is needed")]
pub enum AxisValue {
    /// A number.
    Number(u64),
    /// A name.
    Name(String),
}

impl From<u64> for AxisValue {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for AxisValue {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

impl fmt::Display for AxisValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}
