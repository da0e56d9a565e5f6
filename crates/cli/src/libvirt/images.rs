//! Where the images of a libvirt domain's disks are: in the files that it names, or in those that are given in their place
//! (`--image TARGET:FILE`), as copies of what is in no file of the host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use roxmltree::Node;

use super::node::child;
use super::shell;
use crate::exit::{Ended, Exit};

/// The option for them.
const OPTION: &str = "--image";

/// The files that are given, by the targets of their disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Images(BTreeMap<String, PathBuf>);

impl Images {
    /// Parses the values of the option.
    ///
    /// # Errors
    /// The value that is wrong, and why.
    pub fn parse(values: &[String]) -> anyhow::Result<Self> {
        let mut images = BTreeMap::new();
        for value in values {
            let refused = |why: &str| Ended::new(Exit::Usage, format!("{OPTION} {value}: {why}"));
            let parts = value.split_once(':');
            let whole = parts.filter(|(target, file)| !target.is_empty() && !file.is_empty());
            let Some((target, file)) = whole else {
                return Err(refused("it has the form vda:/srv/old/web.raw").into());
            };
            if images.insert(target.to_owned(), PathBuf::from(file)).is_some() {
                return Err(refused("a file was given before for this disk").into());
            }
        }
        Ok(Self(images))
    }

    /// The file in place of the image of the disk with this target; none where the domain's own is meant.
    pub fn get(&self, target: &str) -> Option<&Path> {
        self.0.get(target).map(PathBuf::as_path)
    }

    /// Refuses what no disk of the domain has: a name that is wrong would leave a disk with another image.
    ///
    /// # Errors
    /// The option, and what the domain has in its place.
    pub fn check(&self, devices: Node<'_, '_>) -> anyhow::Result<()> {
        let known = targets(devices);
        let Some(unknown) = self.0.keys().find(|it| !known.contains(it.as_str())) else {
            return Ok(());
        };
        let known: Vec<_> = known.into_iter().map(|name| format!("'{name}'")).collect();
        let instead = match known.as_slice() {
            [] => "it has none".to_owned(),
            known => format!("its disks are {}", known.join(", ")),
        };
        let message =
            format!("{OPTION} {unknown}:…: the domain has no disk '{unknown}': {instead}");
        Err(Ended::new(Exit::Usage, message).into())
    }
}

/// The targets of a domain's disks, also of those that are refused for what they are.
fn targets<'a>(devices: Node<'a, 'a>) -> BTreeSet<&'a str> {
    let disks = devices.children().filter(|child| child.has_tag_name("disk"));
    let disks = disks.filter(|disk| !matches!(disk.attribute("device"), Some("cdrom" | "floppy")));
    disks.filter_map(|disk| child(disk, "target")?.attribute("dev")).collect()
}

/// The file that a domain names for a disk.
///
/// # Errors
/// The image is in no file, or the file alone is not the disk; and what to do.
pub fn in_domain<'a>(
    disk: Node<'a, 'a>,
    source: Node<'a, 'a>,
    target: &str,
) -> anyhow::Result<PathBuf> {
    let encrypted = [disk, source].into_iter().any(|at| child(at, "encryption").is_some());
    ensure!(
        !encrypted,
        "it is encrypted by libvirt: decrypt it first (qemu-img convert), to the format that the domain names, and give that file ({OPTION} {target}:FILE); the import encrypts it again"
    );
    let kind = disk.attribute("type").unwrap_or("file");
    if kind == "network" && source.attribute("protocol") == Some("rbd") {
        let image = rbd_image(source).context("its source names no image (name='POOL/IMAGE')")?;
        let command = rbd_export(disk, source, &image);
        bail!(
            "it is the image '{image}' of a Ceph cluster, and images are taken from files alone: with the domain off, copy it to a file in a transfer directory of the datastore's host ({command}), and give that ({OPTION} {target}:FILE)"
        );
    }
    ensure!(
        kind == "file",
        "it is of type '{kind}', and images are taken from files alone: with the domain off, copy it to a file in a transfer directory of the datastore's host, in the format that the domain names (qemu-img convert -f FORMAT -O FORMAT), and give that ({OPTION} {target}:FILE)"
    );
    let file = source.attribute("file").context("its source names no file")?;
    let backing = child(disk, "backingStore");
    ensure!(
        backing.is_none_or(|backing| child(backing, "source").is_none()),
        "it is a snapshot over another image, without which it is incomplete: make one image of both first (virsh blockcommit, or qemu-img convert and {OPTION} {target}:FILE)"
    );
    ensure!(
        child(source, "slices").is_none(),
        "it is a part of its image (<slices>), and all of it would be imported: make an image of that part first (dd), and give that ({OPTION} {target}:FILE)"
    );
    Ok(PathBuf::from(file))
}

/// The name of an image in a Ceph cluster, as Ceph's tools take it: `POOL/IMAGE`, with `@SNAPSHOT` where the disk is one.
fn rbd_image(source: Node<'_, '_>) -> Option<String> {
    let name = source.attribute("name").filter(|name| !name.is_empty())?;
    let snapshot = child(source, "snapshot").and_then(|it| it.attribute("name"));
    Some(snapshot.map_or_else(|| name.to_owned(), |snapshot| format!("{name}@{snapshot}")))
}

