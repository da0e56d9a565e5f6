//! Requests and responses: headers and batch items around the payloads of operations (KMIP 1.4
//! specification, sections 6 and 7). No I/O.
//!
//! ```text
//! Request Message                        Response Message
//!   Request Header                         Response Header
//!     Protocol Version                       Protocol Version, Time Stamp, Batch Count
//!     Maximum Response Size                Batch Item, as many as were asked or fewer
//!     Batch Error Continuation Option        Operation, Unique Batch Item ID
//!     Batch Count                            Result Status, Result Reason, Result Message
//!   Batch Item, one or more                  Response Payload
//!     Operation, Unique Batch Item ID
//!     Request Payload
//! ```
//! Every item of a request has a unique id, even a single one. A result is matched to the item that it
//! names, never by its position.

mod request;
mod response;

pub use request::{BATCH_MAX, request};
pub use response::{Outcome, REFUSAL_TEXT_MAX, Refusal, responses};
