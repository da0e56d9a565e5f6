//! Several changes to one object of a pool, which the cluster makes together or not at all.

use std::ffi::{CStr, c_int};
use std::io;
use std::ptr;

use super::{Pool, checked};
use crate::library::{NO_FLAGS, WriteOperation, loaded};

/// Changes to one object, collected.
pub(crate) struct Change(WriteOperation);

impl Change {
    pub(crate) fn new() -> Self {
        // SAFETY: it is released when this is dropped.
        Self(unsafe { (loaded().rados.rados_create_write_op)() })
    }

    /// The operation, open for as long as this lives.
    pub(crate) fn operation(&self) -> WriteOperation {
        self.0
    }

    pub(super) fn carry_out(self, pool: &Pool, object: &CStr) -> io::Result<()> {
        self.carry_out_with(pool, object, NO_FLAGS)
    }

    /// The same with flags of the library (`LIBRADOS_OPERATION_...`).
    pub(crate) fn carry_out_with(self, pool: &Pool, object: &CStr, flags: c_int) -> io::Result<()> {
        let operate = loaded().rados.rados_write_op_operate;
        // SAFETY: the operation and the pool are open.
        checked(unsafe { operate(self.0, pool.io, object.as_ptr(), ptr::null_mut(), flags) })
            .map(drop)
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        // SAFETY: it is open until now.
        unsafe { (loaded().rados.rados_release_write_op)(self.0) }
    }
}
