//! Who is it? A bearer token (RFC 6750), compared in constant time.

use std::sync::Arc;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use vmseal_api::problem::{ErrorCode, Problem};

use super::App;
use super::problem::Refusal;
use crate::connections::Connection;
use crate::store::users;

/// The longest token that is looked at, in bytes; ours have 43.
const TOKEN_MAX: usize = 256;

/// The user who asks, by name.
#[derive(Clone, Debug)]
pub(super) struct User(pub String);

/// Lets a request pass that comes from a user.
pub(super) async fn authenticate(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    let refused = |why: &str| Refusal(Problem::new(ErrorCode::Unauthenticated, why));
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
    let hash = crate::sha256_hex(token.as_bytes());
    let known = users::list(&mut *app.store.read().await?).await?;
    // All of them, so that the time says nothing of which.
    let matching: Vec<_> = known
        .into_iter()
        .filter(|(_, known)| verify_slices_are_equal(known.as_bytes(), hash.as_bytes()).is_ok())
        .collect();
    let (name, _) = matching.into_iter().next().ok_or_else(|| refused("the token is wrong"))?;
    if let Some(connection) = request.extensions().get::<Connection>() {
        connection.is_users()?;
    }
    request.extensions_mut().insert(User(name));
    Ok(next.run(request).await)
}

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let user = parts.extensions.get::<Self>().cloned();
        user.ok_or_else(|| {
            Refusal(Problem::new(ErrorCode::Unauthenticated, "no user is known here"))
        })
    }
}
