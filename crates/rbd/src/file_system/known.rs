//! The files and directories that the kernel knows.
//!
//! ```text
//!  answered look-up (of a name, or of what was made or linked) ──> counted, before the kernel has the answer
//!  forget, which says how many look-ups ──> so many less; at zero what is known here is removed
//! ```
//! The kernel does not send `forget` behind the requests that are under way, and it also forgets single look-ups of files that it goes on
//! using. So only the count says when it knows a file no more.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::inode::Inode;

/// A user and a group.
pub(super) type Owner = (u32, u32);

/// What is known of them. Nobody asks the cluster with this locked.
#[derive(Default)]
pub(super) struct KnownInodes(Mutex<HashMap<Inode, Known>>);

#[derive(Default)]
struct Known {
    look_ups: u64,
    /// Of a file: a directory that it is in, and its name there.
    name: Option<(Inode, String)>,
    /// Of a directory that was given to another user: whose it is.
    given: Option<Owner>,
}

impl KnownInodes {
    fn all(&self) -> MutexGuard<'_, HashMap<Inode, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a look-up that is about to be answered.
    pub(super) fn looked_up(&self, inode: Inode) {
        self.all().entry(inode).or_default().look_ups += 1;
    }

    /// Forgets so many look-ups; whether the kernel does not know it any more.
    pub(super) fn forget(&self, inode: Inode, look_ups: u64) -> bool {
        let mut all = self.all();
        let Some(known) = all.get_mut(&inode) else { return true };
        known.look_ups = known.look_ups.saturating_sub(look_ups);
        let is_gone = known.look_ups == 0;
        if is_gone {
            all.remove(&inode);
        }
        is_gone
    }

    /// A file has this name, if the kernel knows it.
    pub(super) fn is_named(&self, inode: Inode, directory: Inode, name: &str) {
        if !inode.is_directory()
            && let Some(known) = self.all().get_mut(&inode)
        {
            known.name = Some((directory, name.to_owned()));
        }
    }

    /// A name of a file, and the directory that it is in.
    pub(super) fn name(&self, inode: Inode) -> Option<(Inode, String)> {
        self.all().get(&inode)?.name.clone()
    }

    /// Gives a directory to a user or group.
    pub(super) fn give(&self, directory: Inode, user: Option<u32>, group: Option<u32>, own: Owner) {
        let mut all = self.all();
        // The root is never looked up, and never forgotten.
        let given = &mut all.entry(directory).or_default().given;
        let before = given.unwrap_or(own);
        let now = (user.unwrap_or(before.0), group.unwrap_or(before.1));
        *given = Some(now).filter(|now| *now != own);
    }

    /// Whom a directory was given to, or that of a file with so many names. One of several names may be in another directory: such a file
    /// was given to nobody.
    pub(super) fn given(&self, inode: Inode, names: u32) -> Option<Owner> {
        let all = self.all();
        let directory = match inode.is_directory() {
            true => inode,
            false if names > 1 => return None,
            false => all.get(&inode)?.name.as_ref()?.0,
        };
        all.get(&directory)?.given
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Owner = (0, 0);
    const SWTPM: Owner = (101, 102);

    #[test]
    fn what_is_known_is_kept_until_every_look_up_is_forgotten() {
        let (known, file) = (KnownInodes::default(), Inode(2));
        known.is_named(file, Inode::ROOT, "unknown");
        assert_eq!(known.name(file), None, "the kernel does not know it");
        (0..3).for_each(|_| known.looked_up(file));
        known.is_named(file, Inode::ROOT, "disk");
        assert!(!known.forget(file, 1));
        // One more is answered while the kernel forgets the others.
        known.looked_up(file);
        assert!(!known.forget(file, 2));
        assert_eq!(known.name(file), Some((Inode::ROOT, "disk".to_owned())));
        assert!(known.forget(file, 1));
        assert_eq!(known.name(file), None);
        assert!(known.all().is_empty());
        assert!(known.forget(file, 1), "it was not known");
    }

    #[test]
    fn a_directory_stays_given_until_it_is_forgotten_and_its_files_with_it() {
        let (known, directory, file) = (KnownInodes::default(), Inode::new_directory(), Inode(2));
        (0..2).for_each(|_| known.looked_up(directory));
        known.looked_up(file);
        known.is_named(file, directory, "state");
        assert_eq!(known.given(file, 1), None);
        known.give(directory, Some(SWTPM.0), None, OWN);
        assert_eq!(known.given(directory, 2), Some((SWTPM.0, OWN.1)));
        known.give(directory, None, Some(SWTPM.1), OWN);
        assert!(!known.forget(directory, 1));
        assert_eq!((known.given(directory, 2), known.given(file, 1)), (Some(SWTPM), Some(SWTPM)));
        assert_eq!(known.given(file, 2), None, "it has a name elsewhere");
        known.give(directory, Some(OWN.0), Some(OWN.1), OWN);
        assert_eq!(known.given(directory, 2), None);
        known.give(directory, Some(SWTPM.0), Some(SWTPM.1), OWN);
        assert!(known.forget(directory, 1));
        assert_eq!((known.given(directory, 2), known.given(file, 1)), (None, None));
    }

    #[test]
    fn the_root_is_given_without_a_look_up() {
        let known = KnownInodes::default();
        known.give(Inode::ROOT, Some(SWTPM.0), Some(SWTPM.1), OWN);
        assert_eq!(known.given(Inode::ROOT, 2), Some(SWTPM));
    }
}
