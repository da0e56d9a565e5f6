//! Dry runs: a request with `?dry_run=true` gets all checks, and its answer says what would be done. Nothing
//! is done: the changes of the inventory are written but not committed.
//!
//! A dry run of a request that does not support it is refused: the request must not be carried out instead.

use std::collections::HashSet;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa::openapi::path::{Operation, Parameter, ParameterIn, PathItem};
use utoipa::openapi::{OpenApi, RefOr};
use vmseal_api::problem::Problem;

use crate::problem::ProblemResponse;

/// Whether a request is a dry run.
#[derive(Clone, Copy, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct DryRunQuery {
    /// Check the request and answer what it would do, without doing anything.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    pub dry_run: bool,
}

/// The changing requests with query parameters, according to the OpenAPI document.
pub(crate) struct RoutesWithQuery(HashSet<(Method, String)>);

impl RoutesWithQuery {
    pub(crate) fn of(document: &OpenApi) -> Arc<Self> {
        let mut found = HashSet::new();
        for (path, item) in &document.paths.paths {
            for (method, operation) in changing(item) {
                let mut parameters = operation.iter().flat_map(|it| it.parameters.iter().flatten());
                let in_query = |it: &RefOr<Parameter>| matches!(it, RefOr::T(it) if it.parameter_in == ParameterIn::Query);
                if parameters.any(in_query) {
                    found.insert((method, path.clone()));
                }
            }
        }
        Arc::new(Self(found))
    }
}

fn changing(item: &PathItem) -> [(Method, Option<&Operation>); 4] {
    [
        (Method::POST, item.post.as_ref()),
        (Method::PUT, item.put.as_ref()),
        (Method::PATCH, item.patch.as_ref()),
        (Method::DELETE, item.delete.as_ref()),
    ]
}

/// Refuses query parameters on routes that have none: otherwise a dry run that is not supported would be carried out.
pub(crate) async fn refuse_others(
    State(parameterized): State<Arc<RoutesWithQuery>>,
    path: MatchedPath,
    request: Request,
    next: Next,
) -> Result<Response, ProblemResponse> {
    let method = request.method().clone();
    let asked = request.uri().query().is_some_and(|query| !query.is_empty());
    if asked && !method.is_safe() {
        let known = (method, path.as_str().to_owned());
        if !parameterized.0.contains(&known) {
            let (method, path) = known;
            let detail = format!(
                "{method} {path} takes no parameters and has no dry run (dry_run): nothing was done"
            );
            return Err(Problem::invalid("query", detail).into());
        }
    }
    Ok(next.run(request).await)
}
