//! Memory: whether keys can leave it.

use vmseal_secret::Backing;
use vmseal_secret::process::{Hardening, MemoryLock};

use super::Finding;
use crate::process;
use crate::process::machine;

const RAISE: &str =
    "set LimitMEMLOCK=infinity in the unit (ulimit -l unlimited in a shell), or run it as root";

/// All checks of memory.
pub fn all(hardening: Hardening) -> Vec<Finding> {
    vec![
        lock(hardening.memory),
        filters(hardening.memory),
        secrets(Backing::of_this_machine()),
        swap(&machine::swaps_in_the_clear()),
        cores(hardening),
    ]
}

fn lock(memory: MemoryLock) -> Finding {
    const CHECK: &str = "memory-lock";
    match memory {
        MemoryLock::Locked => Finding::ok(CHECK, "processes may lock all their memory"),
        MemoryLock::LimitTooLow(bytes) => Finding::warning(
            CHECK,
            format!(
                "only {bytes} bytes may be locked: keys are locked, ciphers and TLS buffers may be swapped"
            ),
            RAISE,
        ),
        MemoryLock::Refused(errno) => {
            Finding::warning(CHECK, format!("memory cannot be locked: {errno}"), RAISE)
        }
    }
}

fn filters(memory: MemoryLock) -> Finding {
    const CHECK: &str = "filter-memory-lock";
    if !nix::unistd::geteuid().is_root() {
        return Finding::ok(CHECK, "without root, filters have the limits of this process");
    }
    if memory == MemoryLock::Locked && process::child_can_lock() {
        return Finding::ok(CHECK, "filters may lock all their memory under users of their own");
    }
    Finding::warning(
        CHECK,
        "filters under users of their own may not lock all their memory, where ciphers keep their keys",
        "set LimitMEMLOCK=infinity, give the agent CAP_IPC_LOCK, or encrypt swap",
    )
}

fn secrets(backing: Backing) -> Finding {
    const CHECK: &str = "secret-memory";
    match backing {
        Backing::SecretMemory => {
            Finding::ok(CHECK, "keys are in memfd_secret, which not even the kernel maps")
        }
        Backing::LockedMemory => Finding::warning(
            CHECK,
            "the kernel has no memfd_secret: keys are in locked memory that root and the kernel can read",
            "use Linux 5.14 or later, and boot with secretmem.enable=1",
        ),
    }
}

fn swap(clear: &[String]) -> Finding {
    const CHECK: &str = "swap";
    if clear.is_empty() {
        return Finding::ok(CHECK, "there is no swap, or all of it is encrypted or in memory");
    }
    let found = format!("not encrypted: {}; memory of guests may reach it", clear.join(", "));
    Finding::warning(CHECK, found, "put it on dm-crypt with a random key, or turn it off (swapoff)")
}

fn cores(hardening: Hardening) -> Finding {
    const CHECK: &str = "cores";
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    let pattern = pattern.trim();
    if hardening.not_dumpable && hardening.no_core {
        let found = format!(
            "processes that hold keys cannot be dumped, whatever core_pattern says ({pattern})"
        );
        return Finding::ok(CHECK, found);
    }
    let found = format!("core dumps cannot be disabled; core_pattern sends them to {pattern}");
    Finding::failed(CHECK, found, "start it with LimitCORE=0, and check that prctl is not filtered")
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn memory_that_could_be_swapped_or_dumped_is_reported() {
        assert_eq!(lock(MemoryLock::Locked).result, Verdict::Ok);
        let low = lock(MemoryLock::LimitTooLow(65536));
        assert!(low.result == Verdict::Warning && low.found.contains("65536"));
        assert_eq!(secrets(Backing::SecretMemory).result, Verdict::Ok);
        assert_eq!(secrets(Backing::LockedMemory).result, Verdict::Warning);
        let clear = swap(&["/dev/sda2".to_owned()]);
        assert!(clear.result == Verdict::Warning && clear.found.contains("/dev/sda2"));
        assert_eq!(swap(&[]).result, Verdict::Ok);
        let hardening = Hardening { memory: MemoryLock::Locked, not_dumpable: true, no_core: true };
        assert_eq!(cores(hardening).result, Verdict::Ok);
        assert_eq!(cores(Hardening { no_core: false, ..hardening }).result, Verdict::Failed);
    }
}
