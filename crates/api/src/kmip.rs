//! Key providers that are key servers over KMIP, in the REST API.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::passphrase::SealedPassphrase;
use crate::problem::Problem;

/// The most servers of one provider.
pub const SERVERS_MAX: usize = 8;

/// The longest name of a server, in bytes: that of DNS.
pub const HOST_MAX: usize = 253;

/// The characters of a DNS name or an IP address, as a regular expression of ECMA 262. Not all that they make are either.
pub const HOST_PATTERN: &str = "^[A-Za-z0-9._:-]+$";

/// The longest PEM that is accepted, in bytes: a chain or a few authorities.
pub const PEM_MAX: usize = 64 * 1024;

/// The longest common name of a certificate, in characters (RFC 5280, ub-common-name).
pub const COMMON_NAME_MAX: usize = 64;

/// What [`check_common_name`] accepts within [`COMMON_NAME_MAX`], as a regular expression of ECMA 262.
pub const COMMON_NAME_PATTERN: &str = r"^[^\x00-\x1f\x7f-\x9f]+$";

/// Checks the common name of a certificate.
///
/// # Errors
/// What is allowed.
pub fn check_common_name(name: &str) -> Result<(), String> {
    let length = name.chars().count();
    if (1..=COMMON_NAME_MAX).contains(&length) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    Err(format!("a common name has 1 to {COMMON_NAME_MAX} printable characters"))
}

/// What a KMIP provider is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KmipDetails {
    /// Its servers, in the order in which they are asked.
    pub servers: Vec<KmipServer>,
    /// The certificate that is shown to them; none until there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<Certificate>,
    /// Another private key was made (`replace`), and waits for its certificate.
    #[serde(default)]
    pub next_key: bool,
}

/// A server of a KMIP provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KmipServer {
    /// Its name within the provider.
    pub alias: String,
    /// A DNS name or an IP address.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Whose word is taken for its certificate; none until an operator has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<KmipTrust>,
    /// What came of the last attempt to use it; none until there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<KmipSeen>,
}

/// Whose word is taken for a server's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum KmipTrust {
    /// An operator's, for this very certificate.
    Pinned {
        /// The certificate.
        certificate: Certificate,
    },
    /// Authorities'.
    Authorities {
        /// Their certificates.
        certificates: Vec<Certificate>,
    },
}

/// What came of the last attempt to use a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KmipSeen {
    /// When.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// The version of KMIP that is spoken with it (`1.4`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Its maker and product, in its own words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vendor: Option<String>,
    /// What is wrong with it; none when it can be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

/// A certificate, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Certificate {
    /// SHA-256 of its DER form (`AB:CD:…`).
    pub fingerprint: String,
    /// Whose it is.
    pub subject: String,
    /// Who signed it.
    pub issuer: String,
    /// Since when it is valid.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub not_before: Timestamp,
    /// Until when it is valid.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub not_after: Timestamp,
}

/// The certificate that a server shows now. Nobody has vouched for it yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KmipShown {
    /// The certificate.
    pub certificate: Certificate,
    /// The DNS names and IP addresses that it is for.
    pub names: Vec<String>,
    /// Whether this provider trusts it as things stand.
    pub trusted: bool,
}

/// What came of a test of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProviderTest {
    /// One for each server, in their order.
    pub servers: Vec<KmipTested>,
    /// Whether every server that can be used had the key that was made at one of them; none where no key was
    /// made, or one server alone can be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicate: Option<bool>,
}

/// What came of a test of one server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KmipTested {
    /// Its name within the provider.
    pub alias: String,
    /// What it is, or what is wrong with it.
    pub seen: KmipSeen,
    /// What it did with the key of the test; none where there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KmipKeyTested>,
}

/// What a server did with the key of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum KmipKeyTested {
    /// It made the key, gave it and destroyed it.
    Made,
    /// It gave the key that another server had made.
    Read,
    /// It did not have the key that another server had made: they do not replicate.
    Missing,
    /// It has other bytes under the id of the key that another server had made: they do not replicate.
    OtherKey,
}

/// A KMIP provider that is added: the servers of one key management system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddKmip {
    /// Its servers, in the order in which they are asked; they have to replicate their keys.
    pub servers: Vec<AddKmipServer>,
}

/// A server of a KMIP provider that is added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddKmipServer {
    /// Its name within the provider.
    pub alias: String,
    /// A DNS name or an IP address; its certificate has to be for this one.
    pub host: String,
    /// Its port; KMIP's own is 5696.
    pub port: u16,
}

/// Trusts a server: exactly one of the two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TrustServer {
    /// The certificate with this SHA-256 fingerprint, if the server shows it now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// What these authorities (PEM) sign.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authorities: Option<String>,
}

/// Whose name a client certificate or a request for one carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ClientName {
    /// The common name. Many KMSs take it for the client's identity: a renewal has to keep it.
    pub common_name: String,
    /// Make a new private key, and take the certificate or the request for that one. The key that is there is not
    /// needed: its passphrase or its file may be lost.
    #[serde(default)]
    pub replace: bool,
    /// The passphrase that seals the new key; none takes the server's credential.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SealedPassphrase>,
    /// Replace a certificate that has another name.
    #[serde(default)]
    pub force: bool,
}

/// A certificate or a certificate request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Pem {
    /// PEM.
    pub pem: String,
}

/// Sets the client certificate: of the key that the provider has, or with another key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetClientCertificate {
    /// The certificate, with its chain (PEM).
    pub certificate: String,
    /// Its private key (PKCS #8 DER), sealed as a passphrase is; none for the key that is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_key: Option<SealedPassphrase>,
    /// The provider's passphrase, which seals another key, or opens one that was made for this certificate; none
    /// takes the server's credential.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SealedPassphrase>,
    /// The key that is there is not needed: its passphrase or its file may be lost. `passphrase` is the
    /// provider's from now on.
    #[serde(default)]
    pub replace: bool,
    /// Replace a certificate that is valid or has another name.
    #[serde(default)]
    pub force: bool,
}

/// Changes the address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetKmipServer {
    /// A DNS name or an IP address; its certificate has to be for this one.
    pub host: String,
    /// Its port; KMIP's own is 5696.
    pub port: u16,
}

/// Moves a server in the order in which servers are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveKmipServer {
    /// Its place; the first one is 1.
    pub place: usize,
}

/// Tests a provider.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TestProvider {
    /// Also make a key at one server, read it at each, and destroy it.
    #[serde(default)]
    pub key: bool,
}
