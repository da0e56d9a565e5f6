//! vmseal-control
