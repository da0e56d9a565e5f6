//! The REST client of the command line: bearer token, pinned CA.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Client, Method, RequestBuilder};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use url::Url;
use zeroize::Zeroizing;

use super::exchange::{CONNECT_TIMEOUT, Peer};
use super::{base_url, tls, websocket};
use crate::host::{ConsoleClaim, ConsoleStream, Exposing};
use crate::model::{Page, Plan, Task};
use crate::problem::{ErrorCode, Problem};

/// How long the server may take to answer: its own limit of a minute, and a margin.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(70);

/// How long the server may take to send a file: an inventory of gigabytes over a slow line.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// A server, and a user of it. Paths are relative to `/api/v1/` and may carry a query
/// (`events?after=3`).
pub struct ServerClient {
    base: Url,
    http: Client,
    tls: Arc<ClientConfig>,
    token: Zeroizing<String>,
}

impl std::fmt::Debug for ServerClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerClient").field("base", &self.base.as_str()).finish_non_exhaustive()
    }
}

impl ServerClient {
    /// The server at `url` (`https://HOST:PORT`), whose certificate the CA `authority` (PEM) signed.
    ///
    /// # Errors
    /// `invalid-request`: the URL or the certificate is not valid.
    pub fn new(url: &str, authority: &str, token: &str) -> Result<Self, Problem> {
        let base = base_url(url)?;
        let invalid = |detail: String| Problem::invalid("ca", detail);
        let tls = tls::anonymous(authority).map_err(|error| invalid(error.to_string()))?;
        let http = Client::builder()
            .tls_backend_preconfigured(tls.clone())
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(ANSWER_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()
            .map_err(|error| invalid(error.to_string()))?;
        Ok(Self { base, http, tls: Arc::new(tls), token: Zeroizing::new(token.to_owned()) })
    }

    fn url(&self, path: &str) -> Url {
        let (path, query) = match path.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (path, None),
        };
        let mut url = self.base.clone();
        // Segment by segment, so that a name that a user typed cannot become another path.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.clear().extend(["api", "v1"]).extend(path.split('/'));
        }
        url.set_query(query);
        url
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, self.url(path)).bearer_auth(self.token.as_str())
    }

    fn peer(&self) -> Peer<'_> {
        Peer(self.base.as_str())
    }

    /// Reads a resource or a page of a list.
    ///
    /// # Errors
    /// The server's [`Problem`], `unreachable` or `timed-out`. The same holds for every call.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        let body = self.peer().exchange(self.request(Method::GET, path)).await?;
        self.peer().parse(&body)
    }

    /// Reads a whole list, page by page.
    ///
    /// # Errors
    /// As [`ServerClient::get`].
    pub async fn all<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>, Problem> {
        let mut page: Page<T> = self.get(path).await?;
        let mut items = std::mem::take(&mut page.items);
        while let Some(after) = page.next.take() {
            let separator = if path.contains('?') { '&' } else { '?' };
            page = self.get(&format!("{path}{separator}after={after}")).await?;
            items.append(&mut page.items);
        }
        Ok(items)
    }

    /// Creates a resource or performs an action on one.
    ///
    /// # Errors
    /// As [`ServerClient::get`].
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T, Problem> {
        let request = self.request(Method::POST, path).json(body);
        let body = self.peer().exchange(request).await?;
        self.peer().parse_changed(&body)
    }

    /// Performs an action whose answer is a file, and gives each part of it to `take`. An answer that is cut off is an
    /// error.
    ///
    /// # Errors
    /// As [`ServerClient::get`]; what `take` answers.
    pub async fn download(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
        take: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), Problem> {
        let request = self.request(Method::POST, path).json(body).timeout(DOWNLOAD_TIMEOUT);
        self.peer().download(request, take).await
    }

    /// Replaces a part of a resource.
    ///
    /// # Errors
    /// As [`ServerClient::get`].
    pub async fn put<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T, Problem> {
        let request = self.request(Method::PUT, path).json(body);
        let body = self.peer().exchange(request).await?;
        self.peer().parse_changed(&body)
    }

    /// Changes a part of a resource.
    ///
    /// # Errors
    /// As [`ServerClient::get`].
    pub async fn patch<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<T, Problem> {
        let request = self.request(Method::PATCH, path).json(body);
        let body = self.peer().exchange(request).await?;
        self.peer().parse_changed(&body)
    }

    /// Has the server check what [`ServerClient::patch`] would do, without doing it.
    ///
    /// # Errors
    /// Those of the request itself.
    pub async fn try_patch(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<Plan, Problem> {
        self.patch(&format!("{path}?dry_run=true"), body).await.map_err(tried)
    }

    /// Removes a resource at once.
    ///
    /// # Errors
    /// As [`ServerClient::get`].
    pub async fn delete(&self, path: &str) -> Result<(), Problem> {
        self.peer().exchange(self.request(Method::DELETE, path)).await.map(drop)
    }

    /// Begins to remove a resource.
    ///
    /// # Errors
    /// As [`ServerClient::get`].
    pub async fn delete_task(&self, path: &str) -> Result<Task, Problem> {
        let body = self.peer().exchange(self.request(Method::DELETE, path)).await?;
        self.peer().parse_changed(&body)
    }

    /// Has the server check what [`ServerClient::post`] would do, without doing it.
    ///
    /// # Errors
    /// Those of the request itself.
    pub async fn try_post(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<Plan, Problem> {
        let and = if path.contains('?') { '&' } else { '?' };
        self.post(&format!("{path}{and}dry_run=true"), body).await.map_err(tried)
    }

    /// Has the server check what [`ServerClient::put`] would do, without doing it.
    ///
    /// # Errors
    /// Those of the request itself.
    pub async fn try_put(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
    ) -> Result<Plan, Problem> {
        self.put(&format!("{path}?dry_run=true"), body).await.map_err(tried)
    }

    /// Has the server check what a removal would do, without doing it.
    ///
    /// # Errors
    /// Those of the request itself.
    pub async fn try_delete(&self, path: &str) -> Result<Plan, Problem> {
        let request = self.request(Method::DELETE, &format!("{path}?dry_run=true"));
        let body = self.peer().exchange(request).await?;
        self.peer().parse(&body)
    }

    /// A guest's screen: VNC.
    ///
    /// # Errors
    /// As [`ServerClient::get`].
    pub async fn screen(&self, vm: &str) -> Result<ConsoleStream, Problem> {
        let address = self.socket(&format!("vms/{vm}/screen"))?;
        websocket::open_disk(address, Arc::clone(&self.tls)).await
    }

    /// A guest's serial console.
    ///
    /// # Errors
    /// As [`ServerClient::get`]; `in-use` while another client has it and it may not be taken over.
    pub async fn console(&self, vm: &str, claim: ConsoleClaim) -> Result<ConsoleStream, Problem> {
        let force = claim == ConsoleClaim::TakeOver;
        let address = self.socket(&format!("vms/{vm}/console?force={force}"))?;
        websocket::open(address, Arc::clone(&self.tls)).await
    }

    /// A disk's exposure, or a connection to an exposed disk.
    ///
    /// # Errors
    /// As [`ServerClient::get`], and what the host answers.
    pub async fn expose(
        &self,
        vm: &str,
        disk: &str,
        what: Exposing<&str>,
    ) -> Result<ConsoleStream, Problem> {
        let address = self.socket(&what.path(vm, disk))?;
        websocket::open_disk(address, Arc::clone(&self.tls)).await
    }

    /// The address of a WebSocket.
    fn socket(&self, path: &str) -> Result<websocket::Address<'_>, Problem> {
        let mut url = self.url(path);
        let host = self.base.host_str().unwrap_or_default();
        let server_name =
            ServerName::try_from(host.trim_matches(['[', ']']).to_owned()).map_err(|_| {
                Problem::new(ErrorCode::InvalidRequest, format!("'{host}' is not a host name"))
            })?;
        let socket = format!("{host}:{}", self.base.port_or_known_default().unwrap_or(443));
        // The scheme of WebSockets over TLS; `Url` allows this change between special schemes.
        let _ = url.set_scheme("wss");
        Ok(websocket::Address {
            peer: self.peer(),
            socket,
            server_name,
            url: url.into(),
            authorization: Some(Zeroizing::new(format!("Bearer {}", self.token.as_str()))),
            contract: None,
        })
    }
}

