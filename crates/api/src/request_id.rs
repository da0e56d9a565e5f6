//! The id of one request of a user, from the command line to the filter: in the header `X-Request-Id`, in
//! every log line written for it, in the records of its tasks and events, and in problems.
//!
//! It is a value of the tokio task that does the work ([`during`]); code that spawns another task for the
//! same work passes it on ([`inherit`]).

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

/// The header that carries it.
pub const HEADER: &str = "x-request-id";

/// The longest id that is accepted from others, in bytes; W3C's trace ids and UUIDs are shorter.
pub const LEN_MAX: usize = 64;

/// An id: 1 to [`LEN_MAX`] ASCII letters, digits, `-`, `_` and `.`, because it appears in logs and headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId(String);

/// It is not an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request id has 1 to {LEN_MAX} ASCII letters, digits, '-', '_' and '.'")]
pub struct NoRequestId;

impl RequestId {
    /// A new one.
    #[must_use]
    pub fn new() -> Self {
        Self(Uuid::new_v4().simple().to_string())
    }

    /// The received text, if it is an id; otherwise a new id.
    #[must_use]
    pub fn sent_or_new(sent: Option<&[u8]>) -> Self {
        Self::sent(sent).unwrap_or_default()
    }

    /// The received text, if it is an id.
    #[must_use]
    pub fn sent(sent: Option<&[u8]>) -> Option<Self> {
        std::str::from_utf8(sent?).ok()?.parse().ok()
    }

    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for RequestId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for RequestId {
    type Err = NoRequestId;
    fn from_str(text: &str) -> Result<Self, NoRequestId> {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if text.is_empty() || text.len() > LEN_MAX || !text.bytes().all(known) {
            return Err(NoRequestId);
        }
        Ok(Self(text.to_owned()))
    }
}

#[cfg(feature = "client")]
pub use work::{current, during, inherit};

#[cfg(feature = "client")]
mod work {
    use tracing::Instrument;

    use super::RequestId;

    tokio::task_local! {
        static CURRENT: Option<RequestId>;
    }

    /// Does work for a request, or for none. All its log lines carry the id.
    pub fn during<F: Future>(id: Option<RequestId>, work: F) -> impl Future<Output = F::Output> {
        let span = match &id {
            Some(id) => tracing::error_span!("request", request_id = %id),
            None => tracing::Span::none(),
        };
        CURRENT.scope(id, work).instrument(span)
    }

    /// The request that this work is for.
    #[must_use]
    pub fn current() -> Option<RequestId> {
        CURRENT.try_with(Clone::clone).ok().flatten()
    }

    /// Wraps work for another task, so that it is for the caller's request.
    pub fn inherit<F: Future>(work: F) -> impl Future<Output = F::Output> {
        during(current(), work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_ids_are_replaced() {
        let long = "a".repeat(LEN_MAX + 1);
        let hostile =
            ["", " ", "a b", "a\nb", "a\rb", "a\0", "\u{1b}[2J", "é", "a/b", "${x}", "\"", &long];
        for hostile in hostile.iter().map(|text| text.as_bytes()).chain([&b"\xff\xfe"[..]]) {
            let id = RequestId::sent_or_new(Some(hostile));
            assert_eq!(id.as_str().parse(), Ok(id.clone()), "{hostile:?}");
            assert_ne!(id.as_str().as_bytes(), hostile);
            assert_eq!(RequestId::sent(Some(hostile)), None);
        }
        let longest = "a".repeat(LEN_MAX);
        for good in ["a", "4bf92f3577b34da6a3ce929d0e0e4736", "me-1_2.3", &longest] {
            assert_eq!(RequestId::sent_or_new(Some(good.as_bytes())).as_str(), good);
        }
        assert_ne!(RequestId::sent_or_new(None), RequestId::sent_or_new(None));
    }

    #[cfg(feature = "client")]
    #[tokio::test]
    async fn work_that_is_spawned_is_for_the_same_request_where_it_inherits() {
        let id = RequestId::new();
        assert_eq!(current(), None);
        during(Some(id.clone()), async {
            assert_eq!(current(), Some(id.clone()));
            assert_eq!(tokio::spawn(async { current() }).await.unwrap(), None);
            assert_eq!(tokio::spawn(inherit(async { current() })).await.unwrap(), Some(id.clone()));
            during(None, async { assert_eq!(current(), None) }).await;
        })
        .await;
    }
}
