//! One request and its answer: limits, and the error for each failure.

use std::error::Error;
use std::io;
use std::time::Duration;

use reqwest::{Request, RequestBuilder, Response};
use serde::de::DeserializeOwned;

use crate::problem::{ErrorCode, Problem};
use crate::request_id;

/// How long connecting may take, TLS included: a host that is up answers within a round trip or two, and one
/// that is not should be noticed soon.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest answer that is accepted, in bytes: lists of 1000 VMs with some disks each.
const ANSWER_MAX: usize = 16 * 1024 * 1024;

/// What a [`Problem`] says of a connection that was lost.
pub const CUT_OFF: &str = "was lost before it had answered";

/// The other end, as messages name it.
pub(super) struct Peer<'a>(pub &'a str);

impl Peer<'_> {
    /// Sends a request and reads the answer's body.
    pub(super) async fn exchange(&self, request: RequestBuilder) -> Result<Vec<u8>, Problem> {
        let (changes, answer) = self.begin(request).await?;
        self.body(answer).await.map_err(|problem| lost(changes, problem))
    }

    /// Sends a request and gives each part of the answer's body to `take`, whatever its length.
    pub(super) async fn download(
        &self,
        request: RequestBuilder,
        mut take: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), Problem> {
        let (_, mut answer) = self.begin(request).await?;
        while let Some(chunk) = answer.chunk().await.map_err(|error| self.failure(&error))? {
            take(&chunk).map_err(|error| {
                let code = match error.kind() {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
                    _ => ErrorCode::Internal,
                };
                Problem::new(code, format!("what was received cannot be written: {error}"))
            })?;
        }
        Ok(())
    }

    /// Sends a request; returns whether it changes something, and the answer, if it is a success.
    async fn begin(&self, request: RequestBuilder) -> Result<(bool, Response), Problem> {
        let request = match request_id::current() {
            Some(id) => request.header(request_id::HEADER, id.as_str()),
            None => request,
        };
        let (client, request) = request.build_split();
        let request = request.map_err(|error| self.failure(&error))?;
        let changes = changes(&request);
        let answer = client.execute(request).await.map_err(|error| match error.is_connect() {
            true => self.failure(&error),
            false => lost(changes, self.failure(&error)),
        })?;
        let status = answer.status();
        if status.is_success() {
            return Ok((changes, answer));
        }
        let body = self.body(answer).await.map_err(|problem| lost(changes, problem))?;
        let problem: Problem = serde_json::from_slice(&body).map_err(|_| {
            let detail = format!("{} answered with HTTP status {status}: is it vmseal?", self.0);
            lost(changes, Problem::new(ErrorCode::Unreachable, detail))
        })?;
        Err(match problem.code {
            ErrorCode::TimedOut => lost(changes, problem),
            _ => problem,
        })
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

    /// Parses the answer to a request that changes something.
    pub(super) fn parse_changed<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, Problem> {
        self.parse(body).map_err(|problem| lost(true, problem))
    }

    /// Parses an answer.
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
        match error.is_connect() || error.is_builder() {
            true => self.unreachable(&deepest(error)),
            false => self.cut_off(error),
        }
    }

    /// The error for a connection that was lost while an answer was waited for, as when the peer restarts.
    pub(super) fn cut_off(&self, error: &(dyn Error + 'static)) -> Problem {
        let cause = deepest(error);
        let closed = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        // That it was closed says no more, and rustls says it for programmers.
        let why = match closed == Some(io::ErrorKind::UnexpectedEof) {
            true => String::new(),
            false => format!(" ({cause})"),
        };
        let detail = format!("the connection to {} {CUT_OFF}{why}", self.0);
        Problem::new(ErrorCode::Unreachable, detail)
    }

    /// The error for a peer that cannot be reached.
    pub(super) fn unreachable(&self, why: &dyn std::fmt::Display) -> Problem {
        Problem::new(ErrorCode::Unreachable, format!("{} cannot be reached: {why}", self.0))
    }
}

/// Whether a request changes something; dry runs do not.
fn changes(request: &Request) -> bool {
    let tried =
        request.url().query_pairs().any(|(name, value)| name == "dry_run" && value == "true");
    !request.method().is_safe() && !tried
}

/// The answer to a request that was sent is lost: it is unknown whether the change was made.
fn lost(changes: bool, problem: Problem) -> Problem {
    let request_id = request_id::current().map(|id| id.as_str().into());
    Problem { in_doubt: changes, request_id: problem.request_id.or(request_id), ..problem }
}

/// The last cause says most ("connection refused"); those before it repeat it.
fn deepest<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause
}

#[cfg(test)]
mod tests {
    use reqwest::{Client, Method};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::super::tls;
    use super::*;

    fn client() -> Client {
        let tls = tls::anonymous(include_str!("../../tests/ca.pem")).unwrap();
        Client::builder().tls_backend_preconfigured(tls).no_proxy().build().unwrap()
    }

    /// Sends a request to a server that answers this and hangs up.
    async fn answered(answer: &str, method: Method, query: &str) -> Result<Vec<u8>, Problem> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/vms{query}", listener.local_addr().unwrap());
        let answer = answer.to_owned();
        let peer = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
        });
        let request = client().request(method, url).timeout(Duration::from_secs(20));
        let id = "r-1".parse().unwrap();
        let answer = request_id::during(Some(id), Peer("the server").exchange(request)).await;
        peer.await.unwrap();
        answer
    }

    fn http(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    }

    #[tokio::test]
    async fn a_change_whose_answer_is_lost_is_in_doubt_and_nothing_else_is() {
        let slow = serde_json::to_string(&Problem::new(ErrorCode::TimedOut, "60 s")).unwrap();
        let locked = serde_json::to_string(&Problem::new(ErrorCode::Locked, "no key")).unwrap();
        let cut = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{".to_owned();
        for (answer, in_doubt) in [
            (String::new(), true),
            (cut, true),
            ("rubbish\r\n\r\n".to_owned(), true),
            (http("502 Bad Gateway", "<html>"), true),
            (http("504 Gateway Timeout", &slow), true),
            (http("423 Locked", &locked), false),
        ] {
            for (method, query, changes) in [
                (Method::POST, "", true),
                (Method::PUT, "", true),
                (Method::DELETE, "", true),
                (Method::POST, "?dry_run=true", false),
                (Method::GET, "", false),
            ] {
                let problem = answered(&answer, method.clone(), query).await.unwrap_err();
                let expected = in_doubt && changes;
                assert_eq!(problem.in_doubt, expected, "{method}{query}: {answer}: {problem:?}");
                assert!(!expected || problem.request_id.as_deref() == Some("r-1"), "{problem:?}");
                let cut_off = !["HTTP/1.1 4", "HTTP/1.1 5"].iter().any(|it| answer.starts_with(it));
                assert_eq!(problem.detail.contains(CUT_OFF), cut_off, "{answer}: {problem:?}");
            }
        }
        assert!(Peer("it").parse_changed::<u32>(b"{}").unwrap_err().in_doubt);
        assert!(!Peer("it").parse::<u32>(b"{}").unwrap_err().in_doubt);
    }

    #[tokio::test]
    async fn a_request_that_was_not_sent_is_not_in_doubt() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let problem = Peer("it").exchange(client().post(url)).await.unwrap_err();
        assert_eq!((problem.code, problem.in_doubt), (ErrorCode::Unreachable, false));
    }

    #[test]
    fn doubt_is_not_serialized() {
        let problem = lost(true, Problem::new(ErrorCode::TimedOut, "60 s"));
        assert!(!serde_json::to_string(&problem).unwrap().contains("doubt"));
    }
}
