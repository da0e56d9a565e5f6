//! [`SecretBytes`]: the type of every key and passphrase of vmseal.

use std::fmt;
use std::os::fd::AsFd;

use zeroize::Zeroize;

use crate::memory::{Backing, MemoryError, Region, SecretFd};

/// The length of a key-encryption key, in bytes: AES-256.
pub const KEK_LEN: usize = 32;

/// The length of a disk's data-encryption key, in bytes: two AES-256 keys, as AES-256-XTS has it.
pub const DEK_LEN: usize = 64;

/// Secret bytes of a fixed length, in memory that is locked, never dumped, never inherited by a
/// forked child, and wiped when the value is dropped. `Debug` shows the length alone; there is no
/// `Clone`, `Display` or serde on purpose.
pub struct SecretBytes(Region);

impl SecretBytes {
    /// `len` zero bytes, to be filled through [`SecretBytes::expose_mut`].
    ///
    /// # Errors
    /// [`MemoryError`]: the length is not allowed, or there is no memory that can be locked.
    pub fn zeroed(len: usize) -> Result<Self, MemoryError> {
        Region::zeroed(len, Backing::of_this_machine()).map(Self)
    }

    /// `len` bytes from AWS-LC's random generator.
    ///
    /// # Errors
    /// [`MemoryError`], as [`SecretBytes::zeroed`], or the generator failed.
    pub fn random(len: usize) -> Result<Self, MemoryError> {
        let mut secret = Self::zeroed(len)?;
        aws_lc_rs::rand::fill(secret.expose_mut()).map_err(|_| MemoryError::Random)?;
        Ok(secret)
    }

    /// Takes over a secret from ordinary memory: copies it and wipes the source, also on an error.
    ///
    /// # Errors
    /// [`MemoryError`], as [`SecretBytes::zeroed`].
    pub fn from_wiped(source: &mut [u8]) -> Result<Self, MemoryError> {
        let secret = Self::zeroed(source.len()).map(|mut secret| {
            secret.expose_mut().copy_from_slice(source);
            secret
        });
        source.zeroize();
        secret
    }

    /// A second copy. Not `Clone`, because it can fail and copies should be visible in the code.
    ///
    /// # Errors
    /// [`MemoryError`], as [`SecretBytes::zeroed`].
    pub fn try_clone(&self) -> Result<Self, MemoryError> {
        Self::copy_of(self.expose())
    }

    /// A copy of a part of a secret.
    pub(crate) fn copy_of(bytes: &[u8]) -> Result<Self, MemoryError> {
        let mut copy = Self::zeroed(bytes.len())?;
        copy.expose_mut().copy_from_slice(bytes);
        Ok(copy)
    }

    /// The bytes. Copies must not outlive this value.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        self.0.as_slice()
    }

    /// The bytes, for changing.
    #[must_use]
    pub fn expose_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }

    /// How many bytes; never zero.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a secret is never empty")]
    pub fn len(&self) -> usize {
        self.expose().len()
    }

    /// The kind of memory that holds it.
    #[must_use]
    pub fn backing(&self) -> Backing {
        self.0.backing()
    }

    /// A new descriptor with a copy, for a child process to inherit. It is close-on-exec: the child's set-up
    /// clears that on the one descriptor that it should have.
    ///
    /// # Errors
    /// [`MemoryError`], as [`SecretBytes::zeroed`].
    pub fn to_memfd(&self) -> Result<SecretFd, MemoryError> {
        self.0.to_memfd()
    }

    /// A copy of the secret of `len` bytes in a descriptor made by [`SecretBytes::to_memfd`]. Close the
    /// descriptor afterwards.
    ///
    /// # Errors
    /// [`MemoryError`]: the descriptor is of another kind or size; or those of [`SecretBytes::zeroed`].
    pub fn from_memfd(fd: impl AsFd, len: usize) -> Result<Self, MemoryError> {
        Region::from_memfd(fd.as_fd(), len).map(Self)
    }
}

/// Constant-time for equal lengths.
impl PartialEq for SecretBytes {
    fn eq(&self, other: &Self) -> bool {
        aws_lc_rs::constant_time::verify_slices_are_equal(self.expose(), other.expose()).is_ok()
    }
}

