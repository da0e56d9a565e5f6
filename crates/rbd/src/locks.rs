//! Locks of files (fcntl(2), of whole files), between the processes of this host and between hosts.
//!
//! ```text
//!  Free ──a process locks──> this host has the cluster's lock, as long as one of its processes has a lock of the file
//! ```
//! The cluster's lock is one of the file's object (`rados_lock_exclusive`, `_shared`). It is a lease: it runs out [`LEASE`] after it was last
//! renewed. A host that is cut off for that long has lost it; that host cannot write an image then that another one opens, because
//! who takes an image's own lock keeps the former owner from writing ([`crate::image`]).
//!
//! Each file waits for the cluster alone: where one placement group is not active, the locks of files elsewhere are taken, given up and renewed.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cluster::{Held, Pool};
use crate::inode::Inode;

/// How long a lock lasts that is not renewed.
pub const LEASE: Duration = Duration::from_secs(30);

/// How often locks are renewed: three attempts before they run out.
const RENEWAL: Duration = Duration::from_secs(9);

/// How many locks are renewed at a time, each by a thread. Where the whole cluster does not answer, so many threads wait: their stacks are
/// 128 MiB of the process's limit (2304 MiB), which requests need.
const RENEWERS_MAX: usize = 256;

/// The stack of such a thread, in bytes: the library looks for an object's place on it, with some bytes for each OSD of the cluster.
const STACK: usize = 512 * 1024;

/// Who has a lock on this host: an open file, or a process (the kernel's number for it), and by which handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The kernel's number.
    pub owner: u64,
    /// The handle.
    pub handle: u64,
}

/// Where the cluster's locks are: a pool, or what stands for it in a test.
pub trait Leases: Send + Sync {
    /// As [`Pool::lock`].
    ///
    /// # Errors
    /// The cluster's.
    fn lock(&self, object: &str, kind: Held, lease: Duration) -> io::Result<bool>;

    /// As [`Pool::unlock`].
    ///
    /// # Errors
    /// The cluster's.
    fn unlock(&self, object: &str) -> io::Result<()>;

    /// As [`Pool::break_locks_of`].
    ///
    /// # Errors
    /// The cluster's.
    fn break_locks_of(&self, object: &str, addresses: &[String]) -> io::Result<()>;
}

impl Leases for Pool {
    fn lock(&self, object: &str, kind: Held, lease: Duration) -> io::Result<bool> {
        Self::lock(self, object, kind, lease)
    }

    fn unlock(&self, object: &str) -> io::Result<()> {
        Self::unlock(self, object)
    }

    fn break_locks_of(&self, object: &str, addresses: &[String]) -> io::Result<()> {
        Self::break_locks_of(self, object, addresses)
    }
}

/// The locks of a file on this host. Locked while the cluster is asked about that file.
#[derive(Default)]
struct OfFile(Mutex<Vec<(Owner, Held)>>);

