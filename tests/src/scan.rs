//! A search for secrets in files, and in the memory, arguments and environments of processes.
//!
//! Searched is every form in which programs let secrets slip: raw, as hexadecimal, as base64 at each of
//! its three alignments, as a printed list of numbers; of the whole secret and of either half.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use aho_corasick::AhoCorasick;
use anyhow::{Context, ensure};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};

/// What is read at once, in bytes.
const CHUNK: usize = 4 << 20;

/// The shortest secret whose halves are worth looking for: 8 bytes do not turn up by chance.
const WHOLE_MIN: usize = 16;

/// A form of a secret, or of one of its halves.
#[derive(Clone, Debug)]
pub struct Needle {
    /// Whose, and which form.
    pub name: String,
    /// What is looked for.
    pub bytes: Vec<u8>,
}

/// Every form of every secret, ready to be looked for in one pass.
pub struct Scanner {
    needles: Vec<Needle>,
    search: AhoCorasick,
    longest: usize,
}

/// A secret that was found where it must not be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Find {
    /// Which needle.
    pub needle: String,
    /// Where.
    pub place: String,
}

/// The forms of a secret, with its name.
#[must_use]
pub fn forms(name: &str, secret: &[u8]) -> Vec<Needle> {
    let (first, second) = secret.split_at(secret.len() / 2);
    [("", secret), ("'s first half", first), ("'s second half", second)]
        .into_iter()
        .flat_map(|(part, bytes)| {
            encodings(bytes)
                .into_iter()
                .map(move |(form, bytes)| Needle { name: format!("{name}{part}, {form}"), bytes })
        })
        .collect()
}

/// Whether some bytes are in a file's content. Disks have millions, and tests are not optimized: the library is.
#[must_use]
pub fn contains(content: &[u8], bytes: impl AsRef<[u8]>) -> bool {
    memchr::memmem::find(content, bytes.as_ref()).is_some()
}

fn encodings(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let numbers: Vec<String> = bytes.iter().map(u8::to_string).collect();
    let mut found = vec![
        ("raw".to_owned(), bytes.to_vec()),
        ("hexadecimal".to_owned(), hex.clone().into_bytes()),
        ("upper-case hexadecimal".to_owned(), hex.to_uppercase().into_bytes()),
        ("as numbers".to_owned(), numbers.join(", ").into_bytes()),
        ("as JSON".to_owned(), numbers.join(",").into_bytes()),
    ];
    for shift in 0..3 {
        let (plain, url) = (base64(&STANDARD, bytes, shift), base64(&URL_SAFE, bytes, shift));
        if plain != url {
            found.push((format!("base64url at {shift}"), url));
        }
        found.push((format!("base64 at {shift}"), plain));
    }
    found
}

/// The characters that these bytes alone decide, when `shift` other bytes come before them.
fn base64(engine: &impl Engine, bytes: &[u8], shift: usize) -> Vec<u8> {
    let padded = [&vec![0; shift][..], bytes].concat();
    let encoded = engine.encode(&padded).into_bytes();
    // A character holds 6 bits: those that also hold bits of a neighbour are left out.
    let (from, to) = ((shift * 8).div_ceil(6), padded.len() * 8 / 6);
    encoded[from..to].to_vec()
}

impl Scanner {
    /// A search for these needles.
    pub fn new(needles: Vec<Needle>) -> anyhow::Result<Self> {
        ensure!(!needles.is_empty(), "nothing to look for");
        for needle in &needles {
            ensure!(needle.bytes.len() >= WHOLE_MIN / 2, "'{}' is too short", needle.name);
        }
        let search = AhoCorasick::new(needles.iter().map(|needle| &needle.bytes))?;
        let longest = needles.iter().map(|needle| needle.bytes.len()).max().unwrap_or(0);
        Ok(Self { needles, search, longest })
    }

    /// Which needles these bytes hold.
    #[must_use]
    pub fn bytes(&self, place: &str, bytes: &[u8]) -> Vec<Find> {
        let mut found: Vec<_> = self
            .search
            .find_overlapping_iter(bytes)
            .map(|hit| Find {
                needle: self.needles[hit.pattern().as_usize()].name.clone(),
                place: place.to_owned(),
            })
            .collect();
        found.sort();
        found.dedup();
        found
    }

