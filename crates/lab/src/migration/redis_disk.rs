//! The disk that redis in a guest writes to: a file system full of random bytes, on which redis keeps a log of what it was told, and
//! syncs it before it answers.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::operation;
use crate::outcome::OperationError;
use crate::stop;

/// What makes the file system.
const MAKES: &str = "mke2fs";
/// What it is told. It leaves the random bytes where nothing is yet (`nodiscard`, and no zeroes for the journal), so that nothing of the
/// disk is left out when it is copied, and it leaves nothing for the guest to do later (`lazy_itable_init`). Few files need few inodes.
const OPTIONS: [&str; 12] = [
    "-q",
    "-F",
    "-t",
    "ext4",
    "-b",
    "4096",
    "-m",
    "0",
    "-N",
    "1024",
    "-E",
    "nodiscard,lazy_itable_init=0,lazy_journal_init=1",
];

/// What is typed in the guest so that redis starts anew with its log on the second disk, and what the output has then, which is not
/// typed. The guest has no driver of disks until then. The log is written anew when the laboratory says so, and not by itself in the
/// middle of a move.
pub(super) const KEEP_LOG: &[u8] =
    b"insmod /virtio_blk.ko; until [ -b /dev/vdb ]; do sleep 0.1; done; \
mkdir /data && mount -t ext4 /dev/vdb /data && { killall redis-server; \
while pidof redis-server >/dev/null; do sleep 0.1; done; \
redis-server --dir /data --appendonly yes --auto-aof-rewrite-percentage 0 --rdbcompression no \
--save '' --protected-mode no --logfile /dev/null & echo LOG-$((6 * 7)); }\n";
pub(super) const KEEPS_LOG: &str = "LOG-42";

/// Has redis sync its log before it answers a SET, and write it anew with what it holds now, so that it is as long before each move.
pub(super) const SYNC: &[u8] = b"CONFIG SET appendfsync always\r\n";
pub(super) const WRITE_ANEW: &[u8] = b"BGREWRITEAOF\r\n";
/// Asks how far it is with that.
pub(super) const HOW_FAR: &[u8] = b"INFO persistence\r\n";

/// How far redis is with its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Log {
    /// It is written anew.
    Begun,
    /// It is new, and all that redis is told is added to it.
    New,
    /// It has none, or could not write it.
    Failed,
}

impl Log {
    /// By what redis says of it: lines with a name, a colon and a value.
    pub fn of(told: &str) -> Self {
        let is = |name: &str, value: &str| {
            let mut fields = told.lines().filter_map(|line| line.trim_end().split_once(':'));
            fields.any(|field| field == (name, value))
        };
        let goes_on = is("aof_rewrite_in_progress", "1") || is("aof_rewrite_scheduled", "1");
        let has_failed =
            ["aof_last_bgrewrite_status", "aof_last_write_status"].iter().any(|it| !is(it, "ok"));
        match () {
            () if !is("aof_enabled", "1") || has_failed => Self::Failed,
            () if goes_on => Self::Begun,
            () => Self::New,
        }
    }
}

/// Why there cannot be such disks.
pub(super) fn obstacle() -> Option<String> {
    let found = Command::new(MAKES).arg("-V").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let why = |error| format!("{MAKES} cannot be run: {error} (Debian's package e2fsprogs has it)");
    found.err().map(why)
}

/// Makes one of so many MiB.
pub(super) fn make(path: &Path, size_mib: u64) -> Result<(), OperationError> {
    let filled = operation::fill(path, size_mib);
    filled.map_err(|source| OperationError::File { path: path.into(), source })?;
    let output = stop::output(Command::new(MAKES).args(OPTIONS).arg(path));
    let output =
        output.map_err(|source| OperationError::Program { program: MAKES.into(), source })?;
    if output.status.success() {
        return Ok(());
    }
    Err(OperationError::Command {
        what: format!("{MAKES} {}", path.display()),
        said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn a_disk_is_a_file_system_full_of_random_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data.raw");
        make(&path, 32).unwrap();
        let file = fs::File::open(&path).unwrap();
        let mut magic = [0; 2];
        file.read_exact_at(&mut magic, 1080).unwrap();
        assert_eq!(magic, [0x53, 0xef], "the mark of ext4's superblock");
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), 32 << 20);
        assert!(metadata.blocks() * 512 >= 32 << 20, "there are holes");
        // Of the pages of the disk hardly any are zero.
        let content = fs::read(&path).unwrap();
        let zero = content.chunks(4096).filter(|page| page.iter().all(|byte| *byte == 0)).count();
        assert!(zero * 20 < content.len() / 4096, "{zero} pages of zeroes");
    }

    #[test]
    fn a_log_is_new_once_redis_has_written_it() {
        let told = |enabled, progress, scheduled, rewritten, written| {
            format!(
                "# Persistence\r\nloading:0\r\naof_enabled:{enabled}\r\naof_rewrite_in_progress:{progress}\r\n\
                 aof_rewrite_scheduled:{scheduled}\r\naof_last_bgrewrite_status:{rewritten}\r\n\
                 aof_last_write_status:{written}\r\n"
            )
        };
        assert_eq!(Log::of(&told(1, 0, 0, "ok", "ok")), Log::New);
        assert_eq!(Log::of(&told(1, 1, 0, "ok", "ok")), Log::Begun);
        assert_eq!(Log::of(&told(1, 0, 1, "ok", "ok")), Log::Begun);
        assert_eq!(Log::of(&told(0, 0, 0, "ok", "ok")), Log::Failed);
        assert_eq!(Log::of(&told(1, 0, 0, "err", "ok")), Log::Failed);
        assert_eq!(Log::of(&told(1, 0, 0, "ok", "err")), Log::Failed);
        assert_eq!(Log::of(""), Log::Failed);
    }
}
