//! The panics of a guest that runs: what was done, and whether it may be restarted once more. The real host and the simulated one
//! share these rules. They are on record with the VM's processes.

use jiff::{SignedDuration, Timestamp};
use vmseal_api::dump::Panic;
use vmseal_api::hardware::OnCrash;
use vmseal_api::host::{Notice, NoticeCode, VmSpec};
use vmseal_api::id::DumpId;

/// The restarts after which a guest that panics stays off: one that panics at this rate does so at every boot.
pub const RESTARTS_MAX: usize = 5;

/// The period in which restarts count.
pub const WINDOW: SignedDuration = SignedDuration::from_mins(10);

/// The least time between two core dumps that a host writes by itself: the first one of a guest that panics again and again says
/// why it does.
pub const DUMP_INTERVAL: SignedDuration = SignedDuration::from_mins(10);

/// How many panics are kept: more than restarts that are allowed.
const KEPT_MAX: usize = 16;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Panics {
    /// Those after which the guest was restarted or left as it is, oldest first.
    pub past: Vec<Panic>,
    /// The one that is being handled, or after which the guest stands still.
    pub now: Option<PanicNow>,
}

/// A panic that is being handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PanicNow {
    /// When.
    pub at: Timestamp,
    /// The core dump that is written of it, where one is.
    pub dump: DumpId,
    /// Whether the guest was left as it is.
    pub kept: bool,
}

/// What becomes of a guest that has panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Its VM is stopped.
    Off,
    /// It is reset.
    Restart,
    /// It stands still.
    Keep,
}

/// What becomes of a guest that has panicked; `stopping` says whether it was being shut down.
#[must_use]
pub fn outcome(on_crash: OnCrash, stopping: bool, may_restart: bool) -> Outcome {
    match on_crash {
        OnCrash::Preserve => Outcome::Keep,
        OnCrash::Restart | OnCrash::CoredumpRestart if may_restart && !stopping => Outcome::Restart,
        OnCrash::Restart
        | OnCrash::CoredumpRestart
        | OnCrash::Destroy
        | OnCrash::CoredumpDestroy => Outcome::Off,
    }
}

impl Panics {
    /// The panic that is being handled: this one, or the one that an earlier agent has begun to handle.
    pub fn begin(&mut self, at: Timestamp) -> PanicNow {
        let new = || PanicNow { at, dump: DumpId::new(), kept: false };
        self.now.get_or_insert_with(new).clone()
    }

    /// Whether the guest may be restarted once more.
    #[must_use]
    pub fn may_restart(&self, now: Timestamp) -> bool {
        self.restarts(now) < RESTARTS_MAX
    }

    /// The restarts that count, without that of the panic that is being handled.
    fn restarts(&self, now: Timestamp) -> usize {
        let handled = self.now.as_ref().map(|now| now.at);
        let counts = |it: &&Panic| {
            it.restarted && Some(it.at) != handled && now.duration_since(it.at) < WINDOW
        };
        self.past.iter().filter(counts).count()
    }

    /// The panic that is being handled leads to a restart, or leaves the guest as it is. `dumped` says what became of its core
    /// dump. Nothing changes where that was said before.
    pub fn done(&mut self, restarted: bool, dumped: Option<&str>) {
        let Some(now) = &mut self.now else { return };
        let at = now.at;
        now.kept = !restarted;
        if self.past.last().is_some_and(|last| last.at == at) {
            return;
        }
        let (count, minutes) = (self.restarts(at) + 1, WINDOW.as_mins());
        let what = if restarted {
            format!("it was restarted, {count} of {RESTARTS_MAX} restarts in {minutes} minutes")
        } else {
            "it stands still".to_owned()
        };
        let detail = match dumped {
            Some(dumped) => format!("its guest panicked; {dumped}; {what}"),
            None => format!("its guest panicked; {what}"),
        };
        self.past.push(Panic { at, restarted, detail });
        let more = self.past.len().saturating_sub(KEPT_MAX);
        self.past.drain(..more);
    }

    /// The guest goes on, or boots again.
    pub fn over(&mut self) {
        self.now = None;
    }

    /// The notice for operators.
    #[must_use]
    pub fn notice(&self, spec: &VmSpec, now: Timestamp) -> Option<Notice> {
        let name = &spec.name;
        let detail = match &self.now {
            Some(PanicNow { at, kept: true, .. }) => format!(
                "the guest of VM '{name}' panicked at {at:.0} and stands still. Write a core dump (vmseal vm dump {name}); reset it and let it go on (vmseal vm reset {name}, vmseal vm unpause {name}), or stop it (vmseal vm stop {name} --force)"
            ),
            Some(PanicNow { at, .. }) => format!(
                "the guest of VM '{name}' panicked at {at:.0} and stands still while its core dump is written"
            ),
            None => {
                let last = self.past.iter().rfind(|it| it.restarted)?;
                if self.restarts(now) == 0 {
                    return None;
                }
                format!("VM '{name}' at {:.0}: {}", last.at, last.detail)
            }
        };
        Some(Notice { code: NoticeCode::GuestPanicked, disk: None, detail })
    }

