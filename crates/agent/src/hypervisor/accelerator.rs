//! KVM or emulation? Decided by running a guest, because `/dev/kvm` alone proves too little: on a host that
//! is itself a guest it may open, and even run firmware, and yet hang an operating system.
//!
//! The probe guest is a Linux kernel from this host's /boot. Without a root disk it ends in a panic with a
//! known message; by then it has used long mode, paging, timers and interrupts. Only a guest that gets there
//! in time selects KVM. In any other case emulation is selected, and the reason says why.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::time::timeout;
use vmseal_api::host::{Accelerator, AcceleratorKind};

use super::processor;
use crate::process::machine;
use vmseal_api::atomic_file::{self, PRIVATE};

/// The longest that the probe guest may take: one that runs under KVM needs 1 to 2 s.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// The probe guest's message when it has come through.
const LAST_WORDS: &[u8] = b"Kernel panic - not syncing: VFS";

/// The most output that is looked at, in bytes.
const OUTPUT_MAX: usize = 1024 * 1024;

/// The operator's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// Use the probe's result.
    #[default]
    Auto,
    /// KVM without a probe.
    Kvm,
    /// Emulation.
    Tcg,
}

/// A probe's result, and the kernel and QEMU that it is valid for.
#[derive(Serialize, Deserialize)]
struct Cached {
    boot: String,
    qemu: String,
    found: Accelerator,
}

/// Chooses the accelerator. A probe's result is cached at `cache` for this boot and this QEMU.
pub async fn choose(choice: Choice, qemu: &Path, qemu_version: &str, cache: &Path) -> Accelerator {
    let fixed =
        |kind, reason: &str, processor| Accelerator { kind, reason: reason.to_owned(), processor };
    match choice {
        Choice::Kvm => {
            let processor = processor::of_kvm_guests(qemu).await;
            return fixed(AcceleratorKind::Kvm, "the operator chose KVM", processor);
        }
        Choice::Tcg => return fixed(AcceleratorKind::Tcg, "the operator chose emulation", None),
        Choice::Auto => {}
    }
    let boot = machine::boot_id();
    if let Some(mut cached) = read_cache(cache)
        && (cached.boot.as_str(), cached.qemu.as_str()) == (boot.as_str(), qemu_version)
    {
        // An earlier version did not ask.
        if cached.found.kind == AcceleratorKind::Kvm && cached.found.processor.is_none() {
            cached.found.processor = processor::of_kvm_guests(qemu).await;
        }
        return cached.found;
    }
    let found = examine(qemu).await;
    let cached = Cached { boot, qemu: qemu_version.to_owned(), found: found.clone() };
    let written = serde_json::to_vec(&cached)
        .map_err(io::Error::from)
        .and_then(|json| atomic_file::write(cache, &json, PRIVATE));
    if let Err(error) = written {
        tracing::warn!(path = %cache.display(), %error, "the accelerator's probe is not kept");
    }
    found
}

/// The result of a new probe, whatever the cache says.
pub async fn examine(qemu: &Path) -> Accelerator {
    probe(qemu, Path::new("/dev/kvm"), kernel(Path::new("/boot")), PROBE_TIMEOUT).await
}

fn read_cache(cache: &Path) -> Option<Cached> {
    serde_json::from_slice(&std::fs::read(cache).ok()?).ok()
}

/// A kernel to try: the running one's image, else the last by name.
fn kernel(boot: &Path) -> Option<PathBuf> {
    let running = nix::sys::utsname::uname()
        .ok()
        .map(|name| boot.join(format!("vmlinuz-{}", name.release().to_string_lossy())));
    if let Some(running) = running.filter(|path| std::fs::File::open(path).is_ok()) {
        return Some(running);
    }
    let mut kernels: Vec<PathBuf> = std::fs::read_dir(boot)
        .ok()?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
                && std::fs::File::open(path).is_ok()
        })
        .collect();
    kernels.sort();
    kernels.pop()
}

async fn probe(
    qemu: &Path,
    device: &Path,
    kernel: Option<PathBuf>,
    limit: Duration,
) -> Accelerator {
    let tcg = |reason: String| Accelerator { kind: AcceleratorKind::Tcg, reason, processor: None };
    if let Err(error) = std::fs::OpenOptions::new().read(true).write(true).open(device) {
        return tcg(format!("{} cannot be opened: {error}", device.display()));
    }
    let Some(kernel) = kernel else {
        return tcg(
            "no kernel in /boot to try KVM with; --accelerator kvm uses it untried".to_owned()
        );
    };
    match run(qemu, AcceleratorKind::Kvm, &kernel, limit).await {
        Ok(()) => Accelerator {
            kind: AcceleratorKind::Kvm,
            reason: format!("a probe guest ({}) runs under KVM", kernel.display()),
            processor: processor::of_kvm_guests(qemu).await,
        },
        Err(reason) => tcg(format!("a probe guest does not run under KVM: {reason}")),
    }
}

/// Runs the probe guest; an error says what it did instead of coming through.
async fn run(
    qemu: &Path,
    kind: AcceleratorKind,
    kernel: &Path,
    limit: Duration,
) -> Result<(), String> {
    let (name, cpu) = match kind {
        AcceleratorKind::Kvm => ("kvm", "host"),
        AcceleratorKind::Tcg | AcceleratorKind::Unknown => ("tcg", "max"),
    };
    let mut child = Command::new(qemu)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-machine", "q35", "-accel", name, "-cpu", cpu, "-m", "256M"])
        .args([
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        ])
        .args(["-serial", "stdio", "-append", "console=ttyS0 panic=-1", "-kernel"])
        .arg(kernel)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("{} cannot be started: {error}", qemu.display()))?;
    let (Some(output), Some(errors)) = (child.stdout.take(), child.stderr.take()) else {
        return Err("its output is lost".to_owned());
    };
    let outcome = timeout(limit, async {
        if wait_for(output, LAST_WORDS).await {
            return Ok(());
        }
        let mut said = Vec::new();
        // QEMU's output is optional: without it the reason is still true.
        let _ = errors.take(4096).read_to_end(&mut said).await;
        let said = String::from_utf8_lossy(&said);
        Err(format!("QEMU ended ({})", said.lines().next().unwrap_or("without a word").trim()))
    })
    .await
    .unwrap_or_else(|_| Err(format!("it hangs (nothing more after {} s)", limit.as_secs())));
    if let Err(error) = child.kill().await {
        tracing::debug!(%error, "the probe guest has ended by itself");
    }
    outcome
}

