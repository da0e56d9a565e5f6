//! Where a libvirt domain keeps what its TPM keeps.

use std::path::{Path, PathBuf};

use roxmltree::Node;

use super::node::{child, text_of};

/// The directory of libvirt's with what the TPMs of domains keep, each below the domain's UUID.
const DIRECTORY: &str = "/var/lib/libvirt/swtpm";

/// The file in which swtpm has all that a TPM 2.0 keeps.
pub const FILE: &str = "tpm2-00.permall";

/// The length of a UUID as text.
const UUID_LENGTH: usize = 36;

/// Where what the TPM keeps is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TpmState {
    /// In swtpm's file, on the host.
    File(PathBuf),
    /// Elsewhere, or otherwise: what is said of it.
    Other(String),
    /// It does not say where.
    Unknown,
}

/// Where what the TPM keeps is; none where the domain has no TPM that swtpm emulates.
pub fn tpm_state(domain: Node<'_, '_>, devices: Node<'_, '_>) -> Option<TpmState> {
    let backend = child(child(devices, "tpm")?, "backend")?;
    if backend.attribute("type") != Some("emulator") {
        return None;
    }
    if child(backend, "encryption").is_some() {
        let what = "is encrypted under a secret of libvirt's (<encryption>), which vmseal does not have: have swtpm save the TPM without it (swtpm_ioctl --save permanent FILE)";
        return Some(TpmState::Other(what.to_owned()));
    }
    if let Some(source) = child(backend, "source") {
        return Some(in_source(source));
    }
    let uuid = text_of(domain, "uuid").filter(|uuid| is_uuid(uuid));
    // libvirt names directories by UUIDs in small letters.
    let of_domain = uuid.map(|uuid| file_of(&uuid.to_ascii_lowercase()));
    Some(of_domain.map_or(TpmState::Unknown, TpmState::File))
}

/// Where libvirt has it of the domain with this UUID.
pub fn file_of(uuid: &str) -> PathBuf {
    Path::new(DIRECTORY).join(uuid).join("tpm2").join(FILE)
}

/// A domain may have it elsewhere than libvirt usually does.
fn in_source(source: Node<'_, '_>) -> TpmState {
    match (source.attribute("type").unwrap_or_default(), source.attribute("path")) {
        ("dir", Some(path)) => TpmState::File(Path::new(path).join(FILE)),
        (kind, _) => TpmState::Other(format!(
            "has a source of type '{kind}', and is taken from a directory of swtpm's alone: have swtpm save the TPM (swtpm_ioctl --save permanent FILE)"
        )),
    }
}

/// Whether it may be a part of a path: a text of the caller's file is to name no other one.
fn is_uuid(text: &str) -> bool {
    text.len() == UUID_LENGTH && text.bytes().all(|it| it == b'-' || it.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;

    fn of(uuid: &str, tpm: &str) -> Option<TpmState> {
        let text = format!("<domain>{uuid}<devices>{tpm}</devices></domain>");
        let document = Document::parse(&text).unwrap();
        let domain = document.root_element();
        tpm_state(domain, child(domain, "devices").unwrap())
    }

    #[test]
    fn what_a_tpm_keeps_is_below_the_domain_s_uuid_or_where_it_says() {
        let uuid = "<uuid>C7A5FDBD-EDAF-9455-926A-D65C16DB1809</uuid>";
        let usual = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>";
        let with = |inside: &str| {
            format!("<tpm><backend type='emulator' version='2.0'>{inside}</backend></tpm>")
        };
        let file = |path: &str| Some(TpmState::File(path.into()));
        let of_domain =
            "/var/lib/libvirt/swtpm/c7a5fdbd-edaf-9455-926a-d65c16db1809/tpm2/tpm2-00.permall";
        assert_eq!(of(uuid, usual), file(of_domain));
        assert_eq!(
            of(uuid, &with("<active_pcr_banks><sha256/></active_pcr_banks>")),
            file(of_domain)
        );
        assert_eq!(
            of(uuid, &with("<source type='dir' path='/srv/tpm'/>")),
            file("/srv/tpm/tpm2-00.permall")
        );
        for uuid in ["", "<uuid>../../../../etc</uuid>", "<uuid>c7a5fdbd</uuid>"] {
            assert_eq!(of(uuid, usual), Some(TpmState::Unknown), "{uuid}");
        }
        for (inside, told) in [
            ("<encryption secret='6dd3e4a5-1d76-44ce-961f-f119f5aad935'/>", "swtpm_ioctl --save"),
            ("<source type='file' path='/srv/tpm.state'/>", "type 'file'"),
        ] {
            let Some(TpmState::Other(what)) = of(uuid, &with(inside)) else {
                panic!("{inside} is no reason to refuse it")
            };
            assert!(what.contains(told), "{what}");
        }
        assert_eq!(of(uuid, ""), None);
        assert_eq!(of(uuid, "<tpm><backend type='passthrough'/></tpm>"), None);
    }
}