/// Nothing was to be done: there is no doubt about it.
fn tried(problem: Problem) -> Problem {
    Problem { in_doubt: false, ..problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_one_segment_and_queries_queries() {
        let pem = rcgen_free_pem();
        let client = ServerClient::new("https://127.0.0.1:8443", pem, "t").unwrap();
        assert_eq!(client.url("vms/a b").as_str(), "https://127.0.0.1:8443/api/v1/vms/a%20b");
        let events = client.url("events?after=3&wait_seconds=20");
        assert_eq!(events.as_str(), "https://127.0.0.1:8443/api/v1/events?after=3&wait_seconds=20");
        assert!(!client.url("vms/..").as_str().contains(".."));
        for bad in ["http://x:1", "https://x/path", "x", "https://"] {
            assert_eq!(
                ServerClient::new(bad, pem, "t").unwrap_err().field.as_deref(),
                Some("server"),
                "{bad}"
            );
        }
        let no_pem = ServerClient::new("https://x", "nothing", "t").unwrap_err();
        assert_eq!(no_pem.field.as_deref(), Some("ca"));
        assert!(!format!("{client:?}").contains("\"t\""));
    }

    /// A self-signed P-256 certificate, valid until 2126.
    fn rcgen_free_pem() -> &'static str {
        include_str!("../../tests/ca.pem")
    }
}
