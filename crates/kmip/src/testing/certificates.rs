//! Certificates for a KMS: P-256, as PyKMIP and rustls have no common cipher suite with RSA.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
};
use vmseal_secret::SecretBytes;

use crate::client::{Identity, Trust};

/// When a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// 2020 to 2119.
    Now,
    /// Until 2021.
    Expired,
    /// From 2110 on.
    NotYet,
}

/// A certificate with its key.
pub struct Issued {
    /// PEM.
    pub certificate: String,
    key: KeyPair,
}

impl Issued {
    /// The identity of a client with this certificate.
    #[must_use]
    pub fn identity(&self) -> Identity {
        Identity::new(&self.certificate, &self.private_key())
            .expect("rcgen makes good certificates")
    }

    /// The private key, PKCS #8 DER.
    #[must_use]
    pub fn private_key(&self) -> SecretBytes {
        SecretBytes::from_wiped(&mut self.key.serialize_der()).expect("memory for a key")
    }

    /// Trusts exactly this certificate.
    #[must_use]
    pub fn pin(&self) -> Trust {
        Trust::pinned(&self.certificate).expect("rcgen makes good certificates")
    }

    /// Writes `NAME.pem` and `NAME.key`, both PEM.
    pub fn write(&self, directory: &Path, name: &str) {
        put(directory, &format!("{name}.pem"), &self.certificate);
        put(directory, &format!("{name}.key"), &self.key.serialize_pem());
    }
}

pub(super) fn put(directory: &Path, name: &str, text: &str) {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// A certificate authority for tests.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

fn key() -> KeyPair {
    KeyPair::generate().expect("AWS-LC makes P-256 keys")
}

fn params(common_name: &str, names: &[&str], validity: Validity) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).expect("names of a test");
    params.distinguished_name.push(DnType::CommonName, common_name);
    let (from, to) = match validity {
        Validity::Now => (2020, 2119),
        Validity::Expired => (2020, 2021),
        Validity::NotYet => (2110, 2119),
    };
    params.not_before = date_time_ymd(from, 1, 1);
    params.not_after = date_time_ymd(to, 1, 1);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params
}

impl Authority {
    /// A new one.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let mut params = params(name, &[], Validity::Now);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = key();
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// Its certificate, PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Trusts what it signs.
    #[must_use]
    pub fn trust(&self) -> Trust {
        Trust::authorities(&self.certificate).expect("rcgen makes good certificates")
    }

    fn issue(
        &self,
        mut params: CertificateParams,
        usage: Option<ExtendedKeyUsagePurpose>,
    ) -> Issued {
        params.extended_key_usages = usage.into_iter().collect();
        let key = key();
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
        Issued { certificate, key }
    }

    /// A server certificate for names and addresses.
    #[must_use]
    pub fn server(&self, names: &[&str], validity: Validity) -> Issued {
        self.issue(params("kms", names, validity), Some(ExtendedKeyUsagePurpose::ServerAuth))
    }

    /// A client certificate; PyKMIP uses its common name as the client's identity.
    #[must_use]
    pub fn client(&self, common_name: &str, validity: Validity) -> Issued {
        let usage = Some(ExtendedKeyUsagePurpose::ClientAuth);
        self.issue(params(common_name, &[], validity), usage)
    }

    /// Signs a client's certificate request (PEM); returns the certificate, PEM.
    #[must_use]
    pub fn sign(&self, request: &str) -> String {
        let mut request =
            CertificateSigningRequestParams::from_pem(request).expect("a certificate request");
        request.params.not_before = date_time_ymd(2020, 1, 1);
        request.params.not_after = date_time_ymd(2119, 1, 1);
        request.params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        request.signed_by(&self.issuer).expect("a certificate").pem()
    }

    /// A client certificate without the extended key usage for clients: PyKMIP refuses it in KMIP.
    #[must_use]
    pub fn client_without_usage(&self, common_name: &str) -> Issued {
        self.issue(params(common_name, &[], Validity::Now), None)
    }
}

/// A self-signed server certificate, as a KMS has after its installation.
#[must_use]
pub fn self_signed(names: &[&str], validity: Validity) -> Issued {
    let mut params = params("kms", names, validity);
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = key();
    let certificate = params.self_signed(&key).expect("a certificate").pem();
    Issued { certificate, key }
}
