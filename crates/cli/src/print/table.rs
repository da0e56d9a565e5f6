//! Tables and CSV, whole or line after line.

use comfy_table::presets::NOTHING;
use comfy_table::{ColumnConstraint, Table, Width};

use crate::arguments::{Columns, Output};
use crate::rows::column::{Cell, Column};
use crate::rows::{Change, Row, word};
use crate::stream::printable;

/// The spaces between two columns.
const GAP: u16 = 2;

/// Rows of chosen columns. Later lines align with earlier ones.
pub struct Lines<T: Row> {
    output: Output,
    columns: Vec<&'static Column<T>>,
    /// Whether the header is not printed yet.
    header: bool,
    widths: Vec<u16>,
}

impl<T: Row> Lines<T> {
    /// The columns that the options of `list` choose.
    pub fn new(output: Output, how: &Columns<T>) -> Self {
        let named = |name: &String| T::COLUMNS.iter().find(|column| column.name == name);
        let columns = how.columns.iter().filter_map(named).collect();
        Self { output, columns, header: !how.no_header, widths: Vec::new() }
    }

    /// All columns.
    pub fn all(output: Output) -> Self {
        Self { output, columns: T::COLUMNS.iter().collect(), header: true, widths: Vec::new() }
    }

    /// The default columns of a list.
    pub fn usual(output: Output) -> Self {
        Self::new(output, &Columns::usual())
    }

    /// The next lines; with the header if it is not printed yet.
    pub fn of(&mut self, items: &[T]) -> anyhow::Result<String> {
        let rows = items.iter().map(|item| (None, item)).collect();
        self.lines(None, rows)
    }

    /// The next lines of a list that is watched: the kind of change comes first.
    pub fn of_changes(&mut self, news: &[(Change, T)]) -> anyhow::Result<String> {
        let rows = news.iter().map(|(change, item)| (Some(word(change)), item)).collect();
        self.lines(Some("change"), rows)
    }

    fn lines(
        &mut self,
        lead: Option<&str>,
        rows: Vec<(Option<String>, &T)>,
    ) -> anyhow::Result<String> {
        let heads: Option<Vec<String>> = std::mem::take(&mut self.header).then(|| {
            let names = self.columns.iter().map(|column| column.name);
            lead.into_iter().chain(names).map(str::to_owned).collect()
        });
        let form = match self.output {
            Output::Csv => Cell::for_programs,
            _ => Cell::for_people,
        };
        let cells = |(lead, item): (Option<String>, &T)| -> Vec<String> {
            lead.into_iter().chain(self.columns.iter().map(|it| form(&(it.cell)(item)))).collect()
        };
        let records: Vec<_> = rows.into_iter().map(cells).collect();
        match self.output {
            Output::Csv => csv_of(heads, records),
            _ => Ok(self.table(heads, records)),
        }
    }

    fn table(&mut self, heads: Option<Vec<String>>, records: Vec<Vec<String>>) -> String {
        if heads.is_none() && records.is_empty() {
            return String::new();
        }
        let mut table = Table::new();
        table.load_style(NOTHING);
        if let Some(heads) = heads {
            table.add_row(heads.iter().map(|head| head.to_uppercase()));
        }
        for record in records {
            table.add_row(record);
        }
        let before = self
            .widths
            .iter()
            .map(|width| ColumnConstraint::LowerBoundary(Width::Fixed(width.saturating_add(GAP))));
        table.set_constraints(before);
        space(&mut table);
        let widths = table.column_max_content_widths();
        self.widths = widths
            .iter()
            .enumerate()
            .map(|(index, width)| (*width).max(self.widths.get(index).copied().unwrap_or(0)))
            .collect();
        format!("{}\n", table.trim_fmt())
    }
}

fn csv_of(heads: Option<Vec<String>>, records: Vec<Vec<String>>) -> anyhow::Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for record in heads.into_iter().chain(records) {
        writer.write_record(record)?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

/// Two spaces between columns, none before the first.
fn space(table: &mut Table) {
    table.column_iter_mut().for_each(|column| {
        column.set_padding((0, GAP));
    });
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
        table.add_row([format!("{head}:"), printable(value)]);
    }
    space(&mut table);
    table.trim_fmt()
}
