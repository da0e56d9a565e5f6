//! Medians and bounds of few values, without assuming how they are distributed.
//!
//! The bounds are order statistics: whatever the distribution, the k-th smallest of n independent values is
//! above the true median with probability P(Binomial(n, ½) < k). The bounds are the innermost values for
//! which that is at most 5 %, so each bound by itself holds with 95 % or more. Fewer than five values have no
//! such bound.

use serde::Serialize;

/// How often a bound may be wrong.
const RISK: f64 = 0.05;

/// The most values; 2⁻ⁿ is still representable.
pub const VALUES_MAX: usize = 1000;

/// A median with its 95 % bounds, one-sided each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The median of the values.
    pub median: f64,
    /// Below the true median with 95 % confidence; none with fewer than five values.
    pub lower: Option<f64>,
    /// Above the true median with 95 % confidence; none with fewer than five values.
    pub upper: Option<f64>,
}

impl Interval {
    /// Of `values`; none if there are none, or one is not a number.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().take(VALUES_MAX).collect();
        if sorted.is_empty() || sorted.iter().any(|value| !value.is_finite()) {
            return None;
        }
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        };
        let trimmed = outside(sorted.len());
        let lower = trimmed.map(|count| sorted[count]);
        let upper = trimmed.map(|count| sorted[sorted.len() - 1 - count]);
        Some(Self { median, lower, upper })
    }

    /// The median with its bounds, if there are any, as text.
    #[must_use]
    pub fn show(&self, number: impl Fn(f64) -> String) -> String {
        let median = number(self.median);
        match (self.lower, self.upper) {
            (Some(lower), Some(upper)) => {
                format!("{median} [{}, {}]", number(lower), number(upper))
            }
            _ => format!("{median} [too few rounds]"),
        }
    }
}

/// How many of `n` sorted values are outside the bound, on either side.
fn outside(n: usize) -> Option<usize> {
    let mut probability = 0.5_f64.powi(i32::try_from(n).ok()?);
    let mut cumulative = probability;
    if cumulative > RISK {
        return None;
    }
    let mut count = 0;
    loop {
        probability *= (n - count) as f64 / (count + 1) as f64;
        cumulative += probability;
        if cumulative > RISK {
            return Some(count);
        }
        count += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        let median = |values: &[f64]| Interval::of(values.iter().copied()).map(|i| i.median);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[7.0]), Some(7.0));
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[1.0, f64::NAN]), None);
    }

    /// Table of the sign test, one-sided 5 %: critical values for n = 1 to 20, 25 and 50, as in any
    /// statistical tables.
    #[test]
    fn the_bounds_are_those_of_the_sign_test() {
        let expected = [
            (4, None),
            (5, Some(0)),
            (7, Some(0)),
            (8, Some(1)),
            (10, Some(1)),
            (11, Some(2)),
            (12, Some(2)),
            (13, Some(3)),
            (15, Some(3)),
            (16, Some(4)),
            (20, Some(5)),
            (25, Some(7)),
            (50, Some(18)),
        ];
        for (n, count) in expected {
            assert_eq!(outside(n), count, "n = {n}");
        }
    }

    #[test]
    fn five_values_are_bounded_by_their_extremes_and_eight_survive_an_outlier() {
        let five = Interval::of([5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!((five.lower, five.upper), (Some(1.0), Some(5.0)));
        let eight = Interval::of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0]).unwrap();
        assert_eq!((eight.lower, eight.upper), (Some(2.0), Some(7.0)));
        assert_eq!(Interval::of([1.0; 4]).unwrap().lower, None);
    }

    /// Tests the bound itself: of many samples of a skewed distribution with median 1, at most about 5 % have
    /// their lower bound above 1.
    #[test]
    fn bounds_hold_as_often_as_they_say() {
        let mut random = fastrand::Rng::with_seed(11);
        for n in [5, 8, 13] {
            let trials = 4000;
            let wrong = (0..trials)
                .filter(|_| {
                    let sample = (0..n).map(|_| (random.f64() - 0.5).exp());
                    Interval::of(sample).unwrap().lower.unwrap() > 1.0
                })
                .count();
            assert!(wrong * 100 < trials * 6, "n = {n}: {wrong} of {trials} were wrong");
            assert!(wrong > 0, "n = {n}: a bound that is never wrong is too wide");
        }
    }

    proptest! {
        #[test]
        fn bounds_enclose_the_median(values in prop::collection::vec(-1e9..1e9_f64, 1..60)) {
            let interval = Interval::of(values.iter().copied()).unwrap();
            prop_assert!(interval.lower.is_none_or(|lower| lower <= interval.median));
            prop_assert!(interval.upper.is_none_or(|upper| upper >= interval.median));
            prop_assert_eq!(interval.lower.is_some(), values.len() >= 5);
        }
    }
}
