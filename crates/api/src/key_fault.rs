//! Why a key is unavailable.

use serde::{Deserialize, Serialize};

/// Why a key is unavailable, as the `reason` of a problem and of an alarm: stable, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum KeyFault {
    /// The provider's passphrase has not been given since the server's start.
    ProviderSealed,
    /// Nobody has said which certificate of the KMS to trust.
    NotTrusted,
    /// The provider has no client certificate yet.
    NoClientCertificate,
    /// The KMS cannot be connected to, or ends the connection.
    KmsUnreachable,
    /// The KMS takes the connection and does not answer in time.
    KmsTimeout,
    /// The KMS answers something that is no KMIP.
    KmsGarbage,
    /// The KMS speaks no version of KMIP that vmseal does.
    KmsVersion,
    /// The KMS shows a certificate that is not trusted, or not for its name.
    KmsUntrusted,
    /// The certificate of the KMS has expired.
    KmsCertificateExpired,
    /// The certificate of the KMS is not valid yet.
    KmsCertificateNotYetValid,
    /// The KMS does not accept the client certificate.
    ClientCertificateRefused,
    /// The client certificate has expired.
    ClientCertificateExpired,
    /// The client certificate is not valid yet.
    ClientCertificateNotYetValid,
    /// The KMS knows this client and does not give it the key: it belongs to another identity.
    KmsDenies,
    /// The KMS refuses for another reason.
    KmsRefuses,
    /// The KMS has no such key.
    KeyMissing,
    /// The key was never activated.
    KeyNotActive,
    /// The key is Deactivated: it opens what there is and encrypts nothing new.
    KeyDeactivated,
    /// The key is Compromised: it opens what there is and encrypts nothing new.
    KeyCompromised,
    /// The key is destroyed.
    KeyDestroyed,
    /// The key of this id has other bytes than the one that the VM was encrypted with.
    KeyMismatch,
    /// The object is no AES-256 key that the KMS gives out.
    KeyUnusable,
}

impl KeyFault {
    /// Whether it is a fault of the provider, which gives no key at all until it is fixed, and not of one
    /// key.
    #[must_use]
    pub fn is_of_provider(self) -> bool {
        match self {
            Self::ProviderSealed
            | Self::NotTrusted
            | Self::NoClientCertificate
            | Self::KmsUnreachable
            | Self::KmsTimeout
            | Self::KmsGarbage
            | Self::KmsVersion
            | Self::KmsUntrusted
            | Self::KmsCertificateExpired
            | Self::KmsCertificateNotYetValid
            | Self::ClientCertificateRefused
            | Self::ClientCertificateExpired
            | Self::ClientCertificateNotYetValid => true,
            Self::KmsDenies
            | Self::KmsRefuses
            | Self::KeyMissing
            | Self::KeyNotActive
            | Self::KeyDeactivated
            | Self::KeyCompromised
            | Self::KeyDestroyed
            | Self::KeyMismatch
            | Self::KeyUnusable => false,
        }
    }
}

impl KeyFault {
    /// Its name, as JSON has it.
    #[must_use]
    pub fn name(self) -> String {
        serde_json::to_value(self)
            .ok()
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default()
    }
}
