//! Authentication by a bearer token (RFC 6750), and the check of the privilege of a route.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_control::services::{self, Caller, Privilege, Services};

use crate::connections::Connection;
use crate::problem::ProblemResponse;

/// The maximum length of a token that is checked, in bytes; ours have 43.
const TOKEN_MAX: usize = 256;

/// The user who sent the request.
#[derive(Clone, Debug)]
pub(crate) struct Authenticated(pub Caller);

/// Lets only requests of users pass.
pub(crate) async fn authenticate(
    State(control): State<Arc<Services>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ProblemResponse> {
    let refused = |why: &str| ProblemResponse(Problem::new(ErrorCode::Unauthenticated, why));
    let header = request
        .headers()
        .get(AUTHORIZATION)
        .ok_or_else(|| refused("no credentials: send the header Authorization: Bearer TOKEN"))?;
    let token = header
        .to_str()
        .ok()
        .and_then(|text| text.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim())
        .filter(|token| token.len() <= TOKEN_MAX)
        .ok_or_else(|| refused("the credentials are not of the form: Bearer TOKEN"))?;
    let caller = services::users::authenticate(&control, token).await?;
    if let Some(connection) = request.extensions().get::<Connection>() {
        connection.set_authenticated()?;
    }
    request.extensions_mut().insert(Authenticated(caller));
    Ok(next.run(request).await)
}

/// Lets a request pass whose user has a privilege, before its query or its body is understood: who may not do a thing
/// is told so, whatever they sent.
pub(crate) async fn require(
    State(privilege): State<Privilege>,
    Authenticated(caller): Authenticated,
    request: Request,
    next: Next,
) -> Result<Response, ProblemResponse> {
    caller.require(privilege)?;
    Ok(next.run(request).await)
}

impl<S: Sync> FromRequestParts<S> for Authenticated {
    type Rejection = ProblemResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ProblemResponse> {
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(|| {
            ProblemResponse(Problem::new(ErrorCode::Unauthenticated, "no user is known here"))
        })
    }
}
