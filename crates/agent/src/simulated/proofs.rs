//! Proofs of a simulated host: its disks are what they were made as, and hold no data.

use jiff::Timestamp;
use vmseal_api::host::{DiskFacts, ProveJob};
use vmseal_api::id::{TaskId, VmId};
use vmseal_api::proof::{
    CHI_SQUARE, ImageKind, ProofReport, ProvenData, ProvenHeader, ProvenImage, SignedReport,
    VERSION, Verdict,
};

use super::Inside;

impl Inside {
    pub fn prove(&mut self, vm: VmId, task: TaskId, job: &ProveJob) {
        let Ok(known) = self.known(vm) else { return };
        let (spec, key) = (known.spec.clone(), known.spec.key.clone());
        let image = |disk: &vmseal_api::host::DiskSpec| {
            let header = match known.made.get(&disk.disk).or(disk.facts.as_ref()) {
                Some(DiskFacts::Luks2 { cipher, key_bits, sector_size, .. }) => {
                    Some(ProvenHeader {
                        authentic: true,
                        reason: None,
                        keys: key.iter().cloned().collect(),
                        cipher: cipher.clone(),
                        key_bits: *key_bits,
                        sector_size: *sector_size,
                    })
                }
                _ => None,
            };
            let verdict = if header.is_some() { Verdict::Encrypted } else { Verdict::NotEncrypted };
            ProvenImage {
                datastore: disk.datastore.datastore,
                path: format!("{vm}/{}.raw", disk.disk),
                kind: ImageKind::Image,
                disk: disk.disk,
                name: Some(disk.name.clone()),
                verdict,
                reason: header.is_none().then(|| "it is an image in the clear".to_owned()),
                header,
                data: ProvenData::default(),
            }
        };
        let asked = spec.disks().filter(|disk| job.disks.contains(&disk.disk));
        let images: Vec<ProvenImage> = asked.map(image).collect();
        let verdict =
            images.iter().fold(Verdict::Encrypted, |verdict, image| verdict.and(image.verdict));
        let why = |it: &ProvenImage| Some(format!("{}: {}", it.path, it.reason.as_ref()?));
        let report = ProofReport {
            version: VERSION,
            task,
            vm,
            name: spec.name.clone(),
            host: None,
            begun: Timestamp::now(),
            ended: Timestamp::now(),
            all: job.all,
            seed: job.seed,
            verdict,
            reasons: images.iter().filter_map(why).collect(),
            key,
            images,
            files: Vec::new(),
            chi_square_bounds: [*CHI_SQUARE.start(), *CHI_SQUARE.end()],
        };
        let text = serde_json::to_string(&report).unwrap_or_default();
        if let Some(first) = job.disks.first() {
            known.jobs.proved(*first, SignedReport { report: text, signature: None });
        }
    }
}
