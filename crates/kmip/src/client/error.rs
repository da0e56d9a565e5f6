//! Errors of a server, distinct enough that an operator learns what to fix.

use std::fmt;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::{AlertDescription, CertificateError};
use vmseal_secret::MemoryError;

use super::settings::Endpoint;
use super::tls::Identity;
use crate::fields::Violation;
use crate::message::Refusal;
use crate::operation::{AnswerError, KeyId, UnusableKey};
use crate::ttlv::TooLong;
use crate::{OperationCode, ProtocolVersion, ResultReason};

/// Why a request to a server failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name has no address, or the resolver does not answer.
    #[error("the name of the KMS {server} cannot be resolved: {source}")]
    NotResolved {
        /// Which server.
        server: Endpoint,
        /// What the resolver says.
        source: io::Error,
    },
    /// Nothing listens on the port.
    #[error("the KMS {server} refuses connections: nothing listens on that port")]
    ConnectionRefused {
        /// Which server.
        server: Endpoint,
    },
    /// No route to the server.
    #[error("the KMS {server} cannot be reached: {source}")]
    Unreachable {
        /// Which server.
        server: Endpoint,
        /// What the kernel says.
        source: io::Error,
    },
    /// The TLS handshake failed.
    #[error("no TLS with the KMS {server}: {problem}")]
    Tls {
        /// Which server.
        server: Endpoint,
        /// Why.
        problem: TlsProblem,
    },
    /// A step timed out.
    #[error("the KMS {server}: {step} took longer than {after:?}")]
    TimedOut {
        /// Which server.
        server: Endpoint,
        /// The step.
        step: Step,
        /// The timeout.
        after: Duration,
    },
    /// The connection ended before the answer was complete.
    #[error("the KMS {server} ended the connection before its answer was complete")]
    ConnectionLost {
        /// Which server.
        server: Endpoint,
        /// The error of the kernel or of TLS; `None` if the server just closed the connection.
        source: Option<io::Error>,
    },
    /// The answer is not valid KMIP.
    #[error("the KMS {server} sends an answer that is not valid KMIP: {source}")]
    Violation {
        /// Which server.
        server: Endpoint,
        /// How.
        source: Violation,
    },
    /// The server refused.
    #[error("the KMS {server} refuses {operation}: {refusal}")]
    Refused {
        /// Which server.
        server: Endpoint,
        /// What it was asked.
        operation: OperationCode,
        /// Its reason.
        refusal: Refusal,
    },
    /// No common version.
    #[error("the KMS {server} speaks none of the KMIP versions that are allowed ({}); it speaks {}", list(.allowed), list(.offered))]
    VersionNotSupported {
        /// Which server.
        server: Endpoint,
        /// The versions that this side allows.
        allowed: Vec<ProtocolVersion>,
        /// The versions that the server speaks; empty if it does not say.
        offered: Vec<ProtocolVersion>,
    },
    /// The object exists, but vmseal cannot use it as a key.
    #[error("the KMS {server}: {problem}")]
    UnusableKey {
        /// Which server.
        server: Endpoint,
        /// Why.
        problem: UnusableKey,
    },
    /// A request that changes something got no answer: the server may have executed it. It was not
    /// repeated.
    #[error("it is not known whether the KMS did {operation}: {source}")]
    OutcomeUnknown {
        /// What it was asked.
        operation: OperationCode,
        /// Why there is no answer.
        source: Box<Error>,
    },
    /// A key was created but could not be activated; it exists, unused.
    #[error("the KMS made the key {id}, which could not be activated: {source}")]
    NotActivated {
        /// The key.
        id: KeyId,
        /// Why.
        source: Box<Error>,
    },
    /// The request would be too long.
    #[error("the request cannot be sent: {0}")]
    Request(#[from] TooLong),
    /// No memory for the answer.
    #[error("no memory for an answer of the KMS: {0}")]
    Memory(#[from] MemoryError),
}

impl Error {
    /// The reason, if the server understood the request and refused it.
    #[must_use]
    pub fn refusal(&self) -> Option<ResultReason> {
        match self {
            Self::Refused { refusal, .. } => Some(refusal.reason),
            _ => None,
        }
    }

    pub(super) fn answer(server: &Endpoint, error: AnswerError) -> Self {
        let server = server.clone();
        match error {
            AnswerError::Violation(source) => Self::Violation { server, source },
            AnswerError::Key(problem) => Self::UnusableKey { server, problem },
            AnswerError::Memory(error) => Self::Memory(error),
        }
    }

    /// Classifies an error of a read or write on an open connection.
    pub(super) fn broken(server: &Endpoint, own: OwnCertificate, error: io::Error) -> Self {
        let server = server.clone();
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            // In TLS 1.3 the refusal of a client certificate arrives after the handshake.
            Some(tls) => Self::Tls { server, problem: TlsProblem::of(tls, own) },
            None => Self::ConnectionLost { server, source: Some(error) },
        }
    }

    /// Whether the server rejected the client that sent a request: then it read nothing of the request.
    pub(super) fn is_not_let_in(&self) -> bool {
        matches!(self, Self::Tls { problem: TlsProblem::ClientCertificateRefused { .. }, .. })
    }
}

