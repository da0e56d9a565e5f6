//! `GET /metrics`, for Prometheus; needs the same tokens as the API.
//!
//! ```text
//! GET /metrics              the server's own
//! GET /metrics/hosts/{host} one host's agent and filters, fetched from it
//! GET /metrics/targets      both kinds as targets, for Prometheus' HTTP service discovery
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_TYPE, HOST};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use serde::Serialize;
use vmseal_control::metrics;
use vmseal_control::services::{self, Services};

use crate::problem::ProblemResponse;
use crate::request::auth::Authenticated;
use crate::request::body::PathSegment;

/// The routes; they are not part of the API and the OpenAPI document.
pub(crate) fn routes() -> [(&'static str, MethodRouter<Arc<Services>>); 3] {
    [
        ("/metrics", get(server)),
        ("/metrics/hosts/{host}", get(host)),
        ("/metrics/targets", get(targets)),
    ]
}

fn text(body: String) -> Response {
    ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], body).into_response()
}

/// The server's own.
async fn server(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
) -> Result<Response, ProblemResponse> {
    Ok(text(services::metrics::server(&control, &caller).await?))
}

/// One host's.
async fn host(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    PathSegment(name): PathSegment,
) -> Result<Response, ProblemResponse> {
    Ok(text(services::metrics::host(&control, &caller, &name).await?))
}

/// A group of targets (Prometheus documentation, HTTP SD).
#[derive(Serialize)]
struct Targets {
    targets: [String; 1],
    labels: BTreeMap<&'static str, String>,
}

/// The server and its hosts. The address is the one that Prometheus used to ask.
async fn targets(
    State(control): State<Arc<Services>>,
    Authenticated(caller): Authenticated,
    headers: HeaderMap,
) -> Result<Json<Vec<Targets>>, ProblemResponse> {
    let address = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let target = |path: String, instance: String| Targets {
        targets: [address.to_owned()],
        labels: BTreeMap::from([("__metrics_path__", path), ("instance", instance)]),
    };
    let mut all = vec![target("/metrics".to_owned(), "server".to_owned())];
    let hosts = services::metrics::hosts(&control, &caller).await?;
    all.extend(hosts.into_iter().map(|(id, name)| target(format!("/metrics/hosts/{id}"), name)));
    Ok(Json(all))
}
