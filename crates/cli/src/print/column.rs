//! Columns: what a resource is in a table, and in CSV.

use std::cmp::Ordering;

use bytesize::ByteSize;
use jiff::Timestamp;
use serde::Serialize;

use super::printable;

/// What one place of a table holds. People and programs read it in different forms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    Text(String),
    Bytes(u64),
    Number(u64),
    Time(Timestamp),
    YesNo(bool),
    /// Not known, or there is none.
    Nothing,
}

impl Cell {
    /// `512.0 MiB`, whole seconds, a dash for nothing; nothing that commands the terminal.
    pub fn for_people(&self) -> String {
        match self {
            Self::Bytes(count) => ByteSize(*count).display().iec().to_string(),
            Self::Time(at) => format!("{at:.0}"),
            Self::Nothing => "-".to_owned(),
            other => printable(&other.for_programs()),
        }
    }

    /// Plain bytes, the API's times, an empty field for nothing.
    pub fn for_programs(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Bytes(number) | Self::Number(number) => number.to_string(),
            Self::Time(at) => at.to_string(),
            Self::YesNo(yes) => if *yes { "yes" } else { "no" }.to_owned(),
            Self::Nothing => String::new(),
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
