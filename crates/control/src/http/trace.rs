//! Whose request it is: its id, the client's where that is one, goes with all work that is done for it, and
//! back to the client; and the line of log that says what was answered.

use std::time::Instant;

use axum::extract::Request;
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;
use vmseal_api::request_id::{self, HEADER, RequestId};

/// How much of a path is logged, in bytes: a noun, a name, a verb. Strangers may send longer ones.
const PATH_MAX: usize = 160;

/// Gives a request its id, and the answer too.
pub(super) async fn identify(request: Request, next: Next) -> Response {
    let id = RequestId::sent_or_new(request.headers().get(HEADER).map(HeaderValue::as_bytes));
    let mut response = request_id::during(Some(id.clone()), answer(request, next)).await;
    // An id has nothing that a header cannot hold.
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

/// What only reads is not worth a line each: clients poll.
async fn answer(request: Request, next: Next) -> Response {
    let (began, method) = (Instant::now(), request.method().clone());
    let path = shown(request.uri().path()).to_owned();
    let response = next.run(request).await;
    let (status, took) = (response.status().as_u16(), began.elapsed());
    if method.is_safe() {
        tracing::debug!(%method, path, status, ?took, "answered");
    } else {
        tracing::info!(%method, path, status, ?took, "answered");
    }
    response
}

fn shown(path: &str) -> &str {
    &path[..path.floor_char_boundary(PATH_MAX)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_cut_between_characters() {
        assert_eq!(shown("/api/v1/vms"), "/api/v1/vms");
        let long = format!("/{}", "é".repeat(PATH_MAX));
        assert_eq!(shown(&long).len(), PATH_MAX - 1);
    }
}
