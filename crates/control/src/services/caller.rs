//! The callers of the services, and their privileges.
//!
//! Every function of the services begins with [`Caller::require`] and the privilege of the operation. Some
//! require another one if the resource is encrypted. The cryptography privileges are vSphere's.

use vmseal_api::problem::{ErrorCode, Problem};

/// A privilege of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Privilege {
    /// See the inventory, tasks, events, alarms.
    Read,
    /// Read the metrics.
    ReadMetrics,
    /// Start and stop VMs.
    VmPower,
    /// Create, change and delete VMs.
    VmConfigure,
    /// Open the console of a VM.
    VmConsole,
    /// Run programs in guests, and freeze their file systems.
    VmGuest,
    /// Cancel and resolve tasks.
    ManageTasks,
    /// Add and remove datastores.
    ManageDatastores,
    /// Change log levels.
    Diagnostics,
    /// Encrypt existing plaintext resources.
    Encrypt,
    /// Create encrypted resources.
    EncryptNew,
    /// Export encrypted resources in plaintext, or under a passphrase.
    Decrypt,
    /// Change the key of encrypted resources.
    Recrypt,
    /// Copy encrypted resources.
    Clone,
    /// Move encrypted resources to another datastore or host.
    Migrate,
    /// Read the content of disks, and of core dumps, without their VM, and open the console of an encrypted VM.
    DirectAccess,
    /// Take backups of the keys of a provider, and restore them.
    ManageKeys,
    /// Add, change and remove key providers.
    ManageProviders,
    /// Add and remove storage policies.
    ManagePolicies,
    /// Let hosts join, change and remove them.
    RegisterHost,
    /// Take backups of the server: its inventory, and its authority.
    BackUpServer,
}

impl Privilege {
    /// All privileges.
    pub const ALL: [Self; 21] = [
        Self::Read,
        Self::ReadMetrics,
        Self::VmPower,
        Self::VmConfigure,
        Self::VmConsole,
        Self::VmGuest,
        Self::ManageTasks,
        Self::ManageDatastores,
        Self::Diagnostics,
        Self::Encrypt,
        Self::EncryptNew,
        Self::Decrypt,
        Self::Recrypt,
        Self::Clone,
        Self::Migrate,
        Self::DirectAccess,
        Self::ManageKeys,
        Self::ManageProviders,
        Self::ManagePolicies,
        Self::RegisterHost,
        Self::BackUpServer,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::ReadMetrics => "read-metrics",
            Self::VmPower => "vm-power",
            Self::VmConfigure => "vm-configure",
            Self::VmConsole => "vm-console",
            Self::VmGuest => "vm-guest",
            Self::ManageTasks => "manage-tasks",
            Self::ManageDatastores => "manage-datastores",
            Self::Diagnostics => "diagnostics",
            Self::Encrypt => "encrypt",
            Self::EncryptNew => "encrypt-new",
            Self::Decrypt => "decrypt",
            Self::Recrypt => "recrypt",
            Self::Clone => "clone",
            Self::Migrate => "migrate",
            Self::DirectAccess => "direct-access",
            Self::ManageKeys => "manage-keys",
            Self::ManageProviders => "manage-providers",
            Self::ManagePolicies => "manage-policies",
            Self::RegisterHost => "register-host",
            Self::BackUpServer => "back-up-server",
        }
    }
}

/// A set of privileges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Privileges(u32);

impl Privileges {
    /// Whether it has this one.
    #[must_use]
    pub fn has(self, privilege: Privilege) -> bool {
        self.0 & (1 << privilege as u8) != 0
    }
}

impl FromIterator<Privilege> for Privileges {
    fn from_iter<I: IntoIterator<Item = Privilege>>(privileges: I) -> Self {
        Self(privileges.into_iter().fold(0, |set, privilege| set | 1 << privilege as u8))
    }
}

/// The caller of an operation.
#[derive(Clone, Debug)]
pub struct Caller {
    name: String,
    privileges: Privileges,
}

impl Caller {
    /// A user with these privileges.
    #[must_use]
    pub fn new(name: impl Into<String>, privileges: Privileges) -> Self {
        Self { name: name.into(), privileges }
    }

    /// A user with all privileges.
    #[must_use]
    pub fn administrator(name: impl Into<String>) -> Self {
        Self::new(name, Privilege::ALL.into_iter().collect())
    }

    /// The user's name in events.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the user has a privilege.
    #[must_use]
    pub fn has(&self, privilege: Privilege) -> bool {
        self.privileges.has(privilege)
    }

    /// Refuses a caller that lacks a privilege.
    ///
    /// # Errors
    /// `forbidden`.
    pub fn require(&self, privilege: Privilege) -> Result<(), Problem> {
        if self.privileges.has(privilege) {
            return Ok(());
        }
        let (user, privilege) = (&self.name, privilege.name());
        tracing::warn!(user, privilege, "a request was refused: the user lacks a privilege");
        let detail = format!("user '{user}' lacks the privilege '{privilege}'");
        Err(Problem::new(ErrorCode::Forbidden, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_privilege_is_its_own() {
        for one in Privilege::ALL {
            let caller = Caller::new("me", [one].into_iter().collect());
            for other in Privilege::ALL {
                let allowed = caller.require(other);
                assert_eq!(allowed.is_ok(), one == other, "{one:?}, {other:?}");
                assert_eq!(one.name() == other.name(), one == other);
            }
        }
        let administrator = Caller::administrator("me");
        assert!(Privilege::ALL.into_iter().all(|it| administrator.require(it).is_ok()));
    }
}
