//! A qcow2 image and the files below it, used by one thread: imago tells where the guest's bytes are,
//! and the bytes themselves go straight between memory and file. Bytes that stay where they are are read by who asks.
//!
//! Clusters are never given up: a discard punches a hole in the file where a cluster is, and the cluster
//! stays the guest's. So a cluster that may still be needed after a crash is never reused. The
//! exceptions (a compressed cluster that is written, a refcount table that moves) are made durable at once.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use imago::{FormatAccess, Mapping};

use super::known::{self, KnownClusters};
use super::storage::{AlignedBuffer, ImageFile};
use super::together::{Mover, Transfer};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::request::{IoError, Operation};
use crate::storage::extent::{Extent, Own, OwnExtent};
use crate::storage::target::Place;

/// How much is held back before it goes to the file, in bytes.
const HELD_BACK_MAX: usize = 2 << 20;

/// How much is fetched, and how much is put off, at a time, in bytes.
const TOGETHER_MAX: u64 = 4 << 20;

/// How much room the file takes ahead of what is written, in bytes: as much as is counted ahead. It is given back when the file
/// is settled or closed.
const ROOM_AHEAD: u64 = 16 << 20;

/// What imago's caches of all layers may hold, in bytes. It has no limit in bytes of its own.
const CACHES_MAX: u64 = 6 << 20;

/// The disk that an image holds.
#[derive(Debug)]
pub(super) struct Qcow2Image {
    format: FormatAccess<ImageFile>,
    /// The image itself.
    file: ImageFile,
    /// All files, the image itself first.
    layers: Vec<ImageFile>,
    /// The offset of the guest's first byte.
    offset: u64,
    cluster: u64,
    /// Whether clusters can be marked as zeroes (version 3).
    marks_zeroes: bool,
    /// The end of the part of the file that ever held data.
    fresh_from: u64,
    /// Whether tables have changed since the last commit.
    changed: bool,
    /// Whether data must be durable before anything points to it.
    durable: bool,
    /// Whether clusters were given up and may not be used again yet: the file had no room to record that.
    release_due: bool,
    /// Whether clusters may be reserved in the file: after a change, until the file is left to readers.
    reserves: bool,
    /// What is below clusters that this batch writes in part, by where they begin.
    fetched: BTreeMap<u64, AlignedBuffer>,
    /// Data of new clusters that is written before the next commit.
    put_off: Vec<Transfer>,
    mover: Mover,
    /// The part of the file whose room was taken ahead.
    room: Range<u64>,
    /// Whether data that was put off could not be written: nothing may point to it.
    broken: bool,
    /// Clusters that requests found or made since the last commit: where each is, or that it is no longer where it was.
    met: Vec<(u64, Option<(usize, u64)>)>,
    known: Arc<KnownClusters>,
}

/// What is at a place of the disk, without a look into a raw file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Zeroes or data.
    pub(super) extent: Extent,
    /// Where the data begins in the raw file, if it is in that.
    pub(super) in_raw: Option<u64>,
}

/// What is at the target of a write.
enum Old {
    /// A cluster of the image itself, at this offset.
    Own(u64),
    /// Zeroes, without anything allocated.
    Zeroes,
    /// Anything else. `frees`: a cluster is given up for a new one.
    Other { frees: bool },
}

impl Qcow2Image {
    /// The disk that `format` holds from `offset` on; `layers` are its files.
    pub(super) fn new(
        format: FormatAccess<ImageFile>,
        layers: Vec<ImageFile>,
        offset: u64,
        cluster: u64,
        marks_zeroes: bool,
    ) -> Option<Self> {
        let file = layers.first()?.clone();
        let fresh_from = file.length().next_multiple_of(cluster);
        let mover = Mover::new(&layers);
        Some(Self {
            format,
            file,
            layers,
            offset,
            cluster,
            marks_zeroes,
            fresh_from,
            changed: false,
            durable: false,
            release_due: false,
            reserves: false,
            fetched: BTreeMap::new(),
            put_off: Vec::new(),
            mover,
            room: 0..0,
            broken: false,
            met: Vec::new(),
            known: Arc::new(KnownClusters::new(cluster)),
        })
    }

