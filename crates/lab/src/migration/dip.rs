//! What a client notices of a switch-over: how long nothing was answered, and how long it took until as much was answered as before.

use std::time::Duration;

use crate::statistics::Interval;

/// Answers are counted in windows of this length: shorter than a switch-over that anybody notices, and long enough for some 100 answers
/// to a client that asks 1000 times in a second.
const WINDOW: Duration = Duration::from_millis(100);
/// The part of the median before the move from which on a rate is as before.
const AS_BEFORE: f64 = 0.9;
/// For how many windows it must be, taken together: one by itself may be fast by chance.
const STAYS: usize = 10;

/// When a request was sent and answered, since the client began.
pub(super) type Answer = (Duration, Duration);

/// How many answers came in each whole window until the end.
pub(super) fn counted(answers: &[Answer], end: Duration) -> Vec<u64> {
    let mut counts = vec![0; window_of(end)];
    for (_, answered) in answers {
        // The last window is not a whole one.
        if let Some(count) = counts.get_mut(window_of(*answered)) {
            *count += 1;
        }
    }
    counts
}

/// The longest time without an answer that ended after a move had begun, and began before the move had ended.
pub(super) fn silence(answers: &[Answer], (from, to): (Duration, Duration)) -> Option<Answer> {
    let mut times: Vec<Duration> = answers.iter().map(|(_, answered)| *answered).collect();
    times.sort_unstable();
    let pairs = times.windows(2).map(|pair| (pair[0], pair[1]));
    let meanwhile = pairs.filter(|(last, next)| *next > from && *last < to);
    meanwhile.max_by_key(|(last, next)| *next - *last)
}

/// How long it took, in seconds from the beginning of a silence, until as much was answered as in the windows between two times before; the
/// time until the end where it never was; not a number where nothing was answered before.
pub(super) fn recovery(
    counts: &[u64],
    (begins, ends): (Duration, Duration),
    (last, next): Answer,
    end: Duration,
) -> f64 {
    let before = counts.get(window_of(begins)..window_of(ends)).unwrap_or_default();
    let usual = Interval::of(before.iter().map(|count| *count as f64));
    let Some(usual) = usual.map(|it| it.median).filter(|it| *it > 0.0) else { return f64::NAN };
    let enough = |count: u64, windows: usize| count as f64 >= AS_BEFORE * usual * windows as f64;
    let first = window_of(next);
    let mut after = counts.get(first..).unwrap_or_default().windows(STAYS);
    let found =
        after.position(|windows| enough(windows[0], 1) && enough(windows.iter().sum(), STAYS));
    let since = match found {
        // Of the first window a part may be before the next answer.
        Some(at) => (WINDOW * u32::try_from(first + at).unwrap_or(u32::MAX)).max(next),
        None => end,
    };
    since.saturating_sub(last).as_secs_f64()
}

/// The window that a time is in.
fn window_of(time: Duration) -> usize {
    (time.as_millis() / WINDOW.as_millis()) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOVE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(4));
    const BEFORE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(2));
    const END: Duration = Duration::from_secs(7);

    /// Answers that come so many milliseconds after each other, from one time until another.
    fn every(answers: &mut Vec<Answer>, each: u64, (from, to): (u64, u64)) {
        let times = (from..to).step_by(each as usize).map(Duration::from_millis);
        answers.extend(times.map(|time| (time, time)));
    }

    /// 100 in a second until 2.5 s, then nothing for 400 ms.
    fn until_silence() -> Vec<Answer> {
        let mut answers = Vec::new();
        every(&mut answers, 10, (0, 2510));
        answers
    }

    fn recovered(answers: &[Answer]) -> (f64, f64) {
        let counts = counted(answers, END);
        let silent = silence(answers, MOVE).unwrap();
        let lasted = (silent.1 - silent.0).as_secs_f64();
        (lasted, recovery(&counts, BEFORE, silent, END))
    }

    #[test]
    fn a_rate_that_is_as_before_at_once_takes_as_long_as_the_silence() {
        let mut answers = until_silence();
        every(&mut answers, 10, (2900, 7000));
        assert_eq!(counted(&answers, END)[24..30], [10, 1, 0, 0, 0, 10]);
        assert_eq!(recovered(&answers), (0.4, 0.4));
        // Answers of several connections do not come in order.
        answers.reverse();
        assert_eq!(recovered(&answers), (0.4, 0.4));
    }

    #[test]
    fn a_rate_that_rises_later_counts_from_then_on() {
        let mut answers = until_silence();
        every(&mut answers, 20, (2900, 4000));
        every(&mut answers, 10, (4000, 7000));
        // From 2.5 s until 4 s.
        assert_eq!(recovered(&answers), (0.4, 1.5));
    }

    #[test]
    fn one_fast_window_is_not_as_before() {
        let mut answers = until_silence();
        every(&mut answers, 5, (2900, 3000));
        every(&mut answers, 20, (3000, 5000));
        every(&mut answers, 10, (5000, 7000));
        assert_eq!(recovered(&answers), (0.4, 2.5));
    }

    #[test]
    fn a_rate_that_never_is_as_before_takes_until_the_end() {
        let mut answers = until_silence();
        every(&mut answers, 20, (2900, 7000));
        assert_eq!(recovered(&answers), (0.4, 4.5));
    }

    #[test]
    fn only_a_silence_of_the_move_counts_and_there_must_be_something_before() {
        let mut answers = Vec::new();
        every(&mut answers, 10, (0, 1500));
        every(&mut answers, 10, (1900, 2510));
        every(&mut answers, 10, (2600, 5000));
        every(&mut answers, 10, (6000, 7000));
        let found = silence(&answers, MOVE).unwrap();
        assert_eq!(found, (Duration::from_millis(2500), Duration::from_millis(2600)));
        assert_eq!(silence(&answers[..1], MOVE), None);
        let counts = counted(&answers[160..], END);
        assert!(recovery(&counts, BEFORE, found, END).is_nan());
    }
}
