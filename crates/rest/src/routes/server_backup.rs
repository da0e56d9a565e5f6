//! Backups of the server itself.

use std::io;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::io::AsyncReadExt;
use vmseal_api::model::Plan;
use vmseal_api::request::GivePassphrase;
use vmseal_control::backup::make::SealedBackup;
use vmseal_control::services::{self, Services};

use crate::answer::Answer;
use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body;
use crate::request::body::QueryOf;
use crate::request::dry_run::DryRunQuery;

/// How much of the file is read and sent at a time, in bytes.
const CHUNK: usize = 64 * 1024;

/// Returns a backup of the server: its inventory, its authority and the sealed files of its key providers, sealed under
/// the passphrase of the request (sealed for "backup of the server").
#[utoipa::path(post, path = "/api/v1/server/backup", tag = "server", params(DryRunQuery),
    request_body = GivePassphrase,
    responses((status = 200, description = "The backup; for a dry run, what would be done",
        content((Vec<u8> = "application/octet-stream"), (Plan = "application/json"))), ProblemResponse))]
pub(super) async fn make(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    QueryOf(query): QueryOf<DryRunQuery>,
    body::Json(request): body::Json<GivePassphrase>,
) -> Result<Answer<Response>, ProblemResponse> {
    let made = services::server_backup::back_up(&control, &caller, request, query.dry_run).await?;
    Ok(Answer(made.map(file)))
}

/// A file of any length, which is read while it is sent.
fn file(backup: SealedBackup) -> Response {
    let content = stream::try_unfold(tokio::fs::File::from_std(backup.file), |mut file| async {
        let mut chunk = Vec::with_capacity(CHUNK);
        let read = file.read_buf(&mut chunk).await?;
        Ok::<_, io::Error>((read > 0).then(|| (Bytes::from(chunk), file)))
    });
    let headers = [
        (CONTENT_TYPE, "application/octet-stream".to_owned()),
        (CONTENT_LENGTH, backup.length.to_string()),
    ];
    (headers, Body::from_stream(content)).into_response()
}