    /// Does a request. A change must be answered only after [`Qcow2Image::commit`], and its memory be there until then. What of a read is left to
    /// who asks is added to `places`.
    pub(super) fn perform(
        &mut self,
        operation: Operation,
        (offset, length): (u64, u64),
        data: &Segments,
        places: &mut Vec<Place>,
    ) -> Result<(), IoError> {
        let at = self.offset + offset;
        if self.broken {
            return Err(IoError::Lost);
        }
        if operation.changes() {
            self.file.intact()?;
            if self.file.is_lost() {
                return Err(IoError::Lost);
            }
            self.settle()?;
            self.reserves = true;
        }
        match operation {
            Operation::Read => {
                self.finish()?;
                self.read(at, data, Some(places))?;
            }
            Operation::Write => self.write(at, length, Some(data))?,
            Operation::Discard => self.empty(at, length, true, true)?,
            Operation::WriteZeroes { unmap } => self.empty(at, length, unmap, false)?,
            Operation::Flush => self.flush()?,
        }
        if self.file.held_back() > HELD_BACK_MAX {
            self.commit()?;
        }
        self.trim()
    }

    /// Reads what is below clusters that these writes, offsets and lengths, cover in part: all at a time. What cannot be
    /// read is read again by the write, which says why.
    pub(super) fn fetch(&mut self, writes: impl Iterator<Item = (u64, u64)>) {
        self.fetched.clear();
        let (mut transfers, mut starts) = (Vec::new(), Vec::new());
        let (cluster, size) = (self.cluster, self.format.size());
        for (offset, length) in writes.filter(|&(_, length)| length > 0) {
            let (at, end) = (self.offset + offset, self.offset + offset + length);
            for start in [at / cluster * cluster, (end - 1) / cluster * cluster] {
                let stop = (start + cluster).min(size);
                let whole = at <= start && end >= stop;
                let much = (transfers.len() as u64 + 1) * cluster > TOGETHER_MAX;
                if whole || much || starts.contains(&start) {
                    continue;
                }
                if let Some((file, place)) = self.below(start, stop - start) {
                    let mut buffer = AlignedBuffer::new((stop - start) as usize);
                    let data = buffer.segments();
                    let buffer = Some(buffer);
                    transfers.push(Transfer { write: false, file, at: place, data, buffer });
                    starts.push(start);
                }
            }
        }
        let outcomes = self.mover.run(&transfers);
        for ((start, transfer), outcome) in starts.into_iter().zip(transfers).zip(outcomes) {
            if let (Ok(()), Some(buffer)) = (outcome, transfer.buffer) {
                self.fetched.insert(start, buffer);
            }
        }
    }

    /// The file below that has all of this part, and where.
    fn below(&self, at: u64, length: u64) -> Option<(usize, u64)> {
        let (mapping, run) = self.mapping(at, length).ok()?;
        let Mapping::Raw { storage, offset, writable, .. } = mapping else { return None };
        let file = self.stays(storage, writable, (offset, length))?;
        (file > 0 && run == length).then_some((file, offset))
    }

    /// Writes what was put off.
    fn finish(&mut self) -> Result<(), IoError> {
        if self.put_off.is_empty() {
            return if self.broken { Err(IoError::Lost) } else { Ok(()) };
        }
        let outcomes = self.mover.run(&self.put_off);
        self.put_off.clear();
        let outcome: Result<(), IoError> = outcomes.into_iter().collect();
        if let Err(error) = outcome {
            // Imago has the clusters in its tables, which are not written any more.
            self.broken = true;
            tracing::error!(%error, "new clusters of the image cannot be written; the disk fails until it is opened again, and has lost nothing that was flushed");
        }
        outcome
    }

    /// The content at `offset` of the disk, `length` bytes at most: zeroes that need no reading, or data. Of what is in a raw file below,
    /// also where: it may be a hole there.
    pub(super) fn extent(&mut self, offset: u64, length: u64) -> Result<Found, IoError> {
        let (mapping, run) = self.mapping(self.offset + offset, length)?;
        let data = !matches!(mapping, Mapping::Zero { .. } | Mapping::Eof { .. });
        let in_raw = match &mapping {
            Mapping::Raw { storage, offset, .. } if self.is_raw_below(storage) => Some(*offset),
            _ => None,
        };
        self.trim()?;
        Ok(Found { extent: Extent { data, end: offset + run }, in_raw })
    }

