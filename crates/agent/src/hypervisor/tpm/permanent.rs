//! What a TPM keeps, taken from one swtpm and given to another, which encrypts it under its own key.
//!
//! ```text
//! swtpm, former key ─► loads it ─► gives it in the clear ─► agent ─► swtpm, new key, empty directory ─► stores and loads it
//! ```
//! This is what QEMU asks of swtpm when a guest moves to another host, without what lasts only as long as the guest runs. Between the
//! two it may go to another host ([`crate::storage::sent_tpm`]).

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use vmseal_api::host::backup::TPM_STATE_MAX;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::{SECRET_LEN_MAX, SecretBytes};

use super::{ANSWER_TIMEOUT, INIT, NAME, SUCCESS, State, Swtpm, ask};
use crate::process::Process;
use crate::process::run_dir::ProcessDir;

/// The commands that ask for what it keeps and give it that (swtpm's tpm_ioctl.h).
const GET_STATE: u32 = 12;
const SET_STATE: u32 = 13;

/// The kind of state that outlives the guest.
const PERMANENT: u32 = 1;

/// In the question: it is to be in the clear. In the answer: it is not, as swtpm has a key for migrations, which vmseal gives to none.
const IN_THE_CLEAR: u32 = 1;
const ENCRYPTED: u32 = 2;

/// What a TPM keeps, in the clear.
#[derive(Debug)]
pub struct Permanent {
    /// One after the other; each but the last is as long as a secret may be.
    parts: Vec<SecretBytes>,
}

impl Swtpm {
    /// Has a process of its own load what it keeps, and takes that. The process ends by itself. Blocks.
    ///
    /// # Errors
    /// As [`Swtpm::start`].
    pub fn take(
        &self,
        directory: &ProcessDir,
        state: &State<'_>,
    ) -> Result<(Permanent, Process), Problem> {
        let mut started = self.launch(directory, state)?;
        let loaded = ask(&mut started.control, &[INIT, 0]);
        let mut started = started.if_done(directory, loaded)?;
        let taken = Permanent::read(&mut started.control).map_err(unanswered);
        let taken = taken.inspect_err(|_| started.process.kill())?;
        Ok((taken, started.shut_down().map_err(unanswered)?))
    }

    /// Has a process of its own keep this, in a directory that is empty. The process ends by itself. Blocks.
    ///
    /// # Errors
    /// As [`Swtpm::start`]; `internal` when it does not keep it: nothing of the VM is damaged.
    pub fn give(
        &self,
        directory: &ProcessDir,
        state: &State<'_>,
        permanent: &Permanent,
    ) -> Result<Process, Problem> {
        self.give_unless_refused(directory, state, permanent, not_stored)
    }

    /// The same of what may be no state of a TPM at all, or of a later version of swtpm: `refused` makes the problem of what swtpm says then,
    /// before it has stored anything.
    ///
    /// # Errors
    /// That of `refused`; as [`Swtpm::give`].
    pub fn give_unless_refused(
        &self,
        directory: &ProcessDir,
        state: &State<'_>,
        permanent: &Permanent,
        refused: impl FnOnce(&str) -> Problem,
    ) -> Result<Process, Problem> {
        let mut started = self.launch(directory, state)?;
        let said = |code: u32| format!("code {code:#x}, {}", directory.log_ends(NAME));
        // It examines what it is given, and stores it when it loads it.
        let given = permanent.write(&mut started.control);
        if let Ok(code) = given
            && code != SUCCESS
        {
            started.process.kill();
            return Err(refused(&said(code)));
        }
        let loaded = given.and_then(|_| ask(&mut started.control, &[INIT, 0]));
        match loaded {
            Ok(code) if code != SUCCESS => {
                started.process.kill();
                Err(not_stored(&said(code)))
            }
            loaded => started.if_done(directory, loaded)?.shut_down().map_err(unanswered),
        }
    }
}

