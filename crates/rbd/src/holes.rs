//! Where a file that is an image has data, and where holes are.

use std::io;
use std::ops::Range;

use crate::open_file::FileImage;

/// How much of an image is searched for data at a time, in bytes, at first and at most.
const SEARCH_FIRST: u64 = 1 << 30;
const SEARCH_MAX: u64 = 1 << 40;

/// Calls `look` for parts of a range, one after another, until it finds something.
fn search(
    within: Range<u64>,
    mut look: impl FnMut(Range<u64>) -> io::Result<Option<u64>>,
) -> io::Result<Option<u64>> {
    let (mut at, mut step) = (within.start, SEARCH_FIRST);
    while at < within.end {
        let part = at..within.end.min(at.saturating_add(step));
        if let Some(found) = look(part.clone())? {
            return Ok(Some(found));
        }
        (at, step) = (part.end, (step * 4).min(SEARCH_MAX));
    }
    Ok(None)
}

/// Where the first data begins; none where there is none.
///
/// # Errors
/// The cluster's.
pub fn first_data(image: &FileImage, within: Range<u64>) -> io::Result<Option<u64>> {
    search(within, |part| {
        let extents = image.image().extents(part.clone())?;
        Ok(extents.iter().find(|it| it.end > part.start).map(|it| it.start.max(part.start)))
    })
}

/// Where the first hole begins: the end of the file is one.
///
/// # Errors
/// The cluster's.
pub fn first_hole(image: &FileImage, within: Range<u64>) -> io::Result<Option<u64>> {
    let end = within.end;
    let hole = search(within, |part| {
        let extents = image.image().extents(part.clone())?;
        let mut at = part.start;
        for extent in extents {
            if extent.start > at {
                break;
            }
            at = at.max(extent.end);
        }
        Ok(Some(at).filter(|at| *at < part.end))
    })?;
    Ok(Some(hole.unwrap_or(end)))
}

/// The parts of a range that have no data.
fn holes(image: &FileImage, within: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let (mut holes, mut at) = (Vec::new(), within.start);
    for extent in image.image().extents(within.clone())? {
        if extent.start > at {
            holes.push(at..extent.start.min(within.end));
        }
        at = at.max(extent.end);
    }
    if at < within.end {
        holes.push(at..within.end);
    }
    Ok(holes)
}

/// Writes zeroes that take room where there is no data.
///
/// # Errors
/// The cluster's.
pub fn take_room(image: &FileImage, part: Range<u64>) -> io::Result<()> {
    for hole in holes(image, part)? {
        let (told, answer) = std::sync::mpsc::channel();
        image.image().write_zeroes(hole, true, move |done| drop(told.send(done)));
        answer.recv().map_err(io::Error::other)??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_goes_on_until_something_is_found() {
        let mut parts = Vec::new();
        let far = 3 * SEARCH_FIRST;
        let found = search(5..far + SEARCH_MAX, |part| {
            parts.push(part.clone());
            Ok(Some(far).filter(|at| part.contains(at)))
        });
        assert_eq!(found.unwrap(), Some(far));
        assert_eq!(parts[0], 5..5 + SEARCH_FIRST);
        assert_eq!(parts[1].start, parts[0].end, "{parts:?}");
        assert_eq!(search(0..SEARCH_FIRST * 6, |_| Ok(None)).unwrap(), None);
    }
}
