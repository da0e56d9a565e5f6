//! What excludes what on a VM: one table, which the real host and the simulated one use and the contract
//! suite walks. Giving a key and cutting the power are never excluded. Other preconditions (a key, a disk
//! that is made) are checked in [`super`].

use vmseal_api::host::{DiskSpec, Power, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

/// The actions on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// To replace the VM's registered specification where that cannot change while it runs ([`super::set_running`]).
    Register,
    /// To unregister the VM.
    Unregister,
    /// To check or change the keys of its disks.
    ChangeKeys,
    /// To make a disk. The same job again is not an action.
    CreateDisk,
    /// To remove a disk.
    DeleteDisk,
    /// To make a disk longer.
    GrowDisk,
    /// To export a disk. The same job again is not an action.
    ExportDisk,
    /// What a snapshot keeps of it.
    ExportKept,
    /// To copy a disk and use the copy in its place. The same job again is not an action.
    MirrorDisk,
    /// To encrypt, decrypt or re-encrypt a disk in its file. The same job again is not an action.
    ConvertDisk,
    /// To remove the image that a disk had before it was mirrored. The same job again is not an action.
    DropSource,
    /// To keep what a disk holds.
    TakeSnapshot,
    /// To have a disk hold what a snapshot keeps. Of a VM that is suspended only where its memory is given up ([`super::check_revert`]).
    Revert,
    /// To remove a snapshot of a disk. The same job again is not an action.
    DropSnapshot,
    /// To read the VM's files for a proof. The same job again is not an action.
    Prove,
    /// To write a core dump. The same job again is not an action.
    Dump,
    /// To decrypt a core dump. The same job again is not an action.
    DecryptDump,
    /// To back up what a snapshot keeps of a disk. The same job again is not an action.
    BackUp,
    /// To read a backup. The same job again is not an action.
    VerifyBackup,
    /// To restore a disk from a backup. The same job again is not an action.
    Restore,
    /// To send the VM to another host. The same job again is not an action.
    Send,
    /// To send a VM that is off or suspended to another host. The same job again is not an action.
    SendAtRest,
    /// To expose a disk for reading.
    ExposeToRead,
    /// To expose a disk for writing.
    ExposeToWrite,
    /// To expose what a snapshot keeps of it.
    ExposeKept,
    /// To expose its ciphertext.
    ExposeSealed,
    /// To start the VM.
    PowerOn,
    /// To save the guest's memory and stop it.
    Suspend,
    /// To ask the guest to shut down.
    ShutDown,
    /// To pause the guest.
    Pause,
    /// To let a paused guest go on.
    Unpause,
    /// To press the guest's reset button.
    Reset,
    /// To wake a guest that sleeps.
    Wakeup,
    /// To open the console.
    Console,
    /// To connect to the screen.
    Screen,
    /// To ask the agent in the guest.
    Guest,
    /// To see or change the dirty bitmaps of a disk.
    Bitmaps,
    /// To get the status of a replica.
    Replica,
}

/// A state of a VM, or work in progress on it. A VM is in exactly one of the first seven; any number of the others
/// may be in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// It is off.
    Off,
    /// It is being started.
    Starting,
    /// It runs.
    Running,
    /// Its guest was asked to shut down.
    Stopping,
    /// Its guest is paused.
    Paused,
    /// The memory of its guest is being saved.
    Suspending,
    /// The memory of its guest is saved.
    Suspended,
    /// The keys of its disks are being checked or changed.
    KeyChange,
    /// A disk is being made.
    Creating,
    /// A disk is being exported.
    Exporting,
    /// A disk is exposed.
    Exposed,
    /// A disk is being copied and the copy put in its place, or what it was before is being removed, or its layers are being
    /// merged, or its VM is being sent to another host.
    Mirroring,
}

/// The result of an action during an activity: a cell of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Both go on.
    Allowed,
    /// Nothing to do: the state is as requested already.
    Already,
    /// The action is done, and ends the activity.
    Ends,
    /// It is refused with this code.
    Refused(ErrorCode),
}

use Activity::{
    Creating, Exporting, Exposed, KeyChange, Mirroring, Off, Paused, Running, Starting, Stopping,
    Suspended, Suspending,
};
use Rule::{Allowed as YES, Already as IS, Ends as ENDS};

