//! Locks of files (fcntl(2), of whole files), between the processes of this host and between hosts.
//!
//! ```text
//!  Free ──a process locks──> this host has the cluster's lock, as long as one of its processes has a lock of the file
//! ```
//! The cluster's lock is one of the file's object (`rados_lock_exclusive`, `_shared`). It is a lease: it runs out [`LEASE`] after it was last
//! renewed. A host that is cut off for that long has lost it; that host cannot write an image then that another one opens, because
//! who takes an image's own lock keeps the former owner from writing ([`crate::image`]).

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cluster::{Held, Pool};
use crate::inode::Inode;

/// How long a lock lasts that is not renewed.
pub const LEASE: Duration = Duration::from_secs(30);

/// How often locks are renewed: three attempts before they run out.
const RENEWAL: Duration = Duration::from_secs(9);

/// Who has a lock on this host: an open file, or a process (the kernel's number for it), and by which handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The kernel's number.
    pub owner: u64,
    /// The handle.
    pub handle: u64,
}

/// The locks of this host.
pub struct Locks {
    pool: Arc<Pool>,
    /// The addresses of processes that are dead and may have left locks.
    predecessors: Vec<String>,
    held: Mutex<HashMap<Inode, Vec<(Owner, Held)>>>,
}

/// What the owners of a file's locks have between them.
fn together(owners: &[(Owner, Held)]) -> Option<Held> {
    let exclusive = owners.iter().any(|(_, held)| *held == Held::Exclusive);
    let one = if exclusive { Held::Exclusive } else { Held::Shared };
    (!owners.is_empty()).then_some(one)
}

/// Whether another owner's lock keeps this one from being had.
fn conflicts(owners: &[(Owner, Held)], owner: Owner, wanted: Held) -> bool {
    owners.iter().any(|(other, held)| {
        other.owner != owner.owner && (wanted == Held::Exclusive || *held == Held::Exclusive)
    })
}

impl Locks {
    /// No locks.
    #[must_use]
    pub fn new(pool: Arc<Pool>, predecessors: Vec<String>) -> Arc<Self> {
        Arc::new(Self { pool, predecessors, held: Mutex::default() })
    }

    /// Renews all locks for as long as there are any others who have them.
    ///
    /// # Errors
    /// The system has no thread.
    pub fn keep(self: &Arc<Self>) -> io::Result<()> {
        let locks = Arc::downgrade(self);
        let renew = move || {
            loop {
                std::thread::sleep(RENEWAL);
                let Some(locks) = locks.upgrade() else { return };
                locks.renew();
            }
        };
        std::thread::Builder::new().name("locks".into()).spawn(renew).map(drop)
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Inode, Vec<(Owner, Held)>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks a file; false where another process, here or elsewhere, has a lock that is in the way.
    ///
    /// # Errors
    /// The cluster's.
    pub fn lock(&self, inode: Inode, owner: Owner, wanted: Held) -> io::Result<bool> {
        let mut all = self.held();
        let owners = all.entry(inode).or_default();
        if conflicts(owners, owner, wanted) {
            return Ok(false);
        }
        let before = together(owners);
        let mut next = owners.clone();
        next.retain(|(other, _)| other.owner != owner.owner);
        next.push((owner, wanted));
        let taken = self.change(inode, before, together(&next));
        if matches!(taken, Ok(true)) {
            *owners = next;
        } else if owners.is_empty() {
            all.remove(&inode);
        }
        taken
    }

    /// Has the cluster's lock be what the owners here have between them.
    fn change(&self, inode: Inode, before: Option<Held>, after: Option<Held>) -> io::Result<bool> {
        if before == after {
            return Ok(true);
        }
        let object = inode.object();
        // There is no way from one kind to the other but by giving it up: nobody here holds more than `after` meanwhile.
        if before.is_some() {
            self.pool.unlock(&object)?;
        }
        let Some(after) = after else { return Ok(true) };
        if self.pool.lock(&object, after, LEASE)? {
            return Ok(true);
        }
        self.pool.break_locks_of(&object, &self.predecessors)?;
        let taken = self.pool.lock(&object, after, LEASE)?;
        if !taken && let Some(before) = before {
            // As it was, unless somebody was faster: then it is lost, and the next renewal says so.
            self.pool.lock(&object, before, LEASE)?;
        }
        Ok(taken)
    }

    /// Whether a lock could be had now.
    ///
    /// # Errors
    /// The cluster's.
    pub fn is_free(&self, inode: Inode, owner: Owner, wanted: Held) -> io::Result<bool> {
        {
            let all = self.held();
            let owners = all.get(&inode).map(Vec::as_slice).unwrap_or_default();
            if conflicts(owners, owner, wanted) {
                return Ok(false);
            }
            // Its own lock is not put at risk.
            if !owners.is_empty() {
                return Ok(true);
            }
        }
        let free = self.lock(inode, owner, wanted)?;
        if free {
            self.unlock(inode, |other| other.owner == owner.owner)?;
        }
        Ok(free)
    }

    /// Unlocks a file, of the owners that `of` names.
    ///
    /// # Errors
    /// The cluster's: the lock runs out then.
    pub fn unlock(&self, inode: Inode, of: impl Fn(Owner) -> bool) -> io::Result<()> {
        let mut all = self.held();
        let Some(owners) = all.get_mut(&inode) else { return Ok(()) };
        let before = together(owners);
        owners.retain(|(owner, _)| !of(*owner));
        let after = together(owners);
        if owners.is_empty() {
            all.remove(&inode);
        }
        self.change(inode, before, after).map(drop)
    }

    fn renew(&self) {
        let held: Vec<_> = self.held().iter().map(|(inode, it)| (*inode, together(it))).collect();
        for (inode, kind) in held {
            let all = self.held();
            // It may have changed, or gone, meanwhile.
            let Some(kind) =
                kind.filter(|kind| all.get(&inode).is_some_and(|now| together(now) == Some(*kind)))
            else {
                continue;
            };
            match self.pool.lock(&inode.object(), kind, LEASE) {
                Ok(true) => {}
                Ok(false) => {
                    tracing::error!(%inode, "another host has the lock of a file that is locked here: this one was cut off for too long")
                }
                Err(error) => tracing::warn!(%inode, %error, "the lock of a file is not renewed"),
            }
            drop(all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writes_or_several_read() {
        let (one, other) = (Owner { owner: 1, handle: 10 }, Owner { owner: 2, handle: 11 });
        let readers = [(one, Held::Shared)];
        assert!(!conflicts(&readers, other, Held::Shared));
        assert!(conflicts(&readers, other, Held::Exclusive));
        assert!(!conflicts(&readers, one, Held::Exclusive), "a lock of its own may change");
        let writer = [(one, Held::Exclusive)];
        assert!(conflicts(&writer, other, Held::Shared));
        assert_eq!(together(&[]), None);
        assert_eq!(together(&readers), Some(Held::Shared));
        assert_eq!(together(&[readers[0], (other, Held::Exclusive)]), Some(Held::Exclusive));
    }
}
