//! vmseal-luks