const STATE: Rule = Rule::Refused(ErrorCode::WrongState);
const IN_USE: Rule = Rule::Refused(ErrorCode::InUse);
/// A client that lost the answer retries, and gets the answer when the work has ended.
const AGAIN: Rule = Rule::Refused(ErrorCode::TimedOut);

/// The columns of [`TABLE`].
pub const ACTIVITIES: [Activity; 12] = [
    Off, Starting, Running, Stopping, Paused, Suspending, Suspended, KeyChange, Creating,
    Exporting, Exposed, Mirroring,
];

/// What may be done during what. For an action on a disk the last four columns are about that disk, for one
/// on the VM about any of its disks.
#[rustfmt::skip]
pub const TABLE: [(Action, [Rule; ACTIVITIES.len()]); 38] = [
    //                       off    starting running stopping paused  suspending  suspended  key change creating  exporting  exposed  mirroring
    (Action::Register,      [YES,   STATE,   STATE,  STATE,   STATE,  STATE,      YES,       IN_USE,    YES,      YES,       YES,     YES]),
    (Action::Unregister,    [YES,   STATE,   STATE,  STATE,   STATE,  STATE,      YES,       IN_USE,    ENDS,     ENDS,      IN_USE,  ENDS]),
    (Action::ChangeKeys,    [YES,   STATE,   YES,    STATE,   YES,    STATE,      YES,       AGAIN,     IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::CreateDisk,    [YES,   IN_USE,  IN_USE, IN_USE,  IN_USE, STATE,      STATE,     IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::DeleteDisk,    [YES,   IN_USE,  IN_USE, IN_USE,  IN_USE, STATE,      STATE,     IN_USE,    ENDS,     IN_USE,    IN_USE,  ENDS]),
    (Action::GrowDisk,      [YES,   STATE,   YES,    STATE,   STATE,  STATE,      STATE,     IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::ExportDisk,    [YES,   IN_USE,  IN_USE, IN_USE,  IN_USE, STATE,      STATE,     IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::ExportKept,    [YES,   STATE,   YES,    YES,     YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::MirrorDisk,    [YES,   STATE,   YES,    STATE,   YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::ConvertDisk,   [YES,   STATE,   STATE,  STATE,   STATE,  STATE,      STATE,     IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::DropSource,    [YES,   STATE,   YES,    YES,     YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::TakeSnapshot,  [YES,   STATE,   YES,    STATE,   YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::Revert,        [YES,   STATE,   STATE,  STATE,   STATE,  STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::DropSnapshot,  [YES,   STATE,   YES,    YES,     YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::Prove,         [YES,   STATE,   YES,    YES,     YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::Dump,          [STATE, STATE,   YES,    YES,     YES,    STATE,      STATE,     IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::DecryptDump,   [YES,   YES,     YES,    YES,     YES,    YES,        YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::BackUp,        [YES,   STATE,   YES,    YES,     YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::VerifyBackup,  [YES,   YES,     YES,    YES,     YES,    YES,        YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::Restore,       [YES,   STATE,   STATE,  STATE,   STATE,  STATE,      STATE,     IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::Send,          [STATE, STATE,   YES,    STATE,   YES,    STATE,      STATE,     IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::SendAtRest,    [YES,   STATE,   STATE,  STATE,   STATE,  STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::ExposeToRead,  [YES,   IN_USE,  YES,    YES,     YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::ExposeToWrite, [YES,   IN_USE,  IN_USE, IN_USE,  IN_USE, STATE,      STATE,     IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::ExposeKept,    [YES,   STATE,   YES,    YES,     YES,    STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::ExposeSealed,  [YES,   STATE,   STATE,  STATE,   STATE,  STATE,      YES,       IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::PowerOn,       [YES,   IS,      IS,     STATE,   STATE,  STATE,      YES,       IN_USE,    STATE,    STATE,     IN_USE,  YES]),
    (Action::Suspend,       [STATE, STATE,   YES,    STATE,   YES,    IS,         IS,        IN_USE,    IN_USE,   IN_USE,    IN_USE,  IN_USE]),
    (Action::ShutDown,      [IS,    STATE,   YES,    YES,     STATE,  STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
    (Action::Pause,         [STATE, STATE,   YES,    STATE,   IS,     STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
    (Action::Unpause,       [STATE, STATE,   IS,     IS,      YES,    STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
    (Action::Reset,         [STATE, STATE,   YES,    YES,     YES,    STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
    (Action::Wakeup,        [STATE, STATE,   YES,    YES,     STATE,  STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
    (Action::Console,       [STATE, STATE,   YES,    YES,     YES,    STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
    (Action::Screen,        [STATE, STATE,   YES,    YES,     YES,    STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
    (Action::Guest,         [STATE, STATE,   YES,    YES,     YES,    STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
    (Action::Bitmaps,       [STATE, STATE,   YES,    YES,     YES,    STATE,      STATE,     YES,       YES,      YES,       YES,     IN_USE]),
    (Action::Replica,       [STATE, STATE,   YES,    YES,     YES,    STATE,      STATE,     YES,       YES,      YES,       YES,     YES]),
];

/// The result of an action during an activity.
#[must_use]
pub fn rule(action: Action, activity: Activity) -> Rule {
    let row = TABLE.iter().find(|(row, _)| *row == action);
    let column = ACTIVITIES.iter().position(|column| *column == activity);
    row.zip(column).map_or(STATE, |((_, row), column)| row[column])
}

/// The result of an action that is not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Do it, after ending what it ends.
    Granted,
    /// Nothing to do: the state is as requested already.
    Already,
}

/// The state of a VM, and the work in progress on it.
pub struct Situation<'a> {
    /// The VM.
    pub spec: &'a VmSpec,
    /// Whether it runs.
    pub power: Power,
    /// Whether the keys of its disks are being checked or changed.
    pub changing_keys: bool,
    /// The disks that are being made, exported or mirrored, or are exposed.
    pub disks: Vec<(DiskId, Activity)>,
    /// The disks that a VM that runs does not have: for them it is as one that is off.
    pub unused: Vec<DiskId>,
}

impl Situation<'_> {
    /// Whether an action is allowed on this disk, or on the VM as a whole.
    ///
    /// # Errors
    /// The table's refusal, as text.
    pub fn may(&self, action: Action, disk: Option<&DiskSpec>) -> Result<Permission, Problem> {
        let power = match self.power {
            _ if disk.is_some_and(|disk| self.unused.contains(&disk.disk)) => Off,
            Power::Off => Off,
            Power::Starting => Starting,
            Power::Stopping => Stopping,
            Power::Paused => Paused,
            Power::Suspending | Power::Migrating => Suspending,
            Power::Suspended => Suspended,
            // The VM is not off.
            Power::Running | Power::Unknown => Running,
        };
        match rule(action, power) {
            Rule::Already => return Ok(Permission::Already),
            Rule::Refused(code) => return Err(self.refusal(code, action, power, disk)),
            Rule::Allowed | Rule::Ends => {}
        }
        let keys = self.changing_keys.then_some((None, KeyChange));
        let concerned =
            self.disks.iter().filter(|(id, _)| disk.is_none_or(|disk| disk.disk == *id));
        let disks = concerned.map(|(id, activity)| (Some(*id), *activity));
        for (id, activity) in keys.into_iter().chain(disks) {
            if let Rule::Refused(code) = rule(action, activity) {
                let disk = disk.or_else(|| self.spec.disk(id?));
                return Err(self.refusal(code, action, activity, disk));
            }
        }
        Ok(Permission::Granted)
    }

    fn refusal(
        &self,
        code: ErrorCode,
        action: Action,
        during: Activity,
        disk: Option<&DiskSpec>,
    ) -> Problem {
        let vm = &self.spec.name;
        let disk = disk.map_or_else(|| "a disk".to_owned(), |disk| format!("disk '{}'", disk.name));
        let what = match (action, during) {
            (_, Suspending) if self.power == Power::Migrating => {
                "is on its way to another host. Wait until its migration has ended"
            }
            (_, Suspending) => "is being suspended. Wait a moment",
            (_, Suspended) => return super::suspended(self.spec),
            (Action::Suspend, Stopping) => "is stopping. Wait until it is off, or runs on",
            (Action::Suspend, Off | Starting) => "does not run. Start it first",
            (Action::Register, Starting | Running | Stopping | Paused) => {
                "is not off, and this cannot change while it runs. Stop it first"
            }
            (Action::Unregister, Starting | Running | Stopping | Paused) => {
                "is not off. Stop it first"
            }
            (Action::ChangeKeys, Starting | Stopping) => {
                "is starting or stopping: the keys of its disks cannot be changed meanwhile. Wait until it runs or is off"
            }
            (Action::GrowDisk, Starting | Stopping | Paused) => {
                "is starting, stopping or paused: its disks cannot grow meanwhile. Wait until it runs or is off"
            }
            (Action::MirrorDisk | Action::DropSource, Starting | Stopping) => {
                "is starting or stopping: the copy of a disk cannot begin meanwhile. Wait until it runs or is off"
            }
            (Action::TakeSnapshot, Starting | Stopping) => {
                "is starting or stopping: no snapshot can be taken meanwhile. Wait until it runs or is off"
            }
            (Action::Revert, Starting | Running | Stopping | Paused) => {
                "is not off: its disks cannot be reverted. Stop it first"
            }
            (Action::ConvertDisk, Starting | Running | Stopping | Paused) => {
                "is not off: its disks are converted in their files only then. Stop it first, or leave out --in-place: a copy is made while it runs, where there is room"
            }
            (Action::Restore, Starting | Running | Stopping | Paused) => {
                "is not off: its disks cannot be restored. Stop it first"
            }
            (Action::BackUp, Starting) => {
                "is starting: it cannot be backed up meanwhile. Wait until it runs"
            }
            (Action::Send, Off | Starting) => {
                "does not run: it is not sent to another host. Start it first"
            }
            (Action::SendAtRest, Starting | Running | Stopping | Paused) => {
                "is not off or suspended any more. Begin the migration again, which sends a guest that runs with its memory"
            }
            (Action::Send, Stopping) => "is stopping. Wait until it is off, or runs on",
            (Action::DropSnapshot, Starting) => {
                "is starting: its snapshots cannot be deleted meanwhile. Wait until it runs"
            }
            (Action::ExportKept, Starting) => {
                "is starting: what its snapshots keep cannot be exported meanwhile. Wait until it runs"
            }
            (Action::ExposeKept, Starting) => {
                "is starting: what its snapshots keep cannot be exposed meanwhile. Wait until it runs"
            }
            (Action::ExposeSealed, Starting | Running | Stopping | Paused) => {
                let what = format!(
                    "VM '{vm}' is not off, and the ciphertext of a disk that is written to is not of one instant: expose that of a snapshot (vmseal snapshot create {vm} NAME, then --snapshot NAME), or stop it first"
                );
                return Problem::new(code, what);
            }
            (Action::Prove, Starting) => {
                "is starting: its files cannot be read for a proof meanwhile. Wait until it runs"
            }
            (Action::PowerOn, Stopping) => "is stopping. Wait until it is off",
            (Action::PowerOn, Paused) => "is paused: unpause it",
            (Action::ShutDown, Paused) => {
                "is paused: its guest cannot shut down. Unpause it first, or force it off"
            }
            (Action::Pause, Stopping) => {
                "is stopping, and its guest would not come to that. Wait, or force it off"
            }
            (Action::Wakeup, Paused) => {
                "is paused: its guest is not woken meanwhile. Unpause it first"
            }
            (Action::Pause | Action::Unpause | Action::Reset | Action::Wakeup, _) => {
                "does not run. Start it first"
            }
            (Action::PowerOn, Creating | Exporting) => {
                "cannot start while a disk is being made or exported. Try again in a moment, or cancel the task"
            }
            (Action::ShutDown, Starting) => {
                "is still being started: its guest cannot be asked to shut down yet. Wait, or force it off"
            }
            (Action::Console, _) => "does not run: it has no console. Start it first",
            (Action::Screen, _) => "does not run: it has no screen. Start it first",
            (Action::Guest, _) => "does not run: no guest could answer. Start it first",
            (Action::Bitmaps, _) => {
                "does not run, and its dirty bitmaps are shown only while it runs. Start it first"
            }
            (Action::Replica, _) => {
                "does not run: nothing is copied to a replica while its VM is off; the replica stays as it was when the VM stopped. Start the VM, and ask again"
            }
            (_, KeyChange) => {
                let what = format!("the keys of VM '{vm}' are being changed: wait a moment");
                return Problem::new(code, what);
            }
            (_, Creating) => {
                let what = format!("{disk} is being made or restored: wait, or cancel the task");
                return Problem::new(code, what);
            }
            (_, Exporting) => {
                let what =
                    format!("{disk} is being exported or backed up: wait, or cancel the task");
                return Problem::new(code, what);
            }
            (_, Mirroring) => {
                let what = format!(
                    "{disk} is being copied to another image, or its former image is being removed, or its layers are being merged, or it is being read for a proof, or the VM is being sent to another host: wait, or cancel the task"
                );
                return Problem::new(code, what);
            }
            (_, Exposed) => {
                let what = format!(
                    "{disk} is exposed: end the 'vmseal disk expose' that exposes it first"
                );
                return Problem::new(code, what);
            }
            (_, Off | Starting | Running | Stopping | Paused) => {
                let what = format!("{disk} is in use: VM '{vm}' is not off. Stop it first");
                return Problem::new(code, what);
            }
        };
        Problem::new(code, format!("VM '{vm}' {what}"))
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::Device;

    use super::*;

    #[test]
    fn the_table_has_each_action_once() {
        for (index, (action, _)) in TABLE.iter().enumerate() {
            assert!(TABLE[..index].iter().all(|(other, _)| other != action), "{action:?}");
        }
    }

    #[test]
    fn every_pair_is_answered_as_the_table_says() {
        let mut spec = crate::process::run_dir::tests::spec();
        spec.devices =
            ["one", "two"].map(|name| Device::Disk(super::super::tests::disk(name))).into();
        let [one, two] = [0, 1].map(|index| spec.disks().nth(index).unwrap());
        let at_rest = || Situation {
            spec: &spec,
            power: Power::Off,
            changing_keys: false,
            disks: Vec::new(),
            unused: Vec::new(),
        };
        for (action, row) in &TABLE {
            for (activity, cell) in ACTIVITIES.iter().zip(row) {
                let on_disk = matches!(activity, Creating | Exporting | Exposed | Mirroring);
                let situation = match activity {
                    Off => at_rest(),
                    Starting => Situation { power: Power::Starting, ..at_rest() },
                    Running => Situation { power: Power::Running, ..at_rest() },
                    Stopping => Situation { power: Power::Stopping, ..at_rest() },
                    Paused => Situation { power: Power::Paused, ..at_rest() },
                    Suspending => Situation { power: Power::Suspending, ..at_rest() },
                    Suspended => Situation { power: Power::Suspended, ..at_rest() },
                    KeyChange => Situation { changing_keys: true, ..at_rest() },
                    _ => Situation { disks: vec![(one.disk, *activity)], ..at_rest() },
                };
                // An action that needs a running VM is refused while it is off, whatever else is in progress.
                let off = super::rule(*action, Off);
                let expected = match (on_disk || *activity == KeyChange, off) {
                    (true, Rule::Refused(_) | Rule::Already) => off,
                    _ => *cell,
                };
                let answer = situation.may(*action, Some(one));
                match expected {
                    Rule::Refused(code) => assert_eq!(answer.unwrap_err().code, code),
                    Rule::Already => assert_eq!(answer.unwrap(), Permission::Already),
                    YES | ENDS => assert_eq!(answer.unwrap(), Permission::Granted),
                }
                if on_disk && off == YES {
                    let beside = situation.may(*action, Some(two));
                    assert_eq!(beside.unwrap(), Permission::Granted, "{action:?} {activity:?}");
                    let refused = matches!(cell, Rule::Refused(_));
                    assert_eq!(situation.may(*action, None).is_err(), refused, "{action:?}");
                }
            }
        }
    }
}
