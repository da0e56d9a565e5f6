//! The code in `vmseal-filter`: it holds the disk keys, so it maps no code that it does not need.

use std::process::Command;

use vmseal_tests::program;
use vmseal_tests::scan::contains;

/// Symbols of HTTP, SQL and TLS code, as linkers keep them in programs that use it.
const UNWANTED: [&str; 4] = ["rustls", "hyper", "sqlite3_", "SSL_CTX_new"];

fn found_in(name: &str) -> Vec<&'static str> {
    let path = program(name).expect("built before the tests");
    // Debugging information is never mapped, and names what sibling code in the same compilation unit uses.
    let directory = tempfile::tempdir().expect("a place for the copy");
    let copy = directory.path().join(name);
    let status = Command::new("strip").arg("--strip-debug").arg("-o").arg(&copy).arg(path).status();
    assert!(status.expect("binutils, without which nothing links").success());
    let content = std::fs::read(copy).expect("readable");
    let holds = |text: &str| contains(&content, text);
    UNWANTED.into_iter().filter(|text| holds(text)).collect()
}

#[test]
fn the_filter_has_no_http_sql_or_tls_code() {
    assert_eq!(found_in("vmseal-filter"), Vec::<&str>::new());
    // The same search finds them in a program that has them.
    assert_eq!(found_in("vmseal"), ["rustls", "hyper", "sqlite3_"]);
}
