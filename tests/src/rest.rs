//! The REST API as any HTTP client sees it: curl, without a line of vmseal in between.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::installation::{Installation, text};

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    /// The body as text.
    pub text: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_str(&self.text).with_context(|| format!("not JSON: {self:?}"))
    }
}

/// Who asks.
pub enum Caller<'a> {
    /// The administrator.
    Admin,
    /// Nobody: no credentials at all.
    Nobody,
    /// Somebody with this `Authorization` header.
    Authorization(&'a str),
}

/// Calls `path` (from the root) of the server with further arguments for curl.
pub fn call(
    here: &Installation,
    caller: &Caller<'_>,
    path: &str,
    arguments: &[&str],
) -> anyhow::Result<Answer> {
    let authorization = match caller {
        Caller::Nobody => None,
        Caller::Authorization(value) => Some((*value).to_owned()),
        Caller::Admin => {
            let token = std::fs::read_to_string(here.path("server/admin.token"))?;
            Some(format!("Bearer {}", token.trim()))
        }
    };
    let directory = tempfile::tempdir()?;
    let mut command = curl(&here.path("server/ca.pem"), directory.path())?;
    if let Some(value) = authorization {
        // From a file: a token does not belong in an argument list, not even in a test.
        let header = directory.path().join("header");
        std::fs::write(&header, format!("Authorization: {value}\n"))?;
        command.arg("-H").arg(format!("@{}", header.display()));
    }
    command.args(arguments).arg(format!("{}{path}", here.url()));
    let output = command.output().context("cannot run curl")?;
    ensure!(output.status.success(), "curl: {}", String::from_utf8_lossy(&output.stderr));
    let head = std::fs::read_to_string(directory.path().join("head"))?.to_lowercase();
    // After "100 Continue" the answer proper follows: the last status line counts.
    let status = head
        .lines()
        .rfind(|line| line.starts_with("http/"))
        .and_then(|line| line.split(' ').nth(1)?.parse().ok())
        .context("no status line")?;
    let text = std::fs::read_to_string(directory.path().join("body")).unwrap_or_default();
    Ok(Answer { status, head, text })
}

/// curl that trusts one authority, and leaves what it gets as files `head` and `body`.
fn curl(authority: &Path, directory: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new("curl");
    command
        .args(["-q", "--silent", "--show-error", "--max-time", "60", "--noproxy", "*"])
        .args(["--cacert", text(authority)?])
        .arg("-D")
        .arg(directory.join("head"))
        .arg("-o")
        .arg(directory.join("body"));
    Ok(command)
}

/// The arguments of a request with a JSON body.
#[must_use]
pub fn json_body<'a>(method: &'a str, body: &'a str) -> [&'a str; 6] {
    ["-X", method, "-H", "Content-Type: application/json", "--data-binary", body]
}

/// The metrics at `path`.
pub fn scrape(here: &Installation, path: &str) -> anyhow::Result<String> {
    let answer = call(here, &Caller::Admin, path, &[])?;
    let format = answer.head.contains("openmetrics") || answer.head.contains("json");
    ensure!(answer.status == 200 && format, "no metrics at {path}: {answer:?}");
    Ok(answer.text)
}

/// Writes the metrics of server and host beside the logs, for the same search.
pub fn keep_metrics(here: &Installation) -> anyhow::Result<()> {
    for (name, path) in [("server.prom", "/metrics"), ("host.prom", "/metrics/hosts/here")] {
        let told = scrape(here, path)?;
        ensure!(told.contains("vmseal_"), "nothing at {path}: {told}");
        std::fs::write(here.path(name), told)?;
    }
    Ok(())
}
