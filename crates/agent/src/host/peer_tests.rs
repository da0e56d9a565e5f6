//! A control plane's authority for tests, and which peers agents accept as the server.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::pki_types::UnixTime;
use rustls::server::danger::ClientCertVerifier;
use vmseal_api::client::host_server_name;
use vmseal_api::client::role::{HOST_ROLE, SERVER_ROLE};
use vmseal_api::client::verifier::Verifier;
use vmseal_api::id::HostId;
use zeroize::Zeroizing;

use crate::host::identity::Identity;

/// A control plane's authority, for tests.
pub struct Authority {
    pub certificate: rcgen::Certificate,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let certificate = params.self_signed(&key).unwrap();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    pub fn sign(&self, names: Vec<SanType>) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = names;
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    pub fn sign_request(&self, pem: &str) -> rcgen::Certificate {
        let request = rcgen::CertificateSigningRequestParams::from_pem(pem).unwrap();
        request.signed_by(&self.issuer).unwrap()
    }

    pub fn host(&self) -> Identity {
        let host = HostId::new();
        let name = SanType::DnsName(host_server_name(host).try_into().unwrap());
        let (certificate, key) = self.sign(vec![name]);
        Identity {
            host,
            name: "here".to_owned(),
            address: "127.0.0.1:0".to_owned(),
            server: "https://127.0.0.1:1".to_owned(),
            certificate: certificate.pem(),
            authority: self.certificate.pem(),
            key: Zeroizing::new(key.serialize_pem()),
        }
    }
}

#[test]
fn the_servers_certificate_is_accepted_and_a_hosts_or_strangers_is_not() {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let authority = Authority::new();
    let role = Verifier::server_as_client(authority.certificate.der().clone(), provider).unwrap();
    let accepted = |certificate: &rcgen::Certificate| {
        role.verify_client_cert(certificate.der(), &[], UnixTime::now()).is_ok()
    };
    let uri = |uri: &str| vec![SanType::URI(uri.try_into().unwrap())];
    let dns = |name: &str| vec![SanType::DnsName(name.try_into().unwrap())];
    assert!(accepted(&authority.sign(uri(SERVER_ROLE)).0));
    assert!(!accepted(&authority.sign(uri("urn:vmseal:server2")).0));
    assert!(!accepted(&authority.sign(dns("urn:vmseal:server")).0));
    assert!(!accepted(&authority.sign(vec![]).0));
    let both = [uri(SERVER_ROLE), uri(HOST_ROLE)].concat();
    assert!(!accepted(&authority.sign(both).0));
    assert!(!accepted(&Authority::new().sign(uri(SERVER_ROLE)).0));
}
