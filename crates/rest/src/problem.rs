//! Problems as HTTP responses.

use std::collections::BTreeMap;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use utoipa::openapi::{ContentBuilder, Ref, RefOr, ResponseBuilder, response};
use utoipa::{IntoResponses, PartialSchema, ToSchema};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;

/// The media type of problems (RFC 9457).
const MEDIA_TYPE: &str = "application/problem+json";

/// After how many seconds a client of a busy server may ask again. Few: the request has waited before it was refused.
const RETRY_AFTER: &str = "1";

/// The answer of a handler that refuses or fails.
#[derive(Debug)]
pub(crate) struct ProblemResponse(pub Problem);

impl From<Problem> for ProblemResponse {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for ProblemResponse {
    fn into_response(mut self) -> Response {
        self.0.request_id = request_id::current().map(|id| id.as_str().into());
        let status =
            StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // A problem can always be serialized.
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, MEDIA_TYPE)], body).into_response();
        if self.0.code == ErrorCode::Unauthenticated {
            let scheme = HeaderValue::from_static("Bearer realm=\"vmseal\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        if self.0.code == ErrorCode::Busy {
            let pause = HeaderValue::from_static(RETRY_AFTER);
            response.headers_mut().insert(header::RETRY_AFTER, pause);
        }
        response
    }
}

/// In the OpenAPI document: any other status is a problem.
impl IntoResponses for ProblemResponse {
    fn responses() -> BTreeMap<String, RefOr<response::Response>> {
        let content = ContentBuilder::new()
            .schema(Some(RefOr::Ref(Ref::from_schema_name(Problem::name()))))
            .build();
        let response = ResponseBuilder::new()
            .description("What went wrong, with which field, and what to do")
            .content(MEDIA_TYPE, content)
            .build();
        BTreeMap::from([("default".to_owned(), RefOr::T(response))])
    }
}

/// The schema that [`Refusal`] refers to in the OpenAPI document.
pub(crate) fn schemas() -> Vec<(String, RefOr<utoipa::openapi::Schema>)> {
    let mut schemas = vec![(Problem::name().into_owned(), Problem::schema())];
    Problem::schemas(&mut schemas);
    schemas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_server_says_when_to_ask_again() {
        for (code, status, again) in
            [(ErrorCode::Busy, 503, true), (ErrorCode::Internal, 500, false)]
        {
            let answer = ProblemResponse(Problem::new(code, "why")).into_response();
            assert_eq!(answer.status().as_u16(), status);
            assert_eq!(answer.headers().contains_key(header::RETRY_AFTER), again, "{code:?}");
        }
    }
}
