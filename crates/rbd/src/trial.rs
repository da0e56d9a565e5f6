//! Whether a user may change what is in a pool, as a mount does: an object that nothing else uses is written, locked and removed.
//!
//! Several hosts may do this at the same time: each step succeeds whether the object is there or not. A process that dies in between leaves
//! the object, which nobody reads, and which the next trial removes.

use std::ffi::CStr;
use std::io;
use std::ptr;
use std::time::Duration;

use crate::cluster::{Change, Held, Pool, text};
use crate::inode::TRIAL;
use crate::library::{CREATE_IDEMPOTENT, OPERATION_FULL_TRY, loaded};

/// The attribute that the object gets, and its value.
const ATTRIBUTE: &CStr = c"vmseal.trial";
const VALUE: &CStr = c"1";

/// How long the object is locked: a trial that dies has it removed by the next one, which has no use for the lock either.
const LEASE: Duration = Duration::from_secs(1);

/// What a pool is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Names and headers: objects have locks there, which takes the right to call the OSDs' classes (`x`), as images do.
    Names,
    /// The data of images alone.
    Data,
}

/// Writes to a pool, and removes what it has written. Where the pool is full, that the cluster would take the change is enough.
///
/// # Errors
/// `PermissionDenied`: the user may not; the cluster's.
pub fn write(pool: &Pool, of: Use) -> io::Result<()> {
    match write_object(pool) {
        // The user's rights come before the room.
        Err(error) if is_full(&error) => {
            tracing::info!("the pool is full: nothing was written");
            return Ok(());
        }
        written => written?,
    }
    let locked = match of {
        Use::Names => pool.lock(TRIAL, Held::Shared, LEASE).map(drop),
        Use::Data => Ok(()),
    };
    let removed = remove_object(pool);
    locked.and(removed)
}

/// Makes the object with its attribute: pools of erasure-coded data take that, too.
fn write_object(pool: &Pool) -> io::Result<()> {
    let object = text(TRIAL)?;
    let (change, rados) = (Change::new(), &loaded().rados);
    let value = VALUE.to_bytes();
    // SAFETY: the operation is open, the texts outlive the calls.
    unsafe {
        (rados.rados_write_op_create)(change.operation(), CREATE_IDEMPOTENT, ptr::null());
        let set = rados.rados_write_op_setxattr;
        set(change.operation(), ATTRIBUTE.as_ptr(), value.as_ptr().cast(), value.len());
    }
    change.carry_out_with(pool, &object, OPERATION_FULL_TRY)
}

/// Removes the object. Another trial may have done that.
fn remove_object(pool: &Pool) -> io::Result<()> {
    let object = text(TRIAL)?;
    let change = Change::new();
    // SAFETY: the operation is open.
    unsafe { (loaded().rados.rados_write_op_remove)(change.operation()) };
    match change.carry_out_with(pool, &object, OPERATION_FULL_TRY) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether there was no room: in the cluster, or within the pool's quota.
fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lack_of_room_passes_for_a_right() {
        let is = |number| is_full(&io::Error::from_raw_os_error(number));
        assert!(is(libc::ENOSPC) && is(libc::EDQUOT));
        assert!(!is(libc::EPERM) && !is(libc::EACCES) && !is(libc::EROFS));
    }
}
