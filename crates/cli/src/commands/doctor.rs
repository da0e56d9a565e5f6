//! `vmseal doctor`: checks this host for problems.

use vmseal_agent::host::doctor::{self, Finding, Options, Verdict};
use vmseal_secret::process::Hardening;

use super::image;
use super::processes::beside_this_program;
use crate::arguments::{Columns, Doctor, Output};
use crate::exit::{Ended, Exit};
use crate::print;
use crate::rows::word;

pub async fn run(output: Output, asked: Doctor, hardening: Hardening) -> anyhow::Result<()> {
    let filter = match asked.filter {
        Some(filter) => filter,
        None => beside_this_program("vmseal-filter")?,
    };
    let options = Options {
        state_dir: asked.state_dir,
        data_dir: asked.data_dir,
        qemu: asked.qemu,
        filter,
        swtpm: asked.swtpm,
        firmware_directory: asked.firmware_directory,
        datastores: asked.datastores,
        hardening,
    };
    let findings = examine(&options).await;
    let failed = findings.iter().filter(|it| it.result == Verdict::Failed).count();
    let usual = Columns::<Finding>::usual();
    let chosen = asked.columns.columns != usual.columns || asked.columns.no_header;
    match output {
        Output::Table if !chosen => {
            findings.iter().try_for_each(|finding| print::line(&report(finding)))?
        }
        _ => print::list(output, &asked.columns, findings)?,
    }
    match failed {
        0 => Ok(()),
        1 => Err(Ended::new(Exit::Failed, "1 problem found").into()),
        some => Err(Ended::new(Exit::Failed, format!("{some} problems found")).into()),
    }
}

/// Runs all checks: those of a host, and what an image of Debian needs to be built.
pub(super) async fn examine(options: &Options) -> Vec<Finding> {
    let mut findings = doctor::examine(options).await;
    findings.push(image_builder(image::missing_packages()));
    findings
}

/// What a build of the image finds or lacks.
fn image_builder(missing: anyhow::Result<Vec<String>>) -> Finding {
    let (result, found, remedy) = match missing {
        Ok(missing) if missing.is_empty() => {
            (Verdict::Ok, "the programs that build an image of Debian are there".to_owned(), None)
        }
        Ok(missing) => (
            Verdict::Warning,
            format!(
                "packages are missing: no image of Debian can be built ({})",
                missing.join(", ")
            ),
            Some(format!("apt install {}", missing.join(" "))),
        ),
        Err(error) => (
            Verdict::Warning,
            format!("{error:#}: no image of Debian can be built"),
            Some(image::INSTALL.to_owned()),
        ),
    };
    Finding { check: "image-builder".to_owned(), result, found, remedy }
}

/// A line, and a second one if there is something to fix.
pub(super) fn report(finding: &Finding) -> String {
    let Finding { check, result, found, remedy } = finding;
    let line = print::printable(&format!("{:<8} {check}: {found}", word(result)));
    match remedy {
        None => line,
        Some(remedy) => format!("{line}\n{:<8} fix: {remedy}", ""),
    }
}