fn not_stored(said: &str) -> Problem {
    let what = format!(
        "swtpm does not store what the VM's TPM keeps under another key ({said}): see whether the datastore has room, and lets it write (AppArmor). What the TPM keeps is as it was"
    );
    Problem::new(ErrorCode::Internal, what)
}

impl Permanent {
    /// Asks a TPM that has loaded what it keeps.
    fn read(control: &mut UnixStream) -> io::Result<Self> {
        let code = ask(control, &[GET_STATE, IN_THE_CLEAR, PERMANENT, 0])?;
        if code != SUCCESS {
            return Err(io::Error::other(format!(
                "it does not give what it keeps (code {code:#x})"
            )));
        }
        control.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        // What follows the code: flags, the length of all, and that of what comes now, which is all.
        let [flags, length, _] = words(control)?;
        if flags & ENCRYPTED != 0 || length == 0 || u64::from(length) > TPM_STATE_MAX {
            let what = format!("it gives {length} bytes of what it keeps, with flags {flags:#x}");
            return Err(io::Error::other(what));
        }
        let mut parts = Vec::new();
        let mut left = usize::try_from(length).map_err(io::Error::other)?;
        while left > 0 {
            let mut part =
                SecretBytes::zeroed(left.min(SECRET_LEN_MAX)).map_err(io::Error::other)?;
            control.read_exact(part.expose_mut())?;
            left -= part.len();
            parts.push(part);
        }
        Ok(Self { parts })
    }

    /// Writes it, in the clear.
    ///
    /// # Errors
    /// Those of what it writes to.
    pub fn write_to(&self, to: &mut impl Write) -> io::Result<()> {
        self.write_from(0, to)
    }

    /// The same without so many bytes at its beginning.
    ///
    /// # Errors
    /// As [`Permanent::write_to`].
    pub fn write_from(&self, begin: usize, to: &mut impl Write) -> io::Result<()> {
        let mut left_out = begin;
        self.parts.iter().try_for_each(|part| {
            let from = left_out.min(part.len());
            left_out -= from;
            to.write_all(&part.expose()[from..])
        })
    }

    /// Its length, in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.parts.iter().map(SecretBytes::len).sum()
    }

    /// What it begins with, its frame first.
    #[must_use]
    pub fn beginning(&self) -> &[u8] {
        self.parts.first().map(SecretBytes::expose).unwrap_or_default()
    }

    /// Reads what was written so, to the end.
    ///
    /// # Errors
    /// Those of what it reads from; it is nothing, or more than a TPM keeps; there is no memory for it.
    pub fn read_from(from: &mut impl Read) -> io::Result<Self> {
        let (mut parts, mut length) = (Vec::new(), 0_usize);
        loop {
            let mut part = SecretBytes::zeroed(SECRET_LEN_MAX).map_err(io::Error::other)?;
            let filled = fill(from, part.expose_mut())?;
            length += filled;
            if length as u64 > TPM_STATE_MAX {
                return Err(io::Error::other("it is more than a TPM keeps"));
            }
            match filled {
                SECRET_LEN_MAX => parts.push(part),
                0 => break,
                _ => {
                    let mut last = SecretBytes::zeroed(filled).map_err(io::Error::other)?;
                    last.expose_mut().copy_from_slice(&part.expose()[..filled]);
                    parts.push(last);
                    break;
                }
            }
        }
        if parts.is_empty() {
            return Err(io::Error::other("it is nothing"));
        }
        Ok(Self { parts })
    }

    /// Gives it to a TPM that has loaded nothing; returns the code of the result.
    fn write(&self, control: &mut UnixStream) -> io::Result<u32> {
        let length = u32::try_from(self.length()).map_err(io::Error::other)?;
        control.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        control.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let header = [SET_STATE, 0, PERMANENT, length].map(u32::to_be_bytes);
        control.write_all(header.as_flattened())?;
        for part in &self.parts {
            control.write_all(part.expose())?;
        }
        let [code] = words(control)?;
        Ok(code)
    }
}

