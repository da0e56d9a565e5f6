//! An export of an NBD server. Somebody else connects: what the process gets are connected stream sockets (a unix socket,
//! TCP, vsock), on which it negotiates ([`negotiation`]) and from then on asks ([`queue`]) and reads replies ([`replies`]).
//!
//! Each chain has a connection of its own for as long as it lives; there must be as many as chains. With more than one
//! the server must say that a flush on one covers what was answered on all (`NBD_FLAG_CAN_MULTI_CONN`).
//!
//! A connection that ends, breaks the protocol or is silent for [`queue::TIMEOUT`] is lost for good: its requests fail, those
//! in flight and later ones. What the server has done of them is not known. The disk goes on when it gets a new
//! stack with new connections. A flush on a lost connection succeeds only if there is nothing to flush: without that, an answered
//! write that the server has lost would be missed by nobody.

pub mod negotiation;
pub mod queue;
pub mod replies;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nix::sys::socket::{MsgFlags, send, setsockopt, sockopt};

use crate::nbd::{Request, command, transmission};
use crate::stack::chain::Storage;
use crate::storage::nbd::negotiation::{Export, NegotiationError, can_be_written};
use crate::storage::nbd::queue::Queue;

/// Why an export cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// The handshake.
    #[error("{0}")]
    Negotiation(#[from] NegotiationError),
    /// Two connections lead to different exports.
    #[error("the connections to the NBD server lead to different exports")]
    Differ,
    /// Too short.
    #[error("the server's export has {has} bytes where the disk needs {needs}")]
    Size {
        /// Its length.
        has: u64,
        /// Offset and size of the disk.
        needs: u64,
    },
    /// The data does not start where the server can read.
    #[error("the data starts at byte {offset}, but the server works in blocks of {block} bytes")]
    Offset {
        /// Where the data starts.
        offset: u64,
        /// The server's block.
        block: u32,
    },
    /// A disk that is written.
    #[error(
        "the server serves the export read-only, or cannot flush it, but the disk is not read-only"
    )]
    NotWritable,
    /// Several connections to a server that does not keep them together.
    #[error(
        "the server does not promise that a flush covers all of several connections (multi-conn): give it one, and the disk one queue"
    )]
    Apart,
}

/// An export, from which each queue gets a connection.
#[derive(Clone, Debug)]
pub struct NbdDisk(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    export: Export,
    /// Where the disk begins in it, in bytes.
    offset: u64,
    /// How many connections there were at first.
    count: usize,
    /// Those that no chain has.
    idle: Mutex<Vec<OwnedFd>>,
    /// How many changes were answered, and how many of them are durable.
    changed: AtomicU64,
    durable: AtomicU64,
    /// Whether the server could not flush once: what it has lost then is missed by no later flush.
    failed: AtomicBool,
}

impl NbdDisk {
    /// Negotiates on each socket. The disk is `size` bytes from `offset` on.
    ///
    /// # Errors
    /// [`NbdError`].
    pub fn open(
        sockets: Vec<OwnedFd>,
        name: &str,
        offset: u64,
        size: u64,
        read_only: bool,
    ) -> Result<Self, NbdError> {
        let until = Instant::now() + negotiation::TIMEOUT;
        let mut export = None;
        for socket in &sockets {
            // Of others than TCP it cannot be said, nor need it.
            let _ = setsockopt(socket, sockopt::TcpNoDelay, &true);
            let told = negotiation::run(socket.as_fd(), name, until)?;
            if *export.get_or_insert(told) != told {
                return Err(NbdError::Differ);
            }
        }
        let export = export.ok_or(NbdError::Differ)?;
        let needs = offset.saturating_add(size);
        if export.size < needs {
            return Err(NbdError::Size { has: export.size, needs });
        }
        if !offset.is_multiple_of(export.block.into()) {
            return Err(NbdError::Offset { offset, block: export.block });
        }
        if !read_only && !can_be_written(&export) {
            return Err(NbdError::NotWritable);
        }
        if !read_only && sockets.len() > 1 && !export.has(transmission::CAN_MULTI_CONN) {
            return Err(NbdError::Apart);
        }
        Ok(Self(Arc::new(Shared {
            export,
            offset,
            count: sockets.len(),
            idle: Mutex::new(sockets),
            changed: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        })))
    }

    /// The smallest unit that the server takes, in bytes.
    #[must_use]
    pub fn block(&self) -> u32 {
        self.0.export.block
    }

    /// Storage for one queue, on a connection that no other has.
    ///
    /// # Errors
    /// All connections are in use.
    pub fn queue(&self) -> io::Result<Box<dyn Storage>> {
        let connection = self.0.idle().pop().ok_or_else(|| {
            let count = self.0.count;
            io::Error::other(format!(
                "all {count} connections to its NBD server are in use: each chain needs one, pass more"
            ))
        })?;
        Ok(Box::new(Queue::new(Arc::clone(&self.0), connection)))
    }

    /// Whether the server makes zeroes by itself, without getting them.
    #[must_use]
    pub fn writes_zeroes(&self) -> bool {
        self.0.export.has(transmission::SEND_WRITE_ZEROES)
    }

    /// The caller is the only writer and will write again everything since the last good flush: a failed flush need not
    /// fail those that follow.
    pub fn forget_failed_flush(&self) {
        self.0.failed.store(false, Ordering::Release);
    }
}

impl Shared {
    fn idle(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether everything that was answered is durable.
    fn is_durable(&self) -> bool {
        let failed = self.failed.load(Ordering::Acquire);
        !failed && self.durable.load(Ordering::Acquire) >= self.changed.load(Ordering::Acquire)
    }
}

impl Drop for Shared {
    /// Takes leave of the server.
    fn drop(&mut self) {
        let leave = Request { command: command::DISCONNECT, ..Request::default() }.encode();
        for connection in self.idle().drain(..) {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            // If it cannot be said, the end of the connection says it.
            let _ = send(connection.as_raw_fd(), &leave, flags);
        }
    }
}
