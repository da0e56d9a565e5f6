//! The metadata contexts of an export: their names, how clients ask for them, and their answers about the
//! disk. Without any I/O on the connection.

use std::io;
use std::sync::Arc;

use vmseal_api::filter::BITMAPS_MAX;

use crate::disk::allocation::Allocation;
use crate::front_ends::nbd::chunk;
use crate::nbd::{CHUNK_LENGTH, chunk as kind, extent};
use crate::stack::dirty::{Bitmaps, Reader};
use crate::stack::pool::BLOCK;

/// The context for holes and zeroes.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// The prefix of the names of dirty bitmaps, as in QEMU.
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// The most contexts of a connection.
pub const CONTEXTS_MAX: usize = 1 + BITMAPS_MAX;

/// The most queries of an option: enough to ask for every context.
pub const QUERIES_MAX: usize = 64;

/// The longest answer to one block status request, in bytes, all contexts together. A client asks again
/// for the part after the last extent.
pub const STATUS_MAX: usize = 16 * 1024;

/// The headers before a context's extents: the chunk's header, and the context's number.
const BEGINNING: usize = CHUNK_LENGTH + 4;

/// The length of an extent.
const EXTENT: usize = 8;

// An answer of one extent a context fits the smallest memory that a request can have.
const _: () = assert!(CONTEXTS_MAX * (BEGINNING + EXTENT) <= BLOCK);

/// A context that a client has chosen. Its number is its place among those chosen.
#[derive(Debug)]
pub enum Context {
    /// [`BASE_ALLOCATION`].
    Allocation,
    /// A bitmap, which cannot be removed while this is held.
    Dirty(Reader),
}

/// Why a query of contexts is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The data is not a name and queries.
    Malformed,
    /// More than [`QUERIES_MAX`].
    TooMany,
}

/// Parses the data of the options that ask for contexts: the export's name, and the queries.
///
/// # Errors
/// [`Refusal`].
pub fn queries(data: &[u8]) -> Result<(&[u8], Vec<&[u8]>), Refusal> {
    let mut rest = data;
    let export = string(&mut rest).ok_or(Refusal::Malformed)?;
    let (count, behind) = rest.split_first_chunk::<4>().ok_or(Refusal::Malformed)?;
    let count = u32::from_be_bytes(*count) as usize;
    if count > QUERIES_MAX {
        return Err(Refusal::TooMany);
    }
    rest = behind;
    let queries = (0..count).map(|_| string(&mut rest)).collect::<Option<_>>();
    match queries {
        Some(queries) if rest.is_empty() => Ok((export, queries)),
        _ => Err(Refusal::Malformed),
    }
}

/// Takes a length and as many bytes from the beginning of `data`.
fn string<'a>(data: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let (string, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    *data = rest;
    Some(string)
}

/// The names of the contexts that a query matches, for a listing: a name, or the beginning of one
/// up to a colon; no query means all.
#[must_use]
pub fn listed(bitmaps: Option<&Arc<Bitmaps>>, queries: &[&[u8]]) -> Vec<String> {
    let dirty = bitmaps.map(|bitmaps| bitmaps.all_names()).unwrap_or_default();
    let dirty = dirty.iter().map(|name| format!("{DIRTY_BITMAP}{name}"));
    let all = std::iter::once(BASE_ALLOCATION.to_owned()).chain(dirty);
    let meant = |name: &String| {
        let is = |query: &&[u8]| {
            let begins = query.ends_with(b":") && name.as_bytes().starts_with(query);
            begins || name.as_bytes() == *query
        };
        queries.is_empty() || queries.iter().any(is)
    };
    all.filter(meant).collect()
}

/// The contexts that the queries name, with their names, each once; unknown names are left out.
#[must_use]
pub fn chosen(bitmaps: Option<&Arc<Bitmaps>>, queries: &[&[u8]]) -> Vec<(String, Context)> {
    let mut chosen: Vec<(String, Context)> = Vec::new();
    for query in queries {
        let Ok(name) = str::from_utf8(query) else { continue };
        if chosen.iter().any(|(seen, _)| seen == name) {
            continue;
        }
        let context = match name.strip_prefix(DIRTY_BITMAP) {
            Some(bitmap) => bitmaps.and_then(|all| all.read(bitmap)).map(Context::Dirty),
            None => (name == BASE_ALLOCATION).then_some(Context::Allocation),
        };
        chosen.extend(context.map(|context| (name.to_owned(), context)));
    }
    chosen
}

