//! What the unit tests stand on.
