//! vmseal-secret
