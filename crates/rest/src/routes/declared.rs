//! Routes, each with the causes of its errors: none is registered without them.

use std::sync::Arc;

use utoipa::openapi::OpenApi;
use utoipa::openapi::path::PathItem;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};
use vmseal_control::services::Services;

use crate::document::causes::{Cause, Causes};

/// Some of the routes.
pub(crate) struct Declared {
    router: OpenApiRouter<Arc<Services>>,
    causes: Causes,
}

impl Declared {
    /// None yet.
    pub(super) fn new() -> Self {
        Self { router: OpenApiRouter::new(), causes: Causes::new() }
    }

    /// None yet; what is added is described in this document.
    pub(super) fn in_document(document: OpenApi) -> Self {
        Self { router: OpenApiRouter::with_openapi(document), causes: Causes::new() }
    }

    /// These, and a route whose errors have these causes.
    pub(super) fn with<const N: usize>(
        mut self,
        (schemas, paths, route): UtoipaMethodRouter<Arc<Services>>,
        causes: [Cause; N],
    ) -> Self {
        const { assert!(N > 0, "a route says what its errors come from, `Itself` at least") };
        for (path, item) in &paths.paths {
            for method in methods(item) {
                self.causes.insert((path.clone(), method.to_owned()), causes.to_vec());
            }
        }
        self.router = self.router.routes((schemas, paths, route));
        self
    }

    /// These, and others.
    pub(super) fn merge(mut self, others: Self) -> Self {
        self.causes.extend(others.causes);
        Self { router: self.router.merge(others.router), causes: self.causes }
    }

    /// The routes themselves.
    pub(super) fn into_router(self) -> axum::Router<Arc<Services>> {
        self.router.into()
    }

    /// What the routes say of themselves, and the causes of their errors.
    pub(super) fn into_description(self) -> (OpenApi, Causes) {
        (self.router.into_openapi(), self.causes)
    }
}

/// The methods of a path, as the API document names them.
fn methods(item: &PathItem) -> impl Iterator<Item = &'static str> {
    let known = [
        ("get", item.get.is_some()),
        ("put", item.put.is_some()),
        ("post", item.post.is_some()),
        ("delete", item.delete.is_some()),
        ("patch", item.patch.is_some()),
    ];
    known.into_iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name)
}
