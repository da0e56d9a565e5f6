//! Disks that guests boot from, and their consoles.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

/// How long a guest may take to answer: emulated, on a machine that runs other tests.
pub const GUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// What a script of the project builds at its first use, `scripts/NAME OPTIONS`: the path that it prints last.
pub fn built(name: &str, options: &[&str]) -> anyhow::Result<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name);
    let output = Command::new(script).args(options).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "scripts/{name} has built nothing: {}", output.status);
    let printed = String::from_utf8(output.stdout)?;
    Ok(printed.lines().last().context("it said no path")?.into())
}

/// What the counting guest prints before its number.
pub const COUNT: &str = "VMSEAL-COUNT ";

/// Makes the raw disk of the counting guest (`tests/images/counter.S`), `size` bytes long.
pub fn counter_disk(path: &Path, size: u64) -> anyhow::Result<()> {
    let code = assembled("counter.S", &BOOT_SECTOR)?;
    ensure!(code.len() == 512, "the boot sector has {} bytes, not 512", code.len());
    std::fs::write(path, code)?;
    std::fs::File::options().write(true).open(path)?.set_len(size)?;
    Ok(())
}

/// What the machine code of a guest is for, as the assembler and the linker are told.
pub(crate) struct Code {
    /// The processor's mode.
    pub bits: &'static str,
    /// What the linker calls its programs.
    pub emulation: &'static str,
    /// Where it is loaded to.
    pub at: &'static str,
}

/// Code that a BIOS loads to where boot sectors are.
const BOOT_SECTOR: Code = Code { bits: "--32", emulation: "elf_i386", at: "0x7c00" };

/// The machine code of a guest (`tests/images`).
pub(crate) fn assembled(source: &str, code: &Code) -> anyhow::Result<Vec<u8>> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("images").join(source);
    let built = tempfile::tempdir()?;
    let (object, binary) = (built.path().join("guest.o"), built.path().join("guest.bin"));
    run(Command::new("as").arg(code.bits).arg(source).arg("-o").arg(&object))?;
    run(Command::new("ld")
        .args(["-m", code.emulation, "-Ttext", code.at, "--oformat", "binary"])
        .arg(&object)
        .arg("-o")
        .arg(&binary))?;
    Ok(std::fs::read(&binary)?)
}

/// The size of a medium's sector, in bytes.
const MEDIUM_SECTOR: usize = 2048;

/// The first sector of what firmware starts from a medium.
const STARTED_SECTOR: u8 = 21;

/// Makes a medium that a BIOS starts the guest of `tests/images/medium.S` from, with a text that the guest reads. It has what El
/// Torito asks for, and no files.
pub fn medium(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut code = assembled("medium.S", &BOOT_SECTOR)?;
    ensure!(code.len() <= MEDIUM_SECTOR, "the guest has {} bytes", code.len());
    code.resize(MEDIUM_SECTOR, 0);
    // Of a PC.
    let mut medium = el_torito(0, &code)?;
    let line = format!("VMSEAL-READ {text}\r\n");
    medium[20 * MEDIUM_SECTOR..][..line.len()].copy_from_slice(line.as_bytes());
    medium.resize(32 * MEDIUM_SECTOR, 0);
    Ok(std::fs::write(path, medium)?)
}