    /// Reads `length` bytes piece by piece, the pieces overlapping by the longest needle. `read` gives
    /// how many bytes it put into the buffer for an offset.
    fn pieces(
        &self,
        place: &str,
        length: u64,
        mut read: impl FnMut(&mut [u8], u64) -> usize,
    ) -> Vec<Find> {
        let mut buffer = vec![0; CHUNK + self.longest];
        let mut found = Vec::new();
        let mut offset = 0;
        while offset < length {
            let want = usize::try_from(length - offset).unwrap_or(usize::MAX).min(buffer.len());
            let count = read(&mut buffer[..want], offset);
            found.extend(self.bytes(place, &buffer[..count]));
            offset += CHUNK as u64;
        }
        found.sort();
        found.dedup();
        found
    }

    /// Which needles a regular file holds.
    pub fn file(&self, path: &Path) -> anyhow::Result<Vec<Find>> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        let place = path.display().to_string();
        Ok(self.pieces(&place, length, |buffer, offset| read_all(&file, buffer, offset)))
    }

    /// Which needles the regular files below a directory hold; `except` are not looked at.
    pub fn directory(&self, directory: &Path, except: &[PathBuf]) -> anyhow::Result<Vec<Find>> {
        let mut found = Vec::new();
        for path in regular_files(directory)? {
            if !except.contains(&path) {
                found.extend(self.file(&path)?);
            }
        }
        Ok(found)
    }

    /// Which needles the arguments and the environment of a process hold.
    pub fn arguments_and_environment(&self, pid: i32) -> anyhow::Result<Vec<Find>> {
        let mut found = Vec::new();
        for name in ["cmdline", "environ"] {
            let path = format!("/proc/{pid}/{name}");
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {path}"))?;
            found.extend(self.bytes(&path, &bytes));
        }
        Ok(found)
    }

    /// Which needles the memory of a process holds, as far as the kernel lets root read it:
    /// `memfd_secret` is what it does not.
    ///
    /// # Errors
    /// The process is gone, may not be read, or nothing of it could be read.
    pub fn memory(&self, pid: i32) -> anyhow::Result<Vec<Find>> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let memory = File::open(format!("/proc/{pid}/mem"))
            .with_context(|| format!("cannot read the memory of process {pid}"))?;
        let (mut found, mut total) = (Vec::new(), 0);
        for line in maps.lines() {
            let Some((from, to)) = readable_range(line) else { continue };
            let place = format!("memory of process {pid}: {line}");
            found.extend(self.pieces(&place, to - from, |buffer, offset| {
                let count = read_memory(&memory, buffer, from + offset);
                total += count;
                count
            }));
        }
        ensure!(total > 0, "nothing of the memory of process {pid} could be read");
        Ok(found)
    }
}

fn read_all(file: &File, buffer: &mut [u8], offset: u64) -> usize {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) | Err(_) => break,
            Ok(count) => done += count,
        }
    }
    done
}

/// Fills the buffer; pages that cannot be read count as zeroes, so that what follows them is searched.
fn read_memory(memory: &File, buffer: &mut [u8], address: u64) -> usize {
    const PAGE: usize = 4096;
    if memory.read_exact_at(buffer, address).is_ok() {
        return buffer.len();
    }
    let mut read = 0;
    for start in (0..buffer.len()).step_by(PAGE) {
        let end = (start + PAGE).min(buffer.len());
        let page = &mut buffer[start..end];
        match memory.read_exact_at(page, address + start as u64) {
            Ok(()) => read += page.len(),
            Err(_) => page.fill(0),
        }
    }
    if read > 0 { buffer.len() } else { 0 }
}

/// The addresses of a line of `/proc/PID/maps`, if the process itself may read there and it is no
/// device: the pages of `[vvar]` and of devices are the kernel's.
fn readable_range(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let readable = fields.next()?.starts_with('r');
    let name = fields.nth(3).unwrap_or_default();
    if !readable || name.starts_with("[v") || name.starts_with("/dev/") && !name.contains("shm") {
        return None;
    }
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
}

/// The regular files below a directory; links are not followed, sockets and pipes are no files.
pub fn regular_files(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut todo = vec![directory.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in std::fs::read_dir(&directory)? {
            let entry = entry?;
            match entry.file_type()? {
                kind if kind.is_dir() => todo.push(entry.path()),
                kind if kind.is_file() => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found.sort();
    Ok(found)
}