    /// Whether this is a raw file below all others: those who look for its holes look in that one.
    fn is_raw_below(&self, file: &ImageFile) -> bool {
        file.is_raw() && self.layers.last().is_some_and(|lowest| lowest.is(file))
    }

    /// What the image itself has at `offset` of the disk, without the files below it, `length` bytes at most.
    pub(super) fn own(&mut self, offset: u64, length: u64) -> Result<OwnExtent, IoError> {
        let (mapping, run) = self.mapping(self.offset + offset, length)?;
        let content = match &mapping {
            Mapping::Raw { storage, .. } if storage.is(&self.file) => Own::Data,
            Mapping::Special { layer, .. } if std::ptr::eq(*layer, &raw const self.format) => {
                Own::Data
            }
            Mapping::Zero { explicit: true, .. } => Own::Zeroes,
            _ => Own::Nothing,
        };
        self.trim()?;
        Ok(OwnExtent { content, end: offset + run })
    }

    /// Writes changed tables to the file, so that answered writes survive the end of this
    /// process.
    pub(super) fn commit(&mut self) -> Result<(), IoError> {
        let committed = self.commit_tables();
        for (at, place) in self.met.drain(..) {
            match place {
                Some((file, place)) if committed.is_ok() => self.known.put(at, file, place),
                Some(_) => {}
                None => self.known.forget(at),
            }
        }
        committed
    }

    fn commit_tables(&mut self) -> Result<(), IoError> {
        self.finish()?;
        if !self.changed {
            return Ok(());
        }
        self.format.flush().map_err(table_error)?;
        self.file.commit(self.durable)?;
        (self.changed, self.durable) = (false, false);
        Ok(())
    }

    /// The clusters that are known to be at their places.
    pub(super) fn known(&self) -> Arc<KnownClusters> {
        Arc::clone(&self.known)
    }

    /// Where the guest's first byte is in the image's disk.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Notes the clusters whose content is in this file: `length` bytes from `at` on are at `place`. Of the image itself,
    /// all of each cluster is; of others, those count that are there as a whole.
    fn meet(&mut self, at: u64, file: usize, place: u64, length: u64) {
        let cluster = self.cluster;
        let inside = at % cluster;
        let (first, end) = if file == 0 {
            (at - inside, at + length)
        } else {
            let end = at + length;
            let last = if end == self.format.size() { end } else { end / cluster * cluster };
            (at.next_multiple_of(cluster), last)
        };
        let mut begin = first;
        while begin < end {
            if let Some(place) = (place + begin).checked_sub(at) {
                self.met.push((begin, Some((file, place))));
            }
            begin += cluster;
        }
    }

    /// Notes that clusters from `at` on are no longer where they were; queues do not look there any more.
    fn part(&mut self, at: u64, length: u64) {
        let mut begin = at / self.cluster * self.cluster;
        while begin < at + length {
            self.known.forget(begin);
            // Behind what this batch has noted before.
            self.met.push((begin, None));
            begin += self.cluster;
        }
    }

    /// Makes everything durable.
    fn flush(&mut self) -> Result<(), IoError> {
        self.commit()?;
        self.file.sync_file()
    }

    /// Leaves the image as if no clusters had been reserved. A file that was left to readers is not touched any more: it may
    /// be written by who took it over.
    pub(super) fn close(&mut self) -> Result<(), IoError> {
        self.flush()?;
        if !self.reserves {
            return Ok(());
        }
        self.file.release()?;
        self.file.sync_file()?;
        self.room = 0..0;
        self.file.shorten()
    }

    /// Leaves the file to readers as if the image were closed; it can be used on. A power cut may bring back what was
    /// reserved, which costs its next reader a look at more tables.
    pub(super) fn settle_for_readers(&mut self) -> Result<(), IoError> {
        self.flush()?;
        self.file.release()?;
        self.room = 0..0;
        self.file.shorten()?;
        self.fresh_from = self.fresh_from.min(self.file.length().next_multiple_of(self.cluster));
        self.reserves = false;
        Ok(())
    }

    /// Empties imago's caches when they may have become too large.
    fn trim(&mut self) -> Result<(), IoError> {
        if self.layers.iter().map(ImageFile::touched).sum::<u64>() <= CACHES_MAX {
            return Ok(());
        }
        self.commit()?;
        // SAFETY: imago asks that what it would read is sound: all that it holds has just been written.
        unsafe { self.format.invalidate_cache() }.map_err(table_error)?;
        self.layers.iter().for_each(ImageFile::forget_touched);
        Ok(())
    }