    /// Why the guest of a VM is off; `dumped` says what became of its core dump.
    #[must_use]
    pub fn why_off(&self, vm: &str, on_crash: OnCrash, dumped: Option<&str>) -> String {
        let mut why = format!("the guest of VM '{vm}' panicked");
        if let Some(dumped) = dumped {
            why = format!("{why}; {dumped}");
        }
        if on_crash.restarts() && !self.may_restart(Timestamp::now()) {
            let minutes = WINDOW.as_mins();
            why = format!(
                "{why}. It has panicked {} times within {minutes} minutes and is not restarted any more",
                RESTARTS_MAX + 1
            );
        }
        why
    }
}

/// Why no core dump is written of a guest that has panicked, beside those that are there: so many, the newest of which was whole
/// then.
///
/// # Errors
/// The reason, for people.
pub fn check_dumps(
    vm: &str,
    there: usize,
    newest: Option<Timestamp>,
    now: Timestamp,
) -> Result<(), String> {
    if there >= vmseal_api::limits::PANIC_DUMPS_MAX {
        return Err(format!(
            "no core dump was written, as it has {there} of panics already: delete one (vmseal dump list {vm})"
        ));
    }
    match newest {
        Some(newest) if now.duration_since(newest).abs() < DUMP_INTERVAL => Err(format!(
            "no core dump was written, as the last one is of {newest:.0} and there is one in {} minutes at most",
            DUMP_INTERVAL.as_mins()
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::run_dir::tests::spec;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds)
    }

    #[test]
    fn a_guest_is_restarted_a_limited_number_of_times() {
        let (mut panics, spec) = (Panics::default(), spec());
        for number in 0..RESTARTS_MAX as i64 {
            assert!(panics.may_restart(at(number)), "{number}");
            let begun = panics.begin(at(number));
            assert_eq!(panics.begin(at(999)), begun, "an agent that starts handles the same panic");
            let told = panics.notice(&spec, at(number)).unwrap();
            assert!(told.detail.contains("core dump is written"), "{}", told.detail);
            panics.done(true, Some("a core dump was written"));
            panics.done(true, Some("a core dump was written"));
            panics.over();
        }
        assert_eq!(panics.past.len(), RESTARTS_MAX);
        assert!(panics.past[4].detail.contains("5 of 5 restarts"), "{:?}", panics.past);
        assert!(!panics.may_restart(at(9)));
        assert!(panics.notice(&spec, at(9)).unwrap().detail.contains("restarted"));
        let later = at(1) + WINDOW;
        assert!(panics.may_restart(later), "the first two are outside of the window");
        assert!(panics.notice(&spec, later + WINDOW).is_none());
        for number in 10..50 {
            panics.begin(at(number));
            panics.done(false, None);
            panics.over();
        }
        assert_eq!(panics.past.len(), KEPT_MAX);
    }

    #[test]
    fn a_guest_that_stands_still_is_reported_until_it_goes_on() {
        let (mut panics, spec) = (Panics::default(), spec());
        panics.begin(at(0));
        panics.done(false, None);
        let told = panics.notice(&spec, at(100_000)).unwrap();
        assert!(told.detail.contains("vmseal vm dump"), "{}", told.detail);
        panics.over();
        assert!(panics.notice(&spec, at(0)).is_none());
    }

    #[test]
    fn what_becomes_of_it_follows_from_what_is_asked() {
        use Outcome::{Keep, Off, Restart};
        for (on_crash, may, stopping, limit) in [
            (OnCrash::Destroy, Off, Off, Off),
            (OnCrash::CoredumpDestroy, Off, Off, Off),
            (OnCrash::CoredumpRestart, Restart, Off, Off),
            (OnCrash::Restart, Restart, Off, Off),
            (OnCrash::Preserve, Keep, Keep, Keep),
        ] {
            assert_eq!(outcome(on_crash, false, true), may, "{on_crash:?}");
            assert_eq!(outcome(on_crash, true, true), stopping, "{on_crash:?}");
            assert_eq!(outcome(on_crash, false, false), limit, "{on_crash:?}");
        }
    }

    #[test]
    fn core_dumps_are_limited_in_number_and_rate() {
        let max = vmseal_api::limits::PANIC_DUMPS_MAX;
        assert_eq!(check_dumps("web", max - 1, None, at(0)), Ok(()));
        assert!(check_dumps("web", max, None, at(0)).unwrap_err().contains("delete one"));
        let later = at(0) + DUMP_INTERVAL;
        assert!(check_dumps("web", 1, Some(at(0)), at(5)).unwrap_err().contains("10 minutes"));
        assert_eq!(check_dumps("web", 1, Some(at(0)), later), Ok(()));
    }
}
