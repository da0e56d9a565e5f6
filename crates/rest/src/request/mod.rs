//! What comes with a request, and what is checked before its handler.

pub(crate) mod auth;
pub(crate) mod body;
pub(crate) mod dry_run;
pub(crate) mod page;
