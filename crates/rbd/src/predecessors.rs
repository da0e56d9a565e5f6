//! The processes that served a mount before this one. A killed process leaves the exclusive locks of its images behind, and the cluster
//! takes half a minute to see that it is dead. So each process writes its address to a file, and holds a lock on that file. A process that
//! gets the lock knows that the earlier ones are dead.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// How many are remembered: a lock that is older has run out.
const REMEMBERED: usize = 64;

/// The longest file, in bytes.
const LENGTH_MAX: u64 = 64 * 1024;

/// The file, locked.
pub struct Predecessors {
    file: Flock<File>,
    addresses: Vec<String>,
}

impl Predecessors {
    /// Takes the lock.
    ///
    /// # Errors
    /// `ResourceBusy` while another process serves the mount; those of the file system.
    pub fn lock(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        let mut file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(
            |(_, error)| match error {
                Errno::EWOULDBLOCK => io::ErrorKind::ResourceBusy.into(),
                error => io::Error::from(error),
            },
        )?;
        let mut text = String::new();
        (&mut *file).take(LENGTH_MAX).read_to_string(&mut text)?;
        Ok(Self { file, addresses: text.lines().map(str::to_owned).collect() })
    }

    /// Their addresses.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Notes that of this process, before it takes a lock. The file stays locked as long as this lives.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn note(&mut self, address: &str) -> io::Result<()> {
        let from = (self.addresses.len() + 1).saturating_sub(REMEMBERED);
        let kept = self.addresses[from..].iter().map(String::as_str).chain([address]);
        let text: String = kept.map(|line| format!("{line}\n")).collect();
        // Longer first: a process that dies meanwhile forgets nobody.
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())?;
        self.file.set_len(text.len() as u64)?;
        self.file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_remembered_and_only_one_process_has_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mount");
        for round in 0..REMEMBERED + 2 {
            let mut one = Predecessors::lock(&path).unwrap();
            assert_eq!(one.addresses().len(), round.min(REMEMBERED));
            let busy = Predecessors::lock(&path).err().unwrap();
            assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
            one.note(&format!("127.0.0.1:0/{round}")).unwrap();
        }
        let last = Predecessors::lock(&path).unwrap();
        assert_eq!(last.addresses().last().unwrap(), &format!("127.0.0.1:0/{}", REMEMBERED + 1));
    }
}
