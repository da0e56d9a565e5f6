//! The parts of a request: bodies, queries and names, each with its limits; each error is a problem that
//! names the field.

use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::BODY_MAX;

use super::objects::Objects;
use crate::problem::ProblemResponse;

/// How many bytes of a body over its limit are read and dropped. A client that gets its answer while still
/// sending loses the connection, and often the answer with it; but a client may not send forever.
const DRAIN_MAX: usize = 4 * BODY_MAX;

/// How long a client may take to send its body. The timeout of a request does not end a change that has begun, so
/// the body needs its own.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

async fn read(body: Body) -> Result<Bytes, ProblemResponse> {
    tokio::time::timeout(BODY_TIMEOUT, collect(body)).await.unwrap_or_else(|_| {
        let seconds = BODY_TIMEOUT.as_secs();
        let detail = format!("the request body took longer than {seconds} s: nothing was done");
        Err(Problem::new(ErrorCode::InvalidRequest, detail).into())
    })
}

async fn collect(mut body: Body) -> Result<Bytes, ProblemResponse> {
    let mut content = Vec::new();
    let mut length = 0;
    // A client that sends its length, and waits for 100 (Continue), is answered before it sends the body.
    let said = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    while length <= DRAIN_MAX && said <= DRAIN_MAX {
        let Some(frame) = body.frame().await else { break };
        let frame = frame.map_err(|error| {
            let detail = format!("the request body could not be read: {error}");
            Problem::new(ErrorCode::InvalidRequest, detail)
        })?;
        let Ok(data) = frame.into_data() else { continue };
        length += data.len();
        if length <= BODY_MAX {
            content.extend_from_slice(&data);
        }
    }
    if length.max(said) > BODY_MAX {
        let detail = format!("the request body is longer than {BODY_MAX} bytes");
        return Err(Problem::new(ErrorCode::TooLarge, detail).into());
    }
    Ok(content.into())
}

/// Parses JSON; an error names the field by its path.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    if bytes.trim_ascii_start().starts_with(b"[") {
        // serde would take its items as the fields in their order.
        let detail = "the body is not valid for this request: it is an array, not an object";
        return Err(Problem::new(ErrorCode::InvalidRequest, detail));
    }
    parse_exactly(bytes).or_else(|problem| {
        let plain = with_plain_integers(bytes).ok_or_else(|| problem.clone())?;
        parse_exactly(&plain).map_err(|_| problem)
    })
}

/// The same JSON with `1` in place of `1.0`: JSON Schema has both as the integer, and serde only the first. None where
/// there is no such number.
fn with_plain_integers(json: &[u8]) -> Option<Vec<u8>> {
    let mut plain = Vec::with_capacity(json.len());
    let (mut in_text, mut rest) = (false, json);
    while let Some((&byte, after)) = rest.split_first() {
        let taken = match byte {
            b'\\' if in_text => rest.len().min(2),
            b'"' => {
                in_text = !in_text;
                1
            }
            b'.' if !in_text && plain.last().is_some_and(u8::is_ascii_digit) => {
                let zeroes = after.iter().take_while(|byte| **byte == b'0').count();
                let goes_on = after.get(zeroes).is_some_and(|byte| b"0123456789.eE".contains(byte));
                if zeroes > 0 && !goes_on {
                    rest = &after[zeroes..];
                    continue;
                }
                1
            }
            _ => 1,
        };
        plain.extend_from_slice(&rest[..taken]);
        rest = &rest[taken..];
    }
    (plain.len() < json.len()).then_some(plain)
}

fn parse_exactly<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(Objects(&mut deserializer)).map_err(|error| {
        let path = error.path().to_string();
        let error = error.into_inner();
        if error.is_data() && path != "." {
            Problem::invalid(path, error.to_string())
        } else {
            Problem::new(
                ErrorCode::InvalidRequest,
                format!("the body is not valid for this request: {error}"),
            )
        }
    })?;
    deserializer.end().map_err(|error| {
        Problem::new(ErrorCode::InvalidRequest, format!("the body has data after its end: {error}"))
    })?;
    Ok(parsed)
}

/// A JSON body.
pub(crate) struct Json<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for Json<T> {
    type Rejection = ProblemResponse;

