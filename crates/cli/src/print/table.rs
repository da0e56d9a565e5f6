//! Tables and CSV, whole or line after line.

use comfy_table::presets::NOTHING;
use comfy_table::{ColumnConstraint, Table, Width};

use super::column::{Column, Row};
use crate::arguments::{List, Output};

/// The spaces between two columns.
const GAP: u16 = 2;

/// Rows of chosen columns. What is printed later lines up with what was before.
pub struct Lines<T: Row> {
    output: Output,
    columns: Vec<&'static Column<T>>,
    /// Whether the names of the columns are still to be printed.
    header: bool,
    widths: Vec<usize>,
}

impl<T: Row> Lines<T> {
    /// As the options of `list` say.
    pub fn new(output: Output, how: &List<T>) -> Self {
        let named = |name: &String| T::COLUMNS.iter().find(|column| column.name == name);
        let columns = how.columns.iter().filter_map(named).collect();
        Self { output, columns, header: !how.no_header, widths: Vec::new() }
    }

    /// All columns.
    pub fn all(output: Output) -> Self {
        Self { output, columns: T::COLUMNS.iter().collect(), header: true, widths: Vec::new() }
    }

    /// The next lines; with the header if it is still to come.
    pub fn of(&mut self, items: &[T]) -> anyhow::Result<String> {
        let header = std::mem::take(&mut self.header);
        if self.output == Output::Csv {
            self.csv(header, items)
        } else {
            Ok(self.table(header, items))
        }
    }

    fn csv(&self, header: bool, items: &[T]) -> anyhow::Result<String> {
        let mut writer = csv::Writer::from_writer(Vec::new());
        if header {
            writer.write_record(self.columns.iter().map(|column| column.name))?;
        }
        for item in items {
            writer.write_record(self.columns.iter().map(|it| (it.cell)(item).for_programs()))?;
        }
        Ok(String::from_utf8(writer.into_inner()?)?)
    }

    fn table(&mut self, header: bool, items: &[T]) -> String {
        let mut table = Table::new();
        table.load_style(NOTHING);
        if header {
            table.add_row(self.columns.iter().map(|column| column.name.to_uppercase()));
        }
        for item in items {
            table.add_row(self.columns.iter().map(|column| (column.cell)(item).for_people()));
        }
        if header || !items.is_empty() {
            let before = self.widths.iter().map(|width| {
                ColumnConstraint::LowerBoundary(Width::Fixed(
                    u16::try_from(*width).unwrap_or(u16::MAX).saturating_add(GAP),
                ))
            });
            table.set_constraints(before);
            space(&mut table);
            self.widths =
                table.column_max_content_widths().iter().map(|it| usize::from(*it)).collect();
            ended(&table.trim_fmt())
        } else {
            String::new()
        }
    }
}

/// Two spaces between columns, none before the first.
fn space(table: &mut Table) {
    table.column_iter_mut().for_each(|column| {
        column.set_padding((0, GAP));
    });
}

fn ended(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{text}\n") }
}

/// Name and value lines.
pub fn upright<T: Row>(item: &T, details: &[(&str, String)]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    for column in T::COLUMNS {
        table.add_row([
            format!("{}:", column.name.to_uppercase()),
            (column.cell)(item).for_people(),
        ]);
    }
    for (head, value) in details {
        table.add_row([format!("{head}:"), value.clone()]);
    }
    space(&mut table);
    table.trim_fmt()
}
