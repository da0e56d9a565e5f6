//! Fetches the certificate of a server, so that an operator can compare and trust it.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use rustls::pki_types::CertificateDer;
use tokio_rustls::TlsConnector;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

use super::connection::{connect, within};
use super::error::{Error, OwnCertificate, Step, TlsProblem};
use super::settings::{Endpoint, Timeouts};
use super::tls::{Trust, recorder};

/// SHA-256 of a certificate's DER form, shown as `AB:CD:…`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Of a certificate.
    #[must_use]
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, certificate).as_ref());
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let colon = if index == 0 { "" } else { ":" };
            write!(f, "{colon}{byte:02X}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The certificate of a server that is not trusted yet. Only the fingerprint is verified; the rest is
/// the server's own claim.
#[derive(Clone, Debug)]
pub struct ShownCertificate {
    /// The certificate.
    pub certificate: CertificateDer<'static>,
    /// The rest of the chain: its issuer and so on.
    pub chain: Vec<CertificateDer<'static>>,
    /// An operator compares it with the one that the KMS displays.
    pub fingerprint: Fingerprint,
    /// The subject.
    pub subject: String,
    /// The issuer.
    pub issuer: String,
    /// The DNS names and IP addresses that it is for.
    pub names: Vec<String>,
    /// The start of its validity, in seconds since 1970.
    pub not_before: i64,
    /// The end of its validity, in seconds since 1970.
    pub not_after: i64,
}

impl ShownCertificate {
    /// Trusts exactly this certificate.
    #[must_use]
    pub fn pin(&self) -> Trust {
        Trust::Pinned(self.certificate.clone())
    }

    fn read(mut shown: Vec<CertificateDer<'static>>) -> Option<Self> {
        if shown.is_empty() {
            return None;
        }
        let certificate = shown.remove(0);
        let (_, parsed) = X509Certificate::from_der(&certificate).ok()?;
        let names = parsed.subject_alternative_name().ok().flatten();
        let names = names.iter().flat_map(|names| &names.value.general_names);
        Some(Self {
            fingerprint: Fingerprint::of(&certificate),
            subject: shown_name(&parsed.subject().to_string()),
            issuer: shown_name(&parsed.issuer().to_string()),
            names: names.filter_map(name).collect(),
            not_before: parsed.validity().not_before.timestamp(),
            not_after: parsed.validity().not_after.timestamp(),
            certificate: certificate.clone(),
            chain: shown,
        })
    }
}

/// Makes a name from an untrusted certificate safe for a terminal.
fn shown_name(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(200).collect()
}

fn name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some(shown_name(name)),
        GeneralName::IPAddress(bytes) => match (<[u8; 4]>::try_from(*bytes), *bytes) {
            (Ok(v4), _) => Some(std::net::Ipv4Addr::from(v4).to_string()),
            (_, bytes) => {
                <[u8; 16]>::try_from(bytes).ok().map(|v6| std::net::Ipv6Addr::from(v6).to_string())
            }
        },
        _ => None,
    }
}

/// Connects to a server without a client certificate and reads the server's. Sends no request, and
/// trusts nothing.
///
/// # Errors
/// [`Error`]: there is no server, or it sends no certificate.
pub async fn show_certificate(
    server: &Endpoint,
    timeouts: &Timeouts,
) -> Result<ShownCertificate, Error> {
    let failed = |problem| Error::Tls { server: server.clone(), problem };
    let (config, recorder) =
        recorder().map_err(|error| failed(TlsProblem::Other(error.to_string())))?;
    let socket = connect(server, timeouts.connect).await?;
    let handshake = within(server, Step::Handshake, timeouts.handshake, async {
        Ok(TlsConnector::from(Arc::new(config)).connect(server.name(), socket).await)
    });
    let outcome = handshake.await?;
    if let Some(shown) = ShownCertificate::read(recorder.seen()) {
        return Ok(shown);
    }
    Err(failed(match outcome {
        Err(error) => TlsProblem::of_handshake(&error, OwnCertificate::Valid),
        Ok(_) => TlsProblem::BadCertificate("it sends none".to_owned()),
    }))
}