impl Eq for SecretBytes {}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretBytes({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;
    use crate::memory::SECRET_LEN_MAX;

    const BOTH: [Backing; 2] = [Backing::SecretMemory, Backing::LockedMemory];

    /// `/proc/self/smaps` flags of the mapping that holds this address.
    fn mapping_flags(address: usize) -> String {
        let mut inside = false;
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let range = line.split(' ').next().unwrap();
            if let Some((from, to)) = range.split_once('-')
                && let (Ok(from), Ok(to)) =
                    (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
            {
                inside = (from..to).contains(&address);
            }
            if inside && let Some(flags) = line.strip_prefix("VmFlags: ") {
                return format!(" {flags} ");
            }
        }
        panic!("no mapping holds {address:x}");
    }

    #[test]
    fn the_memory_is_locked_not_dumped_and_not_inherited() {
        for backing in BOTH {
            let secret = SecretBytes(Region::zeroed(DEK_LEN, backing).unwrap());
            let flags = mapping_flags(secret.expose().as_ptr() as usize);
            for flag in [" lo ", " dd ", " dc "] {
                assert!(flags.contains(flag), "{backing:?} lacks{flag}in{flags}");
            }
        }
    }

    #[test]
    fn secret_memory_cannot_be_read_through_proc_mem() {
        use std::os::unix::fs::FileExt;
        let secret = SecretBytes::random(KEK_LEN).unwrap();
        if secret.backing() == Backing::LockedMemory {
            // Not by a macro, whose output the harness hides when a test passes.
            let message = b"skipped: the kernel has no memfd_secret\n";
            return std::io::Write::write_all(&mut std::io::stderr(), message).unwrap();
        }
        let memory = File::open("/proc/self/mem").unwrap();
        let mut stolen = [0; KEK_LEN];
        let address = secret.expose().as_ptr() as u64;
        assert!(memory.read_exact_at(&mut stolen, address).is_err());
        let plain = Box::new([7u8; KEK_LEN]);
        memory.read_exact_at(&mut stolen, plain.as_ptr() as u64).unwrap();
    }

    #[test]
    fn a_secret_passes_through_a_descriptor_and_stays_whole_when_either_side_goes() {
        for backing in BOTH {
            let mut secret = SecretBytes(Region::zeroed(DEK_LEN, backing).unwrap());
            aws_lc_rs::rand::fill(secret.expose_mut()).unwrap();
            let fd = secret.to_memfd().unwrap();
            let expected = secret.try_clone().unwrap();
            drop(secret);
            drop(SecretBytes::from_memfd(&fd, DEK_LEN).unwrap());
            assert_eq!(SecretBytes::from_memfd(&fd, DEK_LEN).unwrap(), expected);
            let wrong = SecretBytes::from_memfd(&fd, KEK_LEN).unwrap_err();
            assert!(matches!(wrong, MemoryError::Size { expected: 32, found: 64, .. }));
        }
    }

    /// Where `memfd_secret` is missing.
    #[test]
    fn an_ordinary_memfd_that_carries_a_secret_is_locked_sealed_and_wiped() {
        use std::os::fd::{AsFd, AsRawFd};
        use std::os::unix::fs::FileExt;
        let mut secret = SecretBytes(Region::zeroed(DEK_LEN, Backing::LockedMemory).unwrap());
        secret.expose_mut().fill(0x5a);
        let carried = secret.to_memfd().unwrap();
        // The receiver's mapping: it outlives the maker's.
        let received = File::from(carried.as_fd().try_clone_to_owned().unwrap());
        let inode =
            format!(" {} ", std::os::unix::fs::MetadataExt::ino(&received.metadata().unwrap()));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mapped = maps
            .lines()
            .find(|line| line.contains("vmseal-secret") && format!("{line} ").contains(&inode));
        let address = mapped.expect("it is not mapped").split('-').next().unwrap();
        let flags = mapping_flags(usize::from_str_radix(address, 16).unwrap());
        for flag in [" lo ", " dd ", " dc "] {
            assert!(flags.contains(flag), "the memory lacks{flag}in{flags}");
        }
        // It cannot be written in any way, and no seal can be added or removed.
        assert!(received.write_at(&[1], 0).is_err());
        assert!(received.set_len(1).is_err() && received.set_len(4096).is_err());
        let (shared, both) = (libc::MAP_SHARED, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let writable = unsafe {
            libc::mmap(std::ptr::null_mut(), DEK_LEN, both, shared, received.as_raw_fd(), 0)
        };
        assert_eq!(writable, libc::MAP_FAILED, "a new writer");
        assert_eq!(SecretBytes::from_memfd(&received, DEK_LEN).unwrap(), secret);
        drop(carried);
        let mut left = [1; DEK_LEN];
        received.read_exact_at(&mut left, 0).unwrap();
        assert_eq!(left, [0; DEK_LEN], "the secret is left in ordinary memory");
    }

    #[test]
    fn an_ordinary_file_is_not_taken_for_a_secret() {
        let fd = memfd_with(&[1; KEK_LEN]);
        let refused = SecretBytes::from_memfd(&fd, KEK_LEN).unwrap_err();
        assert!(matches!(refused, MemoryError::NotSecretMemory(_)), "{refused}");
        let refused = SecretBytes::from_memfd(File::open("/proc/self/exe").unwrap(), KEK_LEN);
        assert!(matches!(refused.unwrap_err(), MemoryError::NotSecretMemory(_)));
    }

    fn memfd_with(content: &[u8]) -> File {
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let mut file = File::from(nix::sys::memfd::memfd_create(c"plain", flags).unwrap());
        file.write_all(content).unwrap();
        file
    }

    #[test]
    fn the_source_is_wiped_also_when_it_is_refused() {
        let mut source = [9u8; KEK_LEN];
        let secret = SecretBytes::from_wiped(&mut source).unwrap();
        assert_eq!((source, secret.expose()), ([0; KEK_LEN], &[9u8; KEK_LEN][..]));
        let mut long = vec![9u8; SECRET_LEN_MAX + 1];
        assert!(matches!(SecretBytes::from_wiped(&mut long), Err(MemoryError::Length(_))));
        assert!(long.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn lengths_beyond_the_limits_are_refused() {
        for len in [0, SECRET_LEN_MAX + 1, usize::MAX] {
            assert!(matches!(SecretBytes::zeroed(len), Err(MemoryError::Length(l)) if l == len));
        }
        assert_eq!(SecretBytes::zeroed(SECRET_LEN_MAX).unwrap().len(), SECRET_LEN_MAX);
    }

    #[test]
    fn debug_shows_the_length_alone_and_random_secrets_differ() {
        let secret = SecretBytes::random(KEK_LEN).unwrap();
        assert_eq!(format!("{secret:?}"), "SecretBytes(32 bytes)");
        assert_ne!(secret, SecretBytes::random(KEK_LEN).unwrap());
        assert_eq!(secret, secret.try_clone().unwrap());
    }
}
