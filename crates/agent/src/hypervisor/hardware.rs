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

/// Checks that this host can run such a machine at all, with so much memory where that is known.
///
/// # Errors
/// `unsupported`, with the field, what is missing, and how to get it.
pub fn examine(
    hardware: &Hardware,
    memory: Option<u64>,
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
        MemoryBacking::Hugepages => check_pool(Path::new(HUGE_PAGES), memory)
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
        MemoryBacking::Hugepages => set_aside(Path::new(HUGE_PAGES), memory, Count::Free)
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

/// Which huge pages count.
#[derive(Clone, Copy)]
enum Count {
    /// All that are set aside: other VMs may have them now, and give them back when they stop.
    All,
    /// Those that nobody has.
    Free,
}

impl Count {
    /// The kernel's name of it, and what it says.
    fn of(self) -> (&'static str, &'static str) {
        match self {
            Self::All => ("nr_hugepages", "those that this host has in all"),
            Self::Free => ("free_hugepages", "those that are free on this host now"),
        }
    }
}

/// Checks that a VM with so much memory could ever start: the host has so many huge pages, free or not. At least one where the memory is
/// not known.
fn check_pool(pages: &Path, memory: Option<u64>) -> Result<(), String> {
    set_aside(pages, memory.unwrap_or(HUGE_PAGE), Count::All)
}

/// Whether so much memory is set aside as huge pages.
fn set_aside(pages: &Path, memory: u64, count: Count) -> Result<(), String> {
    let (name, which) = count.of();
    let found: u64 = std::fs::read_to_string(pages.join(name))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0);
    let needed = memory.div_ceil(HUGE_PAGE);
    if found >= needed {
        return Ok(());
    }
    Err(format!(
        "huge pages of 2 MiB that are needed: {needed}; {which}: {found}. Set more aside (sysctl vm.nr_hugepages=NUMBER), or leave out huge pages"
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
        let refused = set_aside(pages.path(), 64 << 20, Count::Free).unwrap_err();
        assert!(refused.contains("needed: 32;") && refused.contains("now: 0."), "{refused}");
        std::fs::write(pages.path().join("free_hugepages"), "32\n").unwrap();
        set_aside(pages.path(), 64 << 20, Count::Free).unwrap();
        assert!(set_aside(pages.path(), 66 << 20, Count::Free).is_err());
    }

    #[test]
    fn a_host_with_too_few_huge_pages_in_all_is_refused_and_not_one_whose_pages_are_in_use() {
        let pages = tempfile::tempdir().unwrap();
        std::fs::write(pages.path().join("free_hugepages"), "0\n").unwrap();
        std::fs::write(pages.path().join("nr_hugepages"), "32\n").unwrap();
        check_pool(pages.path(), Some(64 << 20)).unwrap();
        let refused = check_pool(pages.path(), Some(66 << 20)).unwrap_err();
        assert!(refused.contains("needed: 33;") && refused.contains("in all: 32."), "{refused}");
        check_pool(pages.path(), None).unwrap();
        std::fs::write(pages.path().join("nr_hugepages"), "0\n").unwrap();
        assert!(check_pool(pages.path(), None).is_err(), "it has none");
    }
}
