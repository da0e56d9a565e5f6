//! `vmseal disk expose`: a disk as a local NBD socket, for as long as the command runs.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Stdio};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::installation::{Installation, text};

/// A `vmseal disk expose` that runs.
pub struct Exposed {
    child: Child,
    /// Where the disk is.
    pub uri: String,
}

impl Exposed {
    /// Waits until the first disk of a VM is exposed.
    pub fn start(here: &Installation, vm: &str, more: &[&str]) -> anyhow::Result<Self> {
        let socket = here.path(&format!("{vm}.sock"));
        let mut command = here.command()?;
        command.args(["disk", "expose", vm, "disk0", "--socket", text(&socket)?]);
        command.args(more).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut uri = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut uri)?;
        let exposed = Self { child, uri: uri.trim_end().to_owned() };
        if exposed.uri.is_empty() {
            bail!("the disk is not exposed: {}", exposed.ended()?.1);
        }
        let mode = socket.metadata()?.permissions().mode() & 0o777;
        ensure!(mode == 0o600, "others may use the socket: its mode is {mode:o}");
        Ok(exposed)
    }

    /// Its process.
    pub fn id(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Waits for the end; the exit code and what was said.
    pub fn ended(mut self) -> anyhow::Result<(Option<i32>, String)> {
        let mut said = String::new();
        self.child.stderr.take().context("no output")?.read_to_string(&mut said)?;
        Ok((self.child.wait()?.code(), said))
    }

    /// Ctrl-C.
    pub fn interrupt(self) -> anyhow::Result<()> {
        kill(Pid::from_raw(self.id()), Signal::SIGINT)?;
        let (code, said) = self.ended()?;
        ensure!(code == Some(0), "it ended with {code:?}: {said}");
        Ok(())
    }
}
