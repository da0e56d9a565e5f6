//! The contents that a disk may have when changes of it have failed.
//!
//! ```text
//!  one content ── a change fails ──> old | new ── another fails ──> twice as many
//!       ^                                     │
//!       └── a read has found it, or a change of all of it is done
//! ```
//! An atom is the unit that a change does whole or not at all. If part of it is known, the rest is, too.

use std::ops::Range;

pub struct Possible {
    /// The length of an atom, in bytes.
    atom: usize,
    /// The contents that each atom may have.
    atoms: Vec<Vec<Vec<u8>>>,
}

impl Possible {
    pub fn new(content: &[u8], atom: usize) -> Self {
        Self { atom, atoms: content.chunks(atom).map(|chunk| vec![chunk.to_vec()]).collect() }
    }

    /// These bytes were written.
    pub fn put(&mut self, start: usize, bytes: &[u8]) {
        self.each(start, bytes, |contents, within, bytes| {
            contents.iter_mut().for_each(|content| content[within.clone()].copy_from_slice(bytes));
            contents.sort_unstable();
            contents.dedup();
        });
    }

    /// These bytes may have been written, in each atom or not.
    pub fn may_be_put(&mut self, start: usize, bytes: &[u8]) {
        self.each(start, bytes, |contents, within, bytes| {
            for mut content in contents.clone() {
                content[within.clone()].copy_from_slice(bytes);
                if !contents.contains(&content) {
                    contents.push(content);
                }
            }
        });
    }

    /// A read has returned these bytes: from now on there are no others.
    pub fn found(&mut self, start: usize, bytes: &[u8]) {
        self.each(start, bytes, |contents, within, bytes| {
            let count = contents.len();
            contents.retain(|content| content[within.clone()] == *bytes);
            assert!(
                !contents.is_empty(),
                "a read at {start} finds in the bytes {within:?} of an atom none of {count} contents"
            );
        });
    }

    /// All of it, when nothing is uncertain any more.
    pub fn settled(&self) -> Vec<u8> {
        assert!(self.atoms.iter().all(|contents| contents.len() == 1), "not all of it was read");
        self.atoms.iter().flat_map(|contents| &contents[0]).copied().collect()
    }

    /// Every atom that the bytes touch, where in it, and which of them.
    fn each(
        &mut self,
        start: usize,
        bytes: &[u8],
        mut change: impl FnMut(&mut Vec<Vec<u8>>, Range<usize>, &[u8]),
    ) {
        let end = start + bytes.len();
        for index in start / self.atom..end.div_ceil(self.atom) {
            let at = index * self.atom;
            let (from, to) = (start.max(at), end.min(at + self.atom));
            change(&mut self.atoms[index], from - at..to - at, &bytes[from - start..to - start]);
        }
    }
}