    /// The image itself.
    #[cfg(test)]
    pub(super) fn file(&self) -> &ImageFile {
        &self.file
    }

    /// All files, the image itself first.
    pub(super) fn files(&self) -> &[ImageFile] {
        &self.layers
    }

    fn mapping(&self, at: u64, most: u64) -> Result<(Mapping<'_, ImageFile>, u64), IoError> {
        let (mapping, length) = self.format.get_mapping(at, most).map_err(table_error)?;
        if length == 0 {
            return Err(IoError::Damaged);
        }
        Ok((mapping, length.min(most)))
    }

    /// What is at `at`, `most` bytes at most; from the beginning of the cluster on where that is one mapping: then all of
    /// it gets known. Also how far before `at` it begins.
    fn mapping_of_cluster(
        &self,
        at: u64,
        most: u64,
    ) -> Result<(Mapping<'_, ImageFile>, u64, u64), IoError> {
        let inside = at % self.cluster;
        let end = (at + most).next_multiple_of(self.cluster).min(self.format.size());
        let (mapping, run) = self.mapping(at - inside, end.max(at + most) - (at - inside))?;
        if run > inside {
            return Ok((mapping, inside, run - inside));
        }
        let (mapping, run) = self.mapping(at, most)?;
        Ok((mapping, 0, run))
    }

    /// Reads what is at `at`. What queues can read themselves is left to them where there is a list of `places`.
    fn read(
        &mut self,
        mut at: u64,
        data: &Segments,
        mut places: Option<&mut Vec<Place>>,
    ) -> Result<(), IoError> {
        let (mut cursor, begin, end) = (Cursor::default(), at, at + data.bytes() as u64);
        let mut part = Segments::default();
        while at < end {
            let (mapping, before, run) = self.mapping_of_cluster(at, end - at)?;
            let mut length = run.min(end - at);
            if matches!(mapping, Mapping::Special { .. }) {
                // One cluster at a time, as it has to be unpacked.
                length = length.min(self.cluster - at % self.cluster);
            }
            part.clear();
            part.push_from(data, &mut cursor, length as usize);
            let mut found = None;
            match mapping {
                Mapping::Raw { storage, offset, writable, .. } => {
                    let place = offset + before;
                    found =
                        self.stays(storage, writable, (place, length)).map(|file| (file, offset));
                    match (found, &mut places) {
                        (Some((file, _)), Some(places)) => {
                            let (from, length) = ((at - begin) as usize, length as usize);
                            known::push(places, Place { from, length, file, at: place });
                        }
                        _ => storage.read_data(&part, place)?,
                    }
                }
                Mapping::Zero { .. } | Mapping::Eof { .. } => {
                    part.as_slice().iter().for_each(Segment::clear);
                }
                Mapping::Special { .. } => {
                    let mut bytes = vec![0; length as usize];
                    self.format.read(&mut bytes, at).map_err(table_error)?;
                    Cursor::default().scatter(&part, &bytes);
                }
                _ => return Err(IoError::Damaged),
            }
            if let Some((file, place)) = found {
                self.meet(at - before, file, place, before + run);
            }
            at += length;
        }
        Ok(())
    }

    /// The number of a file whose data stays at its place, of this much that it has, and which queues read.
    fn stays(&self, file: &ImageFile, writable: bool, place: (u64, u64)) -> Option<usize> {
        let number = self.layers.iter().position(|layer| layer.is(file))?;
        // A cluster that others share is given up when it is written.
        let stays = number > 0 || writable;
        let whole = (place.0 | place.1).is_multiple_of(file.alignment().1.into());
        let read = whole && file.takes_rings() == self.file.takes_rings();
        (stays && read && file.holds(place.0, place.1)).then_some(number)
    }

    fn old(&self, mapping: &Mapping<'_, ImageFile>) -> Old {
        match mapping {
            Mapping::Raw { storage, offset, writable, .. } if storage.is(&self.file) => {
                if *writable { Old::Own(*offset) } else { Old::Other { frees: true } }
            }
            Mapping::Zero { .. } => Old::Zeroes,
            Mapping::Special { layer, .. } => {
                Old::Other { frees: std::ptr::eq(*layer, &raw const self.format) }
            }
            _ => Old::Other { frees: false },
        }
    }

