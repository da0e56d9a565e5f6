//! Failures of a KMS as problems of the API: the cause and the remedy.

use vmseal_api::key_fault::KeyFault;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::client::{Error, OwnCertificate, Step, TlsProblem};
use vmseal_kmip::{OperationCode, ResultReason, State};

/// An error of a server of the provider `name`.
pub(super) fn of(name: &str, error: &Error) -> Problem {
    let (code, fault) = match error {
        Error::Request(_) | Error::Memory(_) => return crate::internal(error),
        // The KMS was not asked, so its state is unknown.
        Error::TimedOut { step: Step::Wait, after, .. } => {
            let detail = format!(
                "key provider '{name}': this server has more to ask its KMS than it answers, and waited {} s for its turn. It is tried again; see how long the KMS takes (vmseal provider test {name})",
                after.as_secs()
            );
            return Problem::new(ErrorCode::TimedOut, detail);
        }
        Error::Refused { operation, refusal, .. }
            if refusal.reason == ResultReason::PermissionDenied
                && !matches!(operation, OperationCode::Get | OperationCode::GetAttributes) =>
        {
            let detail = format!(
                "key provider '{name}': {error}. Give the client that `vmseal provider show {name}` shows a role at the KMS that may Create, Locate, Activate, Get, Revoke and Destroy keys; a key that was made under another name of the client is another client's"
            );
            return Problem::new(ErrorCode::Forbidden, detail).because(KeyFault::KmsDenies);
        }
        Error::Tls {
            problem: TlsProblem::HandshakeEnded { own: OwnCertificate::Valid }, ..
        } => {
            let detail = format!(
                "key provider '{name}': {error}. See that it is the KMIP port of a KMS that runs, and whether its log says that it refuses the client certificate which `vmseal provider show {name}` shows"
            );
            return Problem::new(ErrorCode::Unreachable, detail).because(KeyFault::KmsUnreachable);
        }
        // Whatever it was: the outcome is unknown, and a retry will show it.
        Error::OutcomeUnknown { source, .. } => (ErrorCode::Unreachable, kind(source).1),
        error => kind(error),
    };
    new(name, code, fault, &error.to_string())
}

/// A problem of the provider `name` with its remedy.
pub(super) fn new(name: &str, code: ErrorCode, fault: KeyFault, what: &str) -> Problem {
    let detail = format!("key provider '{name}': {what}. {}", remedy(fault, name));
    Problem::new(code, detail).because(fault)
}

fn kind(error: &Error) -> (ErrorCode, KeyFault) {
    match error {
        Error::NotResolved { .. } | Error::ConnectionRefused { .. } | Error::Unreachable { .. } => {
            (ErrorCode::Unreachable, KeyFault::KmsUnreachable)
        }
        Error::ConnectionLost { .. } => (ErrorCode::Unreachable, KeyFault::KmsUnreachable),
        Error::TimedOut { step: Step::Resolve | Step::Connect, .. } => {
            (ErrorCode::TimedOut, KeyFault::KmsUnreachable)
        }
        Error::TimedOut { .. } => (ErrorCode::TimedOut, KeyFault::KmsTimeout),
        Error::Tls { problem, .. } => tls(problem),
        Error::Violation { .. } => (ErrorCode::Damaged, KeyFault::KmsGarbage),
        Error::VersionNotSupported { .. } => (ErrorCode::Unsupported, KeyFault::KmsVersion),
        Error::UnusableKey { .. } => (ErrorCode::KeyMismatch, KeyFault::KeyUnusable),
        Error::Refused { refusal, .. } => match refusal.reason {
            ResultReason::ItemNotFound => (ErrorCode::NotFound, KeyFault::KeyMissing),
            ResultReason::PermissionDenied => (ErrorCode::Forbidden, KeyFault::KmsDenies),
            ResultReason::AuthenticationNotSuccessful => {
                (ErrorCode::Forbidden, KeyFault::ClientCertificateRefused)
            }
            _ => (ErrorCode::WrongState, KeyFault::KmsRefuses),
        },
        Error::OutcomeUnknown { source, .. } | Error::NotActivated { source, .. } => kind(source),
        Error::Request(_) | Error::Memory(_) => (ErrorCode::Internal, KeyFault::KmsRefuses),
    }
}

