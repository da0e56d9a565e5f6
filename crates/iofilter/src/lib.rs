//! vmseal-iofilter
