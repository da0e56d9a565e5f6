//! Proofs that VMs are encrypted.

use vmseal_api::client::ServerClient;
use vmseal_api::model::Proof;
use vmseal_api::proof::{FileKind, ImageKind, ProofReport, ProvenData, ProvenImage, Verdict};
use vmseal_api::request::ProveVm;
use vmseal_api::size::Size;

use super::task;
use crate::arguments::{Output, Prove};
use crate::exit::{Ended, Exit};
use crate::print;

pub async fn run(server: &ServerClient, output: Output, prove: Prove) -> anyhow::Result<()> {
    let Prove { vm, all, seed, last, report, dry_run, wait } = prove;
    if !last && report.is_none() {
        let path = format!("vms/{vm}/prove");
        let request = ProveVm { all, seed };
        let stops = dry_run.dry_run || wait.no_wait;
        // The proof is what is printed, not the task.
        let of_task = if stops { output } else { Output::Table };
        task::begin(server, of_task, &path, &request, &dry_run, &wait).await?;
        if stops {
            return Ok(());
        }
    }
    let which = report.map(|report| format!("?report={report}")).unwrap_or_default();
    let proof: Proof = server.get(&format!("vms/{vm}/proof{which}")).await?;
    match output {
        Output::Table => {
            for text in lines(&proof) {
                // Names may come from a datastore.
                print::line(&print::printable(&text))?;
            }
        }
        _ => print::whole(output, &proof)?,
    }
    let report = &proof.report;
    match report.verdict {
        Verdict::Encrypted => Ok(()),
        verdict => {
            Err(Ended::new(Exit::Failed, format!("VM '{}' is {}", report.name, verdict.word()))
                .into())
        }
    }
}

/// What people are shown of a proof.
fn lines(Proof { report, digest, signed }: &Proof) -> Vec<String> {
    let mut lines = Vec::new();
    let mut say = |text: String| lines.push(text);
    let ProofReport { name, verdict, begun, .. } = report;
    let read = match report.all {
        true => "every byte was read".to_owned(),
        false => format!("a sample was read (seed {})", report.seed),
    };
    say(format!("VM {name}: {}; {read} at {begun}", verdict.word()));
    if let Some(key) = &report.key {
        let (provider, id, check) = (key.provider, &key.key_id, &key.check);
        say(format!("key {id} of provider {provider}, check value {check}"));
    }
    report.images.iter().flat_map(of_image).for_each(&mut say);
    for file in &report.files {
        let kind = match file.kind {
            FileKind::Descriptor => "descriptor",
            FileKind::Note => "note",
            FileKind::Tpm => "TPM",
            FileKind::Sealed => "sealed",
            FileKind::Unknown => "unknown",
        };
        let why = file.reason.as_deref().unwrap_or_default();
        let what = file.data.as_ref().map_or_else(|| why.to_owned(), |data| figures(data, why));
        let verdict = if file.data.is_some() { file.verdict.word() } else { "by design" };
        let opens = match file.opened {
            Some(true) => ", opens with the VM's key",
            Some(false) | None => "",
        };
        say(format!("{} ({kind}): {verdict}{opens}; {what}", file.path));
        file.data.iter().filter_map(|data| parts(data, &file.path)).for_each(&mut say);
    }
    for reason in &report.reasons {
        say(format!("because: {reason}"));
    }
    // Servers of earlier versions do not say it.
    say(format!("report {}", if digest.is_empty() { "-" } else { digest.as_str() }));
    say(match &report.host {
        Some(host) if signed.signature.is_some() => format!("signed by host {host}"),
        _ => "not signed: the host has no identity".to_owned(),
    });
    lines
}

fn of_image(image: &ProvenImage) -> Vec<String> {
    let kind = match image.kind {
        ImageKind::Image => "image",
        ImageKind::Layer => "layer",
        ImageKind::Replica => "replica",
        ImageKind::Copy => "copy",
        ImageKind::Former => "former image",
        ImageKind::HalfMade => "half-made image",
    };
    let name = image.name.as_deref().unwrap_or("?");
    let (path, verdict) = (&image.path, image.verdict.word());
    let header = match &image.header {
        None => "no header".to_owned(),
        Some(header) => {
            let opens = if header.authentic { "authentic" } else { "not authentic" };
            format!("header {opens}, {}, {} bits", header.cipher, header.key_bits)
        }
    };
    let what = figures(&image.data, &header);
    let mut lines = vec![format!("disk {name}, {kind} {path}: {verdict}; {what}")];
    lines.extend(parts(&image.data, &format!("disk {name}")));
    lines.extend(image.data.findings.iter().map(|finding| {
        let sector = finding.sector.map(|sector| format!("sector {sector}, "));
        let sector = sector.unwrap_or_default();
        let (offset, chi_square) = (finding.offset, finding.chi_square);
        format!(
            "  disk {name}: {sector}byte {offset} of the file is not ciphertext (chi-square {chi_square})"
        )
    }));
    lines
}

/// What was read of a file.
fn figures(data: &ProvenData, first: &str) -> String {
    let entropy = data
        .entropy_min
        .map_or_else(String::new, |least| format!(", least entropy {} bits a byte", bits(least)));
    let first = if first.is_empty() { String::new() } else { format!("{first}; ") };
    format!(
        "{first}read {} of {}: {} sectors, {} of zeroes, {} opened, {} undecided, {} in the clear, {} equal to what they decrypt to{entropy}",
        Size(data.read),
        Size(data.allocated),
        data.sectors,
        data.holes,
        data.opened,
        data.undecided,
        data.clear,
        data.equal,
    )
}

/// The entropy of what was read of each part of a file, in the order of the file; none where nothing was.
fn parts(data: &ProvenData, whose: &str) -> Option<String> {
    data.entropy_min?;
    let shown = data.entropy.iter().map(|part| part.map_or_else(|| "-".to_owned(), bits));
    let shown: Vec<_> = shown.collect();
    let (number, shown) = (shown.len(), shown.join(" "));
    Some(format!("  {whose}: entropy of its {number} parts, in bits a byte: {shown}"))
}

/// Bits, of thousandths.
fn bits(thousandths: u32) -> String {
    format!("{}.{:03}", thousandths / 1000, thousandths % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entropy_of_each_part_of_a_file_is_shown() {
        let entropy = vec![Some(7998), None, Some(3042), Some(8000)];
        let data = ProvenData { entropy, entropy_min: Some(3042), ..ProvenData::default() };
        let shown = "  disk data: entropy of its 4 parts, in bits a byte: 7.998 - 3.042 8.000";
        assert_eq!(parts(&data, "disk data").as_deref(), Some(shown));
        // A file of zeroes alone, and a host of an earlier version.
        for entropy in [vec![None; 16], Vec::new()] {
            let data = ProvenData { entropy, ..ProvenData::default() };
            assert_eq!(parts(&data, "disk data"), None);
        }
    }
}
