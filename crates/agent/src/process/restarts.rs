//! How often the filters of a running VM have died, and whether to start another one. The real host and the
//! simulated one share these rules.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use vmseal_api::host::{Notice, NoticeCode, VmSpec};

/// The filter deaths after which a VM is stopped. A kernel short of memory may kill one now and then; at this
/// rate the guest or the datastore is the cause, and each new process gives that cause another try.
pub const RESTARTS_MAX: usize = 5;

/// The period in which deaths count.
pub const WINDOW: Duration = Duration::from_secs(600);

/// What no other filter is started for, where one has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// One is being started.
    Not,
    /// The VM's key is not on this host.
    ForKey,
    /// The guest stands still, and needs none until it goes on.
    ForTheGuest,
}

/// A filter that died, and when another one replaced it.
#[derive(Clone, Debug)]
struct Restart {
    died: Instant,
    /// How it ended.
    why: String,
    /// When the disks were served again, and how long the guest had waited; none while they are not.
    served: Option<(Timestamp, Duration)>,
}

/// The filter deaths of the last [`WINDOW`].
#[derive(Clone, Debug, Default)]
pub struct Restarts(VecDeque<Restart>);

impl Restarts {
    /// Records a death; returns whether to start another filter.
    pub fn died(&mut self, why: String, now: Instant) -> bool {
        self.forget(now);
        self.0.push_back(Restart { died: now, why, served: None });
        self.0.len() <= RESTARTS_MAX
    }

    /// Records that the disks are served again.
    pub fn served(&mut self, now: Instant) {
        if let Some(last) = self.0.back_mut() {
            last.served = Some((Timestamp::now(), now.saturating_duration_since(last.died)));
        }
    }

    /// Forgets deaths older than [`WINDOW`].
    pub fn forget(&mut self, now: Instant) {
        let old = |one: &Restart| {
            one.served.is_some() && now.saturating_duration_since(one.died) > WINDOW
        };
        while self.0.front().is_some_and(old) {
            self.0.pop_front();
        }
    }

    /// The notice for operators.
    #[must_use]
    pub fn notice(&self, spec: &VmSpec, waits: Waits) -> Option<Notice> {
        let Restart { why, served, .. } = self.0.back()?;
        let (code, detail) = match served {
            None => {
                let what = match waits {
                    Waits::Not => "another one is being started",
                    Waits::ForKey => {
                        "another one needs the VM's key, which is not on this host: see that the key provider answers"
                    }
                    Waits::ForTheGuest => {
                        "another one is started when the guest, which stands still, goes on"
                    }
                };
                (
                    NoticeCode::DisksDown,
                    format!("{why}. Nothing is lost: the guest waits for its disks; {what}"),
                )
            }
            Some((at, waited)) => {
                let (count, minutes) = (self.0.len(), WINDOW.as_secs() / 60);
                let milliseconds = waited.as_millis();
                let detail = format!(
                    "{why}. Another one has served the disks since {at:.0}; the guest waited {milliseconds} ms and lost nothing. That was {count} of the {RESTARTS_MAX} restarts that are allowed in {minutes} minutes; check the host's kernel log if it was killed for memory"
                );
                (NoticeCode::FilterRestarted, detail)
            }
        };
        let detail = format!("VM '{}': {detail}", spec.name);
        Some(Notice { code, disk: None, detail })
    }

    /// Why no other filter is started, after too many deaths.
    #[must_use]
    pub fn too_many(&self) -> String {
        let minutes = WINDOW.as_secs() / 60;
        format!("it was the {}th filter process to die within {minutes} minutes", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limited_number_of_deaths_is_allowed_in_a_window() {
        let (mut restarts, start) = (Restarts::default(), Instant::now());
        let spec = crate::process::run_dir::tests::spec();
        assert!(restarts.notice(&spec, Waits::Not).is_none());
        for number in 0..RESTARTS_MAX as u64 {
            let now = start + Duration::from_secs(number);
            assert!(restarts.died("it died".to_owned(), now));
            assert_eq!(restarts.notice(&spec, Waits::Not).unwrap().code, NoticeCode::DisksDown);
            restarts.served(now + Duration::from_millis(70));
            let told = restarts.notice(&spec, Waits::Not).unwrap();
            assert_eq!(told.code, NoticeCode::FilterRestarted);
            assert!(told.detail.contains("70 ms"), "{}", told.detail);
        }
        let mut patient = restarts.clone();
        assert!(!restarts.died("it died".to_owned(), start + Duration::from_secs(9)));
        assert!(restarts.too_many().contains("6th"));
        // The first two are outside the window by now.
        assert!(patient.died("it died".to_owned(), start + WINDOW + Duration::from_millis(1500)));
        patient.served(start + WINDOW + Duration::from_secs(2));
        patient.forget(start + WINDOW * 3);
        assert!(patient.notice(&spec, Waits::Not).is_none());
    }

    #[test]
    fn what_a_new_filter_waits_for_is_said_and_not_forgotten_meanwhile() {
        let (mut restarts, start) = (Restarts::default(), Instant::now());
        assert!(restarts.died("it died".to_owned(), start));
        restarts.forget(start + WINDOW * 2);
        let told = restarts.notice(&crate::process::run_dir::tests::spec(), Waits::ForKey).unwrap();
        assert!(told.detail.contains("key"), "{}", told.detail);
        let spec = crate::process::run_dir::tests::spec();
        let told = restarts.notice(&spec, Waits::ForTheGuest).unwrap();
        assert!(told.detail.contains("when the guest") && !told.detail.contains("key"), "{told:?}");
    }
}
