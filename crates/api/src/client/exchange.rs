//! One request and its answer: limits, and what each failure is called.

use std::time::Duration;

use reqwest::{RequestBuilder, Response};
use serde::de::DeserializeOwned;

use crate::problem::{ErrorCode, Problem};
use crate::request_id;

/// How long a connection may take to be made, TLS included: a host that is up answers within a
/// round trip or two, and one that is not should be noticed soon.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest answer that is taken, in bytes: lists of 1000 VMs with some disks each.
const ANSWER_MAX: usize = 16 * 1024 * 1024;

/// The other end, as messages name it.
pub(super) struct Peer<'a>(pub &'a str);

impl Peer<'_> {
    /// Sends a request, reads the answer's body.
    pub(super) async fn exchange(&self, request: RequestBuilder) -> Result<Vec<u8>, Problem> {
        let request = match request_id::current() {
            Some(id) => request.header(request_id::HEADER, id.as_str()),
            None => request,
        };
        let answer = request.send().await.map_err(|error| self.failure(&error))?;
        let status = answer.status();
        let body = self.body(answer).await?;
        if status.is_success() {
            return Ok(body);
        }
        Err(serde_json::from_slice(&body).unwrap_or_else(|_| {
            let detail = format!("{} answered with HTTP status {status}: is it vmseal?", self.0);
            Problem::new(ErrorCode::Unreachable, detail)
        }))
    }

    async fn body(&self, mut answer: Response) -> Result<Vec<u8>, Problem> {
        let mut body = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(|error| self.failure(&error))? {
            if body.len() + chunk.len() > ANSWER_MAX {
                let detail = format!("{} answered with more than {ANSWER_MAX} bytes", self.0);
                return Err(Problem::new(ErrorCode::Unreachable, detail));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    /// Understands an answer's body.
    pub(super) fn parse<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, Problem> {
        serde_json::from_slice(body).map_err(|error| {
            let detail = format!("{} answered with something unexpected: {error}", self.0);
            Problem::new(ErrorCode::Unreachable, detail)
        })
    }

    fn failure(&self, error: &reqwest::Error) -> Problem {
        if error.is_timeout() && !error.is_connect() {
            let detail = format!("{} did not answer in time", self.0);
            return Problem::new(ErrorCode::TimedOut, detail);
        }
        self.unreachable(&deepest(error))
    }

    /// It cannot be reached.
    pub(super) fn unreachable(&self, why: &dyn std::fmt::Display) -> Problem {
        Problem::new(ErrorCode::Unreachable, format!("{} cannot be reached: {why}", self.0))
    }
}

/// The cause at the end of the chain says most ("connection refused"); the links before it repeat it.
fn deepest(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
