//! The REST API under `/api/v1`: one module per resource; `table` registers all of its routes.
//!
//! Every answer that is not a success is a problem (RFC 9457), even if no handler gets the request.

mod about;
mod arrivals;
mod backups;
mod bitmaps;
mod changes;
mod console;
mod datastores;
mod declared;
mod disks;
mod dumps;
mod events;
mod guest;
mod guests;
mod hosts;
mod kmip;
mod kmip_servers;
mod log_levels;
pub(crate) mod metrics;
mod nics;
mod policies;
mod proofs;
mod providers;
mod remotes;
mod server_backup;
mod snapshots;
mod table;
mod tasks;
mod usage;
mod vm_devices;
mod vms;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use tracing::Instrument;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;
use vmseal_control::services::{Privilege, Services};

use self::declared::Declared;
use crate::document;
use crate::document::causes::Causes;
use crate::problem::{self, ProblemResponse};
use crate::request::{auth, dry_run};
use crate::trace;

/// How long a request may take in all; an established console connection is no longer a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(OpenApi)]
#[openapi(
    info(
        title = "vmseal",
        description = "Encrypts virtual machines by policy. Long work answers 202 with a task; every \
                       error is a problem (RFC 9457). A request may carry an id in the header \
                       X-Request-Id (1 to 64 ASCII letters, digits, '-', '_' and '.'); else it gets one. \
                       The answer carries it, and so does all that is logged and recorded for it.",
    ),
    modifiers(&Credentials),
    security(("token" = [])),
)]
struct Document;

struct Credentials;

impl Modify for Credentials {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
        components.schemas.extend(problem::schemas());
    }
}

/// What the routes say of themselves, and what the errors of each come from.
pub(crate) fn described() -> (utoipa::openapi::OpenApi, Causes) {
    let of_users = table::user_routes().into_iter().map(|(_, routes)| routes);
    of_users.fold(table::open_routes(Document::openapi()), Declared::merge).into_description()
}

/// The API document.
#[must_use]
pub fn document() -> serde_json::Value {
    let (described, causes) = described();
    document::complete(&described, &causes)
}

/// Shows this document; needs no credentials.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "server", security(()),
    responses((status = 200, description = "The document", content_type = "application/json", body = Object)))]
async fn show_document() -> impl IntoResponse {
    static TEXT: LazyLock<String> = LazyLock::new(|| format!("{:#}\n", document()));
    ([(CONTENT_TYPE, "application/json")], TEXT.as_str())
}

/// The routes that need a user, without the authentication.
pub(crate) fn user_router() -> axum::Router<Arc<Services>> {
    let parameterized = dry_run::RoutesWithQuery::of(&described().0);
    let metrics = metrics::routes().into_iter();
    let metrics = metrics.fold(axum::Router::new(), |all, (path, route)| all.route(path, route));
    let api = table::user_routes().into_iter().map(|(privilege, routes)| {
        let refuse = middleware::from_fn_with_state(parameterized.clone(), dry_run::refuse_others);
        (privilege, routes.into_router().route_layer(refuse))
    });
    api.chain([(Privilege::ReadMetrics, metrics)]).fold(
        axum::Router::new(),
        |all, (privilege, routes)| {
            let require = middleware::from_fn_with_state(privilege, auth::require);
            all.merge(routes.route_layer(require))
        },
    )
}

/// The API.
pub fn router(control: Arc<Services>) -> axum::Router {
    let authenticate = middleware::from_fn_with_state(Arc::clone(&control), auth::authenticate);
    table::open_routes(Document::openapi())
        .into_router()
        .merge(user_router().route_layer(authenticate))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn(limit_time))
        .layer(middleware::from_fn(trace::count))
        .layer(middleware::from_fn(trace::identify))
        .with_state(control)
}

async fn unknown_path(request: Request) -> ProblemResponse {
    Problem::new(ErrorCode::NotFound, format!("there is no path '{}'", request.uri().path())).into()
}

async fn wrong_method(request: Request) -> ProblemResponse {
    let detail = format!("{} cannot be done with {}", request.method(), request.uri().path());
    let mut problem = Problem::new(ErrorCode::InvalidRequest, detail);
    problem.status = StatusCode::METHOD_NOT_ALLOWED.as_u16();
    problem.into()
}

/// Answers within the timeout. A changing request runs on when its client disconnects or the timeout passes: it must not
/// be dropped between recording a task and starting it.
async fn limit_time(request: Request, next: Next) -> Response {
    let changes = !request.method().is_safe();
    let work = async {
        if !changes {
            return Ok(next.run(request).await);
        }
        let work = next.run(request).instrument(tracing::Span::current());
        tokio::spawn(request_id::during(request_id::current(), work)).await
    };
    match tokio::time::timeout(REQUEST_TIMEOUT, work).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => {
            tracing::error!(%error, "a handler panicked");
            let detail = "a defect of vmseal ended the request: the server's log says where; whether it was done is not known";
            ProblemResponse::from(Problem::new(ErrorCode::Internal, detail)).into_response()
        }
        Err(_) => {
            let detail = format!(
                "the request took longer than {} s; whether it was done is not known",
                REQUEST_TIMEOUT.as_secs()
            );
            ProblemResponse::from(Problem::new(ErrorCode::TimedOut, detail)).into_response()
        }
    }
}
