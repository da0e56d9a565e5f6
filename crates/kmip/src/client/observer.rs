//! The observer of requests as they end, for metrics of a server.

use std::fmt;
use std::time::Duration;

use crate::OperationCode;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All items were done.
    Done,
    /// The server refused the request or a part of it.
    Refused,
    /// There was no answer, or it was not valid KMIP.
    Failed,
}

/// Called for each request; a batch is one request.
pub trait Observer: Send + Sync + fmt::Debug {
    /// A request ended after `took`, which includes waiting for a connection and opening it. Not called
    /// for a request that its caller cancels.
    fn ended(&self, operation: OperationCode, took: Duration, how: Ended);
}