impl Context {
    /// The flags at `at`, and where the extent with those flags ends, at `end` at the latest.
    fn extent(&self, allocation: &Allocation, at: u64, end: u64) -> io::Result<(u32, u64)> {
        match self {
            Self::Allocation => {
                let found = allocation.extent(at, end)?;
                Ok((if found.data { 0 } else { extent::HOLE | extent::ZERO }, found.end))
            }
            Self::Dirty(bitmap) => {
                let (dirty, until) = bitmap.extent(at, end);
                Ok((if dirty { extent::DIRTY } else { 0 }, until))
            }
        }
    }

    /// Adds the context's extents to `reply`, at most `most`, from `at` on.
    fn tell(
        &self,
        allocation: &Allocation,
        (at, end): (u64, u64),
        most: usize,
        reply: &mut Vec<u8>,
    ) -> io::Result<()> {
        let mut at = at;
        let mut under_way: Option<(u32, u64)> = None;
        let mut told = 0;
        let mut push = |(flags, length): (u32, u64)| {
            // A request's length fits, so an extent's does.
            reply.extend((length as u32).to_be_bytes());
            reply.extend(flags.to_be_bytes());
        };
        while at < end {
            let (flags, until) = self.extent(allocation, at, end)?;
            let length = until - at;
            match &mut under_way {
                Some((same, so_far)) if *same == flags => *so_far += length,
                other => {
                    if let Some(whole) = other.take() {
                        push(whole);
                        told += 1;
                        if told == most {
                            return Ok(());
                        }
                    }
                    *other = Some((flags, length));
                }
            }
            at = until;
        }
        under_way.into_iter().for_each(push);
        Ok(())
    }
}