/// Reads until there is no room, or nothing more to read. Returns how much that is.
fn fill(from: &mut impl Read, room: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < room.len() {
        match from.read(&mut room[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Reads so many words of an answer.
fn words<const COUNT: usize>(control: &mut UnixStream) -> io::Result<[u32; COUNT]> {
    let mut words = [[0_u8; 4]; COUNT];
    control.read_exact(words.as_flattened_mut())?;
    Ok(words.map(u32::from_be_bytes))
}

fn unanswered(error: io::Error) -> Problem {
    Problem::new(ErrorCode::Internal, format!("swtpm does not answer as it should: {error}"))
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::DiskId;
    use vmseal_secret::derive::DERIVED_LEN;

    use super::*;
    use crate::hypervisor::tpm::PROGRAM;
    use crate::process::run_dir::RunDir;
    use crate::storage::tpm_state;

    #[test]
    fn what_is_written_is_read_again_up_to_what_a_tpm_keeps() {
        let content = |length: usize| (0..length).map(|at| at as u8).collect::<Vec<_>>();
        let most = usize::try_from(TPM_STATE_MAX).unwrap();
        for length in [1, 700, SECRET_LEN_MAX, SECRET_LEN_MAX + 1, most] {
            let mut written = Vec::new();
            let read = Permanent::read_from(&mut &content(length)[..]).unwrap();
            read.write_to(&mut written).unwrap();
            assert!(written == content(length), "{length}");
            assert_eq!((read.length(), read.beginning()[0]), (length, content(1)[0]));
            for begin in [1, length.min(SECRET_LEN_MAX + 1), length] {
                let mut rest = Vec::new();
                read.write_from(begin, &mut rest).unwrap();
                assert!(rest == content(length)[begin..], "{length} from {begin}");
            }
        }
        for length in [0, most + 1] {
            assert!(Permanent::read_from(&mut &content(length)[..]).is_err(), "{length}");
        }
    }

    #[tokio::test]
    async fn another_swtpm_keeps_the_same_under_another_key() {
        let place = tempfile::tempdir().unwrap();
        let directory = RunDir::open(place.path()).unwrap().import(DiskId::new());
        directory.renew().await.unwrap();
        let lock = tempfile::tempfile().unwrap();
        let [former, new] = ["former", "new"].map(|name| place.path().join(name));
        let kept = [&former, &new].map(|path| tpm_state::make(path, None).unwrap());
        let keys = [(); 2].map(|()| SecretBytes::random(DERIVED_LEN).unwrap());
        let state = |which: usize, key: usize| State {
            directory: &kept[which],
            lock: &lock,
            key: &keys[key],
            user: None,
        };
        let swtpm = Swtpm::of(PROGRAM.into());
        let end = async |process: Process| process.end_within(ANSWER_TIMEOUT).await;
        end(swtpm.start(&directory, &state(0, 0)).unwrap().shut_down().unwrap()).await;

        let (permanent, process) = swtpm.take(&directory, &state(0, 0)).unwrap();
        end(process).await;
        end(swtpm.give(&directory, &state(1, 1), &permanent).unwrap()).await;
        tpm_state::flush(&new, &kept[1]).unwrap();
        assert_ne!(tpm_state::read(&new).unwrap(), tpm_state::read(&former).unwrap());
        let (again, process) = swtpm.take(&directory, &state(1, 1)).unwrap();
        end(process).await;
        assert!(again.parts == permanent.parts, "it keeps something else");
        let refused = swtpm.take(&directory, &state(1, 0)).map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
        // What cannot be stored is no damage of what is kept. Its process has ended when this has.
        directory.renew().await.unwrap();
        let nothing = Permanent { parts: vec![SecretBytes::random(DERIVED_LEN).unwrap()] };
        let refused = swtpm.give(&directory, &state(1, 1), &nothing).map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Internal, "{refused}");
        assert!(refused.detail.contains("is as it was"), "{refused}");
        directory.sweep().await.unwrap();
    }
}