fn tls(problem: &TlsProblem) -> (ErrorCode, KeyFault) {
    let fault = match problem {
        TlsProblem::UntrustedIssuer
        | TlsProblem::OtherCertificate
        | TlsProblem::WrongName
        | TlsProblem::BadCertificate(_) => KeyFault::KmsUntrusted,
        TlsProblem::Expired => KeyFault::KmsCertificateExpired,
        TlsProblem::NotYetValid => KeyFault::KmsCertificateNotYetValid,
        TlsProblem::HandshakeEnded { own: OwnCertificate::Valid } => KeyFault::KmsUnreachable,
        TlsProblem::ClientCertificateRefused { own, .. } | TlsProblem::HandshakeEnded { own } => {
            match own {
                OwnCertificate::Valid => KeyFault::ClientCertificateRefused,
                OwnCertificate::Expired => KeyFault::ClientCertificateExpired,
                OwnCertificate::NotYetValid => KeyFault::ClientCertificateNotYetValid,
            }
        }
        TlsProblem::NothingInCommon(_) | TlsProblem::NotTls(_) | TlsProblem::Other(_) => {
            KeyFault::KmsGarbage
        }
    };
    (ErrorCode::WrongState, fault)
}

/// Whether another server of the provider may do better: this one gave no valid answer.
pub(super) fn is_silence(error: &Error) -> bool {
    match error {
        Error::TimedOut { step: Step::Wait, .. } => false,
        Error::NotResolved { .. }
        | Error::ConnectionRefused { .. }
        | Error::Unreachable { .. }
        | Error::Tls { .. }
        | Error::TimedOut { .. }
        | Error::ConnectionLost { .. }
        | Error::Violation { .. }
        | Error::VersionNotSupported { .. } => true,
        // The outcome is unknown, but the server certainly did not answer.
        Error::OutcomeUnknown { source, .. } => is_silence(source),
        // This server rejects the client altogether; others do so in TLS.
        Error::Refused { refusal, .. } => {
            refusal.reason == ResultReason::AuthenticationNotSuccessful
        }
        _ => false,
    }
}

/// The fault that a key's state means; `None` for a usable state.
pub(super) fn of_state(state: State) -> Option<KeyFault> {
    match state {
        State::Active => None,
        State::Deactivated => Some(KeyFault::KeyDeactivated),
        State::Compromised => Some(KeyFault::KeyCompromised),
        State::Destroyed | State::DestroyedCompromised => Some(KeyFault::KeyDestroyed),
        State::PreActive | State::Other(_) => Some(KeyFault::KeyNotActive),
    }
}

