//! Successful answers.

use std::borrow::Cow;
use std::marker::PhantomData;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use utoipa::openapi::{OneOfBuilder, Ref, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};
use vmseal_api::filter::BitmapStatus;
use vmseal_api::kmip::Pem;
use vmseal_api::model::{Datastore, Host, Plan, Policy, Provider, RekeyedDatastore, Task, Vm};
use vmseal_api::request::Backup;
use vmseal_control::services::Outcome;

/// The answer to a request that supports a dry run.
pub(crate) struct Answer<T>(pub Outcome<T>);

impl<T: IntoResponse> IntoResponse for Answer<T> {
    fn into_response(self) -> Response {
        match self.0 {
            Outcome::Done(answer) => answer.into_response(),
            Outcome::Planned(plan) => Json(plan).into_response(),
        }
    }
}

/// The answer to a request that starts a task: 202, the task, and its location.
pub(crate) struct Accepted(pub Task);

impl IntoResponse for Accepted {
    fn into_response(self) -> Response {
        let place = format!("/api/v1/tasks/{}", self.0.id);
        let mut response = (StatusCode::ACCEPTED, Json(self.0)).into_response();
        // A UUID is a valid header value.
        if let Ok(place) = HeaderValue::try_from(place) {
            response.headers_mut().insert(header::LOCATION, place);
        }
        response
    }
}

/// 201, with the new resource.
pub(crate) fn created<T>(made: T) -> (StatusCode, Json<T>) {
    (StatusCode::CREATED, Json(made))
}

/// 204.
pub(crate) fn no_content((): ()) -> StatusCode {
    StatusCode::NO_CONTENT
}

/// In the OpenAPI document: an answer with the same status for a dry run and for the real request.
pub(crate) struct OrPlan<T>(PhantomData<T>);

pub(crate) type BackupOrPlan = OrPlan<Backup>;
pub(crate) type BitmapOrPlan = OrPlan<BitmapStatus>;
pub(crate) type DatastoreOrPlan = OrPlan<Datastore>;
pub(crate) type HostOrPlan = OrPlan<Host>;
pub(crate) type PemOrPlan = OrPlan<Pem>;
pub(crate) type PolicyOrPlan = OrPlan<Policy>;
pub(crate) type ProviderOrPlan = OrPlan<Provider>;
pub(crate) type RekeyedDatastoreOrPlan = OrPlan<RekeyedDatastore>;
pub(crate) type TaskOrPlan = OrPlan<Task>;
pub(crate) type VmOrPlan = OrPlan<Vm>;

impl<T: ToSchema> PartialSchema for OrPlan<T> {
    fn schema() -> RefOr<Schema> {
        OneOfBuilder::new()
            .item(Ref::from_schema_name(T::name()))
            .item(Ref::from_schema_name(Plan::name()))
            .description(Some("The result; or, for a dry run, what would be done."))
            .into()
    }
}

impl<T: ToSchema> ToSchema for OrPlan<T> {
    fn name() -> Cow<'static, str> {
        format!("{}OrPlan", T::name()).into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((T::name().into(), T::schema()));
        T::schemas(schemas);
        schemas.push((Plan::name().into(), Plan::schema()));
        Plan::schemas(schemas);
    }
}
