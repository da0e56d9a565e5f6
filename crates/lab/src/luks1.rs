//! How qemu-img formats LUKS1 (AES-256-XTS as vmseal), for disks that are measured and for OSDs.

/// QEMU times 32768 rounds of its key derivation with a clock that often does not advance meanwhile, and then
/// gives up ("Unable to get accurate CPU usage"): with SHA-256 in one of six attempts on a busy machine, with
/// the slower SHA-512 never observed. The derivation is not part of what is measured.
pub const FORMAT_ATTEMPTS: u32 = 5;

/// How qemu-img formats an image whose passphrase is secret `s0`.
pub const FORMAT: [&str; 4] = [
    "-o",
    "key-secret=s0,cipher-alg=aes-256,cipher-mode=xts,ivgen-alg=plain64",
    "-o",
    "hash-alg=sha512,iter-time=200",
];
