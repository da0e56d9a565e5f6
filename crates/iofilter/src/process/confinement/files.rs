//! Landlock: no path can be opened, made, removed or executed, no TCP port used, no signal sent and no
//! abstract socket connected to outside the process. What is open stays usable.

use landlock::{
    ABI, Access, AccessFs, AccessNet, Compatible, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use vmseal_api::filter::FilesConfined;

/// The Landlock version whose restrictions are asked for: that of Linux 6.12. Later kernels support all of
/// them, earlier ones some.
const VERSION: ABI = ABI::V6;

/// Confines the calling thread and every thread that it starts.
#[must_use]
pub fn confine() -> FilesConfined {
    let status = Ruleset::default()
        .set_compatibility(landlock::CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(VERSION))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(VERSION)))
        .and_then(|rules| rules.scope(Scope::from_all(VERSION)))
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self);
    match status.map(|status| status.ruleset) {
        Ok(RulesetStatus::FullyEnforced) => FilesConfined::Fully,
        Ok(RulesetStatus::PartiallyEnforced) => FilesConfined::Partly,
        Ok(RulesetStatus::NotEnforced) => FilesConfined::No,
        Err(error) => {
            tracing::warn!(%error, "Landlock is refused");
            FilesConfined::No
        }
    }
}
