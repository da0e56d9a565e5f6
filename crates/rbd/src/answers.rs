//! Answers to FUSE's requests: a value or an error, whatever the request is.

use std::io;

use fuser::{
    Errno, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLock,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
};

/// Answers a request with an error.
pub(crate) trait Refuse {
    /// Answers with it.
    fn refuse(self, error: io::Error);
}

macro_rules! refuse {
    ($($reply:ty),*) => {
        $(impl Refuse for $reply {
            fn refuse(self, error: io::Error) {
                self.error(Errno::from(error));
            }
        })*
    };
}

refuse!(
    ReplyLock,
    ReplyAttr,
    ReplyCreate,
    ReplyData,
    ReplyDirectory,
    ReplyEmpty,
    ReplyEntry,
    ReplyLseek,
    ReplyOpen,
    ReplyStatfs,
    ReplyWrite
);

/// Answers a request.
pub(crate) fn answer<R: Refuse, T>(reply: R, result: io::Result<T>, with: impl FnOnce(R, T)) {
    match result {
        Ok(value) => with(reply, value),
        Err(error) => reply.refuse(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_numbers() {
        let busy = io::Error::from_raw_os_error(libc::EBUSY);
        assert_eq!(i32::from(Errno::from(busy)), libc::EBUSY);
        let there = io::Error::from(io::ErrorKind::AlreadyExists);
        assert_eq!(i32::from(Errno::from(there)), libc::EEXIST);
    }
}
