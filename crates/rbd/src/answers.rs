//! Answers to FUSE's requests: a value or an error, whatever the request is.

use std::io;

use fuser::{
    Errno, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};

/// The number of an error. What has none is a defect, or damage, which the log tells.
fn number(error: &io::Error) -> Errno {
    use io::ErrorKind::{AlreadyExists, FileTooLarge, NotFound, ResourceBusy};
    let of_kind = match error.kind() {
        AlreadyExists => libc::EEXIST,
        FileTooLarge => libc::EFBIG,
        NotFound => libc::ENOENT,
        ResourceBusy => libc::EBUSY,
        _ => libc::EIO,
    };
    if error.raw_os_error().is_none() && of_kind == libc::EIO {
        tracing::error!(%error, "a request fails");
    }
    Errno::from_i32(error.raw_os_error().unwrap_or(of_kind))
}

/// Answers a request with an error.
pub(crate) trait Refuse: Send + 'static {
    /// Answers with it.
    fn refuse(self, error: io::Error);
}

macro_rules! refuse {
    ($($reply:ty),*) => {
        $(impl Refuse for $reply {
            fn refuse(self, error: io::Error) {
                self.error(number(&error));
            }
        })*
    };
}

refuse!(
    ReplyIoctl,
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
    ReplyWrite,
    ReplyXattr
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
        assert_eq!(i32::from(number(&busy)), libc::EBUSY);
        let there = io::Error::from(io::ErrorKind::AlreadyExists);
        assert_eq!(i32::from(number(&there)), libc::EEXIST);
        let damaged = io::Error::new(io::ErrorKind::InvalidData, "no number");
        assert_eq!(i32::from(number(&damaged)), libc::EIO);
    }
}
