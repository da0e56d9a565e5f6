//! The backup of the server, and its restore.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::unistd::{AccessFlags, access};
use serde::Serialize;
use vmseal_api::atomic_file::{PRIVATE, flush_directory_of};
use vmseal_api::client::ServerClient;
use vmseal_api::model::{About, Plan};
use vmseal_api::passphrase::SERVER_BACKUP;
use vmseal_api::request::GivePassphrase;
use vmseal_control::backup::restore::{self as backup, RestoredServer};
use vmseal_secret::SecretBytes;

use crate::arguments::{DryRun, Output, Passphrase};
use crate::exit::{Ended, Exit};
use crate::passphrase::{self, Prompt};
use crate::print::{self, plan};

/// The path of the API.
const PATH: &str = "server/backup";

/// Writes a backup, and reads it again. It has its name only when it is whole.
pub async fn back_up(
    server: &ServerClient,
    output: Output,
    to: &Path,
    passphrase: &Passphrase,
    dry_run: DryRun,
) -> anyhow::Result<()> {
    // Nobody types a passphrase for a file that cannot be written.
    if to.symlink_metadata().is_ok() {
        return Err(taken(to).into());
    }
    let create = || format!("cannot create the backup file {}", to.display());
    let directory = match to.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    access(directory, AccessFlags::W_OK | AccessFlags::X_OK).with_context(create)?;
    let about: About = server.get("about").await?;
    let given = passphrase::obtain(passphrase, "New passphrase of the backup", Prompt::Twice)?;
    let sealed = passphrase::seal(&given, SERVER_BACKUP, &about.passphrase_box)?;
    let request = GivePassphrase { passphrase: sealed };
    if dry_run.dry_run {
        let mut plan = server.try_post(PATH, &request).await?;
        plan.steps.push(format!("write it to {}, and read it again", to.display()));
        return plan::show(output, &plan);
    }
    let partial = PathBuf::from(format!("{}.partial", to.display()));
    // One that an interrupted backup left.
    let _ = std::fs::remove_file(&partial);
    let mut options = OpenOptions::new();
    let mut file =
        options.write(true).create_new(true).mode(PRIVATE).open(&partial).with_context(create)?;
    let written = write(server, &request, &given, &mut file, &partial, to).await;
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written.context("no backup of the server was written")?;
    print::say(format_args!("wrote {}, and read it again: it is whole", to.display()));
    Ok(())
}

async fn write(
    server: &ServerClient,
    request: &GivePassphrase,
    passphrase: &SecretBytes,
    file: &mut File,
    partial: &Path,
    to: &Path,
) -> anyhow::Result<()> {
    server.download(PATH, request, |part| file.write_all(part)).await?;
    file.sync_all()?;
    backup::verify(partial, passphrase)?;
    match rename_new(partial, to) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(taken(to).into()),
        other => other.with_context(|| format!("cannot name it {}", to.display())),
    }
}

/// Gives a file a name that no other file has.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        // A file system that cannot tell.
        Err(nix::errno::Errno::EINVAL) if to.symlink_metadata().is_err() => {
            std::fs::rename(from, to)?
        }
        other => other?,
    }
    flush_directory_of(to)
}

fn taken(file: &Path) -> Ended {
    Ended::new(Exit::Conflict, format!("the backup file {} exists already", file.display()))
}

/// A restore, for programs.
#[derive(Serialize)]
struct Restored {
    data_dir: String,
    made: String,
    vmseal: String,
    hosts: usize,
    providers: usize,
    policies: usize,
    vms: usize,
    interrupted_tasks: usize,
}

/// Restores a backup into an empty directory.
pub async fn restore(
    output: Output,
    from: &Path,
    data_dir: &Path,
    passphrase: &Passphrase,
    dry_run: DryRun,
) -> anyhow::Result<()> {
    // Nobody types the passphrase of a file that is not there, or for a directory that a restore refuses.
    File::open(from).with_context(|| format!("cannot read the backup {}", from.display()))?;
    backup::check_empty(data_dir)?;
    let given = passphrase::obtain(passphrase, "Passphrase of the backup", Prompt::Once)?;
    if dry_run.dry_run {
        let list = backup::verify(from, &given)?;
        let target = data_dir.display().to_string();
        let files = list.files.len();
        let steps = vec![format!("restore {files} files as of {:.0}", list.made)];
        let kind = "server.restore".to_owned();
        return plan::show(output, &Plan { kind, target, steps, ..Plan::default() });
    }
    let restored = backup::restore(from, &given, data_dir).await?;
    let RestoredServer { made, vmseal, inventory, has_token } = restored;
    let shown = Restored {
        data_dir: data_dir.display().to_string(),
        made: format!("{made:.0}"),
        vmseal,
        hosts: inventory.hosts,
        providers: inventory.providers,
        policies: inventory.policies,
        vms: inventory.vms,
        interrupted_tasks: inventory.interrupted,
    };
    match output {
        Output::Table | Output::Csv => {
            print::line(&format!(
                "restored into {}, as of {}: hosts: {}, key providers: {}, policies: {}, VMs: {}",
                shown.data_dir, shown.made, shown.hosts, shown.providers, shown.policies, shown.vms
            ))?;
        }
        _ => print::whole(output, &shown)?,
    }
    if inventory.interrupted > 0 {
        print::say(format_args!(
            "tasks that were under way then: {}; they are not resumed, and each one has an alarm or an event",
            inventory.interrupted
        ));
    }
    if !has_token {
        print::say(
            "the administrator's token is not in the backup: the one that was given out still holds",
        );
    }
    print::say(format_args!(
        "now start it (vmseal server --data-dir {}), see what was changed since (vmseal datastore adopt NAME --dry-run, for each datastore), unlock its key providers, and compare each datastore with it (vmseal datastore scan NAME): what was made since is an orphan there, and vmseal datastore adopt NAME takes it in",
        shown.data_dir
    ));
    Ok(())
}
