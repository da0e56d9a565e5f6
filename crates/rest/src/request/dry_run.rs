//! Dry runs: `?dry_run=true` has a request checked as if it were meant, and answered with what would be
//! done. Nothing is done: what the inventory would be told is written and not committed.
//!
//! A request that cannot be tried is refused when somebody tries: to carry it out would be the worst
//! answer of all.

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

use crate::problem::Refusal;

/// Whether a request is meant, or tried.
#[derive(Clone, Copy, Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Intent {
    /// Check the request and answer what it would do, without doing anything.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    pub dry_run: bool,
}

/// The changing requests that take parameters, as the document has them.
pub(crate) struct Parameterized(HashSet<(Method, String)>);

impl Parameterized {
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

/// Refuses parameters where there are none: else a request that cannot be tried would be carried out.
pub(crate) async fn refuse_others(
    State(parameterized): State<Arc<Parameterized>>,
    path: MatchedPath,
    request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    let method = request.method().clone();
    let asked = request.uri().query().is_some_and(|query| !query.is_empty());
    if asked && !method.is_safe() {
        let known = (method, path.as_str().to_owned());
        if !parameterized.0.contains(&known) {
            let (method, path) = known;
            let detail = format!(
                "{method} {path} takes no parameters, and cannot be tried (dry_run): nothing was done"
            );
            return Err(Problem::invalid("query", detail).into());
        }
    }
    Ok(next.run(request).await)
}
