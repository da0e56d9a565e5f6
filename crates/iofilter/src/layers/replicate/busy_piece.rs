//! How much is copied at a time beside a busy guest.
//!
//! A request of the guest may wait for a whole piece: for storage, and for the core that encrypts the piece. So pieces are to be small. But
//! each also takes a time that does not depend on its size, so a copy in small pieces is slow. The size in use is the largest one whose pieces
//! take little longer than the smallest ones (docs/decisions/344). All sizes are tried now and then, as storage and guest change.

use std::time::Duration;

/// The sizes, in bytes.
const SIZES: [usize; 4] = [16 << 10, 32 << 10, 64 << 10, 128 << 10];

/// One piece in so many has the next larger size than the one in use, and one in so many the smallest.
const TRY_EVERY: u32 = 16;

/// By how much a time changes what is known of its size: a half if it is shorter, an eighth if it is longer. Single slow pieces, such as the
/// first one, say little.
const WEIGHT_SHORTER: u32 = 2;
const WEIGHT_LONGER: u32 = 8;

/// What is known of one size counts a single piece as at most so many times as long: one hang of storage is not remembered for long.
const OUTLIER: u32 = 4;

/// How large pieces are.
#[derive(Debug, Default)]
pub struct BusyPiece {
    /// What a piece of each size took; zero where none was timed.
    took: [Duration; SIZES.len()],
    /// The place in [`SIZES`] of the size in use.
    place: usize,
    pieces: u32,
}

impl BusyPiece {
    /// The size of the next piece, in bytes.
    pub fn next(&mut self) -> usize {
        self.pieces = self.pieces.wrapping_add(1);
        let place = match self.pieces % TRY_EVERY {
            0 => (self.place + 1).min(SIZES.len() - 1),
            half if half == TRY_EVERY / 2 => 0,
            _ => self.place,
        };
        SIZES[place]
    }

    /// A piece of this size has taken so long. Pieces of other sizes than those of [`Self::next`] say nothing.
    pub fn timed(&mut self, size: usize, took: Duration) {
        let Some(place) = SIZES.iter().position(|it| *it == size) else { return };
        let known = &mut self.took[place];
        let weight = if took < *known { WEIGHT_SHORTER } else { WEIGHT_LONGER };
        *known = match known.is_zero() {
            true => took,
            false => (*known * (weight - 1) + took.min(*known * OUTLIER)) / weight,
        };
        // An eighth longer than the smallest.
        let most = self.took[0] + self.took[0] / 8;
        let small = self.took.iter().take_while(|it| !it.is_zero() && **it <= most);
        self.place = small.count().saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    /// The sizes of this many pieces, where one of so many bytes takes so long.
    fn sizes(
        piece: &mut BusyPiece,
        pieces: usize,
        takes: impl Fn(usize) -> Duration,
    ) -> Vec<usize> {
        let mut next = || {
            let size = piece.next();
            piece.timed(size, takes(size));
            size
        };
        (0..pieces).map(|_| next()).collect()
    }

    fn each(fixed: u32, of_kib: u32) -> impl Fn(usize) -> Duration {
        move |size| MICROSECOND * (fixed + of_kib * u32::try_from(size >> 10).unwrap())
    }

    /// How many of the pieces have this size.
    fn of(size: usize, pieces: &[usize]) -> usize {
        pieces.iter().filter(|it| **it == size).count()
    }

    #[test]
    fn pieces_are_large_where_their_size_takes_little_time() {
        let mut piece = BusyPiece::default();
        let first = sizes(&mut piece, 100, each(2000, 1));
        assert_eq!(first[0], 16 << 10, "nothing is known yet");
        let later = sizes(&mut piece, 1600, each(2000, 1));
        assert_eq!(of(128 << 10, &later), 1500, "but for the smallest, which is tried");
    }

    #[test]
    fn pieces_are_small_where_their_size_takes_the_time() {
        let mut piece = BusyPiece::default();
        let all = sizes(&mut piece, 1600, each(0, 2));
        assert_eq!((of(16 << 10, &all), of(32 << 10, &all)), (1500, 100));
        let mut piece = BusyPiece::default();
        // 272, 304, 368 µs.
        let all = sizes(&mut piece, 1600, each(240, 2));
        assert!(of(32 << 10, &all) > 1300, "{}", of(32 << 10, &all));
        assert_eq!(of(128 << 10, &all), 0);
    }

    #[test]
    fn pieces_follow_what_storage_does() {
        let mut piece = BusyPiece::default();
        sizes(&mut piece, 200, each(2000, 1));
        let slow = sizes(&mut piece, 1600, each(0, 50));
        assert!(of(128 << 10, &slow) < 50, "{}", of(128 << 10, &slow));
        let fast = sizes(&mut piece, 1600, each(2000, 1));
        assert!(of(128 << 10, &fast) > 1200, "{}", of(128 << 10, &fast));
    }

    #[test]
    fn one_hang_of_storage_changes_little() {
        let mut piece = BusyPiece::default();
        sizes(&mut piece, 200, each(2000, 1));
        piece.timed(128 << 10, Duration::from_secs(60));
        let later = sizes(&mut piece, 160, each(2000, 1));
        assert!(of(128 << 10, &later) > 80, "{}", of(128 << 10, &later));

        let mut piece = BusyPiece::default();
        sizes(&mut piece, 200, each(0, 2));
        piece.timed(16 << 10, Duration::from_secs(60));
        let later = sizes(&mut piece, 160, each(0, 2));
        assert!(of(16 << 10, &later) > 80, "{}", of(16 << 10, &later));
    }

    #[test]
    fn the_first_piece_may_be_slow() {
        let mut piece = BusyPiece::default();
        piece.timed(16 << 10, MICROSECOND * 500);
        // 32 µs.
        let all = sizes(&mut piece, 160, each(0, 2));
        assert!(of(16 << 10, &all) > 130, "{}", of(16 << 10, &all));
    }
}