/// The remedy for the operator.
fn remedy(fault: KeyFault, name: &str) -> String {
    match fault {
        KeyFault::ProviderSealed => format!("Unlock it (vmseal provider unlock {name})"),
        KeyFault::NotTrusted => {
            format!("Look at the certificate of the KMS and trust it (vmseal provider trust {name})")
        }
        KeyFault::NoClientCertificate => format!(
            "Make one, and have the KMS accept it (vmseal provider certificate {name} --self-signed or --csr)"
        ),
        KeyFault::KmsUnreachable => format!(
            "See that the KMS runs and can be reached from this server (vmseal provider show {name}); it is tried again"
        ),
        KeyFault::KmsTimeout => {
            "See that the KMS is not overloaded and answers other clients; it is tried again".to_owned()
        }
        KeyFault::KmsGarbage => {
            "See that it is the KMIP port of a KMS, with TLS and no proxy in between; it is tried again".to_owned()
        }
        KeyFault::KmsVersion => "Allow one of KMIP 1.0 to 1.4 at the KMS".to_owned(),
        KeyFault::KmsUntrusted => format!(
            "If the KMS has a new certificate, compare it and trust it (vmseal provider trust {name}); if not, somebody may be in between"
        ),
        KeyFault::KmsCertificateExpired => format!(
            "Renew the certificate of the KMS, then trust it (vmseal provider trust {name})"
        ),
        KeyFault::KmsCertificateNotYetValid => {
            "Compare the clocks of the KMS and of this server".to_owned()
        }
        KeyFault::ClientCertificateRefused => format!(
            "Have the KMS accept the client certificate that `vmseal provider show {name}` shows, for a client that may make and read keys"
        ),
        KeyFault::ClientCertificateExpired => format!(
            "Renew it with the same name (vmseal provider certificate {name} --csr, or --self-signed), and have the KMS accept it"
        ),
        KeyFault::ClientCertificateNotYetValid => {
            "Compare the clocks of this server and of the issuer of the certificate".to_owned()
        }
        KeyFault::KmsDenies => {
            "The key belongs to another client, or the client's role may not read keys: was the client certificate renewed under another name? Use the old name, or have the KMS give this client the key".to_owned()
        }
        KeyFault::KmsRefuses => "See the log of the KMS".to_owned(),
        KeyFault::KeyMissing => format!(
            "No server says that it was destroyed: see that the provider has all servers of the KMS and that they replicate (vmseal provider show {name}, vmseal provider server add), or restore the key from a backup of the KMS"
        ),
        KeyFault::KeyNotActive => "Activate it at the KMS".to_owned(),
        KeyFault::KeyDeactivated => {
            "It opens what there is and encrypts nothing new: give the VM another key before the KMS destroys this one (vmseal vm recrypt, also while it runs), or activate it again at the KMS where that is possible".to_owned()
        }
        KeyFault::KeyCompromised => {
            "It opens what there is and encrypts nothing new: give the VM another key (vmseal vm recrypt, also while it runs). The disks' own keys stay, and whoever had this key and read a disk's header can read what is written to the disk later: after that encrypt the data again under new ones (vmseal vm recrypt --deep)".to_owned()
        }
        KeyFault::KeyDestroyed => {
            "Restore it from a backup of the KMS; without it the VM's data is lost".to_owned()
        }
        KeyFault::KeyMismatch => {
            "Two key servers that do not replicate give different keys for one id: see that the servers of this provider are those that the VM was made with".to_owned()
        }
        KeyFault::KeyUnusable => {
            "See at the KMS that it is an AES-256 key that may be given out unwrapped".to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use vmseal_kmip::client::Endpoint;
    use vmseal_kmip::message::Refusal;

    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint::new("kms.example", 5696).unwrap()
    }

    #[test]
    fn waiting_for_a_free_connection_is_not_a_fault_of_the_kms() {
        let (step, after) = (Step::Wait, std::time::Duration::from_secs(10));
        let error = Error::TimedOut { server: endpoint(), step, after };
        let problem = of("kms", &error);
        assert_eq!((problem.code, problem.reason), (ErrorCode::TimedOut, None));
        assert!(!is_silence(&error), "another server would be asked, and this one failed");
    }

    #[test]
    fn what_to_do_depends_on_what_was_refused() {
        let denied = |operation| {
            let refusal = Refusal { reason: ResultReason::PermissionDenied, text: String::new() };
            of("kms", &Error::Refused { server: endpoint(), operation, refusal })
        };
        assert!(denied(OperationCode::Get).detail.contains("renewed under another name"));
        for operation in [
            OperationCode::Create,
            OperationCode::Locate,
            OperationCode::Revoke,
            OperationCode::Destroy,
        ] {
            let problem = denied(operation);
            assert_eq!(problem.reason, Some(KeyFault::KmsDenies));
            assert!(problem.detail.contains("a role at the KMS"), "{problem}");
        }
        let ended = |own| {
            let problem = TlsProblem::HandshakeEnded { own };
            of("kms", &Error::Tls { server: endpoint(), problem }).reason
        };
        assert_eq!(ended(OwnCertificate::Valid), Some(KeyFault::KmsUnreachable));
        assert_eq!(ended(OwnCertificate::Expired), Some(KeyFault::ClientCertificateExpired));
        for fault in [KeyFault::KeyDeactivated, KeyFault::KeyCompromised] {
            let remedy = remedy(fault, "kms");
            assert!(remedy.contains("vmseal vm recrypt, also while it runs"), "{remedy}");
            let deep = remedy.contains("vmseal vm recrypt --deep");
            assert_eq!(deep, fault == KeyFault::KeyCompromised, "{remedy}");
        }
    }

    #[test]
    fn every_state_has_its_meaning() {
        assert_eq!(of_state(State::Active), None);
        assert_eq!(of_state(State::PreActive), Some(KeyFault::KeyNotActive));
        assert_eq!(of_state(State::Deactivated), Some(KeyFault::KeyDeactivated));
        assert_eq!(of_state(State::Compromised), Some(KeyFault::KeyCompromised));
        assert_eq!(of_state(State::Destroyed), Some(KeyFault::KeyDestroyed));
        assert_eq!(of_state(State::DestroyedCompromised), Some(KeyFault::KeyDestroyed));
        assert_eq!(of_state(State::Other(99)), Some(KeyFault::KeyNotActive));
    }
}
