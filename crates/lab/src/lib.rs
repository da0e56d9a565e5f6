//! vmseal-lab