/// Reads until the words are found (true) or the output ends.
async fn wait_for(mut output: impl AsyncRead + Unpin, words: &[u8]) -> bool {
    let mut seen = Vec::new();
    let mut chunk = [0; 4096];
    while seen.len() < OUTPUT_MAX {
        match output.read(&mut chunk).await {
            Ok(length) if length > 0 => seen.extend_from_slice(&chunk[..length]),
            _ => return false,
        }
        let from = seen.len().saturating_sub(chunk.len() + words.len());
        if seen[from..].windows(words.len()).any(|window| window == words) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::pool::tests::write_script;

    /// A script in QEMU's place.
    fn script(directory: &Path, body: &str) -> PathBuf {
        let path = directory.join("qemu");
        write_script(&path, &format!("#!/bin/sh\n{body}\n"));
        path
    }

    async fn probed(body: &str) -> Accelerator {
        let directory = tempfile::tempdir().unwrap();
        let qemu = script(directory.path(), body);
        let kernel = Some(directory.path().join("kernel"));
        probe(&qemu, Path::new("/dev/null"), kernel, Duration::from_secs(1)).await
    }

    #[tokio::test]
    async fn kvm_is_only_chosen_when_the_guest_came_through() {
        let through = probed("echo 'x Kernel panic - not syncing: VFS: no root'; sleep 5").await;
        assert_eq!(through.kind, AcceleratorKind::Kvm, "{}", through.reason);
        for (body, reason) in [
            ("echo Booting; sleep 5", "hangs"),
            ("echo 'failed to set MSR' >&2; exit 1", "failed to set MSR"),
            ("exit 0", "without a word"),
        ] {
            let found = probed(body).await;
            assert_eq!(found.kind, AcceleratorKind::Tcg);
            assert!(found.reason.contains(reason), "{}", found.reason);
        }
    }

    #[tokio::test]
    async fn without_a_device_or_a_kernel_it_is_emulation() {
        let (qemu, limit) = (Path::new("/bin/false"), Duration::from_secs(1));
        let found = probe(qemu, Path::new("/dev/no-kvm"), None, limit).await;
        assert!(found.reason.contains("/dev/no-kvm"), "{}", found.reason);
        let found = probe(qemu, Path::new("/dev/null"), None, limit).await;
        assert!(found.reason.contains("no kernel"), "{}", found.reason);
        assert_eq!(found.kind, AcceleratorKind::Tcg);
    }

    #[tokio::test]
    async fn a_result_is_kept_for_one_qemu_on_one_boot() {
        let directory = tempfile::tempdir().unwrap();
        let cache = directory.path().join("accelerator.json");
        let qemu = script(directory.path(), "exit 1");
        let first = choose(Choice::Auto, &qemu, "7.2", &cache).await;
        assert_eq!(first.kind, AcceleratorKind::Tcg);
        let mut kept: Cached = serde_json::from_slice(&std::fs::read(&cache).unwrap()).unwrap();
        kept.found.reason = "kept".to_owned();
        std::fs::write(&cache, serde_json::to_vec(&kept).unwrap()).unwrap();
        assert_eq!(choose(Choice::Auto, &qemu, "7.2", &cache).await.reason, "kept");
        assert_ne!(choose(Choice::Auto, &qemu, "8.0", &cache).await.reason, "kept");
        assert_eq!(choose(Choice::Kvm, &qemu, "8.0", &cache).await.kind, AcceleratorKind::Kvm);
    }

    /// On any machine: KVM is chosen only where the same kernel then runs under it again.
    #[tokio::test]
    async fn the_probe_ends_in_time_and_kvm_works_where_it_is_chosen() {
        let qemu = Path::new("qemu-system-x86_64");
        let (device, kernel) = (Path::new("/dev/kvm"), kernel(Path::new("/boot")));
        let started = std::time::Instant::now();
        let found = probe(qemu, device, kernel.clone(), PROBE_TIMEOUT).await;
        assert!(started.elapsed() < PROBE_TIMEOUT + Duration::from_secs(5));
        eprintln!("{found:?}");
        if found.kind == AcceleratorKind::Kvm {
            let again = run(qemu, AcceleratorKind::Kvm, &kernel.unwrap(), PROBE_TIMEOUT).await;
            assert_eq!(again, Ok(()));
        }
    }

    /// The kernel of the tests' small guest: a container has none of its own.
    fn guest_kernel() -> PathBuf {
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/build-test-initramfs");
        let built = std::process::Command::new(script).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let said = String::from_utf8(built.stdout).unwrap();
        Path::new(said.lines().last().unwrap()).join("vmlinuz")
    }

    /// The probe's message, from a real kernel under emulation, which runs everywhere.
    #[tokio::test]
    async fn a_real_kernel_comes_through_under_emulation() {
        let kernel = guest_kernel();
        let qemu = Path::new("qemu-system-x86_64");
        let limit = Duration::from_secs(120);
        assert_eq!(run(qemu, AcceleratorKind::Tcg, &kernel, limit).await, Ok(()));
    }
}
