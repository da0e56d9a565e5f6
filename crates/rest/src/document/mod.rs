//! What the API document (OpenAPI 3.1) has beside what the routes say of themselves: the limits that the services
//! enforce, the headers of WebSockets, and the errors that each route may give.

mod constraints;
mod errors;
mod sockets;

use serde_json::Value;
use utoipa::openapi::OpenApi;

/// The whole document.
#[must_use]
pub(crate) fn complete(described: &OpenApi) -> Value {
    // It is made by the program alone, of strings and numbers.
    let mut document = serde_json::to_value(described).unwrap_or_default();
    constraints::add(&mut document);
    sockets::add(&mut document);
    errors::add(&mut document);
    document
}
