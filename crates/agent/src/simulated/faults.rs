//! The faults of a simulated host: which call fails, and how.

use std::collections::BTreeMap;

use vmseal_api::problem::ErrorCode;
use vmseal_api::request_id::{self, RequestId};

/// The kinds of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// `describe`
    Describe,
    /// `state`
    State,
    /// `probe_datastore`
    ProbeDatastore,
    /// `examine_datastore`
    ExamineDatastore,
    /// `share_datastore`
    ShareDatastore,
    /// `offer_pool_key`
    OfferPoolKey,
    /// `remount_datastore`
    RemountDatastore,
    /// `fence_vm`
    FenceVm,
    /// `examine_disk`
    ExamineDisk,
    /// `measure_datastore`
    MeasureDatastore,
    /// `metrics`
    Metrics,
    /// `usage`
    Usage,
    /// `log_level`
    LogLevel,
    /// `set_log_level`
    SetLogLevel,
    /// `scan_datastore`
    ScanDatastore,
    /// `survey_datastore`
    SurveyDatastore,
    /// `register_vm`
    RegisterVm,
    /// `unregister_vm`
    UnregisterVm,
    /// `offer_key`
    OfferKey,
    /// `check_key`
    CheckKey,
    /// `add_key`
    AddKey,
    /// `drop_other_keys`
    DropOtherKeys,
    /// `share_data_keys`
    ShareDataKeys,
    /// `delete_disk`
    DeleteDisk,
    /// `examine_hardware`
    ExamineHardware,
    /// `examine_migration_port`
    ExamineMigrationPort,
    /// `measure_kept`
    MeasureKept,
    /// `measure_medium`
    MeasureMedium,
    /// `examine_nic`
    ExamineNic,
    /// `examine_job`
    ExamineJob,
    /// `examine_change`
    ExamineChange,
    /// `put_job`
    PutJob,
    /// `job`
    Job,
    /// `set_pace`
    SetPace,
    /// `commit_job`
    CommitJob,
    /// `cancel_job`
    CancelJob,
    /// `expose_disk`
    ExposeDisk,
    /// `bitmaps`
    Bitmaps,
    /// `change_bitmap`
    ChangeBitmap,
    /// `replica`
    Replica,
    /// `power_on`
    PowerOn,
    /// `power_off`
    PowerOff,
    /// `suspend`
    Suspend,
    /// `discard_memory`
    DiscardMemory,
    /// `discard_dump`
    DiscardDump,
    /// `read_backup`
    ReadBackup,
    /// `discard_backup`
    DiscardBackup,
    /// `control_guest`
    ControlGuest,
    /// `grow_disk`
    GrowDisk,
    /// `screen`
    Screen,
    /// `guest`
    Guest,
    /// `console`
    Console,
}

impl Call {
    /// The calls that change something.
    pub const CHANGING: [Self; 18] = [
        Self::ProbeDatastore,
        Self::RegisterVm,
        Self::UnregisterVm,
        Self::OfferKey,
        Self::AddKey,
        Self::DropOtherKeys,
        Self::DeleteDisk,
        Self::PutJob,
        Self::CommitJob,
        Self::CancelJob,
        Self::PowerOn,
        Self::PowerOff,
        Self::Suspend,
        Self::DiscardMemory,
        Self::DiscardDump,
        Self::DiscardBackup,
        Self::ControlGuest,
        Self::GrowDisk,
    ];
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done, and this error is returned.
    Refuse(ErrorCode),
    /// Nothing is done; the caller sees an unreachable host.
    LoseRequest,
    /// It is done; the caller sees a time-out.
    LoseAnswer,
    /// The agent dies before it does anything, and a new one starts.
    Crash,
    /// The agent dies after it has written to one of the VM's disks, and a new one starts.
    CrashHalfway,
    /// It is done; then the agent dies and a new one starts. The caller sees an unreachable host.
    CrashAfter,
    /// It is done; then the host cannot be reached any more. The caller sees an unreachable host.
    FallSilentAfter,
}

/// The planned faults and the record of calls.
#[derive(Default)]
pub struct Faults {
    calls: Vec<(Call, Option<RequestId>)>,
    counts: BTreeMap<Call, u32>,
    plan: Vec<(Call, u32, Fault)>,
}

impl Faults {
    pub fn inject(&mut self, call: Call, nth: u32, fault: Fault) {
        let so_far = self.counts.get(&call).copied().unwrap_or(0);
        self.plan.push((call, so_far + nth, fault));
    }

    pub fn forget(&mut self) {
        self.plan.clear();
    }

    /// The calls, and the requests that they were made for.
    pub fn calls(&self) -> &[(Call, Option<RequestId>)] {
        &self.calls
    }

    /// Counts a call, and returns the fault that is planned for it.
    pub fn count(&mut self, call: Call) -> Option<Fault> {
        // Long polls repeat without end and tell a test nothing.
        if call != Call::State {
            self.calls.push((call, request_id::current()));
        }
        let count = self.counts.entry(call).or_default();
        *count += 1;
        let now = (call, *count);
        let index = self.plan.iter().position(|(call, nth, _)| (*call, *nth) == now)?;
        Some(self.plan.swap_remove(index).2)
    }
}