/// The command that copies an image to a file, as the user and by the monitors that the domain names.
fn rbd_export<'a>(disk: Node<'a, 'a>, source: Node<'a, 'a>, image: &str) -> String {
    let of = |at: Node<'a, 'a>, element: &str, attribute: &str| {
        child(at, element).and_then(|it| it.attribute(attribute)).map(shell::word)
    };
    let mut words = vec!["rbd".to_owned()];
    words.extend(of(source, "config", "file").map(|file| format!("-c {file}")));
    // libvirt leaves it where it was written: of the source, or of the disk, as in older domains.
    let user = of(source, "auth", "username").or_else(|| of(disk, "auth", "username"));
    words.extend(user.map(|user| format!("--id {user}")));
    let hosts = source.children().filter(|child| child.has_tag_name("host"));
    let monitors: Vec<String> = hosts.filter_map(monitor).collect();
    if !monitors.is_empty() {
        words.push(format!("-m {}", shell::word(&monitors.join(","))));
    }
    words.push(format!("export {} FILE", shell::word(image)));
    words.join(" ")
}

/// The address of a monitor.
fn monitor(host: Node<'_, '_>) -> Option<String> {
    let name = host.attribute("name")?;
    let name = match name.contains(':') && !name.starts_with('[') {
        true => format!("[{name}]"),
        false => name.to_owned(),
    };
    Some(host.attribute("port").map_or_else(|| name.clone(), |port| format!("{name}:{port}")))
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;

    fn parsed(values: &[&str]) -> anyhow::Result<Images> {
        Images::parse(&values.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>())
    }

    fn refused(disk: &str) -> String {
        let document = Document::parse(disk).unwrap();
        let disk = document.root_element();
        format!("{:#}", in_domain(disk, child(disk, "source").unwrap(), "vda").unwrap_err())
    }

    #[test]
    fn a_file_is_given_for_a_disk_that_the_domain_has() {
        let text = "<devices><disk><target dev='vda'/></disk><disk device='disk'><target dev='vdb'/></disk>
                    <disk device='cdrom'><target dev='sda'/></disk></devices>";
        let document = Document::parse(text).unwrap();
        let devices = document.root_element();
        let images = parsed(&["vdb:/srv/a:b.raw"]).unwrap();
        images.check(devices).unwrap();
        assert_eq!(images.get("vdb"), Some(Path::new("/srv/a:b.raw")));
        assert_eq!(images.get("vda"), None);
        for other in ["vdc", "sda"] {
            let wrong = parsed(&[&format!("{other}:/srv/a.raw")]).unwrap().check(devices);
            let wrong = wrong.unwrap_err();
            assert_eq!(Exit::of(&wrong), Exit::Usage);
            let told = format!("no disk '{other}': its disks are 'vda', 'vdb'");
            assert!(wrong.to_string().contains(&told), "{wrong}");
        }
        let none = Document::parse("<devices/>").unwrap();
        let wrong = images.check(none.root_element()).unwrap_err();
        assert!(wrong.to_string().ends_with("no disk 'vdb': it has none"), "{wrong}");
        for (values, told) in [
            (&["/srv/a.raw"][..], "it has the form vda:"),
            (&[":/srv/a.raw"], "it has the form"),
            (&["vda:"], "it has the form"),
            (&["vda:/a", "vda:/b"], "was given before"),
        ] {
            let wrong = parsed(values).unwrap_err();
            assert_eq!(Exit::of(&wrong), Exit::Usage);
            assert!(wrong.to_string().contains(told), "{wrong}");
        }
    }

    #[test]
    fn the_command_that_copies_an_image_of_a_cluster_is_that_of_its_source() {
        let of = |source: &str| refused(&format!("<disk type='network'>{source}</disk>"));
        let said = of("<source protocol='rbd' name='vms/web'><host name='10.0.0.1' port='6789'/>
             <host name='fd00::1'/><auth username='libvirt'><secret type='ceph' usage='x'/></auth></source>");
        assert!(said.contains("the image 'vms/web' of a Ceph cluster"), "{said}");
        let command = "(rbd --id libvirt -m '10.0.0.1:6789,[fd00::1]' export vms/web FILE)";
        assert!(said.contains(command) && said.contains("(--image vda:FILE)"), "{said}");
        let said = of(
            "<source protocol='rbd' name='vms/a/web'><snapshot name='old'/><config file='/etc/ceph/b.conf'/></source>",
        );
        assert!(said.contains("(rbd -c /etc/ceph/b.conf export vms/a/web@old FILE)"), "{said}");
        let said = of("<auth username='old'/><source protocol='rbd' name='vms/web'/>");
        assert!(said.contains("(rbd --id old export vms/web FILE)"), "{said}");
        let said = of(r#"<source protocol='rbd' name="vms/$(a)'b"/>"#);
        let quoted = shell::word("vms/$(a)'b");
        assert!(said.contains(&format!("export {quoted} FILE")), "{said}");
        assert!(of("<source protocol='rbd'/>").contains("names no image"));
        // What would be copied is ciphertext.
        let sealed = "<source protocol='rbd' name='vms/web'><encryption format='luks2' engine='librbd'/></source>";
        let said = of(sealed);
        assert!(said.contains("encrypted by libvirt") && !said.contains("export"), "{said}");
        let said = of("<source protocol='iscsi' name='iqn.a:b/1'/>");
        assert!(said.contains("type 'network'") && said.contains("--image vda:FILE"), "{said}");
    }
}