impl OfFile {
    fn owners(&self) -> MutexGuard<'_, Vec<(Owner, Held)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The locks of this host.
pub struct Locks {
    pool: Arc<dyn Leases>,
    /// The addresses of processes that are dead and may have left locks.
    predecessors: Vec<String>,
    /// The files that are locked. Nobody asks the cluster with this locked.
    files: Mutex<HashMap<Inode, Arc<OfFile>>>,
    /// The files whose locks are being renewed.
    renewed: Mutex<HashSet<Inode>>,
    /// Told when one has been.
    ended: Condvar,
    /// How many were not renewed when it was last their turn: logged when that changes.
    late: AtomicUsize,
}

/// A file's lock is being renewed until this is dropped, also where that ends by a defect.
struct Renewal {
    locks: Arc<Locks>,
    inode: Inode,
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.locks.renewed().remove(&self.inode);
        self.locks.ended.notify_all();
    }
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
    pub fn new(pool: Arc<dyn Leases>, predecessors: Vec<String>) -> Arc<Self> {
        let (files, renewed) = (Mutex::default(), Mutex::default());
        let (ended, late) = (Condvar::new(), AtomicUsize::new(0));
        Arc::new(Self { pool, predecessors, files, renewed, ended, late })
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

    fn files(&self) -> MutexGuard<'_, HashMap<Inode, Arc<OfFile>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn renewed(&self) -> MutexGuard<'_, HashSet<Inode>> {
        self.renewed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the locks of a file, as they are known then.
    fn with<T>(&self, inode: Inode, work: impl FnOnce(&mut Vec<(Owner, Held)>) -> T) -> T {
        let file = Arc::clone(self.files().entry(inode).or_default());
        let done = {
            let mut owners = file.owners();
            work(&mut owners)
        };
        self.forget(inode, file);
        done
    }

    /// Forgets a file without locks, unless somebody else is about to change them: who gets it from the table is counted.
    fn forget(&self, inode: Inode, file: Arc<OfFile>) {
        let mut files = self.files();
        drop(file);
        let is_unused =
            |known: &Arc<OfFile>| Arc::strong_count(known) == 1 && known.owners().is_empty();
        if files.get(&inode).is_some_and(is_unused) {
            files.remove(&inode);
        }
    }

    /// Whether somebody here has a lock of a file, or asks for one. It never waits for the cluster.
    #[must_use]
    pub fn has(&self, inode: Inode) -> bool {
        self.files().contains_key(&inode)
    }

    /// Locks a file; false where another process, here or elsewhere, has a lock that is in the way.
    ///
    /// # Errors
    /// The cluster's.
    pub fn lock(&self, inode: Inode, owner: Owner, wanted: Held) -> io::Result<bool> {
        self.with(inode, |owners| {
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
            }
            taken
        })
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
        let known = self.with(inode, |owners| {
            if conflicts(owners, owner, wanted) {
                return Some(false);
            }
            // Its own lock is not put at risk.
            (!owners.is_empty()).then_some(true)
        });
        if let Some(free) = known {
            return Ok(free);
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
        let Some(file) = self.files().get(&inode).cloned() else { return Ok(()) };
        let unlocked = {
            let mut owners = file.owners();
            let before = together(&owners);
            owners.retain(|(owner, _)| !of(*owner));
            self.change(inode, before, together(&owners))
        };
        self.forget(inode, file);
        unlocked.map(drop)
    }

    /// Renews all locks, each in a thread of its own: none waits for the cluster's answer about another one.
    fn renew(self: &Arc<Self>) {
        let until = Instant::now() + RENEWAL;
        let files: Vec<_> =
            self.files().iter().map(|(inode, file)| (*inode, Arc::clone(file))).collect();
        let mut late = 0;
        for (inode, file) in files {
            let Some(renewal) = self.begin_renewal(inode, until) else {
                late += 1;
                self.forget(inode, file);
                continue;
            };
            let renew = move || {
                renewal.locks.renew_one(inode, &file.owners());
                renewal.locks.forget(inode, file);
            };
            let thread = std::thread::Builder::new().name("lock".into()).stack_size(STACK);
            if let Err(error) = thread.spawn(renew) {
                tracing::warn!(%inode, %error, "the lock of a file is not renewed: there is no thread");
            }
        }
        self.tell_late(late);
    }

    /// None while the cluster has not answered about this file since the last time, and where [`RENEWERS_MAX`] others are renewed until then.
    fn begin_renewal(self: &Arc<Self>, inode: Inode, until: Instant) -> Option<Renewal> {
        let renewed = self.renewed();
        if renewed.contains(&inode) {
            return None;
        }
        let most = until.saturating_duration_since(Instant::now());
        let is_full = |renewed: &mut HashSet<Inode>| renewed.len() >= RENEWERS_MAX;
        let waited = self.ended.wait_timeout_while(renewed, most, is_full);
        let (mut renewed, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        let begins = !waited.timed_out() && renewed.insert(inode);
        // Not with the table locked: one that is dropped locks it.
        drop(renewed);
        begins.then(|| Renewal { locks: Arc::clone(self), inode })
    }

    /// Says how many locks run out, unless the cluster answers about them.
    fn tell_late(&self, late: usize) {
        if self.late.swap(late, Ordering::Relaxed) == late {
            return;
        }
        if late == 0 {
            tracing::info!("the cluster answers again about the locks of all files");
            return;
        }
        let (waited, lease) = (RENEWAL.as_secs(), LEASE.as_secs());
        tracing::warn!(
            files = late,
            "the cluster has not answered for {waited} seconds about the locks of files: another host may lock them {lease} seconds after its last answer"
        );
    }

    fn renew_one(&self, inode: Inode, owners: &[(Owner, Held)]) {
        let Some(kind) = together(owners) else { return };
        match self.pool.lock(&inode.object(), kind, LEASE) {
            Ok(true) => {}
            Ok(false) => {
                tracing::error!(%inode, "another host has the lock of a file that is locked here: this one was cut off for too long")
            }
            Err(error) => tracing::warn!(%inode, %error, "the lock of a file is not renewed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver};

    use super::*;

    /// A cluster that answers about each file but one, which it answers about when that is let go.
    struct Cluster {
        hangs: String,
        goes: Mutex<Receiver<()>>,
        asked: Mutex<mpsc::Sender<String>>,
    }

    impl Leases for Cluster {
        fn lock(&self, object: &str, _: Held, _: Duration) -> io::Result<bool> {
            self.asked.lock().unwrap().send(object.to_owned()).unwrap();
            if object == self.hangs {
                let _ = self.goes.lock().unwrap().recv();
            }
            Ok(true)
        }

        fn unlock(&self, _: &str) -> io::Result<()> {
            Ok(())
        }

        fn break_locks_of(&self, _: &str, _: &[String]) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_file_whose_cluster_does_not_answer_keeps_no_others_lock_from_being_taken_and_renewed() {
        let (stuck, well, other) = (Inode(2), Inode(4), Inode(6));
        let owner = Owner { owner: 1, handle: 10 };
        let (let_go, goes) = mpsc::channel();
        let (asked, heard) = mpsc::channel();
        let (goes, asked) = (Mutex::new(goes), Mutex::new(asked));
        let locks =
            Locks::new(Arc::new(Cluster { hangs: stuck.object(), goes, asked }), Vec::new());
        let next = || heard.recv_timeout(Duration::from_secs(60)).unwrap();
        // It answers once, so that there is a lock to be renewed.
        let_go.send(()).unwrap();
        for inode in [stuck, well] {
            assert!(locks.lock(inode, owner, Held::Exclusive).unwrap());
            assert_eq!(next(), inode.object());
        }
        locks.renew();
        let mut renewed = [next(), next()];
        renewed.sort();
        let mut expected = [stuck.object(), well.object()];
        expected.sort();
        assert_eq!(renewed, expected);
        assert!(locks.lock(other, owner, Held::Shared).unwrap());
        assert_eq!(next(), other.object());
        locks.unlock(other, |_| true).unwrap();
        assert!(!locks.files().contains_key(&other), "a file without locks is kept");
        // The one that hangs is not asked about again meanwhile.
        while locks.renewed().contains(&well) {
            std::thread::yield_now();
        }
        locks.renew();
        assert_eq!(next(), well.object());
        drop(let_go);
        locks.unlock(stuck, |_| true).unwrap();
        locks.unlock(well, |_| true).unwrap();
        while !locks.files().is_empty() {
            std::thread::yield_now();
        }
        assert!(heard.try_recv().is_err(), "something was asked twice");
    }

    #[test]
    fn so_many_locks_are_renewed_at_a_time_and_none_twice() {
        let ((_, goes), (asked, _heard)) = (mpsc::channel(), mpsc::channel());
        let (goes, asked) = (Mutex::new(goes), Mutex::new(asked));
        let cluster = Cluster { hangs: String::new(), goes, asked };
        let locks = Locks::new(Arc::new(cluster), Vec::new());
        let at_once = Instant::now();
        let begin = |number| locks.begin_renewal(Inode(number), at_once);
        let mut renewals: Vec<_> =
            (0..RENEWERS_MAX as u64).map(|number| begin(2 + number).unwrap()).collect();
        let next = 2 + RENEWERS_MAX as u64;
        assert!(begin(next).is_none(), "more than so many");
        drop(renewals.pop());
        assert!(begin(2).is_none(), "one twice");
        let last = begin(next);
        assert!(last.is_some() && begin(next + 1).is_none());
        drop((renewals, last));
        assert!(locks.renewed().is_empty());
    }

    #[test]
    fn a_file_has_locks_from_when_one_is_asked_for_until_the_last_is_given_up() {
        let (inode, owner) = (Inode(2), Owner { owner: 1, handle: 10 });
        let (let_go, goes) = mpsc::channel();
        let (asked, heard) = mpsc::channel();
        let (goes, asked) = (Mutex::new(goes), Mutex::new(asked));
        let locks =
            Locks::new(Arc::new(Cluster { hangs: inode.object(), goes, asked }), Vec::new());
        assert!(!locks.has(inode));
        let there = Arc::clone(&locks);
        let asks = std::thread::spawn(move || there.lock(inode, owner, Held::Exclusive));
        heard.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(
            locks.has(inode),
            "a lock that is asked for is not given up when the file is closed"
        );
        drop(let_go);
        assert!(asks.join().unwrap().unwrap());
        assert!(locks.has(inode));
        locks.unlock(inode, |_| true).unwrap();
        assert!(!locks.has(inode));
    }

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
