//! Where a file that is an image has data, and where holes are.
//!
//! Who copies a file asks where its next data ends, again and again. So no question looks through all of the rest: where one has looked far
//! enough, a hole begins that has no length, or data that is all zeroes. Who asks on from there is told what is there.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::image::Image;
use crate::open_file::FileImage;

/// How much of an image is searched for data at a time, in bytes, at first and at most.
const SEARCH_FIRST: u64 = 1 << 30;
const SEARCH_MAX: u64 = 1 << 40;

/// How much of a striped image one question looks through, in bytes: each of its objects is asked, some ten at a time.
const SEARCH_STRIPED: u64 = 32 << 20;

/// How much room is taken with one request, in bytes: the zeroes are data to the cluster, and each object is a request there.
const ROOM_STEP: u64 = 64 << 20;

/// What one question looks through of a range: all of it, or its beginning.
fn looked_through(image: &Image, within: &Range<u64>, most: u64) -> Range<u64> {
    let most = if image.is_striped() { most.min(SEARCH_STRIPED) } else { most };
    within.start..within.end.min(within.start.saturating_add(most))
}

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

/// Where the first data begins, or may begin; none where there is none.
///
/// # Errors
/// The cluster's.
pub fn first_data(image: &FileImage, within: Range<u64>) -> io::Result<Option<u64>> {
    let part = looked_through(image.image(), &within, u64::MAX);
    let may_be_more = Some(part.end).filter(|end| *end < within.end);
    let found = search(part, |part| {
        let extents = image.image().extents(part.clone())?;
        Ok(extents.iter().find(|it| it.end > part.start).map(|it| it.start.max(part.start)))
    })?;
    Ok(found.or(may_be_more))
}

/// Where the first hole begins, or may begin: the end of the file is one.
///
/// # Errors
/// The cluster's.
pub fn first_hole(image: &FileImage, within: Range<u64>) -> io::Result<u64> {
    let part = looked_through(image.image(), &within, SEARCH_FIRST);
    Ok(first_gap(&image.image().extents(part.clone())?, &part))
}

/// Where the first gap between extents begins; the end of the part where there is none in it.
fn first_gap(extents: &[Range<u64>], part: &Range<u64>) -> u64 {
    let mut at = part.start;
    for extent in extents {
        if extent.start > at {
            break;
        }
        at = at.max(extent.end);
    }
    at.min(part.end)
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
fn take_room(image: &FileImage, part: Range<u64>) -> io::Result<()> {
    for step in holes(image, part)?.into_iter().flat_map(steps) {
        let (told, answer) = std::sync::mpsc::channel();
        image.image().write_zeroes(step, true, move |done| drop(told.send(done)));
        answer.recv().map_err(io::Error::other)??;
    }
    Ok(())
}

/// A hole, part by part.
fn steps(hole: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = std::iter::successors(Some(hole.start), |at| at.checked_add(ROOM_STEP));
    let starts = starts.take_while(move |at| *at < hole.end);
    starts.map(move |at| at..hole.end.min(at.saturating_add(ROOM_STEP)))
}

/// The same in a thread of its own: it takes as long as all of it is written, and those who take requests of the file system are few. Where
/// the system has no thread, this one does it.
pub fn take_room_beside<D>(image: Arc<FileImage>, part: Range<u64>, done: D)
where
    D: FnOnce(io::Result<()>) + Send + 'static,
{
    let waiting = Arc::new(Mutex::new(Some((image, done))));
    let there = Arc::clone(&waiting);
    let of_thread = part.clone();
    let run = move || run_once(&there, of_thread);
    if let Err(error) = std::thread::Builder::new().name("take-room".into()).spawn(run) {
        tracing::warn!(%error, "a thread of the file system takes room for a file");
        run_once(&waiting, part);
    }
}

/// Takes the room, for who comes first.
fn run_once<D: FnOnce(io::Result<()>)>(
    waiting: &Mutex<Option<(Arc<FileImage>, D)>>,
    part: Range<u64>,
) {
    let taken = waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some((image, done)) = taken else { return };
    let room = take_room(&image, part);
    // Before the answer: the kernel does not release the handle before that, and the image is closed by who releases the last one.
    drop(image);
    done(room);
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

    #[test]
    fn a_gap_is_where_no_extent_is_or_where_the_part_ends() {
        let extents = [8..16, 16..24, 32..40];
        for (part, expected) in [(8..64, 24), (12..64, 24), (8..20, 20), (0..64, 0), (24..64, 24)] {
            let seen: Vec<_> = extents.iter().filter(|it| it.end > part.start).cloned().collect();
            assert_eq!(first_gap(&seen, &part), expected, "{part:?}");
        }
        assert_eq!(first_gap(&[], &(5..9)), 5);
    }

    #[test]
    fn room_is_taken_in_steps_that_are_all_of_a_hole() {
        let all = |hole| steps(hole).collect::<Vec<_>>();
        assert!(all(5..5).is_empty());
        assert_eq!(all(5..9).as_slice(), std::slice::from_ref(&(5..9)));
        let end = 2 * ROOM_STEP + 7;
        assert_eq!(
            all(1..end),
            [1..ROOM_STEP + 1, ROOM_STEP + 1..2 * ROOM_STEP + 1, 2 * ROOM_STEP + 1..end]
        );
        let last = u64::MAX - 1..u64::MAX;
        assert_eq!(all(last.clone()).as_slice(), std::slice::from_ref(&last));
    }
}
