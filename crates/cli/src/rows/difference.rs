//! What changes between two readings of a list.

use std::collections::HashMap;

use serde::Serialize;

use super::column::Row;

/// How an item of a list has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It was there when watching began.
    Listed,
    Added,
    Changed,
    Removed,
}

/// The differences between two readings; `before` is none at first.
pub fn differences<T: Row>(before: Option<&[T]>, now: &[T]) -> Vec<(Change, T)> {
    let Some(before) = before else {
        return now.iter().map(|item| (Change::Listed, item.clone())).collect();
    };
    let by_identity = |items: &[T]| -> HashMap<String, usize> {
        items.iter().enumerate().map(|(index, item)| (item.identity(), index)).collect()
    };
    let (known, there) = (by_identity(before), by_identity(now));
    let gone = before.iter().filter(|old| !there.contains_key(&old.identity()));
    let gone = gone.map(|old| (Change::Removed, old.clone()));
    let old = |item: &T| known.get(&item.identity()).map(|index| &before[*index]);
    let news = now.iter().filter_map(|item| match old(item) {
        None => Some((Change::Added, item.clone())),
        Some(old) if old != item => Some((Change::Changed, item.clone())),
        Some(_) => None,
    });
    gone.chain(news).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use vmseal_api::model::Alarm;

    use super::*;

    fn alarm(target: &str, detail: &str) -> Alarm {
        Alarm {
            code: "vm-locked".into(),
            target: target.into(),
            since: jiff::Timestamp::UNIX_EPOCH,
            detail: detail.into(),
            reason: None,
        }
    }

    /// Thousands of tasks are compared after every change.
    #[test]
    fn long_lists_are_compared_in_one_pass() {
        let many = |detail: &str| -> Vec<_> {
            (0..20_000).map(|number| alarm(&number.to_string(), detail)).collect()
        };
        let began = Instant::now();
        assert_eq!(differences(Some(&many("x")), &many("y")).len(), 20_000);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }

    #[test]
    fn each_change_is_reported_once() {
        let first = [alarm("a", "x"), alarm("b", "x")];
        let found = differences(None, &first);
        assert!(found.iter().all(|(change, _)| *change == Change::Listed) && found.len() == 2);
        assert_eq!(differences(Some(&first), &first), []);
        let second = [alarm("b", "y"), alarm("c", "x")];
        assert_eq!(
            differences(Some(&first), &second),
            [
                (Change::Removed, alarm("a", "x")),
                (Change::Changed, alarm("b", "y")),
                (Change::Added, alarm("c", "x")),
            ]
        );
    }
}
