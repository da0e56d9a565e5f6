//! The processor: what it can, and whether guests run on it.

use std::path::Path;

use vmseal_api::host::AcceleratorKind;

use super::Finding;
use crate::machine::Machine;
use crate::{accelerator, process};

/// AES, and the wide AES that makes the cost of encryption small.
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

/// Whether a guest runs under KVM, tried anew.
pub async fn accelerator(qemu: &Path) -> Finding {
    const CHECK: &str = "accelerator";
    let found = accelerator::examine(&process::find_program(qemu)).await;
    match found.kind {
        AcceleratorKind::Kvm => {
            Finding::ok(CHECK, format!("guests run under KVM: {}", found.reason))
        }
        AcceleratorKind::Tcg => Finding::warning(
            CHECK,
            format!("guests are emulated, which is slow: {}", found.reason),
            "turn virtualization on in the firmware, load kvm_intel or kvm_amd, and see that /dev/kvm may be opened",
        ),
    }
}
