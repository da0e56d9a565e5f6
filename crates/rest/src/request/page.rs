//! The requested part of a list.

use serde::Deserialize;
use utoipa::IntoParams;
use vmseal_control::services::PageRequest;

/// Which part of a list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PageQuery {
    /// The `next` of the last page.
    after: Option<String>,
    /// How many resources at most.
    limit: Option<u32>,
}

impl From<PageQuery> for PageRequest {
    fn from(query: PageQuery) -> Self {
        Self { after: query.after, limit: query.limit }
    }
}
