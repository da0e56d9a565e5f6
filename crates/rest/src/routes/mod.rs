//! The REST API under `/api/v1`: one module per resource.
//!
//! Every answer that is not a success is a problem (RFC 9457), even if no handler gets the request.

mod about;
mod arrivals;
mod backups;
mod bitmaps;
mod changes;
mod console;
mod datastores;
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
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;
use vmseal_control::services::{Privilege, Services};

use crate::document;
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

fn open_routes() -> OpenApiRouter<Arc<Services>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(about::show))
        .routes(routes!(show_document))
        .routes(routes!(hosts::join))
}

/// The routes that need a user, by the privilege that each needs. The services require it too; here it is asked for
/// before anything else of a request is looked at.
fn user_routes() -> [(Privilege, OpenApiRouter<Arc<Services>>); 17] {
    let new = OpenApiRouter::new;
    [
        (
            Privilege::Read,
            new()
                .routes(routes!(hosts::list))
                .routes(routes!(hosts::show))
                .routes(routes!(log_levels::show))
                .routes(routes!(log_levels::show_host))
                .routes(routes!(datastores::list))
                .routes(routes!(datastores::show))
                .routes(routes!(datastores::scan))
                .routes(routes!(providers::list))
                .routes(routes!(providers::show))
                .routes(routes!(policies::list))
                .routes(routes!(policies::show))
                .routes(routes!(vms::list))
                .routes(routes!(vms::show))
                .routes(routes!(usage::show))
                .routes(routes!(bitmaps::list))
                .routes(routes!(snapshots::list))
                .routes(routes!(snapshots::show))
                .routes(routes!(backups::list_all))
                .routes(routes!(backups::list))
                .routes(routes!(backups::show))
                .routes(routes!(dumps::list))
                .routes(routes!(dumps::show))
                .routes(routes!(proofs::prove))
                .routes(routes!(proofs::last))
                .routes(routes!(disks::replica))
                .routes(routes!(tasks::list))
                .routes(routes!(tasks::show))
                .routes(routes!(events::list))
                .routes(routes!(events::alarms))
                .routes(routes!(remotes::list))
                .routes(routes!(remotes::show))
                .routes(routes!(remotes::check))
                .routes(routes!(changes::show)),
        ),
        (
            Privilege::VmPower,
            new()
                .routes(routes!(vms::start))
                .routes(routes!(vms::stop))
                .routes(routes!(vms::suspend))
                .routes(routes!(vms::resume))
                .routes(routes!(guests::reboot))
                .routes(routes!(guests::reset))
                .routes(routes!(guests::pause))
                .routes(routes!(guests::unpause)),
        ),
        (
            Privilege::VmConfigure,
            new()
                .routes(routes!(vms::create))
                .routes(routes!(vms::clone))
                .routes(routes!(vms::move_disks))
                .routes(routes!(vms::migrate))
                .routes(routes!(arrivals::check))
                .routes(routes!(arrivals::begin, arrivals::show))
                .routes(routes!(arrivals::session))
                .routes(routes!(arrivals::commit))
                .routes(routes!(arrivals::cancel))
                .routes(routes!(vms::set, vms::delete))
                .routes(routes!(datastores::adopt))
                .routes(routes!(vm_devices::add_disk))
                .routes(routes!(vm_devices::remove_disk))
                .routes(routes!(vm_devices::resize_disk))
                .routes(routes!(vm_devices::add_tpm, vm_devices::remove_tpm))
                .routes(routes!(vm_devices::add_nic))
                .routes(routes!(nics::set, vm_devices::remove_nic))
                .routes(routes!(backups::verify))
                .routes(routes!(backups::restore))
                .routes(routes!(backups::delete))
                .routes(routes!(dumps::delete))
                .routes(routes!(snapshots::take))
                .routes(routes!(snapshots::revert))
                .routes(routes!(snapshots::delete))
                .routes(routes!(bitmaps::add))
                .routes(routes!(bitmaps::clear))
                .routes(routes!(bitmaps::remove)),
        ),
        (Privilege::VmConsole, new().routes(routes!(console::open)).routes(routes!(guest::screen))),
        (Privilege::VmGuest, new().routes(routes!(guest::ask))),
        (
            Privilege::ManageTasks,
            new()
                .routes(routes!(tasks::cancel))
                .routes(routes!(tasks::resolve))
                .routes(routes!(tasks::set))
                .routes(routes!(tasks::pause))
                .routes(routes!(tasks::resume)),
        ),
        (
            Privilege::ManageDatastores,
            new()
                .routes(routes!(datastores::add))
                .routes(routes!(datastores::remove))
                .routes(routes!(datastores::share))
                .routes(routes!(datastores::unshare)),
        ),
        (
            Privilege::Diagnostics,
            new().routes(routes!(log_levels::set)).routes(routes!(log_levels::set_host)),
        ),
        (Privilege::Encrypt, new().routes(routes!(vms::encrypt))),
        (Privilege::Decrypt, new().routes(routes!(vms::decrypt))),
        (Privilege::Recrypt, new().routes(routes!(vms::recrypt))),
        (
            Privilege::DirectAccess,
            new()
                .routes(routes!(disks::export))
                .routes(routes!(disks::expose))
                .routes(routes!(backups::create))
                .routes(routes!(dumps::take))
                .routes(routes!(dumps::decrypt)),
        ),
        (
            Privilege::ManageKeys,
            new().routes(routes!(providers::backup)).routes(routes!(providers::verify)),
        ),
        (
            Privilege::ManageProviders,
            new()
                .routes(routes!(providers::add))
                .routes(routes!(providers::remove))
                .routes(routes!(providers::unlock))
                .routes(routes!(providers::change_passphrase))
                .routes(routes!(providers::make_default))
                .routes(routes!(kmip::certificate))
                .routes(routes!(kmip::trust))
                .routes(routes!(kmip::request_certificate))
                .routes(routes!(kmip::self_sign))
                .routes(routes!(kmip::set_certificate))
                .routes(routes!(kmip::test))
                .routes(routes!(kmip_servers::add))
                .routes(routes!(kmip_servers::set, kmip_servers::remove))
                .routes(routes!(kmip_servers::move_to)),
        ),
        (
            Privilege::ManagePolicies,
            new().routes(routes!(policies::add)).routes(routes!(policies::set, policies::remove)),
        ),
        (
            Privilege::RegisterHost,
            new()
                .routes(routes!(hosts::change, hosts::remove))
                .routes(routes!(hosts::drain))
                .routes(routes!(hosts::undrain))
                .routes(routes!(hosts::make_token))
                .routes(routes!(remotes::look))
                .routes(routes!(remotes::add))
                .routes(routes!(remotes::remove)),
        ),
        (Privilege::BackUpServer, new().routes(routes!(server_backup::make))),
    ]
}

/// What the routes say of themselves.
pub(crate) fn described() -> utoipa::openapi::OpenApi {
    let all = user_routes().into_iter().map(|(_, routes)| routes);
    all.fold(open_routes(), OpenApiRouter::merge).into_openapi()
}

/// The API document.
#[must_use]
pub fn document() -> serde_json::Value {
    document::complete(&described())
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
    let parameterized = dry_run::RoutesWithQuery::of(&described());
    let metrics = metrics::routes().into_iter();
    let metrics = metrics.fold(axum::Router::new(), |all, (path, route)| all.route(path, route));
    let api = user_routes().into_iter().map(|(privilege, routes)| {
        let refuse = middleware::from_fn_with_state(parameterized.clone(), dry_run::refuse_others);
        (privilege, axum::Router::from(routes).route_layer(refuse))
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
    axum::Router::from(open_routes())
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
