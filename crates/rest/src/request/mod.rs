//! The parts of a request, and the checks before its handler.

pub(crate) mod auth;
pub(crate) mod body;
pub(crate) mod dry_run;
mod objects;
pub(crate) mod page;
