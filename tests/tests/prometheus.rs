//! Debian's Prometheus with the configuration of docs/observability.md: it finds server and host by itself, and scrapes both.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::installation::Installation;
use vmseal_tests::process::Process;

/// Where the documented configuration has what this installation has elsewhere.
const SERVER: &str = "https://192.0.2.10:8443";
const TOKEN: &str = "/etc/prometheus/vmseal.token";
const CA: &str = "/etc/prometheus/vmseal-ca.pem";

/// The lines between "```yaml" and "```" in the page.
fn documented() -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/observability.md");
    let page = std::fs::read_to_string(page).unwrap();
    let begun = page.split("```yaml\n").nth(1).expect("the page has an example");
    begun.split("```").next().unwrap().to_owned()
}

/// Asks Prometheus; the values of what it has, by a label.
fn ask(port: u16, query: &str, label: &str) -> Option<Vec<(String, String)>> {
    let url = format!("http://127.0.0.1:{port}/api/v1/query");
    let query = format!("query={query}");
    let asked = ["-sS", "--get", &url, "--data-urlencode", &query];
    let answer = Command::new("curl").args(asked).output().unwrap();
    let answer: Value = serde_json::from_slice(&answer.stdout).ok()?;
    let found = answer["data"]["result"].as_array()?;
    let mut values: Vec<_> = found
        .iter()
        .map(|it| {
            let value = it["value"][1].as_str().unwrap_or_default();
            (it["metric"][label].as_str().unwrap_or_default().to_owned(), value.to_owned())
        })
        .collect();
    values.sort();
    Some(values)
}

/// What Prometheus says of its targets.
fn targets(port: u16) -> String {
    let url = format!("http://127.0.0.1:{port}/api/v1/targets?state=active");
    let answer = Command::new("curl").args(["-sS", &url]).output().unwrap();
    String::from_utf8_lossy(&answer.stdout).into_owned()
}

/// Where Prometheus and its tools are; none where its package cannot be had.
fn programs() -> Option<PathBuf> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/unpack-prometheus");
    let unpacked = Command::new(script).output().unwrap();
    let printed = String::from_utf8(unpacked.stdout).unwrap();
    unpacked.status.success().then(|| PathBuf::from(printed.trim_end()))
}

#[test]
fn prometheus_scrapes_with_the_documented_configuration() {
    let Some(programs) = programs() else {
        vmseal_tests::skipped("Debian's package prometheus cannot be had");
        return;
    };
    let here = Installation::new().unwrap();
    let text = documented();
    for place in [SERVER, TOKEN, CA] {
        assert!(text.contains(place), "{place} is not in the documented configuration: {text}");
    }
    let own = |name: &str| here.path(name).to_str().unwrap().to_owned();
    let text = text.replace(SERVER, &here.url());
    let text = text.replace(TOKEN, &own("server/metrics.token")).replace(CA, &own("server/ca.pem"));
    let text = format!("global: {{ scrape_interval: 1s }}\n{text}");
    std::fs::write(here.path("prometheus.yml"), text).unwrap();
    let file = own("prometheus.yml");
    let checked =
        Command::new(programs.join("promtool")).args(["check", "config", &file]).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.success(), "{said}{}", String::from_utf8_lossy(&checked.stderr));

    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = Command::new(programs.join("prometheus"));
    command.arg(format!("--config.file={file}"));
    command.arg(format!("--storage.tsdb.path={}", own("prometheus")));
    command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
    let log = here.path("prometheus.log");
    let _prometheus = Process::start(&mut command, &log).unwrap();
    let up = eventually("two targets are up", || {
        let up = ask(port, "up{job=\"vmseal\"}", "instance")?;
        (up.len() == 2 && up.iter().all(|(_, value)| value == "1")).then_some(up)
    });
    let said = std::fs::read_to_string(&log).unwrap();
    let up = up.unwrap_or_else(|error| panic!("{error}: {}: {said}", targets(port)));
    assert!(up.iter().any(|(instance, _)| instance == "here"), "{up:?}");
    let one = |label: &str| vec![(label.to_owned(), "1".to_owned())];
    assert_eq!(ask(port, "vmseal_host_up", "__name__").unwrap(), one("vmseal_host_up"));
    let capacity = ask(port, "vmseal_datastore_capacity_bytes > bool 0", "datastore").unwrap();
    assert_eq!(capacity, one("local"));
}
