//! The record of a running VM, which may be of any version. What is read is written so that it reads the same;
//! what is not says why, in one line.

use vmseal_agent::process::run_record::Record;

/// See the module.
pub fn run(data: &[u8]) {
    match Record::parse(data) {
        Ok(record) => {
            let written = record.to_text().unwrap();
            assert_eq!(Record::parse(&written).unwrap(), record);
        }
        Err(why) => {
            let told = why.to_string();
            assert!(told.len() < 4096 && !told.is_empty());
        }
    }
}