fn list(versions: &[ProtocolVersion]) -> String {
    match versions {
        [] => "none that it names".to_owned(),
        some => some.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// A step with a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Waiting for a free connection of the pool.
    Wait,
    /// Resolving the name.
    Resolve,
    /// Connecting.
    Connect,
    /// The TLS handshake.
    Handshake,
    /// Sending the request.
    Write,
    /// Receiving the answer.
    Read,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wait => "waiting for a free connection",
            Self::Resolve => "resolving the name",
            Self::Connect => "connecting",
            Self::Handshake => "the TLS handshake",
            Self::Write => "sending the request",
            Self::Read => "waiting for the answer",
        })
    }
}

/// Whether this client's certificate is valid by this machine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnCertificate {
    /// It is valid: the server does not know it or rejects it.
    Valid,
    /// It has expired.
    Expired,
    /// It is not valid yet.
    NotYetValid,
}

impl OwnCertificate {
    pub(super) fn now(identity: &Identity) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (from, to) = identity.validity();
        match i64::try_from(now) {
            Ok(now) if now < from => Self::NotYetValid,
            Ok(now) if now <= to => Self::Valid,
            _ => Self::Expired,
        }
    }
}

/// Why the TLS handshake failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsProblem {
    /// Not signed by a trusted authority.
    #[error("its certificate was issued by an authority that is not trusted")]
    UntrustedIssuer,
    /// Not the certificate that the operator trusted.
    #[error("its certificate differs from the one that was trusted")]
    OtherCertificate,
    /// Expired.
    #[error("its certificate has expired")]
    Expired,
    /// Not valid yet.
    #[error("its certificate is not valid yet: compare the clocks")]
    NotYetValid,
    /// For another server.
    #[error("its certificate is not for this name or address")]
    WrongName,
    /// Another fault of the certificate.
    #[error("its certificate cannot be used: {0}")]
    BadCertificate(String),
    /// The server does not accept this client.
    #[error("it refuses the client certificate ({alert}){}", own_certificate(*.own))]
    ClientCertificateRefused {
        /// The TLS alert that it sent.
        alert: String,
        /// What this side can say of its certificate.
        own: OwnCertificate,
    },
    /// The server ended the handshake without a reason; many do so to refuse a client certificate.
    #[error("it ends the handshake without a reason; it may refuse the client certificate{}", own_certificate(*.own))]
    HandshakeEnded {
        /// What this side can say of its certificate.
        own: OwnCertificate,
    },
    /// No common version or cipher suite.
    #[error("there is no common TLS version or cipher suite: {0}")]
    NothingInCommon(String),
    /// The server does not speak TLS.
    #[error("it does not speak TLS: {0}")]
    NotTls(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

fn own_certificate(own: OwnCertificate) -> &'static str {
    match own {
        OwnCertificate::Valid => "",
        OwnCertificate::Expired => ", which has expired",
        OwnCertificate::NotYetValid => ", which is not valid yet",
    }
}

impl TlsProblem {
    /// Classifies an error of the handshake.
    pub(super) fn of_handshake(error: &io::Error, own: OwnCertificate) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(error) => Self::of(error, own),
            None => Self::HandshakeEnded { own },
        }
    }

    fn of(error: &rustls::Error, own: OwnCertificate) -> Self {
        use rustls::Error as Tls;
        match error {
            Tls::InvalidCertificate(problem) => Self::of_certificate(problem),
            Tls::AlertReceived(alert) => Self::of_alert(*alert, own),
            Tls::PeerIncompatible(_) => Self::NothingInCommon(error.to_string()),
            Tls::InvalidMessage(_) | Tls::InappropriateMessage { .. } => {
                Self::NotTls(error.to_string())
            }
            _ => Self::Other(error.to_string()),
        }
    }

    fn of_certificate(problem: &CertificateError) -> Self {
        match problem {
            CertificateError::UnknownIssuer => Self::UntrustedIssuer,
            CertificateError::ApplicationVerificationFailure => Self::OtherCertificate,
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Self::NotYetValid
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Self::WrongName
            }
            other => Self::BadCertificate(other.to_string()),
        }
    }

    fn of_alert(alert: AlertDescription, own: OwnCertificate) -> Self {
        use AlertDescription as Alert;
        match alert {
            Alert::NoCertificate
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::AccessDenied
            | Alert::CertificateRequired => {
                Self::ClientCertificateRefused { alert: format!("{alert:?}"), own }
            }
            Alert::ProtocolVersion | Alert::HandshakeFailure | Alert::InsufficientSecurity => {
                Self::NothingInCommon(format!("{alert:?}"))
            }
            other => Self::Other(format!("it sent the alert {other:?}")),
        }
    }
}
