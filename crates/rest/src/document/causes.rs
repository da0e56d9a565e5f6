//! What the errors of a route come from. Each route is registered with its causes ([`crate::routes`]), and the API document states
//! the errors that follow from them.

use std::collections::BTreeMap;

use vmseal_api::problem::ErrorCode;
use vmseal_api::problem::ErrorCode::{
    AlreadyExists, Busy, Cancelled, Conflict, Damaged, Forbidden, InUse, Internal, InvalidRequest,
    KeyMismatch, LimitExceeded, Locked, NoSpace, NotFound, TimedOut, Unauthenticated, Unreachable,
    Unsupported, WrongState,
};

/// The causes of the errors of each operation, by its path and its method in small letters, as the API document has them.
pub(crate) type Causes = BTreeMap<(String, String), Vec<Cause>>;

/// Something that a route does before it answers, and that may be refused or fail. What a task meets later is in the task.
///
/// What the form of a request says is not here: a user, parameters, a body, a resource in the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It answers out of itself.
    Itself,
    /// It reads or writes the inventory, and asks nobody.
    Inventory,
    /// Its body or its query names other resources.
    Names,
    /// It takes a name, an id or an address that something else may have.
    TakesName,
    /// Something must be in a state for it.
    NeedsState,
    /// Nothing else may use the resource.
    NeedsUnused,
    /// It begins a task: another one may have the VM, or its host may be emptied.
    StartsTask,
    /// It asks a host.
    AsksHost,
    /// The agent of a host must know it, whether it answers now or not.
    NeedsFeature,
    /// The key of a VM must be on its host.
    NeedsKey,
    /// It needs room: on a datastore, or in the server's data directory.
    NeedsRoom,
    /// It has a host read what is on a datastore, or in the directory of a backup.
    ReadsFiles,
    /// A host must have what a machine needs: firmware, processor, memory, networks, images.
    NeedsMachine,
    /// It asks a host whether a job could begin.
    PlansJob,
    /// It has a host begin a job.
    BeginsJob,
    /// It tells a host what a VM has from now on.
    ChangesVm,
    /// It reaches into a guest that runs.
    ReachesGuest,
    /// It asks the filter that serves a disk.
    AsksFilter,
    /// It has a host open a disk.
    OpensDisk,
    /// It asks a key provider, or is told what is wrong with it.
    AsksProvider,
    /// It is for one kind of key provider.
    NeedsKind,
    /// It takes a secret that is sealed for this run of the server.
    TakesSecret,
    /// It opens what is sealed under a passphrase: a key file, a backup.
    OpensSealed,
    /// It asks another control plane.
    AsksRemote,
    /// It lets a machine join with a token of its own.
    JoinsHost,
}

impl Cause {
    /// The errors that it may end with.
    pub(super) fn codes(self) -> &'static [ErrorCode] {
        match self {
            Self::Itself => &[],
            Self::Inventory => &[Internal, Busy],
            Self::Names => &[NotFound],
            Self::TakesName => &[AlreadyExists],
            Self::NeedsState | Self::StartsTask => &[WrongState],
            Self::NeedsUnused => &[InUse],
            Self::AsksHost => &[Unreachable, TimedOut, Unsupported, Internal],
            Self::NeedsFeature | Self::NeedsKind => &[Unsupported],
            Self::NeedsKey => &[Locked],
            Self::NeedsRoom => &[NoSpace],
            Self::ReadsFiles => &[InvalidRequest, NotFound, WrongState, InUse, Damaged],
            Self::NeedsMachine => {
                &[InvalidRequest, WrongState, InUse, Damaged, Unsupported, NoSpace]
            }
            Self::PlansJob => &JOB,
            Self::BeginsJob => &BEGUN_JOB,
            Self::ChangesVm => &[
                InvalidRequest,
                WrongState,
                InUse,
                Damaged,
                Unsupported,
                Locked,
                LimitExceeded,
                TimedOut,
                NoSpace,
            ],
            Self::ReachesGuest => {
                &[WrongState, InUse, Unsupported, LimitExceeded, Unreachable, TimedOut]
            }
            Self::AsksFilter => &[
                InvalidRequest,
                NotFound,
                AlreadyExists,
                WrongState,
                InUse,
                LimitExceeded,
                Unreachable,
                TimedOut,
            ],
            Self::OpensDisk => &[
                NotFound,
                WrongState,
                InUse,
                Cancelled,
                KeyMismatch,
                Damaged,
                Unsupported,
                Locked,
                LimitExceeded,
                NoSpace,
            ],
            Self::AsksProvider => &[
                Forbidden,
                NotFound,
                WrongState,
                KeyMismatch,
                Damaged,
                Unsupported,
                Unreachable,
                TimedOut,
                Internal,
            ],
            Self::TakesSecret => &[InvalidRequest, WrongState],
            Self::OpensSealed => &[KeyMismatch, Damaged, Unsupported],
            Self::AsksRemote => &[
                InvalidRequest,
                Unauthenticated,
                Forbidden,
                WrongState,
                Unsupported,
                LimitExceeded,
                Unreachable,
                TimedOut,
                Internal,
            ],
            Self::JoinsHost => &[Unauthenticated, Unsupported, TimedOut, Internal, Busy],
        }
    }
}

/// What a host may say of a job that could not begin.
const JOB: [ErrorCode; 11] = [
    InvalidRequest,
    NotFound,
    AlreadyExists,
    WrongState,
    InUse,
    KeyMismatch,
    Damaged,
    Unsupported,
    Locked,
    LimitExceeded,
    NoSpace,
];

/// The same of one that is begun, which an earlier request may have begun otherwise.
const BEGUN_JOB: [ErrorCode; 12] = [
    Conflict,
    InvalidRequest,
    NotFound,
    AlreadyExists,
    WrongState,
    InUse,
    KeyMismatch,
    Damaged,
    Unsupported,
    Locked,
    LimitExceeded,
    NoSpace,
];