/// Makes the answer to a block status request for the part from `at` to `end`: one chunk per context. It has
/// `room` bytes at most, and one extent per context where only `one` is wanted.
///
/// # Errors
/// As lseek.
pub fn status(
    contexts: &[Context],
    allocation: &Allocation,
    cookie: u64,
    (at, end): (u64, u64),
    (room, one): (usize, bool),
    reply: &mut Vec<u8>,
) -> io::Result<()> {
    reply.clear();
    let room = room.min(STATUS_MAX) / contexts.len().max(1);
    let most = if one { 1 } else { (room.saturating_sub(BEGINNING) / EXTENT).max(1) };
    for (number, context) in contexts.iter().enumerate() {
        let start = reply.len();
        reply.extend([0; CHUNK_LENGTH]);
        reply.extend((number as u32).to_be_bytes());
        context.tell(allocation, (at, end), most, reply)?;
        let flags = if number + 1 == contexts.len() { kind::DONE } else { 0 };
        let length = (reply.len() - start - CHUNK_LENGTH) as u32;
        let header = chunk::header(flags, kind::BLOCK_STATUS, cookie, length);
        reply[start..start + CHUNK_LENGTH].copy_from_slice(&header);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmseal_api::filter::BitmapChange;

    use super::*;

    fn asked(export: &[u8], queries: &[&[u8]]) -> Vec<u8> {
        let string = |string: &[u8]| [&(string.len() as u32).to_be_bytes(), string].concat();
        let count = (queries.len() as u32).to_be_bytes();
        let queries: Vec<u8> = queries.iter().flat_map(|query| string(query)).collect();
        [&string(export)[..], &count, &queries].concat()
    }

    #[test]
    fn queries_are_taken_apart_whole_or_not_at_all() {
        let data = asked(b"disk", &[b"base:", b""]);
        assert_eq!(queries(&data), Ok((&b"disk"[..], vec![&b"base:"[..], b""])));
        for bad in [&data[..data.len() - 1], &[&data[..], b"x"].concat(), b"", &[0xff; 12]] {
            assert_eq!(queries(bad), Err(Refusal::Malformed), "{bad:?}");
        }
        let many = asked(b"", &[&b"q"[..]; QUERIES_MAX + 1]);
        assert_eq!(queries(&many), Err(Refusal::TooMany));
    }

    #[test]
    fn names_are_listed_by_their_beginning_and_chosen_by_all_of_it() {
        let bitmaps = Arc::new(Bitmaps::new(1 << 20));
        bitmaps.change("b1", BitmapChange::Start).unwrap();
        let of = Some(&bitmaps);
        let (base, dirty) = ("base:allocation", "qemu:dirty-bitmap:b1");
        assert_eq!(listed(of, &[]), [base, dirty]);
        assert_eq!(listed(of, &[b"base:"]), [base]);
        assert_eq!(listed(of, &[b"qemu:"]), [dirty]);
        assert_eq!(listed(of, &[b"qemu:dirty-bitmap:", b"x"]), [dirty]);
        assert_eq!(listed(of, &[b"base:alloc"]), [""; 0]);
        assert_eq!(listed(None, &[]), [base]);
        let names = |queries: &[&[u8]]| -> Vec<String> {
            chosen(of, queries).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(
            names(&[b"qemu:dirty-bitmap:b1", base.as_bytes(), base.as_bytes()]),
            [dirty, base]
        );
        assert_eq!(names(&[b"base:", b"qemu:dirty-bitmap:no", b"qemu:", b"\xff", b""]), [""; 0]);
        let held = chosen(of, &[dirty.as_bytes()]);
        assert!(bitmaps.change("b1", BitmapChange::Remove).is_err(), "it is in use");
        drop(held);
        assert!(bitmaps.change("b1", BitmapChange::Remove).is_ok());
    }

    proptest! {
        #[test]
        fn extents_follow_each_other_and_fit(
            changes in prop::collection::vec(0u64..64, 0..30),
            first in 0u64..8192, room in 0usize..600, one: bool,
        ) {
            let size = 64 << 16;
            let bitmaps = Arc::new(Bitmaps::new(size));
            bitmaps.change("a", BitmapChange::Start).unwrap();
            changes.iter().for_each(|granule| bitmaps.changed(granule << 16, 512));
            let contexts: Vec<Context> =
                chosen(Some(&bitmaps), &[b"base:allocation", b"qemu:dirty-bitmap:a"])
                    .into_iter().map(|(_, context)| context).collect();
            let (from, mut reply) = (first * 512, Vec::new());
            status(&contexts, &Allocation::Unknown, 9, (from, size), (room, one), &mut reply).unwrap();
            prop_assert!(reply.len() <= room.max(2 * (BEGINNING + EXTENT)));
            let first = BEGINNING + EXTENT;
            prop_assert_eq!(&reply[BEGINNING..first], &[((size - from) as u32).to_be_bytes(), [0; 4]].concat()[..]);
            prop_assert_eq!(&reply[4..8], &[0, 0, 0, 5]);
            prop_assert_eq!(&reply[first + 4..first + 8], &[0, 1, 0, 5]);
            prop_assert_eq!(reply[first + BEGINNING - 1], 1, "the context's number");
            let (mut at, mut before) = (from, None);
            let (extents, rest) = reply[first + BEGINNING..].as_chunks::<EXTENT>();
            prop_assert!(rest.is_empty() && !extents.is_empty());
            prop_assert!(!one || extents.len() == 1);
            for extent in extents {
                let length = u32::from_be_bytes(extent[..4].try_into().unwrap());
                let dirty = extent[7] == 1;
                prop_assert!(before != Some(dirty), "two that are one");
                let end = at + u64::from(length);
                for granule in at >> 16..end.div_ceil(1 << 16) {
                    prop_assert_eq!(changes.contains(&granule), dirty);
                }
                (at, before) = (end, Some(dirty));
            }
            let room = (room / 2).saturating_sub(BEGINNING) / EXTENT;
            prop_assert!(at == size || one || extents.len() == room.max(1));
        }
    }
}
