//! Certificates that expire soon: the server's, its authority's, those of hosts, of KMIP clients and of KMSs. Each
//! kind is checked in its own module; the alarm text and the time limit are common.

use jiff::{SignedDuration, Timestamp};

use crate::store::alarms::RaisedAlarm;

/// How long before its expiry a certificate raises an alarm: enough for two people to arrange another.
pub const WARN_BEFORE: SignedDuration = SignedDuration::from_hours(30 * 24);

/// The code of the alarm.
pub const CODE: &str = "certificate-expiring";

/// A certificate, and how to renew it.
pub struct ExpiringCertificate {
    /// Its name in the alarm, with an article.
    pub what: String,
    /// When it expires.
    pub until: Timestamp,
    /// How it is renewed.
    pub remedy: String,
}

/// The alarm about those of an owner's certificates that expire soon, or have expired.
#[must_use]
pub fn alarm(
    target: &str,
    certificates: &[ExpiringCertificate],
    now: Timestamp,
) -> Option<RaisedAlarm> {
    let soon = |it: &&ExpiringCertificate| it.until.duration_since(now) < WARN_BEFORE;
    let told: Vec<_> = certificates
        .iter()
        .filter(soon)
        .map(|it| {
            let verb = if it.until < now { "was" } else { "is" };
            format!("{} {verb} valid until {}: {}", it.what, it.until, it.remedy)
        })
        .collect();
    let (target, detail) = (target.to_owned(), told.join("; "));
    (!told.is_empty()).then_some(RaisedAlarm { code: CODE, target, detail, reason: None })
}

/// The alarm about the certificate (DER) of a host's agent.
#[must_use]
pub fn of_host(host: &str, certificate: Option<&[u8]>, now: Timestamp) -> Option<RaisedAlarm> {
    let certificate = ExpiringCertificate {
        what: format!("the certificate of host '{host}'"),
        until: until(certificate?)?,
        remedy: "have the host join again (vmseal host token, then vmseal agent join)".to_owned(),
    };
    alarm(host, &[certificate], now)
}

/// The alarm about the server's certificate, which it normally renews long before, and its authority's.
#[must_use]
pub fn of_server(own: &[u8], authority: &[u8], now: Timestamp) -> Option<RaisedAlarm> {
    let watched = |what: &str, der, remedy: &str| {
        let (what, remedy) = (what.to_owned(), remedy.to_owned());
        Some(ExpiringCertificate { what, until: until(der)?, remedy })
    };
    let own = watched(
        "the server's certificate",
        own,
        "the server renews it itself and could not; its log says why",
    );
    let authority = watched(
        "the certificate of the server's authority",
        authority,
        "without it no host and no client trusts the server; set up a new one",
    );
    let all: Vec<_> = own.into_iter().chain(authority).collect();
    alarm("server", &all, now)
}

/// When a certificate (DER) expires.
#[must_use]
pub fn until(der: &[u8]) -> Option<Timestamp> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    Timestamp::from_second(certificate.validity().not_after.timestamp()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate with its expiry.
    fn issued() -> (Vec<u8>, Timestamp) {
        let mut params = crate::setup::authority::valid_for("host", 365).unwrap();
        params.is_ca = rcgen::IsCa::ExplicitNoCa;
        let key = rcgen::KeyPair::generate().unwrap();
        let der = params.self_signed(&key).unwrap().der().to_vec();
        let until = until(&der).unwrap();
        (der, until)
    }

    #[test]
    fn expiring_certificates_of_hosts_and_the_server_are_reported_in_time() {
        let (der, until) = issued();
        let (before, soon) = (until - SignedDuration::from_hours(31 * 24), until - WARN_BEFORE);
        let soon = soon + SignedDuration::from_hours(1);
        assert!(
            of_host("one", Some(&der), before).is_none() && of_host("one", None, soon).is_none()
        );
        let alarm = of_host("one", Some(&der), soon).unwrap();
        assert_eq!((alarm.code, alarm.target.as_str()), (CODE, "one"));
        assert!(alarm.detail.contains("vmseal agent join"), "{}", alarm.detail);
        assert!(of_server(&der, &der, before).is_none());
        let alarm = of_server(&der, &der, soon).unwrap();
        assert!(alarm.detail.contains("the server's certificate is valid until"));
        assert!(alarm.detail.contains("of the server's authority"));
    }

    fn certificate(what: &str, until: &str) -> ExpiringCertificate {
        let (what, remedy) = (what.to_owned(), "renew it".to_owned());
        ExpiringCertificate { what, until: until.parse().unwrap(), remedy }
    }

    #[test]
    fn a_certificate_is_an_alarm_thirty_days_before_its_end() {
        let all = [
            certificate("the first", "2030-03-31T00:00:00Z"),
            certificate("the second", "2031-01-01T00:00:00Z"),
        ];
        let at = |now: &str| alarm("kms", &all, now.parse().unwrap()).map(|it| it.detail);
        assert_eq!(at("2030-02-28T23:00:00Z"), None);
        let soon = at("2030-03-01T01:00:00Z").unwrap();
        assert_eq!(soon, "the first is valid until 2030-03-31T00:00:00Z: renew it");
        let late = at("2031-02-01T00:00:00Z").unwrap();
        assert!(late.contains("the first was valid") && late.contains("the second was"), "{late}");
        assert!(alarm("kms", &[], Timestamp::MAX).is_none());
    }
}