/// A medium with what firmware of this platform starts from it, by El Torito and without emulation; that has whole sectors of 512
/// bytes.
pub(crate) fn el_torito(platform: u8, started: &[u8]) -> anyhow::Result<Vec<u8>> {
    let sectors = u16::try_from(started.len() / 512)?;
    let first = usize::from(STARTED_SECTOR) * MEDIUM_SECTOR;
    let mut medium = vec![0; first];
    let mut put = |sector: usize, at: usize, bytes: &[u8]| {
        let at = sector * MEDIUM_SECTOR + at;
        medium[at..at + bytes.len()].copy_from_slice(bytes);
    };
    put(16, 0, b"\x01CD001\x01");
    put(17, 0, b"\x00CD001\x01EL TORITO SPECIFICATION");
    put(17, 0x47, &19u32.to_le_bytes());
    put(18, 0, b"\xffCD001\x01");
    // The entry that makes the catalogue valid: its words add up to nothing.
    let mut valid = [0; 32];
    valid[..2].copy_from_slice(&[1, platform]);
    valid[30..].copy_from_slice(&[0x55, 0xaa]);
    let sum = u16::from_le_bytes([1, platform]).wrapping_add(0xaa55);
    valid[28..30].copy_from_slice(&0u16.wrapping_sub(sum).to_le_bytes());
    put(19, 0, &valid);
    // Bootable, without emulation: so many sectors of 512 bytes, from there.
    let [low, high] = sectors.to_le_bytes();
    put(19, 32, &[0x88, 0, 0, 0, 0, 0, low, high, STARTED_SECTOR]);
    medium.extend_from_slice(started);
    // EDK II takes the number for one of the medium's sectors: these are there, too.
    medium.resize(first + usize::from(sectors) * MEDIUM_SECTOR, 0);
    Ok(medium)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// A guest's serial console, through `vmseal vm console`.
pub struct Console {
    child: Child,
    input: ChildStdin,
    heard: Arc<(Mutex<Heard>, Condvar)>,
}

#[derive(Default)]
struct Heard {
    text: String,
    ended: bool,
}

impl Console {
    /// Opens it with `command`, whose standard input and output are the serial line.
    pub fn open(command: &mut Command) -> anyhow::Result<Self> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let input = child.stdin.take().context("no standard input")?;
        let mut output = child.stdout.take().context("no standard output")?;
        let heard = Arc::new((Mutex::new(Heard::default()), Condvar::new()));
        let listener = Arc::clone(&heard);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            loop {
                let count = output.read(&mut buffer).unwrap_or(0);
                let (lock, news) = &*listener;
                let Ok(mut heard) = lock.lock() else { return };
                heard.text.push_str(&String::from_utf8_lossy(&buffer[..count]));
                heard.ended |= count == 0;
                news.notify_all();
                if heard.ended {
                    return;
                }
            }
        });
        Ok(Self { child, input, heard })
    }

    /// Types at the guest.
    pub fn type_text(&mut self, text: &str) -> anyhow::Result<()> {
        self.input.write_all(text.as_bytes())?;
        Ok(self.input.flush()?)
    }

    /// Waits for `pattern`; gives the `following` characters after it and drops all up to there.
    pub fn expect(&mut self, pattern: &str, following: usize) -> anyhow::Result<String> {
        self.expect_within(GUEST_TIMEOUT, pattern, following)
    }

    /// The same of a guest that may take longer.
    pub fn expect_within(
        &mut self,
        timeout: Duration,
        pattern: &str,
        following: usize,
    ) -> anyhow::Result<String> {
        let begun = Instant::now();
        let (lock, news) = &*self.heard;
        let mut heard = lock.lock().map_err(|_| anyhow::anyhow!("the listener panicked"))?;
        loop {
            if let Some(at) = heard.text.find(pattern) {
                let from = at + pattern.len();
                if let Some(found) = heard.text.get(from..from + following) {
                    let found = found.to_owned();
                    heard.text.drain(..from + following);
                    return Ok(found);
                }
            }
            if heard.ended || begun.elapsed() > timeout {
                bail!("the guest never said '{pattern}'; it said: {}", heard.text);
            }
            (heard, _) = news
                .wait_timeout(heard, Duration::from_millis(200))
                .map_err(|_| anyhow::anyhow!("the listener panicked"))?;
        }
    }

    /// Whether the guest has said something that nobody has expected yet.
    pub fn has_said(&self, pattern: &str) -> bool {
        self.heard.0.lock().is_ok_and(|heard| heard.text.contains(pattern))
    }

    /// What follows a pattern in the last line of which that is whole, of what nobody has expected yet: a line may end early where the
    /// kernel says something in the middle of it, or begin with a part of another where nobody listened meanwhile.
    pub fn last_line(&self, pattern: &str, is_whole: impl Fn(&str) -> bool) -> Option<String> {
        let heard = self.heard.0.lock().ok()?;
        let lines = heard.text.split_inclusive('\n').rev().filter(|line| line.ends_with('\n'));
        let mut rests = lines.filter_map(|line| Some(line.rsplit_once(pattern)?.1.trim()));
        rests.find(|rest| is_whole(rest)).map(str::to_owned)
    }

    /// The next number of the counting guest.
    pub fn next_count(&mut self) -> anyhow::Result<u32> {
        let digits = self.expect(COUNT, 8)?;
        u32::from_str_radix(&digits, 16).with_context(|| format!("'{digits}' is no count"))
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
