//! The server itself.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use vmseal_api::model::About;
use vmseal_control::services::{self, Services};

use crate::problem::ProblemResponse;

/// Shows the server's version; needs no credentials.
#[utoipa::path(get, path = "/api/v1/about", tag = "server", security(()),
    responses((status = 200, body = About), ProblemResponse))]
pub(super) async fn show(State(control): State<Arc<Services>>) -> Json<About> {
    Json(services::passphrases::about(&control))
}
