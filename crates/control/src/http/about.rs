//! The server itself.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::model::About;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{SealedPassphrase, passphrase_info};
use vmseal_secret::SecretBytes;
use vmseal_secret::sealed_box::SealedBox;

use super::App;
use super::problem::Refusal;

/// What the server is; needs no credentials.
#[utoipa::path(get, path = "/api/v1/about", tag = "server", security(()),
    responses((status = 200, body = About), Refusal))]
pub(super) async fn show(State(app): State<Arc<App>>) -> Json<About> {
    Json(About {
        vmseal: env!("CARGO_PKG_VERSION").to_owned(),
        passphrase_box: passphrase_box(&app),
    })
}

fn passphrase_box(app: &App) -> String {
    STANDARD.encode(app.recipient.public_key())
}

/// Opens a passphrase that was sealed for this server and this provider.
pub(super) fn open_passphrase(
    app: &App,
    provider: &str,
    sealed: &SealedPassphrase,
    field: &str,
) -> Result<SecretBytes, Problem> {
    if sealed.passphrase_box != passphrase_box(app) {
        let detail = "it is sealed to another passphrase box: the server may have restarted, ask GET /api/v1/about again";
        let problem = Problem::new(ErrorCode::WrongState, detail);
        return Err(Problem { field: Some(format!("{field}.passphrase_box")), ..problem });
    }
    let invalid = |why: String| Problem::invalid(format!("{field}.sealed"), why);
    let bytes =
        STANDARD.decode(&sealed.sealed).map_err(|_| invalid("it is not base64".to_owned()))?;
    let sealed = SealedBox::from_bytes(bytes).map_err(|error| invalid(error.to_string()))?;
    app.recipient
        .open(&sealed, &passphrase_info(provider))
        .map_err(|error| invalid(format!("{error} (it has to be sealed for '{provider}')")))
}
