//! What the API document (OpenAPI 3.1) has beside what the routes say of themselves: the limits that the services
//! enforce, the headers of WebSockets, the errors that each route may give, and ids of operations that differ.

pub(crate) mod causes;
mod constraints;
mod errors;
mod operation_ids;
mod sockets;

use serde_json::Value;
use utoipa::openapi::OpenApi;

use self::causes::Causes;

/// The whole document.
#[must_use]
pub(crate) fn complete(described: &OpenApi, causes: &Causes) -> Value {
    // It is made by the program alone, of strings and numbers.
    let mut document = serde_json::to_value(described).unwrap_or_default();
    constraints::add(&mut document);
    sockets::add(&mut document);
    errors::add(&mut document, causes);
    operation_ids::set(&mut document);
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The descriptions in a part of the document, which are doc comments.
    fn descriptions(part: &Value) -> Vec<&str> {
        let own = part.get("description").and_then(Value::as_str);
        let parts = part.as_object().into_iter().flat_map(|fields| fields.values());
        let parts = parts.chain(part.as_array().into_iter().flatten());
        own.into_iter().chain(parts.flat_map(descriptions)).collect()
    }

    #[test]
    fn descriptions_are_for_readers_without_the_code() {
        let document = crate::routes::document();
        let all = descriptions(&document);
        assert!(all.len() > 1000, "{} descriptions", all.len());
        for text in all {
            assert!(!text.contains("::") && !text.contains("[`"), "say what is meant: {text}");
        }
    }
}