    async fn from_request(request: Request, _: &S) -> Result<Self, ProblemResponse> {
        check_type(&request)?;
        Ok(Self(parse(&read(request.into_body()).await?)?))
    }
}

fn check_type(request: &Request) -> Result<(), ProblemResponse> {
    let media_type = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = media_type.and_then(|value| value.split(';').next()).map(str::trim);
    if essence.is_some_and(|essence| essence.eq_ignore_ascii_case("application/json")) {
        return Ok(());
    }
    let detail = "the body must be JSON, and Content-Type must say application/json";
    Err(Problem::new(ErrorCode::InvalidRequest, detail).into())
}

/// A JSON body, or none for the defaults.
pub(crate) struct OptionalJson<T>(pub T);

impl<T: DeserializeOwned + Default, S: Sync> FromRequest<S> for OptionalJson<T> {
    type Rejection = ProblemResponse;

    async fn from_request(request: Request, _: &S) -> Result<Self, ProblemResponse> {
        let bytes = read(request.into_body()).await?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        Ok(Self(parse::<Option<T>>(&bytes)?.unwrap_or_default()))
    }
}

/// The body of a request without parameters: nothing, `null` or `{}`.
#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EmptyBody {}

/// The query.
pub(crate) struct QueryOf<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for QueryOf<T> {
    type Rejection = ProblemResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ProblemResponse> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(query)) => Ok(Self(query)),
            Err(error) => Err(Problem::invalid("query", error.body_text()).into()),
        }
    }
}

/// The two names or ids in a path.
pub(crate) struct TwoPathSegments(pub String, pub String);

impl<S: Send + Sync> FromRequestParts<S> for TwoPathSegments {
    type Rejection = ProblemResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ProblemResponse> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path((first, second))) => Ok(Self(first, second)),
            Err(error) => Err(Problem::new(ErrorCode::InvalidRequest, error.body_text()).into()),
        }
    }
}

/// The name or id in a path.
pub(crate) struct PathSegment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathSegment {
    type Rejection = ProblemResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ProblemResponse> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(name)) => Ok(Self(name)),
            Err(error) => Err(Problem::new(ErrorCode::InvalidRequest, error.body_text()).into()),
        }
    }
}

/// The three names or ids in a path.
pub(crate) struct ThreePathSegments(pub String, pub String, pub String);

impl<S: Send + Sync> FromRequestParts<S> for ThreePathSegments {
    type Rejection = ProblemResponse;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ProblemResponse> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path((first, second, third))) => Ok(Self(first, second, third)),
            Err(error) => Err(Problem::new(ErrorCode::InvalidRequest, error.body_text()).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sized {
        size: u64,
        name: String,
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Holder {
        of: Option<Sized>,
    }

    #[test]
    fn an_integer_may_be_written_with_a_fraction_of_zero() {
        let sized = |size: &str| {
            parse::<Sized>(format!(r#"{{"name": "a \" 1.0", "size": {size}}}"#).as_bytes())
        };
        for (text, size) in
            [("1", 1), ("1.0", 1), ("20.00", 20), ("18446744073709551615.0", u64::MAX)]
        {
            let name = r#"a " 1.0"#.to_owned();
            assert_eq!(sized(text).unwrap(), Sized { size, name }, "{text}");
        }
        for text in ["1.5", "1.05", "1.0e1", "-1.0", ".0", "1.", "1.0.0", "1.0, \"size\": 2.0"] {
            assert!(sized(text).is_err(), "{text}");
        }
        assert_eq!(sized("1.5").unwrap_err().field.as_deref(), Some("size"));
        // Where a fraction may be, it stays.
        assert_eq!(parse::<Value>(br#"{"a": 1.0}"#).unwrap(), json!({ "a": 1.0 }));
    }

    #[test]
    fn an_array_is_no_body() {
        let refused = parse::<Sized>(br#" [1, "a"]"#).unwrap_err();
        assert!(refused.detail.contains("an array"), "{refused}");
    }

    #[test]
    fn an_array_is_no_object_in_a_body() {
        let refused = parse::<Holder>(br#"{"of": [1, "a"]}"#).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("of"));
        let taken = parse::<Holder>(br#"{"of": {"size": 1, "name": "a"}}"#).unwrap();
        assert_eq!(taken.of, Some(Sized { size: 1, name: "a".to_owned() }));
    }
}
