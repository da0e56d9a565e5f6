//! Tracing of requests: the id (the client's if it sent one), which goes with all work for the request and back to the
//! client; the log line of the answer; and the metrics.

use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use vmseal_api::request_id::{self, HEADER, RequestId};
use vmseal_control::metrics;

/// How much of a path is logged, in bytes: a noun, a name, a verb. Unauthenticated clients may send longer ones.
const PATH_MAX: usize = 160;

/// Gives a request and its answer their id.
pub(crate) async fn identify(request: Request, next: Next) -> Response {
    let id = RequestId::sent_or_new(request.headers().get(HEADER).map(HeaderValue::as_bytes));
    let mut response = request_id::during(Some(id.clone()), answer(request, next)).await;
    // An id is a valid header value.
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

/// Reads get no line at the usual level: clients poll.
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

/// Counts and times every request, by its route's pattern.
pub(crate) async fn count(request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = known(request.method());
    let route = request.extensions().get::<MatchedPath>();
    // A path without a route may be anything that a client makes up, so it is no label.
    let route = route.map_or("none", MatchedPath::as_str).to_owned();
    let response = next.run(request).await;
    metrics::get().request(method, &route, response.status().as_u16(), began.elapsed());
    response
}

/// Clients may send any method; only those of the API become labels.
fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        _ => "other",
    }
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
