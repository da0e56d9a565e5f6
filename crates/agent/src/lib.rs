//! vmseal-agent