    /// Writes `data`, or zeroes.
    fn write(&mut self, at: u64, length: u64, data: Option<&Segments>) -> Result<(), IoError> {
        let (mut cursor, mut done) = (Cursor::default(), 0);
        let mut part = Segments::default();
        while done < length {
            let (at, left) = (at + done, length - done);
            let (mapping, run) = self.mapping(at, left)?;
            let old = self.old(&mapping);
            if let (Old::Own(place), Some(data)) = (&old, data) {
                part.clear();
                part.push_from(data, &mut cursor, run as usize);
                let place = *place;
                self.write_own(&part, place)?;
                self.meet(at, 0, place, run);
                done += run;
            } else if let Old::Own(place) = old {
                self.finish()?;
                self.file.zero_data(place, run, true)?;
                done += run;
            } else {
                let moved = self.allocate(at, run, &old, data, cursor)?;
                if let Some(data) = data {
                    cursor.skip(data, moved as usize);
                }
                done += moved;
            }
        }
        Ok(())
    }

    /// Writes to a cluster that the image has, or will have when what was put off is written.
    fn write_own(&mut self, data: &Segments, place: u64) -> Result<(), IoError> {
        let length = data.bytes() as u64;
        let mut meets = self.put_off.iter().filter(|transfer| transfer.meets(place, length));
        match (meets.next(), meets.next()) {
            (Some(one), None) if one.patch(place, data) => return Ok(()),
            (None, _) => {}
            _ => self.finish()?,
        }
        self.file.write_data(data, place)
    }

    /// Writes to new clusters at `at`; returns how many bytes, at most `run`.
    fn allocate(
        &mut self,
        at: u64,
        run: u64,
        old: &Old,
        data: Option<&Segments>,
        mut cursor: Cursor,
    ) -> Result<u64, IoError> {
        let size = self.format.size();
        let start = at / self.cluster * self.cluster;
        let stop = (start + self.cluster).min(size);
        let whole = at == start && at + run >= stop && data.is_some();
        let mut content = Segments::default();
        let mut buffer = None;
        let (covered, moved) = if let (true, Some(data)) = (whole, data) {
            let end =
                if at + run == size { size } else { (at + run) / self.cluster * self.cluster };
            content.push_from(data, &mut cursor, (end - at) as usize);
            (end - at, end - at)
        } else {
            let fetched = self.fetched.remove(&start);
            let found = fetched.is_some();
            let mut whole = fetched.unwrap_or_else(|| AlignedBuffer::new((stop - start) as usize));
            content = whole.segments();
            buffer = Some(whole);
            if !found {
                self.read(start, &content, None)?;
            }
            let moved = run.min(stop - at);
            let mut target = Cursor::default();
            target.skip(&content, (at - start) as usize);
            let mut left = moved as usize;
            while let Some(piece) = target.peek(&content, left).filter(|_| left > 0) {
                let from = data.and_then(|data| cursor.next(data, piece.len()));
                let piece = piece.part(0, from.map_or(piece.len(), |from| from.len()));
                match from {
                    Some(from) => piece.copy_from_segment(&from),
                    None => piece.clear(),
                }
                target.skip(&content, piece.len());
                left -= piece.len();
            }
            (stop - start, moved)
        };
        let placed = self.place(start, covered, old, (content, buffer));
        placed.map(|placed| if placed < covered { placed } else { moved })
    }

    /// Puts `content` for the whole clusters from `start` on into new ones; returns how many bytes of it.
    fn place(
        &mut self,
        start: u64,
        covered: u64,
        old: &Old,
        (content, buffer): (Segments, Option<AlignedBuffer>),
    ) -> Result<u64, IoError> {
        let freed = matches!(old, Old::Other { frees: true });
        let was_empty = matches!(old, Old::Zeroes);
        let mut written = Segments::default();
        let mapping =
            self.format.prepare_data_mapping(start, covered, true).map_err(table_error)?;
        let (place, length) = (mapping.offset(), mapping.length());
        written.push_from(&content, &mut Cursor::default(), length as usize);
        let fresh = place >= self.fresh_from;
        let puts_off = fresh
            && !freed
            && has_room(&mut self.room, &self.file, &self.mover, place..place + length);
        if !puts_off && let Err(error) = self.file.write_data(&written, place) {
            drop(mapping);
            // The place is free again, but may hold data now.
            self.fresh_from = self.file.length().next_multiple_of(self.cluster);
            self.changed = true;
            return Err(error);
        }
        self.format.commit_data_mapping(mapping).map_err(table_error)?;
        self.part(start, length);
        self.meet(start, 0, place, length);
        (self.changed, self.durable) = (true, self.durable || !fresh || !was_empty);
        if puts_off {
            let (write, file, at, data) = (true, 0, place, written);
            self.put_off.push(Transfer { write, file, at, data, buffer });
            if self.put_off.iter().map(|put_off| put_off.data.bytes() as u64).sum::<u64>()
                > TOGETHER_MAX
            {
                self.finish()?;
            }
        }
        self.given_up(freed)?;
        Ok(length)
    }

