//! The transfer of passphrases to the server: sealed to a key pair that exists as long as its process.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::model::About;
use vmseal_api::passphrase::{SealedPassphrase, passphrase_info};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{
    ARRIVALS, ARRIVALS_AT_REST, ARRIVALS_COMPRESSED, ARRIVALS_KEPT, ARRIVALS_SUSPENDED,
    ARRIVALS_TPM_AT_REST, ARRIVING_SNAPSHOTS,
};
use vmseal_secret::SecretBytes;
use vmseal_secret::sealed_box::SealedBox;

use super::Services;

/// What this server says of itself.
const FEATURES: [&str; 7] = [
    ARRIVALS,
    ARRIVING_SNAPSHOTS,
    ARRIVALS_AT_REST,
    ARRIVALS_KEPT,
    ARRIVALS_SUSPENDED,
    ARRIVALS_TPM_AT_REST,
    ARRIVALS_COMPRESSED,
];

/// The server's version, and the key to which passphrases are sealed; needs no credentials.
#[must_use]
pub fn about(services: &Services) -> About {
    About {
        vmseal: env!("CARGO_PKG_VERSION").to_owned(),
        passphrase_box: passphrase_box(services),
        features: FEATURES.map(str::to_owned).to_vec(),
    }
}

fn passphrase_box(services: &Services) -> String {
    STANDARD.encode(services.recipient.public_key())
}

/// Opens a passphrase that was sealed for this server and this provider.
pub(super) fn open_passphrase(
    services: &Services,
    provider: &str,
    sealed: &SealedPassphrase,
    field: &str,
) -> Result<SecretBytes, Problem> {
    if sealed.passphrase_box != passphrase_box(services) {
        let detail = "it is sealed to another passphrase box: the server may have restarted, ask GET /api/v1/about again";
        let problem = Problem::new(ErrorCode::WrongState, detail);
        return Err(Problem { field: Some(format!("{field}.passphrase_box")), ..problem });
    }
    let invalid = |why: String| Problem::invalid(format!("{field}.sealed"), why);
    let bytes =
        STANDARD.decode(&sealed.sealed).map_err(|_| invalid("it is not base64".to_owned()))?;
    let sealed = SealedBox::from_bytes(bytes).map_err(|error| invalid(error.to_string()))?;
    services
        .recipient
        .open(&sealed, &passphrase_info(provider))
        .map_err(|error| invalid(format!("{error} (it must be sealed for '{provider}')")))
}
