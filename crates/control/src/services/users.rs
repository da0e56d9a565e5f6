//! Authentication by a token, compared in constant time.

use aws_lc_rs::constant_time::verify_slices_are_equal;
use vmseal_api::problem::{ErrorCode, Problem};

use super::Services;
use super::caller::{Caller, Privilege};
use crate::store::users::{self, Role};

/// The user with this token.
///
/// # Errors
/// `unauthenticated`.
pub async fn authenticate(services: &Services, token: &str) -> Result<Caller, Problem> {
    let hash = crate::sha256_hex(token.as_bytes());
    let known = users::list(&mut *services.store.read().await?).await?;
    // Compares with all of them, so that the time does not depend on the match.
    let matching: Vec<_> = known
        .into_iter()
        .filter(|known| {
            verify_slices_are_equal(known.token_sha256.as_bytes(), hash.as_bytes()).is_ok()
        })
        .collect();
    let found = matching.into_iter().next();
    let user =
        found.ok_or_else(|| Problem::new(ErrorCode::Unauthenticated, "the token is wrong"))?;
    Ok(match user.role()? {
        Role::Administrator => Caller::administrator(user.name),
        Role::Metrics => Caller::new(user.name, [Privilege::ReadMetrics].into_iter().collect()),
    })
}
