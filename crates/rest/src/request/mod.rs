//! The parts of a request, and the checks before its handler.

pub(crate) mod auth;
pub(crate) mod body;
pub(crate) mod dry_run;
pub(crate) mod page;
