//! How the images of disks in pools of Ceph are cut into objects.
//!
//! ```text
//! object size 4 MiB, nothing else    AAAA… | BBBB… | CCCC…        one object after another
//! stripe unit 64 KiB, count 2        ABABAB…       | CDCDCD…      units go around two objects until these are full
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::size::Size;

/// The smallest and the largest object, in bytes: what librbd takes (orders 12 to 25).
pub const OBJECT_SIZE_MIN: u64 = 4 << 10;
/// See [`OBJECT_SIZE_MIN`].
pub const OBJECT_SIZE_MAX: u64 = 32 << 20;

/// The size of objects where nothing else is said, in bytes: Ceph's (`rbd_default_order`).
pub const OBJECT_SIZE: u64 = 4 << 20;

/// The smallest stripe unit, in bytes: disks are encrypted in sectors of this size, and none is to be in two objects.
pub const STRIPE_UNIT_MIN: u64 = 4 << 10;

/// The most objects that units go around: the longest request, 1 MiB, reaches no more with the smallest unit.
pub const STRIPE_COUNT_MAX: u32 = 256;

/// The most objects that an image may have with an object map (`cls::rbd::MAX_OBJECT_MAP_OBJECT_COUNT`).
const OBJECTS_MAX: u64 = 256_000_000;

/// How an image is cut into objects. What is not said is as the cluster has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageLayout {
    /// The size of an object in bytes: a power of two from 4 KiB to 32 MiB; none is the cluster's default, 4 MiB unless it is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_size: Option<u64>,
    /// How much of an image is in one object before the next object follows, in bytes: a power of two from 4 KiB to the size of an object.
    /// It is given together with the stripe count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_unit: Option<u64>,
    /// How many objects units go around before they come to the first one again: 2 to 256. It is given together with the stripe unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_count: Option<u32>,
}

impl ImageLayout {
    /// Whether it asks for nothing.
    #[must_use]
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }

    /// Its stripes: the unit in bytes, and the count.
    #[must_use]
    pub fn striping(&self) -> Option<(u64, u32)> {
        self.stripe_unit.zip(self.stripe_count)
    }

    /// The size of its objects in bytes, where it is said: stripes fit into objects of a known size alone.
    #[must_use]
    pub fn fixed_object_size(&self) -> Option<u64> {
        self.object_size.or(self.striping().map(|_| OBJECT_SIZE))
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// The field that is wrong, and what is allowed.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let size = self.object_size.unwrap_or(OBJECT_SIZE);
        if !size.is_power_of_two() || !(OBJECT_SIZE_MIN..=OBJECT_SIZE_MAX).contains(&size) {
            let (least, most) = (Size(OBJECT_SIZE_MIN), Size(OBJECT_SIZE_MAX));
            let what = format!("is {}: it must be a power of two, {least} to {most}", Size(size));
            return Err(("object_size", what));
        }
        let (unit, count) = match (self.stripe_unit, self.stripe_count) {
            (None, None) => return Ok(()),
            (Some(_), None) => {
                let what = "is given without a stripe count: say both, or neither";
                return Err(("stripe_unit", what.to_owned()));
            }
            (None, Some(_)) => {
                let what = "is given without a stripe unit: say both, or neither";
                return Err(("stripe_count", what.to_owned()));
            }
            (Some(unit), Some(count)) => (unit, count),
        };
        if !unit.is_power_of_two() || !(STRIPE_UNIT_MIN..=size).contains(&unit) {
            let what = format!(
                "is {}: it must be a power of two, {} to the size of an object, {}",
                Size(unit),
                Size(STRIPE_UNIT_MIN),
                Size(size)
            );
            return Err(("stripe_unit", what));
        }
        if !(2..=STRIPE_COUNT_MAX).contains(&count) {
            let what = format!("is {count}: it must be 2 to {STRIPE_COUNT_MAX} objects");
            return Err(("stripe_count", what));
        }
        Ok(())
    }

    /// Checks that an image of this length, in bytes, does not have too many objects.
    ///
    /// # Errors
    /// How many it would have, and what to do.
    pub fn check_length(&self, length: u64) -> Result<(), String> {
        let Some(object) = self.fixed_object_size() else { return Ok(()) };
        let objects = length.div_ceil(object);
        if objects <= OBJECTS_MAX {
            return Ok(());
        }
        Err(format!(
            "an image of {} in objects of {} would have {objects} of them, and has {OBJECTS_MAX} at most: choose larger objects",
            Size(length),
            Size(object)
        ))
    }
}

impl fmt::Display for ImageLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fixed_object_size() {
            None => f.write_str("objects of the usual size")?,
            Some(size) => write!(f, "objects of {}", Size(size))?,
        }
        match self.striping() {
            None => Ok(()),
            Some((unit, count)) => write!(f, ", {} at a time around {count} of them", Size(unit)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: Option<u64>, unit: Option<u64>, count: Option<u32>) -> ImageLayout {
        ImageLayout { object_size: size, stripe_unit: unit, stripe_count: count }
    }

    #[test]
    fn what_librbd_would_refuse_is_refused_with_the_field() {
        for right in [
            ImageLayout::default(),
            layout(Some(OBJECT_SIZE_MIN), None, None),
            layout(Some(OBJECT_SIZE_MAX), Some(64 << 10), Some(STRIPE_COUNT_MAX)),
            layout(None, Some(OBJECT_SIZE), Some(2)),
        ] {
            assert_eq!(right.check(), Ok(()), "{right:?}");
        }
        for (field, wrong) in [
            ("object_size", layout(Some(OBJECT_SIZE_MIN / 2), None, None)),
            ("object_size", layout(Some(OBJECT_SIZE_MAX * 2), None, None)),
            ("object_size", layout(Some(3 << 20), None, None)),
            ("stripe_unit", layout(None, Some(64 << 10), None)),
            ("stripe_count", layout(None, None, Some(4))),
            ("stripe_unit", layout(Some(1 << 20), Some(2 << 20), Some(4))),
            ("stripe_unit", layout(None, Some(512), Some(4))),
            ("stripe_unit", layout(None, Some(96 << 10), Some(4))),
            ("stripe_count", layout(None, Some(64 << 10), Some(1))),
            ("stripe_count", layout(None, Some(64 << 10), Some(STRIPE_COUNT_MAX + 1))),
        ] {
            assert_eq!(wrong.check().unwrap_err().0, field, "{wrong:?}");
        }
    }

    #[test]
    fn small_objects_are_for_disks_that_are_not_too_large() {
        let small = layout(Some(OBJECT_SIZE_MIN), None, None);
        assert_eq!(small.check_length(100 << 30), Ok(()));
        assert!(small.check_length(2 << 40).unwrap_err().contains("larger objects"));
        assert_eq!(ImageLayout::default().check_length(62 << 40), Ok(()));
    }

    #[test]
    fn it_is_said_for_people() {
        assert_eq!(ImageLayout::default().to_string(), "objects of the usual size");
        assert_eq!(layout(Some(1 << 20), None, None).to_string(), "objects of 1 MiB");
        assert_eq!(
            layout(None, Some(64 << 10), Some(4)).to_string(),
            "objects of 4 MiB, 64 KiB at a time around 4 of them"
        );
    }
}
