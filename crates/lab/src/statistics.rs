//! Medians, percentiles and bounds of few values, without assuming how they are distributed.
//!
//! The bounds are order statistics: whatever the distribution, the k-th smallest of n independent values is
//! above the true median with probability P(Binomial(n, ½) < k), and above a percentile with that percentile's share
//! in place of ½. The bounds are the innermost values for which that is at most 5 %, so each bound by itself holds with
//! 95 % or more. Fewer than five values have no such bound of the median, fewer than 299 no upper one of the 99th
//! percentile.

use serde::Serialize;

/// How often a bound may be wrong.
const RISK: f64 = 0.05;

/// The most values; 2⁻ⁿ is still representable.
pub const VALUES_MAX: usize = 1000;

/// A median with its 95 % bounds, one-sided each; or another percentile, where one is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The median of the values, or that percentile.
    pub median: f64,
    /// Below the true one with 95 % confidence; none with too few values.
    pub lower: Option<f64>,
    /// Above the true one with 95 % confidence; none with too few values.
    pub upper: Option<f64>,
}

impl Interval {
    /// Of `values`; none if there are none, or one is not a number.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let sorted = sorted(values)?;
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        };
        Some(Self::around(median, &sorted, 0.5))
    }

    /// What so many of 100 `values` do not exceed (1 to 99); none if there are none, or one is not a number.
    #[must_use]
    pub fn of_percentile(percentile: u8, values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let sorted = sorted(values)?;
        let rank = (sorted.len() * usize::from(percentile)).div_ceil(100);
        let found = sorted[rank.clamp(1, sorted.len()) - 1];
        Some(Self::around(found, &sorted, f64::from(percentile) / 100.0))
    }

    /// The bounds of what this share of all values does not exceed.
    fn around(found: f64, sorted: &[f64], share: f64) -> Self {
        let last = sorted.len() - 1;
        Self {
            median: found,
            lower: outside(sorted.len(), share).map(|count| sorted[count]),
            upper: outside(sorted.len(), 1.0 - share).map(|count| sorted[last - count]),
        }
    }

    /// The median with its bounds, if there are any, as text.
    #[must_use]
    pub fn show(&self, number: impl Fn(f64) -> String) -> String {
        let median = number(self.median);
        match (self.lower, self.upper) {
            (Some(lower), Some(upper)) => {
                format!("{median} [{}, {}]", number(lower), number(upper))
            }
            (Some(lower), None) => format!("{median} [{}, too few rounds]", number(lower)),
            (None, Some(upper)) => format!("{median} [too few rounds, {}]", number(upper)),
            (None, None) => format!("{median} [too few rounds]"),
        }
    }
}

/// The first values, sorted; none if there are none, or one is not a number.
fn sorted(values: impl IntoIterator<Item = f64>) -> Option<Vec<f64>> {
    let mut sorted: Vec<f64> = values.into_iter().take(VALUES_MAX).collect();
    if sorted.is_empty() || sorted.iter().any(|value| !value.is_finite()) {
        return None;
    }
    sorted.sort_by(f64::total_cmp);
    Some(sorted)
}

/// How many of `n` sorted values are outside the bound on one side, where each is there with a probability of `share`.
/// By logarithms: the probability that none is may be too small for a number.
fn outside(n: usize, share: f64) -> Option<usize> {
    let mut logarithm = n as f64 * (1.0 - share).ln();
    let odds = (share / (1.0 - share)).ln();
    let mut cumulative = logarithm.exp();
    let mut found = None;
    for count in 0..n {
        if cumulative > RISK {
            break;
        }
        found = Some(count);
        logarithm += ((n - count) as f64 / (count + 1) as f64).ln() + odds;
        cumulative += logarithm.exp();
    }
    found
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
            assert_eq!(outside(n, 0.5), count, "n = {n}");
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

    #[test]
    fn a_percentile_has_an_upper_bound_only_with_many_values() {
        let of = |count: u32| Interval::of_percentile(99, (1..=count).map(f64::from)).unwrap();
        // 0.99^298 is above 5 %, 0.99^299 is below.
        assert_eq!((of(100).median, of(100).upper), (99.0, None));
        assert!(of(100).lower.is_some_and(|lower| lower < 99.0), "{:?}", of(100));
        assert_eq!((of(298).upper, of(299).upper), (None, Some(299.0)));
        let many = of(1000);
        assert_eq!(many.median, 990.0);
        assert!(many.lower.unwrap() < 990.0 && many.upper.unwrap() > 990.0, "{many:?}");
        assert_eq!(Interval::of_percentile(50, [3.0, 1.0, 2.0]).unwrap().median, 2.0);
        assert_eq!(Interval::of_percentile(99, []), None);
        let shown = of(100).show(|value| format!("{value:.0}"));
        assert!(shown.starts_with("99 [") && shown.ends_with(", too few rounds]"), "{shown}");
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