    /// Clusters that were given up must not be used again before that is durable.
    fn given_up(&mut self, freed: bool) -> Result<(), IoError> {
        if freed || self.file.moved() {
            (self.changed, self.release_due) = (true, true);
        }
        self.settle()
    }

    /// Makes durable that clusters were given up, if that is still pending.
    fn settle(&mut self) -> Result<(), IoError> {
        if self.release_due {
            self.flush()?;
            // In the file they still count, which would be one too many for their next user.
            self.file.release()?;
            self.fresh_from = self.file.length().next_multiple_of(self.cluster);
            self.release_due = false;
        }
        Ok(())
    }

    /// Makes a range read as zeroes; a discard does so only for the part where that is free.
    fn empty(&mut self, at: u64, length: u64, unmap: bool, discard: bool) -> Result<(), IoError> {
        let mut done = 0;
        while done < length {
            let (at, left) = (at + done, length - done);
            let (mapping, run) = self.mapping(at, left)?;
            let old = self.old(&mapping);
            self.finish()?;
            match old {
                Old::Zeroes => {}
                Old::Own(place) if discard => self.file.discard_data(place, run)?,
                Old::Own(place) => self.file.zero_data(place, run, unmap)?,
                Old::Other { frees } => self.cover(at, run, frees, discard)?,
            }
            done += run;
        }
        Ok(())
    }

    /// Makes zeroes of a range in other layers, or in compressed clusters: marks whole clusters.
    fn cover(&mut self, at: u64, run: u64, frees: bool, discard: bool) -> Result<(), IoError> {
        let end = at + run;
        let first = at.next_multiple_of(self.cluster).min(end);
        let last = if end == self.format.size() { end } else { end / self.cluster * self.cluster };
        let (first, last) =
            if self.marks_zeroes && first < last { (first, last) } else { (end, end) };
        // What was fetched no longer shows.
        self.fetched.clear();
        if first < last {
            self.part(first, last - first);
            self.format.write_zeroes(first, last - first).map_err(table_error)?;
            self.changed = true;
            self.given_up(frees)?;
        }
        if !discard {
            self.write(at, first - at, None)?;
            self.write(last, end - last, None)?;
        }
        Ok(())
    }
}

/// Whether this part of an image's file has its room already, or can have it with more ahead.
fn has_room(room: &mut Range<u64>, file: &ImageFile, mover: &Mover, part: Range<u64>) -> bool {
    #[cfg(test)]
    if file.has_little_room() {
        return false;
    }
    if room.start <= part.start && part.end <= room.end {
        return true;
    }
    // One after the other they are written as well at once; tests put them off all the same.
    if !mover.has_ring() && !cfg!(test) {
        return false;
    }
    let end = part.end.max(part.start + if cfg!(test) { 1 << 16 } else { ROOM_AHEAD });
    if !file.take_room_ahead(part.start, end - part.start) {
        return false;
    }
    *room = part.start..end;
    true
}

/// The result of an imago error. Its own words go to the log: they are about the image, not the request.
fn table_error(error: io::Error) -> IoError {
    let known = match error.raw_os_error() {
        Some(errno) => Some(IoError::from_errno(errno)),
        None if error.kind() == io::ErrorKind::StorageFull => Some(IoError::NoSpace),
        None => error.get_ref().and_then(|inner| inner.downcast_ref::<IoError>()).copied(),
    };
    known.unwrap_or_else(|| {
        tracing::error!(%error, "the image is damaged");
        IoError::Damaged
    })
}
