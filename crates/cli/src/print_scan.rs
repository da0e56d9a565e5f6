//! What a scan of a datastore found, as a table or as the API's own document.

use vmseal_api::datastore::{DatastoreScan, FoundImage, ImageContent, ScannedImage};

use crate::arguments::Output;
use crate::print::column::{Cell, Column, usual};
use crate::print::{self, Lines, Row, word};

/// Prints it. What is beside the images goes to standard error, so that a table stays one.
pub fn scan(output: Output, scan: &DatastoreScan) -> anyhow::Result<()> {
    if !matches!(output, Output::Table | Output::Csv) {
        return print::whole(output, scan);
    }
    print::append(output, &mut Lines::all(output), &scan.images)?;
    eprintln!(
        "other files: {}; nothing was changed, and what headers say is not authenticated",
        scan.others
    );
    for within in &scan.datastores {
        eprintln!("another datastore, not looked into: {}", printable(within));
    }
    if let Some(why) = &scan.incomplete {
        eprintln!("the list is not whole: {why}");
    }
    Ok(())
}

fn found(image: &ScannedImage, cell: fn(&FoundImage) -> Cell) -> Cell {
    image.found.as_ref().map_or(Cell::Nothing, cell)
}

impl Row for ScannedImage {
    const COLUMNS: &'static [Column<Self>] = &[
        usual("standing", |it| word(&it.standing).into()),
        usual("vm", |it| it.vm.clone().into()),
        usual("disk", |it| it.disk.clone().into()),
        usual("size", |it| found(it, |image| Cell::Bytes(image.size))),
        usual("allocated", |it| found(it, |image| Cell::Bytes(image.allocated))),
        usual("claimed-key", |it| {
            found(it, |image| match &image.content {
                ImageContent::Vmseal { claims } => {
                    let keys: Vec<_> =
                        claims.iter().map(|claim| printable(&claim.key_id)).collect();
                    keys.join(",").into()
                }
                _ => Cell::Nothing,
            })
        }),
        usual("path", |it| found(it, |image| printable(&image.path).into())),
        usual("detail", |it| printable(&it.detail).into()),
    ];
    fn identity(&self) -> String {
        self.found.as_ref().map_or_else(|| self.detail.clone(), |image| image.path.clone())
    }
}

/// Names and headers are whatever somebody wrote on the datastore: nothing of it commands the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_a_datastore_commands_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n\u{9b}c"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c");
    }
}
