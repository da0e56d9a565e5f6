//! The backup of a KMIP provider. What is read is all that is there, and is written back as what reads the
//! same.

use vmseal_api::provider_backup::{BackupError, head, is_backup, parse};

/// See the module.
pub fn run(data: &[u8]) {
    let Ok(parsed) = parse(data) else { return };
    assert!(is_backup(data));
    assert_eq!([parsed.head, parsed.sealed].concat(), data);
    // JSON can be longer than what was read, as it escapes what others need not.
    let written = match head(&parsed.settings) {
        Ok(written) => written,
        Err(BackupError::TooLong(_)) => return,
        Err(error) => panic!("{error}"),
    };
    let again = [&written[..], parsed.sealed].concat();
    assert_eq!(parse(&again).unwrap().settings, parsed.settings);
}
