//! The result of a datastore's scan, as a table or as the API's own document.

use vmseal_api::datastore::{DatastoreScan, FoundImage, ImageContent, ScannedImage};

use super::Lines;
use crate::arguments::Output;
use crate::rows::column::{Cell, Column, usual};
use crate::rows::{Row, word};
use crate::stream::say;

/// Prints a scan. All but the images goes to standard error, so that standard output is only the table.
pub fn show(output: Output, scan: &DatastoreScan) -> anyhow::Result<()> {
    if !matches!(output, Output::Table | Output::Csv) {
        return super::whole(output, scan);
    }
    if output == Output::Table && scan.images.is_empty() {
        say(format_args!("no {}", ScannedImage::PLURAL));
    } else {
        super::append(output, &mut Lines::all(output), &scan.images)?;
    }
    say(format_args!(
        "other files: {}; nothing was changed, and what headers say is not authenticated",
        scan.others
    ));
    for within in &scan.datastores {
        say(format_args!("another datastore, not looked into: {within}"));
    }
    if let Some(why) = &scan.incomplete {
        say(format_args!("the list is incomplete: {why}"));
    }
    Ok(())
}

fn found(image: &ScannedImage, cell: fn(&FoundImage) -> Cell) -> Cell {
    image.found.as_ref().map_or(Cell::Nothing, cell)
}

impl Row for ScannedImage {
    const PLURAL: &'static str = "images";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("status", |it| word(&it.status).into()),
        usual("vm", |it| it.vm.clone().into()),
        usual("disk", |it| it.disk.clone().into()),
        usual("size", |it| found(it, |image| Cell::Bytes(image.size))),
        usual("allocated", |it| found(it, |image| Cell::Bytes(image.allocated))),
        usual("claimed-key", |it| {
            found(it, |image| match &image.content {
                ImageContent::Vmseal { claims } => {
                    let keys: Vec<_> = claims.iter().map(|claim| claim.key_id.as_str()).collect();
                    keys.join(",").into()
                }
                _ => Cell::Nothing,
            })
        }),
        usual("path", |it| found(it, |image| image.path.clone().into())),
        usual("detail", |it| (&it.detail).into()),
    ];
    fn identity(&self) -> String {
        self.found.as_ref().map_or_else(|| self.detail.clone(), |image| image.path.clone())
    }
}
