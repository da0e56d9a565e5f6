//! A secret in a file, sealed under a passphrase (docs/formats/native-key-file.md): native
//! providers' root keys and KMIP providers' client keys.

use std::path::Path;

use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;
use vmseal_secret::passphrase::{
    Cost, PassphraseError, open_with_passphrase, seal_with_passphrase,
};

use vmseal_api::atomic_file;

/// The cost of the passphrase derivation for new files.
fn cost() -> Cost {
    #[cfg(any(test, feature = "testing"))]
    if let Some(cost) = cost_in_tests::COST.get() {
        return *cost;
    }
    Cost::RECOMMENDED
}

/// Tests choose the least cost for their process; no released program has this.
#[cfg(any(test, feature = "testing"))]
pub(crate) mod cost_in_tests {
    use std::sync::OnceLock;

    use vmseal_secret::passphrase::{Cost, MEMORY_KIB_MIN};

    pub(super) static COST: OnceLock<Cost> = OnceLock::new();

    pub(crate) fn lower() {
        COST.get_or_init(|| Cost::new(MEMORY_KIB_MIN, 1, 1).unwrap_or(Cost::RECOMMENDED));
    }
}

/// Seals a secret; `associated` is its purpose.
pub(crate) fn seal(
    secret: &SecretBytes,
    passphrase: &SecretBytes,
    associated: &[u8],
) -> Result<Vec<u8>, Problem> {
    seal_with_passphrase(secret, passphrase, associated, cost())
        .map_err(|error| crate::internal(&error))
}

/// Opens a secret of [`seal`]; `what` names it in errors.
pub(crate) fn open(
    sealed: &[u8],
    passphrase: &SecretBytes,
    associated: &[u8],
    what: &str,
) -> Result<SecretBytes, Problem> {
    open_with_passphrase(sealed, passphrase, associated).map_err(|error| {
        let code = match error {
            PassphraseError::WrongPassphraseOrDamaged => ErrorCode::KeyMismatch,
            PassphraseError::NotAnEnvelope
            | PassphraseError::UnknownVersion(_)
            | PassphraseError::Cost { .. } => ErrorCode::Damaged,
            _ => return crate::internal(&error),
        };
        Problem::new(code, format!("{what} does not open: {error}"))
    })
}

/// Writes a sealed file into a provider's directory, durably.
pub(super) fn write(directory: &Path, name: &str, sealed: &[u8]) -> Result<(), Problem> {
    let written = atomic_file::private_directory(directory)
        .and_then(|()| atomic_file::write(&directory.join(name), sealed, atomic_file::PRIVATE));
    written.map_err(|error| {
        let detail = format!("the key file in {} cannot be written: {error}", directory.display());
        Problem::new(ErrorCode::NoSpace, detail)
    })
}
