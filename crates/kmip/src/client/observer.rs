//! Who is told of requests as they end: for metrics of a server.

use std::fmt;
use std::time::Duration;

use crate::OperationCode;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All that was asked was done.
    Done,
    /// The server refused it, or a part of it.
    Refused,
    /// There was no answer, or none that is KMIP.
    Failed,
}

/// Told of each request; a batch is one.
pub trait Observer: Send + Sync + fmt::Debug {
    /// A request ended, after so long: waiting for a connection and making it included. One that is
    /// given up by its caller is not told of.
    fn ended(&self, operation: OperationCode, took: Duration, how: Ended);
}
