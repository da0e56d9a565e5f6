//! `vmseal image`: images of systems on this machine. No server is asked.

use std::ffi::OsStr;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use crate::arguments::{BuildImage, Image, Output, System};
use crate::exit::{Ended, Exit};
use crate::{images, print};

/// The command that builds the image of Debian again.
pub(super) const REBUILD: &str = "vmseal image build debian --force";

/// The program that builds an image. It alone knows which packages a build needs.
const BUILDER: &str = "build-debian-image";

/// The option by which that program builds nothing and prints the packages that are missing.
const CHECK: &str = "--check";

/// What is done where that program is not there.
pub(super) const INSTALL: &str = "install vmseal with its files (the package, or make install)";

pub fn run(output: Output, verb: Image) -> anyhow::Result<()> {
    match verb {
        Image::Build(options) => build(&options),
        Image::List(options) => {
            // The usual one is made by the first image; another one is meant to be there.
            if let Some(dir) = &options.dir {
                std::fs::read_dir(dir)
                    .with_context(|| format!("--dir: cannot read {}", dir.display()))?;
            }
            let directories = match options.dir {
                Some(dir) => vec![dir],
                None => images::directories()?,
            };
            let found = images::known(&directories)?;
            found.unread.iter().for_each(print::say);
            print::list(output, &options.columns, found.images)
        }
    }
}

fn build(options: &BuildImage) -> anyhow::Result<()> {
    let System::Debian = options.system;
    let image = match &options.to {
        Some(file) => std::path::absolute(file)?,
        None => directory()?.join("debian.raw"),
    };
    if image.exists() && !options.force {
        print::say("it is built already; --force builds it again");
        let rebuild = match &options.to {
            Some(_) => format!("{REBUILD} --to {}", image.display()),
            None => REBUILD.to_owned(),
        };
        say_if_old(&image, &rebuild);
        return print::line(&image.display().to_string());
    }
    make(&image)?;
    print::line(&image.display().to_string())?;
    if options.to.is_none() && !image.starts_with(images::SYSTEM) {
        print::say(format_args!(
            "hosts read it only where their agents were started with --transfer-directory for {}: else have root build it (sudo vmseal image build debian)",
            image.parent().unwrap_or(&image).display()
        ));
    }
    if options.to.is_none() {
        print::say(
            "create a VM from it: vmseal vm launch NAME --image debian --ssh-key ~/.ssh/id_ed25519.pub",
        );
    }
    Ok(())
}

/// Says that an image is old, where it is, and how it is built again.
pub(super) fn say_if_old(image: &Path, rebuild: &str) {
    if let Some(said) = images::said_if_old(image, rebuild) {
        print::say(said);
    }
}

/// Where the image of Debian is built by this user.
pub(super) fn place_of_debian() -> anyhow::Result<PathBuf> {
    Ok(images::directory()?.join("debian.raw"))
}

/// The image of Debian for this user's VMs; it is built if it is not there.
pub(super) fn debian() -> anyhow::Result<PathBuf> {
    let image = directory()?.join("debian.raw");
    if !image.exists() {
        print::say(
            "building the image 'debian' from Debian's packages; this takes some minutes, once",
        );
        make(&image)?;
    }
    Ok(image)
}

/// The directory of this user's images, made if it is missing.
fn directory() -> anyhow::Result<PathBuf> {
    let directory = images::directory()?;
    let made = DirBuilder::new().recursive(true).mode(0o755).create(&directory);
    made.with_context(|| format!("cannot make {}", directory.display()))?;
    Ok(directory)
}

fn make(image: &Path) -> anyhow::Result<()> {
    let arguments = [OsStr::new("--to"), image.as_os_str()];
    run_builder(&arguments, "the image was not built; the reason is above")
}

/// Refuses what a build refuses before it begins, and for the same reason: packages are missing.
pub(super) fn require_packages() -> anyhow::Result<()> {
    run_builder(&[OsStr::new(CHECK)], "the image could not be built; the reason is above")
}

fn run_builder(arguments: &[&OsStr], failed: &str) -> anyhow::Result<()> {
    let program = builder().map_err(|error| anyhow::anyhow!("{error:#}: {INSTALL}"))?;
    // What it says is for people; its result is this program's.
    let mut builder = Command::new(&program);
    builder.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    let ended = builder.status().with_context(|| format!("cannot run {}", program.display()))?;
    if !ended.success() {
        return Err(Ended::new(Exit::Failed, failed).into());
    }
    Ok(())
}

/// The packages of Debian that a build needs and that are missing on this machine.
pub(super) fn missing_packages() -> anyhow::Result<Vec<String>> {
    let program = builder()?;
    let asked = Command::new(&program).arg(CHECK).stdin(Stdio::null()).output();
    let asked = asked.with_context(|| format!("cannot run {}", program.display()))?;
    let printed = String::from_utf8_lossy(&asked.stdout);
    let missing: Vec<_> = printed.lines().map(str::to_owned).collect();
    ensure!(
        asked.status.success() == missing.is_empty(),
        "{} {CHECK} failed: {}",
        program.display(),
        String::from_utf8_lossy(&asked.stderr).lines().next().unwrap_or_default()
    );
    Ok(missing)
}

/// Where the program is: installed in `PREFIX/share/vmseal`, or among the sources that this was built from.
fn builder() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("where is this program?")?;
    let installed = own.parent().and_then(Path::parent).map(|prefix| prefix.join("share/vmseal"));
    let sources =
        cfg!(debug_assertions).then(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts"));
    let places: Vec<_> = [installed, sources].into_iter().flatten().collect();
    let found = places.iter().map(|place| place.join(BUILDER)).find(|program| program.is_file());
    found.with_context(|| {
        let place = places.first().map_or_else(String::new, |place| place.display().to_string());
        format!("{BUILDER} is not in {place}")
    })
}
