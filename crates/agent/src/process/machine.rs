//! Facts about this machine, and where it fails to protect keys and guests.

use std::path::Path;

use vmseal_secret::process::{Hardening, MemoryLock};

use crate::process;

/// The facts of a machine that do not change while it runs.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Its host name.
    pub hostname: String,
    /// Logical processors.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Whether the processor has AES instructions.
    pub aes_hardware: bool,
}

impl Machine {
    /// Reads the facts of this machine.
    #[must_use]
    pub fn this() -> Self {
        Self {
            hostname: nix::sys::utsname::uname()
                .map(|name| name.nodename().to_string_lossy().into_owned())
                .unwrap_or_default(),
            cpus: std::thread::available_parallelism()
                .map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX)),
            memory: nix::sys::sysinfo::sysinfo().map_or(0, |info| info.ram_total()),
            aes_hardware: has_aes(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_aes() -> bool {
    std::arch::is_x86_feature_detected!("aes")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_aes() -> bool {
    false
}

/// The id of this boot of the kernel.
#[must_use]
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

/// What could not be protected as it should be: messages for operators, each with its remedy.
#[must_use]
pub fn weaknesses(hardening: Option<Hardening>, root: bool) -> Vec<String> {
    let mut found = Vec::new();
    match hardening {
        None => found.push(
            "the agent has not hardened itself: its memory may be swapped and dumped".to_owned(),
        ),
        Some(hardening) => {
            match hardening.memory {
                MemoryLock::Locked => {}
                MemoryLock::LimitTooLow(bytes) => found.push(format!(
                    "the agent may lock only {bytes} bytes of its memory; set LimitMEMLOCK=infinity or run it as root"
                )),
                MemoryLock::Refused(errno) => {
                    found.push(format!(
                        "the agent's memory cannot be locked: {errno}; encrypt swap or turn it off"
                    ));
                }
            }
            if !hardening.not_dumpable || !hardening.no_core {
                found.push("the agent can be dumped; start it with LimitCORE=0".to_owned());
            }
        }
    }
    // In a user namespace the capability does not count for memory locks: the agent has tried, and filters
    // get no more.
    let agent_locks = hardening.is_none_or(|hardening| hardening.memory == MemoryLock::Locked);
    if root && !(agent_locks && process::child_can_lock()) {
        found.push(
            "filter processes may not lock all their memory, where ciphers keep their keys; set LimitMEMLOCK=infinity, give the agent CAP_IPC_LOCK, or encrypt swap"
                .to_owned(),
        );
    }
    if !root {
        found.push(
            "the agent does not run as root: guests and filters run under its own user, not each under one of its own"
                .to_owned(),
        );
    }
    found.extend(swaps_in_the_clear().into_iter().map(|area| {
        format!("swap area {area} is not encrypted: memory of guests may reach it. Encrypt it or turn it off")
    }));
    found
}

/// This machine's swap areas that are neither encrypted nor in memory.
#[must_use]
pub fn swaps_in_the_clear() -> Vec<String> {
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    clear_swaps(&swaps, Path::new("/sys/class/block"))
}

/// The swap areas that are neither in memory (zram) nor on dm-crypt.
fn clear_swaps(swaps: &str, block: &Path) -> Vec<String> {
    let areas = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    areas.filter(|area| !is_protected(area, block)).map(str::to_owned).collect()
}

fn is_protected(area: &str, block: &Path) -> bool {
    let resolved = std::fs::canonicalize(area).unwrap_or_else(|_| area.into());
    let Some(name) = resolved.file_name() else { return false };
    if resolved.starts_with("/dev") && name.to_string_lossy().starts_with("zram") {
        return true;
    }
    // libcryptsetup and systemd name every dm-crypt mapping like this.
    std::fs::read_to_string(block.join(name).join("dm/uuid"))
        .is_ok_and(|uuid| uuid.starts_with("CRYPT-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unencrypted_swap_is_distinguished_from_swap_in_memory_and_on_dm_crypt() {
        let block = tempfile::tempdir().unwrap();
        for (name, uuid) in [("dm-0", "CRYPT-PLAIN-swap"), ("dm-1", "LVM-abc")] {
            let dm = block.path().join(name).join("dm");
            std::fs::create_dir_all(&dm).unwrap();
            std::fs::write(dm.join("uuid"), uuid).unwrap();
        }
        let swaps = "Filename Type Size Used Priority\n\
            /dev/zram0 partition 1 0 100\n/dev/dm-0 partition 1 0 -2\n\
            /dev/dm-1 partition 1 0 -2\n/swap-file file 1 0 -3\n";
        assert_eq!(clear_swaps(swaps, block.path()), ["/dev/dm-1", "/swap-file"]);
    }

    #[test]
    fn the_machine_and_its_weaknesses_are_described() {
        let machine = Machine::this();
        assert!(machine.cpus > 0 && machine.memory > 0 && !machine.hostname.is_empty());
        assert_eq!(boot_id().len(), 36);
        assert!(weaknesses(None, false).len() >= 2);
        let hardening = Hardening { memory: MemoryLock::Locked, not_dumpable: true, no_core: true };
        let filters = |found: &[String]| found.iter().any(|text| text.starts_with("filter"));
        let found = weaknesses(Some(hardening), true);
        assert!(!found.iter().any(|text| text.starts_with("the agent")), "{found:?}");
        assert_eq!(filters(&found), !process::child_can_lock(), "{found:?}");
        // What does not count for the agent does not count for a filter.
        let limited = Hardening { memory: MemoryLock::LimitTooLow(65536), ..hardening };
        assert!(filters(&weaknesses(Some(limited), true)));
    }
}
