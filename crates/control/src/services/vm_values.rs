//! What users may say of a VM, when it is made and when it is changed: processors, memory, description, labels.

use std::collections::BTreeMap;

use vmseal_api::host::about;
use vmseal_api::problem::Problem;
use vmseal_api::request::{LABELS_MAX, MEMORY_MAX, MEMORY_MIN, MEMORY_UNIT, VCPUS_MAX};
use vmseal_api::size::Size;

/// Whether a VM may have so many virtual processors.
pub(super) fn check_vcpus(vcpus: u32) -> Result<(), Problem> {
    if (1..=VCPUS_MAX).contains(&vcpus) {
        return Ok(());
    }
    Err(Problem::invalid("vcpus", format!("must be 1 to {VCPUS_MAX}")))
}

/// Whether a VM may have so much memory, in bytes.
pub(super) fn check_memory(memory: u64) -> Result<(), Problem> {
    if (MEMORY_MIN..=MEMORY_MAX).contains(&memory) && memory.is_multiple_of(MEMORY_UNIT) {
        return Ok(());
    }
    let detail = format!(
        "is {}: it must be {} to {}, a multiple of {}",
        Size(memory),
        Size(MEMORY_MIN),
        Size(MEMORY_MAX),
        Size(MEMORY_UNIT)
    );
    Err(Problem::invalid("memory", detail))
}

/// Whether a VM may have this description.
pub(super) fn check_description(text: &str) -> Result<(), Problem> {
    about::check_description(text).map_err(|detail| Problem::invalid("description", detail))
}

/// Whether these may be labels of a VM.
pub(super) fn check_labels<'a>(
    mut labels: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<(), Problem> {
    labels.try_for_each(|(key, value)| {
        about::check_label(key, value).map_err(|detail| Problem::invalid("labels", detail))
    })
}

/// Whether a VM may have so many labels.
pub(super) fn check_count(labels: &BTreeMap<String, String>) -> Result<(), Problem> {
    if labels.len() <= LABELS_MAX {
        return Ok(());
    }
    Err(Problem::invalid("labels", format!("a VM has at most {LABELS_MAX} labels")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_memory_is_said_as_it_was_understood() {
        check_memory(MEMORY_MIN).unwrap();
        for (bytes, said) in [(512, "is 512 bytes: "), (MEMORY_MAX + MEMORY_UNIT, "is 6")] {
            let refused = check_memory(bytes).unwrap_err();
            assert!(refused.detail.starts_with(said), "{refused}");
            assert_eq!(refused.field.as_deref(), Some("memory"));
        }
    }
}
