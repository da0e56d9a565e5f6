//! Whether this host has what a VM's machine needs.

use std::path::Path;

use vmseal_api::boot::BootDevice;
use vmseal_api::hardware::{CPU_MODEL_HOST, HUGE_PAGE, Hardware, MemoryBacking};
use vmseal_api::host::AcceleratorKind;
use vmseal_api::problem::{ErrorCode, Problem};

use super::firmware::FirmwareFiles;
use super::qemu::Qemu;
use super::tpm::Swtpm;

/// What the kernel says of its huge pages of 2 MiB.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Checks that this host can run such a machine at all.
///
/// # Errors
/// `unsupported`, with the field, what is missing, and how to get it.
pub fn examine(
    hardware: &Hardware,
    qemu: &Qemu,
    firmware: &FirmwareFiles,
    swtpm: &Swtpm,
    accelerator: AcceleratorKind,
) -> Result<(), Problem> {
    let of = |field: &str| {
        let field = field.to_owned();
        move |problem: Problem| Problem { field: Some(field), ..problem }
    };
    firmware.examine(hardware.firmware).map_err(of("firmware"))?;
    if hardware.tpm {
        swtpm.examine().map_err(of("tpm"))?;
    }
    if let Some(model) = &hardware.cpu_model {
        check_model(model, qemu.cpu_models(), accelerator)
            .map_err(unsupported)
            .map_err(of("cpu_model"))?;
    }
    if hardware.boot.contains(&BootDevice::Network) {
        qemu.check_network_boot().map_err(of("boot"))?;
    }
    match hardware.memory_backing {
        MemoryBacking::Pages => Ok(()),
        MemoryBacking::Hugepages => set_aside(Path::new(HUGE_PAGES), HUGE_PAGE, "nr_hugepages")
            .map_err(unsupported)
            .map_err(of("memory_backing")),
    }
}

/// Checks that the memory of a VM that is about to start is there.
///
/// # Errors
/// `no-space`, with what is missing.
pub fn check_memory(hardware: &Hardware, memory: u64) -> Result<(), Problem> {
    match hardware.memory_backing {
        MemoryBacking::Pages => Ok(()),
        MemoryBacking::Hugepages => set_aside(Path::new(HUGE_PAGES), memory, "free_hugepages")
            .map_err(|what| Problem::new(ErrorCode::NoSpace, what)),
    }
}

fn unsupported(what: String) -> Problem {
    Problem::new(ErrorCode::Unsupported, what)
}

fn check_model(model: &str, known: &[String], accelerator: AcceleratorKind) -> Result<(), String> {
    if model == CPU_MODEL_HOST {
        return match accelerator {
            AcceleratorKind::Kvm => Ok(()),
            AcceleratorKind::Tcg | AcceleratorKind::Unknown => Err(
                "'host' is this host's own processor, which guests get with KVM alone, and this host emulates. Leave it out, or give a model by name (qemu-system-x86_64 -cpu help)".to_owned(),
            ),
        };
    }
    if known.iter().any(|name| name == model) {
        return Ok(());
    }
    Err(format!(
        "QEMU on this host knows no processor model '{model}'; qemu-system-x86_64 -cpu help lists those that it knows"
    ))
}

/// Whether so much memory is set aside as huge pages, by one of the kernel's counts.
fn set_aside(pages: &Path, memory: u64, count: &str) -> Result<(), String> {
    let found: u64 = std::fs::read_to_string(pages.join(count))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0);
    let needed = memory.div_ceil(HUGE_PAGE);
    if found >= needed {
        return Ok(());
    }
    Err(format!(
        "huge pages of 2 MiB that are needed: {needed}; those that this host has: {found}. Set more aside (sysctl vm.nr_hugepages=NUMBER), or leave out huge pages"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_that_qemu_does_not_know_and_the_hosts_own_without_kvm_are_refused() {
        let known = ["EPYC-Milan".to_owned(), "max".to_owned()];
        for (model, accelerator, refused) in [
            ("host", AcceleratorKind::Kvm, None),
            ("host", AcceleratorKind::Tcg, Some("KVM alone")),
            ("max", AcceleratorKind::Tcg, None),
            ("EPYC-Milan", AcceleratorKind::Kvm, None),
            ("EPYC-Paris", AcceleratorKind::Kvm, Some("'EPYC-Paris'")),
        ] {
            match (check_model(model, &known, accelerator), refused) {
                (Ok(()), None) => {}
                (Err(what), Some(said)) => assert!(what.contains(said), "{what}"),
                other => panic!("{model}: {other:?}"),
            }
        }
    }

    #[test]
    fn huge_pages_that_are_not_set_aside_are_missed() {
        let pages = tempfile::tempdir().unwrap();
        let refused = set_aside(pages.path(), 64 << 20, "free_hugepages").unwrap_err();
        assert!(refused.contains("needed: 32;") && refused.contains("has: 0."), "{refused}");
        std::fs::write(pages.path().join("free_hugepages"), "32\n").unwrap();
        set_aside(pages.path(), 64 << 20, "free_hugepages").unwrap();
        assert!(set_aside(pages.path(), 66 << 20, "free_hugepages").is_err());
    }
}
