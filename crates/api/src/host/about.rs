//! What users say of a VM, and hosts do nothing with: it is in the VM's descriptors alone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::drain::OnDrain;
use crate::limits::{DESCRIPTION_MAX, LABEL_MAX, LABELS_MAX};
use crate::migration_encryption::MigrationEncryption;

/// What users say of a VM, for the descriptors on its datastores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AboutVm {
    /// What it is for, in its users' words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Its labels, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Whether it is started after its host has rebooted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub autostart: bool,
    /// Whether what it is sent with to another host is encrypted. Agents without the feature
    /// [`TREATMENT`](super::version::TREATMENT) are told neither this nor what follows.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub migration_encryption: MigrationEncryption,
    /// What happens to it while it runs when its host is emptied.
    #[serde(default, skip_serializing_if = "is_usual")]
    pub on_drain: OnDrain,
    /// Whether it is a template.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub template: bool,
}

fn is_usual<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl AboutVm {
    /// Whether nothing is said.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it is treated otherwise than a VM of which nothing is said: when it migrates, when its host is emptied, or as a template.
    #[must_use]
    pub fn has_treatment(&self) -> bool {
        let Self { migration_encryption, on_drain, template, .. } = self;
        *template || !is_usual(migration_encryption) || !is_usual(on_drain)
    }

    /// The same without that.
    #[must_use]
    pub fn without_treatment(self) -> Self {
        Self {
            migration_encryption: MigrationEncryption::default(),
            on_drain: OnDrain::default(),
            template: false,
            ..self
        }
    }

    /// Whether it is what users may say.
    ///
    /// # Errors
    /// Why it is not.
    pub fn check(&self) -> Result<(), String> {
        check_description(&self.description)
            .map_err(|what| format!("the VM's description {what}"))?;
        if self.labels.len() > LABELS_MAX {
            return Err(format!("it has more than {LABELS_MAX} labels"));
        }
        self.labels.iter().try_for_each(|(key, value)| check_label(key, value))
    }
}

/// Whether a VM may have this description.
///
/// # Errors
/// What must be otherwise.
pub fn check_description(text: &str) -> Result<(), String> {
    if text.len() <= DESCRIPTION_MAX {
        return Ok(());
    }
    Err(format!("has at most {DESCRIPTION_MAX} bytes"))
}

/// Whether a VM may have this label.
///
/// # Errors
/// What must be otherwise.
pub fn check_label(key: &str, value: &str) -> Result<(), String> {
    let plain = |text: &str| {
        text.len() <= LABEL_MAX && text.chars().all(|c| !c.is_control() && c != '=' && c != ',')
    };
    if key.is_empty() || key.contains(char::is_whitespace) || !plain(key) {
        return Err(format!(
            "'{key}' cannot be the key of a label: it has 1 to {LABEL_MAX} bytes, and no space, comma or ="
        ));
    }
    if plain(value) {
        return Ok(());
    }
    Err(format!("the value of label '{key}' has more than {LABEL_MAX} bytes, or a comma or ="))
}
