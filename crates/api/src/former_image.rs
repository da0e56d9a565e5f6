//! What has become of the image that a disk had before a copy took its place.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::DiskId;

/// How many VMs, or files, a text names.
const NAMED_MAX: usize = 5;

/// What has become of the former image of a disk, with its layers, its replica, and what was beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FormerImage {
    /// The disk's id.
    pub disk: DiskId,
    /// The disk's name.
    pub name: String,
    /// What has become of it.
    pub fate: FormerFate,
    /// Whether its medium is told which blocks are free now.
    #[serde(default)]
    pub discard: Discard,
}

/// Whether a medium is told which blocks are free, so that it can erase them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Discard {
    /// By the file system, which is mounted with `discard`, when a file is removed.
    AtRemoval,
    /// By `fstrim` alone: the file system is on a device, and mounted without `discard`.
    ByFstrim,
    /// It is not known: a server or a cluster decides, or the agent is of an earlier version.
    #[default]
    #[serde(other)]
    NotKnown,
}

impl Discard {
    /// What is said of it, and what to do.
    fn told(self) -> &'static str {
        match self {
            Self::AtRemoval => {
                "; its file system is mounted with -o discard, and tells its device which blocks are free"
            }
            Self::ByFstrim => {
                "; its file system is mounted without -o discard: if it is on flash, run fstrim on it, which lets the device erase the free blocks"
            }
            Self::NotKnown => "; whether its medium is told which blocks are free is not known",
        }
    }
}

/// What has become of a former image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum FormerFate {
    /// It was in the clear. It was overwritten with zeroes once, wherever it had data, and removed.
    Overwritten,
    /// It was encrypted. Its header, without which the data key is lost, was overwritten with zeroes once, and it was removed.
    HeaderOverwritten,
    /// Files of it have further names (hard links). They were not overwritten: only their names beside the disk were removed.
    Shared {
        /// Whether they are in the clear.
        in_the_clear: bool,
        /// The linked clones that stand on them, by name, as far as they are known. The VM that this one was cloned from is not
        /// among them.
        clones: Vec<String>,
        /// The inodes of these files, on the datastore that the disk had.
        inodes: Vec<u64>,
    },
    /// It is gone, and its host does not say whether it was overwritten: the agent was restarted meanwhile, or is of an
    /// earlier version.
    #[serde(other)]
    NotKnown,
}

impl FormerImage {
    /// Whether it was overwritten, all of it or its header.
    #[must_use]
    pub fn is_overwritten(&self) -> bool {
        matches!(self.fate, FormerFate::Overwritten | FormerFate::HeaderOverwritten)
    }
}

impl fmt::Display for FormerImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "disk '{}': its former image ", self.name)?;
        match &self.fate {
            FormerFate::Overwritten => {
                write!(f, "was overwritten with zeroes once and removed{}", self.discard.told())
            }
            FormerFate::HeaderOverwritten => write!(
                f,
                "was removed after its header, without which its data key is lost, was overwritten with zeroes once{}",
                self.discard.told()
            ),
            FormerFate::Shared { in_the_clear, clones, inodes } => {
                let form = if *in_the_clear { "in the clear" } else { "under the former data key" };
                write!(
                    f,
                    "was not overwritten, as files of it have further names (hard links): only the names here were removed, and they stay {form}. "
                )?;
                shared(f, clones, inodes)
            }
            FormerFate::NotKnown => f.write_str(
                "is gone, and its host does not say whether it was overwritten: the agent was restarted meanwhile, or is of an earlier version. The agent's log names files that were not",
            ),
        }
    }
}

/// Who has files that were not overwritten, and what to do.
fn shared(f: &mut fmt::Formatter<'_>, clones: &[String], inodes: &[u64]) -> fmt::Result {
    if clones.is_empty() {
        let files: Vec<_> = inodes.iter().take(NAMED_MAX).map(|it| format!("-inum {it}")).collect();
        return write!(
            f,
            "The VM that this one was cloned from or another clone of it has them, or somebody has named them. To find the names: find DATASTORE {}",
            files.join(" -o ")
        );
    }
    let named: Vec<_> = clones.iter().take(NAMED_MAX).map(|name| format!("'{name}'")).collect();
    let more = clones.len().saturating_sub(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    write!(
        f,
        "Linked clones {}{more} stand on them, as may the VM that this one was cloned from, if it is a clone: copy each of these, too (vmseal vm encrypt, vmseal vm recrypt --deep); the last one overwrites them",
        named.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(fate: FormerFate) -> String {
        let discard = Discard::ByFstrim;
        FormerImage { disk: DiskId::new(), name: "data".to_owned(), fate, discard }.to_string()
    }

    #[test]
    fn only_what_was_overwritten_is_said_to_be() {
        let whole = told(FormerFate::Overwritten);
        assert!(
            whole.starts_with("disk 'data': its former image was overwritten with zeroes once")
        );
        let header = told(FormerFate::HeaderOverwritten);
        assert!(header.contains("its header") && !header.contains("image was overwritten"));
        assert!(whole.ends_with("free blocks") && header.ends_with("free blocks"), "{header}");
        let gone = told(FormerFate::NotKnown);
        assert!(gone.contains("does not say whether it was overwritten"), "{gone}");
    }

    #[test]
    fn of_files_that_others_have_it_is_said_who_and_what_to_do() {
        let clones = |count: usize| (1..=count).map(|at| format!("c{at}")).collect::<Vec<_>>();
        let shared = |in_the_clear, clones| {
            told(FormerFate::Shared { in_the_clear, clones, inodes: vec![7, 9] })
        };
        let one = shared(true, clones(1));
        assert!(one.contains("was not overwritten") && one.contains("stay in the clear"), "{one}");
        assert!(one.contains("Linked clones 'c1' stand on them, as may the VM that"), "{one}");
        let many = shared(false, clones(7));
        assert!(many.contains("'c5' and 2 more") && !many.contains("c6"), "{many}");
        assert!(many.contains("under the former data key"), "{many}");
        let nobody = shared(true, Vec::new());
        assert!(nobody.ends_with("find DATASTORE -inum 7 -o -inum 9"), "{nobody}");
    }

    #[test]
    fn a_fate_of_a_newer_agent_is_not_known() {
        let of = |text| serde_json::from_str::<FormerFate>(text).unwrap();
        assert_eq!(of(r#"{"is":"shredded"}"#), FormerFate::NotKnown);
        assert_eq!(of(r#"{"is":"header_overwritten"}"#), FormerFate::HeaderOverwritten);
        let of = |text| serde_json::from_str::<Discard>(text).unwrap();
        assert_eq!(
            (of(r#""later""#), of(r#""by_fstrim""#)),
            (Discard::NotKnown, Discard::ByFstrim)
        );
    }
}
