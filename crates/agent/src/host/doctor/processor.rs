//! The processor: its instructions, and whether guests run on it.

use std::fs::File;
use std::path::Path;

use vmseal_api::host::AcceleratorKind;

use super::Finding;
use crate::hypervisor::accelerator;
use crate::process;
use crate::process::machine::Machine;

/// AES, and the wide AES that makes encryption cheap.
pub fn instructions() -> Finding {
    const CHECK: &str = "processor";
    if !Machine::this().aes_hardware {
        return Finding::warning(
            CHECK,
            "it has no AES instructions: encryption takes many times the processor time",
            "in a virtual machine, pass the host's processor through; else use another machine",
        );
    }
    let wide = if has_wide_aes() { "AES and VAES" } else { "AES, and no VAES" };
    Finding::ok(CHECK, format!("it has {wide} instructions"))
}

#[cfg(target_arch = "x86_64")]
fn has_wide_aes() -> bool {
    std::arch::is_x86_feature_detected!("vaes")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_wide_aes() -> bool {
    false
}

/// The remedy where no guest runs under KVM; /dev/kvm may be `openable` all the same.
fn kvm_remedy(openable: bool) -> &'static str {
    if openable {
        "if this is a virtual machine, have its host allow nested virtualization and pass all processor features through; else update kernel and firmware"
    } else {
        "turn virtualization on in the firmware (in a virtual machine: nested virtualization on its host), load kvm_intel or kvm_amd, and let the agent's user open /dev/kvm"
    }
}

/// Whether a guest runs under KVM, tried now.
pub async fn accelerator(qemu: &Path) -> Finding {
    const CHECK: &str = "accelerator";
    let found = accelerator::examine(&process::find_program(qemu)).await;
    match found.kind {
        AcceleratorKind::Kvm => {
            Finding::ok(CHECK, format!("guests run under KVM: {}", found.reason))
        }
        AcceleratorKind::Tcg | AcceleratorKind::Unknown => Finding::warning(
            CHECK,
            format!("guests are emulated, which is slow: {}", found.reason),
            kvm_remedy(File::options().read(true).write(true).open("/dev/kvm").is_ok()),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_advice_to_load_kvm_where_it_can_be_opened() {
        assert!(!kvm_remedy(true).contains("load"), "{}", kvm_remedy(true));
        assert!(kvm_remedy(false).contains("/dev/kvm"), "{}", kvm_remedy(false));
    }
}
