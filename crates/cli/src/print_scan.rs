//! What a scan of a datastore found, as a table or as the API's own document.

use serde::Serialize;
use vmseal_api::datastore::{DatastoreScan, ImageContent, ScannedImage};

use crate::arguments::Output;
use crate::print::{self, Row, bytes, word};

/// Prints it. What is beside the images goes to standard error, so that a table stays one.
pub fn scan(output: Output, scan: &DatastoreScan) -> anyhow::Result<()> {
    if output != Output::Table {
        return print::json(scan);
    }
    let rows: Vec<_> = scan.images.iter().map(Line).collect();
    print::list(output, &rows)?;
    eprintln!(
        "other files: {}; nothing was changed, and what headers say is not authenticated",
        scan.others
    );
    if let Some(why) = &scan.incomplete {
        eprintln!("the list is not whole: {why}");
    }
    Ok(())
}

#[derive(Serialize)]
struct Line<'a>(&'a ScannedImage);

impl Row for Line<'_> {
    const HEADS: &'static [&'static str] =
        &["STANDING", "VM", "DISK", "SIZE", "ALLOCATED", "CLAIMED KEY", "PATH", "DETAIL"];
    fn cells(&self) -> Vec<String> {
        let (image, dash) = (self.0, || "-".to_owned());
        let found = image.found.as_ref();
        let key = found.and_then(|found| match &found.content {
            ImageContent::Vmseal { claims } => Some(
                claims.iter().map(|claim| printable(&claim.key_id)).collect::<Vec<_>>().join(","),
            ),
            _ => None,
        });
        vec![
            word(&image.standing),
            image.vm.clone().unwrap_or_else(dash),
            image.disk.clone().unwrap_or_else(dash),
            found.map_or_else(dash, |found| bytes(found.size)),
            found.map_or_else(dash, |found| bytes(found.allocated)),
            key.unwrap_or_else(dash),
            found.map_or_else(dash, |found| printable(&found.path)),
            printable(&image.detail),
        ]
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
