//! Columns: what a resource is in a table, and in CSV.

use std::cmp::Ordering;

use bytesize::ByteSize;
use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::stream::printable;

/// The longest lag that people read to a tenth of a second, in milliseconds.
const MINUTE: u64 = 60_000;

/// What one place of a table holds. People and programs read it in different forms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    Text(String),
    Bytes(u64),
    Number(u64),
    Time(Timestamp),
    YesNo(bool),
    /// By how many milliseconds a copy is behind; none if it was never complete.
    Lag(Option<u64>),
    /// Not known, or there is none.
    Nothing,
}

impl Cell {
    /// `512.0 MiB`, whole seconds (of a lag, tenths up to a minute), a dash for nothing; nothing that commands the terminal.
    pub fn for_people(&self) -> String {
        match self {
            Self::Bytes(count) => ByteSize(*count).display().iec().to_string(),
            Self::Time(at) => format!("{at:.0}"),
            Self::Lag(None) => "never complete yet".to_owned(),
            // Said of what has passed at least, so it is rounded up.
            Self::Lag(Some(lag)) if *lag <= MINUTE => {
                let tenths = lag.div_ceil(100);
                format!("{}.{} s", tenths / 10, tenths % 10)
            }
            Self::Lag(Some(lag)) => {
                let seconds = i64::try_from(lag.div_ceil(1000)).unwrap_or(i64::MAX);
                format!("{:#}", SignedDuration::from_secs(seconds))
            }
            Self::Nothing => "-".to_owned(),
            other => printable(&other.for_programs()),
        }
    }

    /// Plain bytes, seconds of a lag, the API's times, an empty field for nothing.
    pub fn for_programs(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Bytes(number) | Self::Number(number) => number.to_string(),
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

/// One column. Names are part of the interface: scripts ask for them.
pub struct Column<T> {
    pub name: &'static str,
    /// Whether a list has it where nobody chooses.
    pub usual: bool,
    pub cell: fn(&T) -> Cell,
}

/// A column that a list has where nobody chooses.
pub const fn usual<T>(name: &'static str, cell: fn(&T) -> Cell) -> Column<T> {
    Column { name, usual: true, cell }
}

/// A column that has to be asked for.
pub const fn more<T>(name: &'static str, cell: fn(&T) -> Cell) -> Column<T> {
    Column { name, usual: false, cell }
}

/// A resource as a row of a table.
pub trait Row: Serialize + Clone + PartialEq + Sized + Send + Sync + 'static {
    /// All there are, in the order in which `show` has them.
    const COLUMNS: &'static [Column<Self>];

    /// What it is known again by when a list is read once more.
    fn identity(&self) -> String;

    /// The order of a list; by default that of the server, oldest first.
    fn order(&self, _other: &Self) -> Ordering {
        Ordering::Equal
    }

    /// The names of all columns.
    fn names() -> Vec<&'static str> {
        Self::COLUMNS.iter().map(|column| column.name).collect()
    }

    /// The names of the columns that a list has where nobody chooses.
    fn usual_names() -> Vec<&'static str> {
        Self::COLUMNS.iter().filter(|column| column.usual).map(|column| column.name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lag_is_said_as_people_and_as_programs_read_it() {
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
