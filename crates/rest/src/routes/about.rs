//! The server itself.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::About;
use vmseal_control::services::{self, Services};

use crate::problem::Refusal;

/// What the server is; needs no credentials.
#[utoipa::path(get, path = "/api/v1/about", tag = "server", security(()),
    responses((status = 200, body = About), Refusal))]
pub(super) async fn show(State(control): State<Arc<Services>>) -> Json<About> {
    Json(services::passphrases::about(&control))
}
