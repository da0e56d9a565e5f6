//! Columns: the fields of a resource in a table, and in CSV.

use std::cmp::Ordering;

use bytesize::ByteSize;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::stream::printable;

/// The longest lag that is shown to a tenth of a second, in milliseconds.
const MINUTE: u64 = 60_000;

/// The value of one cell of a table. It has one form for people and one for programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    Text(String),
    Bytes(u64),
    Number(u64),
    Time(Timestamp),
    YesNo(bool),
    /// How far a copy is behind, in milliseconds; none if it was never complete.
    Lag(Option<u64>),
    /// How long something takes, in seconds.
    Seconds(u64),
    /// Unknown, or there is none.
    Nothing,
}

impl Cell {
    /// `512.0 MiB`, whole seconds (tenths for a lag up to a minute), a dash for nothing; without control characters.
    pub fn for_people(&self) -> String {
        match self {
            Self::Bytes(count) => ByteSize(*count).display().iec().to_string(),
            Self::Time(at) => format!("{at:.0}"),
            Self::Lag(None) => "never complete yet".to_owned(),
            // Rounded up, so that it is never too short.
            Self::Lag(Some(lag)) if *lag <= MINUTE => {
                let tenths = lag.div_ceil(100);
                format!("{}.{} s", tenths / 10, tenths % 10)
            }
            Self::Lag(Some(lag)) => {
                let seconds = i64::try_from(lag.div_ceil(1000)).unwrap_or(i64::MAX);
                format!("{:#}", SignedDuration::from_secs(seconds))
            }
            Self::Seconds(seconds) => {
                let seconds = i64::try_from(*seconds).unwrap_or(i64::MAX);
                format!("{:#}", SignedDuration::from_secs(seconds))
            }
            Self::Nothing => "-".to_owned(),
            other => printable(&other.for_programs()),
        }
    }

    /// Plain bytes, a lag in seconds, the API's times, an empty field for nothing.
    pub fn for_programs(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Bytes(number) | Self::Number(number) | Self::Seconds(number) => {
                number.to_string()
            }
            Self::Time(at) => at.to_string(),
            Self::YesNo(yes) => if *yes { "yes" } else { "no" }.to_owned(),
            Self::Lag(Some(lag)) => format!("{}.{:03}", lag / 1000, lag % 1000),
            Self::Lag(None) | Self::Nothing => String::new(),
        }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<&String> for Cell {
    fn from(text: &String) -> Self {
        Self::Text(text.clone())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Nothing, Into::into)
    }
}

/// One column. Names are part of the interface: scripts use them.
pub struct Column<T> {
    pub name: &'static str,
    /// Whether a list has it by default.
    pub usual: bool,
    pub cell: fn(&T) -> Cell,
}

/// A column that a list has by default.
pub const fn usual<T>(name: &'static str, cell: fn(&T) -> Cell) -> Column<T> {
    Column { name, usual: true, cell }
}

/// A column that is shown only on request.
pub const fn more<T>(name: &'static str, cell: fn(&T) -> Cell) -> Column<T> {
    Column { name, usual: false, cell }
}

/// A resource as a row of a table.
pub trait Row: Serialize + Clone + PartialEq + Sized + Send + Sync + 'static {
    /// What an empty list is of, such as `VMs`.
    const PLURAL: &'static str;

    /// All columns, in the order of `show`.
    const COLUMNS: &'static [Column<Self>];

    /// Identifies the resource when a list is read again.
    fn identity(&self) -> String;

    /// The order of a list; by default that of the server, oldest first.
    fn order(&self, _other: &Self) -> Ordering {
        Ordering::Equal
    }

    /// The names of all columns.
    fn names() -> Vec<&'static str> {
        Self::COLUMNS.iter().map(|column| column.name).collect()
    }

    /// The names of the default columns of a list.
    fn usual_names() -> Vec<&'static str> {
        Self::COLUMNS.iter().filter(|column| column.usual).map(|column| column.name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lag_has_a_form_for_people_and_one_for_programs() {
        for (lag, people, programs) in [
            (None, "never complete yet", ""),
            (Some(0), "0.0 s", "0.000"),
            (Some(3_120), "3.2 s", "3.120"),
            (Some(60_000), "60.0 s", "60.000"),
            (Some(60_001), "1m 1s", "60.001"),
            (Some(7_384_000), "2h 3m 4s", "7384.000"),
        ] {
            let cell = Cell::Lag(lag);
            assert_eq!((&*cell.for_people(), &*cell.for_programs()), (people, programs));
        }
        assert!(!Cell::Lag(Some(u64::MAX)).for_people().is_empty());
    }
}
