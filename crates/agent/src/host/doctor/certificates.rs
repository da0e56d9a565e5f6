//! Certificates: whether they are valid, and for how long.

use std::path::Path;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroizing;

use super::Finding;
use crate::host::identity::Identity;

/// A warning is given when less time than this is left, in days.
const SOON: i64 = 30;

const DAY: i64 = 24 * 3600;

/// The certificates of a server on this machine, where there is one.
pub fn of_server(data_dir: &Path) -> Vec<Finding> {
    const RESTART: &str = "restart the server: it makes a new one";
    const AUTHORITY: &str = "hosts and clients trust no server after that: plan a new control plane, and join the hosts to it";
    let mut findings = Vec::new();
    for (check, file, remedy) in
        [("server-authority", "ca.pem", AUTHORITY), ("server-certificate", "server.pem", RESTART)]
    {
        let path = data_dir.join(file);
        match std::fs::read(&path).map(Zeroizing::new) {
            Ok(pem) => findings.push(judge(check, &pem, remedy)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => findings.push(Finding::warning(
                check,
                format!("{} cannot be read: {error}", path.display()),
                "run this as the server's user, or as root",
            )),
        }
    }
    findings
}

/// A host's certificate, and that of the authority it trusts.
pub fn of_host(identity: &Identity) -> Vec<Finding> {
    const JOIN: &str = "join the server again: vmseal agent join";
    vec![
        judge("host-certificate", identity.certificate.as_bytes(), JOIN),
        judge("host-authority", identity.authority.as_bytes(), JOIN),
    ]
}

fn judge(check: &str, pem: &[u8], remedy: &str) -> Finding {
    let der = match CertificateDer::from_pem_slice(pem) {
        Ok(der) => der,
        Err(error) => {
            return Finding::failed(check, format!("the file has no certificate: {error}"), remedy);
        }
    };
    match X509Certificate::from_der(&der) {
        Ok((_, certificate)) => {
            let validity = certificate.validity();
            let (from, until) = (validity.not_before.timestamp(), validity.not_after.timestamp());
            judge_times(check, (from, until), Timestamp::now().as_second(), remedy)
        }
        Err(error) => Finding::failed(check, format!("it is not a certificate: {error}"), remedy),
    }
}

fn judge_times(check: &str, (from, until): (i64, i64), now: i64, remedy: &str) -> Finding {
    let date = |at: i64| Timestamp::from_second(at).map(|at| at.to_string()).unwrap_or_default();
    if now < from {
        let found = format!("it is not valid before {}", date(from));
        return Finding::failed(check, found, "set this machine's clock");
    }
    if now > until {
        return Finding::failed(check, format!("it expired at {}", date(until)), remedy);
    }
    let days = (until - now) / DAY;
    let found = format!("it is valid until {} ({days} days)", date(until));
    if days < SOON { Finding::warning(check, found, remedy) } else { Finding::ok(check, found) }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn certificates_are_judged_by_their_times() {
        let at = |now: i64| judge_times("it", (10 * DAY, 100 * DAY), now, "renew").result;
        assert_eq!(at(9 * DAY), Verdict::Failed);
        assert_eq!(at(10 * DAY), Verdict::Ok);
        assert_eq!(at(70 * DAY), Verdict::Ok);
        assert_eq!(at(71 * DAY), Verdict::Warning);
        assert_eq!(at(100 * DAY + 1), Verdict::Failed);
        assert_eq!(judge("it", b"nonsense", "renew").result, Verdict::Failed);
        assert_eq!(of_server(Path::new("/nowhere")), []);
    }
}
